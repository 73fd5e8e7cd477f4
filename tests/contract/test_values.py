"""Values and gradients of the head's functions against plain PyTorch in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from contract.cases import (
    FUNCTIONS,
    LAYOUT,
    LEAVES,
    MODES,
    NARROW,
    WIDE,
    Arguments,
    Mode,
    check,
    counting,
    every_mode,
    of_tokens,
    total,
    trained,
)  # fmt: skip
from lowtide import HeadOptions
from support import every_pair, in_float64, pairs, relative_error

every_function = pytest.mark.parametrize("name", FUNCTIONS)
PER_TOKEN = {name: mode for name, mode in MODES.items() if mode.per_token}
ODD = [(1, 1, 1), (1, 3, 2), (7, 1, 5003), (5, 896, 3), (65, 33, 517), (4, 0, 9), (0, 5, 11)]


@every_function
def test_every_pair_of_options(name: str, keep_rows: Callable[[bool], None]) -> None:
    """The dtype is one of them, and whether rows of no use are dropped."""
    for i in range(2):
        for j, case in enumerate(pairs(FUNCTIONS[name].options | {"dtype": WIDE, "keep": [False, True]}, seed=i)):
            keep_rows(case.pop("keep"))
            check(name, case, case.pop("dtype"), seed=100 * i + j)


@pytest.mark.slow
@every_function
def test_the_whole_product_of_options(name: str) -> None:
    options = FUNCTIONS[name].options
    company = itertools.cycle(itertools.chain.from_iterable(pairs(options, seed) for seed in range(9)))
    chosen = [option for option in options if option not in LAYOUT]
    for seed, values in enumerate(itertools.product(*(options[option] for option in chosen))):
        check(name, next(company) | dict(zip(chosen, values, strict=True)), torch.float64, seed)


@every_function
def test_low_precision_with_every_pair_of_options(name: str) -> None:
    fixed = {"leading": [(3, 70)], "ignored": ["some"], "workspace_mib": [None], "accumulate": ["auto"]}
    options = FUNCTIONS[name].options | fixed | {"dtype": NARROW}
    if "logit_scale" in options:
        options["logit_scale"] = [1.0, 0.5, "tensor"]  # a trained one: test_scaling.py
    for i in range(2):
        for j, case in enumerate(pairs(options, seed=i)):
            check(name, case, case.pop("dtype"), 100 * i + j, D=24, V=97)


@every_pair(mode=MODES.values(), size=ODD, workspace=[None, 1e-6, 0.01])
def test_odd_shapes(mode: Mode, size: tuple[int, int, int], workspace: float | None) -> None:
    N, D, V = size
    if N == 0 and mode.choice.get("reduction", "mean") == "mean" and not mode.per_token:
        pytest.skip("0 / 0")
    V = 50257 if V == 5003 and mode.name == "linear_cross_entropy" else V
    check(mode.name, mode.choice | {"leading": (N,), "workspace_mib": workspace}, torch.float64, N, D, V)


@every_pair(mode=MODES.values(), dtype=NARROW, workspace_mib=[None, 0.05, 9])
def test_low_precision_errs_less_than_plain_pytorch(
    mode: Mode, dtype: torch.dtype, workspace_mib: float | None
) -> None:
    """The baseline is plain PyTorch over logits of the same operands; both are held against float64."""
    light = {"out": "light " + mode.choice.get("out", "token")} if mode.name == "linear_apply" else {}
    kwargs = mode.arguments(300, 40, 211, dtype=dtype, workspace_mib=workspace_mib, **light)
    wide = in_float64(kwargs)
    ours, naive, true = mode.run(kwargs), mode.truth(kwargs), mode.truth(wide)
    keys = [key for key in true if true[key].requires_grad]
    near = 1e-6 if mode.name != "linear_divergence" else 1e-5
    for key in keys:
        assert relative_error(ours[key], true[key]) < near
        assert not mode.per_token or relative_error(naive[key], true[key]) > near
    for used in [*([key] for key in keys), keys]:
        upstream = [torch.rand(true[key].shape) / 300 if mode.per_token else torch.ones(()) for key in used]
        got, base, want = (
            torch.autograd.grad(
                [found[key] for key in used], [leaves[n] for n in LEAVES],
                [u.to(found[key].dtype) for u, key in zip(upstream, used, strict=True)], retain_graph=True,
            )
            for found, leaves in ((ours, kwargs), (naive, kwargs), (true, wide))
        )  # fmt: skip
        # all rows of the mean's gradient are the same 40 numbers: a few roundings, whose norm varies; 2**-8 is one
        least = 2**-8 if used == [".mean_logit"] and dtype == torch.bfloat16 else 0
        for n, g, b, e in zip(LEAVES, got, base, want, strict=True):
            assert relative_error(g, e) <= max(least, 1.05 * relative_error(b, e)), (n, used)


@every_mode
@pytest.mark.parametrize("grad", [True, False])
def test_shapes_and_dtypes_are_known_without_numbers(mode: Mode, grad: bool) -> None:
    """On the meta device, as `torch.nn` modules are planned and deferred."""
    kwargs = mode.arguments((2, 3))
    bare = pytree.tree_map_only(Tensor, lambda t: t.detach().to("meta").requires_grad_(t.requires_grad), kwargs)
    with torch.set_grad_enabled(grad):
        there, here = mode.run(bare), mode.run(kwargs)
    assert there.keys() == here.keys()
    for key, value in here.items():
        assert there[key].is_meta
        forms = [(t.shape, t.dtype, t.requires_grad) for t in (there[key], value)]
        assert forms[0] == forms[1], key
    if grad:
        for name, g in zip(
            trained(bare), torch.autograd.grad(total(there), [bare[n] for n in trained(bare)]), strict=True
        ):
            assert g.is_meta, name
            assert (g.shape, g.dtype) == (bare[name].shape, bare[name].dtype), name


def spoiled(kwargs: Arguments, bad: Tensor, poison: float) -> Arguments:
    """Return the arguments with everything of the bad tokens [...] spoiled, as leaves where they were."""

    def spoil(t: Tensor) -> Tensor:
        out = t.detach().clone()
        out[bad] = poison if t.is_floating_point() else 10**6
        return out.requires_grad_(t.requires_grad)

    names = ["input", "teacher_input", "weights", *(["target"] if "weights" in kwargs else [])]
    changed = {n: spoil(kwargs[n]) for n in names if kwargs.get(n) is not None}
    if "teacher_topk" in kwargs:
        ids, logprobs, tail = kwargs["teacher_topk"]
        changed["teacher_topk"] = (ids, spoil(logprobs), tail)
    return kwargs | changed


@every_pair(mode=MODES.values(), poison=[torch.nan, torch.inf], keep=[False, True])
def test_tokens_that_do_not_count_may_hold_anything(
    mode: Mode, poison: float, keep: bool, keep_rows: Callable[[bool], None]
) -> None:
    keep_rows(keep)
    for gradient in ("auto", "recompute") if "gradient" not in mode.choice else ("recompute",):
        choice = {"gradient": gradient, "ignored": "some", "softcap": 3.0, "logit_scale": "trained"}
        kwargs = mode.arguments(60, 6, 31, dtype=torch.float32, **choice)
        kept = counting(kwargs)
        assert 0 < kept.sum() < 60
        results = []
        for poisoned in (0.0, poison):
            given = spoiled(kwargs, ~kept, poisoned)
            found = mode.run(given)
            found = {key: value for key, value in found.items() if key != ".outside"}
            if mode.per_token:
                for key, value in found.items():
                    none = value[~kept]
                    assert "want" in mode.choice or (
                        (none == 0).all() and not (none.is_floating_point() and none.signbit().any())
                    ), key
                found = {key: value[kept] for key, value in found.items()}
            got = torch.autograd.grad(total(found), [given[n] for n in trained(given)])
            for name in ("input", "weights"):
                assert name not in trained(given) or (got[trained(given).index(name)][~kept] == 0).all(), name
            results.append((*found.values(), *got))
        for clean, got in zip(*results, strict=True):
            assert clean.isfinite().all()
            assert torch.equal(clean, got)


@pytest.mark.parametrize("mode", PER_TOKEN.values(), ids=PER_TOKEN)
@pytest.mark.parametrize("frozen", [False, True])
def test_the_upstream_of_a_token_that_does_not_count_is_not_looked_at(mode: Mode, frozen: bool) -> None:
    if "want" in mode.choice:
        pytest.skip("an ignored token has statistics, too")
    kwargs = mode.arguments(12, dtype=torch.float32, ignored="some")
    if frozen:
        kwargs |= {n: kwargs[n].detach() for n in LEAVES[1:]}
    kept = counting(kwargs)
    found = {key: value for key, value in mode.run(kwargs).items() if value.requires_grad}
    upstream = [torch.ones_like(value) for value in found.values()]
    for u in upstream:
        u[~kept] = torch.nan
    got = torch.autograd.grad(list(found.values()), [kwargs[n] for n in trained(kwargs)], upstream)
    assert (got[0][~kept] == 0).all()
    assert all(g.isfinite().all() for g in got)


@every_pair(
    mode=PER_TOKEN.values(),
    poison=[torch.nan, torch.inf, -torch.inf],
    dtype=[torch.float32, *NARROW],
    keep=[False, True],
)
def test_bad_hidden_states_spoil_their_own_rows_only(
    mode: Mode, poison: float, dtype: torch.dtype, keep: bool, keep_rows: Callable[[bool], None]
) -> None:
    keep_rows(keep)
    frozen = dtype == torch.float16
    wide = dtype == torch.float32
    kwargs = mode.arguments(9, 6, 31, dtype=dtype, **({} if wide else {"logit_scale": "trained"}))
    kwargs |= {n: kwargs[n].detach() for n in LEAVES[1:] if frozen}
    bad = [4]
    with torch.no_grad():
        kwargs["input"][4] = poison
        if kwargs.get("teacher_input") is not None:
            kwargs["teacher_input"][2], bad = poison, [2, 4]
    good = torch.tensor([i not in bad for i in range(9)])
    found = {key: value for key, value in mode.run(kwargs).items() if value.requires_grad}
    exact = in_float64(kwargs)
    expected = mode.truth(of_tokens(exact, good))
    for key, value in found.items():
        assert all(value[i].isnan().any() for i in bad), key
        assert relative_error(value[good], expected[key]) < 1e-5
    if mode.name == "linear_apply":
        return  # what fn's derivative makes of a NaN is fn's
    names = trained(kwargs)
    (spoilt,) = torch.autograd.grad(total(found), kwargs["input"], retain_graph=True)
    assert spoilt[bad].isnan().all()
    assert spoilt[good].isfinite().all()
    got = torch.autograd.grad(total({key: value[good] for key, value in found.items()}), [kwargs[n] for n in names])
    want = torch.autograd.grad(total({key: expected[key] for key in found}), [exact[n] for n in names])
    near = 1e-4 if wide else 1e-2
    assert (got[0][bad] == 0).all()
    for n, g, e in zip(names, got, want, strict=True):
        assert relative_error(g, e) < (near if e.dim() else 10 * near), n


@every_mode
def test_no_number_beside_a_row_gets_into_it(mode: Mode) -> None:
    """A chunk's gradient has rows of 16 bytes; bfloat16 GEMMs of some CPUs read more of them."""
    for seed in range(2):
        kwargs = mode.arguments(21, 16, 97, dtype=torch.bfloat16, seed=seed)
        got = torch.autograd.grad(total(mode.run(kwargs)), [kwargs[n] for n in trained(kwargs)])
        assert all(g.isfinite().all() for g in got)


