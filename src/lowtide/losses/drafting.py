"""Losses of several predictions per position: multi-token prediction, and drafters for speculative decoding.

Unlike the other losses these take hidden states and output embeddings, and no logits of theirs are stored. K
predictions (heads of a model, or steps of a drafter), T tokens of a sequence, D hidden size, V vocabulary, U draft
vocabulary.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from lowtide.arguments import (
    check_device,
    check_flag,
    check_tensor,
    detached,
    operand_dtype,
    positive_scalar,
    why_not_local,
)
from lowtide.errors import ArgumentTypeError, ArgumentValueError, message
from lowtide.head.call import scalar_on
from lowtide.head.cross_entropy import linear_cross_entropy, mean_and_parts
from lowtide.head.divergence import linear_divergence
from lowtide.head.options import HeadOptions
from lowtide.head.ranks.shard import VocabShard
from lowtide.head.rows import looks_at_numbers
from lowtide.head.token_stats import linear_token_stats
from lowtide.losses.checks import check_bool, check_positive
from lowtide.losses.future import ahead_of, check_integers, future_labels

Several = Tensor | Sequence[Tensor]
Counts = float | Tensor | Sequence[float | Tensor] | None


class CrossEntropyOptions(TypedDict, total=False):
    """The arguments of `lowtide.linear_cross_entropy` that `multi_token_loss` passes on."""

    label_smoothing: float
    z_loss: float
    softcap: float | None
    logit_scale: float | Tensor
    options: HeadOptions | None
    vocab_shard: VocabShard | None


class DivergenceOptions(TypedDict, total=False):
    """The arguments of `lowtide.linear_divergence` that `draft_loss` passes on."""

    kind: str
    beta: float
    temperature: float | Tensor
    softcap: float | None
    teacher_softcap: float | None
    options: HeadOptions | None


class StepLosses(NamedTuple):
    """The loss of several predictions per position.

    Attributes:
        loss: ``sum_k weights[k] * steps[k]``, a scalar to differentiate.
        steps: Each prediction's own mean [K], without its weight; not differentiable.
    """

    loss: Tensor
    steps: Tensor


def multi_token_loss(
    inputs: Several,
    linear_weight: Several,
    labels: Tensor,
    *,
    weights: Sequence[float] | None = None,
    first: int = 1,
    documents: Tensor | None = None,
    num_items: Counts = None,
    linear_bias: Tensor | Sequence[Tensor | None] | None = None,
    ignore_index: int = -100,
    **head: Unpack[CrossEntropyOptions],
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
        head: ``label_smoothing``, ``z_loss``, ``softcap``, ``logit_scale``, ``options`` and ``vocab_shard`` of
            `lowtide.linear_cross_entropy`.

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
    _check_names("multi_token_loss", head, CrossEntropyOptions)
    check_integers("labels", labels)
    heads, factors = _checked_inputs(inputs, labels, "labels"), _factors(inputs, weights)
    ahead = future_labels(labels, len(heads), first=first, documents=documents, ignore_index=ignore_index)
    targets = [y[..., : x.shape[-2]].contiguous() for x, y in zip(heads, ahead, strict=True)]
    counts = _counts([target != ignore_index for target in targets], num_items, heads[0])
    if not isinstance(linear_weight, Tensor):
        pairs = zip(_each("linear_weight", linear_weight, heads), _each("linear_bias", linear_bias, heads), strict=True)
        found = [
            linear_cross_entropy(x, w, y, linear_bias=b, num_items=n, ignore_index=ignore_index, **head)
            for x, (w, b), y, n in zip(heads, pairs, targets, counts, strict=True)
        ]
        return _weighted(found, factors)
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
    scales = [f * most / n for f, n in zip(factors, counts, strict=True)]
    token_weight = torch.cat([scale.expand(y.numel()) for scale, y in zip(scales, targets, strict=True)])
    loss, parts = mean_and_parts(
        joined, linear_weight, torch.cat([y.flatten() for y in targets]).view(joined.shape[:-1]),
        token_weight=token_weight.view(joined.shape[:-1]), num_items=most, linear_bias=linear_bias,
        ignore_index=ignore_index, **head,
    )  # fmt: skip
    of_heads = torch.split(parts.flatten(), [y.numel() for y in targets])
    sums = [part.sum() / f for part, f in zip(of_heads, factors, strict=True)]
    return StepLosses(loss, torch.stack(sums) / most)


def draft_loss(
    inputs: Several,
    linear_weight: Several,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    *,
    draft_ids: Tensor | None = None,
    skip_outside: bool = True,
    mask: Tensor | None = None,
    documents: Tensor | None = None,
    weights: Sequence[float] | None = None,
    num_items: Counts = None,
    linear_bias: Tensor | Sequence[Tensor | None] | None = None,
    teacher_bias: Tensor | None = None,
    **divergence: Unpack[DivergenceOptions],
) -> StepLosses:
    """Return the loss of a drafter's K steps against its target model, neither's logits in memory.

        loss = sum_k weights[k] L_k          L_k = mean_t D(teacher_{t + k}, student_kt)

    Step k of the drafter predicts at position t what the teacher, the target model, predicts at t + k. D is any
    divergence of `lowtide.linear_divergence`. The forward KL has the gradient of EAGLE-3's cross entropy with soft
    targets, and is less than it by the teacher's entropy, which no parameter changes; "tv" is 1 minus the probability
    that a draft is accepted. With ``draft_ids`` the student's class u is the teacher's class ``draft_ids[u]``, and the
    teacher's distribution is that over these classes, renormalised: only their rows of its weight are read. Each
    step is one call, and stores a gradient of the drafter's weight [U, D] until backward; with
    ``HeadOptions(gradient="recompute")`` none. Weights are whole on each rank: for sharded vocabularies call
    `lowtide.linear_divergence`.

    Args:
        inputs: The drafter's hidden states of its steps, a tensor [K, ..., T, D] or K tensors [..., T, D]. A tensor of
            fewer tokens [..., T_k, D] has those of the sequence's first T_k positions.
        linear_weight: The drafter's output embedding [U, D], or K of them.
        teacher_input: The teacher's hidden states [..., T, D'], those that its output embedding gets. The teacher gets
            no gradient.
        teacher_weight: Its output embedding [V, D']; without ``draft_ids`` [U, D'], the same classes as the student's.
        draft_ids: The draft vocabulary [U], an integer dtype: classes of the teacher, each once. From a map of offsets,
            as checkpoints of drafters have it: ``d2t + arange(U)``.
        skip_outside: With ``draft_ids``: leave out positions whose most likely class of the teacher is not in the draft
            vocabulary, as EAGLE-3 does. This takes the teacher's logits over the whole vocabulary once for all steps,
            2NDV FLOP in chunks.
        mask: bool or integers [..., T], not 0 where the teacher's prediction is to be learned, aligned with
            ``teacher_input``; None: everywhere.
        documents: Packed sequences, as in `future_labels`: t + k has to be in the document of t.
        weights: K factors above 0. None: 1 / K, the mean of the steps. EAGLE-3's are 0.8**k.
        num_items: As in `multi_token_loss`, instead of the number of positions compared.
        linear_bias: [U], or K of them or None.
        teacher_bias: [V], or None.
        divergence: ``kind`` ("forward_kl" if not given), ``beta``, ``temperature``, ``softcap``, ``teacher_softcap``
            and ``options`` of `lowtide.linear_divergence`.

    Returns:
        StepLosses: ``loss``, and each step's mean ``steps`` [K]; float32, for float64 inputs float64. A step without
        any position to compare has 0.

    Raises:
        ArgumentValueError: A shape, device, number or name that does not fit; also a `ValueError`.
        ArgumentTypeError: A dtype or an argument that does not fit; also a `TypeError`.
        UnsupportedError: As in `lowtide.linear_divergence`.

    Source: Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
    Test", arXiv 2503.01840; Samarin et al. 2026, "LK Losses", arXiv 2602.23881, for "tv".
    """
    _check_names("draft_loss", divergence, DivergenceOptions)
    check_flag("skip_outside", skip_outside)
    if check_tensor("teacher_input", teacher_input).dim() < 2:
        raise ArgumentValueError(message("teacher_input", "shape [..., T, D']", f"shape {list(teacher_input.shape)}"))
    tokens = teacher_input.detach()[..., 0]
    heads, factors = _checked_inputs(inputs, tokens, "teacher_input"), _factors(inputs, weights)
    if isinstance(linear_weight, Tensor):
        students, biases = [linear_weight] * len(heads), [linear_bias] * len(heads)
    else:
        students, biases = _each("linear_weight", linear_weight, heads), _each("linear_bias", linear_bias, heads)
    _check_matrix("linear_weight", students[0], "[U, D]")
    _check_matrix("teacher_weight", teacher_weight, "[V, D']")
    if teacher_bias is not None and check_tensor("teacher_bias", teacher_bias).shape != teacher_weight.shape[:1]:
        expected = f"shape [{len(teacher_weight)}], as teacher_weight is {list(teacher_weight.shape)}"
        raise ArgumentValueError(message("teacher_bias", expected, f"shape {list(teacher_bias.shape)}"))
    with torch.no_grad():
        teacher_input, valid = teacher_input.detach(), torch.ones_like(tokens, dtype=torch.bool)
        if mask is not None:
            valid = check_bool("mask", mask, "teacher_input without its last axis", tokens)
        if draft_ids is not None:
            ids = _checked_ids(draft_ids, teacher_weight, students[0])
            if skip_outside:
                stats = linear_token_stats(teacher_input, teacher_weight, want=("argmax",), linear_bias=teacher_bias)
                known = torch.zeros(len(teacher_weight), dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)
                valid = valid & known[stats.argmax]
            teacher_weight = teacher_weight.detach().index_select(0, ids)
            teacher_bias = None if teacher_bias is None else teacher_bias.detach().index_select(0, ids)
        elif teacher_weight.shape[:1] != students[0].shape[:1]:
            expected = f"{students[0].shape[0]} rows, a class for each of linear_weight's"
            hint = "Name the teacher's classes that the student has: draft_ids."
            raise ArgumentValueError(message("teacher_weight", expected, f"{list(teacher_weight.shape)}", hint))
        lengths = [max(0, min(x.shape[-2], tokens.shape[-1] - k)) for k, x in enumerate(heads)]
        ahead = ahead_of(valid, documents, "teacher_input without its last axis", False)
        masks = [ahead(k)[..., :length].contiguous() for k, length in enumerate(lengths)]
        counts = _counts(masks, num_items, heads[0])
    found = [
        linear_divergence(
            x[..., :length, :], w, teacher_input[..., k : k + length, :], teacher_weight, linear_bias=b,
            teacher_bias=teacher_bias, mask=kept, reduction="mean", num_items=n, **divergence,
        )
        for k, (x, length, w, b, kept, n) in enumerate(
            zip(heads, lengths, students, biases, masks, counts, strict=True)
        )
    ]  # fmt: skip
    return _weighted(found, factors)


def _weighted(found: Sequence[Tensor], factors: Sequence[float]) -> StepLosses:
    total = torch.stack([f * loss for f, loss in zip(factors, found, strict=True)]).sum()
    return StepLosses(total, torch.stack([detached(loss) for loss in found]))


def _checked_inputs(inputs: object, tokens: Tensor, like: str) -> list[Tensor]:
    """Return the hidden states of each prediction, which belong to sequences of ``tokens`` [..., T]."""
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
        name, (*leading, T) = f"inputs[{k}]", tokens.shape
        if check_tensor(name, x).dim() < 2 or list(x.shape[:-2]) != leading or x.shape[-2] > T:
            expected = f"shape {[*leading, T, 'D']}, or fewer tokens than {T}, as {like} has these"
            raise ArgumentValueError(message(name, expected, f"shape {list(x.shape)}"))
        check_device(name, x, tokens, like)
    return heads


def _each(name: str, values: Any, heads: Sequence[Tensor]) -> list[Any]:
    """Return one value for each prediction."""
    K = len(heads)
    if values is None:
        return [None] * K
    if isinstance(values, Tensor) or not isinstance(values, Sequence) or len(values) != K:
        got = f"{len(values)}" if isinstance(values, Sequence) else type(values).__name__
        raise ArgumentValueError(message(name, f"{K} of them, one for each of the inputs", got))
    return list(values)


def _factors(inputs: Several, weights: Any) -> list[float]:
    K = len(inputs)
    if weights is None:
        return [1 / K] * K
    if isinstance(weights, Tensor) or not isinstance(weights, Sequence) or len(weights) != K:
        got = f"{len(weights)}" if isinstance(weights, Sequence) else type(weights).__name__
        raise ArgumentValueError(message("weights", f"{K} numbers, one for each of the inputs", got))
    return [check_positive(f"weights[{k}]", weight) for k, weight in enumerate(weights)]


def _counts(masks: Sequence[Tensor], num_items: Counts, x: Tensor) -> list[Tensor]:
    """Return what each prediction's sum is divided by, as scalars on the device."""
    wide, K = torch.promote_types(x.dtype, torch.float32), len(masks)
    if num_items is None:
        return [mask.sum(dtype=wide).clamp(min=1) for mask in masks]
    if isinstance(num_items, Tensor) and num_items.dim() == 1 and len(num_items) == K:
        num_items = list(num_items)
    given = num_items if isinstance(num_items, Sequence) else [num_items] * K
    if len(given) != K:
        raise ArgumentValueError(message("num_items", f"one number, or {K} of them", f"{len(given)}"))
    return [detached(scalar_on(x.device, positive_scalar("num_items", n, torch.float64), wide)) for n in given]


