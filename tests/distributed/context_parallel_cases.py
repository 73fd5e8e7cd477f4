"""PyTorch's context parallelism around a patched model and layers under a policy, beside the stock model and float64.

Each rank has its shard of every sequence, and attention goes round the ring. On the CPU the ring runs the CPU's flash
attention (`distributed.ring`), on GPUs whatever PyTorch takes.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

import lowtide
from distributed.launch import DEVICE, SEED, THOROUGH, main, slow
from distributed.models import VOCAB, counted, fused, gradients, model_of, near, whole
from distributed.ring import ring_on_cpus
from lowtide.distributed import count_items
from lowtide.memory import ActivationPolicy, apply_policy, copies
from memory.models import LazySide
from pages.blocks import all_blocks, compiled
from support import forget_accelerate

ON_CPU = DEVICE == "cpu"
SHAPE = {"num_hidden_layers": 3, "hidden_size": 32, "head_dim": 8}
# Of a half of a rank's shard, how many tokens: PyTorch balances a length that the ranks can halve, and of float32 on
# GPUs takes whole tiles alone.
BALANCED = 3 if ON_CPU else 32
if ON_CPU:
    ring_on_cpus()


def batch_of(T: int, stream: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and labels; some are ignored, and the second sequence's first half."""
    g = torch.Generator().manual_seed(stream + SEED)
    ids = torch.randint(3, VOCAB, (2, T), generator=g)
    labels = ids.where(torch.rand(2, T, generator=g) > 0.3, -100)
    labels[1, : T // 2] = -100
    return ids.to(DEVICE), labels.to(DEVICE)


def causal(model: Any) -> Any:
    """Drop masks, which the ring does not have: transformers takes an early and a late chunk for packed sequences."""

    def without_mask(_: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "attention_mask": None, "is_causal": True}

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(without_mask, with_kwargs=True)
    return model


def step(model: Any, mesh: Any, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    parts = [ids.clone(), labels.clone(), shifted, torch.arange(ids.shape[1], device=DEVICE).repeat(len(ids), 1)]
    with context_parallel(mesh, buffers=parts, buffer_seq_dims=[1] * 4, no_restore_buffers=set(parts)):
        names = ("input_ids", "labels", "shift_labels", "position_ids")
        items = count_items(parts[2])
        loss = model(**dict(zip(names, parts, strict=True)), num_items_in_batch=items).loss
        loss.backward()
    return mean_of_ranks(model, loss)


def mean_of_ranks(model: Any, loss: Any) -> dict[str, Tensor]:
    """Return the ranks' mean of losses and gradients, as FSDP2 takes it."""
    found = {"loss": loss.detach(), **gradients(model)}
    for value in found.values():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return found


def truth(model: Any, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return what one process computes of the whole sequences in float64."""
    model = copy.deepcopy(model).double()
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


def policies() -> None:
    """Whatever layers save: losses and gradients are one process's, and saved attention is not sent round again."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    P, recompute = ActivationPolicy, lowtide.HeadOptions(gradient="recompute")
    # Rounds of the ring in a step: the three layers' forwards, and those that backward repeats.
    ways: list[tuple[ActivationPolicy | None, int, lowtide.HeadOptions | None]] = [
        (None, 3, recompute),
        (P(keep="attention", mlp_level=0), 3, None),
        (P(keep="attention", offload=True), 3, None),
        (P(keep="input", mlp_level=1, mlp_tile_tokens=4), 6, None),
        (P(keep="input", every=2), 7, None),
    ]
    ranks = dist.get_world_size()
    for T in [2 * BALANCED * ranks, *([5 * ranks] if ON_CPU and THOROUGH else [])]:  # balanced, and one chunk a rank
        model, batch = model_of(**SHAPE), batch_of(T)
        true, stock = truth(model, *batch), step(causal(copy.deepcopy(model)), mesh, *batch)
        for policy, rounds, options in ways:
            ours, side = copy.deepcopy(model), LazySide()
            with pytest.MonkeyPatch.context() as patched:
                if ON_CPU:
                    patched.setattr(copies, "available", lambda: True)
                    patched.setattr(copies, "side_for", lambda _, side=side: side)
                report = lowtide.patch(ours, options=options)
                if policy is not None:
                    apply_policy(ours, policy)
                causal(ours)
                with counted(ring, "_templated_ring_attention") as calls:
                    near(step(ours, mesh, *batch), stock, true, (T, policy))
            assert calls == [rounds], policy
            fused(report, 1, what=policy)
            assert all(row.patched for row in report.parts.values()), f"{policy} {report}"


def documented() -> None:
    """The page's own code, with a model, a batch and a mesh."""
    (block,) = (block for block in all_blocks("python") if "with context_parallel(" in block.code)
    ids, labels = batch_of(2 * BALANCED * dist.get_world_size())
    model = model_of(**SHAPE)
    true, stock = truth(model, ids, labels), causal(copy.deepcopy(model))
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    names = {"lowtide": lowtide, "torch": torch, "count_items": count_items, "model": model, "mesh": mesh}
    names |= {"ids": ids.clone(), "labels": labels.clone()}
    exec(compiled(block), names)
    near(mean_of_ranks(model, names["loss"]), step(stock, mesh, ids, labels), true, block)
    fused(names["report"], 1)


@contextmanager
def fsdp2() -> Iterator[None]:
    """What ``accelerate launch`` sets for FSDP2, and what lets accelerate share out sequences on CPUs too."""
    from accelerate import ParallelismConfig

    from distributed.train_faults import take_fsdp2
    from distributed.train_runs import ENGINES

    stock = ParallelismConfig._validate_accelerator

    def validate(self: Any, accelerator: Any) -> None:
        take_fsdp2(accelerator.state)
        stock(self, accelerator)

    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(ParallelismConfig, "_validate_accelerator", validate)
            for name, value in (ENGINES["fsdp2"] | {"FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}).items():
                patched.setenv(name, value)
            yield
    finally:
        forget_accelerate()


@slow
def trainer() -> None:
    """transformers' Trainer with ``cp_size``: losses, held-out losses and weights of one process, accumulated too."""
    from accelerate import ParallelismConfig
    from transformers import Trainer, TrainingArguments

    dp, T, rate = dist.get_world_size() // 2, 4 * BALANCED, 0.1
    ids, labels = (torch.cat(x).cpu() for x in zip(*(batch_of(T, i) for i in range(4 * dp)), strict=True))
    rows = [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]
    model = model_of(**SHAPE)
    true, held_out = copy.deepcopy(model).double(), slice(-4 * dp, None)
    optimizer, want = torch.optim.SGD(true.parameters(), lr=rate), []
    for part in (slice(0, 4 * dp), held_out):
        loss = true(input_ids=ids[part].to(DEVICE), labels=labels[part].to(DEVICE)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        want.append(loss.item())
    with torch.no_grad():
        want.append(true(input_ids=ids[held_out].to(DEVICE), labels=labels[held_out].to(DEVICE)).loss.item())
    report = lowtide.patch(model)
    apply_policy(model, ActivationPolicy(keep="input"))
    with fsdp2(), tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=2, per_device_train_batch_size=2, per_device_eval_batch_size=4,
            gradient_accumulation_steps=2, learning_rate=rate, lr_scheduler_type="constant", optim="sgd",
            max_grad_norm=1e9, train_sampling_strategy="sequential", logging_steps=1, report_to=[],
            save_strategy="no", disable_tqdm=True, use_cpu=ON_CPU,
            parallelism_config=ParallelismConfig(cp_size=2, dp_shard_size=dp),
        )  # fmt: skip
        runs = Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[held_out])
        runs.train()
        got = [log["loss"] for log in runs.state.log_history if "loss" in log] + [runs.evaluate()["eval_loss"]]
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        for (name, p), right in zip(model.named_parameters(), true.parameters(), strict=True):
            torch.testing.assert_close(whole(p).double(), right, rtol=1e-5, atol=1e-5, msg=name)
    fused(report, 5)


if __name__ == "__main__":
    main(vars())
