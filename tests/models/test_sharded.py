"""FSDP2 and DDP around a patched model, in one process: their hooks see what they would, and the loss stays fused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.errors import UnsupportedError
from models.conftest import PEFT, assert_same_gradients, expect_calls, fused, lora, wrap
from promises import promise
from support import every_pair

pytestmark = [*PEFT, promise("patched", "ranks")]


def on_mesh(module, plan=None):
    """Shard a module by FSDP2, or by tensor parallelism as ``plan`` says, on a mesh of one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = init_device_mesh("cpu", (1,))  # also where there is a GPU
    return fully_shard(module, mesh=mesh) if plan is None else parallelize_module(module, mesh, plan)


def shard(model, *, head):
    for module in (*model.model.layers, *([model.lm_head] if head else []), model):
        on_mesh(module)


def assert_same_local_gradients(model, stock, rtol=1e-4, floor=2e-5):
    """``floor`` is relative to the largest gradient of each parameter."""
    for (key, p), q in zip(model.named_parameters(), stock.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), key
        if q.grad is not None:
            ours = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
            torch.testing.assert_close(ours, q.grad, rtol=rtol, atol=floor * q.grad.abs().max().item() + 1e-9, msg=key)


@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize(("name", "head"), [("llama", True), ("gemma2", False)])
def test_fused_and_right(name, head, patch_first, one_process, pair, batch):
    model, stock = pair(name, tie_word_embeddings=False)
    if patch_first:
        report = lowtide.patch(model)
    shard(model, head=head)
    if not patch_first:
        report = lowtide.patch(model)
    for _ in range(2):
        outputs, expected = model(**batch), stock(**batch)
        torch.testing.assert_close(outputs.loss, expected.loss)
        assert fused(outputs.loss)["mlp"] == 2
        outputs.loss.backward()
        expected.loss.backward()
    expect_calls(report, 2)
    assert_same_local_gradients(model, stock)
    if not head:  # the root has let go of its weights in backward, and nothing gathers them for one layer
        with pytest.raises(UnsupportedError, match=r"read outputs\.logits before"):
            outputs.logits.sum()
    torch.testing.assert_close(model(**batch).logits, expected.logits)  # with the weight gathered again
    if patch_first:
        with pytest.raises(UnsupportedError, match="Undo what came after"):
            lowtide.unpatch(model)
        assert fused(model(**batch).loss)["mlp"] == 2
    else:
        lowtide.unpatch(model)
        assert type(model(**batch).logits) is torch.Tensor


USES = {
    "each token's loss": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none"),
    "classes second": lambda z, y: F.cross_entropy(z.transpose(1, 2), y, reduction="none"),
    "log-probabilities": lambda z, y: z.log_softmax(-1).gather(-1, y[..., None]),
    "logits gathered": lambda z, y: z.gather(-1, y[..., None]),
    "summed": lambda z, y: z.log_softmax(-1).sum(-1, keepdim=True),
}


@pytest.mark.parametrize("use", USES)
def test_what_a_sharded_head_computes_may_be_changed_in_place(use, one_process, patched, batch):
    """FSDP2 warns where a module returns a view, and warnings are errors here."""
    model, stock, _ = patched("llama", settings={"tie_word_embeddings": False})
    shard(model, head=True)
    for m in (model, stock):
        result = USES[use](m(input_ids=batch["input_ids"], num_items_in_batch=3).logits, batch["input_ids"])
        result += 1
        result.square().sum().backward()
    assert_same_local_gradients(model, stock, floor=1e-4)


