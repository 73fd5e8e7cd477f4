"""The public functions as citizens of autograd: subsets, hooks, retained graphs, checkpoints, autocast, refusals."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import support
from contract.cases import LEAVES
from contract.function import NARROW, Mode, gradients, leaves, total, trained, true_gradients
from contract.table import MODES, PUBLIC, each, every_mode, every_pair_of_modes
from lowtide.errors import LowtideError, UnsupportedError
from promises import promise
from support import assert_near, every_pair, in_float64, relative_error

WRITABLE = {name: mode for name, mode in MODES.items() if not mode.function.saves_outputs}
RECOMPUTED = {name: mode for name, mode in MODES.items() if not mode.stored}
LOOSE = {torch.float64: 1e-10, torch.bfloat16: 2e-2}


def equal(got: Any, want: Any) -> bool:
    return all(torch.equal(g, e) for g, e in zip(got, want, strict=True))


@promise("subsets")
@every_mode
@pytest.mark.parametrize("dtype", LOOSE)
def test_every_subset_of_inputs_frozen(mode: Mode, dtype: torch.dtype) -> None:
    kwargs = mode.arguments(11, dtype=dtype)
    names = trained(kwargs)
    straight = {} if mode.function.widens else {"through": lambda t: t}  # a narrow value's cosine is another number
    want = dict(zip(names, true_gradients(mode, kwargs, **straight), strict=True))
    for needed in (n for k in (0, 1, 2, len(names) - 1, len(names)) for n in itertools.combinations(names, k)):
        given = kwargs | {n: kwargs[n].detach().requires_grad_(n in needed) for n in names}
        value = total(mode.run(given), **straight)
        assert value.requires_grad == bool(needed)
        if needed:
            value.backward()
        for n in names:
            grad = given[n].grad
            assert (grad is not None) == (n in needed)
            if grad is None:
                continue
            assert grad.dtype == given[n].dtype
            cancels = dtype == torch.bfloat16 and not grad.dim()
            assert cancels or relative_error(grad, want[n]) < LOOSE[dtype], (n, needed)


@promise("again")
@every_pair(mode=MODES.values(), upstream=[1.0, -3.0], dtype=[torch.float32, *NARROW])
def test_a_retained_graph_gives_the_same_twice(mode: Mode, upstream: float, dtype: torch.dtype) -> None:
    kwargs = mode.arguments(dtype=dtype)
    value = total(mode.run(kwargs), lambda t: t * upstream)
    first = torch.autograd.grad(value, leaves(kwargs), retain_graph=True)
    kept = [g.clone() for g in first]
    assert all(g.isfinite().all() for g in first)
    for g in first:
        g.fill_(torch.nan)  # the caller's own: must not reach what the graph saves
    second = torch.autograd.grad(value, leaves(kwargs), retain_graph=True)
    assert equal(kept, second)
    assert equal(kept, torch.autograd.grad(value, leaves(kwargs)))
    alone = next(value for value in mode.run(kwargs).values() if value.requires_grad).sum()
    torch.autograd.grad(alone, leaves(kwargs), allow_unused=True)
    ours = "expected one backward.*" if mode.stored else ""
    for freed, says in ((value, ""), (alone, ours)):
        with pytest.raises(RuntimeError, match=f"{says}retain_graph"):
            torch.autograd.grad(freed, leaves(kwargs), allow_unused=True)


@promise("again")
@each(WRITABLE)
def test_outputs_are_the_callers_own(mode: Mode) -> None:
    kwargs = mode.arguments(dtype=torch.float32)
    found = mode.run(kwargs)
    value = total(found, lambda t: t)
    for output in found.values():
        output.detach().zero_()
    assert equal(torch.autograd.grad(value, leaves(kwargs)), gradients(mode, kwargs, through=lambda t: t))


@promise("subsets")
@every_mode
def test_hooks_fire_once_see_no_gradient_yet_and_gradients_accumulate(mode: Mode) -> None:
    """DDP and FSDP read a parameter's gradient in a hook, so backward must hand it over, not write it."""
    kwargs = mode.arguments(workspace_mib=1e-6)
    single = true_gradients(mode, kwargs)
    fired: list[tuple[str, bool]] = []
    names = trained(kwargs)
    for name, leaf in zip(names, leaves(kwargs), strict=True):
        leaf.register_hook(lambda g, name=name, leaf=leaf: fired.append((name, leaf.grad is None)))
        leaf.register_post_accumulate_grad_hook(lambda leaf, name=name: fired.append((name + " accumulated", True)))
    for step in (1, 2):
        total(mode.run(kwargs)).backward()
        first = [True, False][:step]
        assert sorted(fired) == sorted(
            [*itertools.product(names, first), *((n + " accumulated", True) for n in names * step)]
        )
    for leaf, e in zip(leaves(kwargs), single, strict=True):
        assert relative_error(leaf.grad, 2 * e) < 1e-10


