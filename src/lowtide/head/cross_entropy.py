"""Cross entropy over the logits of the final linear layer, which are never built.

The way of a call on one GPU, in the order of its files: the checks here and in `call`; `nodes`, its operator and what
autograd gets; `terms.cross_entropy`, rows, targets and the `plan`; `exponentials.losses`, the loop over chunks with
their three GEMMs. Where a backend has a chunk's logits instead, the loop is `engine`, and `terms` have the loss.
"""

import math
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from lowtide.arguments import check_device, check_flag, check_index, check_number, check_real, detached
from lowtide.errors import ArgumentValueError, message
from lowtide.head.call import CrossEntropyArgs, Head, check_per_token, check_reduction, check_target, checked_call
from lowtide.head.options import HeadOptions, Reduction
from lowtide.head.plan import choose_gradient
from lowtide.head.ranks import VocabShard
from lowtide.head.terms.cross_entropy import CROSS_ENTROPY


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    token_weight: Tensor | None = None,
    num_items: float | Tensor | None = None,
    shift: bool = False,
    options: HeadOptions | None = None,
    vocab_shard: VocabShard | None = None,
) -> Tensor:
    """Return the cross entropy of ``input @ linear_weight.T`` against ``target``, without the logits in memory.

    With logits ``z = cap((x @ W.T + b) * logit_scale)``, where ``cap(z) = softcap * tanh(z / softcap)``, class weights
    q (1 if not given) and their sum Q, a = ``label_smoothing``, u = ``z_loss`` and ``lse = log(sum_v exp(z_v))``, the
    loss of each valid token (one that is not ignored) is

        (1 - a) * q_y * (lse - z_y) + (a / V) * (Q * lse - sum_v q_v * z_v) + u * lse**2

    times its ``token_weight``. The same as ``F.cross_entropy(F.linear(input, linear_weight, linear_bias), target)``
    with float32 logits. The logits are computed in chunks. It saves for backward the gradients themselves, or only the
    inputs: `plan_head` reports which, and the bytes.

    Args:
        input: Hidden states [..., D], any floating dtype and strides, any number of leading axes.
        linear_weight: [V, D], the output embedding. Outside autocast of the same dtype as ``input``; under autocast
            all are rounded to autocast's dtype for the GEMMs, and gradients have each tensor's own dtype.
        target: Class indices [...] from 0 to V - 1, or ``ignore_index``; an integer dtype.
        linear_bias: [V], or None.
        weight: Class weights [V], or None; not differentiated.
        reduction: ``"mean"`` over valid tokens (over the sum of their class weights if ``weight`` is given),
            ``"sum"``, or ``"none"``: one loss per token, 0 for ignored ones.
        ignore_index: Tokens with this target contribute nothing, even if their hidden state is NaN.
        label_smoothing: From 0 to 1, as in `torch.nn.functional.cross_entropy`.
        z_loss: Factor of the squared logsumexp, added to each valid token's loss; not class weighted.
        softcap: Cap of the logits, above 0, or None.
        logit_scale: Number or 0-d tensor by which the logits are multiplied, before the cap. A tensor that requires
            a gradient gets it, in float16 at the cost of a float32 copy of ``input`` [..., D].
        token_weight: One factor for each token [...], not differentiated and not part of the mean's denominator.
        num_items: Number above 0, or 0-d tensor (not inspected), that replaces the mean's denominator, for
            gradient accumulation. An error with the other reductions.
        shift: Score ``input[..., :-1, :]`` against ``target[..., 1:]`` without cutting the hidden states. "none" then
            returns [..., T - 1]. ``token_weight`` is shifted as ``target`` is.
        options: Memory, accumulation and implementation: see `HeadOptions`.
        vocab_shard: For a sharded vocabulary, whose rows ``linear_weight`` and ``linear_bias`` have on this rank: see
            `VocabShard`. All else is the same on every rank, ``weight`` that of all classes. DTensors need no
            `VocabShard`: ``linear_weight`` and ``linear_bias`` with ``Shard(0)``, ``input`` with ``Replicate()`` or,
            for sequence parallelism, ``Shard`` of an axis of tokens, the others whole.

    Returns:
        Tensor: Scalar, or [...] with reduction "none"; float32, for float64 inputs float64. The mean over no valid
        token is NaN, as in `torch.nn.functional.cross_entropy`; with ``num_items``, and as a sum, it is 0. With a
        sharded vocabulary the loss is the whole one on every rank, and ``input`` gets the whole gradient on every rank
        (of its part of the sequence): no sum over ranks is needed.

    Raises:
        ArgumentValueError: A shape, device or number that does not fit; also a `ValueError`.
        ArgumentTypeError: A dtype that does not fit, or class probabilities as target; also a `TypeError`.
        TargetIndexError: On the CPU, a target that is neither a class nor ``ignore_index``; also an `IndexError`. On
            other devices, where a check would synchronise, such a token's loss and gradients are NaN.
        UnsupportedError: Double backward, forward-mode derivatives, torch.func transforms, or an explicitly requested
            implementation that cannot run; also a `RuntimeError`.

    Note:
        Ignored tokens are dropped before any GEMM on the CPU. On Hopper in bfloat16 the kernels end before them; on
        other devices they are computed and discarded, unless `HeadOptions.ignored_tokens` says otherwise. Results are
        bitwise the same from run to run. Of float32 inputs the GEMMs are PyTorch's, as exact as
        `torch.set_float32_matmul_precision` says.

    Example:
        >>> hidden = torch.randn(2, 5, 16, requires_grad=True)
        >>> head = torch.nn.Linear(16, 1000, bias=False)
        >>> labels = torch.randint(0, 1000, (2, 5))
        >>> linear_cross_entropy(hidden, head.weight, labels, shift=True).backward()
        >>> head.weight.grad.shape
        torch.Size([1000, 16])
    """
    head = checked_call(
        "linear_cross_entropy", input, linear_weight, linear_bias, logit_scale, softcap, options, vocab_shard
    )
    args = CrossEntropyArgs(
        target, weight, token_weight, check_reduction(reduction, num_items), reduction, ignore_index, label_smoothing,
        z_loss,
    )  # fmt: skip
    loss = _computed(head, input, args, shift=shift)["loss"]
    if reduction == "none":
        loss = loss.view(target.shape)
        loss = loss[..., :-1] if shift else loss
    return head.ranks.result(loss)


