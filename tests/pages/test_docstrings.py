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
from promises import promise

pytest.importorskip("transformers", reason="examples of models are transformers'")
pytestmark = [
    promise("pages"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),  # other libraries', to each other
    pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning"),
]


def value_of(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


NAMES = [f"{module}.{name}" for module, names in public_names().items() for name in names]
FUNCTIONS = [path for path in NAMES if inspect.isfunction(value_of(path))]
CLASSES = [path for path in NAMES if inspect.isclass(value_of(path)) and not issubclass(value_of(path), Exception)]


def section(text: str, *titles: str) -> str:
    """Return what stands in a docstring's sections of these titles."""
    return "\n".join(re.findall(rf"^(?:{'|'.join(titles)}):[^\n]*\n((?:[ ]+.*\n?|\n)*)", text, re.MULTILINE))


def raises(function: Any) -> bool:
    """Whether a function raises an error, or has its arguments checked by one that does."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        called = getattr(node, "func", None)
        name = getattr(called, "attr", getattr(called, "id", ""))
        if (isinstance(node, ast.Raise) and node.exc is not None) or name.lstrip("_").startswith("check"):
            return True
    return False


def lacks(path: str) -> list[str]:
    """Return what the docstring of a public function or class does not say."""
    value = value_of(path)
    text = inspect.getdoc(value) or ""
    try:
        signature = inspect.signature(value)
    except ValueError:  # a NamedTuple's builtin
        return []
    said = section(text, "Args", "Attributes")
    found = [
        each for each in signature.parameters if not re.search(rf"^ +\**{each}(?: \(.*\))?: \S", said, re.MULTILINE)
    ]
    if path in FUNCTIONS:
        nothing = signature.return_annotation in (None, "None", inspect.Signature.empty)
        found += [] if nothing or re.search(r"(Return|return|Yield)", text) else ["what it returns"]
        found += ["a section Raises"] if raises(value) and not section(text, "Raises") else []
        found += ["an example"] if path.count(".") == 1 and ">>>" not in text else []
    return found


def test_arguments_results_errors_and_fields_are_told() -> None:
    assert {path: missing for path in FUNCTIONS + CLASSES if (missing := lacks(path))} == {}


def test_each_public_module_says_what_is_public() -> None:
    for name in lowtide.__all__:
        value = getattr(lowtide, name)
        assert not inspect.ismodule(value) or value.__all__, f"lowtide.{name} has no __all__"


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


@pytest.mark.parametrize("path", [path for path in FUNCTIONS + CLASSES if ">>>" in (value_of(path).__doc__ or "")])
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
