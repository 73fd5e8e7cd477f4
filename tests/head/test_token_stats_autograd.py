"""linear_token_stats as a citizen of autograd: subsets, hooks, retained graphs, checkpoints, autocast, products."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from lowtide import HeadOptions, linear_logprobs, linear_token_stats
from lowtide.errors import LowtideError
from lowtide.head import graph
from lowtide.head.terms.statistics import Statistics
from support import head, in_float64, relative_error, stats_oracle

DIFFERENTIABLE = ("logprob", "entropy", "lse", "mean_logit")
KINDS = ("logprobs", "logprobs of several", "stats")


@pytest.fixture(params=KINDS, ids=lambda name: name.replace(" ", "-"))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def several(y: Tensor, V: int) -> Tensor:
    return torch.stack((y, (y + 3) % V, y), -1).where((y != -100)[..., None], -100)


def total(kind: str, x: Tensor, w: Tensor, y: Tensor, **kwargs: Any) -> Tensor:
    """One number that all differentiable outputs reach with different factors."""
    if kind == "stats":
        stats = linear_token_stats(x, w, y, want=DIFFERENTIABLE, **kwargs)
        return torch.stack([(i + 1) * getattr(stats, n).sin().sum() for i, n in enumerate(DIFFERENTIABLE)]).sum()
    y = several(y, w.shape[0]) if "several" in kind else y
    return linear_logprobs(x, w, y, **kwargs).sin().sum()


def oracle_total(kind: str, x: Tensor, w: Tensor, y: Tensor, **kwargs: Any) -> Tensor:
    if kind == "stats":
        stats = stats_oracle(x, w, y, **kwargs)
        return torch.stack([(i + 1) * stats[n].sin().sum() for i, n in enumerate(DIFFERENTIABLE)]).sum()
    y = several(y, w.shape[0]) if "several" in kind else y
    return stats_oracle(x, w, y, **kwargs)["logprob"].sin().sum()


def test_gradcheck(kind: str) -> None:
    x, w, b, y = head((2, 5), 3, 7, dtype=torch.float64)
    y[0, 1] = -100
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(
        lambda x, w, b, s: total(kind, x, w, y, linear_bias=b, softcap=2.0, logit_scale=s), (x, w, b, scale)
    )


@pytest.mark.parametrize("needed", [n for k in range(4) for n in itertools.combinations("xwb", k)], ids="".join)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_subset_of_inputs_frozen(kind: str, needed: tuple[str, ...], dtype: torch.dtype) -> None:
    leaves = dict(zip("xwb", head(11, 6, 17, dtype=dtype)[:3], strict=True))
    y = head(11, 6, 17)[3]
    for name, leaf in leaves.items():
        leaf.requires_grad_(name in needed)
    loss = total(kind, leaves["x"], leaves["w"], y, linear_bias=leaves["b"])
    assert loss.requires_grad == bool(needed)
    if not needed:
        return
    loss.backward()
    full = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    oracle_total(kind, full["x"], full["w"], y, linear_bias=full["b"]).backward()
    for name, leaf in leaves.items():
        if name in needed:
            assert relative_error(leaf.grad, full[name].grad) < (1e-12 if dtype == torch.float64 else 8e-3)
        else:
            assert leaf.grad is None


@pytest.fixture
def seen_by_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator's inside is hidden from dispatch modes; so no operators here."""
    monkeypatch.setattr(graph, "watched", lambda args: False)


