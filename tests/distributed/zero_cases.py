"""DeepSpeed's ZeRO-2 and ZeRO-3 around a patched model, on ranks with data of their own."""

from __future__ import annotations

import copy
import itertools
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

os.environ.setdefault("DS_ACCELERATOR", os.environ.get("RANKS_DEVICE", "cpu"))
import deepspeed

import lowtide
from distributed.fsdp_cases import Functional, batch_of, model_of
from distributed.launch import main, named

RATE = 0.5


def zero(model: Any, stage: int) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def weights(engine: Any, stage: int) -> dict[str, Tensor]:
    found = {}
    for name, p in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([p], enabled=stage == 3):
            found[name] = p.detach().clone()
    return found


def patched_models() -> None:
    """Two steps: losses and weights are those of the stock model in the same engine.

    With ZeRO-2 the losses are fused. ZeRO-3 puts a function of its own behind each module, which reads what that
    returns: the logits are built, as the report says.
    """
    rank = dist.get_rank()
    for stage, tied, gradient in itertools.product((2, 3), (True, False), ("forward", "recompute")):
        model = model_of("llama", tied=tied)
        stock = zero(copy.deepcopy(model), stage)
        report = lowtide.patch(model, options=lowtide.HeadOptions(gradient=gradient))
        engine = zero(model, stage)
        what = f"stage {stage} tied {tied} {gradient}"
        for _ in range(2):
            losses = []
            for one in (engine, stock):
                loss = one(**batch_of(rank)).loss
                one.backward(loss)
                one.step()
                losses.append(loss.detach())
            torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5, msg=lambda m, what=what: f"{what}: {m}")
        want = weights(stock, stage)
        for name, weight in weights(engine, stage).items():
            said = f"{what} {name}"
            torch.testing.assert_close(weight, want[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=said: f"{n}: {m}")
        expected = (2, 0)
        assert (report.calls_fused, report.calls_materialised) == expected, f"{what}\n{report}"


def functional_head() -> None:
    """The function inside the head's forward, where ZeRO-3 has gathered the weight; in backward too, if recomputed."""
    rank = dist.get_rank()
    for stage, gradient in itertools.product((2, 3), ("forward", "recompute")):
        model = model_of("llama", tied=False)
        stock = zero(Functional(copy.deepcopy(model), "stock"), stage)
        engine = zero(Functional(model, "inside", lowtide.HeadOptions(gradient=gradient)), stage)
        for _ in range(2):
            losses = []
            for one in (engine, stock):
                loss = one(**batch_of(rank)).loss
                one.backward(loss)
                one.step()
                losses.append(loss.detach())
            torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
        want = weights(stock, stage)
        for name, weight in weights(engine, stage).items():
            torch.testing.assert_close(weight, want[name], rtol=1e-4, atol=1e-5)


CASES = named(patched_models, functional_head)

if __name__ == "__main__":
    main(CASES)
