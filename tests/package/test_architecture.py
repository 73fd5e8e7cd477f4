"""The rooms of the package: who may import whom, their budgets, and what `import lowtide` costs."""

from __future__ import annotations

import ast
import importlib
import io
import json
import subprocess
import sys
import tokenize
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import lowtide
from promises import promise
from rooms import ROOMS, ROOT, TESTS, imported, imported_rooms, room_of, rooms_of_tests, trees

pytestmark = promise("package")
SEAM = "lowtide.head.plan", "lowtide.skip.seam"  # the one import of a room below


def test_a_room_imports_only_from_rooms_above_it() -> None:
    wrong = []
    for module in trees():
        if (room := room_of(module)) != "__init__":
            assert room in ROOMS, f"{room}: a new room needs its place in ROOMS"
            allowed = {*ROOMS[: ROOMS.index(room) + 1], "__version__", "skip" if module == SEAM[0] else ""}
            wrong += [f"{module} imports {name}" for name in sorted(imported_rooms(module) - allowed)]
    assert not wrong


def test_each_folder_of_tests_is_a_rooms() -> None:
    for path in TESTS.glob("*/test_*.py"):
        assert rooms_of_tests(path.parent)


def test_the_head_imports_one_file_of_skip_in_one_function() -> None:
    """Which no file of that room imports: a circle of two rooms that no call enters without the option."""
    body = trees()[SEAM[0]].body
    of_skip = [node for node in ast.walk(ast.Module(body, [])) if "lowtide.skip" in str(getattr(node, "module", ""))]
    functions = [one for one in body if isinstance(one, ast.FunctionDef) and set(of_skip) & set(ast.walk(one))]
    assert len(of_skip) == len(functions) == 1
    assert [module for module, names in imports().items() if SEAM[1] in names] == [SEAM[0]]


@cache
def imports() -> dict[str, set[str]]:
    """Return for each module of the package which of its modules its import statements name.

    ``from package import name`` is an import of the submodule of that name, and one of the package's own file where
    that gives the name something: a function, a class, or what it imports from elsewhere.
    """
    graph: dict[str, set[str]] = {module: set() for module in trees()}
    for module, found in graph.items():
        for source, name in imported(module):
            submodule = f"{source}.{name}"
            if submodule in graph:
                found.add(submodule)
            if source in graph and (submodule not in graph or name in names_of(trees()[source], source)):
                found.add(source)
    return graph


def names_of(tree: ast.Module, module: str = "") -> set[str]:
    """Return the names that a module gives a meaning at its top level; one of its own submodules' is not one."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom) and node.module != module:
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return names


def reached(start: str) -> set[str]:
    """Return the modules that a module imports, or that those import; the seam is left out."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        module = waiting.pop()
        new = imports()[module] - found - ({SEAM[1]} if module == SEAM[0] else set())
        found |= new
        waiting += new
    return found


def test_no_modules_import_each_other() -> None:
    """Imports inside functions and under TYPE_CHECKING count: a circle between two files is one file in two."""
    assert [module for module in trees() if module in reached(module)] == []


def test_the_loss_is_read_in_few_files() -> None:
    assert len(reached("lowtide.head.cross_entropy")) < 30  # and the file itself


def test_lowtide_itself_imports_nothing_of_the_training_run() -> None:
    assert not [name for name in reached("lowtide") if name.startswith("lowtide.train")]


def test_kernels_know_nothing_of_autograd_modules_or_ranks() -> None:
    for file in (*ROOT.rglob("kernels/*.py"), *ROOT.rglob("kernels.py")):
        for word in ("torch.autograd", "torch.nn", "torch.distributed"):
            assert word not in file.read_text(), f"{file.name} uses {word}"


