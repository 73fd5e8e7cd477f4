"""Planned bytes of several GPUs beside those that ranks hold and exchange, counted as they run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lowtide
from distributed.launch import main
from distributed.models import model_of
from lowtide import HeadOptions
from lowtide.measure.allocations import track_allocations
from lowtide.plan import MemoryPlan, plan_memory
from lowtide.plan.sharding import BUCKET
from lowtide.plan.step_costs import Phase, StepCosts

STAGE = torch.empty(2**23, dtype=torch.uint8)
T = 8  # so few tokens that almost all bytes are parameters'
SIZES = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 4, "head_dim": 32}
MOST_VOCABULARY = {"vocab_size": 8192, "num_hidden_layers": 2}


@contextmanager
def _received(of: Any = None) -> Iterator[list[int]]:
    """Count the bytes that this rank receives by FSDP2's exchanges, which run in place, those ``of`` a group if given.

    gloo's own make copies, and its threads hold the tensors of their last exchange: they get `STAGE` instead.
    """
    found = [0]

    def exchange(*args: Any, gathers: bool, **kwargs: Any) -> None:
        group = next(x for x in (*args, *kwargs.values()) if isinstance(x, dist.ProcessGroup))
        part, whole = sorted((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), key=Tensor.numel)
        n, rank = group.size(), group.rank()
        parts = whole.view(n, -1)
        found[0] += (whole.nbytes - part.nbytes) * (of is None or group is of)
        stage = STAGE.view(whole.dtype)[: part.numel()]
        for at in range(n):
            stage.copy_(part.view(-1) if gathers else parts[at])
            if gathers:
                dist.broadcast(stage, group=group, group_src=at)
                parts[at].copy_(stage)
            else:
                dist.reduce(stage, group=group, group_dst=at)
                if at == rank:
                    part.view(-1).copy_(stage)

    with pytest.MonkeyPatch.context() as patched:
        for name in [name for name in vars(dist) if name.startswith(("all_gather_", "reduce_scatter_"))]:
            patched.setattr(dist, name, partial(exchange, gathers=name.startswith("all")))
        yield found


def _plan(model: Any, way: str, seq_len: int = T, **settings: Any) -> MemoryPlan:
    gpus = dist.get_world_size()
    return plan_memory(model.config, seq_len, 1, device="h100", gpus=gpus, parallel=way, **settings)


def _step(model: Any, *, last: bool = True) -> None:
    ids = torch.randint(0, model.config.vocab_size, (1, T))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    if last:
        model.zero_grad()


def _on_cpu(plan: MemoryPlan, phase: Phase) -> int:
    """Return a phase's bytes without what a step begins with, and with what a CPU takes besides.

    On a CPU, the output layer's gradient in bfloat16 is computed out of place.
    """
    shape = plan.job.shape
    more = 2 * shape.vocab_params if phase.name == "head" else 0
    return phase.bytes - phase.weights - phase.optimizer - phase.other + more


def fsdp2() -> None:
    """Peak and exchanges of a step with the lines that a plan prints."""
    for tied, sizes in ((False, SIZES), (True, SIZES), (False, MOST_VOCABULARY)):
        model = model_of(dtype=torch.float32, tie_word_embeddings=tied, **{**SIZES, **sizes})
        plan = _plan(model, "fsdp2", autocast=True, options=HeadOptions(accumulate="input"))
        plan = replace(plan, chosen=plan.front[0]) if tied else plan  # which recomputes layers
        exec(plan.lines(), {"model": model})
        _step(model)  # FSDP2 makes its buffers
        with _received() as received, track_allocations() as seen:
            _step(model)
        planned = StepCosts(plan.job).phases(plan.chosen.groups)
        where = f"tied {tied}, {plan.title}, {plan.chosen}"
        most = max(_on_cpu(plan, phase) for phase in planned)
        assert most == pytest.approx(seen.peak_bytes, rel=0.04), where
        assert received[0] == plan.exchanged.bytes, where


def zero3() -> None:
    """What DeepSpeed's optimizer holds, and about what a step takes besides."""
    if find_spec("deepspeed") is None:
        return
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from distributed.zero_cases import zero

    model = model_of(**SIZES)
    plan = _plan(model, "zero3", optimizer="sgd")
    lowtide.patch(model)
    engine = zero(model, dtype=torch.bfloat16)
    ids = torch.randint(0, SIZES["vocab_size"], (1, T))

    def forward_and_backward() -> None:
        engine.backward(engine(input_ids=ids, labels=ids).loss)

    for _ in range(2):
        forward_and_backward()
        engine.step()
    sharded = engine.optimizer
    (bucket,) = sharded.ipg_buckets.values()
    held = [sharded.lp_param_buffer, sharded.grad_partitions_flat_buffer, *sharded.fp32_partitioned_groups_flat]
    resident = sum(tensor.nbytes for tensor in held)
    first = plan.phases[0]
    assert resident == first.weights + first.gradients + first.optimizer
    assert bucket.buffer.numel() == BUCKET
    with track_allocations() as seen:
        forward_and_backward()
    most = max(one.bytes - one.other for one in plan.phases) - resident - bucket.buffer.nbytes
    assert 0.5 * most < seen.peak_bytes < 2 * most  # gloo copies what it reduces, and holds the last of it


if __name__ == "__main__":
    main(vars())
