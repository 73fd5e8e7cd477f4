"""Tokens that do not count, and those that spoil: what they hold and what comes back to them reaches no other."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from contract.cases import LEAVES, counting, of_tokens
from contract.function import NARROW, WIDE, Arguments, Mode, leaves, total, trained
from contract.table import HEADS, PER_TOKEN
from promises import promise
from support import every_pair, in_float64, relative_error

pytestmark = promise("ignored")
EVERY_OPTION: Arguments = {"logit_scale": "trained", "label_smoothing": 0.1, "z_loss": 0.1, "weight": True}
WAYS = ("auto", "compute")  # with the rows of ignored tokens: on the CPU they are dropped
OF_TOKENS = {name: mode for name, mode in PER_TOKEN.items() if "want" not in mode.choice}  # else they have values, too


def frozen(kwargs: Arguments, which: bool) -> Arguments:
    """Return the arguments, maybe with a head that gets no gradient."""
    return kwargs | {n: kwargs[n].detach() for n in LEAVES[1:] if which}


def of_counted(mode: Mode, kwargs: Arguments) -> dict[str, Tensor]:
    """Return the outputs that an ignored token has no part in: of statistics the log-probability alone."""
    found = mode.run(kwargs)
    return found if "want" not in mode.choice else {".logprob": found[".logprob"]}


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


@every_pair(mode=HEADS.values(), poison=[torch.nan, torch.inf], ignored_tokens=WAYS, gradient=["auto", "recompute"])
def test_they_may_hold_anything(mode: Mode, poison: float, ignored_tokens: str, gradient: str) -> None:
    choice: Arguments = {"ignored_tokens": ignored_tokens, "ignored": "some", "softcap": 3.0, "logit_scale": "trained"}
    choice |= {"gradient": gradient} if "gradient" not in mode.choice else {}
    kwargs = mode.arguments(60, dtype=torch.float32, **choice)
    kept = counting(kwargs)
    results = []
    for poisoned in (0.0, poison):
        given = spoiled(kwargs, ~kept, poisoned)
        found = {key: value for key, value in mode.run(given).items() if key != ".outside"}
        if mode.per_token:
            for key, value in found.items():
                none = value[~kept]
                assert "want" in mode.choice or (
                    (none == 0).all() and not (none.is_floating_point() and none.signbit().any())
                ), key
            found = {key: value[kept] for key, value in found.items()}
        got = dict(zip(trained(given), torch.autograd.grad(total(found), leaves(given)), strict=True))
        assert all((got[name][~kept] == 0).all() for name in ("input", "weights") if name in got)
        results.append((*found.values(), *got.values()))
    for clean, g in zip(*results, strict=True):
        assert clean.isfinite().all()
        assert torch.equal(clean, g)


@every_pair(mode=OF_TOKENS.values(), without_head=[False, True])
def test_their_upstream_is_not_looked_at(mode: Mode, without_head: bool) -> None:
    kwargs = frozen(mode.arguments(12, dtype=torch.float32, ignored="some"), without_head)
    kept = counting(kwargs)
    found = [value for value in mode.run(kwargs).values() if value.requires_grad]
    upstream = [torch.ones_like(value) for value in found]
    for u in upstream:
        u[~kept] = torch.nan
    got = torch.autograd.grad(found, leaves(kwargs), upstream)
    assert (got[0][~kept] == 0).all()
    assert all(g.isfinite().all() for g in got)


@every_pair(
    mode=PER_TOKEN.values(),
    poison=[torch.nan, torch.inf, -torch.inf],
    dtype=[torch.float32, *NARROW],
    ignored_tokens=WAYS,
)
def test_bad_hidden_states_spoil_their_own_rows_only(
    mode: Mode, poison: float, dtype: torch.dtype, ignored_tokens: str
) -> None:
    wide = dtype == torch.float32
    choice: Arguments = {} if wide else {"logit_scale": "trained"}
    kwargs = frozen(mode.arguments(9, dtype=dtype, ignored_tokens=ignored_tokens, **choice), dtype == torch.float16)
    bad = [4]
    with torch.no_grad():
        kwargs["input"][4] = poison
        if kwargs.get("teacher_input") is not None:
            kwargs["teacher_input"][2], bad = poison, [2, 4]
    good = torch.tensor([i not in bad for i in range(9)], device=kwargs["input"].device)
    found = {key: value for key, value in mode.run(kwargs).items() if value.requires_grad}
    exact = in_float64(kwargs)
    expected = mode.truth(of_tokens(exact, good))
    for key, value in found.items():
        assert all(value[i].isnan().any() for i in bad), key
        assert relative_error(value[good], expected[key]) < 1e-5
    if mode.name == "linear_apply":
        return  # what fn's derivative makes of a NaN is fn's
    (spoilt,) = torch.autograd.grad(total(found), kwargs["input"], retain_graph=True)
    assert spoilt[bad].isnan().all()
    assert spoilt[good].isfinite().all()
    got = torch.autograd.grad(total({key: value[good] for key, value in found.items()}), leaves(kwargs))
    want = torch.autograd.grad(total({key: expected[key] for key in found}), [exact[n] for n in trained(kwargs)])
    assert (got[0][bad] == 0).all()
    for n, g, e in zip(trained(kwargs), got, want, strict=True):
        assert not (e.dim() or wide) or relative_error(g, e) < (1e-4 if wide else 2e-2), n


CASES: list[Any] = [{}]
OF_MEANS: list[Any] = [
    {"reduction": "sum"},
    {"reduction": "mean"},
    *({"reduction": "mean", "num_items": count} for count in (7, "tensor", "zero")),
]


@every_pair(mode=HEADS.values(), dtype=[*WIDE, *NARROW], ignored_tokens=WAYS, without_head=[False, True])
def test_nothing_counts(mode: Mode, dtype: torch.dtype, ignored_tokens: str, without_head: bool) -> None:
    """The values are 0, or stock's 0 / 0, and what they send back is 0, whatever comes from upstream."""
    reduced = "reduction" in mode.function.options and not mode.per_token
    shifted = [(3, 1)] * ("shift" in mode.function.options)
    for leading, changes in itertools.product(((3, 2), (0, 4), *shifted), OF_MEANS if reduced else CASES):
        choice = mode.choice | changes | ({"shift": True} if leading == (3, 1) else {"ignored": "all"})
        choice |= EVERY_OPTION | {"ignored_tokens": ignored_tokens}
        kwargs = frozen(mode.arguments(leading, dtype=dtype, **choice), without_head)
        found = of_counted(mode, kwargs)
        undefined = changes.get("reduction") == "mean" and changes.get("num_items") in (None, "zero")
        assert all((value.isnan() if undefined else value == 0).all() for value in found.values())
        for factor in (1.0, torch.inf, torch.nan):
            value = total(found, lambda t, factor=factor: t * factor)
            for g in torch.autograd.grad(
                value, leaves(kwargs), retain_graph=True, allow_unused=True, materialize_grads=True
            ):
                assert (g == 0).all(), factor


@every_pair(mode=HEADS.values(), dtype=[*WIDE, *NARROW], factor=[torch.inf, torch.nan], without_head=[False, True])
def test_an_upstream_that_is_not_finite_reaches_tokens_that_count_alone(
    mode: Mode, dtype: torch.dtype, factor: float, without_head: bool
) -> None:
    kwargs = frozen(mode.arguments((2, 9), dtype=dtype, ignored="some", **EVERY_OPTION), without_head)
    kept = counting(kwargs)
    value = total(of_counted(mode, kwargs), lambda t: t * factor)
    for retain in (True, False):  # out of place, and in place
        needed = [kwargs[n] for n in LEAVES[: 1 if without_head else 2]]
        grad_x, *of_weight = torch.autograd.grad(value, needed, retain_graph=retain)
        assert (grad_x[~kept] == 0).all()
        assert not grad_x[kept].isfinite().any(-1).any()
        listed = slice(None)
        if "support" in kwargs:
            ids = kwargs["support"][kept]
            listed = ids[ids >= 0].unique()
        assert all(g[listed].isfinite().double().mean() < 0.02 for g in of_weight)  # a sum that rounds to 0 may stay 0
