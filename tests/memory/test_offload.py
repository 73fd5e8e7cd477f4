"""Offloading, with a host beside the host: copies come as late as they may, and what is used too soon is NaN."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.errors import UnsupportedError
from lowtide.measure.allocations import track_allocations
from lowtide.memory import ActivationPolicy, apply_policy, offload, pinned, remove_policy
from memory.models import OFFLOADED_ATTENTION as ATTENTION
from memory.models import OFFLOADED_INPUT as INPUT
from memory.models import VOCAB, LazySide, Plain, step


@pytest.mark.parametrize("policy", [ATTENTION, INPUT], ids=["attention", "input"])
def test_device_memory_after_forward(policy: Any, side: LazySide) -> None:
    """What moved is gone from the device: only the last layers' is there."""
    tokens, D, heads, layers = 512, 64, 4, 9
    model, ids = Plain(layers, D, heads), torch.randint(3, VOCAB, (1, 512))
    apply_policy(model, policy)
    step(model, ids)  # the pool is full from now on, so that host memory is no part of what comes
    live = {}
    for each in (policy, ActivationPolicy(keep=policy.keep)):
        if each is not policy:
            apply_policy(model, each)
        with track_allocations() as seen:
            loss = model(ids)
        live[each.offload] = seen.events[-1].total_bytes
        del loss
    kept = 4 * D + (4 * D + 4 * heads) * (policy is ATTENTION)
    # A list of layers that stay is 1/9 each; the random state and such are the same in both.
    assert abs((live[False] - live[True]) / tokens - (layers - offload.ON_DEVICE) * kept) < 16


def test_device_memory_with_a_retained_graph(side: LazySide) -> None:
    """After backward with retain_graph only the layers that backward ended with are on the device."""
    tokens, D, layers = 512, 64, 9
    model, ids = Plain(layers, D, heads=4), torch.randint(3, VOCAB, (1, 512))
    apply_policy(model, INPUT)
    step(model, ids)
    loss = model(ids)
    with track_allocations() as seen:
        loss.backward(retain_graph=True)
    assert seen.events[-1].total_bytes <= 2 * tokens * 4 * D + 20_000
    loss.backward()


def test_forty_steps_leak_nothing(side: LazySide) -> None:
    """Neither on the host, which grows to the longest batch, nor on the device; backward or not."""
    model = Plain(6)
    report = apply_policy(model, ATTENTION)
    longest = torch.randint(3, VOCAB, (2, 29))
    for length in (5, 17, 29, 12):
        step(model, longest[:, :length])
    full = side.pinned
    assert full == 4 * longest.numel() * (24 * 4 + 24 * 4 + 3 * 4)
    gc.disable()  # graphs must die by themselves
    try:
        with track_allocations() as seen:
            for k in range(40):
                batch = longest[: 1 + k % 2, : 5 + (7 * k) % 24]
                model(batch) if k % 5 == 4 else step(model, batch)
            model.zero_grad()
    finally:
        gc.enable()
    assert side.pinned == full == report.host_bytes
    assert seen.events[-1].total_bytes < 800
    assert seen.peak_bytes < 100 * sum(p.numel() * 4 for p in model.parameters())
    remove_policy(model)
    assert side.pinned == report.host_bytes == 0


def test_a_budget_that_does_not_suffice_is_refused_in_the_first_layer(side: LazySide, ids: Tensor) -> None:
    model = Plain(8)
    kept = 6 * ids.numel() * 24 * 4
    apply_policy(model, INPUT, host_gib=(kept - 1) / 2**30)
    ran = []
    model.blocks[1].register_forward_pre_hook(lambda *_: ran.append(1))
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"host_gib: expected .* GiB of host memory for 6 offloaded layers"):
            step(model, ids)
    assert ran == []
    assert side.pinned == 0
    apply_policy(model, INPUT, host_gib=kept / 2**30)
    step(model, ids)
    assert side.pinned == kept
    loss = model(ids)
    with pytest.raises(UnsupportedError, match="graphs that are alive"):
        model(ids)
    del loss
    gc.collect()
    step(model, ids)  # the graphs that were in the way are gone


@pytest.mark.parametrize(
    ("layers", "policy", "budget", "said"),
    [  # not as "expected 0.000 GiB, got 0.000 GiB": 14976 bytes are needed
        (8, INPUT, 1e-5, r"expected 1\.4e-05 GiB .* got 1e-05 GiB \(host_gib\), 3\.9e-06 GiB too little"),
        (4, ATTENTION, (2 * 26 * (24 * 4 + 24 * 4 + 3 * 4) - 1) / 2**30, "2 offloaded layers"),
        (8, INPUT, None, "what the host has free"),
        (8, INPUT, 5, "what the host has free"),
    ],
)
def test_a_budget_is_never_exceeded(
    layers: int, policy: Any, budget: Any, said: str, side: LazySide, monkeypatch: pytest.MonkeyPatch, ids: Tensor
) -> None:
    if "free" in said:
        monkeypatch.setattr(pinned, "available_bytes", lambda: (1 << 30) + 1000)
    model = Plain(layers)
    apply_policy(model, policy, host_gib=budget)
    with pytest.raises(UnsupportedError, match=said):
        step(model, ids)
    if policy is ATTENTION:
        apply_policy(model, policy, host_gib=budget + 1 / 2**30)
        step(model, ids)


