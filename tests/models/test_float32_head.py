"""A model of bfloat16 whose output embedding is float32, as trainers of policies cast it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide
from models.conftest import assert_same_gradients, assert_same_training, expect_calls


def cast_in_the_model(model: nn.Module) -> None:
    """The head is float32, and what comes before it ends in a cast."""
    model.lm_head.float()
    stock = model.model.norm.forward
    model.model.norm.forward = lambda hidden: stock(hidden).float()


def cast_by_a_hook(model: nn.Module) -> None:
    model.lm_head.float().register_forward_pre_hook(lambda module, args: (args[0].float(),))


def cast_by_a_forward(model: nn.Module) -> None:
    """As TRL's GRPO trainer casts it."""
    head = model.lm_head.float()
    head.forward = lambda hidden: nn.functional.linear(hidden.float(), head.weight.float())


@pytest.mark.parametrize("trained", [True, False])
def test_a_float32_head_is_fused(trained, pair, batch):
    model, stock = pair("llama", torch.bfloat16, tie_word_embeddings=False)
    for m in (model, stock):
        cast_in_the_model(m)
        m.lm_head.weight.requires_grad_(trained)
    report = lowtide.patch(model, mlp=False, norm=False, rope=False)
    found, expected = model(**batch).loss, stock(**batch).loss
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    found.backward()
    expected.backward()
    assert_same_gradients(model, stock, 2**-6)  # the layers' gradients are bfloat16
    if trained:
        torch.testing.assert_close(model.lm_head.weight.grad, stock.lm_head.weight.grad, rtol=1e-5, atol=1e-7)
    expect_calls(report, 1)


@pytest.mark.parametrize("cast", [cast_by_a_hook, cast_by_a_forward])
def test_a_cast_around_the_head_keeps_its_meaning(cast, pair, batch):
    """It runs once a call, before or in place of the head's own forward, and the logits are stock's."""
    model, stock = pair("llama", torch.bfloat16, tie_word_embeddings=False)
    for m in (model, stock):
        cast(m)
    report = lowtide.patch(model, mlp=False, norm=False, rope=False)
    assert_same_training(model, stock, batch)
    expect_calls(report, 0, 1)
    assert model(**batch).logits.dtype == torch.float32
