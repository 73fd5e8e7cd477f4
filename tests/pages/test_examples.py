"""Every example of the README and of the pages runs as it stands there; every command's arguments are real ones."""

from __future__ import annotations

import argparse
import ast
import builtins
import importlib
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lowtide
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
    names_made,
)

pytest.importorskip("transformers", reason="the pages' models are transformers'")

# Other libraries' warnings to each other, which no page can help.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning"),
]

PYTHON = all_blocks("python")
SCRIPTS = [block for block in PYTHON if block.is_script]
LAUNCHED = [block for block in SCRIPTS if "torchrun" in block.code]  # those want several processes
EXAMPLES = [block for block in PYTHON if not block.is_script]


def check_report(names: dict[str, Any], *, trained: bool) -> None:
    """What a page reports must be what it promises: nothing fell back, and where it trained, lowtide computed."""
    report = names.get("report")
    if isinstance(report, lowtide.PatchReport):
        assert report.calls_materialised == 0, str(report)
        assert report.calls_fused > 0 or not trained, str(report)
    elif isinstance(report, lowtide.TrlReport):
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
def test_the_examples_of_a_page_run(page: str, folder: Path) -> None:
    """One after the other, in one namespace; a name from the prelude is made when a block first reads it."""
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
    check_report(names, trained="trainer" in names)


@pytest.mark.parametrize("block", EXAMPLES, ids=str)
def test_a_block_reads_no_name_that_nobody_made(block: Block) -> None:
    """Holds also for the blocks that do not run here."""
    above = [other for other in EXAMPLES if other.page == block.page and other.line < block.line]
    made = set().union(*(names_made(ast.parse(other.code)) for other in above))
    assert free_names(block.code) <= made | PRELUDE.keys() | {"folder", "__name__"} | set(dir(builtins))


@pytest.mark.parametrize("block", [block for block in PYTHON if block.needs], ids=str)
def test_what_does_not_run_here_imports_what_there_is(block: Block) -> None:
    assert block.needs in NEEDS
    skip_without(block)
    compiled(block)
    for module, name in imports_of(block.code):
        found = importlib.import_module(module)
        assert name is None or hasattr(found, name), f"{module} has no {name}"


@pytest.fixture
def arguments(tmp_path: Path, folder: Path, data: Path) -> Any:
    """What a script is called with: the model, the data and where to, or a config that says so."""

    def of(block: Block) -> list[str]:
        if "yaml" not in imported(block):
            return [str(folder), str(data), str(tmp_path / "out")]
        (config,) = [other for other in all_blocks("yaml") if other.page == block.page]
        text = config.code.replace("path/to/model", str(folder)).replace("data.jsonl", str(data))
        (tmp_path / "config.yaml").write_text(text)
        return ["config.yaml"]

    return of


def imported(block: Block) -> set[str]:
    return {module for module, _ in imports_of(block.code)}


