"""Every peer that runs here is the same loss; Liger's memory is what its own rule takes."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F

from lowtide.bench.harness import CannotError
from lowtide.bench.peers import LIGER, LOWTIDE_AT_LIGERS, PEERS, liger_mib, liger_rows
from lowtide.bench.problem import PLAIN, SETTINGS, Setting, make_problem
from lowtide.bench.reference import reference
from lowtide.bench.shapes import SHAPES, parse_shape
from support import relative_error

PROBLEM = make_problem(parse_shape("64,24,300"), torch.float32, "cpu")
HERE = ["lowtide", LOWTIDE_AT_LIGERS, "naive", "torch", "torch-4096", "trl"]


@pytest.mark.parametrize("setting", [PLAIN, *SETTINGS[2:]], ids=lambda setting: setting.name)
@pytest.mark.parametrize("name", HERE)
def test_the_loss_is_the_same(name: str, setting: Setting) -> None:
    if name == "trl":
        pytest.importorskip("trl")
    if name.startswith("torch") and not hasattr(F, "linear_cross_entropy"):
        pytest.skip("this torch has no linear_cross_entropy")
    problem = PROBLEM.in_setting(setting)
    true = reference(problem)
    value = problem.step(PEERS[name].build(problem))
    expected = true.loss_N if setting.reduction == "none" else true.loss_N.mean()
    assert value.shape == expected.shape
    assert relative_error(value, expected) < 2e-6
    for leaf, exact in ((problem.x, true.dx), (problem.w, true.dw)):
        assert (leaf.grad is None) == (exact is None)
        if leaf.grad is not None and exact is not None:
            assert relative_error(leaf.grad, exact) < 5e-6


def test_autocast_is_on_where_the_setting_says_so() -> None:
    problem = make_problem(parse_shape("64,24,300"), torch.bfloat16, "cpu").in_setting(SETTINGS[1])
    seen = []
    naive = PEERS["naive"].build(problem)
    problem.step(lambda x, w, y, reduction: seen.append((x @ w.T).dtype) or naive(x, w, y, reduction))
    assert seen == [torch.bfloat16]
    assert problem.w.grad is not None
    assert problem.w.grad.dtype == torch.float32


def test_a_steps_gradients_are_its_own() -> None:
    problem = PROBLEM.in_setting(PLAIN)
    loss = PEERS["naive"].build(problem)
    problem.step(loss)
    assert problem.w.grad is not None
    first = problem.w.grad.clone()
    problem.step(loss)
    assert torch.equal(problem.w.grad, first)
    problem.clear()
    assert problem.w.grad is None


@pytest.mark.parametrize(
    ("shape", "rows"), [("llama-1b", 256), ("gemma-2b", 128), ("llama-8b", 512), ("100,50,10", 100), ("1,8,800", 1)]
)
def test_ligers_rule(shape: str, rows: int) -> None:
    assert liger_rows(parse_shape(shape)) == rows


def test_lowtide_takes_ligers_memory() -> None:
    """Liger was measured at 640 MiB above the inputs of llama-1b, 576 of which are gradients."""
    shape = SHAPES["llama-1b"]
    assert liger_rows(shape) * shape.V * 2 / 2**20 == 64
    options = PEERS[LOWTIDE_AT_LIGERS].options
    assert options is not None
    assert options(PROBLEM).workspace_mib == liger_mib(PROBLEM) == 8 * 300 * 4 / 2**20


@pytest.mark.parametrize("name", [LIGER, "liger-large", "cce", "cce-exact", "quack"])
def test_peers_for_gpus_say_so(name: str) -> None:
    with pytest.raises(CannotError, match="GPU"):
        PEERS[name].build(PROBLEM)


def test_a_torch_without_the_function_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
    with pytest.raises(CannotError, match="has no linear_cross_entropy"):
        PEERS["torch"].build(PROBLEM)


def test_nobody_is_imported_before_its_turn() -> None:
    assert not {"liger_kernel", "cut_cross_entropy", "quack"} & set(sys.modules)