def of_counted(mode: Mode, kwargs: Arguments) -> dict[str, Tensor]:
    """Return the outputs that an ignored token has no part in: of statistics the log-probability alone."""
    found = mode.run(kwargs)
    return found if "want" not in mode.choice else {".logprob": found[".logprob"]}


@every_pair(mode=MODES.values(), dtype=[*WIDE, *NARROW], keep=[False, True])
def test_nothing_counts(mode: Mode, dtype: torch.dtype, keep: bool, keep_rows: Callable[[bool], None]) -> None:
    """The values are 0, or stock's 0 / 0, and what they send back is 0, whatever comes from upstream."""
    keep_rows(keep)
    items: list[Arguments] = [{}]
    if "reduction" in mode.function.options and not mode.per_token:
        mean = {"reduction": "mean"}
        items = [{"reduction": "sum"}, mean, *(mean | {"num_items": count} for count in (7, "tensor", "zero"))]
    shifted = [(3, 1)] * ("shift" in mode.function.options)
    for leading, changes, frozen in itertools.product(((3, 2), (0, 4), *shifted), items, (False, True)):
        choice = mode.choice | changes | ({"shift": True} if leading == (3, 1) else {"ignored": "all"})
        choice |= {"logit_scale": "trained", "label_smoothing": 0.1, "z_loss": 0.1, "weight": True}
        kwargs = mode.arguments(leading, 8, 17, dtype=dtype, **choice)
        kwargs |= {n: kwargs[n].detach() for n in LEAVES[1:] if frozen}
        found = of_counted(mode, kwargs)
        undefined = changes.get("reduction") == "mean" and changes.get("num_items") in (None, "zero")
        assert all((value.isnan() if undefined else value == 0).all() for value in found.values())
        for factor in (1.0, torch.inf, -torch.inf, torch.nan):
            value = total(found, lambda t, factor=factor: t * factor)
            for g in torch.autograd.grad(
                value,
                [kwargs[n] for n in trained(kwargs)],
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            ):
                assert (g == 0).all(), factor


