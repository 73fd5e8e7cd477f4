from __future__ import annotations

import gc
import json
import os
import random
import sys
import tempfile
import warnings
import zlib
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path

# PyTorch's kernels and oneDNN's GEMMs are held to the same instructions: torch asks oneDNN which there are for bf16.
if (_level := os.environ.get("ATEN_CPU_CAPABILITY", "own")) != "own":
    os.environ["ONEDNN_MAX_CPU_ISA"] = {"default": "SSE41", "avx2": "AVX2", "avx512": "AVX512_CORE"}[_level]

import numpy as np
import pytest
import torch

import cpu_time
import interpreter
import promises
import rooms
from lowtide.measure.machine import describe_machine, source_commit

with warnings.catch_warnings(action="ignore"):  # of torch's own deprecated calls, when its compiler imports it
    import torch.utils.mkldnn

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel's module is imported
    interpreter.speed_up()

interpreter.import_bitsandbytes()
collect_ignore = [] if torch.cuda.is_available() else ["gpu"]
torch.set_num_threads(1)  # one test process a core: more threads would wait for each other
# inductor's cache does not know for which vector instructions its code is, which this variable may change
_inductor = Path(tempfile.gettempdir(), f"lowtide-tests-inductor-{getattr(os, 'getuid', int)()}-{_level}")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_inductor))


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A twelfth of the rows is a chunk however short that is, so that a small test sees the memory of a large call."""
    from lowtide.head import plan
    from support import forget_plans

    monkeypatch.setattr(plan, "FEWEST_ROWS", 8)
    monkeypatch.setattr(plan, "CPU_CHUNK_BYTES", 0)
    forget_plans()
    yield
    forget_plans()


@pytest.fixture
def accelerate_anew() -> Iterator[None]:
    """Nothing is left in accelerate of an earlier trainer's precision and accumulation, nor then of this test's."""
    from support import forget_accelerate

    if find_spec("accelerate") is None:
        yield
        return
    forget_accelerate()
    yield
    forget_accelerate()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the long checks")
    parser.addoption("--device", default="cpu", help="hold the contract on this device: tests/contract")
    parser.addoption("--room", help="run the tests of this room, and of those that are built on it: tests/rooms.py")
    parser.addoption(
        "--order", type=int, metavar="SEED", help="run files, and the tests of each, in an order that the seed draws"
    )
    parser.addoption("--seed-offset", type=int, default=0, help="other random inputs: added to each test's seed")
    parser.addoption("--judge", action="store_true", help="fail for tests and files that take too many CPU seconds")
    parser.addoption("--times", metavar="FILE", help="write the CPU seconds of each test as json")
    parser.addoption("--promises", action="store_true", help="write which promise is held where: tests/README.md")
    parser.addoption("--supported-models", action="store_true", help="with --slow: write docs/supported-models.md")
    parser.addoption("--record", metavar="FILE", help="write what ran, and on what, as json")


def pytest_configure(config: pytest.Config) -> None:
    import support

    if (room := config.getoption("--room")) is not None:
        rooms.chosen(room)  # or an error
    support.DEVICE = config.getoption("--device")
    if support.DEVICE != "cpu":  # products as exact as their operands, for comparisons with float64
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if config.getoption("--slow"):
        os.environ["THOROUGH"] = "1"  # for the cases of ranks
    config.pluginmanager.register(cpu_time.Times(judge=config.getoption("--judge")), "cpu_time")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the tests of other rooms than the chosen ones."""
    room, above = config.getoption("--room"), [collection_path, *collection_path.parents]
    if room is None or rooms.TESTS not in above[1:]:
        return None
    return above[above.index(rooms.TESTS) - 1].name not in rooms.chosen(room) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--promises"):
        promises.write(items)
    if not config.getoption("--slow"):
        slow = [item for item in items if item.get_closest_marker("slow")]  # its keywords have the clone's folder too
        items[:] = [item for item in items if item not in slow]
        config.hook.pytest_deselected(items=slow)
    if (order := config.getoption("--order")) is not None:
        draw = random.Random(order)
        place = {path: draw.random() for path in dict.fromkeys(item.path for item in items)}
        items.sort(key=lambda item: (place[item.path], draw.random()))


SEEN = set[Path]()  # files


def set_aside() -> None:
    """Have the collector of garbage pass over all that lives: pytest's own objects and what is imported.

    Measuring memory collects before each run, which took 0.4 s a time with the objects of twelve thousand tests.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    set_aside()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Neither what a test draws nor what it compiles depends on those before it, or on the file that it stands in."""
    seed = (zlib.crc32(item.name.encode()) + item.config.getoption("--seed-offset")) % 2**32
    for set_seed in (random.seed, np.random.seed, torch.manual_seed):
        set_seed(seed)
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()  # past its recompile limit a function is skipped, and those that it calls are compiled


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    done = yield
    if nextitem is not None and nextitem.path != item.path and item.path not in SEEN:
        SEEN.add(item.path)
        set_aside()  # its imports
    return done


def pytest_unconfigure() -> None:
    gc.unfreeze()  # an interpreter that ends lets go of all


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    file = config.getoption("--record")
    if not file:
        return
    counts = {kind: len(terminalreporter.stats.get(kind, [])) for kind in ("passed", "failed", "error", "skipped")}
    record = {
        "command": "pytest " + " ".join(config.option.file_or_dir),
        "machine": describe_machine(),
        "commit": source_commit(),
        **counts,
        "failures": [report.nodeid for kind in ("failed", "error") for report in terminalreporter.stats.get(kind, [])],
    }
    Path(file).write_text(json.dumps(record, indent=1) + "\n")
