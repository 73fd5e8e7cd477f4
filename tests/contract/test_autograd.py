"""The head's functions as citizens of autograd: subsets, hooks, retained graphs, checkpoints, autocast, GEMMs."""

from __future__ import annotations

import itertools
from bisect import bisect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.profiler import profile, record_function
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)
from torch.utils.flop_counter import FlopCounterMode

from contract.cases import (
    LEAVES,
    MODES,
    NARROW,
    OPERATORS,
    Arguments,
    Mode,
    counting,
    every_mode,
    every_operator,
    gradients,
    total,
    trained,
    true_gradients,
)  # fmt: skip
from lowtide import HeadOptions
from lowtide.errors import LowtideError, UnsupportedError
from support import assert_near, every_pair, in_float64, relative_error

RECOMPUTED = {name: mode for name, mode in MODES.items() if not mode.stored}
every_recomputed = pytest.mark.parametrize("mode", RECOMPUTED.values(), ids=RECOMPUTED)
PER_TOKEN = {name: mode for name, mode in OPERATORS.items() if mode.per_token}


def small(kwargs: Arguments) -> Arguments:
    """Return the arguments with one row a chunk."""
    return kwargs | {"options": HeadOptions(workspace_mib=1e-6, gradient=kwargs["options"].gradient)}


def equal(got: Any, want: Any) -> bool:
    return all(torch.equal(g, e) for g, e in zip(got, want, strict=True))


@every_mode
def test_gradcheck(mode: Mode) -> None:
    kwargs = mode.arguments((2, 4), 2, 5, **{"ignored": "some", **mode.function.busy, **mode.choice})
    names = trained(kwargs)
    torch.autograd.gradcheck(
        lambda *leaves: total(mode.run(kwargs | dict(zip(names, leaves, strict=True)))), [kwargs[n] for n in names]
    )


@every_mode
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_subset_of_inputs_frozen(mode: Mode, dtype: torch.dtype) -> None:
    kwargs = mode.arguments(11, 6, 17, dtype=dtype)
    names = trained(kwargs)
    want = dict(zip(names, true_gradients(mode, kwargs), strict=True))
    near = 1e-12 if dtype == torch.float64 else 8e-3
    for needed in (n for k in (0, 1, 2, len(names) - 1, len(names)) for n in itertools.combinations(names, k)):
        leaves = kwargs | {n: kwargs[n].detach().requires_grad_(n in needed) for n in names}
        value = total(mode.run(leaves))
        assert value.requires_grad == bool(needed)
        if needed:
            value.backward()
        for n in names:
            grad = leaves[n].grad
            assert (grad is not None) == (n in needed)
            if grad is not None:
                assert grad.dtype == leaves[n].dtype
                assert relative_error(grad, want[n]) < near, (n, needed)


@every_pair(mode=MODES.values(), upstream=[1.0, -3.0], dtype=[torch.float32, *NARROW])
def test_a_retained_graph_gives_the_same_twice(mode: Mode, upstream: float, dtype: torch.dtype) -> None:
    kwargs = mode.arguments(dtype=dtype)
    leaves = [kwargs[n] for n in trained(kwargs)]
    value = total(mode.run(kwargs), lambda t: t * upstream)
    first = torch.autograd.grad(value, leaves, retain_graph=True)
    kept = [g.clone() for g in first]
    for g in first:
        assert g.isfinite().all()
        g.fill_(torch.nan)  # the caller's own: must not reach what the graph saves
    second = torch.autograd.grad(value, leaves, retain_graph=True)
    assert equal(kept, second)
    assert equal(kept, torch.autograd.grad(value, leaves))
    alone = next(value for value in mode.run(kwargs).values() if value.requires_grad).sum()
    torch.autograd.grad(alone, leaves, allow_unused=True)
    ours = f"{mode.name}: expected one backward.*" if mode.stored else ""
    for freed, says in ((value, ""), (alone, ours)):
        with pytest.raises(RuntimeError, match=f"{says}retain_graph"):
            torch.autograd.grad(freed, leaves, allow_unused=True)


