"""Planned bytes of several GPUs beside those that ranks hold and exchange, counted as they run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from distributed.launch import main
from distributed.models import model_of
from lowtide import HeadOptions, patch
from lowtide.measure.allocations import track_allocations
from lowtide.memory import apply_policy
from lowtide.plan import plan_memory
from lowtide.plan.step_costs import StepCosts

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


def _shard(model: Any, *, tied: bool) -> None:
    """Share a model in the units that are planned: accelerate's."""
    policy: Any = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    for layer in model.get_decoder().layers:
        fully_shard(layer, **policy)
    if not tied:
        fully_shard(model.get_input_embeddings(), **policy)
        fully_shard(model.get_output_embeddings(), reshard_after_forward=False, **policy)
    fully_shard(model, **policy)


def fsdp2() -> None:
    """Peak and exchanges of a step under a plan's policies."""
    for tied, sizes in ((False, MOST_VOCABULARY), (True, SIZES)):
        model = model_of(dtype=torch.float32, tie_word_embeddings=tied, **{**SIZES, **sizes})
        settings = {"device": "h100", "gpus": dist.get_world_size(), "parallel": "fsdp2", "autocast": True}
        options = HeadOptions(accumulate="input")
        plan = plan_memory(model.config, T, 1, options=options, **settings)
        plan = replace(plan, chosen=plan.search.front[0]) if tied else plan  # which recomputes layers
        model.config.use_cache = False
        patch(model, options=options)
        apply_policy(model, plan.policies)
        _shard(model, tied=tied)
        ids = torch.randint(0, model.config.vocab_size, (1, T))

        def step(model: Any = model, ids: Tensor = ids) -> None:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            model.zero_grad()

        step()  # FSDP2 makes its buffers
        with _received() as received, track_allocations() as seen:
            step()
        # Without what a step begins with; on a CPU, the output layer's gradient in bfloat16 is computed out of place.
        most = max(
            phase.bytes - phase.weights - phase.optimizer - phase.other
            + (2 * plan.job.model.vocab_params if phase.name == "head" else 0)
            for phase in StepCosts(plan.job).phases(plan.chosen.groups)
        )  # fmt: skip
        where = f"tied {tied}, {plan.title}, {plan.chosen}"
        assert most == pytest.approx(seen.peak_bytes, rel=0.04), where
        assert received[0] == plan.search.costs.ranks.received, where


if __name__ == "__main__":
    main(vars())
