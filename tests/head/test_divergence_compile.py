"""linear_divergence under torch.compile, on fake tensors, and as registered operators."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode

from lowtide import TeacherTopK, linear_divergence
from lowtide.head.call import DivergenceArgs, HeadCall
from support import head

# torch.compile warns of what it does itself, when it follows an autograd.Function and when inductor first loads
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.*torch.autograd.function.Function.* should not be instantiated:DeprecationWarning"
    ),
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("backend", "dtype", "topk", "reduction"),
    [
        ("eager", torch.float32, False, "none"),
        ("eager", torch.bfloat16, True, "mean"),
        *itertools.product(["aot_eager"], [torch.float32, torch.bfloat16], [False, True], ["none", "mean"]),
        *itertools.product(["aot_eager"], [torch.float32], [False, True], ["sum"]),
        pytest.param("inductor", torch.float32, False, "none", marks=pytest.mark.slow),
        ("inductor", torch.float32, False, "mean"),
    ],
)
def test_compiles_whole_and_agrees(backend: str, dtype: torch.dtype, topk: bool, reduction: str) -> None:
    x, w, b, _ = head((2, 6), 8, 33, dtype=dtype)
    tx, tw, _, _ = head((2, 6), 5, 33, dtype=dtype, seed=1)
    mask = torch.rand(2, 6) < 0.7
    logprobs, ids = (tx.detach().float() @ tw.detach().float().T).log_softmax(-1).topk(4)

    def step(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        common = {"linear_bias": b, "mask": mask, "reduction": reduction, "softcap": 4.0}
        if topk:
            known = TeacherTopK(ids, logprobs, "drop")
            value = linear_divergence(x * 2, w, None, None, teacher_topk=known, **common)
        else:
            value = linear_divergence(x * 2, w, tx, tw, kind="jsd", temperature=1.5, **common)
        return (value * 3).sum()

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    loss, expected = compiled(x, w, b), step(x, w, b)
    torch.testing.assert_close(loss, expected)
    for g, e in zip(torch.autograd.grad(loss, (x, w, b)), torch.autograd.grad(expected, (x, w, b)), strict=True):
        torch.testing.assert_close(g, e)


@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_a_temperature_that_changes_compiles_no_third_time(kind: str) -> None:
    x, w, _, _ = head(20, 8, 33)
    tx, tw, _, _ = head(20, 5, 33, seed=1)
    compiled = torch.compile(
        lambda x, w, t: linear_divergence(x, w, tx, tw, temperature=t), fullgraph=True, backend="aot_eager"
    )
    torch._dynamo.utils.counters.clear()
    for value in (0.5, 0.6, 0.7, 0.8):
        temperature = value if kind == "number" else torch.tensor(value)
        torch.testing.assert_close(compiled(x, w, temperature), linear_divergence(x, w, tx, tw, temperature=value))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (2 if kind == "number" else 1)


def test_a_step_on_fake_tensors() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, w = torch.randn(3, 3, 8, requires_grad=True), torch.randn(33, 8, requires_grad=True)
        value = linear_divergence(x, w, torch.randn(3, 3, 4), torch.randn(30, 4), kind="jsd")
        value.sum().backward()
    assert value.shape == (3, 3)
    assert w.grad.shape == (33, 8)
    assert x.grad.shape == (3, 3, 8)


def test_one_graph_for_any_number_of_tokens() -> None:
    _, w, _, _ = head(1, 8, 33)
    _, tw, _, _ = head(1, 5, 33, seed=1)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(
        lambda x, tx: linear_divergence(x, w, tx, tw), fullgraph=True, dynamic=True, backend=counter
    )
    for N in (6, 20, 33, 100):
        x, tx = head(N, 8, 33)[0], head(N, 5, 33, seed=1)[0]
        torch.testing.assert_close(compiled(x, tx), linear_divergence(x, w, tx, tw))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("dtype", "topk", "reduction"),
    [
        (torch.float32, False, "none"),
        (torch.float32, True, "none"),
        (torch.float32, False, "sum"),
        (torch.float32, True, "mean"),
        (torch.float64, True, "sum"),
        (torch.float64, False, "none"),
        (torch.float16, True, "none"),
        (torch.float16, False, "mean"),
    ],
)
def test_the_registered_operators_pass_opcheck(dtype: torch.dtype, topk: bool, reduction: str) -> None:
    x, w, b, _ = (None if t is None else t.detach() for t in head((2, 6), 8, 33, dtype=dtype))
    tx, tw, tb, _ = (None if t is None else t.detach() for t in head((2, 6), 5, 30, dtype=dtype, seed=1))
    logprobs, ids = (tx @ tw.T).log_softmax(-1).view(12, 30).topk(4)
    of_head = HeadCall(
        input=x, linear_weight=w, linear_bias=b, logit_scale=None, softcap=2.5, dtype=dtype, workspace_mib=None,
        accumulate="auto", backend="auto",
    )  # fmt: skip
    args = DivergenceArgs(
        teacher_input=None if topk else tx,
        teacher_weight=None if topk else tw,
        teacher_bias=None if topk else tb,
        topk_ids=ids if topk else None,
        topk_logprobs=logprobs if topk else None,
        mask=torch.rand(12) < 0.7,
        temperature=torch.tensor(1.5),
        num_items=torch.tensor(7.5) if reduction == "mean" else None,
        teacher_softcap=None if topk else 3.5,
        teacher_dtype=dtype,
        kind="jsd",
        beta=0.3,
        tail="bucket" if topk else "",
        reduction=reduction,
    )
    call = (*of_head, *args)
    value, *known = torch.ops.lowtide.divergence(*call, False, False, False, True)[:4]
    for wanted in ((True, True, True), (True, False, False), (False, True, False)):
        upstream = (*call, *wanted, torch.rand_like(value), *known)
        torch.library.opcheck(torch.ops.lowtide.divergence_backward.default, upstream)
        if reduction != "none" or not (wanted[1] or wanted[2]):
            torch.library.opcheck(torch.ops.lowtide.divergence.default, (*call, *wanted, False))
    torch.library.opcheck(torch.ops.lowtide.divergence.default, (*call, False, False, False, True))
