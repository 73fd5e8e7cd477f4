"""A pytest plugin: the CPU seconds of each test and file, its child processes included, and which take too many."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

TEST, FILE = 5.0, 25.0  # CPU seconds that a test and a file may take, on a machine that takes REFERENCE to calibrate
REFERENCE = 0.1
EVERY = 250  # tests, in each worker: what else the machine does changes
SHOWN, SHORT = 20, 0.5  # rows of the summary, and CPU seconds of what is left out there
BEFORE = pytest.StashKey[float]()
once = list[float]()  # CPU seconds that a test happened to be the first to need, and are no test's: what ranks import


def _of_children() -> float:
    """Return the CPU seconds of this process's living children and of what these have waited for."""
    total = 0.0
    for listed in Path("/proc/self/task").glob("*/children"):  # those that any thread started
        with suppress(OSError):
            for pid in listed.read_text().split():
                with suppress(OSError):  # it has just ended
                    fields = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()
                    total += sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")
    return total


def used() -> float:
    """Return the CPU seconds of this process and its children, less those of ``once``."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + _of_children() - sum(once)


def calibrate() -> float:
    """Return the CPU seconds of a fixed amount of interpreted code and matrix products."""
    x = torch.full((256, 256), 1 / 256)
    since = time.process_time()
    for _ in range(60):
        x = x @ x
        sum(i * i for i in range(40_000))
    return time.process_time() - since


def busy() -> bool:
    """Return whether others use the machine as well: CPU seconds say less then."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return hasattr(os, "getloadavg") and os.getloadavg()[1] > 1.3 * max(workers, os.cpu_count() or 1)


class Times:
    """Sums up the tests' CPU seconds and shows the longest; as a judge it fails a run for what takes too many."""

    def __init__(self, judge: bool) -> None:
        self.judge = judge
        self.tests: dict[str, float] = {}
        self.slow: set[str] = set()
        self.calibrated: list[float] = []
        self.seen = 0
        self.fails = False

    def factor(self) -> float:
        """What a CPU second of this session is worth on the machine of the budgets."""
        return REFERENCE / (sum(self.calibrated) / len(self.calibrated)) if self.calibrated else 1.0

    def files(self) -> dict[str, float]:
        found: dict[str, float] = defaultdict(float)
        for test, seconds in self.tests.items():
            if test not in self.slow:
                found[test.partition("::")[0]] += seconds
        return found

    def too_long(self) -> list[str]:
        factor = self.factor()
        tests = {test: seconds for test, seconds in self.tests.items() if test not in self.slow}
        return [
            f"{name}: {factor * seconds:.1f} CPU seconds, at most {limit:.0f}"
            for found, limit in ((tests, TEST), (self.files(), FILE))
            for name, seconds in sorted(found.items())
            if factor * seconds > limit
        ]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        item.stash[BEFORE] = used()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            seconds = max(0.0, used() - item.stash[BEFORE])
            slow = item.get_closest_marker("slow") is not None
            report.user_properties += [("cpu", seconds), ("slow", slow)]  # which xdist sends
            if self.seen % EVERY == 0:
                report.user_properties.append(("calibrated", calibrate()))
            self.seen += 1
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found: dict[str, Any] = dict(report.user_properties)
        if report.when == "teardown" and "cpu" in found:
            self.tests[report.nodeid] = found["cpu"]
            if found["slow"]:
                self.slow.add(report.nodeid)
            if "calibrated" in found:
                self.calibrated.append(found["calibrated"])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        is_worker = hasattr(session.config, "workerinput")  # which knows its own tests only
        self.fails = self.judge and not is_worker and not busy() and "ATEN_CPU_CAPABILITY" not in os.environ
        if self.fails and self.too_long() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        if file := config.getoption("--times"):
            Path(file).write_text(json.dumps(self.tests, indent=1) + "\n")
        if len(self.tests) < 2:
            return
        show = terminalreporter
        show.section(f"{sum(self.tests.values()):.0f} CPU seconds; the longest tests and files")
        for found in (self.tests, self.files()):
            for name, seconds in sorted(found.items(), key=lambda pair: -pair[1])[:SHOWN]:
                if seconds >= SHORT:
                    show.line(f"{seconds:7.1f} s  {name}")
        for line in self.too_long():
            show.line(("failed" if self.fails else "warning") + f": {line}")