def mean_and_parts(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None, logit_scale: float | Tensor,
    softcap: float | None, options: HeadOptions | None, vocab_shard: VocabShard | None, num_items: Tensor, **given: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the mean of `linear_cross_entropy`, and what each token adds to it [...], not differentiable, in one pass.

    The second is times ``num_items``, and weighted by ``token_weight``. ``given`` are its other arguments, all but
    ``weight``, ``reduction`` and ``shift``.
    """
    head = checked_call(
        "linear_cross_entropy", input, linear_weight, linear_bias, logit_scale, softcap, options, vocab_shard
    )
    args = CrossEntropyArgs(target, num_items=check_reduction("mean", num_items), each=True, **given)
    found = _computed(head, input, args, shift=False)
    return head.ranks.result(found["loss"]), head.ranks.result(found["each"].view(target.shape))


def _computed(head: Head, input: Tensor, args: CrossEntropyArgs, *, shift: bool) -> dict[str, Tensor]:
    """Check the arguments besides the head, and compute; ``input`` is the caller's."""
    target, weight, token_weight, ranks = args.target, args.weight, args.token_weight, head.ranks
    check_target(input, target, head.weight_VD)
    check_flag("shift", shift)
    if weight is not None:
        if check_real("weight", weight).shape != (ranks.vocab,):
            got = f"shape {list(weight.shape)}"
            raise ArgumentValueError(message("weight", f"one class weight for each of {ranks.vocab}", got))
        check_device("weight", weight, input)
        weight = ranks.whole(detached(weight))
    if token_weight is not None:
        check_per_token("token_weight", token_weight, input)
        token_weight = ranks.whole(detached(token_weight))
    if shift and target.dim() == 0:
        raise ArgumentValueError(message("input", "at least two axes [T, D] with shift=True", str(list(input.shape))))
    ignore_index, target = check_index("ignore_index", args.ignore_index), ranks.whole(target).long()
    if shift:
        target = _shifted(target, ignore_index)
        token_weight = None if token_weight is None else _shifted(token_weight, 0)
    args = CrossEntropyArgs(
        target, weight, token_weight, args.num_items, args.reduction, ignore_index,
        label_smoothing=check_number("label_smoothing", args.label_smoothing, 0, 1),
        z_loss=check_number("z_loss", args.z_loss, -math.inf, math.inf, above=True), each=args.each,
    )  # fmt: skip
    recompute = choose_gradient(head.gradient, args.reduction, head.frozen) == "recompute"
    return CROSS_ENTROPY(head, args, recompute=recompute)


def _shifted(x: Tensor, last: int) -> Tensor:
    """Return ``x`` moved one step to the left along its last axis, with ``last`` at the end."""
    return pad(x[..., 1:], (0, 1), value=last) if x.shape[-1] else x