def test_what_tests_on_a_gpu_import_of_others_is_there() -> None:
    """They run nowhere else, and a helper that is renamed would not be missed."""
    files = {".".join(file.relative_to(TESTS).with_suffix("").parts): file for file in TESTS.rglob("*.py")}
    lacking = []
    for file in TESTS.glob("gpu/*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (source := str(node.module)) in {**files, **trees()}:
                tree = trees()[source] if source in trees() else ast.parse(files[source].read_text())
                there = names_of(tree) | {name.rpartition(".")[2] for name in trees() if name.startswith(f"{source}.")}
                there |= set(getattr(importlib.import_module(source), "__all__", ())) if source in trees() else set()
                lacking += [f"{file.name}: {source}.{one.name}" for one in node.names if one.name not in there]
    assert not lacking


NOT_OURS = {*dir(torch), *dir(torch.nn.Module()), *dir(torch.Tensor), *dir(NamedTuple("Any", []))}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_members(tree: ast.Module) -> set[str]:
    """Return the private names that a file gives to attributes of its classes and their instances."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            names |= {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
            fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
            names |= {each.id for each in fields if isinstance(each, ast.Name)}
    return {name for name in names if is_private(name)}


def test_no_file_reads_what_is_private_in_another() -> None:
    """A private name of a class or a module of another file; `self` may read one, of its base."""
    members = {module: private_members(tree) for module, tree in trees().items()}
    ours = set().union(*members.values()) - NOT_OURS
    found = []
    for module, tree in trees().items():
        for node in ast.walk(tree):
            names: set[str] = set()
            if isinstance(node, ast.Attribute) and node.attr in ours - members[module]:
                names = {node.attr} if ast.unparse(node.value) not in ("self", "cls", "super()") else set()
            elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("lowtide"):
                names = {alias.name for alias in node.names if is_private(alias.name)}
            found += [f"{module}:{getattr(node, 'lineno', 0)} reads {name}" for name in names]
    assert not found


# Thousands of Python tokens of code, and of lines of src and tests. Raising one is a decision: CHANGELOG.md says why,
# and which other room gives as much.
BUDGETS = {
    "top": 5.8, "head": 72.0, "skip": 9.35, "mlp, layers": 19.35, "losses": 8.3, "memory": 12.2, "plan": 16.9,
    "models": 24.8, "distributed, trl, stacks": 6.75, "train": 15.3, "profile, measure": 9.25, "bench": 10.75,
    "cli": 3.0,
}  # fmt: skip
SRC_TOKENS, SRC_LINES, TEST_LINES = 212.9, 29.4, 28.0
FOREIGN_NAMES = 35  # lines of src that name something private of another library
NO_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
)  # fmt: skip
LIBRARIES = {"torch", "transformers", "trl", "accelerate", "peft", "triton"}


def tokens_of(source: str) -> int:
    """Return how many Python tokens of code there are: no comments, line ends, indentation or docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    docs = {(node.body[0].lineno, node.body[0].col_offset) for node in nodes if ast.get_docstring(node) is not None}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(
        token.type not in NO_CODE and not (token.type == tokenize.STRING and token.start in docs) for token in tokens
    )


def test_each_room_is_within_its_budget() -> None:
    """In tokens; the top has the files of no folder."""
    rooms = {folder: room for room in BUDGETS for folder in room.split(", ")}
    sizes = dict.fromkeys(BUDGETS, 0)
    for file in ROOT.rglob("*.py"):
        parts = file.relative_to(ROOT).parts
        sizes[rooms[parts[0]] if len(parts) > 1 else "top"] += tokens_of(file.read_text())
    assert {room: size for room, size in sizes.items() if size > 1000 * BUDGETS[room]} == {}
    assert sum(sizes.values()) <= 1000 * SRC_TOKENS


@pytest.mark.parametrize(("folder", "budget"), [(ROOT, SRC_LINES), (TESTS, TEST_LINES)])
def test_lines_of_src_and_tests(folder: Path, budget: float) -> None:
    assert sum(file.read_text().count("\n") for file in folder.rglob("*.py")) <= 1000 * budget


def test_few_lines_name_what_is_private_in_another_library() -> None:
    """A module or an attribute of one of `LIBRARIES`, in imports and `getattr` too."""
    found = set()
    for module, tree in trees().items():
        theirs = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                source = (str(node.module),) if isinstance(node, ast.ImportFrom) else ()
                for alias in node.names:
                    names = ".".join((*source, alias.name)).split(".")
                    if names[0] in LIBRARIES:
                        theirs.add(alias.asname or alias.name.split(".")[0])
                        if any(map(is_private, names)):
                            found.add(f"{module}:{alias.lineno}")
        for node in ast.walk(tree):
            value: Any = node
            while isinstance(value, ast.Attribute | ast.Subscript | ast.Call):
                value = value.func if isinstance(value, ast.Call) else value.value
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "getattr":
                texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
                if any(isinstance(text, str) and is_private(text) for text in texts):
                    found.add(f"{module}:{node.lineno}")
            elif isinstance(node, ast.Attribute) and is_private(node.attr) and getattr(value, "id", "") in theirs:
                found.add(f"{module}:{node.lineno}")
    assert len(found) <= FOREIGN_NAMES, sorted(found)


IMPORTING = """
import inspect, json, sys, time
before, start = set(sys.modules), time.process_time()
import lowtide
import lowtide.memory
ours, own = set(sys.modules) - before, time.process_time() - start
before, start = set(sys.modules), time.process_time()
import torch
torchs, before = time.process_time() - start, set(sys.modules)
start = time.process_time()
[getattr(lowtide, name) for name in lowtide.__all__ if name != "PatchCallback"]  # a class of transformers'
own += time.process_time() - start
later = set(sys.modules) - before
sys.modules["transformers"] = None
walked = dict(inspect.getmembers(lowtide))
try:
    lowtide.PatchCallback
except lowtide.errors.UnsupportedError as error:
    told = str(error)
told = {"without": sorted(set(lowtide.__all__) - set(walked)), "error": told, "torch": torchs, "lowtide": own}
print(json.dumps({"first": sorted(ours), "later": sorted(later), **told}))
"""


@cache
def importing(run: int = 0) -> Any:
    """Return which modules lowtide loads when it is imported, and later beyond torch's; and both imports' CPU seconds.

    And which names are lacking where transformers is not installed, with what is said to whoever asks for one.
    """
    ended = subprocess.run([sys.executable, "-c", IMPORTING], check=True, capture_output=True, text=True)
    return json.loads(ended.stdout)


def test_import_loads_nothing_but_lowtide_and_no_torch_until_a_name_is_used() -> None:
    """Beyond what torch itself imports: neither triton nor transformers nor any other, and nothing heavy of torch."""
    assert "torch" not in importing()["first"]
    modules = [*importing()["first"], *importing()["later"]]
    assert {name.partition(".")[0] for name in modules} - {"torch", *sys.stdlib_module_names} == {"lowtide"}
    heavy = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.fx.experimental", "torch.profiler")
    assert [name for name in modules if name.startswith(heavy)] == []


@pytest.mark.slow
def test_import_is_quick() -> None:
    """A CPU second at the most, or half of what torch takes where that is more; another run if the first is not."""
    assert any(one["lowtide"] < max(1.0, one["torch"] / 2) for one in map(importing, range(2)))


def test_what_walks_the_names_needs_no_transformers() -> None:
    """`help`, completion and `inspect` read all that `dir` lists; a name asked for says what to install."""
    assert importing()["without"] == ["PatchCallback"]
    expected = "PatchCallback: expected transformers to be installed, got none. pip install 'lowtide[hf]'"
    assert importing()["error"] == expected


@pytest.mark.parametrize("package", [lowtide, lowtide.memory])
def test_names_are_those_that_a_type_checker_sees(package: Any) -> None:
    tree = ast.parse(Path(package.__file__).read_text())
    assert "__getattr__" not in names_of(tree)  # with one in its sight, a checker takes every name for right
    typed = next(node for node in tree.body if isinstance(node, ast.If))
    for node in typed.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            if alias.name == "PatchCallback":  # a class of transformers', whose import takes seconds
                continue
            held = getattr(importlib.import_module(str(node.module)), alias.name)
            assert getattr(package, alias.name) is held
    assert sorted(dir(package)) == sorted(package.__all__)