@promise("subsets")
@every_mode
def test_one_weight_in_two_calls(mode: Mode) -> None:
    kwargs = mode.arguments((2, 6))
    name, *_ = trained(kwargs)
    results = []
    for run, given in ((mode.run, kwargs), (mode.truth, in_float64(kwargs))):
        hidden = given[name].tanh()
        one, two = (total(run(given | {name: h})) for h in (hidden, hidden * 2))
        results.append(torch.autograd.grad(one + 0.3 * two, [given[n] for n in trained(kwargs)]))
    for got, want in zip(*results, strict=True):
        assert relative_error(got, want) < 1e-10


def strided(t: Tensor, kind: int) -> Tensor:
    """Return the same numbers in other places of memory, in which NaN stands between them."""
    nothing = torch.full_like(t, torch.nan if t.is_floating_point() else 10**6)
    if t.dim() == 0:
        return t
    if kind == 0:
        return torch.stack((t, nothing), -1)[..., 0]
    if kind == 1 or t.dim() == 1:
        return torch.cat((t, nothing), 0)[: len(t)] if t.dim() == 1 else torch.cat((t, nothing), -1)[..., : t.shape[-1]]
    if kind == 2:
        return t.mT.contiguous().mT
    return t.transpose(0, 1).contiguous().transpose(0, 1)


@promise("layouts")
@every_pair_of_modes(dtype=[torch.float64, *NARROW], kind=range(4))
def test_strided_inputs(mode: Mode, dtype: torch.dtype, kind: int) -> None:
    """Chunks are of a few rows, which begin and end inside a sequence."""
    kwargs = mode.arguments((3, 7), dtype=dtype, ignored="some", workspace_mib=0.002)
    elsewhere = {n: strided(t.detach(), kind).requires_grad_(t.requires_grad)
                 for n, t in kwargs.items() if isinstance(t, Tensor)}  # fmt: skip
    results = []
    for given in (kwargs | elsewhere, kwargs):
        found = mode.run(given)
        results.append((found, torch.autograd.grad(total(found, torch.linalg.vector_norm), leaves(given))))
    bounds = (1e-12, 1e-11) if dtype == torch.float64 else (1e-6 if mode.function.widens else 1e-2, 1e-2)
    assert_near(results[0][0].values(), results[1][0].values(), bounds[0])
    assert_near(results[0][1], results[1][1], bounds[1])


@promise("layouts")
@every_mode
def test_one_row_for_all_and_an_upstream_of_any_strides(mode: Mode) -> None:
    kwargs = mode.arguments((4, 3))
    name, *_ = trained(kwargs)
    row = kwargs[name].detach()[:1].requires_grad_()
    results = []
    for run, given in ((mode.run, kwargs), (mode.truth, in_float64(kwargs))):
        outputs = run(given | {name: row.expand_as(kwargs[name])}).values()
        used = [t for t in outputs if t.requires_grad]
        upstream = [torch.linspace(1, 2, max(t.numel(), 1), dtype=t.dtype, device=t.device).view(t.shape) for t in used]
        upstream = [u.transpose(0, -1).contiguous().transpose(0, -1) if u.dim() > 1 else u for u in upstream]
        results.append(torch.autograd.grad(used, row, upstream))
    assert relative_error(results[0][0], results[1][0]) < 1e-10


