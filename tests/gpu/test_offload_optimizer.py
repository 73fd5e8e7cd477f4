"""Optimizer states in host memory, on a GPU: the same to the bit, the bytes, the time, and no leak."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from gpu.conftest import no_waits, requested_bytes
from gpu.policy_runs import model_and_ids
from lowtide.errors import UnsupportedError
from lowtide.measure.timing import time_side_by_side
from lowtide.memory import ActivationPolicy, apply_policy, offload_optimizer
from lowtide.memory import optimizer_blocks as blocks
from support import alone

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "adamw-capturable": lambda p: torch.optim.AdamW(p, lr=1e-3, capturable=True),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks for the tests' models."""
    monkeypatch.setattr(blocks, "MIN_BYTES", 1024)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 8 * 2**20)


def states(optimizer: Optimizer) -> list[Tensor]:
    return [v for entry in optimizer.state.values() for v in entry.values() if isinstance(v, Tensor)]


def same_gradients(models: tuple[Any, ...], seed: int) -> None:
    """Put the same random gradients into both: attention's backward adds up in any order."""
    for each in zip(*(model.parameters() for model in models), strict=True):
        generator = torch.Generator("cuda").manual_seed(seed)
        gradient = torch.randn(each[0].shape, generator=generator, device="cuda", dtype=each[0].dtype)
        for p in each:
            p.grad = gradient.clone()


def step_both(models: tuple[Any, ...], optimizers: tuple[Optimizer, ...], seed: int) -> None:
    same_gradients(models, seed)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x.cuda(), y.cuda()) for x, y in zip(a, b, strict=True))


def trained(optimizer: str = "adamw-fused", layers: int = 6, D: int = 512, T: int = 2048, **kwargs: Any) -> Any:
    """Return a model, tokens, its optimizer and the handle, after one step."""
    model, ids = model_and_ids(layers, D, T)
    made = OPTIMIZERS[optimizer](model.parameters())
    handle = offload_optimizer(made, model, **kwargs)
    model(ids).backward()
    made.step()
    made.zero_grad()
    return model, ids, made, handle


@pytest.mark.parametrize(("name", "late"), [*((name, False) for name in OPTIMIZERS), ("adamw-fused", True)])
def test_same_to_the_bit(name: str, late: bool) -> None:
    model, ids = model_and_ids(6, 1024, 1024)
    stock = copy.deepcopy(model)
    ours, theirs = (OPTIMIZERS[name](m.parameters()) for m in (model, stock))
    handle = offload_optimizer(ours, model, late=late)
    for k in range(6):
        model(ids).backward()
        step_both((model, stock), (ours, theirs), k)
    assert handle.host_bytes >= handle.offloaded_bytes > 0
    assert equal(list(model.parameters()), list(stock.parameters()))
    assert equal(states(ours), states(theirs))


def test_beside_layers_that_are_offloaded_too() -> None:
    model, ids = model_and_ids(8, 512, 4096)
    stock = copy.deepcopy(model)
    apply_policy(model, ActivationPolicy(keep="attention", offload=True))
    ours, theirs = (OPTIMIZERS["adamw-fused"](m.parameters()) for m in (model, stock))
    offload_optimizer(ours, model)
    for k in range(5):
        losses = [m(ids) for m in (model, stock)]
        assert torch.equal(*losses)
        losses[0].backward()
        step_both((model, stock), (ours, theirs), k)
    assert equal(states(ours), states(theirs))


def test_bytes_at_the_end_of_forward_and_behind_it() -> None:
    live = {}
    for offloaded in (False, True):
        model, ids = model_and_ids(6, 512, 2048)
        optimizer = OPTIMIZERS["adamw-fused"](model.parameters())
        handle = offload_optimizer(optimizer, model) if offloaded else None
        gc.collect()
        for _ in range(2):
            model(ids).backward()
            optimizer.step()
            optimizer.zero_grad()
        loss = model(ids)
        at_end = requested_bytes()
        loss.backward()
        live[offloaded] = at_end, requested_bytes()
        del loss, model, optimizer
    assert handle is not None
    moved = handle.offloaded_bytes
    assert live[False][0] - live[True][0] == pytest.approx(moved, rel=0.02)
    assert live[False][1] == pytest.approx(live[True][1], abs=0.02 * moved)


