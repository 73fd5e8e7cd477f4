"""The rooms of the package: who may import whom, and what `import lowtide` costs."""

from __future__ import annotations

import ast
import importlib
import io
import json
import subprocess
import sys
import tokenize
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import lowtide

ROOT = Path(lowtide.__file__).parent
ROOMS = [
    "errors", "lazy", "arguments", "swap", "measure", "kernel_launch", "graph", "head", "skip",
    "mlp", "layers", "nn", "losses", "memory", "plan", "distributed", "trl", "models", "stacks", "train", "bench",
    "profile", "cli", "__main__",
]  # fmt: skip
SEAM = "lowtide.head.choice", "lowtide.skip.seam"  # the one import of a room below


def imported(file: Path) -> set[tuple[str, str]]:
    """Return module and name of each import statement of a file, wherever it stands; "" for a module as a whole.

    `importlib.import_module` of a string counts as well.
    """
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: write imports in full"
            found |= {(str(node.module), alias.name) for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "import_module":
            found |= {(arg.value, "") for arg in node.args if isinstance(arg, ast.Constant)}
    return found


def imported_rooms(file: Path) -> set[str]:
    """Return the rooms that a file's import statements name."""
    names = {f"{module}.{name}".rstrip(".") for module, name in imported(file)}
    return {name.split(".")[1] for name in names if name.startswith("lowtide.")}


def violations(root: Path) -> list[str]:
    wrong = []
    for file in sorted(root.rglob("*.py")):
        room = file.relative_to(root).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        assert room in ROOMS, f"{room}: a new room needs its place in ROOMS"
        allowed = {*ROOMS[: ROOMS.index(room) + 1], "__version__"}
        if root == ROOT and file == _file_of(SEAM[0]):
            allowed.add("skip")
        wrong += [f"{file.relative_to(root)} imports {name}" for name in sorted(imported_rooms(file) - allowed)]
    return wrong


def test_a_room_imports_only_from_rooms_above_it() -> None:
    assert violations(ROOT) == []


def _file_of(module: str) -> Path:
    return ROOT.parent / f"{module.replace('.', '/')}.py"


def test_the_head_imports_one_file_of_skip_in_one_function() -> None:
    """Which no file of that room imports: a circle of two rooms that no call enters without the option."""
    above = ROOMS[: ROOMS.index("skip")]
    files = [file for file in ROOT.rglob("*.py") if file.relative_to(ROOT).parts[0].removesuffix(".py") in above]
    assert [file for file in files if "skip" in imported_rooms(file)] == [_file_of(SEAM[0])]
    body = ast.parse(_file_of(SEAM[0]).read_text()).body
    of_skip = [node for node in ast.walk(ast.Module(body, [])) if "lowtide.skip" in str(getattr(node, "module", ""))]
    functions = [one for one in body if isinstance(one, ast.FunctionDef) and set(of_skip) & set(ast.walk(one))]
    assert len(of_skip) == len(functions) == 1
    assert imports(ROOT)[SEAM[0]] >= {SEAM[1]}
    assert not [module for module, names in imports(ROOT).items() if SEAM[1] in names and module != SEAM[0]]


def test_the_layering_test_can_fail(tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "plan.py").write_text("def f():\n    from lowtide.train import run\n")
    assert violations(tmp_path) == ["head/plan.py imports train"]


def imports(root: Path) -> dict[str, set[str]]:
    """Return for each module of the package `lowtide` in ``root`` which of its modules its import statements name.

    ``from package import name`` is an import of the submodule of that name, and one of the package's own file where
    that gives the name something: a function, a class, or what it imports from elsewhere.
    """
    files = {}
    for file in root.rglob("*.py"):
        parts = file.relative_to(root).with_suffix("").parts
        files[".".join(("lowtide", *parts)).removesuffix(".__init__")] = file
    statements = {module: imported(file) for module, file in files.items()}
    named = {module: _names(file, module) for module, file in files.items()}
    graph: dict[str, set[str]] = {module: set() for module in files}
    for module, found in statements.items():
        for source, name in found:
            submodule = f"{source}.{name}"
            if submodule in files:
                graph[module].add(submodule)
            if source in files and not (submodule in files and name not in named[source]):
                graph[module].add(source)
    return graph


def _names(file: Path, module: str) -> set[str]:
    """Return the names that a file itself gives a meaning, at its top level; a submodule's name is not one."""
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom) and node.module != module:
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def reached(graph: dict[str, set[str]], start: str) -> set[str]:
    """Return the modules that a module imports, or that those import."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def circles(root: Path) -> set[tuple[str, ...]]:
    """Return the groups of modules that import each other, by whatever way."""
    graph = imports(root)
    graph.get(SEAM[0], set()).discard(SEAM[1])
    reach = {module: reached(graph, module) for module in graph}
    return {
        tuple(sorted(other for other in reach[module] if module in reach[other]))
        for module in graph
        if module in reach[module]
    }


def test_no_modules_import_each_other() -> None:
    """Imports inside functions and under TYPE_CHECKING count: a circle between two files is one file in two."""
    assert circles(ROOT) == set()


WAYS_THERE = (
    "from lowtide.room.b import B",
    "import lowtide.room.b",
    "from lowtide.room import b",
    "from lowtide import f",
    "import importlib\nimportlib.import_module('lowtide.room.b')",
)
WAYS_BACK = (
    "from lowtide.room.a import A",
    "def f():\n    from lowtide.room import a",
    "if TYPE_CHECKING:\n    from lowtide.room.a import A",
)


@pytest.mark.parametrize("first", WAYS_THERE)
@pytest.mark.parametrize("second", WAYS_BACK)
def test_the_test_of_circles_can_fail(tmp_path: Path, first: str, second: str) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "__init__.py").write_text("from lowtide.room.b import f\n")
    (tmp_path / "room" / "__init__.py").touch()
    (tmp_path / "room" / "a.py").write_text(first)
    (tmp_path / "room" / "b.py").write_text(second)
    (tmp_path / "room" / "c.py").write_text("from lowtide.room import a, b\n")  # and in no circle
    a_and_b = ("lowtide.room.a", "lowtide.room.b")
    assert circles(tmp_path) == {("lowtide", *a_and_b) if first.endswith("import f") else a_and_b}


def test_relative_imports_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f():\n    from . import b\n")
    with pytest.raises(AssertionError, match="write imports in full"):
        circles(tmp_path)


def test_a_submodule_that_a_package_gives_as_something_else_is_an_import_of_both(tmp_path: Path) -> None:
    """As `lowtide.models.patch` is: the function where it is imported from the package, and a file."""
    for room in ("x", "y"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "patch.py").write_text("def patch(): pass\n")
    (tmp_path / "__init__.py").write_text("from lowtide import x, y\n")
    (tmp_path / "x" / "__init__.py").write_text("from lowtide.x.patch import patch\n")
    (tmp_path / "y" / "__init__.py").touch()
    (tmp_path / "z.py").write_text("from lowtide import x\nfrom lowtide.x import patch\nfrom lowtide.y import patch\n")
    graph = imports(tmp_path)
    assert graph["lowtide.z"] == {"lowtide.x", "lowtide.x.patch", "lowtide.y.patch"}
    assert graph["lowtide"] == {"lowtide.x", "lowtide.y"}


def private_reads(root: Path) -> list[str]:
    """Return where a file reads a private name of a class or a module of another file; `self` may, of its base."""
    trees = {file: ast.parse(file.read_text()) for file in sorted(root.rglob("*.py"))}
    members = {file: _private_members(tree) for file, tree in trees.items()}
    ours = set().union(*members.values()) - _NOT_OURS
    found = []
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "super()"):
                names = {node.attr} & ours - members[file]
            elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("lowtide"):
                names = {alias.name for alias in node.names if _is_private(alias.name)}
            else:
                continue
            found += [f"{file.relative_to(root)}:{node.lineno} reads {name}" for name in names]
    return found


_NOT_OURS = {*dir(torch), *dir(torch.nn.Module()), *dir(torch.Tensor), *dir(NamedTuple("Any", []))}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _private_members(tree: ast.Module) -> set[str]:
    """Return the private names that a file gives to attributes of its classes and their instances."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            names |= {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
            fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
            names |= {each.id for each in fields if isinstance(each, ast.Name)}
    return {name for name in names if _is_private(name)}


