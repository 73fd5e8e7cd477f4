"""Denominators: each against plain PyTorch, with masked poison, nothing kept, no tokens and global counts."""

from __future__ import annotations

import math

import pytest
import torch

from fuzz.loss_cases import reduced
from losses.loops import batch
from lowtide.errors import ArgumentTypeError, ArgumentValueError
from lowtide.losses import reduce_tokens, sequence_logprobs, wpo_weights

REDUCTIONS = ["token", "sequence", "sequence_sum", "sum"]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(("B", "T"), [(5, 7), (1, 3), (4, 1), (3, 0), (0, 4)])
def test_each_reduction_is_the_loop_of_its_formula(reduction: str, B: int, T: int) -> None:
    for seed in range(5):
        b = batch(seed, B, T)
        got = reduce_tokens(b.logprob, b.mask, reduction=reduction)
        torch.testing.assert_close(got, reduced(b.logprob, b.mask, reduction)[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("reduction", ["token", "sequence", "sequence_sum"])
def test_a_global_count_replaces_the_last_denominator(reduction: str) -> None:
    b = batch(0)
    true = pytest.approx(reduced(b.logprob, b.mask, reduction, 37)[0].item(), rel=1e-12)
    for count in (37, 37.0, torch.tensor(37), torch.tensor(37.0, requires_grad=True)):
        got = reduce_tokens(b.logprob, b.mask, reduction=reduction, num_items=count)
        assert got.item() == true
        assert got.dtype == torch.float64
        assert not got.requires_grad


def test_micro_batches_add_up_to_the_whole_batch() -> None:
    b = batch(1, B=6)
    for reduction, count in (("token", b.mask.sum()), ("sequence", 6), ("sequence_sum", 6)):
        whole = reduce_tokens(b.logprob, b.mask, reduction=reduction)
        parts = sum(
            reduce_tokens(b.logprob[i : i + 2], b.mask[i : i + 2], reduction=reduction, num_items=count)
            for i in (0, 2, 4)
        )
        torch.testing.assert_close(parts, whole)


def test_none_keeps_the_shape_and_writes_zeros() -> None:
    b = batch(2)
    out = reduce_tokens(b.logprob, b.mask.int(), reduction="none")
    assert torch.equal(out, b.logprob.where(b.mask, 0))


def test_without_a_mask_everything_counts_and_leading_axes_are_sequences() -> None:
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    torch.testing.assert_close(reduce_tokens(x), x.mean())
    torch.testing.assert_close(reduce_tokens(x, reduction="sequence_sum"), x.sum() / 6)
    torch.testing.assert_close(reduce_tokens(x[0, 0], reduction="sequence"), x[0, 0].mean())


@pytest.mark.parametrize("average", [False, True])
def test_sequence_logprobs(average: bool) -> None:
    b = batch(4)
    true = []
    for i, ts in enumerate(b.kept()):
        total = sum(b.logprob[i, t].item() for t in ts)
        true.append(total / max(len(ts), 1) if average else total)
    got = sequence_logprobs(b.logprob, b.mask, average=average)
    torch.testing.assert_close(got, torch.tensor(true, dtype=torch.float64))
    assert got[1] == 0


def test_wpo_weights() -> None:
    b = batch(5)
    got = wpo_weights(b.logprob.clone().requires_grad_(), b.sum_sq_prob.clone().requires_grad_(), b.mask)
    for i, ts in enumerate(b.kept()):
        logs = [b.logprob[i, t].item() - math.log(b.sum_sq_prob[i, t].item()) for t in ts]
        assert got[i].item() == pytest.approx(math.exp(sum(logs) / max(len(logs), 1)), rel=1e-12)
    assert not got.requires_grad


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"reduction": "mean"}, ArgumentValueError, "'token', 'sequence', 'sequence_sum', 'sum' or 'none'"),
        ({"reduction": "sum", "num_items": 3}, ArgumentValueError, "num_items: expected None with reduction='sum'"),
        ({"reduction": "none", "num_items": torch.tensor(3)}, ArgumentValueError, "num_items: expected None"),
        ({"num_items": 0}, ArgumentValueError, "num_items: expected a finite number above 0, got 0"),
        ({"num_items": "3"}, ArgumentTypeError, "num_items: expected a number"),
        ({"num_items": torch.ones(2)}, ArgumentValueError, "num_items: expected a number or a 0-d tensor"),
        ({"mask": torch.ones(2, 4)}, ArgumentTypeError, "mask: expected a bool or integer tensor"),
        ({"mask": torch.ones(2, 3, dtype=torch.bool)}, ArgumentValueError, r"mask: expected shape \[2, 4\]"),
        ({"values": torch.ones(2, 4).long()}, ArgumentTypeError, "values: expected a floating-point tensor"),
    ],
)
def test_errors(kwargs: dict, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        reduce_tokens(**{"values": torch.ones(2, 4), **kwargs})
