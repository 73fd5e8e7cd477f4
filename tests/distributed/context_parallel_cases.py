"""PyTorch's context parallelism around a patched model and layers under a policy, beside the stock model and float64.

Each rank has its shard of every sequence, and attention goes round the ring. On the CPU the ring runs the CPU's flash
attention (`distributed.ring`), on GPUs whatever PyTorch takes.
"""

from __future__ import annotations

import copy
import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import ParallelismConfig
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from transformers import Trainer, TrainingArguments

import lowtide
from distributed.launch import DEVICE, THOROUGH, main
from distributed.models import VOCAB, counted, fused, gradients, model_of, whole
from distributed.ring import ring_on_cpus
from lowtide.distributed import count_items
from lowtide.memory import ActivationPolicy, apply_policy, copies
from lowtide.train import parallel
from memory.models import LazySide
from pages.blocks import all_blocks, compiled
from support import forget_accelerate, relative_error

ON_CPU = DEVICE == "cpu"
SHAPE = {"num_hidden_layers": 3, "hidden_size": 32, "head_dim": 8}
RECOMPUTE = lowtide.HeadOptions(gradient="recompute")
# How much worse than three times stock's error may be, and, of a half of a rank's shard, how many tokens: PyTorch
# balances a length that the ranks can halve, and of float32 on GPUs takes whole tiles alone.
CLOSE = {torch.float32: 5e-7, torch.bfloat16: 5e-3}
BALANCED = 3 if ON_CPU else 32
if ON_CPU:
    ring_on_cpus()


def lengths() -> list[int]:
    """An early and a late chunk on each rank, and on the CPU one alone."""
    ranks = dist.get_world_size()
    return [2 * BALANCED * ranks, *([5 * ranks] if ON_CPU else [])]


