"""What a call of `linear_apply` is about: its settings, tensors, and which gradients they need and get.

N tokens, n of them computed (masked ones are dropped), C rows of a chunk, c of a piece, D hidden size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowtide.head.gradients import Gradients
from lowtide.head.head_plan import HeadPlan
from lowtide.head.rows import rows_are_viewable, take_leading
from lowtide.head.user_function.function import UserFunction


@dataclass(frozen=True, kw_only=True)
class ApplyCall:
    """What `linear_apply` was asked, validated; the tensors that autograd watches come beside it, as `Tensors`."""

    function: UserFunction
    plan: HeadPlan
    logit_scale: Tensor | None  # scalar, wide, without a gradient
    softcap: float | None
    dtype: torch.dtype  # of the GEMMs' operands
    wide: torch.dtype  # of the logits
    token_args: int  # how many
    gradient: str  # HeadOptions.gradient


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """The tensors of a call."""

    input: Tensor  # [..., D]
    weight_VD: Tensor
    bias_V: Tensor | None
    index: Tensor | None  # [n] positions of the rows that are computed; None: all
    token_args: tuple[Tensor, ...]  # [..., *]
    params: tuple[Tensor, ...]

    @classmethod
    def of(cls, call: ApplyCall, tensors: Sequence[Tensor | None]) -> "Tensors":
        """Return them from the order in which autograd has them."""
        x, w, b, index, *rest = tensors
        assert x is not None
        assert w is not None
        found = tuple(t for t in rest if t is not None)
        args, params = found[: call.token_args], found[call.token_args :]
        return cls(input=x, weight_VD=w, bias_V=b, index=index, token_args=args, params=params)

    @property
    def leading(self) -> torch.Size:
        """The axes before the hidden size."""
        return self.input.shape[:-1]

    @property
    def rows(self) -> int:
        """How many rows are computed."""
        return self.leading.numel() if self.index is None else self.index.numel()


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Which of a call's tensors get a gradient."""

    input: bool
    weight: bool
    bias: bool
    token_args: tuple[bool, ...]
    params: tuple[bool, ...]

    @classmethod
    def of(cls, call: ApplyCall, flags: Sequence[bool]) -> "Needs":
        """Return them from the order in which autograd has the tensors."""
        x, w, b, _, *rest = flags
        split = call.token_args
        return cls(input=x, weight=w, bias=b, token_args=tuple(rest[:split]), params=tuple(rest[split:]))

    @property
    def logits(self) -> bool:
        """Whether the logits' gradient is needed for any."""
        return self.input or self.weight or self.bias


class Rows:
    """A tensor with a row for each token, of which rows among the n are taken.

    Args:
        whole: [..., *].
        tensors: Of the call.
    """

    def __init__(self, whole: Tensor, tensors: Tensors) -> None:
        self.index, self.axes, self.whole = tensors.index, len(tensors.leading), whole.detach()
        if self.index is None and self.axes != 1 and rows_are_viewable(whole, self.axes):
            self.axes, self.whole = 1, self.whole.view(tensors.rows, *whole.shape[self.axes :])

    def __getitem__(self, part: slice) -> Tensor:
        return take_leading(self.whole, self.axes, self.index, part)


@dataclass(kw_only=True)
class Totals(Gradients):
    """Gradients as they add up over chunks, None where nobody needs one; the bias's may be [P, V], parts of a sum."""

    token_args: list[Tensor | None] = field(default_factory=list)
    params: list[Tensor | None] = field(default_factory=list)


def put_rows(total: Tensor, rows_c: Tensor, index: Tensor | None, part: slice) -> None:
    """Write rows [c, ...] to their places in ``total``, contiguous [N, ...] or [..., *]."""
    if not rows_c.numel():
        return  # a view of nothing has no one shape
    flat = total.view(-1, *rows_c.shape[1:])
    if index is None:
        flat[part].copy_(rows_c)
    else:
        flat.index_copy_(0, index[part], rows_c.to(total.dtype))


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which many values of ``dtype`` are summed."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def has_numbers(x: Tensor) -> bool:
    """Return whether a tensor holds numbers, and not their shapes alone."""
    return type(x) in (Tensor, torch.nn.Parameter) and x.device.type != "meta"
