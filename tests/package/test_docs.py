"""The pages of the interface can be built from the docstrings, and every argument is in its docstring."""

from __future__ import annotations

import inspect
import operator
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lowtide

ROOT = Path(__file__).parents[2]


def test_the_pages_are_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("pdoc")
    subprocess.run([sys.executable, "-W", "error", ROOT / "docs" / "build.py", tmp_path], check=True, cwd=ROOT)
    page = (tmp_path / "lowtide.html").read_text()
    for name in lowtide.__all__:
        assert name in page or name.startswith("__"), name
    assert (tmp_path / "lowtide" / "nn.html").exists()
    losses = (tmp_path / "lowtide" / "losses.html").read_text()
    for name in lowtide.losses.__all__:
        assert f'id="{name}"' in losses, name


@pytest.mark.parametrize(
    "name",
    [
        "linear_apply",
        "linear_cross_entropy",
        "linear_logprobs",
        "linear_token_stats",
        "linear_divergence",
        "plan_divergence",
        "plan_head",
        "swiglu_mlp",
        "patch",
        "unpatch",
        "patch_trl",
        "unpatch_trl",
        "memory.apply_policy",
        "memory.remove_policy",
    ],
)
def test_every_argument_is_documented(name: str) -> None:
    function = operator.attrgetter(name)(lowtide)
    text = inspect.getdoc(function) or ""
    for argument in inspect.signature(function).parameters:
        assert f"{argument}:" in text, f"{name}: {argument}"


@pytest.mark.parametrize(
    "kind",
    [
        lowtide.HeadOptions,
        lowtide.TokenStats,
        lowtide.TeacherTopK,
        lowtide.TrlReport,
        lowtide.nn.LinearCrossEntropyLoss,
        lowtide.memory.ActivationPolicy,
        lowtide.memory.PolicyReport,
        lowtide.nn.SwiGLU,
        lowtide.PatchCallback,
    ],
)
def test_every_field_is_documented(kind: type) -> None:
    text = inspect.getdoc(kind) or ""
    for argument in inspect.signature(kind).parameters:
        assert f"{argument}:" in text, argument


def test_links_in_the_documents_lead_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name}: {target}"


@pytest.mark.parametrize(("page", "examples"), [("token-stats", 2), ("divergence", 3), ("mlp", 1)])
def test_the_examples_of_a_page_run(page: str, examples: int) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), re.DOTALL)
    assert len(blocks) == examples
    for block in blocks:
        exec(compile(block, page, "exec"), {})
