"""Every example of the README and of the pages runs as it stands there; every command's arguments are real ones."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import importlib
import json
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from distributed.forks import shared
from lowtide.cli import _parser
from pages.blocks import (
    NEEDS,
    PAGES,
    PRELUDE,
    ROOT,
    Block,
    all_blocks,
    blocks_of,
    compiled,
    free_names,
    imports_of,
    options_of_train,
)
from promises import promise

pytest.importorskip("transformers", reason="the pages' models are transformers'")

pytestmark = [
    promise("pages"),
    # other libraries' warnings to each other, which no page can help
    pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning"),  # dynamo's
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # dynamo's
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),  # inductor's
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning"),
]

PYTHON = all_blocks("python")
SCRIPTS = [block for block in PYTHON if block.is_script]
LAUNCHED = [block for block in SCRIPTS if "torchrun" in block.code]  # those want several processes
EXAMPLES = [block for block in PYTHON if not block.is_script]


STEP = {  # what a page's code has where it makes the report's counts go up
    lowtide.PatchReport: re.compile(r"trainer\.train\(|model\(.*(labels|\*\*)"),
    lowtide.TrlReport: re.compile(r"trainer\.train\("),
}


def check_report(names: dict[str, Any], *blocks: Block) -> None:
    """What a page reports must be what it promises: nothing fell back, and where it trained, lowtide computed."""
    report = names.get("report")
    if not isinstance(report, tuple(STEP)):
        return
    trained = any(STEP[type(report)].search(block.code) for block in blocks)
    if isinstance(report, lowtide.PatchReport):
        assert report.calls_materialised == 0, str(report)
        assert report.calls_fused > 0 or not trained, str(report)
    else:
        assert sum(report.calls_trl.values()) == 0, str(report)
        assert sum(report.calls_lowtide.values()) > 0 or not trained, str(report)


def only_imports(block: Block) -> Any:
    tree = ast.parse(block.code)
    tree.body = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    return compile(tree, str(block), "exec")


def skip_without(*blocks: Block) -> None:
    """Skip where a library of an extra is not installed, as on a machine that has what GPU tests need alone."""
    for package in {module.partition(".")[0] for block in blocks for module in imported(block)} - {"lowtide"}:
        pytest.importorskip(package)


@pytest.mark.parametrize("page", sorted({block.page for block in EXAMPLES}))
def test_the_examples_of_a_page_run(
    page: str, folder: Path, accelerate_anew: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, in one namespace; a name from the prelude is made when a block first reads it."""
    # graphs are traced and run in eager: what inductor makes of them is tested elsewhere, and takes seconds
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    names: dict[str, Any] = {"__name__": "__main__"}
    of_page = [block for block in EXAMPLES if block.page == page]
    skip_without(*of_page)
    for block in of_page:
        if block.needs:  # what it imports is there for those below
            exec(only_imports(block), names)
            continue
        for name in sorted(free_names(block.code) - names.keys()):
            if name == "folder":
                names[name] = str(folder)
            elif name in PRELUDE:
                names[name] = PRELUDE[name]()
        exec(compiled(block), names)
    check_report(names, *of_page)


@pytest.mark.parametrize("block", [block for block in PYTHON if block.needs], ids=str)
def test_what_does_not_run_here_imports_what_there_is(block: Block) -> None:
    assert block.needs in NEEDS
    skip_without(block)
    compiled(block)
    for module, name in imports_of(block.code):
        found = importlib.import_module(module)
        assert name is None or hasattr(found, name), f"{module} has no {name}"


@pytest.fixture
def arguments(tmp_path: Path, folder: Path, data: Path) -> list[str]:
    """What a script is called with: the model, the data and where to."""
    return [str(folder), str(data), str(tmp_path / "out")]


def imported(block: Block) -> set[str]:
    return {module for module, _ in imports_of(block.code)}