@every_pair(mode=MODES.values(), dtype=[*WIDE, *NARROW], factor=[torch.inf, torch.nan])
def test_an_upstream_that_is_not_finite_reaches_tokens_that_count_alone(
    mode: Mode, dtype: torch.dtype, factor: float
) -> None:
    for frozen in (False, True):
        choice = {"logit_scale": "trained", "label_smoothing": 0.1, "z_loss": 0.1, "weight": True}
        kwargs = mode.arguments((2, 9), 8, 33, dtype=dtype, ignored="some", **choice)
        kwargs |= {n: kwargs[n].detach() for n in LEAVES[1:] if frozen}
        kept, leaves = counting(kwargs), [kwargs[n] for n in LEAVES[: 1 if frozen else 2]]
        value = total(of_counted(mode, kwargs), lambda t: t * factor)
        for retain in (True, False):  # out of place, and in place
            grad_x, *of_weight = torch.autograd.grad(value, leaves, retain_graph=retain)
            assert (grad_x[~kept] == 0).all()
            assert not grad_x[kept].isfinite().any(-1).any()
            listed = kwargs["support"][kept].unique() if "support" in kwargs else slice(None)
            assert not any(g[listed].isfinite().any() for g in of_weight)


@every_mode
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_from_run_to_run(mode: Mode, dtype: torch.dtype) -> None:
    many = {"targets": 9} if "targets" in mode.choice else {}  # a token, most of them of the same few classes
    kwargs = mode.arguments(200, 32, 500, dtype=dtype, **many)
    if many:
        kwargs["target"] %= 7
    kwargs["options"] = HeadOptions(workspace_mib=0.1, gradient=kwargs["options"].gradient)
    runs = []
    for _ in range(2):
        found = mode.run(kwargs)
        value = total(found, lambda t: t * torch.linspace(1, 2, t.numel()).view(t.shape))  # no two upstreams are equal
        runs.append((*found.values(), *torch.autograd.grad(value, [kwargs[n] for n in trained(kwargs)])))
    for one, two in zip(*runs, strict=True):
        assert torch.equal(one, two)