def test_the_peak_is_lower_by_the_states_and_the_time_is_not_longer() -> None:
    """Where the layers compute for longer than the copies take, and keep more than their states come to."""
    steps, peaks, moved = {}, {}, 0
    for offloaded in (False, True):
        model, ids = model_and_ids(8, 1024, 32768)
        optimizer = OPTIMIZERS["adamw-fused"](model.parameters())
        handle = offload_optimizer(optimizer, model) if offloaded else None

        def step(model: Any = model, ids: Tensor = ids, optimizer: Optimizer = optimizer) -> None:
            model(ids).backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            step()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        peaks[offloaded] = torch.cuda.max_memory_allocated() - before
        steps[str(offloaded)] = step
        moved = handle.offloaded_bytes if handle else 0
    times = {name: t.median_ms for name, t in time_side_by_side(steps, "cuda", warm=1, reps=5).items()}
    assert peaks[False] - peaks[True] > 0.9 * moved > 0, (peaks, moved)
    assert not alone() or times["True"] < 1.05 * times["False"], times


@pytest.mark.parametrize("moment", ["forward", "backward", "step"])
def test_a_checkpoint_at_any_moment(moment: str) -> None:
    model, ids, optimizer, handle = trained(D=1024)
    want = [state.clone() for state in states(optimizer)]
    found: list[dict[str, Any]] = []

    def take(*_: Any) -> None:
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        found.append(torch.load(file))

    for k in range(0 if moment == "step" else 1, 6):
        if moment == "forward":
            hook = model.blocks[k].register_forward_hook(take)
            model(ids)
        elif moment == "backward":
            hook = model.blocks[k].qkv.weight.register_post_accumulate_grad_hook(take)
            model(ids).backward()
        else:
            model(ids).backward()
            handle.bring_back()
            take()
        if moment != "step":
            hook.remove()
    assert len(found) >= 5
    for saved in found:
        assert equal([v for entry in saved["state"].values() for v in entry.values()], want)


def test_a_hundred_steps_leak_nothing() -> None:
    model, ids, optimizer, handle = trained(D=256, T=256)
    gc.collect()
    gc.disable()
    try:
        host, live = handle.host_bytes, []
        for k in range(100):
            loss = model(ids)
            if k % 7 != 6:
                loss.backward()
            del loss
            if k % 3:
                optimizer.step()
            optimizer.zero_grad()
            live.append(torch.cuda.memory_allocated())
    finally:
        gc.enable()
    assert handle.host_bytes == host > 0
    assert max(live[50:]) <= max(live[:50])
    handle.remove()
    assert handle.host_bytes == 0
    assert all(state.is_cuda for state in states(optimizer) if state.dim())


def test_no_host_synchronisation() -> None:
    model, ids, optimizer, _ = trained(D=256, T=256)
    model(ids).backward()
    optimizer.step()
    with no_waits():
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_an_optimizer_that_goes_while_its_copies_run() -> None:
    """Memory that a copy writes to may not serve others before."""
    for _ in range(4):
        model, ids, optimizer, handle = trained(D=1024, T=128)
        model(ids).backward()
        del optimizer, handle
        fresh = [torch.full((2**20,), 3.0, device="cuda") for _ in range(40)]
        assert all(bool((x == 3).all()) for x in fresh)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_captured_step_is_refused() -> None:
    _, _, optimizer, _ = trained("adamw-capturable", D=256, T=256)
    torch.cuda.synchronize()
    with pytest.raises(UnsupportedError, match="outside of CUDA graphs"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
