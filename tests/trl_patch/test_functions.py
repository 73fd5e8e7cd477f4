"""What TRL's two functions answer when patched, against whole logits in float64: what TRL tests of them, and more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lowtide
from promises import promise
from support import every_pair, head, relative_error

pytestmark = promise("values", "options")
OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
SHAPES = [(1, 5, 2), (13, 7, 29), (61, 32, 131)]  # N, D, V
EXACT = 2e-5


@pytest.fixture(autouse=True)
def report() -> lowtide.TrlReport:
    return lowtide.patch_trl()


def logprob_function() -> Any:
    from trl.trainer import utils

    return utils._ChunkedLogProbFunction


def divergence_function() -> Any:
    from trl.trainer import distillation_trainer

    return distillation_trainer.ChunkedDivergenceFunction


def copies(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in tensors]


def logits(x: Tensor, w: Tensor, b: Tensor | None, T: float, cap: float | None, scale: float) -> Tensor:
    """TRL's order: scale, cap, temperature."""
    z = F.linear(x, w, b) * scale
    return (z if cap is None else cap * torch.tanh(z / cap)) / T


def expected_outputs(z: Tensor, y: Tensor) -> dict[str, Tensor]:
    logp = z.log_softmax(-1)
    return {
        "log_probs": logp.gather(-1, y[:, None])[:, 0],
        "entropy": -(logp.exp() * logp).sum(-1),
        "log_sum_sq_probs": (2 * logp).logsumexp(-1),
        "mean_logits": z.mean(-1),
        "is_top1": z.argmax(-1) == y,
    }


def assert_same_gradients(got: tuple[Tensor | None, ...], true: list[Tensor | None], tolerance: float) -> None:
    for mine, theirs in zip(got, true, strict=True):
        if mine is None or theirs is None:
            assert mine is theirs
            continue
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None:
            assert mine.grad.dtype == mine.dtype
            assert relative_error(mine.grad, theirs.grad) < tolerance


@every_pair(
    shape=SHAPES, bias=[True, False], terms=[(1.0, None, 1.0), (0.7, None, 0.5), (0.7, 3.0, 1.0), (1.3, 2.0, 0.8)]
)
def test_logprob_values_and_gradients(shape: Any, bias: bool, terms: Any, report: lowtide.TrlReport) -> None:
    (N, D, V), (T, cap, scale) = shape, terms
    x, w, b, y = head(N, D, V, bias=bias)
    true = copies(x, w, b)
    names = ("log_probs", *OUTPUTS)
    found = dict(zip(names, logprob_function().apply(x, w, b, y, T, 17, cap, scale), strict=True))
    expected = expected_outputs(logits(*true, T, cap, scale), y)
    for name in names:
        assert found[name].shape == (N,)
        if name == "is_top1":
            assert torch.equal(found[name], expected[name])
        else:
            assert found[name].dtype == torch.float32
            torch.testing.assert_close(found[name].double(), expected[name], rtol=EXACT, atol=1e-6, msg=name)
    assert [found[name].requires_grad for name in names] == [True, True, False, False, False]
    g, h = torch.randn(2, N)
    (g * found["log_probs"] + h * found["entropy"]).sum().backward()
    (g * expected["log_probs"] + h * expected["entropy"]).sum().backward()
    assert_same_gradients((x, w, b), true, 1e-4)
    assert report.calls_trl == {}
    assert report.calls_lowtide == {"ChunkedLogProbFunction": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_do_not_depend_on_what_else_is_asked_for(dtype: torch.dtype) -> None:
    """A policy and a frozen copy of it must agree to the bit, whatever metrics are computed on the side."""
    x, w, b, y = head(301, 16, 517, dtype=dtype)
    policy = logprob_function().apply(x, w, b, y, 0.8, 17)[0]
    with torch.no_grad():
        reference = logprob_function().apply(x.detach(), w.detach(), b.detach(), y, 0.8, 17, None, 1.0, ("log_probs",))
    assert torch.equal(policy, reference[0])


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(torch.bfloat16, "uniform"), (torch.float16, "float32 weight"), (torch.bfloat16, "autocast")],
)
def test_narrow_dtypes(dtype: torch.dtype, kind: str, report: lowtide.TrlReport) -> None:
    """TRL multiplies in the dtype of the hidden states, or autocast's; the float32 weight's gradient is float32."""
    x, w, b, y = head(61, 32, 131, dtype=dtype)
    if kind != "uniform":
        w, b = (t.detach().float().requires_grad_() for t in (w, b))
    if kind == "autocast":
        x = x.detach().float().requires_grad_()
    true = copies(x, w, b)
    with torch.autocast("cpu", dtype, enabled=kind == "autocast"):
        logprob, entropy, *_ = logprob_function().apply(x, w, b, y, 0.7, 17)
    (2 * logprob + 0.5 * entropy).sum().backward()
    expected = expected_outputs(logits(*true, 0.7, None, 1.0), y)
    (2 * expected["log_probs"] + 0.5 * expected["entropy"]).sum().backward()
    rounding = 2.0 ** (-8 if dtype == torch.bfloat16 else -11)
    assert logprob.dtype == entropy.dtype == torch.float32
    assert relative_error(logprob, expected["log_probs"]) < rounding
    assert relative_error(entropy, expected["entropy"]) < rounding
    assert_same_gradients((x, w, b), true, 4 * rounding)
    assert report.calls_trl == {}


