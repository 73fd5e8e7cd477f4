"""Which implementation of the head runs, and why: pure functions of devices, dtypes and sizes."""

import torch

from lowtide.errors import UnsupportedError, message
from lowtide.kernel_launch import why_no_triton

HOPPER = (9, 0)
TOO_SMALL = (12, 0)  # GPUs for workstations, whose shared memory does not hold the tiles
MOST_TARGETS = 64  # a token, for the exponential path: each is a dot product of its own
MOST_HIGHEST = 64  # logits of a token, for the exponential path: the tiles that may contain them are recomputed
NOT_OF_MASKED = "its sums are over tiles of all classes, and each token's distribution lacks others"
NOT_OF_SHARDS = "its kernels need all classes on one rank; only cross entropy's and statistics' of 'exp' do not"

_WHY = {  # the first implementation of each kind of work runs
    "cross entropy": "bfloat16 on Hopper or newer: the logits' GEMM writes exponentials",
    "statistics": "bfloat16 on Hopper or newer: the logits' GEMM leaves each tile's sums",
    "sets": "kernels over the sets' rows of the weight",
    "divergence": "kernels over rows of both sides' logits",
    "linear_apply": "a function of the logits gets them from plain PyTorch",
}


def choose(work: str, asked: str, **why_not: str | None) -> tuple[str, str]:
    """Return the implementation that runs, "exp", "row" or "torch", and why.

    ``asked`` is `HeadOptions.backend`, or "invariant": only "exp" is. ``why_not`` says why each implementation that
    exists for this work cannot run, or None, the fastest first; "torch" can. An explicit one that cannot is an error.
    """
    reason, can = _WHY[work], ("auto", *why_not, "torch")
    if asked == "invariant":
        if against := why_not.get("exp", f"no kernel for {work} has this promise"):
            raise UnsupportedError(message("options", "batch_invariant=False", "batch_invariant=True", f"{against}."))
        return "exp", reason
    against = why_not.get(asked) if asked in can else f"its kernels are not for {work}"
    if against:
        *names, last = (repr(name) for name in can if name != asked)
        raise UnsupportedError(message("backend", f"{', '.join(names)} or {last}", repr(asked), f"{against}."))
    if why_not and asked != "auto":
        return asked, "requested explicitly"
    for name, found in why_not.items():
        if found is None:
            return name, reason
        reason = f"not {name}: {found}"
    return "torch", reason


def why_not_exp(
    device: torch.device,
    dtype: torch.dtype,
    D: int,
    V: int,
    *,
    capped_and_smoothed: bool = False,  # whether the loss has both a soft cap and label smoothing
    weight_fits: bool = True,  # whether the weight's rows lie one after another, at 16-byte addresses
    targets: int = 1,  # per token
    highest: int = 0,  # how many of a token's highest logits are requested
    capability: tuple[int, int] | None = None,  # of the GPU being planned for, where it is not this machine's
) -> str | None:
    """Return why the exponential path cannot run, or None if it can."""
    no_triton = why_no_triton(device)
    if no_triton or dtype != torch.bfloat16:
        return no_triton or f"exponentials without a maximum need bfloat16's range, and the operands are {dtype}"
    gpu = capability or _capability(device)
    reasons = {
        f"its loads and tiles need compute capability 9.0 to below 12, and this GPU has {gpu}": not HOPPER
        <= gpu
        < TOO_SMALL,
        f"TMA takes rows whose length is a multiple of 16 bytes, and the hidden size is {D}": D < 8 or D % 8 > 0,
        "the vocabulary is empty": V < 1,
        "TMA takes rows that start at multiples of 16 bytes, and the weight's do not": not weight_fits,
        "with a soft cap, label smoothing bears on every logit in another way": capped_and_smoothed,
        f"its kernels take {MOST_TARGETS} targets a token, and there are {targets}": targets > MOST_TARGETS,
        f"its kernels find the {MOST_HIGHEST} highest logits of a token, not {highest}": highest > MOST_HIGHEST,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def skips_ignored(device: torch.device, capability: tuple[int, int] | None = None) -> bool:
    """Return whether the exponential path's kernels end before ignored tokens: all that it runs, on Hopper."""
    if (capability or _capability(device)) != HOPPER:
        return False
    if capability is not None or device.type != "cuda" or not torch.cuda.is_available():
        return device.type == "cuda"  # a plan for such a GPU
    from lowtide.head.kernels.hopper import runs_on

    return runs_on(device)


def why_not_row(device: torch.device, dtype: torch.dtype, V: int, *, topk: bool = False) -> str | None:
    """Return why the row kernel cannot run, or None if it can; ``topk``: whether a teacher is known by its top k."""
    reason = why_no_triton(device)
    if reason is None and dtype not in (torch.float32, torch.bfloat16, torch.float16):
        reason = f"its kernel computes in float32, and the operands are {dtype}"
    if reason is None and V < 1:
        reason = "the vocabulary is empty"
    return reason or ("its kernels read a teacher's whole logits, and its top k is given" if topk else None)


def _capability(device: torch.device) -> tuple[int, int]:
    """Return the GPU's compute capability; without one, that of the GPU being planned for: Hopper."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else HOPPER