def test_no_file_reads_what_is_private_in_another() -> None:
    assert private_reads(ROOT) == []


def test_the_test_of_private_names_can_fail(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class A:\n    _x: int\n    def _f(self):\n        self._y = 1\n")
    (tmp_path / "b.py").write_text("from lowtide.a import A, _g\nA()._x\nA()._f()\na.b._y\n")
    (tmp_path / "c.py").write_text("class C(A):\n    def f(self):\n        return self._x\n")
    assert sorted(private_reads(tmp_path)) == [
        "b.py:1 reads _g",
        "b.py:2 reads _x",
        "b.py:3 reads _f",
        "b.py:4 reads _y",
    ]


# Thousands of Python tokens of code, and of lines of src and tests. Raising one is a decision: CHANGELOG.md says why,
# and which other room gives as much.
BUDGETS = {
    "top": 6.2, "head": 95.0, "skip": 11.0, "mlp, layers": 23.7, "losses": 8.7, "memory": 14.4, "plan": 24.2,
    "models": 36.1, "distributed, trl, stacks": 5.6, "train": 31.8, "profile, measure": 17.4, "bench": 23.0, "cli": 4.7,
}  # fmt: skip
SRC_TOKENS, SRC_LINES, TEST_LINES = 301, 40.6, 46
FOREIGN_NAMES = 58  # lines of src that name something private of another library
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


def sizes(root: Path) -> dict[str, int]:
    """Return the tokens of each room of `BUDGETS`; the top has the files of no folder."""
    rooms = {folder: room for room in BUDGETS for folder in room.split(", ")}
    sizes = dict.fromkeys(BUDGETS, 0)
    for file in root.rglob("*.py"):
        parts = file.relative_to(root).parts
        sizes[rooms[parts[0]] if len(parts) > 1 else "top"] += tokens_of(file.read_text())
    return sizes


def test_each_room_is_within_its_budget() -> None:
    found = sizes(ROOT)
    assert {room: size for room, size in found.items() if size > 1000 * BUDGETS[room]} == {}
    assert sum(found.values()) <= 1000 * SRC_TOKENS


@pytest.mark.parametrize(("folder", "budget"), [(ROOT, SRC_LINES), (ROOT.parents[1] / "tests", TEST_LINES)])
def test_lines_of_src_and_tests(folder: Path, budget: float) -> None:
    assert sum(file.read_text().count("\n") for file in folder.rglob("*.py")) <= 1000 * budget


def test_packing_lines_and_dropping_docs_gain_nothing() -> None:
    long = '"""Doc."""\n\nx = [\n    1,  # why\n    2\n]\n\n\ndef f(a):\n    "Doc."\n    return f"{a} b"\n'
    assert tokens_of(long) == tokens_of('x = [1, 2]\ndef f(a): return f"{a} b"\n') == 15


def foreign_names(root: Path) -> list[str]:
    """Return the lines that name a private module or attribute of one of `LIBRARIES`, in imports and `getattr` too."""
    found = set()
    for file in sorted(root.rglob("*.py")):
        tree, theirs = ast.parse(file.read_text()), set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                source = (str(node.module),) if isinstance(node, ast.ImportFrom) else ()
                for alias in node.names:
                    names = ".".join((*source, alias.name)).split(".")
                    if names[0] in LIBRARIES:
                        theirs.add(alias.asname or alias.name.split(".")[0])
                        if any(map(_is_private, names)):
                            found.add(f"{file.relative_to(root)}:{alias.lineno}")
        for node in ast.walk(tree):
            value: Any = node
            while isinstance(value, ast.Attribute | ast.Subscript | ast.Call):
                value = value.func if isinstance(value, ast.Call) else value.value
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "getattr":
                texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
                if any(isinstance(text, str) and _is_private(text) for text in texts):
                    found.add(f"{file.relative_to(root)}:{node.lineno}")
            elif isinstance(node, ast.Attribute) and _is_private(node.attr) and getattr(value, "id", "") in theirs:
                found.add(f"{file.relative_to(root)}:{node.lineno}")
    return sorted(found)


def test_few_lines_name_what_is_private_in_another_library() -> None:
    found = foreign_names(ROOT)
    assert len(found) <= FOREIGN_NAMES, found


def test_the_test_of_foreign_names_can_fail(tmp_path: Path) -> None:
    lines = [
        "import torch", "import torch._dynamo", "from torch._C import x", "from torch import _a, b", "torch._C.f()",
        "torch.f()._g", "b._c", "getattr(x, '_h')", "self._d", "torch.__version__", "from lowtide import _e",
    ]  # fmt: skip
    (tmp_path / "a.py").write_text("\n".join(lines))
    assert foreign_names(tmp_path) == [f"a.py:{n}" for n in (2, 3, 4, 5, 6, 7, 8)]


def test_lowtide_itself_imports_nothing_of_the_training_run() -> None:
    assert not [name for name in reached(imports(ROOT), "lowtide") if name.startswith("lowtide.train")]


def test_kernels_know_nothing_of_autograd_modules_or_ranks() -> None:
    for file in ROOT.rglob("kernels/*.py"):
        for word in ("torch.autograd", "torch.nn", "torch.distributed"):
            assert word not in file.read_text(), f"{file.name} uses {word}"


IMPORTING = """
import json, sys, time
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
print(json.dumps({"first": sorted(ours), "later": sorted(set(sys.modules) - before), "torch": torchs, "lowtide": own}))
"""


@cache
def importing(run: int) -> dict[str, Any]:
    """Return which modules lowtide loads when it is imported, and later beyond torch's; and both imports' CPU seconds.

    CPU seconds, as a busy machine makes wall time of any length.
    """
    ended = subprocess.run([sys.executable, "-c", IMPORTING], check=True, capture_output=True, text=True)
    return json.loads(ended.stdout)


def test_import_loads_no_package_but_lowtide_and_nothing_heavy_of_torch() -> None:
    """Beyond what torch itself imports: neither triton nor transformers nor any other."""
    modules = [*importing(0)["first"], *importing(0)["later"]]
    assert {name.partition(".")[0] for name in modules} - {"torch", *sys.stdlib_module_names} == {"lowtide"}
    heavy = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.fx.experimental", "torch.profiler")
    assert [name for name in modules if name.startswith(heavy)] == []


def test_import_is_quick() -> None:
    """A second at the most, or half of what torch itself takes where that is more; another run if the first is not."""
    assert any(one["lowtide"] < max(1.0, one["torch"] / 2) for one in map(importing, range(2)))


def test_import_loads_no_torch_until_a_name_is_used() -> None:
    assert "torch" not in importing(0)["first"]


@pytest.mark.parametrize("package", [lowtide, lowtide.memory])
def test_names_are_those_that_a_type_checker_sees(package: Any) -> None:
    typed = next(node for node in ast.parse(Path(package.__file__).read_text()).body if isinstance(node, ast.If))
    for node in typed.body:
        assert isinstance(node, ast.ImportFrom)
        assert node.module is not None
        for alias in node.names:
            held = getattr(importlib.import_module(node.module), alias.name)
            assert getattr(package, alias.name) is held
    assert sorted(dir(package)) == sorted(package.__all__)


def test_what_walks_the_names_needs_no_transformers() -> None:
    """`help`, completion and `inspect` read all that `dir` lists; a name asked for says what to install."""
    code = """
import inspect, sys
sys.modules["transformers"] = None
import lowtide
assert set(lowtide.__all__) - set(dict(inspect.getmembers(lowtide))) == {"PatchCallback"}
try:
    lowtide.PatchCallback
except lowtide.errors.UnsupportedError as error:
    print(error)
"""
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ended.stdout == "PatchCallback: expected transformers to be installed, got none. pip install 'lowtide[hf]'\n"


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