@promise("checkpoint")
@every_mode
@pytest.mark.parametrize(
    "kind", ["reentrant", "plain", CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE, "without early stop"]
)
def test_inside_a_checkpoint(mode: Mode, kind: str | CheckpointPolicy) -> None:
    """Backward meets stored gradients first, and may not scale in place what is then looked up again."""
    kwargs = mode.arguments()
    names, runs = trained(kwargs), []
    of_apply = [f"aten.{name}.default" for name in ("mm", "addmm", "_log_softmax", "tanh")]

    def block(*given: Tensor) -> Tensor:
        runs.append(1)
        hidden = given[0].tanh() * 2  # a layer before it
        value = total(mode.run(kwargs | dict(zip(names, (hidden, *given[1:]), strict=True))))
        return 2 * value + (hidden * value.detach()).sin().sum()  # a loss that is kept is read twice

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        saved = str(op) in of_apply if mode.name == "linear_apply" else "lowtide" in str(op)
        return kind if saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: dict[str, Any] = {}
    if not isinstance(kind, str) or kind == "without early stop":
        kind = CheckpointPolicy.MUST_SAVE if isinstance(kind, str) else kind
        contexts = {"context_fn": partial(create_selective_checkpoint_contexts, policy)}
    with set_checkpoint_early_stop(kind != "without early stop"):
        value = checkpoint(block, *leaves(kwargs), use_reentrant=kind == "reentrant", **contexts)
        assert len(runs) == 1, "what the function saves is its own"
        value.backward()
    assert len(runs) == 2
    wanted = torch.autograd.grad(block(*leaves(kwargs)), leaves(kwargs))
    for leaf, e in zip(leaves(kwargs), wanted, strict=True):
        torch.testing.assert_close(leaf.grad, e)


@promise("dtypes")
@every_pair_of_modes(dtype=NARROW, inputs=[True, False], weights=[True, False])
def test_autocast(mode: Mode, dtype: torch.dtype, inputs: bool, weights: bool) -> None:
    """Operands are rounded to autocast's dtype; each gradient comes in the dtype of what it belongs to."""
    own = {"out": "light " + mode.choice.get("out", "token")} if mode.name == "linear_apply" else {}
    kwargs = mode.arguments(200, dtype=torch.float32, ignored="some", large=True, **own)
    cast = [n for n in mode.function.cast if kwargs.get(n) is not None]
    needs = {n: kwargs[n].requires_grad for n in cast}
    rounded = {n: kwargs[n].detach().to(dtype).requires_grad_(needs[n]) for n in cast}
    kwargs |= {n: rounded[n] for i, n in enumerate(cast) if not (inputs if i == 0 else weights)}
    wide = in_float64(kwargs | rounded)
    with torch.autocast(support.DEVICE, dtype=dtype):
        found, naive = mode.run(kwargs), mode.truth(kwargs)
    true = mode.truth(wide)
    eps = torch.finfo(dtype).eps
    for key, value in found.items():
        if value.requires_grad:
            assert value.dtype in ((torch.float32,) if mode.function.widens else (naive[key].dtype, dtype))
            assert relative_error(value, true[key]) < (1e-4 if mode.function.widens else eps)  # a sum may cancel
    names = [n for n in trained(kwargs) if kwargs[n].dim() and (mode.name != "linear_apply" or n in LEAVES)]
    got, base, want = (
        torch.autograd.grad(total(outputs, lambda t: t * t.detach().cos()), [given[n] for n in names])
        for outputs, given in ((found, kwargs), (naive, kwargs), (true, wide))
    )
    for n, g, b, e in zip(names, got, base, want, strict=True):
        assert g.dtype == kwargs[n].dtype
        assert relative_error(g, e) <= mode.function.beside_plain * relative_error(b, e) + eps / 8, n