def _check_matrix(name: str, value: object, shape: str) -> None:
    hint = "Gather it, or call linear_divergence, which takes sharded vocabularies, for each step."
    if (error := why_not_local(name, value, hint)) is not None:
        raise error
    if (weight := check_tensor(name, value)).dim() != 2:
        raise ArgumentValueError(message(name, f"shape {shape}", f"shape {list(weight.shape)}"))


def _checked_ids(draft_ids: object, teacher_weight: Tensor, student: Tensor) -> Tensor:
    """Return the draft vocabulary as int64; that its classes are distinct ones of the teacher is checked on the CPU."""
    ids, U, V = check_integers("draft_ids", draft_ids), len(student), len(teacher_weight)
    check_device("draft_ids", ids, teacher_weight, "teacher_weight")
    if ids.shape != (U,):
        expected = f"shape [{U}], a class of the teacher for each of linear_weight's rows"
        hint = "From a mask of the teacher's vocabulary: mask.nonzero()[:, 0]."
        raise ArgumentValueError(message("draft_ids", expected, f"shape {list(ids.shape)}", hint))
    if looks_at_numbers(ids.device) and not torch.compiler.is_compiling() and U:
        if not 0 <= int(ids.min()) <= int(ids.max()) < V:
            expected = f"class indices from 0 to {V - 1}"
            raise ArgumentValueError(message("draft_ids", expected, f"{int(ids.min())} to {int(ids.max())}"))
        if len(torch.unique(ids)) < U:
            hint = "Offsets as of d2t become ids with d2t + torch.arange(len(d2t))."
            raise ArgumentValueError(message("draft_ids", "each class once", "some several times", hint))
    return ids.long()


def _check_names(function: str, given: Any, known: Any) -> None:
    for name in given:
        if name not in known.__annotations__:
            expected = f"arguments of its own, or {', '.join(known.__annotations__)}"
            raise ArgumentTypeError(message(function, expected, repr(name)))
