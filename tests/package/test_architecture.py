"""The rooms of the package: who may import whom, and what `import lowtide` costs."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import lowtide

ROOT = Path(lowtide.__file__).parent
ROOMS = [
    "errors", "swap", "code", "samples", "measure", "head", "mlp", "layers", "nn", "losses", "memory", "distributed",
    "models", "trl", "train", "bench", "profile", "cli", "__main__",
]  # fmt: skip


def imported_rooms(file: Path) -> set[str]:
    """Return the rooms that a file's import statements name, wherever in the file they stand."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: write imports in full"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in found if name.startswith("lowtide.")}


def violations(root: Path) -> list[str]:
    wrong = []
    for file in sorted(root.rglob("*.py")):
        room = file.relative_to(root).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        assert room in ROOMS, f"{room}: a new room needs its place in ROOMS"
        allowed = {*ROOMS[: ROOMS.index(room) + 1], "__version__"}
        wrong += [f"{file.relative_to(root)} imports {name}" for name in sorted(imported_rooms(file) - allowed)]
    return wrong


def test_a_room_imports_only_from_rooms_above_it() -> None:
    assert violations(ROOT) == []


def test_the_layering_test_can_fail(tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "plan.py").write_text("def f():\n    from lowtide.train import run\n")
    assert violations(tmp_path) == ["head/plan.py imports train"]


def test_kernels_know_nothing_of_autograd_modules_or_ranks() -> None:
    for file in ROOT.rglob("kernels/*.py"):
        for word in ("torch.autograd", "torch.nn", "torch.distributed"):
            assert word not in file.read_text(), f"{file.name} uses {word}"


IMPORTING = """
import json, sys, time
start = time.process_time()
import torch
before, torchs = set(sys.modules), time.process_time() - start
start = time.process_time()
import lowtide
own = time.process_time() - start
print(json.dumps({"modules": sorted(set(sys.modules) - before), "torch": torchs, "lowtide": own}))
"""


@cache
def importing(run: int) -> dict[str, Any]:
    """Return which modules `import lowtide` loads beyond torch's, and the CPU seconds of both imports.

    CPU seconds, as a busy machine makes wall time of any length.
    """
    ended = subprocess.run([sys.executable, "-c", IMPORTING], check=True, capture_output=True, text=True)
    return json.loads(ended.stdout)


def test_import_loads_no_package_but_lowtide_and_nothing_heavy_of_torch() -> None:
    """Beyond what torch itself imports: neither triton nor transformers nor any other."""
    modules = importing(0)["modules"]
    assert {name.partition(".")[0] for name in modules} - {"torch", *sys.stdlib_module_names} == {"lowtide"}
    heavy = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.fx.experimental", "torch.profiler")
    assert [name for name in modules if name.startswith(heavy)] == []


def test_import_is_quick() -> None:
    """A second at the most, or half of what torch itself takes where that is more; another run if the first is not."""
    assert any(one["lowtide"] < max(1.0, one["torch"] / 2) for one in map(importing, range(2)))


def test_public_names_are_reachable_and_documented() -> None:
    for name in lowtide.__all__:
        assert hasattr(lowtide, name)
        if not name.startswith("__"):
            assert (getattr(lowtide, name).__doc__ or "").strip(), name


def test_every_file_that_is_no_module_is_in_the_wheel() -> None:
    """What the package reads beside its modules: the profile's page, launch files, the mark of typed code."""
    told = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    others = [file for file in ROOT.rglob("*") if file.is_file() and file.suffix not in (".py", ".pyc")]
    assert len(others) >= 8
    left_out = set(others) - {file for pattern in told["lowtide"] for file in ROOT.glob(pattern)}
    assert not left_out
