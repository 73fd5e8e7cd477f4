"""Peak resident memory, of this process and of children."""

from __future__ import annotations

import math
import sys

import pytest

from lowtide.errors import ArgumentValueError
from lowtide.measure.child import run_child, run_command
from lowtide.measure.resident import peak_resident_bytes, reset_peak_resident, resident_bytes

BIG = 200 << 20


def test_peak_rises_with_a_large_buffer_and_falls_after_reset() -> None:
    before = resident_bytes()
    buffer = bytearray(BIG)
    buffer[::4096] = b"x" * len(buffer[::4096])
    assert peak_resident_bytes() >= before + BIG * 0.9
    del buffer
    if reset_peak_resident():
        assert peak_resident_bytes() < before + BIG * 0.5


def test_command_reports_status_time_and_peak() -> None:
    code = (
        f"import sys, time; b = bytearray({BIG}); time.sleep(0.2); print('out'); print('err', file=sys.stderr); exit(3)"
    )
    ended = run_command([sys.executable, "-c", code])
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "out\n", "err\n")
    assert ended.seconds >= 0.2
    assert ended.peak_bytes >= BIG * 0.9


def test_child_returns_the_functions_value() -> None:
    ended = run_child(math.gcd, 12, 18)
    assert (ended.returncode, ended.value) == (0, 6)
    assert ended.peak_bytes > 2**20


def test_child_that_fails_says_why() -> None:
    ended = run_child(math.sqrt, -1)
    assert ended.returncode != 0
    assert "ValueError" in ended.stderr


def test_local_functions_are_refused() -> None:
    with pytest.raises(ArgumentValueError, match="can be imported"):
        run_child(lambda: 1)
