"""What host memory does not hold, in files: with copies that come late, a disk that is slow, and one without room."""

from __future__ import annotations

import copy
import errno
import gc
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from lowtide.memory import apply_policy, disk, offload, remove_policy
from memory.models import OFFLOADED_ATTENTION as ATTENTION
from memory.models import OFFLOADED_INPUT as INPUT
from memory.models import LazySide, Plain, assert_same, step

LAYERS = 10  # eight of which move
OF_TOKEN = {"input": 24 * 4, "attention": 24 * 4 + 24 * 4 + 3 * 4}  # bytes that a layer of `Plain` saves


def budget(policy: Any, ids: Tensor, layers: float) -> float:
    """Return in GiB what so many layers save."""
    return layers * ids.numel() * OF_TOKEN[policy.keep] / 2**30


@pytest.mark.parametrize("held", [0, 1, 3])
@pytest.mark.parametrize("policy", [ATTENTION, INPUT], ids=["attention", "input"])
def test_gradients_are_the_same(
    policy: Any, held: int, side: LazySide, ids: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of the stock model, to the bit, with shorter batches in between; the host's budget is kept, and used.

    Where a layer goes does not depend on the disk, which is slow in every second step.
    """
    write, seconds = disk.File._write, 0.0
    monkeypatch.setattr(disk.File, "_write", lambda *args: (time.sleep(seconds), write(*args)))
    model = Plain(LAYERS)
    stock, most = copy.deepcopy(model), budget(policy, ids, offload.ON_THE_WAY + held)
    report = apply_policy(model, policy, host_gib=most, disk=tmp_path)
    sizes = list[int]()
    for batch in (ids, ids[:, :7], ids + 1, ids, ids + 2):
        assert_same(step(model, batch), step(stock, batch))
        assert side.pinned <= most * 2**30 + 1
        sizes.append(report.disk_bytes)
        seconds = 0.01 - seconds
    of_layer = ids.numel() * OF_TOKEN[policy.keep]
    on_disk = (LAYERS - offload.ON_DEVICE - held) * of_layer
    # How much a layer saves is known after the first one's first tensor, which may have gone to the host before.
    assert on_disk <= sizes[-1] <= on_disk + (of_layer - 1) * (policy is ATTENTION)
    assert len(set(sizes[2:])) == 1
    assert "host or disk" in str(report)
    assert list(tmp_path.iterdir()) == []
    remove_policy(model)
    gc.collect()
    assert side.pinned == report.host_bytes == report.disk_bytes == 0


def test_nothing_is_written_while_it_fits(side: LazySide, ids: Tensor, tmp_path: Path) -> None:
    model = Plain(LAYERS)
    report = apply_policy(
        model, INPUT, host_gib=budget(INPUT, ids, LAYERS - offload.ON_DEVICE + offload.ON_THE_WAY), disk=tmp_path
    )
    step(model, ids)
    assert report.disk_bytes == 0
    assert report.host_bytes > 0


def test_graphs_of_all_kinds(side: LazySide, ids: Tensor, tmp_path: Path) -> None:
    """Two forwards before a backward, a graph that is walked twice, and those that nobody walks."""
    model = Plain(LAYERS)
    stock = copy.deepcopy(model)
    apply_policy(model, INPUT, host_gib=budget(INPUT, ids, 2 * offload.ON_THE_WAY), disk=tmp_path)
    for one in (model, stock):
        first, second = one(ids), one(ids.flip(0))
        first.backward(retain_graph=True)
        second.backward()
        first.backward()
    for p, q in zip(model.parameters(), stock.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    for k in range(6):
        loss = model(ids)
        if k % 2:  # what is being read when its graph dies
            torch.autograd.grad(loss, model.blocks[-3].norm.weight)
        del loss
    gc.collect()
    model.zero_grad()
    stock.zero_grad()
    assert_same(step(model, ids), step(stock, ids))


def test_no_room(side: LazySide, ids: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the disk, or for what is on its way there; nothing is held afterwards, and with room it runs."""
    model = Plain(LAYERS)
    apply_policy(model, INPUT, host_gib=budget(INPUT, ids, offload.ON_THE_WAY - 0.1), disk=tmp_path)
    with pytest.raises(UnsupportedError, match=r"host_gib: expected .* for 4 layers on their way to the disk"):
        step(model, ids)
    report = apply_policy(model, INPUT, host_gib=budget(INPUT, ids, offload.ON_THE_WAY), disk=tmp_path)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(UnsupportedError, match=r"disk: expected room for \d+ more bytes in .*No space left"):
            step(model, ids)
    assert report.disk_bytes == 0
    step(model, ids)
    assert report.disk_bytes > 0


@pytest.mark.parametrize("when", ["write", "read"])
def test_a_disk_that_fails(
    when: str, side: LazySide, ids: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step raises, and does not hang or go on with other numbers."""
    model = Plain(LAYERS)
    apply_policy(model, INPUT, host_gib=budget(INPUT, ids, offload.ON_THE_WAY), disk=tmp_path)
    step(model, ids)

    def fails(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(disk.File, f"_{when}", fails)
        with pytest.raises(OSError, match="Input/output error"):
            step(model, ids)
    gc.collect()
    model.zero_grad()
    step(model, ids)


def test_wrong_folders(side: LazySide, tmp_path: Path) -> None:
    with pytest.raises(ArgumentValueError, match=r"disk: expected a folder that can be written to, got .*none"):
        apply_policy(Plain(4), INPUT, disk=tmp_path / "none")
    with pytest.raises(ArgumentTypeError, match="disk: expected a folder's path, got 3"):
        apply_policy(Plain(4), INPUT, disk=3)  # type: ignore[arg-type]
