"""The code blocks of the pages, and the names that a page may use without having made them.

A block is run as it stands there, after those above it on its page. One that cannot run in a test has a comment above
it, which readers do not see: `<!-- needs: cuda -->` (or `two processes`, `network`, `Megatron-Core`); its imports are
checked.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import lowtide

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "LOG.md", *(ROOT / "docs").rglob("*.md")])
NEEDS = ("cuda", "two processes", "network", "Megatron-Core")

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)
_MARK = re.compile(r"<!-- needs: (?P<what>[^>]*?) -->\s*\Z")


@dataclass(frozen=True)
class Block:
    """One fenced block: where it stands, its language, its text, and what it needs that a test has not."""

    page: str
    line: int
    language: str
    code: str
    needs: str

    @property
    def is_script(self) -> bool:
        """Whether it is a program of its own, with arguments."""
        return "sys.argv" in self.code

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(text: str, page: str) -> list[Block]:
    """Return the fenced blocks of a page's text."""
    found = []
    for match in _FENCE.finditer(text):
        mark = _MARK.search(text[: match.start()])
        lines = text[: match.start()].count("\n") + 2
        found.append(Block(page, lines, match["language"], match["code"], mark["what"] if mark else ""))
    return found


def all_blocks(*languages: str) -> list[Block]:
    """Return the blocks of all pages in any of these languages."""
    pages = [(page.read_text(), str(page.relative_to(ROOT))) for page in PAGES]
    return [block for text, name in pages for block in blocks_of(text, name) if block.language in languages]


def compiled(block: Block) -> Any:
    """Return the block's code, whose errors tell the line of the page."""
    return compile("\n" * (block.line - 1) + block.code, str(ROOT / block.page), "exec")


def free_names(code: str) -> set[str]:
    """Return the names that code reads before it makes them: what comes from above, or from the prelude.

    What a function reads may be made by any line of the block, since it is called later.
    """
    tree = ast.parse(code)
    made: set[str] = set()
    free: set[str] = set()
    for statement in tree.body:
        is_definition = isinstance(statement, (ast.FunctionDef, ast.ClassDef))
        read = statement.value if isinstance(statement, ast.Assign) else statement  # a value is read, then bound
        free |= names_read(read) - made - names_made(tree if is_definition else read)
        made |= names_made(statement)
    return free


def names_read(tree: ast.AST) -> set[str]:
    """Return the names that code reads."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def names_made(tree: ast.AST) -> set[str]:
    """Return the names that code binds anywhere, arguments of its functions included."""
    made = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            made.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            made.add(node.name)
        elif isinstance(node, ast.arg):
            made.add(node.arg)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            made |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return made


def imports_of(code: str) -> Iterable[tuple[str, str | None]]:
    """Yield each module that code imports, with the name that it takes from it, if any."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((str(node.module), alias.name) for alias in node.names)


VOCABULARY = 97


def tiny_model(layers: int = 16) -> Any:
    """A Llama with as many layers as the one of the pages' figures."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, pad_token_id=0, eos_token_id=1,
        bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def token_ids() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, 12))


def training_arguments() -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        "runs", max_steps=1, per_device_train_batch_size=2, report_to=[], save_strategy="no", disable_tqdm=True
    )


def from_transformers(name: str) -> Callable[[], Any]:
    return lambda: getattr(importlib.import_module("transformers"), name)


def accelerator() -> Any:
    return importlib.import_module("accelerate").Accelerator()


# What a page or a docstring may take for granted, made when it is read: the words of the field.
PRELUDE: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch,
    "lowtide": lambda: lowtide,
    "model": tiny_model,
    "input_ids": token_ids,
    "ids": token_ids,
    "labels": token_ids,
    "hidden": lambda: torch.randn(2, 12, 16, requires_grad=True),
    "weight": lambda: torch.nn.Linear(16, VOCABULARY, bias=False).weight,
    "head": lambda: torch.nn.Linear(16, VOCABULARY, bias=False),
    "teacher_hidden": lambda: torch.randn(2, 12, 24),
    "teacher_head": lambda: torch.nn.Linear(24, VOCABULARY, bias=False),
    "AutoModelForCausalLM": from_transformers("AutoModelForCausalLM"),
    "Trainer": from_transformers("Trainer"),
    "args": training_arguments,
    "data": lambda: [{"input_ids": row, "labels": row} for row in token_ids()],
    "accelerator": accelerator,
    "optimizer": lambda: torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]),
    "loader": lambda: torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in token_ids()]),
}


@cache
def options_of_train() -> set[str]:
    """Return the options of `lowtide train` that are its libraries', of pretrained models and of random weights."""
    from transformers import HfArgumentParser
    from trl.scripts.sft import make_parser

    from lowtide.train.arguments import ScratchArguments
    from lowtide.train.trainers import BlockArguments

    parsers = make_parser(), HfArgumentParser((ScratchArguments, BlockArguments))
    flags = {flag for parser in parsers for action in parser._actions for flag in action.option_strings}
    return flags | {"--config", "--accelerate_config", "--num_processes"}


def public_names() -> dict[str, list[str]]:
    """Return the public names of `lowtide`, and of each module below it those that are not lowtide's already."""
    found = {"lowtide": [name for name in lowtide.__all__ if not name.startswith("__")]}
    found["lowtide"] = [name for name in found["lowtide"] if not isinstance(getattr(lowtide, name), ModuleType)]
    for info in pkgutil.iter_modules(lowtide.__path__):
        module = importlib.import_module(f"lowtide.{info.name}")
        names = [name for name in getattr(module, "__all__", ()) if name not in lowtide.__all__]
        if names:
            found[module.__name__] = names
    return found
