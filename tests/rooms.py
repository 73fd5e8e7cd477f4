"""The rooms of the package, what their files import, and which tests belong to a room: `pytest --room losses`."""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = Path(str(find_spec("lowtide").origin)).parent  # type: ignore[union-attr]
ROOMS = [
    "errors", "lazy", "arguments", "swap", "measure", "kernel_launch", "graph", "head", "skip",
    "mlp", "layers", "nn", "losses", "memory", "plan", "distributed", "trl", "models", "stacks", "train", "bench",
    "profile", "cli", "__main__",
]  # fmt: skip
# Which rooms the tests of a folder hold, where it has not the name of one; none: every room.
FOLDERS = {
    "contract": ("head", "mlp", "layers"), "gpu": ("head", "mlp", "layers", "memory", "models"),
    "planner": ("plan",), "trl_patch": ("trl",), "programs": ("models",), "profiling": ("profile",), "pages": ("cli",),
    "package": (),
}  # fmt: skip


@cache
def trees() -> dict[str, ast.Module]:
    """Return the module of each file of the package by its name; a package has its own."""
    found = {}
    for file in sorted(ROOT.rglob("*.py")):
        name = ".".join(("lowtide", *file.relative_to(ROOT).with_suffix("").parts))
        found[name.removesuffix(".__init__")] = ast.parse(file.read_text())
    return found


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


@cache
def imported(module: str) -> set[tuple[str, str]]:
    """Return module and name of each import statement of a module, wherever it stands; "" for one as a whole.

    `importlib.import_module` of a string counts as well.
    """
    found = set()
    for node in ast.walk(trees()[module]):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: write imports in full"
            found |= {(str(node.module), alias.name) for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "import_module":
            found |= {(arg.value, "") for arg in node.args if isinstance(arg, ast.Constant)}
    return found


def imported_rooms(module: str) -> set[str]:
    names = {f"{source}.{name}".rstrip(".") for source, name in imported(module)}
    return {room_of(name) for name in names if name.startswith("lowtide.")}


def built_on(room: str) -> set[str]:
    """Return a room, and those that import it or one that does."""
    found, new = set[str](), {room}
    while new:
        found |= new
        new = {room_of(module) for module in trees() if imported_rooms(module) & found} - found - {"__init__"}
    return found


def rooms_of_tests(path: Path) -> tuple[str, ...]:
    """Return the rooms whose tests stand in a folder or a file of tests/."""
    name = path.stem.removeprefix("test_")
    found = FOLDERS.get(name, (name,))
    if not {*found} <= {*ROOMS}:
        raise pytest.UsageError(f"tests/{path.name}: expected a folder of a room, or of FOLDERS in tests/rooms.py")
    return found or tuple(ROOMS)


@cache
def chosen(room: str) -> set[str]:
    """Return the names of the folders and files in tests/ that hold a room, and those that are built on it."""
    if room not in ROOMS:
        raise pytest.UsageError(f"--room: expected one of {', '.join(ROOMS)}, got {room}")
    paths = {path for file in TESTS.glob("**/test_*.py") for path in (file, *file.parents) if path.parent == TESTS}
    return {path.name for path in paths if built_on(room) & {*rooms_of_tests(path)}}
