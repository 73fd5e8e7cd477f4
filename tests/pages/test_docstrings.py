"""What CONTRIBUTING.md asks of the docstring of every public name: arguments, result, errors; examples run."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lowtide
from pages.blocks import PRELUDE, free_names, public_names

pytest.importorskip("transformers", reason="examples of models are transformers'")
pytestmark = [  # other libraries' warnings to each other
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning"),
]

NAMES = [f"{module}.{name}" for module, names in public_names().items() for name in names]


def value_of(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def public_parameters(value: Any) -> list[str]:
    try:
        return list(inspect.signature(value).parameters)
    except ValueError:  # an exception's, a NamedTuple's builtin
        return []


def section(text: str, *titles: str) -> str:
    """Return what stands in a docstring's sections of these titles."""
    return "\n".join(re.findall(rf"^(?:{'|'.join(titles)}):[^\n]*\n((?:[ ]+.*\n?|\n)*)", text, re.MULTILINE))


def returns_something(function: Any) -> bool:
    annotation = inspect.signature(function).return_annotation
    return annotation not in (None, "None", inspect.Signature.empty)


def raises(function: Any) -> bool:
    """Whether a function raises an error, or has its arguments checked by one that does."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.Raise) and node.exc is not None:
            return True
        called = getattr(node, "func", None)
        name = getattr(called, "attr", getattr(called, "id", ""))
        if name.lstrip("_").startswith("check"):
            return True
    return False


FUNCTIONS = [path for path in NAMES if inspect.isfunction(value_of(path))]
CLASSES = [path for path in NAMES if inspect.isclass(value_of(path)) and not issubclass(value_of(path), Exception)]


@pytest.mark.parametrize("path", NAMES)
def test_there_is_one(path: str) -> None:
    value = value_of(path)
    if inspect.isclass(value) or inspect.isfunction(value):
        text = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
        assert text, f"{path} has no docstring of its own"
        return
    source = Path(inspect.getsourcefile(importlib.import_module(defining_module(path))) or "").read_text()
    name = path.rpartition(".")[2]
    assert re.search(rf'^{name}\b[^\n]*=[^\n]*\n(?:[ )\]}}].*\n)*"""', source, re.MULTILINE), "a string below it"


def defining_module(path: str) -> str:
    """Return the module in which a constant is assigned: its package imports it from there."""
    module, _, name = path.rpartition(".")
    for node in ast.parse(inspect.getsource(importlib.import_module(module))).body:
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            return str(node.module)
    return module


def test_each_public_module_says_what_is_public() -> None:
    for name in lowtide.__all__:
        value = getattr(lowtide, name)
        assert not inspect.ismodule(value) or value.__all__, f"lowtide.{name} has no __all__"


@pytest.mark.parametrize("path", FUNCTIONS)
def test_a_function_says_what_goes_in_and_what_comes_out(path: str) -> None:
    function = value_of(path)
    text = inspect.getdoc(function) or ""
    for name in public_parameters(function):
        assert re.search(rf"^ +\**{name}(?: \(.*\))?: \S", section(text, "Args"), re.MULTILINE), name
    if returns_something(function):
        first = text.partition("\n")[0]
        said = section(text, "Returns", "Yields") or re.match(r"(Return|Yield)", first) or "eturn" in text
        assert said, "what it returns"


@pytest.mark.parametrize("path", FUNCTIONS)
def test_a_function_says_what_it_raises(path: str) -> None:
    function = value_of(path)
    if raises(function):
        assert section(inspect.getdoc(function) or "", "Raises"), "a section Raises"


@pytest.mark.parametrize("path", CLASSES)
def test_a_class_says_what_its_fields_are(path: str) -> None:
    value = value_of(path)
    if path == "lowtide.train.TrainConfig":  # its fields' help texts are the documentation of the command's options
        return
    text = section(inspect.getdoc(value) or "", "Args", "Attributes")
    for name in public_parameters(value):
        assert re.search(rf"^ +\**{name}(?: \(.*\))?: \S", text, re.MULTILINE), name


class Checker(doctest.OutputChecker):
    """What an example prints is compared where the docstring shows it."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


@pytest.fixture
def one_process() -> Iterator[None]:
    """A group of one, for what speaks to other processes."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("path", FUNCTIONS + CLASSES)
def test_the_examples_run(path: str, folder: Path, request: pytest.FixtureRequest) -> None:
    """As they stand in the docstring; a name that an example takes for granted comes from the pages' prelude."""
    value = value_of(path)
    if value.__module__.startswith("lowtide.trl."):
        pytest.importorskip("trl")
    if value.__module__.startswith("lowtide.distributed."):
        request.getfixturevalue("one_process")
    Path("path/to").mkdir(parents=True)
    Path("path/to/model").symlink_to(folder)
    for test in doctest.DocTestFinder(recurse=False).find(value, path, globs=dict(vars(sys.modules[value.__module__]))):
        read = free_names("".join(example.source for example in test.examples))
        for name in read - test.globs.keys():
            if hasattr(lowtide, name):
                test.globs[name] = getattr(lowtide, name)
        test.globs |= {name: PRELUDE[name]() for name in read & PRELUDE.keys()}
        out: list[str] = []
        runner = doctest.DocTestRunner(checker=Checker(), optionflags=doctest.NORMALIZE_WHITESPACE)
        failed = runner.run(test, out=out.append).failed
        if failed and not torch.cuda.is_available() and re.search(r"UnsupportedError: .*CUDA device", "".join(out)):
            pytest.skip("its example needs a GPU, and says so")
        assert failed == 0, "".join(out)


@pytest.mark.parametrize("path", [path for path in FUNCTIONS if path.count(".") == 1])
def test_the_functions_that_most_people_call_have_an_example(path: str) -> None:
    assert ">>>" in (inspect.getdoc(value_of(path)) or "")


def test_a_missing_argument_result_or_error_is_seen() -> None:
    def bad(x: int, y: int) -> int:
        """Add.

        Args:
            x: A number.
        """
        if y:
            raise ValueError(y)
        return x

    text = inspect.getdoc(bad) or ""
    assert "x: A number" in section(text, "Args")
    assert not section(text, "Raises")
    assert raises(bad)
    assert returns_something(bad)