def test_changed_in_place_raises(side: LazySide, ids: Tensor) -> None:
    model = Plain(6)
    apply_policy(model, INPUT)
    step(model, ids)
    model.blocks[1].norm.register_forward_pre_hook(lambda _, args: args[0].mul_(1.01))
    with pytest.raises(UnsupportedError, match="in-place"):
        step(model, ids)


def test_each_layer_is_brought_back_while_the_one_after_it_computes(side: LazySide) -> None:
    offloader = offload.Offloader(None, 6, 6)
    tensors = [torch.randn(3) for _ in range(6)]
    records, gets = [], []
    for k, tensor in enumerate(tensors):
        records.append(offloader.begin(moves=k < 4))
        gets.append([records[-1].put(tensor), records[-1].put(2 * tensor)])
    assert (side.copies, side.begun_back) == (8, 0)
    for k, begun in ((5, 0), (4, 2), (3, 4), (2, 6), (1, 8), (0, 8)):
        assert torch.equal(gets[k][0](), tensors[k])
        assert side.begun_back == begun, k
        assert torch.equal(gets[k][1](), 2 * tensors[k])
        gets.pop()
        records.pop()
    # A record that is brought back and never read gives its memory back all the same.
    assert side.pinned > 0
    del offloader
    gc.collect()
    assert side.pinned == 0


def test_layouts_of_every_kind_come_back_as_they_were(side: LazySide) -> None:
    offloader = offload.Offloader(None, 10, 10)
    base = torch.randn(6, 8, 10)
    for tensor in (base, base.transpose(0, 2), base[:, 1:7:2], base[:1].expand(5, 8, 10), base.bfloat16(), base[0, 0]):
        record = offloader.begin(moves=True)
        get = record.put(tensor)
        for _ in range(offload.IN_FLIGHT):
            offloader.begin(moves=True)
        got = get()
        assert torch.equal(got, tensor)
        assert got.dtype == tensor.dtype
        if tensor.numel() == tensor.untyped_storage().nbytes() // tensor.itemsize:
            assert got.stride() == tensor.stride()


def test_removed_between_forward_and_backward(side: LazySide, ids: Tensor) -> None:
    model = Plain()
    stock = copy.deepcopy(model)
    report = apply_policy(model, ATTENTION)
    loss = model(ids)
    remove_policy(model)
    assert report.host_bytes > 0
    loss.backward()
    del loss
    assert side.pinned == report.host_bytes == 0
    gradients = step(stock, ids)[1]
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::DeprecationWarning")  # of the compiler's own doing
@pytest.mark.parametrize("how", ["model", "layers", "parts"])
def test_beside_torch_compile(how: str, llama: Any, side: LazySide, ids: Tensor) -> None:
    """An offloaded layer runs in eager, once, and its parts may be compiled."""
    model = llama(num_hidden_layers=3)
    stock = copy.deepcopy(model)
    apply_policy(model, ATTENTION)
    for module in [model.model] if how == "model" else model.model.layers:
        (module.mlp if how == "parts" else module).compile(backend="aot_eager")
    got, want = step(model, ids), step(stock, ids)
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(got[0], want[0])
    assert side.copies == 3  # of the one layer that moves


def test_nothing_to_offload_from(monkeypatch: pytest.MonkeyPatch, ids: Tensor) -> None:
    model = Plain()
    monkeypatch.setattr("lowtide.memory.copies.available", lambda: False)
    with pytest.raises(UnsupportedError, match="a GPU to offload from"):
        apply_policy(model, INPUT)
    monkeypatch.setattr("lowtide.memory.copies.available", lambda: True)
    apply_policy(model, INPUT)
    with pytest.raises(UnsupportedError, match="offload: expected a CUDA device, got cpu"):
        step(model, ids)


@pytest.mark.parametrize(("limit", "most"), [(None, 250), (700, 700)])
def test_processes_of_a_machine_share_what_is_free(
    limit: int | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(pinned, "available_bytes", lambda: (1 << 30) + 1000)
    pool = pinned.HostPool(limit, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), lambda memory: None)
    pool.check(most, "it")
    with pytest.raises(UnsupportedError, match="host_gib" if limit else "each of 4 processes"):
        pool.check(most + 1, "it")
