"""A step whose labels are all ignored, over a denominator of 0: no weight changes, as with stock."""

import pytest
import torch
import torch.nn.functional as F

import lowtide
from models.conftest import PEFT
from support import every_pair

pytestmark = PEFT
LABELS = torch.full((2, 6), -100)
IDS = torch.arange(12).view(2, 6)


def by_items(model, dtype):
    return model(input_ids=IDS, labels=LABELS, num_items_in_batch=torch.tensor(0, dtype=dtype)).loss


def by_hand(model, dtype):
    logits = model(input_ids=IDS, labels=LABELS).logits
    total = F.cross_entropy(logits.float().flatten(0, 1), LABELS.flatten(), reduction="sum")
    return total / (LABELS != -100).sum()


def by_mean(model, dtype):
    return model(input_ids=IDS, labels=LABELS).loss


def frozen_head(model):
    model.get_output_embeddings().requires_grad_(False)
    return model


def with_lora(model):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))


@every_pair(
    made=[lambda model: model, frozen_head, with_lora],
    loss=[by_items, by_hand, by_mean],
    dtype=[torch.float32, torch.bfloat16, torch.float16],
)
def test_gradients_are_0(made, loss, dtype, pair):
    model, stock = map(made, pair("llama", dtype))
    report = lowtide.patch(model)
    losses = [loss(m, torch.long) for m in (model, stock)]
    assert report.calls_materialised == 0
    assert all(value.isnan() for value in losses)
    for value in losses:
        value.backward()
    for (name, p), q in zip(model.named_parameters(), stock.parameters(), strict=True):
        if not p.requires_grad:
            continue
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert torch.equal(p.grad, torch.zeros_like(p)), name


def test_a_scaler_that_overflows_keeps_ignored_tokens_out(patched):
    model, stock, _ = patched("llama")
    labels = IDS.where(IDS > 8, -100)
    grads = []
    for m in (model, stock):
        hidden = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        loss = m.loss_function(logits=m.lm_head(hidden), labels=labels, vocab_size=97)
        (loss * torch.inf).backward()
        grads.append(hidden.grad)
    kept = torch.nn.functional.pad(labels[..., 1:], (0, 1), value=-100) != -100
    for grad in grads:
        assert not grad[kept].isfinite().any()
        assert torch.equal(grad[~kept], torch.zeros_like(grad[~kept]))
