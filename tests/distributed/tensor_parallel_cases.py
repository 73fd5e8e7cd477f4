"""Patched models whose head is sharded over ranks, beside the stock model in the same parallelisation.

The truth is one process in float64; a patched model may err as much as the stock one in the same parallelisation.
"""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F
from transformers import DistributedConfig

import lowtide
from distributed.launch import DEVICE, THOROUGH, main
from distributed.models import (
    FAMILIES,
    GATHERED,
    batch_of,
    fair,
    fused,
    in_sequence,
    model_of,
    parallel,
    ranks_mesh,
    same,
    step,
    trio,
    whole,
)
from lowtide.errors import UnsupportedError
from lowtide.models.lazy_logits import LazyLogits

BFLOAT16 = 2e-2  # how near under autocast


def kinds_of_heads() -> None:
    """Soft caps, scales, biases; patched before and after; and what else reads the logits."""
    for i, family in enumerate(FAMILIES):
        first, layers = i % 2 == 0, family == "llama"
        options = lowtide.HeadOptions(gradient=("forward", "recompute")[i % 2], workspace_mib=0.002)
        cut = functools.partial(parallel, layers=layers)
        ours, stock, true, report = trio(cut, first=first, family=family, options=options)
        fair(ours, stock, true, batch_of(), (family, first))
        fused(report, 1)
        lazy = ours(**batch_of()).logits
        real = stock(input_ids=batch_of()["input_ids"]).logits
        assert type(lazy) is LazyLogits
        assert lazy.shape == real.shape
        torch.testing.assert_close(lazy + 0, real, rtol=1e-5, atol=1e-5)
        fused(report, 2, 1)
        lowtide.unpatch(ours)
        assert type(ours(input_ids=batch_of()["input_ids"], num_items_in_batch=1).logits) is type(real)


def sequences(stream: int = 0) -> dict[str, Tensor]:
    """A batch to be cut along its sequences: before torch 2.13 DTensors that are take no more than one in a matmul."""
    several = torch.__version__ >= (2, 13)
    return {name: x if several else x[:1] for name, x in batch_of(stream).items()}


def tokens_in_parts() -> None:
    """Hidden states in parts of the sequence: each rank's gradient is that of its part."""
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    ours, stock, true, report = trio(functools.partial(in_sequence, head=head))
    fair(ours, stock, true, sequences(), "sequence")
    for loss_of in (each_token, log_probabilities):
        fair(ours, stock, true, sequences(1), loss_of, loss_of)
    fused(report, 3)
    torch.testing.assert_close(ours(**sequences()).logits + 0, stock(**sequences()).logits, rtol=1e-5, atol=1e-5)
    fused(report, 4, 1)
    assert "DTensors of its input and weight" in report.parts["norm"].more[-1].outcome, str(report)


def each_token(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"], num_items_in_batch=1).logits[:, :-1]
    each = F.cross_entropy(
        logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="none", label_smoothing=0.1
    )
    return (each * torch.linspace(0.5, 2, each.numel(), device=each.device)).sum()


def log_probabilities(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"], num_items_in_batch=1).logits
    chosen = logits.log_softmax(-1).gather(-1, batch["input_ids"][..., None])[..., 0]
    return (chosen * batch["labels"].clamp(min=0)).sum() / 100


def losses_of_ones_own() -> None:
    """What becomes of plain logits outside of the model: without building them where it can be, and right."""
    ours, stock, true, report = trio(parallel)
    for loss_of in (each_token, log_probabilities):
        fair(ours, stock, true, batch_of(), loss_of.__name__, loss_of)
    fused(report, 2)
    with torch.no_grad():
        lazy, real = (m(**batch_of()).logits for m in (ours, stock))
        assert torch.equal(lazy.argmax(-1), real.argmax(-1))
        assert report.calls_materialised == 0, str(report)
        assert torch.equal(lazy.topk(3).indices, real.topk(3).indices)


def labels_and_counts() -> None:
    """Labels that are all ignored block no rank; ``num_items_in_batch``; without gradients; in bfloat16; tied."""
    ours, stock, true, report = trio(parallel)
    batch, items = batch_of(), {"num_items_in_batch": torch.tensor(5, device=DEVICE)}
    fair(ours, stock, true, {**batch, **items}, "items")
    nothing = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    assert all(not x.any() for x in step(ours, {**nothing, **items}).values())
    assert ours(**nothing).loss.isnan()
    with torch.no_grad():
        outputs, expected = ours.eval()(**batch), stock.eval()(**batch)
        torch.testing.assert_close(outputs.loss, expected.loss)
        torch.testing.assert_close(outputs.logits + 0, expected.logits)
    with torch.autocast(DEVICE, torch.bfloat16):
        fair(ours, stock, true, batch, "autocast", close=BFLOAT16)
    fused(report, 5, 1)

    def cut(model: Any) -> None:
        plan = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate()), "lm_head": GATHERED}
        parallelize_module(model, ranks_mesh(), plan)
        model.lm_head.weight = model.model.embed_tokens.weight

    *models, report = trio(cut, tie_word_embeddings=True)
    fair(*models, batch, "tied: the gradient is the sum of both")
    fused(report, 1)


