"""Offloaded optimizer states in the steps of a training loop: closures, errors, scaled gradients, schedules, groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from memory.models import LazySide
from memory.states import Pair, batch

pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.mark.parametrize("named", [False, True])
def test_a_closure(named: bool, side: LazySide) -> None:
    """It runs where it always ran; its arguments, its result and what a wrapper reads of it are those of before."""
    pair = Pair()
    pair.train(2)
    seen: list[Any] = []
    pair.ours.register_step_post_hook(lambda _, args, kwargs: seen.append((*args, *kwargs.items())))
    for k in range(2):
        results = []
        for model, optimizer in pair.both():

            def closure(model: Any = model, optimizer: Any = optimizer, k: int = k) -> Tensor:
                """Compute the loss."""
                optimizer.zero_grad()
                loss: Tensor = model(batch(k))
                assert pair.where() == {"device"}  # the step that is under way needs them
                loss.backward()
                return loss

            results.append(optimizer.step(closure=closure) if named else optimizer.step(closure))
        assert torch.equal(*results)
        optimizer, given = seen.pop()
        assert optimizer is pair.ours
        assert (given[1] if named else given).__doc__ == "Compute the loss."
        pair.same()
        pair.backward(k)
        pair.step()
        seen.clear()


@pytest.mark.parametrize("why", ["a gradient", "the closure"])
def test_a_step_that_raises(why: str, side: LazySide) -> None:
    """For lack of memory, say: the next forward has the states leave all the same, also where steps go on raising."""
    pair = Pair()
    pair.train(2)
    param = next(pair.model.parameters())

    def closure() -> Tensor:
        raise MemoryError

    for _ in range(2):
        pair.backward(0)
        if why == "a gradient":
            param.grad = torch.ones_like(param).to_sparse()
        with pytest.raises((RuntimeError, MemoryError)):
            pair.ours.step(closure if why == "the closure" else None)
        assert pair.where() == {"device"}
        pair.zero_grad()
        pair.backward(1)
        assert pair.where() == {"coming"}, "they left in forward"
    pair.step()
    pair.train(2)


def in_groups(model: nn.Module) -> Optimizer:
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 1e-3, "betas": (0.5, 0.6)}]
    return torch.optim.AdamW(groups, lr=1e-2, fused=True)


@pytest.mark.parametrize("scheduled", ["before", "behind"])
def test_schedules_groups_and_clipped_gradients(scheduled: str, side: LazySide) -> None:
    schedules: list[LRScheduler] = []

    def schedule(pair: Pair) -> None:
        schedules.extend(OneCycleLR(optimizer, 1e-2, total_steps=9) for _, optimizer in pair.both())

    pair = Pair(in_groups, before=schedule if scheduled == "before" else lambda pair: None)
    if scheduled == "behind":
        schedule(pair)
    for k in range(5):
        for (each, optimizer), to_none in zip(pair.both(), (k % 2 == 0, True), strict=True):
            each(batch(k)).backward()
            nn.utils.clip_grad_norm_(each.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        for each in schedules:
            each.step()
        pair.same()
    assert pair.handle.offloaded_bytes > 0


def test_a_gradient_scaler(side: LazySide) -> None:
    """It unscales between backward and step, and leaves out a step whose gradients are not finite."""
    pair = Pair()
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) for _ in range(2)]
    for k in range(6):
        for (model, optimizer), scaler in zip(pair.both(), scalers, strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(batch(k))
            scaler.scale(loss).backward()
            if k == 3:
                next(model.parameters()).grad[0] = torch.inf
            if k % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    pair.handle.bring_back()
    pair.same()
