"""Which implementation of the head runs, and why: pure functions of devices, dtypes and sizes."""

from functools import cache
from importlib.util import find_spec

import torch

from lowtide.errors import UnsupportedError, message
from lowtide.head.options import HeadOptions

HOPPER = (9, 0)
TOO_SMALL = (12, 0)  # GPUs for workstations, whose shared memory does not hold the tiles
MOST_TARGETS = 64  # a token, for the exponential path: each is a dot product of its own
MOST_HIGHEST = 64  # logits of a token, for the exponential path: the tiles that may hold them are computed once more


def choose_backend(
    options: HeadOptions,
    device: torch.device,
    dtype: torch.dtype,
    D: int,
    V: int,
    *,
    capped_and_smoothed: bool = False,
    weight_fits: bool = True,
    capability: tuple[int, int] | None = None,
) -> tuple[str, str]:
    """Return the implementation that runs, and why.

    Args:
        options: ``backend`` forces one.
        device: Where the tensors are.
        dtype: Of the GEMMs' operands.
        D: Hidden size.
        V: Vocabulary.
        capped_and_smoothed: Whether the loss has both a soft cap and label smoothing.
        weight_fits: Whether the weight's rows lie one after another, at 16-byte addresses.
        capability: Compute capability of the GPU being planned for, where it is not this machine's.

    Returns:
        tuple[str, str]: "exp", "row" or "torch", and the reason.

    Raises:
        UnsupportedError: The one asked for by name cannot run.
    """
    against_exp = why_not_exp(
        device, dtype, D, V, capped_and_smoothed=capped_and_smoothed, weight_fits=weight_fits, capability=capability
    )
    against_row = why_not_row(device, dtype, V)
    if options.backend == "exp" and against_exp:
        raise UnsupportedError(message("backend", "'auto', 'row' or 'torch'", "'exp'", f"{against_exp}."))
    if options.backend == "row" and against_row:
        raise UnsupportedError(message("backend", "'auto', 'exp' or 'torch'", "'row'", f"{against_row}."))
    if options.backend != "auto":
        return options.backend, "asked for by name"
    if not against_exp:
        return "exp", "bfloat16 on Hopper or newer: the logits' GEMM writes exponentials"
    if not against_row:
        return "row", f"not exp: {against_exp}"
    return "torch", f"not row: {against_row}"


def choose_stats_backend(
    options: HeadOptions,
    device: torch.device,
    dtype: torch.dtype,
    D: int,
    V: int,
    *,
    targets: int,
    topk: int,
    weight_fits: bool = True,
) -> tuple[str, str]:
    """Return the backend of `linear_token_stats`, "exp" or "torch", and why; arguments as in `choose_backend`.

    Args:
        options: See there.
        device: See there.
        dtype: See there.
        D: See there.
        V: See there.
        targets: How many a token.
        topk: How many of the highest logits are wanted.
        weight_fits: See there.

    Raises:
        UnsupportedError: The one asked for by name cannot run.
    """
    against = why_not_exp(device, dtype, D, V, weight_fits=weight_fits)
    if against is None and targets > MOST_TARGETS:
        against = f"its kernels take {MOST_TARGETS} targets a token, and there are {targets}"
    if against is None and topk > MOST_HIGHEST:
        against = f"its kernels find the {MOST_HIGHEST} highest logits of a token, and {topk} are wanted"
    if options.backend == "exp" and against:
        raise UnsupportedError(message("backend", "'auto' or 'torch'", "'exp'", f"{against}."))
    if options.backend == "row":
        hint = "Its kernel computes one log-probability a token, and nothing else."
        raise UnsupportedError(message("backend", "'auto', 'exp' or 'torch'", "'row'", hint))
    if options.backend != "auto":
        return options.backend, "asked for by name"
    if against:
        return "torch", f"not exp: {against}"
    return "exp", "bfloat16 on Hopper or newer: the logits' GEMM leaves each tile's sums"


def choose_divergence_backend(
    options: HeadOptions, device: torch.device, dtype: torch.dtype, V: int, *, topk: bool
) -> tuple[str, str]:
    """Return the backend of `linear_divergence`, "row" or "torch", and why; arguments as in `choose_backend`.

    Args:
        options: See there.
        device: See there.
        dtype: See there.
        V: See there.
        topk: Whether the teacher is known by its top k.

    Raises:
        UnsupportedError: The one asked for by name cannot run.
    """
    against = why_not_row(device, dtype, V)
    if against is None and topk:
        against = "its kernels read a teacher's whole logits, and its top k is given"
    if options.backend == "exp":
        hint = "A divergence needs both sides' logits, which that backend never has."
        raise UnsupportedError(message("backend", "'auto', 'row' or 'torch'", "'exp'", hint))
    if options.backend == "row" and against:
        raise UnsupportedError(message("backend", "'auto' or 'torch'", "'row'", f"{against}."))
    if options.backend != "auto":
        return options.backend, "asked for by name"
    if against:
        return "torch", f"not row: {against}"
    return "row", "kernels over rows of both sides' logits"


def choose_backend_of_function(options: HeadOptions) -> tuple[str, str]:
    """Return the implementation that hands logits to a user's function, and why.

    Raises:
        UnsupportedError: Another one was asked for by name.
    """
    if options.backend not in ("auto", "torch"):
        hint = "Its kernels compute cross entropy; fn is plain PyTorch."
        raise UnsupportedError(message("backend", "'auto' or 'torch' for linear_apply", f"{options.backend!r}", hint))
    return "torch", "a function of the logits gets them from plain PyTorch"


def why_not_exp(
    device: torch.device,
    dtype: torch.dtype,
    D: int,
    V: int,
    *,
    capped_and_smoothed: bool = False,
    weight_fits: bool = True,
    capability: tuple[int, int] | None = None,
) -> str | None:
    """Return why the exponential path cannot run, or None if it can. Arguments as in `choose_backend`."""
    no_triton = why_no_triton(device)
    if no_triton:
        return no_triton
    if dtype != torch.bfloat16:
        return f"exponentials without a maximum need bfloat16's range, and the operands are {dtype}"
    capability = capability or _capability(device)
    if not HOPPER <= capability < TOO_SMALL:
        return f"its loads and tiles need compute capability 9.0 to below 12, and this GPU has {capability}"
    if D < 8 or D % 8:
        return f"TMA takes rows whose length is a multiple of 16 bytes, and the hidden size is {D}"
    if V < 1:
        return "the vocabulary is empty"
    if not weight_fits:
        return "TMA takes rows that start at multiples of 16 bytes, and the weight's do not"
    if capped_and_smoothed:
        return "with a soft cap, label smoothing bears on every logit in another way"
    return None


def why_not_row(device: torch.device, dtype: torch.dtype, V: int) -> str | None:
    """Return why the row kernel cannot run, or None if it can. Arguments as in `choose_backend`."""
    no_triton = why_no_triton(device)
    if no_triton:
        return no_triton
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"its kernel computes in float32, and the operands are {dtype}"
    return "the vocabulary is empty" if V < 1 else None


def why_no_triton(device: torch.device) -> str | None:
    """Return why no Triton kernel can run on ``device``, or None if they can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"its kernels are for NVIDIA GPUs, and the tensors are on {device.type}"
    if torch.cuda.is_available() and not _has_triton():  # without a GPU this is a plan for a machine that has both
        return "Triton is not installed"
    return None


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _capability(device: torch.device) -> tuple[int, int]:
    """Return the GPU's compute capability; where there is none to ask, that of the GPU being planned for: Hopper."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else HOPPER
