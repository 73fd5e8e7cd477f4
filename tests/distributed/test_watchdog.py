"""The watchdog of exchanges by copy engines: a process ends where what it began does not end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from signal import SIGABRT

import torch

from distributed.train_ranks import python_path
from lowtide.head.ranks import watchdog

SCRIPT = """
import sys, time
from datetime import timedelta
from lowtide.head.ranks.watchdog import watch
steps = iter({states})
state = (0, 0)
def progress():
    global state
    state = next(steps, state)
    return state
watch(progress, timedelta(seconds=1), "rank 3")
time.sleep({seconds})
"""


def ended(states: Sequence[tuple[int, int] | None], seconds: float) -> tuple[int, str]:
    script = SCRIPT.format(states=states, seconds=seconds)
    env = {"PYTHONPATH": python_path()}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, timeout=120)
    return done.returncode, done.stderr


def test_exchanges_that_do_not_end_end_the_process() -> None:
    code, error = ended([(4, 4), (9, 6), (9, 7)], 60)
    assert code == -SIGABRT
    assert "rank 3 waited 1 s" in error
    assert "exchange 8 of 9" in error


def test_exchanges_that_advance_or_have_ended_do_not() -> None:
    slowly = [(100, n) for n in range(80)]  # one whenever they are looked at, for longer than the timeout in all
    assert ended(slowly, 4) == (0, "")
    assert ended([(9, 9)], 2.5) == (0, "")
    assert ended([(9, 8), None], 2.5) == (0, "")


def test_the_timeout_of_another_backend_is_the_usual_one() -> None:
    assert watchdog.timeout_of(object(), torch.device("cpu")) == timedelta(minutes=10)