@pytest.mark.parametrize("block", [block for block in SCRIPTS if block not in LAUNCHED], ids=str)
def test_a_script_runs(block: Block, arguments: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (ast.get_docstring(ast.parse(block.code)) or "").count("python ") == 1, "a script says how it is called"
    skip_without(block)
    (tmp_path / "script.py").write_text("\n" * (block.line - 1) + block.code)
    monkeypatch.setattr(sys, "argv", ["script.py", *arguments(block)])
    names = runpy.run_path("script.py", run_name="__main__")
    assert "report" in names
    check_report(names, trained=True)
    saved = [path for path in tmp_path.rglob("*.safetensors") if "checkpoint" not in str(path)]
    assert saved, "the recipe saves what it trained"


LAUNCHER = """
import os, runpy, sys
sys.argv = sys.argv[1:]
names = runpy.run_path(sys.argv[0], run_name="__main__")
assert names["report"].calls_fused > 0 and names["report"].calls_materialised == 0, names["report"]
sys.stdout.flush()
os._exit(0)  # gloo's threads abort an interpreter that is being torn down
"""


@pytest.mark.parametrize("block", LAUNCHED, ids=str)
def test_a_script_of_several_processes_runs(block: Block, arguments: Any, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("\n" * (block.line - 1) + block.code)
    (tmp_path / "launch.py").write_text(LAUNCHER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "launch.py"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*command, "script.py", *arguments(block)], capture_output=True, text=True, env=environment, timeout=300
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    assert list((tmp_path / "out").glob("*.safetensors"))


# Commands: in blocks, and in `code` between words, where a line may break.
def commands_of(text: str) -> list[tuple[str, bool]]:
    """Return what follows ``lowtide`` in a page, and whether it stands between words, where it may be a part."""
    lines = []
    for block in blocks_of(text, ""):
        if block.language in ("bash", "console"):
            lines += [(line, False) for line in block.code.replace("\\\n", " ").splitlines()]
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    lines += [(" ".join(code.split()), True) for code in re.findall(r"`([^`]+)`", prose)]
    found = []
    for line, is_part in lines:
        words = line.partition("  #")[0].removeprefix("$ ").split(maxsplit=1)
        if len(words) == 2 and words[0] == "lowtide":
            found.append((words[1].replace("...", " "), is_part))
        elif " -m lowtide.cli " in line:
            found.append((line.partition(" -m lowtide.cli ")[2], is_part))
    return found


def relax(parser: argparse.ArgumentParser) -> None:
    """Make a parser content with a part of a command."""
    for action in parser._actions:
        action.required = False
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                relax(below)


def parse(command: str, is_part: bool) -> None:
    parser = _parser()
    if is_part:
        relax(parser)
    if command.endswith(" --help"):
        with pytest.raises(SystemExit, match=r"^0$"):
            parser.parse_args(shlex.split(command))
        return
    try:
        arguments, unknown = parser.parse_known_args(shlex.split(command))
    except SystemExit:
        pytest.fail(command)
    assert not unknown, unknown
    assert is_part or callable(arguments.main)


COMMANDS = sorted({(page.name, *command) for page in PAGES for command in commands_of(page.read_text())})


@pytest.mark.parametrize(("page", "command", "is_part"), COMMANDS)
def test_a_command_is_one_that_the_parser_takes(page: str, command: str, is_part: bool) -> None:
    parse(command, is_part)


def test_commands_are_found_and_wrong_ones_refused() -> None:
    text = "Run `lowtide bench\nhead --sweep`.\n\n```bash\nlowtide train --seq-len \\\n    64  # a comment\n```\n"
    assert commands_of(text) == [("train --seq-len      64", False), ("bench head --sweep", True)]
    for wrong in ("bench head --swep", "trian", "train --seq-len many"):
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            parse(wrong, True)
    with pytest.raises(pytest.fail.Exception):
        parse("plan --seq-len 64", False)
    parse("plan --seq-len 64", True)


@pytest.mark.parametrize("block", all_blocks("bash", "console"), ids=str)
def test_make_targets_and_scripts_are_there(block: Block) -> None:
    for target in re.findall(r"^make (\w+)", block.code, re.MULTILINE):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
    for script in re.findall(r"python (benchmarks/\S+\.py)", block.code):
        assert (ROOT / script).exists(), script


def test_blocks_are_found_with_their_marks() -> None:
    text = "a\n\n<!-- needs: cuda -->\n\n```python\nx = 1\n```\n\n- b\n\n  ```bash\n  ls\n  ```\n"
    assert [(b.line, b.language, b.needs) for b in blocks_of(text, "p")] == [(6, "python", "cuda"), (12, "bash", "")]


def test_free_names() -> None:
    code = "import torch\nfrom a import b as c\ndef f(x):\n    y = x\n    return y + z\nprint(c, torch.q, w)\n"
    assert free_names(code) == {"z", "print", "w"}
    assert free_names("model, x = wrap(model), 1\nfor i in y:\n    k = i\n    print(k)\n") == {
        "wrap",
        "model",
        "y",
        "print",
    }
    assert free_names("def f():\n    return [later for a in b]\nlater = 1\n") == {"b"}
