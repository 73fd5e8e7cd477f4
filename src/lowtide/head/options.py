"""The user's options: memory, accumulation, implementation."""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Literal, get_args

from lowtide.errors import ArgumentTypeError, ArgumentValueError, message

Accumulate = Literal["auto", "float32", "input"]
Backend = Literal["auto", "exp", "row", "torch"]
Gradient = Literal["auto", "forward", "recompute"]
IgnoredTokens = Literal["auto", "skip", "drop", "compute"]
Reduction = Literal["mean", "sum", "none"]  # of the values of tokens


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """How the head trades memory for time. The defaults choose for you; `plan_head` reports the choice.

    Args:
        workspace_mib: Limit of scratch memory in MiB above inputs, outputs and returned gradients: the chunk's logits,
            row sums and [C, D] buffers. The float32 accumulator of the weight's gradient, and under autocast the
            weight's low-precision copy, are not in it; `plan_head` reports them. Never less than one row.
            None: chosen by device.
        accumulate: Where the weight's gradient is summed over chunks: ``"float32"``, ``"input"`` (the weight's own
            dtype: V*D*4 bytes less, and one more rounding per chunk), or ``"auto"``: float32 for more than
            one chunk; on the exponential path and in `linear_divergence`'s kernels more than 8, or 48 if
            ``workspace_mib`` is given. An fp16 weight's is always float32: the sum may not fit fp16 before its scale
            is known.
        backend: ``"auto"`` takes the fastest that fits. An explicit one runs or raises: ``"exp"`` (bfloat16 on
            GPUs of compute capability 9.0 to below 12), ``"row"`` (a kernel over rows of logits, on NVIDIA GPUs with
            Triton), ``"torch"`` (plain PyTorch, on any device).
        gradient: ``"forward"`` computes the gradients along with the loss (three GEMMs), ``"recompute"`` recomputes
            the logits in backward (four), and ``"auto"`` takes the first if the upstream gradient is a scalar or
            the head is frozen; a per-token `linear_divergence` recomputes in any case.
        ignored_tokens: What tokens without loss cost, those with ``ignore_index`` or outside of ``mask``. ``"auto"``:
            nothing on the CPU; on Hopper on the exponential path as ``"skip"`` if there were more than 5% in one of
            the calls before, else as ``"compute"``; elsewhere, and where the vocabulary is sharded, ``"compute"``.
            ``"skip"``: nothing on Hopper on the exponential path, where the device finds them and the host does not
            wait; without any a call takes longer. Elsewhere as ``"auto"``. ``"drop"``: the host waits for the
            device once a pass and drops them before the first GEMM, on every backend. A sequence that is sharded over
            ranks is gathered first, [N, D].
            ``"compute"``: computed and discarded everywhere. `linear_apply` drops them in any case.

        skip: The relative error that the gradients of `linear_cross_entropy`, and of log-probabilities of one target a
            token, are held to, such as 5e-3, above bfloat16's own of 2e-3 to 3e-3; None: no more than that. The
            gradients' GEMMs then leave out tiles of the softmax that carry little, and put means in their place.
            Losses and log-probabilities stay exact. In bfloat16 on GPUs of compute capability 9.0; elsewhere an
            error. See `skip_report` and docs/skipping.md.
        batch_invariant: True: raise where a token's loss, log-probability or entropy could depend on its batch or on
            ``workspace_mib``, that is anywhere but on the exponential path of one Hopper GPU. It changes no kernel: see
            docs/recipes/same-bits.md.

    Raises:
        ArgumentValueError: A value that is none of these, or ``batch_invariant`` with ``skip`` or another backend than
            "exp".
        ArgumentTypeError: ``workspace_mib`` or ``skip`` is not a number, or ``batch_invariant`` no bool.
    """

    workspace_mib: float | None = None
    accumulate: Accumulate = "auto"
    backend: Backend = "auto"
    gradient: Gradient = "auto"
    ignored_tokens: IgnoredTokens = "auto"
    skip: float | None = None
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        numbers = (
            ("workspace_mib", "a number of MiB", math.inf, "a finite number above 0"),
            ("skip", "a relative error", 1, "a number above 0 and below 1"),
        )
        for name, what, end, expected in numbers:
            value: object = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, Real)):
                raise ArgumentTypeError(message(name, f"{what} or None", f"{value!r}"))
            if value is not None and not 0 < float(value) < end:
                raise ArgumentValueError(message(name, f"{expected}, or None", f"{value!r}"))
        names = {"accumulate": Accumulate, "backend": Backend, "gradient": Gradient, "ignored_tokens": IgnoredTokens}
        for name, kind in names.items():
            allowed, got = get_args(kind), getattr(self, name)
            if got not in allowed:
                raise ArgumentValueError(message(name, f"one of {', '.join(map(repr, allowed))}", f"{got!r}"))
        if not isinstance(self.batch_invariant, bool):
            raise ArgumentTypeError(message("batch_invariant", "True or False", repr(self.batch_invariant)))
        if self.batch_invariant and (self.skip is not None or self.backend not in ("auto", "exp")):
            got, hint = f"True with skip={self.skip}, backend={self.backend!r}", "Leave these two out."
            raise ArgumentValueError(message("batch_invariant", "False with another backend or skip", got, hint))

    @property
    def implementation(self) -> str:
        """Return ``backend``, or "invariant" with ``batch_invariant``: what `backends.choose` is asked for."""
        return "invariant" if self.batch_invariant else self.backend


def check_options(options: HeadOptions | None) -> HeadOptions:
    """Return the options, the defaults for None."""
    if options is not None and not isinstance(options, HeadOptions):
        raise ArgumentTypeError(message("options", "lowtide.HeadOptions or None", type(options).__name__))
    return options or _DEFAULT


_DEFAULT = HeadOptions()