@every_mode
def test_outputs_are_the_callers_own(mode: Mode) -> None:
    kwargs = mode.arguments(dtype=torch.float32)
    found = mode.run(kwargs)
    value = total(found, lambda t: t)
    for output in found.values():
        output.detach().zero_()
    assert equal(
        torch.autograd.grad(value, [kwargs[n] for n in trained(kwargs)]), gradients(mode, kwargs, through=lambda t: t)
    )


@every_mode
def test_hooks_fire_once_see_no_gradient_yet_and_gradients_accumulate(mode: Mode) -> None:
    """DDP and FSDP read a parameter's gradient in a hook, so backward must hand it over, not write it."""
    kwargs = small(mode.arguments())
    fired: list[tuple[str, bool]] = []
    names = trained(kwargs)
    for name in names:
        leaf = kwargs[name]
        leaf.register_hook(lambda g, name=name, leaf=leaf: fired.append((name, leaf.grad is None)))
        leaf.register_post_accumulate_grad_hook(lambda leaf, name=name: fired.append((name + " accumulated", True)))
    for step in (1, 2):
        total(mode.run(kwargs)).backward()
        first = [True, False][:step]
        assert sorted(fired) == sorted(
            [*itertools.product(names, first), *((n + " accumulated", True) for n in names * step)]
        )
    for name, single in zip(names, gradients(mode, mode.arguments()), strict=True):
        torch.testing.assert_close(kwargs[name].grad, 2 * single)


@every_mode
def test_one_weight_in_two_heads_and_an_embedding(mode: Mode) -> None:
    kwargs = mode.arguments((2, 6))
    w, y = kwargs["linear_weight"], torch.randint(0, 13, (2, 6))
    results = []
    for run, given in ((mode.run, kwargs), (mode.truth, in_float64(kwargs))):
        hidden = F.embedding(y, w).tanh()
        values = [total(run(given | {"input": h, "linear_weight": w})) for h in (hidden, hidden * 2)]
        results.append(torch.autograd.grad(values[0] + 0.3 * values[1], w)[0])
    torch.testing.assert_close(*results)


