"""Multi-token prediction: heads that predict further and further ahead, within documents.

K heads, T tokens of a sequence, D hidden size, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lowtide.arguments import check_device, check_index, check_tensor, detached, operand_dtype, positive_scalar
from lowtide.errors import ArgumentTypeError, ArgumentValueError, message
from lowtide.head.call import scalar_on
from lowtide.head.cross_entropy import linear_cross_entropy, mean_and_parts
from lowtide.head.options import HeadOptions
from lowtide.head.ranks import VocabShard
from lowtide.losses.reduction import check_place, check_positive


class StepLosses(NamedTuple):
    """The loss of several predictions per position.

    Attributes:
        loss: ``sum_k weights[k] * steps[k]``, a scalar to differentiate.
        steps: Each prediction's own mean [K], without its weight; not differentiable.
    """

    loss: Tensor
    steps: Tensor


def multi_token_loss(
    inputs: Tensor | Sequence[Tensor],
    linear_weight: Tensor | Sequence[Tensor],
    labels: Tensor,
    *,
    weights: Sequence[float] | None = None,
    first: int = 1,
    documents: Tensor | None = None,
    num_items: float | Tensor | Sequence[float | Tensor] | None = None,
    linear_bias: Tensor | Sequence[Tensor | None] | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    options: HeadOptions | None = None,
    vocab_shard: VocabShard | None = None,
) -> StepLosses:
    """Return the loss of K heads that predict further and further ahead: 6NDV FLOP a head, no logits in memory.

        loss = sum_k weights[k] L_k          L_k = mean_t -log softmax(inputs[k][t] @ W_k.T)[labels[t + first + k]]

    Each mean is over the head's own valid labels: see `future_labels` for where there are none. A head without any has
    the loss 0. Heads with one weight in common, as DeepSeek-V3's modules, are one call over all their tokens: a list of
    hidden states is concatenated (KND numbers), and one gradient of the weight is stored instead of K. Heads with
    weights of their own, as Medusa's, are a call each.

    Args:
        inputs: Hidden states of the heads, a tensor [K, ..., T, D] or K tensors [..., T, D]. A tensor of fewer tokens
            [..., T_k, D] has those of the sequence's first T_k positions.
        linear_weight: The output embedding [V, D] of all heads, or K of them.
        labels: Class indices [..., T], not shifted, or ``ignore_index``.
        weights: K factors above 0. None: 1 / K, the mean of the heads. Medusa's are 0.8**k, those of DeepSeek-V3's
            modules lambda / K with lambda 0.3, later 0.1, FastMTP's proportional to 0.6**k.
        first: How far ahead the first head predicts, as in `future_labels`: 2 without the model's own head.
        documents: Packed sequences, as in `future_labels`.
        num_items: What each head's sum is divided by, instead of its number of valid labels: a number above 0 or a 0-d
            tensor for all heads, K of them, or a tensor [K]; tensors are not inspected. For gradient accumulation.
        linear_bias: [V], or K of them or None.
        ignore_index: Labels of this value are not scored.
        label_smoothing: This and the following as in `lowtide.linear_cross_entropy`.
        z_loss: As there.
        softcap: As there.
        logit_scale: As there.
        options: As there.
        vocab_shard: As there.

    Returns:
        StepLosses: ``loss``, and each head's loss ``steps`` [K]; float32, for float64 inputs float64.

    Raises:
        ArgumentValueError: A shape, device or number that does not fit; also a `ValueError`.
        ArgumentTypeError: A dtype or an argument that does not fit; also a `TypeError`.
        TargetIndexError: As in `lowtide.linear_cross_entropy`.
        UnsupportedError: As in `lowtide.linear_cross_entropy`.

    Source: Gloeckle et al. 2024, "Better & Faster Large Language Models via Multi-token Prediction", arXiv 2404.19737;
    DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", arXiv 2412.19437, eq. 24 and 25; Cai et al. 2024, "Medusa",
    arXiv 2401.10774; Cai et al. 2025, "FastMTP", arXiv 2509.18362.
    """
    head: dict[str, Any] = {
        "ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss, "softcap": softcap,
        "logit_scale": logit_scale, "options": options, "vocab_shard": vocab_shard,
    }  # fmt: skip
    heads = _checked_inputs(inputs, _check_integers("labels", labels))
    K = len(heads)
    factors = [1 / K] * K
    if weights is not None:
        factors = [check_positive(f"weights[{k}]", value) for k, value in enumerate(_per_head("weights", weights, K))]
    ahead = future_labels(labels, K, first=first, documents=documents, ignore_index=ignore_index)
    targets = [y[..., : x.shape[-2]].contiguous() for x, y in zip(heads, ahead, strict=True)]
    wide = torch.promote_types(heads[0].dtype, torch.float32)
    if num_items is None:
        counts = [(y != ignore_index).sum(dtype=wide).clamp(min=1) for y in targets]
    else:
        several = isinstance(num_items, Sequence) or (isinstance(num_items, Tensor) and num_items.dim() == 1)
        numbers = _per_head("num_items", list(num_items) if several else [num_items] * K, K)  # type: ignore[arg-type]
        scalars = [positive_scalar("num_items", n, torch.float64) for n in numbers]
        counts = [detached(scalar_on(heads[0].device, n, wide)) for n in scalars]

    if not isinstance(linear_weight, Tensor):
        w_VD = _per_head("linear_weight", linear_weight, K)
        b_V = [None] * K if linear_bias is None else _per_head("linear_bias", linear_bias, K)
        values = [
            linear_cross_entropy(x, w, y, linear_bias=b, num_items=n, **head)
            for x, w, y, b, n in zip(heads, w_VD, targets, b_V, counts, strict=True)
        ]
        loss = torch.stack([f * value for f, value in zip(factors, values, strict=True)]).sum()
        return StepLosses(loss, torch.stack([detached(value) for value in values]))

    if not isinstance(linear_bias, Tensor | None):
        got = f"a {type(linear_bias).__name__}"
        raise ArgumentTypeError(message("linear_bias", "one tensor or None, as linear_weight is one", got))
    for k, x in enumerate(heads):
        if x.shape[-1] != heads[0].shape[-1]:
            expected = f"shape [..., {heads[0].shape[-1]}], as inputs[0] has, with one linear_weight for all"
            raise ArgumentValueError(message(f"inputs[{k}]", expected, f"shape {list(x.shape)}"))
        if operand_dtype(x) != operand_dtype(heads[0]):
            expected = f"dtype {heads[0].dtype}, as inputs[0] has, with one linear_weight for all"
            raise ArgumentTypeError(message(f"inputs[{k}]", expected, str(x.dtype), "Cast one of them."))
    joined = inputs if isinstance(inputs, Tensor) else torch.cat([x.flatten(0, -2) for x in heads])
    most = torch.stack(counts).amax()  # not 1: an fp16 gradient would sink below fp16's smallest numbers
    token_weights = [(f * most / n).expand(y.numel()) for f, n, y in zip(factors, counts, targets, strict=True)]
    loss, parts = mean_and_parts(
        joined, linear_weight, torch.cat([y.flatten() for y in targets]).view(joined.shape[:-1]),
        token_weight=torch.cat(token_weights).view(joined.shape[:-1]), num_items=most, linear_bias=linear_bias, **head,
    )  # fmt: skip
    parts_of_heads = torch.split(parts.flatten(), [y.numel() for y in targets])
    sums = [part.sum() / f for part, f in zip(parts_of_heads, factors, strict=True)]
    return StepLosses(loss, torch.stack(sums) / most)


def future_labels(
    labels: Tensor, steps: int, *, first: int = 1, documents: Tensor | None = None, ignore_index: int = -100
) -> Tensor:
    """Return what each of several predictions is scored against: labels further and further ahead.

        out[k, ..., t] = labels[..., t + first + k]

    and ``ignore_index`` where that lies behind the end of the sequence, or in another document than t.

    Args:
        labels: Class indices [..., T], not shifted: ``labels[t]`` belongs to token t, as in transformers.
        steps: K, how many predictions each position makes.
        first: How far ahead the first one is: 1 for a model's own head, 2 for Medusa's heads and for modules of
            multi-token prediction beside that head.
        documents: Packed sequences: integers [..., T] that change from one document to the next, such as
            ``(position_ids == 0).cumsum(-1)``.
        ignore_index: What marks a label that is not scored.

    Returns:
        Tensor: [K, ..., T], int64.

    Raises:
        ArgumentValueError: A shape, device or number that does not fit; also a `ValueError`.
        ArgumentTypeError: A dtype that does not fit; also a `TypeError`.
    """
    labels = _check_integers("labels", labels).long()  # ignore_index may be negative
    steps, first = check_index("steps", steps), check_index("first", first)
    ignore_index = check_index("ignore_index", ignore_index)
    if steps < 1:
        raise ArgumentValueError(message("steps", "an int above 0", f"{steps}"))
    if first < 0:
        raise ArgumentValueError(message("first", "an int of 0 or more", f"{first}"))
    if labels.dim() == 0:
        raise ArgumentValueError(message("labels", "shape [..., T]", "no axes"))
    if documents is None:
        documents = torch.zeros_like(labels)
    else:
        _check_integers("documents", check_place("documents", check_tensor("documents", documents), "labels", labels))
    changes = documents[..., 1:] != documents[..., :-1]
    runs = pad(changes.cumsum(-1), (labels.shape[-1] - changes.shape[-1], 0))  # a document's number may return
    out = []
    for k in range(first, first + steps):
        end = (0, min(k, labels.shape[-1]))
        same_document = pad(runs[..., k:], end, value=-1) == runs
        out.append(pad(labels[..., k:], end, value=ignore_index).where(same_document, ignore_index))
    return torch.stack(out)


def _checked_inputs(inputs: object, labels: Tensor) -> list[Tensor]:
    """Return the hidden states of each head, whose leading axes are those of ``labels`` [..., T]."""
    if not isinstance(inputs, Tensor) and not (isinstance(inputs, Sequence) and len(inputs)):
        expected = "a tensor [K, ..., T, D], or a sequence of K tensors [..., T, D]"
        got = "an empty one" if isinstance(inputs, Sequence) else type(inputs).__name__
        raise ArgumentTypeError(message("inputs", expected, got))
    if isinstance(inputs, Tensor) and (inputs.dim() < 3 or not len(inputs)):
        expected = "shape [K, ..., T, D] with K above 0"
        raise ArgumentValueError(
            message("inputs", expected, f"shape {list(inputs.shape)}", "Of one head: inputs[None].")
        )
    heads = list(inputs)
    for k, x in enumerate(heads):
        name, (*leading, T) = f"inputs[{k}]", labels.shape
        if check_tensor(name, x).dim() < 2 or list(x.shape[:-2]) != leading or x.shape[-2] > T:
            expected = f"shape {[*leading, T, 'D']}, or fewer tokens than {T}, as labels has these"
            raise ArgumentValueError(message(name, expected, f"shape {list(x.shape)}"))
        check_device(name, x, labels, "labels")
    return heads


def _per_head(name: str, values: Any, K: int) -> list[Any]:
    """Return the K values of a sequence."""
    if isinstance(values, Tensor) or not isinstance(values, Sequence) or len(values) != K:
        got = f"{len(values)}" if isinstance(values, Sequence) else type(values).__name__
        raise ArgumentValueError(message(name, f"{K} of them, one for each of the inputs", got))
    return list(values)


def _check_integers(name: str, value: object) -> Tensor:
    """Return a tensor of integers, not bool."""
    tensor = check_tensor(name, value)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ArgumentTypeError(message(name, "an integer dtype", str(tensor.dtype)))
    return tensor
