"""The host memory that can still be taken: the machine's, and what a control group leaves of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide.measure import resident
from lowtide.measure.resident import available_bytes, resident_bytes

MIB = 1 << 20


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
    assert resident_bytes() < available_bytes() + resident_bytes() < 1 << 50


def test_without_a_control_group(machine: Path) -> None:
    assert available_bytes() == 8192 * MIB


@pytest.mark.parametrize(
    ("limit", "left"), [("max", 8192), (str(3000 * MIB), 1300), (str(1000 * MIB), 0), (str(1 << 45), 8192)]
)
def test_version_2(machine: Path, limit: str, left: int) -> None:
    """1,900 MiB are used, 200 of them a cache of files that can go."""
    (machine / "memory.max").write_text(f"{limit}\n")
    (machine / "memory.current").write_text(f"{1900 * MIB}\n")
    (machine / "memory.stat").write_text(f"anon {MIB}\ninactive_file {200 * MIB}\nactive_file {MIB}\n")
    assert available_bytes() == left * MIB


def test_version_1(machine: Path) -> None:
    (machine / "memory" / "memory.limit_in_bytes").write_text(f"{3000 * MIB}\n")
    (machine / "memory" / "memory.usage_in_bytes").write_text(f"{1900 * MIB}\n")
    (machine / "memory" / "memory.stat").write_text(f"inactive_file {MIB}\ntotal_inactive_file {200 * MIB}\n")
    assert available_bytes() == 1300 * MIB


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("inner", "outer", "left"), [(3000, 5000, 1100), (5000, 3000, 1100), (None, 2400, 500)])
def test_a_group_below_the_root(machine: Path, version: int, inner: int | None, outer: int, left: int) -> None:
    """A scheduler's job: the limit of its group and of every group above it holds."""
    folder = machine if version == 2 else machine / "memory"
    (machine.parent / "own").write_text("0::/slurm/job_7\n" if version == 2 else "4:cpu,memory:/slurm/job_7\n0::/\n")
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (folder / "slurm" / "job_7").mkdir(parents=True)
    for group, limit in (("slurm", outer), ("slurm/job_7", inner)):
        (folder / group / names[0]).write_text("max" if limit is None else str(limit * MIB))
        (folder / group / names[1]).write_text(str(1900 * MIB))
        (folder / group / "memory.stat").write_text("inactive_file 0\n")
    assert available_bytes() == left * MIB


@pytest.mark.parametrize("own", ["0::/../other\n", "nonsense\n", ""])
def test_a_group_that_cannot_be_seen(machine: Path, own: str) -> None:
    (machine.parent / "own").write_text(own)
    assert available_bytes() == 8192 * MIB
