"""linear_cross_entropy as a citizen of autograd: subsets, hooks, retained graphs, checkpoints, autocast, GradScaler."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import lowtide
from lowtide import HeadOptions, linear_cross_entropy
from lowtide.errors import LowtideError
from lowtide.head.terms.cross_entropy import CROSS_ENTROPY
from support import head, in_float64, oracle, relative_error

MODES = {
    "stored": {},
    "recomputed": {"options": HeadOptions(gradient="recompute")},
    "per token": {"reduction": "none"},
}


@pytest.fixture(params=MODES, ids=lambda name: name.replace(" ", "-"))
def mode(request: pytest.FixtureRequest) -> dict[str, Any]:
    return MODES[request.param]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Name each pass over the vocabulary as it runs."""
    seen: list[str] = []
    for name in ("run", "run_backward"):
        operator = getattr(CROSS_ENTROPY, name)

        def counted(*args: Any, name: str = name, operator: Any = operator) -> Any:
            seen.append(name)
            return operator(*args)

        monkeypatch.setattr(CROSS_ENTROPY, name, counted)
    return seen


def test_gradcheck(mode: dict[str, Any]) -> None:
    x, w, b, y = head((2, 5), 3, 7, dtype=torch.float64)
    y[0, 1] = -100
    kwargs = {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 2.0, "logit_scale": 0.7, "shift": True, **mode}
    torch.autograd.gradcheck(lambda x, w, b: linear_cross_entropy(x, w, y, linear_bias=b, **kwargs), (x, w, b))


@pytest.mark.parametrize("needed", [n for k in range(4) for n in itertools.combinations("xwb", k)], ids="".join)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_subset_of_inputs_frozen(mode: dict[str, Any], needed: tuple[str, ...], dtype: torch.dtype) -> None:
    leaves = dict(zip("xwb", head(11, 6, 17, dtype=dtype)[:3], strict=True))
    y = head(11, 6, 17)[3]
    for name, leaf in leaves.items():
        leaf.requires_grad_(name in needed)
    loss = linear_cross_entropy(leaves["x"], leaves["w"], y, linear_bias=leaves["b"], **mode)
    assert loss.requires_grad == bool(needed)
    if not needed:
        return
    loss.sum().backward()
    full = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    oracle(full["x"], full["w"], y, linear_bias=full["b"], reduction=mode.get("reduction", "mean")).sum().backward()
    for name, leaf in leaves.items():
        if name in needed:
            assert relative_error(leaf.grad, full[name].grad) < (1e-13 if dtype == torch.float64 else 8e-3)
        else:
            assert leaf.grad is None


def test_a_frozen_head_needs_no_second_look_at_the_logits(passes: list[str]) -> None:
    x, w, _, y = head(40, 6, 17)
    w.requires_grad_(False)
    linear_cross_entropy(x, w, y, reduction="none").sum().backward()
    assert passes == ["run"]


def test_an_ignored_token_stays_zero_whatever_comes_from_above(mode: dict[str, Any]) -> None:
    if mode.get("reduction") != "none":
        pytest.skip("one upstream gradient for all tokens")
    for frozen in (False, True):
        x, w, _, y = head(6, 4, 9)
        w.requires_grad_(not frozen)
        y[2] = -100
        upstream = torch.ones(6)
        upstream[2] = torch.nan
        linear_cross_entropy(x, w, y, **mode).backward(upstream)
        assert (x.grad[2] == 0).all()
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("upstream", [1.0, -3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_retained_graph_gives_the_same_twice(mode: dict[str, Any], upstream: float, dtype: torch.dtype) -> None:
    x, w, b, y = head(9, 5, 13, dtype=dtype)
    loss = linear_cross_entropy(x, w, y, linear_bias=b, **mode).sum() * upstream
    first = torch.autograd.grad(loss, (x, w, b), retain_graph=True)
    kept = [g.clone() for g in first]
    for g in first:
        g.fill_(torch.nan)  # the caller's own: must not reach what the graph keeps
    second = torch.autograd.grad(loss, (x, w, b), retain_graph=True)
    third = torch.autograd.grad(loss, (x, w, b))
    for k, s, t in zip(kept, second, third, strict=True):
        assert torch.equal(k, s)
        assert torch.equal(k, t)


def test_a_second_backward_through_a_freed_graph_is_an_error(mode: dict[str, Any]) -> None:
    x, w, _, y = head(9, 5, 13)
    loss = linear_cross_entropy(x, w, y, **mode).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="retain_graph"):
        loss.backward()


def test_hooks_fire_once_and_gradients_accumulate(mode: dict[str, Any]) -> None:
    x, w, b, y = head(9, 5, 13, dtype=torch.float64)
    fired: list[str] = []
    for name, leaf in (("x", x), ("w", w), ("b", b)):
        leaf.register_hook(lambda g, name=name: fired.append(name))
        leaf.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(name + " accumulated"))
    options = HeadOptions(workspace_mib=1e-6, gradient=mode.get("options", HeadOptions()).gradient)
    for step in (1, 2):
        loss = linear_cross_entropy(x, w, y, linear_bias=b, **{**mode, "options": options}).sum()
        loss.backward()
        assert sorted(fired) == sorted([n + suffix for n in "xwb" for suffix in ("", " accumulated")] * step)
    single = w.grad.clone()
    w.grad = None
    linear_cross_entropy(x, w, y, linear_bias=b, **mode).sum().backward()
    torch.testing.assert_close(single, 2 * w.grad)


