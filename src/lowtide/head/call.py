"""What every function of a head's logits has in common, as its caller gave it and as the loops over chunks read it.

N tokens, D hidden size, V vocabulary, V_r classes of it on this rank (all, unless the vocabulary is sharded).
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lowtide.head.arguments import check_head, is_dtensor, logit_scale_tensor, softcap_number
from lowtide.head.options import HeadOptions
from lowtide.head.ranks.alone import Alone
from lowtide.head.ranks.given import ranks_of
from lowtide.head.ranks.parallel import Ranks
from lowtide.head.scaling import with_trained_scale


class Wanted(NamedTuple):
    """Which gradients are wanted."""

    input: bool
    weight: bool
    bias: bool

    @property
    def head(self) -> bool:
        """Return whether the head itself gets one."""
        return self.weight or self.bias


@dataclass(frozen=True, kw_only=True)
class Head:
    """A final linear layer, its hidden states and what is done to their products, local to this rank.

    Its logits are ``softcap * tanh((input @ weight.T + bias) * scale / softcap)``, each part where there is one.
    """

    input: Tensor  # [..., D]
    weight_VD: Tensor  # this rank's rows
    bias_V: Tensor | None  # wide
    scale: Tensor | None  # scalar, wide
    softcap: float | Tensor | None
    dtype: torch.dtype  # of the GEMMs' operands
    wide: torch.dtype  # of logits, and of what comes of them
    ranks: Ranks | Alone
    options: HeadOptions

    @property
    def tokens(self) -> int:
        """Return N."""
        return math.prod(self.input.shape[:-1])


class HeadCall(NamedTuple):
    """The same as tensors and scalars that an operator takes; a function's own arguments come beside it."""

    input: Tensor  # [..., D]
    linear_weight: Tensor  # [V_r, D]
    linear_bias: Tensor | None  # [V_r]
    logit_scale: Tensor | None  # scalar
    softcap: float | None
    dtype: torch.dtype  # of the GEMMs' operands
    workspace_mib: float | None
    accumulate: str
    backend: str

    @property
    def wide(self) -> torch.dtype:
        """Return the dtype of logits and of what comes of them."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def tokens(self) -> int:
        """Return N."""
        return math.prod(self.input.shape[:-1])  # Size.numel() would make a compiler take N for a constant

    @property
    def frozen(self) -> bool:
        """Return whether neither weight nor bias needs a gradient."""
        return not any(t is not None and t.requires_grad for t in (self.linear_weight, self.linear_bias))

    @property
    def trained(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the tensors that may get a gradient."""
        return self.input, self.linear_weight, self.linear_bias

    def head(self, ranks: Ranks | None, gradient: Literal["auto", "recompute"] = "auto") -> Head:
        """Return it as the loops over chunks read it: what kernels read without strides has none.

        Args:
            ranks: The ranks that share the classes; None: this one has all.
            gradient: "recompute" for a pass whose upstream gradient is not that of its own loss.
        """
        accumulate: Any = self.accumulate
        backend: Any = self.backend
        return Head(
            input=self.input,
            weight_VD=self.linear_weight,
            bias_V=None if self.linear_bias is None else self.linear_bias.to(self.wide).contiguous(),
            scale=None if self.logit_scale is None else scalar_on(self.input.device, self.logit_scale, self.wide),
            softcap=self.softcap,
            dtype=self.dtype,
            wide=self.wide,
            ranks=Alone(self.linear_weight.shape[0]) if ranks is None else ranks,
            options=_options(self.workspace_mib, accumulate, backend, gradient),
        )


def checked_call(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    logit_scale: float | Tensor,
    softcap: float | None,
    options: HeadOptions,
    vocab_shard: object,
) -> tuple[HeadCall, Ranks | Alone]:
    """Check what all functions of the logits get; return it local to this rank, with a scale ready to be trained.

    Raises:
        ArgumentTypeError: As `check_head`, `ranks_of`, `logit_scale_tensor` and `softcap_number` say.
        ArgumentValueError: The same.
        UnsupportedError: As `check_head` says.
    """
    dtype = check_head(input, linear_weight, linear_bias)
    scale = logit_scale_tensor(logit_scale)
    ranks: Ranks | Alone = Alone(linear_weight.shape[0])
    if vocab_shard is not None or is_dtensor(input) or is_dtensor(linear_weight):
        ranks = ranks_of(input, linear_weight, linear_bias, vocab_shard, scale=scale)
        input, linear_weight, linear_bias = ranks.local(input), ranks.local(linear_weight), ranks.local(linear_bias)
        scale = ranks.whole(scale)
    if scale is not None and scale.requires_grad and torch.is_grad_enabled():
        input, linear_bias, scale = with_trained_scale(input, linear_bias, *ranks.factors(scale))
    return HeadCall(
        input=input,
        linear_weight=linear_weight,
        linear_bias=linear_bias,
        logit_scale=scale,
        softcap=softcap_number("softcap", softcap),
        dtype=dtype,
        workspace_mib=options.workspace_mib,
        accumulate=options.accumulate,
        backend=options.backend,
    ), ranks


class CrossEntropyArgs(NamedTuple):
    """What `lowtide.linear_cross_entropy` gets beside the head; labels already shifted."""

    target: Tensor  # [...]
    weight: Tensor | None  # [V_r]
    token_weight: Tensor | None  # [...]
    num_items: Tensor | None  # scalar
    reduction: str
    ignore_index: int
    label_smoothing: float
    z_loss: float


class TokenStatsArgs(NamedTuple):
    """What `lowtide.linear_token_stats` gets beside the head."""

    target: Tensor  # [N, K] int64; K is 0 where there are none
    want: str  # the fields' names, separated by commas
    topk: int
    ignore_index: int

    @property
    def wanted(self) -> frozenset[str]:
        """Return the wanted fields' names."""
        return frozenset(self.want.split(","))


class DivergenceArgs(NamedTuple):
    """What `lowtide.linear_divergence` gets beside the student's head."""

    teacher_input: Tensor | None  # [..., D'], and with it teacher_weight; or topk_ids and topk_logprobs
    teacher_weight: Tensor | None  # [V', D']
    teacher_bias: Tensor | None  # [V']
    topk_ids: Tensor | None  # [N, K] int64
    topk_logprobs: Tensor | None  # [N, K]
    mask: Tensor | None  # [N] bool
    temperature: Tensor | None  # scalar
    num_items: Tensor | None  # scalar
    teacher_softcap: float | None
    teacher_dtype: torch.dtype
    kind: str
    beta: float
    tail: str
    reduction: str


@cache
def _options(workspace_mib: float | None, accumulate: Any, backend: Any, gradient: Any) -> HeadOptions:
    return HeadOptions(workspace_mib=workspace_mib, accumulate=accumulate, backend=backend, gradient=gradient)


def scalar_on(device: torch.device, scalar: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a 0-d tensor on ``device``: a number that lies on the host is filled in, for a copy would wait."""
    if scalar.device.type == "cpu":
        return torch.full((), scalar.item(), dtype=dtype, device=device)
    return scalar.to(device, dtype)
