"""Memory and time of what runs: every allocation, peaks above the start, interleaved rounds, what the host has left."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.errors import UnsupportedError
from lowtide.measure import resident
from lowtide.measure.allocations import track_allocations
from lowtide.measure.failures import is_out_of_memory
from lowtide.measure.resident import available_bytes, peak_resident_bytes, resident_bytes
from lowtide.measure.timing import Timing, kept_above, peak_above, time_side_by_side
from promises import promise

pytestmark = promise("memory")
MIB = 1 << 20


@torch.library.custom_op("lowtide_tests::hidden_logits", mutates_args=())
def hidden_logits(x_ND: Tensor, w_VD: Tensor, target_N: Tensor) -> Tensor:
    """A small output; the logits live and die inside the operator."""
    return F.cross_entropy(x_ND @ w_VD.T, target_N)


def test_what_an_operator_allocates_inside_is_seen_and_so_is_backward() -> None:
    N, D, V = 96, 32, 4096
    x, w, y = torch.randn(N, D), torch.randn(V, D, requires_grad=True), torch.randint(V, (N,))
    with track_allocations() as seen:
        hidden_logits(x, w.detach(), y)
    assert seen.largest_bytes >= N * V * 4
    with track_allocations() as seen:
        F.cross_entropy(x @ w.T, y).backward()
    assert seen.peak_bytes >= 2 * N * V * 4  # logits and their log-probabilities


def test_sizes_are_exact_and_frees_are_counted() -> None:
    held = torch.empty(8 << 20, dtype=torch.uint8)
    with track_allocations() as seen:
        a = torch.empty(1 << 20, dtype=torch.uint8)
        del a
        b, c = torch.empty(3 << 20, dtype=torch.uint8), torch.empty(2 << 20, dtype=torch.uint8)
        del b, c
    assert [event.bytes >> 20 for event in seen.events][:4] == [1, -1, 3, 2]
    assert (seen.largest_bytes, seen.peak_bytes, seen.events[-1].total_bytes) == (3 << 20, 5 << 20, 0)
    assert held.numel() == 8 << 20


def test_a_peak_counts_what_is_left_behind_and_what_is_saved_is_the_result_and_what_it_holds() -> None:
    x = torch.ones(MIB // 4, requires_grad=True)

    def step() -> None:
        (x * torch.full_like(x, 2)).sum().backward()

    assert 2 * MIB <= peak_above(step, "cpu") < 3 * MIB  # the factor and, in the end, x's gradient
    x.grad = None
    assert peak_above(lambda: torch.empty(MIB, dtype=torch.uint8), "cpu") == MIB
    assert peak_above(lambda: None, "cpu") == 0
    kept_above(lambda: x.exp().sin(), "cpu")
    assert kept_above(lambda: x.exp().sin(), "cpu") == 2 * MIB  # the result, and what sin read
    assert kept_above(lambda: x.exp().sin().detach(), "cpu") == MIB
    assert kept_above(lambda: None, "cpu") == 0


def test_candidates_are_interleaved_and_warm_rounds_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits, calls = [5.0], iter([0.2, 0.02, 0.03, 0.06]), []  # the first round is warm

    def wait() -> None:
        calls.append("waits")
        now[0] += next(waits)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])  # a busy machine makes real waits of any length
    timings = time_side_by_side({"waits": wait, "nothing": lambda: calls.append("nothing")}, "cpu", warm=1, reps=3)
    assert calls == ["waits", "nothing"] * 4
    assert timings["waits"].times_ms == pytest.approx((20, 30, 60))
    assert timings["nothing"].times_ms == (0, 0, 0)
    assert (Timing((2.0, 9.0, 3.0)).median_ms, Timing((2.0, 9.0, 3.0)).spread) == (3, 3.5)


LACKS = (  # PyTorch's allocator has a class of its own; these do not
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory"),
)
OTHERS = (RuntimeError("shapes cannot be multiplied"), ValueError("out of memory"), UnsupportedError("out of memory"))


def test_what_is_a_lack_of_memory() -> None:
    assert [is_out_of_memory(error) for error in (*LACKS, *OTHERS)] == [True] * len(LACKS) + [False] * len(OTHERS)
    with pytest.raises(RuntimeError) as ended:
        torch.empty(2**61, dtype=torch.uint8)
    assert is_out_of_memory(ended.value)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8 GiB available and no control group yet; returns where the group's files belong."""
    (tmp_path / "meminfo").write_text("MemTotal: 16777216 kB\nMemFree: 1024 kB\nMemAvailable: 8388608 kB\n")
    monkeypatch.setattr(resident, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(resident, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(resident, "_OWN_CGROUP", tmp_path / "own")
    (tmp_path / "cgroup" / "memory").mkdir(parents=True)
    return tmp_path / "cgroup"


def test_this_machine() -> None:
    assert 0 < resident_bytes() <= peak_resident_bytes()
    assert 0 < available_bytes() < 1 << 50


NAMES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("inner", "outer", "left"),
    [(None, None, 8192), (3000, 5000, 1300), (5000, 3000, 1300), (None, 2400, 700), (1000, None, 0)],
)
def test_a_control_group_and_those_above_it(
    machine: Path, version: int, inner: int | None, outer: int | None, left: int
) -> None:
    """A scheduler's job: 1,900 MiB are used, 200 of them a cache of files that can go."""
    folder = machine if version == 2 else machine / "memory"
    (machine.parent / "own").write_text("0::/slurm/job_7\n" if version == 2 else "4:cpu,memory:/slurm/job_7\n0::/\n")
    limit_name, usage_name, cache_name = NAMES[version]
    (folder / "slurm" / "job_7").mkdir(parents=True)
    for group, limit in (("slurm", outer), ("slurm/job_7", inner)):
        (folder / group / limit_name).write_text("max\n" if limit is None else f"{limit * MIB}\n")
        (folder / group / usage_name).write_text(f"{1900 * MIB}\n")
        (folder / group / "memory.stat").write_text(f"anon {MIB}\n{cache_name} {200 * MIB}\nactive_file {MIB}\n")
    assert available_bytes() == left * MIB


@pytest.mark.parametrize("own", ["0::/../other\n", "nonsense\n", ""])
def test_a_group_that_cannot_be_seen(machine: Path, own: str) -> None:
    (machine.parent / "own").write_text(own)
    assert available_bytes() == 8192 * MIB