def test_one_weight_in_two_heads_and_an_embedding(mode: dict[str, Any]) -> None:
    _, w, _, y = head((2, 6), 5, 13, dtype=torch.float64)
    results = []
    for loss_of in (linear_cross_entropy, oracle):
        kwargs = {k: v for k, v in mode.items() if k != "options" or loss_of is linear_cross_entropy}
        hidden = F.embedding(y, w).tanh()
        loss = loss_of(hidden, w, y, shift=True, **kwargs).sum() + 0.3 * loss_of(hidden * 2, w, y, **kwargs).sum()
        results.append(torch.autograd.grad(loss, w)[0])
    torch.testing.assert_close(*results)


def strided(kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    make = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    return {
        "cut along the sequence": lambda: (make(3, 9, 8)[:, :-2], make(29, 8)),
        "batch second": lambda: (make(7, 3, 8).transpose(0, 1), make(29, 8)),
        "every other feature": lambda: (make(3, 7, 16)[..., ::2], make(29, 16)[:, ::2]),
        "weight transposed": lambda: (make(3, 7, 8), make(8, 29).T),
        "expanded": lambda: (make(1, 7, 8).expand(3, 7, 8), make(29, 8)),
        "rows apart": lambda: (make(3, 7, 24)[..., :8], make(58, 8)[::2]),
    }[kind]()


@pytest.mark.parametrize(
    "kind",
    ["cut along the sequence", "batch second", "every other feature", "weight transposed", "expanded", "rows apart"],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ignore", [False, True])
def test_strided_inputs(mode: dict[str, Any], kind: str, dtype: torch.dtype, ignore: bool) -> None:
    x, w = strided(kind, dtype)
    y = torch.randint(0, 29, x.shape[:-1])
    if ignore:
        y[1, ::2] = -100
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    kwargs = {**mode, "options": HeadOptions(workspace_mib=1e-6, gradient=mode.get("options", HeadOptions()).gradient)}
    strided_loss = linear_cross_entropy(x, w, y, **kwargs)
    plain = x.detach().contiguous().requires_grad_(), w.detach().contiguous().requires_grad_()
    plain_loss = linear_cross_entropy(*plain, y, **kwargs)
    tolerance = 1e-13 if dtype == torch.float64 else 1e-6
    assert relative_error(strided_loss, plain_loss) <= tolerance
    got = torch.autograd.grad(strided_loss.sum(), (x, w))
    want = torch.autograd.grad(plain_loss.sum(), plain)
    for g, e in zip(got, want, strict=True):
        assert relative_error(g, e) <= (tolerance if dtype == torch.float64 else 1e-3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint(mode: dict[str, Any], reentrant: bool, passes: list[str]) -> None:
    x, w, b, y = head(9, 5, 13, dtype=torch.float64)

    def block(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return linear_cross_entropy(F.layer_norm(x, (5,)), w, y, linear_bias=b, **mode)

    loss = checkpoint(block, x, w, b, use_reentrant=reentrant).sum()
    got = torch.autograd.grad(loss, (x, w, b)) if not reentrant else _backward(loss, x, w, b)
    used = list(passes)
    want = torch.autograd.grad(block(x, w, b).sum(), (x, w, b))
    for g, e in zip(got, want, strict=True):
        torch.testing.assert_close(g, e)
    if mode == {} and not reentrant:
        assert used == ["run"], "the stored gradients outlive the checkpoint: nothing to compute again"


@pytest.mark.parametrize("keep", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_inside_a_selective_checkpoint(mode: dict[str, Any], keep: CheckpointPolicy) -> None:
    x, w, _, y = head(9, 5, 13, dtype=torch.float64)

    def block(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = F.layer_norm(x, (5,)).tanh()
        loss = linear_cross_entropy(h, w, y, **mode).sum() * 2
        return loss, (h * loss.detach()).sin().sum()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return keep if "lowtide" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    expected = torch.autograd.grad(sum(block(x, w)), (x, w))
    got = torch.autograd.grad(sum(checkpoint(block, x, w, use_reentrant=False, context_fn=contexts)), (x, w))
    for plain, selective in zip(expected, got, strict=True):
        torch.testing.assert_close(plain, selective)


def _backward(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    for leaf in leaves:
        leaf.grad = None
    loss.backward()
    return [leaf.grad.clone() for leaf in leaves]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", [torch.float32, "the same"])
@pytest.mark.parametrize("inputs", [torch.float32, "the same"])
def test_autocast(mode: dict[str, Any], dtype: torch.dtype, weights: Any, inputs: Any) -> None:
    """Operands are rounded to autocast's dtype; each gradient comes in the dtype of what it belongs to."""
    x, w, b, y = head(200, 24, 97)
    x = x.detach().to(dtype if inputs == "the same" else inputs).requires_grad_()
    w = w.detach().to(dtype if weights == "the same" else weights).requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        loss = linear_cross_entropy(x, w, y, linear_bias=b, **mode)
        naive = F.cross_entropy(F.linear(x, w, b).float(), y, reduction=mode.get("reduction", "mean"))
    assert loss.dtype == torch.float32
    got = torch.autograd.grad(loss.sum(), (x, w, b))
    assert [g.dtype for g in got] == [x.dtype, w.dtype, b.dtype]
    rounded = [t.detach().to(dtype).double().requires_grad_() for t in (x, w)]
    truth = b.detach().double().requires_grad_()
    expected = oracle(*rounded, y, linear_bias=truth, reduction=mode.get("reduction", "mean"))
    assert relative_error(loss, expected) < 1e-6
    want = torch.autograd.grad(expected.sum(), (*rounded, truth))
    base = torch.autograd.grad(naive.sum(), (x, w, b))
    for g, e, n in zip(got, want, base, strict=True):
        assert relative_error(g, e) <= 1.05 * relative_error(n, e)


def test_float64_is_left_alone_by_autocast() -> None:
    x, w, _, y = head(9, 4, 11, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(x, w, y)
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(x, w), y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_grad_scaler_skips_a_step_with_infinities_and_goes_on(dtype: torch.dtype) -> None:
    x, w, _, y = head(30, 8, 40, dtype=dtype, bias=False)
    master = w.detach().float().requires_grad_()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=1000, backoff_factor=2.0**-114)
    optimizer = torch.optim.SGD([master], lr=0.1)
    before = master.detach().clone()
    for step in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = linear_cross_entropy(x, master, y, token_weight=torch.full((30,), 30.0 * 8))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(master.detach(), before) == (step == 0)
    truth = [t.detach().half().double().requires_grad_() for t in (x, before)]
    (want,) = torch.autograd.grad(oracle(*truth, y, token_weight=torch.full((30,), 240.0)), truth[1])
    assert relative_error(before - master.detach(), 0.1 * want) < 2e-3


def test_a_logit_scale_that_is_trained_gets_its_gradient(mode: dict[str, Any]) -> None:
    x, w, b, y = head(9, 5, 13, dtype=torch.float64)
    scale = torch.tensor(0.6, dtype=torch.float64, requires_grad=True)
    kwargs = {"input": x, "linear_weight": w, "linear_bias": b, "logit_scale": scale, "target": y, "softcap": 3.0}
    reduction = mode.get("reduction", "mean")
    loss = linear_cross_entropy(**kwargs, **mode)
    truth = in_float64(kwargs)
    expected = oracle(**truth, reduction=reduction)
    got = torch.autograd.grad(loss.sum(), (x, w, b, scale))
    want = torch.autograd.grad(
        expected.sum(), [truth[n] for n in ("input", "linear_weight", "linear_bias", "logit_scale")]
    )
    for g, e in zip(got, want, strict=True):
        torch.testing.assert_close(g, e)


def test_an_ignored_token_does_not_reach_a_trained_scale() -> None:
    x, w, b, y = head(9, 5, 13)
    y[3] = -100
    with torch.no_grad():
        x[3] = torch.nan
    scale = torch.tensor(0.6, requires_grad=True)
    linear_cross_entropy(x, w, y, linear_bias=b, logit_scale=scale).backward()
    assert scale.grad.isfinite()
    assert (x.grad[3] == 0).all()


def test_token_weight_and_class_weight_get_no_gradient() -> None:
    x, w, _, y = head(9, 5, 13)
    token_weight, weight = torch.rand(9, requires_grad=True), torch.rand(13, requires_grad=True)
    linear_cross_entropy(x, w, y, token_weight=token_weight, weight=weight).backward()
    assert token_weight.grad is None
    assert weight.grad is None


def test_double_backward_is_an_error_that_names_the_way_out(mode: dict[str, Any]) -> None:
    x, w, _, y = head(9, 5, 13)
    loss = linear_cross_entropy(x, w, y, **mode).sum()
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    torch.testing.assert_close(
        dx, torch.autograd.grad(oracle(x, w, y, reduction=mode.get("reduction", "mean")).sum(), x)[0]
    )
    with pytest.raises(RuntimeError, match=r"second derivative.*F?.*cross_entropy\(") as caught:
        dx.square().sum().backward()
    assert isinstance(caught.value, LowtideError)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", ["linear_cross_entropy", "linear_logprobs", "linear_divergence", "linear_apply"])
def test_a_penalty_on_the_gradient_is_an_error_and_not_lost(name: str, reduction: str) -> None:
    x, w, _, y = head(4, 5, 13)
    calls = {
        "linear_cross_entropy": lambda: linear_cross_entropy(x, w, y, reduction=reduction).sum(),
        "linear_logprobs": lambda: lowtide.linear_logprobs(x, w, y).sum(),
        "linear_divergence": lambda: lowtide.linear_divergence(x, w, x.detach() + 1, w.detach()).sum(),
        "linear_apply": lambda: lowtide.linear_apply(
            (lambda z: z.logsumexp(-1)) if reduction == "none" else (lambda z: z.logsumexp(-1).sum()), x, w,
            out="token" if reduction == "none" else "sum",
        ).sum(),
    }  # fmt: skip
    loss = calls[name]()
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    for by in (x, w):
        with pytest.raises(RuntimeError, match="second derivative") as caught:
            torch.autograd.grad(loss + dx.square().sum(), by, retain_graph=True)
        assert isinstance(caught.value, LowtideError)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own forward mode
def test_transforms_and_forward_mode_are_errors_that_name_the_way_out() -> None:
    x, w, _, y = head(4, 5, 13)
    x, w = x.detach(), w.detach()
    attempts = [
        lambda: torch.func.grad(lambda w: linear_cross_entropy(x, w, y))(w),
        lambda: torch.func.vmap(lambda x, y: linear_cross_entropy(x, w, y))(x[None], y[None]),
        lambda: torch.func.jvp(lambda w: linear_cross_entropy(x, w, y), (w,), (w,)),
    ]
    for attempt in attempts:
        with pytest.raises(RuntimeError, match="reverse-mode autograd") as caught:
            attempt()
        assert isinstance(caught.value, LowtideError)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(w, torch.ones_like(w))
        with pytest.raises(LowtideError, match="forward-mode"):
            linear_cross_entropy(x, dual, y)


def test_a_weight_changed_before_backward_is_noticed_where_it_matters() -> None:
    x, w, _, y = head(4, 5, 13)
    loss = linear_cross_entropy(x, w, y, reduction="none").sum()
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_grad_and_inference_mode_compute_the_loss_alone(passes: list[str]) -> None:
    x, w, _, y = head(4, 5, 13)
    expected = linear_cross_entropy(x, w, y).detach()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            loss = linear_cross_entropy(x, w, y)
        assert not loss.requires_grad
        assert torch.equal(loss, expected)


def test_parameters_of_a_sharded_optimizer_see_one_gradient() -> None:
    """DDP and FSDP read a parameter's gradient in a hook, so backward must hand it over, not write it."""
    x, w, _, y = head(40, 5, 13)
    seen: list[Tensor | None] = []
    w.register_hook(lambda g: seen.append(w.grad))
    linear_cross_entropy(x, w, y, options=HeadOptions(workspace_mib=1e-6)).backward()
    assert seen == [None]