def strided(dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(3)
    make = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    return {
        "cut along the sequence": (make(3, 9, 8)[:, :-2], make(29, 8)),
        "batch second": (make(7, 3, 8).transpose(0, 1), make(29, 8)),
        "every other feature": (make(3, 7, 16)[..., ::2], make(29, 16)[:, ::2]),
        "weight transposed": (make(3, 7, 8), make(8, 29).T),
        "expanded": (make(1, 7, 8).expand(3, 7, 8), make(29, 8)),
        "rows apart": (make(3, 7, 24)[..., :8], make(58, 8)[::2]),
    }


@every_mode
@pytest.mark.parametrize("dtype", [torch.float64, *NARROW])
def test_strided_inputs(mode: Mode, dtype: torch.dtype) -> None:
    for i, (kind, (x, w)) in enumerate(strided(dtype).items(), dtype.itemsize // 8):  # each pair of two is there
        kwargs = mode.arguments(tuple(x.shape[:-1]), 8, 29, dtype=dtype, ignored=("none", "some")[i % 2])
        # chunks of a few rows, which begin and end inside a sequence
        kwargs["options"] = HeadOptions(workspace_mib=0.008, gradient=kwargs["options"].gradient)
        results = []
        turned = {
            n: kwargs[n].mT.contiguous().mT
            for n in kwargs
            if "teacher" in n and isinstance(kwargs[n], Tensor) and kwargs[n].dim() > 1
        }
        for given, teacher in (((x, w), turned), ((x.contiguous(), w.contiguous()), {})):
            leaves = kwargs | teacher | {n: t.detach().requires_grad_() for n, t in zip(LEAVES, given, strict=False)}
            found = mode.run(leaves)
            results.append((total(found), torch.autograd.grad(total(found), [leaves[n] for n in trained(leaves)])))
        assert relative_error(results[0][0], results[1][0]) <= (1e-13 if dtype == torch.float64 else 1e-6), kind
        assert_near(results[0][1], results[1][1], (1e-12 if dtype == torch.float64 else 1e-3), kind)


def block_of(mode: Mode, kwargs: Arguments) -> Callable[..., Tensor]:
    """The function with a layer before it, of its hidden states, weight and bias."""

    def block(*leaves: Tensor) -> Tensor:
        x, w, b = leaves
        hidden = F.layer_norm(x, (x.shape[-1],)).tanh()
        value = total(mode.run(kwargs | {"input": hidden, "linear_weight": w, "linear_bias": b}))
        return 2 * value + (hidden * value.detach()).sin().sum()  # a loss that is kept is read twice

    return block


@every_mode
@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint(mode: Mode, reentrant: bool) -> None:
    kwargs = mode.arguments()
    leaves = [kwargs[n] for n in LEAVES]
    block, runs = block_of(mode, kwargs), []
    value = checkpoint(lambda *leaves: (runs.append(1), block(*leaves))[1], *leaves, use_reentrant=reentrant)
    assert len(runs) == 1, "what the function saves is its own"
    value.backward()
    assert len(runs) == 2
    for leaf, e in zip(leaves, torch.autograd.grad(block(*leaves), leaves), strict=True):
        torch.testing.assert_close(leaf.grad, e)


@every_pair(
    mode=MODES.values(),
    keep=[CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE],
    early_stop=[True, False],
)
def test_inside_a_selective_checkpoint(mode: Mode, keep: CheckpointPolicy, early_stop: bool) -> None:
    """Backward meets the stored gradients first, and may not scale in place what is then looked up again."""
    kwargs = mode.arguments()
    leaves = [kwargs[n] for n in LEAVES]
    block = block_of(mode, kwargs)
    of_apply = [f"aten.{name}.default" for name in ("mm", "addmm", "_log_softmax", "tanh")]

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = str(op) in of_apply if mode.name == "linear_apply" else "lowtide" in str(op)
        return keep if saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    with set_checkpoint_early_stop(early_stop):
        got = torch.autograd.grad(checkpoint(block, *leaves, use_reentrant=False, context_fn=contexts), leaves)
    for e, g in zip(torch.autograd.grad(block(*leaves), leaves), got, strict=True):
        torch.testing.assert_close(g, e)


@every_pair(mode=MODES.values(), dtype=NARROW, inputs=[True, False], weights=[True, False])
def test_autocast(mode: Mode, dtype: torch.dtype, inputs: bool, weights: bool) -> None:
    """Operands are rounded to autocast's dtype; each gradient comes in the dtype of what it belongs to."""
    own = {"out": "light " + mode.choice.get("out", "token")} if mode.name == "linear_apply" else {}
    kwargs = mode.arguments(200, 24, 97, dtype=torch.float32, ignored="some", **own)
    rounded = {
        n: kwargs[n].detach().to(dtype)
        for n in (*LEAVES[:2], "teacher_input", "teacher_weight")
        if kwargs.get(n) is not None
    }
    kwargs |= {
        n: rounded[n].requires_grad_() for n, wide in zip(LEAVES[:2], (inputs, weights), strict=True) if not wide
    }
    wide = in_float64(kwargs | {n: t.detach().requires_grad_(n in LEAVES) for n, t in rounded.items()})
    with torch.autocast("cpu", dtype=dtype):
        found, naive = mode.run(kwargs), mode.truth(kwargs)
    true = mode.truth(wide)
    near = 1e-6 if mode.name in ("linear_cross_entropy", "linear_apply") else 1e-5
    for key, value in found.items():
        if value.requires_grad:
            assert value.dtype == torch.float32
            assert relative_error(value, true[key]) < near
    got, base, want = (
        torch.autograd.grad(total(outputs, torch.sin if mode.per_token else torch.abs), [leaves[n] for n in LEAVES])
        for outputs, leaves in ((found, kwargs), (naive, kwargs), (true, wide))
    )
    for n, g, b, e in zip(LEAVES, got, base, want, strict=True):
        assert g.dtype == kwargs[n].dtype
        assert relative_error(g, e) <= 1.05 * relative_error(b, e), n


@every_mode
def test_float64_is_left_alone_by_autocast(mode: Mode) -> None:
    kwargs = mode.arguments()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = mode.run(kwargs)
    torch.testing.assert_close(found, mode.truth(kwargs))


@every_mode
def test_a_second_derivative_is_an_error_that_names_the_way_out_and_not_lost(mode: Mode) -> None:
    kwargs = mode.arguments()
    value = total(mode.run(kwargs))
    (dx,) = torch.autograd.grad(value, kwargs["input"], create_graph=True)
    torch.testing.assert_close(dx, true_gradients(mode, kwargs)[0])
    for by in LEAVES:
        with pytest.raises(RuntimeError, match=r"second derivative.*(linear|cross_entropy\(|fn\()") as caught:
            torch.autograd.grad(value + dx.square().sum(), kwargs[by], retain_graph=True)
        assert isinstance(caught.value, LowtideError)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own forward mode
@every_mode
def test_transforms_and_forward_mode_are_errors_that_name_the_way_out(mode: Mode) -> None:
    kwargs = mode.arguments(4)
    kwargs |= {n: kwargs[n].detach() for n in trained(kwargs)}
    for by in (*LEAVES[:2], *["temperature"] * (mode.name == "linear_apply")):
        one = kwargs[by]

        def run(t: Tensor, by: str = by) -> Tensor:
            return total(mode.run(kwargs | {by: t}))

        for attempt in (
            lambda run=run, one=one: torch.func.grad(run)(one),
            lambda run=run, one=one: torch.func.vmap(run)(one[None]),
            lambda run=run, one=one: torch.func.jvp(run, (one,), (one,)),
        ):
            with pytest.raises(RuntimeError, match=rf"{mode.name}.*expected reverse-mode autograd") as caught:
                attempt()
            assert isinstance(caught.value, LowtideError)
        with torch.autograd.forward_ad.dual_level(), pytest.raises(LowtideError, match="forward-mode"):
            run(torch.autograd.forward_ad.make_dual(one, torch.ones_like(one)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
@every_mode
def test_gradients_of_several_outputs_at_once_and_a_trace_of_torchscript_are_refused(mode: Mode) -> None:
    kwargs = mode.arguments(4, dtype=torch.float32)
    out = next(value for value in mode.run(kwargs).values() if value.requires_grad)
    with pytest.raises(UnsupportedError, match="one gradient of its output at a time"):
        torch.autograd.grad(out, kwargs["input"], torch.randn(3, *out.shape), is_grads_batched=True)
    with pytest.raises(UnsupportedError, match=r"^input: expected .* inside torch\.jit\.trace\. Use torch\.compile"):
        torch.jit.trace(lambda x: total(mode.run(kwargs | {"input": x})), (kwargs["input"].detach(),))


@every_recomputed
def test_what_is_changed_before_a_recompute_is_noticed(mode: Mode) -> None:
    names = [
        n
        for n in ("linear_weight", "teacher_weight", "weights", "temperature")
        if isinstance(mode.arguments().get(n), Tensor)
    ]
    for changed in names:
        kwargs = mode.arguments(dtype=torch.float32)
        value = total(mode.run(kwargs))
        with torch.no_grad():
            kwargs[changed].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            value.backward()


@every_mode
def test_no_grad_and_inference_mode_compute_the_same_values(mode: Mode) -> None:
    kwargs = mode.arguments(4, dtype=torch.float32)
    expected = mode.run(kwargs)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            found = mode.run(kwargs)
        assert not any(value.requires_grad for value in found.values())
        assert equal(found.values(), expected.values())


def gemm_flop(*calls: Callable[[], Any]) -> list[int]:
    """Return what the GEMMs that really run take in each call, inside operators, too."""
    with profile(use_kineto=True, record_shapes=True) as profiler:  # whose own list of events takes seconds to make
        for i, call in enumerate(calls):
            with record_function(f"call {i}"):
                call()
    flop = [0] * len(calls)
    events = profiler.kineto_results.events()
    starts = sorted(event.start_ns() for event in events if event.name().startswith("call "))
    for event in events:
        if event.name() in ("aten::mm", "aten::addmm"):
            (rows, depth), (_, columns) = event.shapes()[event.name() == "aten::addmm" :][:2]
            at = bisect(starts, event.start_ns()) - 1
            flop[at] += 2 * rows * depth * columns * (rows > 1)  # a bias's sum may be a product of one row
    return flop


def counted_flop(*calls: Callable[[], Any]) -> list[int]:
    counters = [FlopCounterMode(display=False) for _ in calls]
    for call, counter in zip(calls, counters, strict=True):
        with counter:
            call()
    return [int(counter.get_total_flops()) for counter in counters]


@every_operator
def test_only_the_gemms_that_are_needed_and_those_are_counted(mode: Mode) -> None:
    """PyTorch's counter counts what the operators compute; the profiler sees it."""
    if "support" in mode.choice:
        pytest.skip("no GEMMs; their FLOP: tests/head/test_support.py")
    N, D, V, teacher_D = 40, 6, 70, 14
    product = 2 * N * D * V
    U = V - mode.choice.get("teacher_lacks", 0)
    forward = product + (2 * N * teacher_D * U if mode.name == "linear_divergence" and "tail" not in mode.choice else 0)
    calls: list[Callable[[], Any]] = []
    expected: list[int] = []
    values: list[Tensor] = []
    for needed in (n for k in range(4) for n in itertools.combinations(LEAVES, k)):
        kwargs = mode.arguments(N, D, V, dtype=torch.float32)
        for name in LEAVES:
            kwargs[name].requires_grad_(name in needed)
        gemms = product * len({*needed} & {*LEAVES[:2]})
        # a gradient for each token that the head does not need is the input's alone: it is stored
        stored = mode.stored or (needed == LEAVES[:1] and mode.stored_where_frozen)
        calls.append(lambda kwargs=kwargs: values.append(total(mode.run(kwargs))))
        calls.append(lambda kwargs=kwargs: torch.no_grad()(mode.run)(kwargs))
        calls.append(lambda needed=needed: values[-1].backward() if needed else None)
        expected += [forward + stored * gemms, forward, 0 if stored or not needed else gemms + forward]
    assert gemm_flop(*calls) == expected
    assert counted_flop(*calls) == expected


@pytest.mark.parametrize("mode", PER_TOKEN.values(), ids=PER_TOKEN)
def test_tokens_of_no_use_cost_nothing_on_the_cpu(mode: Mode) -> None:
    """Those that do not count, in forward, and those to which nothing flows back."""
    kwargs = mode.arguments(40, 6, 70, dtype=torch.float32, linear_bias=False)
    values = [v for v in mode.run(kwargs).values() if v.requires_grad]
    upstream = [(torch.arange(40) < 10).view(-1, *[1] * (v.dim() - 1)).to(v.dtype).expand_as(v) for v in values]
    some = mode.arguments(40, 6, 70, dtype=torch.float32, linear_bias=False, ignored="some")
    run = torch.no_grad()(mode.run)
    back, back_of_used, whole, part = gemm_flop(
        lambda: torch.autograd.backward(values, [torch.ones_like(v) for v in values], retain_graph=True),
        lambda: torch.autograd.backward(values, upstream),
        lambda: run(kwargs),
        lambda: run(some),
    )
    assert back_of_used == back / 4
    assert "want" in mode.choice or part == whole * counting(some).sum() / 40
