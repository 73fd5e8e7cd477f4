"""FSDP2 and DDP around a patched model, in one process: their hooks see what they would, and the loss stays fused."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from models.conftest import PEFT, assert_same_gradients, expect_calls
from promises import promise
from support import every_pair

pytestmark = [*PEFT, promise("patched", "ranks")]


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


@promise("reported")
def test_a_head_under_tensor_parallelism_runs_stock(one_process, patched, batch):
    """Before and after patch; its logits are whole, and so is the loss of them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model, stock, report = patched("llama", settings={"tie_word_embeddings": False})
    mesh = init_device_mesh("cpu", (1,))  # also where there is a GPU
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})
    assert lowtide.patch(model) is report
    for m in (model, stock):
        m(**batch).loss.backward()
    for (key, p), q in zip(model.named_parameters(), stock.parameters(), strict=True):
        ours = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
        torch.testing.assert_close(ours, q.grad, rtol=1e-4, atol=2e-5 * q.grad.abs().max().item(), msg=key)
    expect_calls(report, 0, 1)
    assert "the hidden states are a DTensor" in str(report)
