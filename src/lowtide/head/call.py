"""The arguments that all functions of a head's logits share: checks, and the records that the loops read and fill.

N tokens, D hidden size, V vocabulary, V_r classes of it on this rank (all, unless the vocabulary is sharded).
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from lowtide.arguments import (
    check_device,
    check_name,
    check_number,
    check_real,
    check_tensor,
    detached,
    is_dtensor,
    operand_dtype,
    positive_scalar,
    refuse_transforms,
    scalar_tensor,
)
from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError, message
from lowtide.graph import node
from lowtide.head.backends import skips_ignored
from lowtide.head.options import HeadOptions, Reduction, check_options
from lowtide.head.ranks import Alone, Ranks, ranks_of
from lowtide.head.rows import Rows, positions

NAMES = ("input", "linear_weight", "linear_bias")
REDUCTIONS = get_args(Reduction)
SKIPPING = ("linear_cross_entropy", "linear_logprobs", "linear_token_stats")  # functions whose gradients may skip tiles
NAIVE = "torch.nn.functional.cross_entropy(torch.nn.functional.linear(input, linear_weight, linear_bias), target)"
SWAPPED = "Are {} and {} swapped? The hidden states come first here; Liger's functions take the weight first."


class Wanted(NamedTuple):
    """Which gradients are needed."""

    input: bool
    weight: bool
    bias: bool


@dataclass(kw_only=True)
class Gradients:
    """The gradients that a pass sums, each None if it is not needed."""

    input_ND: Tensor | None = None
    weight_VD: Tensor | None = None
    bias_V: Tensor | None = None

    def put_input(self, rows: slice | Tensor, wide_CD: Tensor) -> None:
        """Write rows of the input's gradient."""
        assert self.input_ND is not None
        if isinstance(rows, slice):
            self.input_ND[rows].copy_(wide_CD)
        else:
            self.input_ND.index_copy_(0, rows, wide_CD.to(self.input_ND.dtype))