def batch_of(T: int, stream: int = 0) -> tuple[Tensor, ...]:
    """Ids, labels, shifted labels and positions; some labels are ignored, and the second sequence's first half."""
    g = torch.Generator().manual_seed(stream)
    ids = torch.randint(3, VOCAB, (2, T), generator=g)
    labels = ids.where(torch.rand(2, T, generator=g) > 0.3, -100)
    labels[1, : T // 2] = -100
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    positions = torch.arange(T).expand(2, -1).contiguous()
    return tuple(x.to(DEVICE) for x in (ids, labels, shifted, positions))


def causal(model: Any) -> Any:
    """Drop masks, which the ring does not have: transformers takes an early and a late chunk for packed sequences."""

    def without_mask(_: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "attention_mask": None, "is_causal": True}

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(without_mask, with_kwargs=True)
    return model


def in_parts(mesh: Any, batch: tuple[Tensor, ...]) -> tuple[Any, tuple[Tensor, ...]]:
    """Return the context of a step, and the batch, which is cut inside."""
    parts = tuple(x.clone() for x in batch)
    kept = set(parts)
    return context_parallel(mesh, buffers=list(parts), buffer_seq_dims=[1] * 4, no_restore_buffers=kept), parts


def by_model(model: Any, parts: tuple[Tensor, ...], items: Tensor) -> Tensor:
    ids, labels, shifted, positions = parts
    loss: Tensor = model(
        input_ids=ids, labels=labels, shift_labels=shifted, position_ids=positions, num_items_in_batch=items
    ).loss
    return loss


def by_logits(model: Any, parts: tuple[Tensor, ...], items: Tensor) -> Tensor:
    """As accelerate's guide does: no labels, and the loss of the logits."""
    ids, _, shifted, positions = parts
    logits = model(input_ids=ids, shift_labels=shifted, position_ids=positions, use_cache=False).logits
    loss: Tensor = model.loss_function(
        logits=logits, labels=None, shift_labels=shifted, vocab_size=VOCAB, num_items_in_batch=items
    )
    return loss


def step(
    model: Any, mesh: Any, batch: tuple[Tensor, ...], loss_of: Callable[..., Tensor] = by_model
) -> dict[str, Tensor]:
    """Return the ranks' mean of losses and gradients, as FSDP2 takes it."""
    context, parts = in_parts(mesh, batch)
    with context:
        loss = loss_of(model, parts, count_items(parts[2]))
        loss.backward()
    return mean_of_ranks(model, loss)


def mean_of_ranks(model: Any, loss: Any) -> dict[str, Tensor]:
    found = {"loss": loss.detach(), **gradients(model)}
    for name, value in found.items():
        if name == "loss" or not isinstance(model, torch.distributed.fsdp.FSDPModule):
            dist.all_reduce(value)
            value /= dist.get_world_size()
    return found


def truth(model: Any, batches: list[tuple[Tensor, ...]]) -> dict[str, Tensor]:
    """Return what one process computes of the whole sequences in float64."""
    model = copy.deepcopy(model).double()
    ids, labels = (torch.cat([batch[i] for batch in batches]) for i in (0, 1))
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


def near(
    got: dict[str, Tensor], stock: dict[str, Tensor], true: dict[str, Tensor], dtype: torch.dtype, where: object
) -> None:
    assert got.keys() == stock.keys() == true.keys(), where
    for name, value in true.items():
        error, stock_error = relative_error(got[name], value), relative_error(stock[name], value)
        assert stock_error < 100 * CLOSE[dtype], (where, name, stock_error)
        assert error <= 3 * stock_error + CLOSE[dtype], (where, name, error, stock_error)


def policies() -> None:
    """Whatever layers save: losses and gradients are one process's, and saved attention is not sent round again."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    P = ActivationPolicy
    # Rounds of the ring in a step: the three layers' forwards, and those that backward repeats.
    ways: list[tuple[ActivationPolicy | None, int, lowtide.HeadOptions | None]] = [
        (None, 3, RECOMPUTE),
        (P(keep="input"), 6, None),
        (P(keep="attention"), 3, None),
        (P(keep="attention", offload=True), 3, RECOMPUTE),
        (P(keep="input", offload=True), 6, None),
        (P(keep="attention", mlp_level=0), 3, None),
        (P(keep="input", mlp_level=1, mlp_tile_tokens=4), 6, None),
        (P(every=2), 7, None),
    ]
    chosen = ways if THOROUGH or dist.get_world_size() == 2 else ways[3:4]
    for dtype, T in itertools.product([torch.float32] + [torch.bfloat16] * (not ON_CPU), lengths()):
        batch = batch_of(T)
        model = model_of(dtype=dtype, **SHAPE)
        true = truth(model, [batch])
        stock = step(causal(copy.deepcopy(model)), mesh, batch)
        for policy, rounds, options in chosen:
            ours, where = copy.deepcopy(model), (dtype, T, policy, options)
            report = lowtide.patch(ours, options=options)
            with pytest.MonkeyPatch.context() as patched:
                if ON_CPU:
                    side = LazySide()
                    patched.setattr(copies, "available", lambda: True)
                    patched.setattr(copies, "side_for", lambda _, side=side: side)
                if policy is not None:
                    apply_policy(ours, policy)
                causal(ours)
                for _ in range(2):
                    with counted(ring, "_templated_ring_attention") as calls:
                        near(step(ours, mesh, batch), stock, true, dtype, where)
                    assert calls == [rounds], where
            if ON_CPU and policy is not None and policy.offload:  # of one layer its input, attention's output, its lse
                assert (side.copies, side.lost) == (2 * (3 if policy.keep == "attention" else 1), 0), where
            fused(report, 2, what=where)
            assert all(row.patched for row in report.parts.values()), f"{where} {report}"


def sharded() -> None:
    """FSDP2 over all ranks, each pair of which has its own sequences: patched before or after, two ways to the loss."""
    dp = dist.get_world_size() // 2
    mesh = init_device_mesh(DEVICE, (dp, 2), mesh_dim_names=("dp", "cp"))
    everyone = mesh[("dp", "cp")]._flatten("everyone")
    T = 4 * BALANCED
    batches = [batch_of(T, stream) for stream in range(dp)]
    mine = batches[mesh.get_local_rank("dp")]
    ways = ((by_model, False, "attention", "llama"), (by_logits, True, "input", "phi"))
    for loss_of, first, keep, family in ways:

        def cut(model: Any) -> Any:
            for layer in model.model.layers:
                fully_shard(layer, mesh=everyone)
            return fully_shard(model, mesh=everyone)

        model = model_of(family, **SHAPE)
        true = truth(model, batches)
        stock = step(cut(causal(copy.deepcopy(model))), mesh["cp"], mine, loss_of)
        if first:
            report = lowtide.patch(model)
        cut(model)
        if not first:
            report = lowtide.patch(model)
        apply_policy(model, ActivationPolicy(keep=keep))
        causal(model)
        for _ in range(2):
            near(step(model, mesh["cp"], mine, loss_of), stock, true, torch.float32, (loss_of, first, family))
        fused(report, 2)


def documented() -> None:
    """The page's own code, with a model, a batch and a mesh."""
    (block,) = (block for block in all_blocks("python") if "with context_parallel(" in block.code)
    T = lengths()[0]
    ids, labels = (x.clone() for x in batch_of(T)[:2])
    model = model_of(**SHAPE)
    true, stock = truth(model, [(ids, labels)]), copy.deepcopy(model)
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    names = {"lowtide": lowtide, "torch": torch, "count_items": count_items, "model": model, "mesh": mesh}
    names |= {"ids": ids, "labels": labels}
    exec(compiled(block), names)
    near(mean_of_ranks(model, names["loss"]), step(causal(stock), mesh, batch_of(T)), true, torch.float32, block)
    fused(names["report"], 1)


@contextmanager
def fsdp2() -> Iterator[None]:
    """What ``accelerate launch`` sets for FSDP2, and what lets accelerate share out sequences on CPUs too."""
    stock = ParallelismConfig._validate_accelerator

    def validate(self: Any, accelerator: Any) -> None:
        parallel.correct_fsdp2(accelerator)
        stock(self, accelerator)

    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(ParallelismConfig, "_validate_accelerator", validate)
            for name, value in (parallel.variables("fsdp2") | {"FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}).items():
                patched.setenv(name, value)
            yield
    finally:
        forget_accelerate()


def trainer() -> None:
    """transformers' Trainer with ``cp_size``: losses, held-out losses and weights of one process, accumulated too."""
    dp, T, rate, steps = dist.get_world_size() // 2, 4 * BALANCED, 0.1, 2
    ids, labels, _, _ = (torch.cat(x).cpu() for x in zip(*(batch_of(T, i) for i in range(2 * dp * steps)), strict=True))
    rows = [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]
    for accumulated, keep in ((1, "attention"), (2, "input")) if THOROUGH else ((2, "input"),):
        model = model_of(**SHAPE)
        true, held_out = copy.deepcopy(model).double(), {"input_ids": ids[-4 * dp :], "labels": labels[-4 * dp :]}
        optimizer, want = torch.optim.SGD(true.parameters(), lr=rate), []
        for i in range(0, len(ids), 2 * dp * accumulated):
            part = slice(i, i + 2 * dp * accumulated)
            loss = true(input_ids=ids[part].to(DEVICE), labels=labels[part].to(DEVICE)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            want.append(loss.item())
        with torch.no_grad():
            want.append(true(**{name: x.to(DEVICE) for name, x in held_out.items()}).loss.item())
        report = lowtide.patch(model)
        apply_policy(model, ActivationPolicy(keep=keep))
        with fsdp2(), tempfile.TemporaryDirectory() as folder:
            args = TrainingArguments(
                folder, max_steps=len(want) - 1, per_device_train_batch_size=2, per_device_eval_batch_size=4,
                gradient_accumulation_steps=accumulated, learning_rate=rate, lr_scheduler_type="constant", optim="sgd",
                max_grad_norm=1e9, train_sampling_strategy="sequential", logging_steps=1, report_to=[],
                save_strategy="no", disable_tqdm=True, use_cpu=ON_CPU,
                parallelism_config=ParallelismConfig(cp_size=2, dp_shard_size=dp),
            )  # fmt: skip
            runs = Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[-4 * dp :])
            runs.train()
            got = [log["loss"] for log in runs.state.log_history if "loss" in log] + [runs.evaluate()["eval_loss"]]
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
            weights = {name: whole(p) for name, p in model.named_parameters()}
            for name, p in true.named_parameters():
                torch.testing.assert_close(weights[name].double(), p, rtol=1e-5, atol=1e-5)
        fused(report, accumulated * (len(want) - 1) + 1)


def logits() -> None:
    """Logits that are read, inside the context or after it, are the stock model's; in evaluation too."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    batch = batch_of(lengths()[0])
    stock, ours = causal(model_of(**SHAPE)), causal(model_of(**SHAPE))
    lowtide.patch(ours)
    apply_policy(ours, ActivationPolicy(keep="attention"))
    for training, inside in itertools.product((True, False), (True, False)):
        found = []
        for model in (ours.train(training), stock.train(training)):
            context, parts = in_parts(mesh, batch)
            with context, torch.set_grad_enabled(training):
                ids, labels, shifted, positions = parts
                out = model(input_ids=ids, labels=labels, shift_labels=shifted, position_ids=positions)
                value = out.logits.detach() + 0 if inside else None
            found.append((out.loss.detach(), out.logits.detach() + 0 if value is None else value))
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    main(vars())
