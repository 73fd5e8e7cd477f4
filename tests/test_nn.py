"""lowtide.nn.LinearCrossEntropyLoss against torch.nn.LinearCrossEntropyLoss, where this torch has it."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch

import lowtide
from lowtide.errors import LowtideError

stock = getattr(torch.nn, "LinearCrossEntropyLoss", None)
needs_stock = pytest.mark.skipif(stock is None, reason="torch.nn.LinearCrossEntropyLoss came with torch 2.13")


@needs_stock
def test_the_same_words_in_the_same_order() -> None:
    ours = inspect.signature(lowtide.nn.LinearCrossEntropyLoss).parameters
    theirs = inspect.signature(stock).parameters
    assert list(ours) == list(theirs)
    assert [(p.kind, p.default) for p in ours.values()] == [(p.kind, p.default) for p in theirs.values()]


@needs_stock
@pytest.mark.parametrize("out_features", [(), (3,), (2, 3)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_same_state_and_the_same_numbers(out_features: tuple[int, ...], reduction: str) -> None:
    for bias, weighted in itertools.product([False, True], repeat=2):
        kwargs = {
            "out_features": out_features,
            "bias": bias,
            "reduction": reduction,
            "weight": torch.rand(11, dtype=torch.float64) if weighted else None,
            "label_smoothing": 0.1,
            "dtype": torch.float64,
        }
        theirs, ours = stock(5, 11, **kwargs), lowtide.nn.LinearCrossEntropyLoss(5, 11, **kwargs)
        assert {k: v.shape for k, v in ours.state_dict().items()} == {
            k: v.shape for k, v in theirs.state_dict().items()
        }
        ours.load_state_dict(theirs.state_dict())
        input, target = torch.randn(4, 5, dtype=torch.float64), torch.randint(0, 11, (4, *out_features))
        target.view(-1)[0] = -100
        torch.testing.assert_close(ours(input, target), theirs(input, target))
        for module in (ours, theirs):
            module(input, target).sum().backward()
        for (name, ours_p), theirs_p in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(ours_p.grad, theirs_p.grad, msg=name)


def test_several_outputs_keep_the_loss_float32() -> None:
    loss = lowtide.nn.LinearCrossEntropyLoss(5, 11, out_features=(3,), weight=torch.rand(11, dtype=torch.float64))
    assert loss(torch.rand(4, 5), torch.zeros(4, 3, dtype=torch.long)).dtype == torch.float32


def test_a_target_of_another_shape_is_refused() -> None:
    loss = lowtide.nn.LinearCrossEntropyLoss(5, 11, out_features=(3,))
    with pytest.raises(LowtideError, match=r"target: expected shape \[4, 3\], got \[4\]"):
        loss(torch.rand(4, 5), torch.zeros(4, dtype=torch.long))