@pytest.mark.parametrize("block", [block for block in SCRIPTS if block not in LAUNCHED], ids=str)
def test_a_script_runs(block: Block, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (ast.get_docstring(ast.parse(block.code)) or "").count("python ") == 1, "a script says how it is called"
    run_here(block, arguments, monkeypatch)
    saved = [path for path in tmp_path.rglob("*.safetensors") if "checkpoint" not in str(path)]
    assert saved, "the recipe saves what it trained"


def write_script(block: Block) -> None:
    """Write a block to a file, its lines where the page has them."""
    Path("script.py").write_text("\n" * (block.line - 1) + block.code)


def run_here(block: Block, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a script as ``python script.py ARGUMENTS`` would, in this process."""
    skip_without(block)
    write_script(block)
    monkeypatch.setattr(sys, "argv", ["script.py", *arguments])
    names = runpy.run_path("script.py", run_name="__main__")
    assert type(names["report"]) in STEP
    check_report(names, block)


LAUNCHER = """
import runpy, sys
sys.argv = sys.argv[1:]
names = runpy.run_path(sys.argv[0], run_name="__main__")
assert names["report"].calls_fused > 0 and names["report"].calls_materialised == 0, names["report"]
"""


def run_launched(block: Block, arguments: list[str]) -> None:
    """Run a script in two processes, with the environment that torchrun gives them."""
    skip_without(block)
    write_script(block)
    Path("launch.py").write_text(LAUNCHER)
    ended = shared()(2, Path("script.py").resolve(), *arguments, script=Path("launch.py").resolve())
    assert ended.statuses == [0, 0], ended


def with_sgd(block: Block) -> Block:
    """Return a script with an optimizer that sees how large gradients are, which Adam and clipping do not."""
    code, optimizers = re.subn(r"AdamW\((.*), lr=1e-5.*\)", r"SGD(\1, lr=0.1)", block.code)
    assert optimizers == 1
    return dataclasses.replace(block, code=re.sub(r"clip_grad_norm_\((.*), 1.0\)", r"clip_grad_norm_(\1, 1e9)", code))


def beside_plain_training(folder: Path, data: Path, trained: Path, per_step: int) -> tuple[float, float]:
    """Train the stock model on all texts of a step at once; return how far off the recipe is, and the way it went."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right")
    start, got, model = (AutoModelForCausalLM.from_pretrained(place) for place in (folder, trained, folder))
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.1)
    texts = [json.loads(line)["text"] for line in data.read_text().splitlines()]
    for first in range(0, len(texts), per_step):
        batch = tokenizer(texts[first : first + per_step], return_tensors="pt", padding=True)
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def distance(one: Any, other: Any) -> float:
        pairs = zip(one.parameters(), other.parameters(), strict=True)
        return float(sum((a - b).double().square().sum() for a, b in pairs)) ** 0.5

    return distance(got, model), distance(start, model)


@pytest.mark.parametrize(("page", "per_step"), [("loop", 8), pytest.param("fsdp2", 4, marks=pytest.mark.slow)])
def test_a_recipe_trains_what_plain_training_does(
    page: str,
    per_step: int,
    folder: Path,
    data: Path,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gradient accumulation, ranks and all: the weights move as those of one large batch."""
    (block,) = [block for block in SCRIPTS if block.page == f"docs/recipes/{page}.md"]
    if block in LAUNCHED:
        run_launched(with_sgd(block), arguments)
    else:
        run_here(with_sgd(block), arguments, monkeypatch)
    difference, movement = beside_plain_training(folder, data, tmp_path / "out", per_step)
    assert movement > 0
    assert difference < 1e-3 * movement


# Commands: in blocks, and in `code` between words, where a line may break and a part of one may stand.
def commands_of(text: str) -> list[str]:
    """Return what follows ``lowtide`` in a page."""
    lines = []
    for block in blocks_of(text, ""):
        if block.language in ("bash", "console"):
            lines += block.code.replace("\\\n", " ").splitlines()
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
    found = [re.search(r"(?:^|\$ | -m )lowtide (.+)", line.partition("  #")[0]) for line in lines]
    return [match[1].replace("...", " ") for match in found if match]


def relax(parser: argparse.ArgumentParser) -> None:
    """Make a parser content with a part of a command, and with letters that stand for values."""
    for action in parser._actions:
        action.required, action.type = False, None
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                relax(below)


def refused(command: str) -> bool:
    """Return whether the parser does not take a command."""
    parser = _parser()
    relax(parser)
    try:
        arguments, unknown = parser.parse_known_args(shlex.split(command))
    except SystemExit as ended:
        return not command.endswith(" --help") or ended.code != 0
    if arguments.subcommand == "train":  # which has the options of other libraries
        unknown = [word for word in unknown if word.startswith("--")]
        unknown = [word for word in unknown if word.partition("=")[0] not in options_of_train()]
    return bool(unknown)


def test_commands_are_those_that_the_parser_takes(capsys: pytest.CaptureFixture[str]) -> None:
    commands = {(page.name, command) for page in PAGES for command in commands_of(page.read_text())}
    assert len(commands) > 20
    assert [command for command in sorted(commands) if refused(command[1])] == [], capsys.readouterr().err
    assert refused("bench head --swep")
    assert refused("profile --optimizer many")


def test_make_targets_and_scripts_are_there() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for block in all_blocks("bash", "console"):
        assert {*re.findall(r"^make (\w+)", block.code, re.MULTILINE)} <= {*targets}, block
        assert all((ROOT / script).exists() for script in re.findall(r"python (benchmarks/\S+\.py)", block.code)), block