@promise("adapters")
@pytest.mark.parametrize("patch_first", [True, False])
def test_a_saved_head_and_its_reference(patch_first, one_process, pair, batch):
    """Two heads of one wrapper of peft's, each a unit of FSDP2, take turns."""
    config = lora(target_modules=["q_proj"], modules_to_save=["lm_head"])
    model, stock = (wrap(m, config) for m in pair("llama", tie_word_embeddings=False))
    base = model.get_base_model()
    if patch_first:
        report = lowtide.patch(model)
    for head in (base.lm_head.original_module, base.lm_head.modules_to_save["default"]):
        on_mesh(head)
    shard(base, head=False)
    if not patch_first:
        report = lowtide.patch(model)
    call, ids = {"input_ids": batch["input_ids"], "num_items_in_batch": 3}, batch["input_ids"][..., None]
    for m in (model, stock):
        for _ in range(2):
            policy = m(**call).logits
            with torch.no_grad(), m.disable_adapter():
                reference = m(**call).logits
            own, other = (z.log_softmax(-1).gather(-1, ids).sum() for z in (policy, reference))
            (own - other).square().backward()
    expect_calls(report, 4)
    assert_same_local_gradients(model, stock, floor=1e-4)


@promise("adapters", "reported")
@pytest.mark.parametrize("patch_first", [True, False])
def test_lora_on_a_head_in_parts_runs_as_it_came(patch_first, one_process, pair, batch):
    peft = pytest.importorskip("peft")
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel

    model, stock = pair("llama", tie_word_embeddings=False)
    for m in (model, stock):
        on_mesh(m, {"lm_head": ColwiseParallel(output_layouts=Replicate())})
        if patch_first and m is model:
            report = lowtide.patch(m)
            assert m(**batch).loss.isfinite()
            assert report.calls_fused == 1
        torch.manual_seed(2)
        peft.inject_adapter_in_model(lora(target_modules=["lm_head"]), m)
    if not patch_first:
        report = lowtide.patch(model)
    before = report.calls_fused
    for m in (model, stock):
        m(**batch).loss.backward()
    assert_same_local_gradients(model, stock)
    assert report.calls_fused == before
    assert "has LoRA on a sharded weight" in str(report)


@promise("reported")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_joined_mlp_in_parts_runs_its_own_code(when, one_process, pair, batch):
    """transformers' plans gather what gate_up_proj computes, since a rank's rows are not halves of gate and of up."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    plan = {
        "model.layers.*.mlp.gate_up_proj": ColwiseParallel(output_layouts=Replicate()),
        "model.layers.*.mlp.down_proj": RowwiseParallel(input_layouts=Replicate()),
    }
    model, stock = pair("phi3")
    if when == "after":
        lowtide.patch(model)
    on_mesh(model, plan)
    if when == "before":
        outcome = lowtide.patch(model).parts["mlp"].outcome
        assert "gate and up are one projection (gate_up_proj), and sharded" in outcome
    losses = [m(**batch).loss for m in (model, stock)]
    torch.testing.assert_close(*losses)
    losses[0].backward()
    assert fused(losses[0])["mlp"] == 0


@every_pair(settings=[{}, {"find_unused_parameters": True}], own_loss=[False, True])
def test_ddp_hands_logits_on_without_building_them(own_loss, settings, one_process, patched, batch):
    """With find_unused_parameters, as transformers.Trainer sets it, DDP passes copies of all outputs through a node."""
    model, stock, report = patched("llama")
    labels = batch.pop("labels") if own_loss else None
    engines = [nn.parallel.DistributedDataParallel(m, **settings) for m in (model, stock)]
    metrics = []
    for _ in range(2):
        for engine in engines:
            outputs = engine(**batch, num_items_in_batch=7)
            loss = outputs.loss
            if own_loss:
                rows = outputs.logits[:, :-1].flatten(0, 1)
                loss = F.cross_entropy(rows, labels[:, 1:].flatten())
            metrics.append((outputs.logits[:, 1:] if own_loss else outputs.logits).detach().argmax(-1))
            with torch.no_grad():
                metrics.append(outputs.logits[:, 1:].logsumexp(-1))
            loss.backward()
    assert_same_gradients(model, stock)
    for ours, theirs in ((0, 2), (1, 3), (4, 6), (5, 7)):
        torch.testing.assert_close(metrics[ours], metrics[theirs])
    if not own_loss:
        expect_calls(report, 2)