@promise("dtypes")
@every_mode
def test_float64_is_left_alone_by_autocast(mode: Mode) -> None:
    kwargs = mode.arguments()
    with torch.autocast(support.DEVICE, dtype=torch.bfloat16):
        found = mode.run(kwargs)
    torch.testing.assert_close(found, mode.truth(kwargs))


@promise("again")
@every_mode
def test_a_second_derivative_is_an_error_that_names_the_way_out_and_not_lost(mode: Mode) -> None:
    kwargs = mode.arguments()
    value = total(mode.run(kwargs))
    first, *_ = leaves(kwargs)
    (dx,) = torch.autograd.grad(value, first, create_graph=True)
    torch.testing.assert_close(dx, true_gradients(mode, kwargs)[0])
    for by in leaves(kwargs):
        with pytest.raises(RuntimeError, match=f"second derivative.*{mode.function.instead}") as caught:
            torch.autograd.grad(value + dx.square().sum(), by, retain_graph=True)
        assert isinstance(caught.value, LowtideError)


@promise("again")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own forward mode
@each(PUBLIC)
def test_transforms_and_forward_mode_are_errors_that_name_the_way_out(mode: Mode) -> None:
    kwargs = mode.arguments(4)
    names = trained(kwargs)
    kwargs |= {n: kwargs[n].detach() for n in names}
    for by in names:
        one = kwargs[by]

        def run(t: Tensor, by: str = by) -> Tensor:
            return total(mode.run(kwargs | {by: t}))

        for attempt in (
            lambda run=run, one=one: torch.func.grad(run)(one),
            lambda run=run, one=one: torch.func.vmap(run)(one[None]),
            lambda run=run, one=one: torch.func.jvp(run, (one,), (one,)),
        ):
            says = rf"{mode.name}.*expected reverse-mode autograd.*{mode.function.instead}"
            with pytest.raises(RuntimeError, match=says) as caught:
                attempt()
            assert isinstance(caught.value, LowtideError)
        with torch.autograd.forward_ad.dual_level(), pytest.raises(LowtideError, match="forward-mode"):
            run(torch.autograd.forward_ad.make_dual(one, torch.ones_like(one)))


@promise("again")
@every_mode
def test_gradients_of_several_outputs_at_once_are_refused(mode: Mode) -> None:
    kwargs = mode.arguments(4, dtype=torch.float32)
    out = next(value for value in mode.run(kwargs).values() if value.requires_grad)
    with pytest.raises(UnsupportedError, match="one gradient of its output at a time"):
        torch.autograd.grad(out, leaves(kwargs)[0], out.new_ones(3, *out.shape), is_grads_batched=True)


@promise("again")
@each(RECOMPUTED)
def test_what_is_changed_before_a_recompute_is_noticed(mode: Mode) -> None:
    of_mode = mode.arguments()
    for changed in [n for n in mode.function.saved if isinstance(of_mode.get(n), Tensor)]:
        kwargs = mode.arguments(dtype=torch.float32)
        value = total(mode.run(kwargs))
        with torch.no_grad():
            kwargs[changed].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            value.backward()


@promise("values")
@every_mode
def test_no_grad_and_inference_mode_compute_the_same_values(mode: Mode) -> None:
    kwargs = mode.arguments(4, dtype=torch.float32)
    expected = mode.run(kwargs)
    contexts: tuple[Callable[[], Any], ...] = (torch.no_grad, torch.inference_mode)
    for context in contexts:
        with context():
            found = mode.run(kwargs)
        assert not any(value.requires_grad for value in found.values())
        assert equal(found.values(), expected.values())