@every_pair(
    beta=[0.0, 0.3, 1.0],
    terms=[(1.0, 1.0, None, None), (0.7, 1.0, 3.0, None), (2.0, 0.5, None, 1.5), (0.6, 1.3, 2.0, 4.0)],
    bias=[True, False],
    shape=SHAPES,
)
def test_divergence_values_and_gradients(
    beta: float, terms: Any, bias: bool, shape: Any, report: lowtide.TrlReport
) -> None:
    (N, D, V), (T, scale, cap, teacher_cap) = shape, terms
    x, w, b, _ = head(N, D, V, bias=bias)
    tx, tw, tb, _ = head(N, D + 3, V + 5, seed=1, bias=not bias)  # TRL leaves the teacher's further classes out
    true = copies(x, w, b)
    divergence, entropy = divergence_function().apply(x, w, b, tx, tw, tb, beta, T, scale, cap, scale, teacher_cap)
    log_s = logits(*true, T, cap, scale).log_softmax(-1)
    log_t = logits(*copies(tx, tw, tb), T, teacher_cap, scale)[:, :V].log_softmax(-1).detach()
    log_m = ((1 - beta) * log_s.exp() + beta * log_t.exp()).log()
    if beta in (0, 1):
        log_p, log_q = (log_t, log_s) if beta == 0 else (log_s, log_t)
        expected = (log_p.exp() * (log_p - log_q)).sum(-1)
    else:
        student = (log_s.exp() * (log_s - log_m)).sum(-1)
        expected = beta * (log_t.exp() * (log_t - log_m)).sum(-1) + (1 - beta) * student
    assert divergence.dtype == entropy.dtype == torch.float32
    assert relative_error(divergence, expected) < 1e-4
    assert relative_error(entropy, -(log_s.exp() * log_s).sum(-1)) < EXACT
    assert not entropy.requires_grad
    g = torch.randn(N)
    (g * divergence).sum().backward()
    (g * expected).sum().backward()
    assert_same_gradients((x, w, b), true, 1e-4)
    assert tx.grad is None
    assert tw.grad is None
    assert report.calls_lowtide == {"ChunkedDivergenceFunction": 1}
    assert report.calls_trl == {}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo, of autograd functions
def test_compiled_without_a_graph_break() -> None:
    x, w, b, y = head(13, 7, 29)
    tx, tw, tb, _ = head(13, 9, 29, seed=1)

    def loss(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        logprob, entropy, *_ = logprob_function().apply(x, w, b, y, 0.7, 17, 3.0, 0.5)
        divergence, _ = divergence_function().apply(x, w, b, tx, tw, tb, 0.3, 0.7)
        return (divergence - logprob - 0.1 * entropy).sum()

    expected = torch.autograd.grad(loss(x, w, b), (x, w, b))
    found = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(x, w, b), (x, w, b))
    for mine, theirs in zip(found, expected, strict=True):
        assert relative_error(mine, theirs) < EXACT