def flops(run: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.usefixtures("seen_by_counter")
@pytest.mark.parametrize(("x_needs", "w_needs"), [(True, True), (True, False), (False, True)])
def test_only_the_products_that_are_needed(kind: str, x_needs: bool, w_needs: bool) -> None:
    N, D, V = 40, 6, 70
    x, w, _, y = head(N, D, V, bias=False)
    x.requires_grad_(x_needs)
    w.requires_grad_(w_needs)
    product = 2 * N * D * V
    with torch.no_grad():
        assert flops(lambda: total(kind, x, w, y)) == product
    losses: list[Tensor] = []
    stored = kind == "logprobs" and not w_needs  # cross entropy keeps the input's gradient where the head is frozen
    assert flops(lambda: losses.append(total(kind, x, w, y))) == product * (2 if stored else 1)
    assert flops(losses[0].backward) == (0 if stored else product * (1 + x_needs + w_needs))


@pytest.mark.usefixtures("seen_by_counter")
def test_rows_to_which_nothing_flows_back_cost_nothing_on_the_cpu() -> None:
    N, D, V = 40, 6, 70
    x, w, _, y = head(N, D, V, bias=False)
    stats = linear_token_stats(x, w, want=("entropy",))
    assert flops((stats.entropy * (torch.arange(N) < 10)).sum().backward) == 3 * 2 * 10 * D * V
    y[10:] = -100
    with torch.no_grad():
        assert flops(lambda: linear_logprobs(x, w, several(y, V))) == 2 * 10 * D * V


def test_a_field_that_is_not_differentiated_costs_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual case: the entropy is logged, the log-probability trained on."""
    seen = []
    monkeypatch.setattr(
        Statistics,
        "gradient_",
        lambda self, z, part, known, g, *_: seen.append({n for n, x in g._asdict().items() if x is not None}),
    )
    x, w, _, y = head(9, 6, 17)
    stats = linear_token_stats(x, w, y)
    stats.logprob.sum().backward()
    assert seen
    assert all(names == {"logprob"} for names in seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_retained_graph_gives_the_same_twice(kind: str, dtype: torch.dtype) -> None:
    x, w, b, y = head(9, 5, 13, dtype=dtype)
    loss = total(kind, x, w, y, linear_bias=b)
    first = torch.autograd.grad(loss, (x, w, b), retain_graph=True)
    kept = [g.clone() for g in first]
    for g in first:
        g.fill_(torch.nan)
    second = torch.autograd.grad(loss, (x, w, b), retain_graph=True)
    third = torch.autograd.grad(loss, (x, w, b))
    for k, s, t in zip(kept, second, third, strict=True):
        assert torch.equal(k, s)
        assert torch.equal(k, t)
    with pytest.raises(RuntimeError, match="retain_graph"):
        loss.backward()


def test_outputs_are_the_callers_own() -> None:
    x, w, _, y = head(9, 5, 13)
    got, want = [], []
    for grads, spoil in ((want, False), (got, True)):
        stats = linear_token_stats(x, w, y, want=("logprob", "entropy", "lse", "argmax"))
        loss = stats.logprob.sum() + stats.entropy.sum() + stats.lse.sum()
        if spoil:
            for value in (stats.logprob, stats.entropy, stats.lse, stats.argmax):
                value.detach().zero_()
        grads.extend(torch.autograd.grad(loss, (x, w)))
    assert all(torch.equal(g, e) for g, e in zip(got, want, strict=True))


def test_hooks_fire_once_and_gradients_accumulate(kind: str) -> None:
    x, w, b, y = head(9, 5, 13, dtype=torch.float64)
    fired: list[str] = []
    for name, leaf in (("x", x), ("w", w), ("b", b)):
        leaf.register_hook(lambda g, name=name, leaf=leaf: fired.append((name, leaf.grad is None)))
    for step in (1, 2):
        total(kind, x, w, y, linear_bias=b, options=HeadOptions(workspace_mib=1e-6)).backward()
        assert sorted(fired) == sorted((n, first) for n in "xwb" for first in [True, False][:step])
    twice = w.grad.clone()
    w.grad = None
    total(kind, x, w, y, linear_bias=b).backward()
    torch.testing.assert_close(twice, 2 * w.grad)


def test_one_weight_in_two_heads_and_an_embedding(kind: str) -> None:
    _, w, _, y = head((2, 6), 5, 13, dtype=torch.float64)
    results = []
    for run in (total, oracle_total):
        hidden = F.embedding(y, w).tanh()
        results.append(torch.autograd.grad(run(kind, hidden, w, y) + 0.3 * run(kind, hidden * 2, w, y), w)[0])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_strided_inputs(kind: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(3)
    make = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    for x, w in (
        (make(3, 9, 8)[:, :-2], make(29, 8)),
        (make(7, 3, 8).transpose(0, 1), make(8, 29).T),
        (make(3, 7, 16)[..., ::2], make(58, 8)[::2]),
        (make(1, 7, 8).expand(3, 7, 8), make(29, 8)),
    ):
        y = torch.randint(0, 29, x.shape[:-1])
        options = HeadOptions(workspace_mib=1e-6)
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        plain = x.detach().contiguous().requires_grad_(), w.detach().contiguous().requires_grad_()
        got = torch.autograd.grad(total(kind, x, w, y, options=options), (x, w))
        want = torch.autograd.grad(total(kind, *plain, y, options=options), plain)
        for a, e in zip(got, want, strict=True):
            assert relative_error(a, e) <= (1e-12 if dtype == torch.float64 else 1e-2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint(kind: str, reentrant: bool) -> None:
    x, w, b, y = head(9, 5, 13, dtype=torch.float64)

    def block(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return total(kind, F.layer_norm(x, (5,)), w, y, linear_bias=b)

    checkpoint(block, x, w, b, use_reentrant=reentrant).backward()
    want = torch.autograd.grad(block(x, w, b), (x, w, b))
    for leaf, e in zip((x, w, b), want, strict=True):
        torch.testing.assert_close(leaf.grad, e)


@pytest.mark.parametrize("keep", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_inside_a_selective_checkpoint(kind: str, keep: CheckpointPolicy) -> None:
    x, w, _, y = head(9, 5, 13, dtype=torch.float64)

    def block(x: Tensor, w: Tensor) -> Tensor:
        return total(kind, F.layer_norm(x, (5,)).tanh(), w, y) * 2

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return keep if "lowtide" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    expected = torch.autograd.grad(block(x, w), (x, w))
    got = torch.autograd.grad(checkpoint(block, x, w, use_reentrant=False, context_fn=contexts), (x, w))
    for e, g in zip(expected, got, strict=True):
        torch.testing.assert_close(g, e)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inputs", [torch.float32, "the same"])
def test_autocast(kind: str, dtype: torch.dtype, inputs: Any) -> None:
    x, w, b, y = head(200, 24, 97)
    x = x.detach().to(dtype if inputs == "the same" else inputs).requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        loss = total(kind, x, w, y, linear_bias=b)
        naive = oracle_total(kind, x, w, y, linear_bias=b)
    assert loss.dtype == torch.float32
    got = torch.autograd.grad(loss, (x, w, b))
    assert [g.dtype for g in got] == [x.dtype, w.dtype, b.dtype]
    rounded = [t.detach().to(dtype).double().requires_grad_() for t in (x, w)]
    truth = b.detach().double().requires_grad_()
    expected = oracle_total(kind, *rounded, y, linear_bias=truth)
    assert relative_error(loss, expected) < 1e-5
    want = torch.autograd.grad(expected, (*rounded, truth))
    base = torch.autograd.grad(naive, (x, w, b))
    for g, e, n in zip(got, want, base, strict=True):
        assert relative_error(g, e) <= 1.05 * relative_error(n, e)


def test_float64_is_left_alone_by_autocast(kind: str) -> None:
    x, w, _, y = head(9, 4, 11, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = total(kind, x, w, y)
    torch.testing.assert_close(loss, oracle_total(kind, x, w, y))


def test_a_logit_scale_that_is_trained_gets_its_gradient(kind: str) -> None:
    x, w, b, y = head(9, 5, 13, dtype=torch.float64)
    y[2] = -100
    scale = torch.tensor(0.6, dtype=torch.float64, requires_grad=True)
    leaves = (x, w, b, scale)
    got = torch.autograd.grad(total(kind, x, w, y, linear_bias=b, logit_scale=scale, softcap=3.0), leaves)
    want = torch.autograd.grad(oracle_total(kind, x, w, y, linear_bias=b, logit_scale=scale, softcap=3.0), leaves)
    for g, e in zip(got, want, strict=True):
        torch.testing.assert_close(g, e)


def test_a_trained_scale_in_float32_beside_bfloat16() -> None:
    x, w, _, y = head(60, 8, 40, dtype=torch.bfloat16, bias=False)
    scale = torch.tensor(0.5, requires_grad=True)
    truth = in_float64({"x": x, "w": w, "s": scale})
    got = torch.autograd.grad(linear_token_stats(x, w, y, logit_scale=scale).entropy.sum(), scale)[0]
    want = torch.autograd.grad(
        stats_oracle(truth["x"], truth["w"], logit_scale=truth["s"])["entropy"].sum(), truth["s"]
    )
    assert got.dtype == torch.float32
    assert relative_error(got, want[0]) < 1e-2


def test_double_backward_is_an_error_that_names_the_way_out(kind: str) -> None:
    x, w, _, y = head(9, 5, 13)
    (dx,) = torch.autograd.grad(total(kind, x, w, y), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"second derivative.*linear") as caught:
        dx.square().sum().backward()
    assert isinstance(caught.value, LowtideError)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_transforms_and_forward_mode_are_errors_that_name_the_way_out(kind: str) -> None:
    x, w, _, y = head(4, 5, 13)
    x, w = x.detach(), w.detach()
    attempts = [
        lambda: torch.func.grad(lambda w: total(kind, x, w, y))(w),
        lambda: torch.func.vmap(lambda x, y: total(kind, x, w, y))(x[None], y[None]),
        lambda: torch.func.jvp(lambda w: total(kind, x, w, y), (w,), (w,)),
    ]
    for attempt in attempts:
        with pytest.raises(LowtideError, match=r"linear_(logprobs|token_stats): expected reverse-mode autograd"):
            attempt()


def test_a_weight_changed_before_backward_is_noticed(kind: str) -> None:
    x, w, _, y = head(4, 5, 13)
    loss = total(kind, x, w, y)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_grad_and_inference_mode(kind: str) -> None:
    x, w, _, y = head(4, 5, 13)
    expected = total(kind, x, w, y).detach()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            loss = total(kind, x, w, y)
        assert not loss.requires_grad
        assert torch.equal(loss, expected)