def matmul_into(a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
    """Write ``a @ b`` into ``out``, or add it: summed in float32, rounded once."""
    wider: dict[str, Any] = {} if out.dtype == a.dtype else {"out_dtype": out.dtype}
    if add:
        torch.addmm(out, a, b, **wider, out=out)
    else:
        torch.mm(a, b, **wider, out=out)


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a gradient waits for its upstream factor."""
    return torch.float32 if dtype == torch.float16 else dtype


class Head(NamedTuple):
    """A final linear layer, its hidden states, and the operations on its logits, local to this rank.

    Its logits are ``softcap * tanh((input @ weight.T + bias) * scale / softcap)``, each part optional.
    The fields before the ranks are arguments of its operators; a function's own arguments are in another record.
    """

    input: Tensor  # [..., D]
    weight_VD: Tensor  # this rank's rows
    bias_V: Tensor | None  # wide where it is `prepared`, and so is the scale
    scale: Tensor | None  # scalar
    softcap: float | Tensor | None
    dtype: torch.dtype  # of the GEMMs' operands
    workspace_mib: float | None
    accumulate: str
    backend: str
    ignored_tokens: str
    skip: float  # the error that the gradients may have: see `HeadOptions`; 0: none
    ranks: Ranks | Alone  # which share the classes
    gradient: str = "auto"  # when gradients are computed: see `HeadOptions`
    remembered: Any = None  # of the weight, where a call skips tiles

    @property
    def wide(self) -> torch.dtype:
        """Return the dtype of logits and of results."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def tokens(self) -> int:
        """Return N."""
        return math.prod(self.input.shape[:-1])  # Size.numel() would make a compiler take N for a constant

    @property
    def frozen(self) -> bool:
        """Return whether neither weight nor bias needs a gradient, on any rank."""
        return self.ranks.alone and not any(t is not None and t.requires_grad for t in (self.weight_VD, self.bias_V))

    @property
    def drops_tokens(self) -> bool:
        """Return whether tokens that count for nothing are dropped first: on the CPU, or where the host may wait.

        Of ranks a request only: with it how much they exchange depends on the targets.
        """
        if self.ignored_tokens in ("auto", "skip"):
            return self.input.device.type == "cpu" and self.ranks.alone
        return self.ignored_tokens == "drop"

    def positions_of(self, valid_N: Tensor) -> Tensor | None:
        """Return where the tokens are that a pass computes, those ``valid_N`` if it drops others; None: everywhere."""
        return positions(valid_N) if self.drops_tokens else None

    def prepared(self) -> "Head":
        """Return it as the loops over chunks read it: what kernels read without strides has none."""
        return self._replace(
            bias_V=None if self.bias_V is None else self.bias_V.to(self.wide).contiguous(),
            scale=None if self.scale is None else scalar_on(self.input.device, self.scale, self.wide),
        )


def gradient_buffers(
    head: Head, rows: Rows, plan: Any, wanted: tuple[bool, bool, bool], *, stored: bool = False
) -> Gradients:
    """Return memory for the needed gradients of input, weight and bias, uninitialised where chunks will fill it.

    ``plan`` is a `HeadPlan`. ``stored``: the upstream gradient, and with it a GradScaler's factor, is not known yet.
    """
    x, (V, D), wide, into = head.input, head.weight_VD.shape, head.wide, Gradients()
    if wanted[0]:
        some = rows.index is not None and not head.ranks.spread  # the other hidden states are in no chunk
        new = x.new_zeros if some else x.new_empty
        into.input_ND = new(head.tokens, D, dtype=stored_dtype(x.dtype) if stored else x.dtype)
    if wanted[1]:
        dtype = wide if plan.accumulate == "float32" else head.weight_VD.dtype
        into.weight_VD = (x.new_empty if plan.chunks else x.new_zeros)(V, D, dtype=dtype)
    if wanted[2]:
        into.bias_V = x.new_zeros(V, dtype=wide)
    return into


def checked_call(
    function: str, input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, logit_scale: float | Tensor,
    softcap: float | None, options: HeadOptions | None, vocab_shard: object, *, gathered: bool = False,
) -> Head:  # fmt: skip
    """Check what all functions of the logits get; return it local to this rank, with a scale ready to be trained.

    ``gathered``: hidden states that are spread over ranks are gathered first, and not chunk by chunk.
    """
    refuse_transforms(function, input, linear_weight, linear_bias, logit_scale, instead=NAIVE)
    options = check_options(options)
    dtype = check_head(input, linear_weight, linear_bias)
    is_one = type(logit_scale) in (int, float) and logit_scale == 1
    scale = None if is_one else scalar_tensor("logit_scale", logit_scale, torch.float64)
    ranks: Ranks | Alone = Alone(linear_weight.shape[0])
    if vocab_shard is not None or is_dtensor(input) or is_dtensor(linear_weight):
        gathered = gathered or options.ignored_tokens == "drop"  # chunks of valid tokens alone have no equal parts
        ranks = ranks_of(input, linear_weight, linear_bias, vocab_shard, gathered=gathered)
        input, linear_weight, linear_bias = ranks.hidden(input), ranks.local(linear_weight), ranks.local(linear_bias)
        scale = ranks.whole(scale)
    if options.skip is not None and not (function in SKIPPING and ranks.alone):
        why = "the vocabulary is sharded" if function in SKIPPING else "only the loss and log-probabilities skip tiles"
        raise UnsupportedError(message("options", "skip=None", "skip above 0", f"In {function}: {why}."))
    if options.batch_invariant and not (ranks.alone and skips_ignored(input.device)):
        why = "Only where one Hopper GPU has the whole vocabulary is a token's value known to be the same in any batch."
        raise UnsupportedError(message("options", "batch_invariant=False", "batch_invariant=True", why))
    if ranks.vocab == 0:
        raise ArgumentValueError(message("linear_weight", "at least one class", _shape(linear_weight)))
    if scale is not None and scale.requires_grad and torch.is_grad_enabled():
        input, linear_bias, scale = with_trained_scale(input, linear_bias, *ranks.factors(scale))
    asked = options.workspace_mib, options.accumulate, options.implementation, options.ignored_tokens
    softcap, skip = check_softcap("softcap", softcap), options.skip or 0.0
    return Head(input, linear_weight, linear_bias, scale, softcap, dtype, *asked, skip, ranks, options.gradient)


def check_head(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, names: tuple[str, str, str] = NAMES
) -> torch.dtype:
    """Check hidden states [..., D], weight [V, D] and bias [V]; return the dtype that the GEMMs' operands take."""
    input_name, weight_name, bias_name = names
    check_tensor(input_name, input)
    check_tensor(weight_name, linear_weight)
    if is_dtensor(linear_weight) and not is_dtensor(input):
        # With FSDP2 each rank has its own tokens, and the weight's gradient is a sum over all of them; under tensor
        # parallelism all have the same. A plain tensor does not show which.
        mesh: Any = linear_weight
        got = f"a DTensor {mesh.placements} on {mesh.device_mesh}"
        hint = (
            "Where fully_shard shards it: use it inside the forward of the module that was sharded, or gather that"
            " unit first with .unshard(). full_tensor() would give wrong gradients in silence. Where the vocabulary"
            " is sharded for tensor parallelism: make input a DTensor on the same mesh, Replicate() or Shard of an"
            " axis of tokens."
        )
        raise ArgumentTypeError(message(weight_name, "a plain tensor, as input is", got, hint))
    if linear_weight.dim() != 2:
        hint = SWAPPED.format(*names) * (input.dim() == 2 and linear_weight.shape[-1:] == input.shape[-1:])
        raise ArgumentValueError(message(weight_name, "shape [V, D]", _shape(linear_weight), hint))
    V, D = linear_weight.shape
    if input.dim() == 0 or input.shape[-1] != D:
        expected = f"shape [..., {D}], as {weight_name} is [{V}, {D}]"
        raise ArgumentValueError(message(input_name, expected, _shape(input)))
    dtype = operand_dtype(input)
    for name, tensor in zip(names, (input, linear_weight, linear_bias), strict=True):
        if tensor is None:
            continue
        if not check_tensor(name, tensor).is_floating_point():
            raise ArgumentTypeError(message(name, "a floating-point dtype", str(tensor.dtype)))
        check_device(name, tensor, input, input_name)
        if operand_dtype(tensor) != dtype:
            hint = "Cast one of them, or run under torch.autocast."
            raise ArgumentTypeError(message(name, f"dtype {input.dtype}, as {input_name} has", str(tensor.dtype), hint))
    if linear_bias is not None and linear_bias.shape != (V,):
        expected = f"shape [{V}], as {weight_name} is [{V}, {D}]"
        raise ArgumentValueError(message(bias_name, expected, _shape(linear_bias)))
    return dtype


def check_target(input: Tensor, target: Tensor, linear_weight: Tensor, *, several: bool = False) -> None:
    """Check class indices [...] against hidden states [..., D]; with ``several`` also [..., K], K of them a token."""
    check_tensor("target", target)
    if target.is_floating_point() or target.is_complex():
        expected = f"class indices, an integer tensor of shape {list(input.shape[:-1])}"
        hint = (
            "For class probabilities use lowtide.linear_apply with your own function of the logits,"
            " lowtide.linear_divergence with a teacher, or lowtide.losses.soft_target_loss with a few classes a token."
        )
        raise ArgumentTypeError(message("target", expected, f"{target.dtype} of shape {_shape(target)}", hint))
    if target.dtype == torch.bool:
        raise ArgumentTypeError(message("target", "class indices, an integer tensor", "torch.bool"))
    several &= target.dim() == input.dim()
    if (target.shape[:-1] if several else target.shape) != input.shape[:-1] or (several and target.shape[-1] == 0):
        expected, K = f"shape {list(input.shape[:-1])}", axes_and(input, "K")
        expected = f"{expected} or {K} with K above 0" if several else expected
        hint = SWAPPED.format(*NAMES) * (target.shape[:1] == linear_weight.shape[:1])
        raise ArgumentValueError(message("target", f"{expected}, as input is {_shape(input)}", _shape(target), hint))
    check_device("target", target, input)


def check_per_token(name: str, value: Tensor, input: Tensor) -> None:
    """Check a tensor [...] with one real number for each of the hidden states [..., D]."""
    if check_real(name, value).shape != input.shape[:-1]:
        expected = f"shape {list(input.shape[:-1])}, as input is {_shape(input)}"
        raise ArgumentValueError(message(name, expected, _shape(value)))
    check_device(name, value, input)


def check_mask(mask: Tensor | None, input: Tensor, expected: str) -> None:
    """Check a mask of the tokens, bool [...] or None."""
    if mask is not None:
        if check_tensor("mask", mask).dtype != torch.bool:
            raise ArgumentTypeError(message("mask", expected, str(mask.dtype)))
        check_per_token("mask", mask, input)


def check_reduction(reduction: str, num_items: float | Tensor | None) -> Tensor | None:
    """Check a reduction; return what a mean is divided by as a 0-d tensor without a gradient, None for None."""
    check_name("reduction", reduction, REDUCTIONS)
    if num_items is None:
        return None
    if reduction != "mean":
        expected = f"None with reduction={reduction!r}"
        raise ArgumentValueError(message("num_items", expected, f"{num_items!r}", "Only a mean is divided."))
    return detached(positive_scalar("num_items", num_items, torch.float64))


def check_softcap(name: str, softcap: object) -> float | None:
    """Return a soft cap, a finite number above 0, or None."""
    return None if softcap is None else check_number(name, softcap, 0, math.inf, above=True)


def axes_and(input: Tensor, last: object) -> str:
    """Return in words the shape of what has ``last`` numbers for each of the hidden states."""
    return f"[{''.join(f'{size}, ' for size in input.shape[:-1])}{last}]"


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


class CrossEntropyArgs(NamedTuple):
    """The arguments of `lowtide.linear_cross_entropy` besides the head; labels already shifted."""

    target: Tensor  # [...]
    weight: Tensor | None = None  # [V]
    token_weight: Tensor | None = None  # [...]
    num_items: Tensor | None = None  # scalar
    reduction: str = "mean"
    ignore_index: int = -100
    # not 0.0, of which torch.compile(dynamic=True) makes a variable, and fails where two calls have it
    label_smoothing: float = 0
    z_loss: float = 0
    mask: Tensor | None = None  # [N, V] bool: classes that a token's distribution lacks, where they are no target
    each: bool = False  # whether each token's part of the sum is returned beside it


class TokenStatsArgs(NamedTuple):
    """The arguments of `lowtide.linear_token_stats` besides the head."""

    target: Tensor  # [N, K] int64; K is 0 where there are none
    want: str  # the fields' names, separated by commas
    topk: int
    ignore_index: int
    mask: Tensor | None = None  # [N, V] bool: classes that a token's distribution lacks, where they are no target

    @property
    def wanted(self) -> frozenset[str]:
        """Return the requested fields' names."""
        return frozenset(self.want.split(","))


class SupportArgs(NamedTuple):
    """The arguments of `lowtide.linear_token_stats` with a set of classes for each token, besides the head."""

    target: Tensor  # [N, T] int64; T is 0 where there are none
    ids: Tensor  # [N, K] int64; -1: padding
    want: str  # the fields' names, separated by commas
    ignore_index: int

    @property
    def wanted(self) -> frozenset[str]:
        """Return the requested fields' names."""
        return frozenset(self.want.split(","))


class DivergenceArgs(NamedTuple):
    """The arguments of `lowtide.linear_divergence` besides the student's head."""

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


def scalar_on(device: torch.device, scalar: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a 0-d tensor on ``device``: a number that lies on the host is filled in, for a copy would wait."""
    if scalar.device.type == "cpu":
        return torch.empty((), dtype=dtype, device=device).fill_(scalar)
    return scalar.to(device, dtype)


def with_trained_scale(
    input: Tensor, linear_bias: Tensor | None, of_input: Tensor, of_bias: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return hidden states, bias and logit scale with which the scale gets its gradient.

    With m the scale and g the logits' gradient, ``dX = m g W`` and ``db = m sum g``: the scale's own gradient, ``sum_nv
    g_nv (x_n w_v + b_v)``, is ``(sum X dX + sum b db) / m``, and no number of the logits is needed for it. Half
    precision would lose it where a GradScaler's factor takes dX out of fp16's range, or with the few numbers of a bias:
    these are copied to float32. ``of_input`` and ``of_bias`` are the scale, which get the gradient of each part.
    """
    if input.dtype == torch.float16:
        input = input.float()
    if linear_bias is not None and linear_bias.dtype.itemsize < 4:
        linear_bias = linear_bias.float()
    carry: Any = _CARRIES_SCALE.apply
    linear_bias = None if linear_bias is None else carry(linear_bias, of_bias)
    return carry(input, of_input), linear_bias, _not_zero(of_input.detach())


def _not_zero(scale: Tensor) -> Tensor:
    """Return a scale to divide by: in place of 0 a number with which all logits are as good as 0."""
    scale = scale.to(torch.promote_types(scale.dtype, torch.float32))
    return scale.where(scale != 0, 2.0**-64)  # torch.compile(dynamic=True) would make a variable of a global number


def _pass_on(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
    """Pass on a tensor that is scaled later."""
    ctx.save_for_backward(x, scale)
    return x.view_as(x)


def _of_scale(ctx: Any, upstream: Tensor) -> Any:
    """Return the scale's gradient from the tensor's."""
    x, scale = ctx.saved_tensors
    # what counts for nothing may be NaN, or a bias -inf, and times 0 that is not 0
    product = (upstream.to(torch.promote_types(x.dtype, torch.float32)) * x).where(upstream != 0, 0).sum()
    divisor = _not_zero(scale)
    of_scale = (product.to(divisor.device) / divisor).to(scale.dtype)
    return (upstream if ctx.needs_input_grad[0] else None, of_scale), (x, scale)


_CARRIES_SCALE = node("CarriesScale", "a trained logit_scale", _pass_on, _of_scale)
