"""linear_token_stats under torch.compile, on fake tensors, and as registered operators."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode

from lowtide import TokenStats, linear_logprobs, linear_token_stats
from lowtide.head.call import HeadCall, TokenStatsArgs
from lowtide.head.terms.token_stats import TOKEN_STATS
from support import head

# torch.compile warns of what it does itself, when it follows an autograd.Function and when inductor first loads
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.*torch.autograd.function.Function.* should not be instantiated:DeprecationWarning"
    ),
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
]
ALL = TokenStats._fields


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("backend", "dtype", "K"),
    [
        ("eager", torch.bfloat16, 3),
        *itertools.product(["aot_eager"], [torch.float32, torch.bfloat16], [1, 3]),
        ("inductor", torch.float32, 1),
    ],
)
def test_compiles_whole_and_agrees(backend: str, dtype: torch.dtype, K: int) -> None:
    x, w, b, y = head((2, 6), 8, 33, dtype=dtype)
    y[0, 1] = -100
    y = y if K == 1 else torch.stack((y, y.flip(0), y), -1)
    scale = torch.tensor(0.7, requires_grad=True)

    def step(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, TokenStats]:
        stats = linear_token_stats(x * 2, w, y, want=ALL, topk=2, linear_bias=b, softcap=4.0, logit_scale=s)
        alone = linear_logprobs(x, w, y)
        return (stats.logprob + alone).sum() * 3 - stats.entropy.sum(), stats

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    (loss, stats), (expected, eager) = compiled(x, w, b, scale), step(x, w, b, scale)
    torch.testing.assert_close(loss, expected)
    assert isinstance(stats, TokenStats)
    for name in ALL:
        got, want = getattr(stats, name), getattr(eager, name)
        torch.testing.assert_close(tuple(got), tuple(want)) if name == "topk" else torch.testing.assert_close(got, want)
    got = torch.autograd.grad(loss, (x, w, b, scale))
    for g, e in zip(got, torch.autograd.grad(expected, (x, w, b, scale)), strict=True):
        torch.testing.assert_close(g, e)


def test_compiles_under_autocast() -> None:
    x, w, b, y = head(20, 8, 33)

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            stats = linear_token_stats(x, w, y, linear_bias=b)
            return (stats.logprob + stats.entropy).sum()

    loss, expected = torch.compile(step, fullgraph=True, backend="aot_eager")(x, w), step(x, w)
    torch.testing.assert_close(loss, expected)
    for g, e in zip(torch.autograd.grad(loss, (x, w)), torch.autograd.grad(expected, (x, w)), strict=True):
        torch.testing.assert_close(g, e)


@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_a_logit_scale_that_changes_compiles_no_third_time(kind: str) -> None:
    x, w, _, _ = head(20, 8, 33)
    compiled = torch.compile(
        lambda x, w, s: linear_token_stats(x, w, want=("entropy",), logit_scale=s).entropy,
        fullgraph=True,
        backend="aot_eager",
    )
    torch._dynamo.utils.counters.clear()
    for value in (0.5, 0.6, 0.7, 0.8):
        scale = value if kind == "number" else torch.tensor(value)
        eager = linear_token_stats(x, w, want=("entropy",), logit_scale=value).entropy
        torch.testing.assert_close(compiled(x, w, scale), eager)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (2 if kind == "number" else 1)


def test_a_step_on_fake_tensors() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, w = torch.randn(3, 3, 8, requires_grad=True), torch.randn(33, 8, requires_grad=True)
        y = torch.randint(0, 33, (3, 3, 2))
        stats = linear_token_stats(x, w, y, want=ALL, topk=4)
        (stats.logprob.sum() + stats.mean_logit.sum()).backward()
    assert stats.topk.ids.shape == (3, 3, 4)
    assert stats.is_top1.dtype == torch.bool
    assert w.grad.shape == (33, 8)
    assert x.grad.shape == (3, 3, 8)


def test_one_graph_for_any_number_of_tokens() -> None:
    _, w, _, _ = head(1, 8, 33)
    counter = CompileCounterWithBackend("eager")

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return linear_token_stats(x, w, y, want=("logprob", "lse")).logprob

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=counter)
    for N in (5, 20, 33, 100):
        x, _, _, y = head(N, 8, 33)
        torch.testing.assert_close(compiled(x, y), run(x, y))
    assert counter.frame_count == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("want", ["entropy,logprob,topk", "lse", ",".join(sorted(ALL))])
def test_the_registered_operators_pass_opcheck(dtype: torch.dtype, want: str) -> None:
    x, w, b, _ = head((2, 6), 8, 33, dtype=dtype)
    y = torch.randint(0, 33, (12, 2))
    y[3, 1] = -100
    of_head = HeadCall(
        input=x.detach(), linear_weight=w.detach(), linear_bias=None if b is None else b.detach(),
        logit_scale=torch.tensor(0.5), softcap=2.0, dtype=dtype, workspace_mib=None, accumulate="auto", backend="auto",
    )  # fmt: skip
    call = (*of_head, *TokenStatsArgs(target=y, want=want, topk=3, ignore_index=-100))
    torch.library.opcheck(torch.ops.lowtide.token_stats.default, (*call, False, False, False, True))
    values = torch.ops.lowtide.token_stats(*call, False, False, False, True)
    found = dict(zip(TOKEN_STATS.names, values, strict=False))
    upstream = [
        torch.rand(12, 2, dtype=dtype) if "logprob" in want else None,
        torch.rand(12, dtype=dtype) if "entropy" in want else None,
        torch.rand(12, dtype=dtype),
        None,
    ]
    known = [found[name] for name in TOKEN_STATS.known]
    for wanted in ((True, True, True), (True, False, False), (False, True, False)):
        torch.library.opcheck(torch.ops.lowtide.token_stats_backward.default, (*call, *wanted, *upstream, *known))