def wrapped_by_transformers_later() -> None:
    """Patched before: what transformers wraps is the patched forward then."""
    from transformers.distributed.tensor_parallel import ColwiseParallel as Style

    vocab = 48 * dist.get_world_size()
    batch = {name: x.where(x < 0, x % vocab) for name, x in batch_of().items()}
    *models, true = (model_of(vocab_size=vocab) for _ in range(3))
    true = true.double()
    report = lowtide.patch(models[0])
    for model in models:
        style = Style(input_layouts=Replicate(), output_layouts=Replicate())
        style.shard_param(model.lm_head, "weight", ranks_mesh())
        style.install_forward(model.lm_head, ranks_mesh())
    fair(*models, true, batch, "later")
    fused(report, 1)


def plan_of_transformers() -> None:
    """``tp_plan="auto"``, as from_pretrained applies it: tied and not, generating."""
    if torch._C._get_accelerator().type != DEVICE:  # transformers takes what the machine has
        return
    ranks = dist.get_world_size()
    for tied in (False, True) if THOROUGH else (True,):
        settings = {"vocab_size": 16 * ranks, "tie_word_embeddings": tied}  # transformers 5.17 wants equal parts
        batch = {name: x.where(x < 0, x % settings["vocab_size"]) for name, x in batch_of().items()}
        with tempfile.TemporaryDirectory() as folder:
            shared = [folder]
            dist.broadcast_object_list(shared)
            if dist.get_rank() == 0:
                model_of(**settings).save_pretrained(folder)
            dist.barrier()
            read, config = transformers.LlamaForCausalLM.from_pretrained, DistributedConfig(tp_size=ranks)
            ours, stock = (read(shared[0], distributed_config=config).train() for _ in range(2))
            dist.barrier()
        report = lowtide.patch(ours)
        assert report.parts["loss"].patched, str(report)
        fair(ours, stock, model_of(**settings).double(), batch, ("transformers", tied))
        fused(report, 1)
        prompt = {"input_ids": batch["input_ids"][:1, :4], "max_new_tokens": 3, "do_sample": False}
        assert torch.equal(ours.generate(**prompt), stock.generate(**prompt))
        lowtide.unpatch(ours)
        assert type(ours(**batch).logits) is Tensor


def what_is_left_alone() -> None:
    """Whatever is not of the form that is known runs as it came, and the report says why."""
    rows = RowwiseParallel(input_layouts=Replicate())

    def watched(model: Any) -> None:
        parallel(model).lm_head.register_forward_hook(lambda _m, _x, y: y * 2)

    def cut_by_rows(model: Any) -> None:
        parallelize_module(model, ranks_mesh(), {"lm_head": rows})

    def cut_to_a_dtensor(model: Any) -> None:
        parallel(model, ColwiseParallel(output_layouts=Replicate(), use_local_output=False))

    def logits_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return whole(model(input_ids=batch["input_ids"], num_items_in_batch=1).logits).square().mean()

    ways = (
        (cut_by_rows, "not Shard(0)"),
        (watched, "has a hook from __main__"),
        (cut_to_a_dtensor, "returns DTensors"),
    )
    for change, why in ways:
        *models, report = trio(change)
        same(*(step(model, batch_of(), logits_of) for model in models[:2]), why)
        assert report.calls_fused == 0, why
        assert why in str(report.why_materialised), report


def looked_at_on_one_rank() -> None:
    """A hook that the first rank alone has: all run the stock code, and none waits."""
    first = dist.get_rank() == 0
    ours, stock, true, report = trio(functools.partial(parallel, layers=True), num_hidden_layers=2)
    seen: list[Any] = []
    if first:
        ours.lm_head.register_forward_hook(lambda _m, _x, y: seen.append(y))
    fair(ours, stock, true, batch_of(), "head")
    assert bool(seen) == first
    fused(report, 0, 1)
    if not first:
        (why,) = report.why_materialised
        assert why == "on ranks [0] of its group something looks at the calls of this module"
    # later, when the ranks have agreed to fuse: an error where it is
    ours = parallel(model_of())
    report = lowtide.patch(ours)
    step(ours, batch_of())
    if first:
        hook = ours.lm_head.register_forward_hook(lambda _m, _x, y: y)
        with pytest.raises(UnsupportedError, match=r"a hook from __main__.*lowtide\.patch\(model\) again"):
            ours(**batch_of())
        hook.remove()
    ours.lm_head.register_forward_hook(lambda _m, _x, y: y)
    lowtide.patch(ours)
    step(ours, batch_of())
    fused(report, 1, 1)


if __name__ == "__main__":
    main(vars())
