"""Draws random cases of the contract's functions, runs and judges them, and shrinks what fails.

A case is a plain dict: a function of `contract.table`, a seed, and one value for each option, the function's own and
`AROUND`'s. The first value of each is the simplest, which is where `shrink` goes. How far a result may be from the
float64 truth is what plain PyTorch errs in the same dtype, and what the truth itself moves where its arguments are
shaken by a rounding.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from contract.function import Function, flat, trained
from contract.table import FUNCTIONS
from support import in_float64

Case = dict[str, Any]
AROUND: dict[str, list[Any]] = {
    "dtype": ["float32", "float64", "bfloat16", "float16", "autocast bfloat16"],
    "leading": [(3,), (), (1,), (0,), (2, 3), (7,), (2, 1, 4), (3, 0), (13,)],
    "numbers": ["usual", "huge", "equal", "confident", "wrong"],
    "layout": ["contiguous", "transposed", "padded", "strided", "offset"],
    "frozen": ["none", "the first", "all but the first", "every second", "all"],
    "way": ["once", "twice", "checkpoint", "reentrant", "hooks", "two uses", "no_grad"],
    "upstream": ["random", "one", "some 0", "0", 2.0**-7, 2.0**8, -1.0],
}
SIZES = {"D": [9, 1, 16, 33], "V": [23, 130, 2, 1], "F": [11, 33, 6, 1], "d": [8, 12, 6]}
SHAKEN, MORE = 6, 40  # times; ties come out otherwise in few of them
PLAIN, SPREAD, ROUNDINGS = 3.0, 6.0, 12.0  # of plain PyTorch's error, of what the truth moves, of the result's dtype


class Problem(AssertionError):
    """What is wrong with a case."""


def problem(is_one: bool, what: str) -> None:
    if is_one:
        raise Problem(what)


def options_of(name: str) -> dict[str, list[Any]]:
    function = FUNCTIONS[name]
    return {**AROUND, **{size: SIZES[size] for size in function.sizes}, **function.options}


def draw(name: str, seed: int) -> Case:
    """Return a random case: about half of its options are the simplest, so that failures are seen one at a time too."""
    choose = random.Random(f"{name} {seed}")
    simple = choose.choice((0.2, 0.5, 0.8))
    case: Case = {"function": name, "seed": seed}
    for option, values in options_of(name).items():
        case[option] = values[0] if choose.random() < simple else choose.choice(values)
    if "want" in case and case["softcap"]:
        case["numbers"] = AROUND["numbers"][0]  # logits near a cap are one number in float32: any of them is highest
    if case.get("tail") and case["V"] <= case["topk"]:
        case["V"] = SIZES["V"][0]  # a teacher that lists all classes gives each its probability
    if "teacher_D" in case and case["V"] == 1:
        case["V"] = SIZES["V"][0]  # the divergence of one class is 0, and plain PyTorch's has no rounding
    if case["dtype"] == "float16" and case["numbers"] == "huge" and case["upstream"] == 256:
        case["upstream"] = "one"  # or terms leave fp16's range whose sum does not
    if case.get("r") is not None and case["r"] > case["d"]:
        case["r"] = None
    return case


def laid_out(t: Tensor, layout: str) -> Tensor:
    """Return the same numbers in other places of memory."""
    if t.dim() == 0 or (layout == "transposed" and t.dim() < 2):
        return t
    return {
        "contiguous": lambda: t,
        "transposed": lambda: t.mT.contiguous().mT,
        "padded": lambda: torch.nn.functional.pad(t, (0, 3))[..., :-3],
        "strided": lambda: torch.stack((t, t), -1)[..., 0],
        "offset": lambda: torch.nn.functional.pad(t.flatten(), (1, 0))[1:].view(t.shape),
    }[layout]()


def arguments_of(case: Case) -> tuple[Function, dict[str, Any], torch.dtype | None]:
    """Return the function, its arguments, and autocast's dtype."""
    function, kind = FUNCTIONS[case["function"]], case["dtype"]
    autocast = getattr(torch, kind.split()[1]) if kind.startswith("autocast") else None
    choice = {name: value for name, value in case.items() if name not in ("function", "seed", "dtype")}
    kwargs = function.arguments(torch.float32 if autocast else getattr(torch, kind), case["seed"], **choice)
    names = trained(kwargs)
    given = {name: kwargs[name].detach() for name in names}
    x, numbers = given[names[0]], case["numbers"]
    if numbers == "huge":
        given[names[0]] = 20 * x
    elif numbers == "equal":
        given[names[0]] = 0 * x
    elif numbers in ("confident", "wrong") and kwargs.get("target") is not None and x.numel():
        y = kwargs["target"].clamp(0, len(given["linear_weight"]) - 1)
        if y.dim() < x.dim():
            chosen = given["linear_weight"][y]
            step = (
                (20 if numbers == "confident" else -20) * chosen / chosen.square().sum(-1, keepdim=True).clamp(min=0.1)
            )
            given[names[0]] = x + step
    frozen = {
        "none": [], "the first": names[:1], "all but the first": names[1:], "every second": names[::2], "all": names,
    }[case["frozen"]]  # fmt: skip
    for name in names:
        kwargs[name] = laid_out(given[name], case["layout"]).requires_grad_(name not in frozen)
    return function, kwargs, autocast


def shaken(kwargs: dict[str, Any], eps: float, g: torch.Generator) -> dict[str, Any]:
    """Return arguments in float64, each number off by a rounding."""

    def off(t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t
        noise = 2 * torch.rand(t.shape, generator=g, dtype=torch.float64) - 1
        return (t.detach() * (1 + eps * noise)).requires_grad_(t.requires_grad)

    return {name: off(value) if isinstance(value, Tensor) else value for name, value in kwargs.items()}


def upstreams(case: Case, outs: dict[str, Tensor]) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(case["seed"] + 1)
    found = {}
    for key, out in outs.items():
        if out.requires_grad:
            up, kind = torch.randn(out.shape, generator=g, dtype=torch.float64), case["upstream"]
            if kind == "some 0":
                up = up * (torch.rand(out.shape, generator=g) < 0.5)
            elif kind != "random":
                up = torch.full_like(up, 1.0 if kind == "one" else float(kind))
            found[key] = up.to(out.dtype)
    return found


def gradients(outs: dict[str, Tensor], kwargs: dict[str, Any], ups: dict[str, Tensor], **more: Any) -> list[Tensor]:
    used = [key for key in ups if outs[key].requires_grad]  # a node's results may need one where one of them does
    cast = [ups[key].to(outs[key].dtype) for key in used]
    leaves = [kwargs[name] for name in trained(kwargs)]
    if not used:
        return [torch.zeros_like(leaf) for leaf in leaves]
    outputs = [outs[key] for key in used]
    return list(torch.autograd.grad(outputs, leaves, cast, allow_unused=True, materialize_grads=True, **more))


def run_ours(case: Case, call: Callable[..., Any], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return outputs, the upstream gradients of those that have one, and the leaves' gradients, in a case's way."""
    way, names = case["way"], trained(kwargs)
    if way == "no_grad" or not names:
        with torch.no_grad() if way == "no_grad" else nullcontext():
            outs = call(kwargs)
        problem(any(out.requires_grad for out in outs.values()), "a result requires a gradient that nothing needs")
        return outs, {}, []
    saved: AbstractContextManager[Any] = nullcontext()
    if way == "hooks":
        saved = torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x)
    keys: list[str] = []

    def block(*leaves: Tensor) -> tuple[Tensor, ...]:
        outs = call(kwargs | dict(zip(names, leaves, strict=True)))
        keys[:] = outs
        return tuple(outs.values())

    with saved:
        if way in ("checkpoint", "reentrant"):
            found = checkpoint(block, *(kwargs[name] for name in names), use_reentrant=way == "reentrant")
            outs = dict(zip(keys, found, strict=True))
        else:
            outs = call(kwargs)
        ups = upstreams(case, outs)
        kept = [up.clone() for up in ups.values()]
        if way == "reentrant":  # torch.autograd.grad is not for these
            torch.autograd.backward([outs[key] for key in ups], list(ups.values()))
            grads = [kwargs[name].grad for name in names]
            grads = [torch.zeros_like(kwargs[n]) if g is None else g for n, g in zip(names, grads, strict=True)]
        else:
            grads = gradients(outs, kwargs, ups, retain_graph=way == "twice")
        if way == "twice":
            first = [g.clone() for g in grads]
            again = gradients(outs, kwargs, ups)
            problem(not all(map(same, first, again)), "a second backward differs")
            problem(not all(map(same, first, grads)), "a second backward changes the first's gradients")
        if way == "two uses":
            other = gradients(call(kwargs), kwargs, ups)
            problem(not all(map(same, grads, other)), "a second call differs")
    problem(not all(map(same, kept, ups.values())), "the upstream gradient was changed")
    return outs, ups, grads


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def judge(case: Case) -> None:
    """Run a case; raise a `Problem` where it is wrong."""
    function, kwargs, autocast = arguments_of(case)
    tensors = [t for t in pytree.tree_leaves(kwargs) if isinstance(t, Tensor)]
    before = [(t.detach().clone(), t._version) for t in tensors]
    random_state = torch.get_rng_state()
    plain_kwargs = {name: value for name, value in kwargs.items() if name != "options"}

    def within(run: Callable[..., Any]) -> Callable[..., dict[str, Tensor]]:
        def call(kwargs: dict[str, Any]) -> dict[str, Tensor]:
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                return flat(run(**kwargs))

        return call

    try:
        outs, ups, grads = run_ours(case, within(function.run), kwargs)
    except Problem:
        raise
    except Exception as error:
        raise Problem(f"{type(error).__name__}: {error}") from error
    problem(not torch.equal(random_state, torch.get_rng_state()), "the random state was changed")
    for t, (numbers, version) in zip(tensors, before, strict=True):
        problem(t._version != version or not same(t.detach(), numbers), "an argument was changed")

    rounded = dict(kwargs)
    for name in function.cast if autocast else ():
        if kwargs.get(name) is not None and kwargs[name].dtype != torch.float64:
            rounded[name] = kwargs[name].detach().to(autocast).requires_grad_(kwargs[name].requires_grad)
    wide = in_float64(rounded)
    low = autocast or next(t.dtype for t in tensors if t.is_floating_point())
    eps, g = torch.finfo(low).eps, torch.Generator().manual_seed(case["seed"] + 2)
    runs = [(within(function.truth), plain_kwargs), (lambda k: flat(function.truth(**k)), wide)]
    runs += [(runs[1][0], shaken(wide, eps, g)) for _ in range(SHAKEN)]
    plain, true, *moved = (results_of(call, given, ups) for call, given in runs)
    numbers = [t for t in pytree.tree_leaves(wide) if isinstance(t, Tensor) and t.is_floating_point() and t.numel()]
    largest = max([1.0, *(t.detach().nan_to_num(0, 0, 0).abs().max().item() for t in numbers)])
    of_ups = sum(up.double().norm().item() for up in ups.values())
    names = [f"the gradient of {name}" for name in trained(kwargs)] if grads else []
    problem(outs.keys() != true[0].keys(), f"results {list(outs)} for {list(true[0])}")
    for what, got, of in [
        *((f"value {key}", out, (lambda r, key=key: r[0][key])) for key, out in outs.items()),
        *((what, grad, (lambda r, i=i: r[1][i])) for i, (what, grad) in enumerate(zip(names, grads, strict=True))),
    ]:
        # differences of probabilities and of logits, of which nothing may be left
        least = (of_ups if what in names else 1.0) * largest
        if got.is_floating_point():
            compare(what, got, of(true), of(plain), [of(one) for one in moved], eps, least)
            continue
        wrong = got != of(true)
        for at in range(MORE):  # a choice that a rounding does not move
            if not wrong.any():
                break
            wrong &= of((plain, *moved)[at] if at <= SHAKEN else (runs[1][0](shaken(wide, eps, g)), [])) == of(true)
        problem(bool(wrong.any()), f"{what}: {int(wrong.sum())} of {wrong.numel()} choices differ")
    for name, grad in zip(trained(kwargs), grads, strict=bool(grads)):
        problem(grad.dtype != kwargs[name].dtype, f"the gradient of {name} is {grad.dtype}")


def results_of(call: Callable[..., dict[str, Tensor]], kwargs: dict[str, Any], ups: dict[str, Tensor]) -> Any:
    outs = call(kwargs)
    return outs, gradients(outs, kwargs, ups) if ups else []


def compare(what: str, got: Tensor, true: Tensor, plain: Tensor, moved: list[Tensor], eps: float, least: float) -> None:
    """Compare a result with the truth, by the norm of all, and where it is not finite by place."""
    problem(got.shape != true.shape, f"{what}: shape {list(got.shape)} for {list(true.shape)}")
    got, true, plain, *moved = (t.detach() for t in (got, true, plain, *moved))
    most, of_dtype = torch.finfo(got.dtype).max / 4, torch.finfo(got.dtype).eps
    got, true, plain, *moved = (t.double() for t in (got, true, plain, *moved))
    unsure = (true.abs() > most) | ~plain.isfinite() & true.isfinite()
    for other in moved:
        unsure = unsure | (other.isfinite() != true.isfinite())
    odd = (got.isfinite() != true.isfinite()) & ~unsure
    problem(bool(odd.any()), f"{what}: {got[odd][:1].tolist()} for {true[odd][:1].tolist()}")
    fine = true.isfinite() & got.isfinite() & ~unsure

    def error(one: Tensor) -> float:
        return (one - true).where(fine, 0).norm().item()

    spread = max(map(error, moved))
    size = true.where(fine, 0).norm().item()
    few = ROUNDINGS * (5 if of_dtype < 1e-10 else 1)  # the truth in float64 has no more digits than a result
    steps = few * max(of_dtype, min(eps, 1e-3) if of_dtype > 1e-5 else 0.0) * size
    bound = (
        PLAIN * error(plain)
        + SPREAD * spread
        + steps
        + of_dtype * least
        + 1e-30
        + (1e-6 if of_dtype == 2.0**-10 else 0.0)
    )
    problem(
        error(got) > bound,
        f"{what}: error {error(got):.3g} of {size:.3g}, plain {error(plain):.3g}, a rounding moves it {spread:.3g}",
    )


def fails(case: Case) -> str | None:
    """Return what is wrong with a case, None where nothing is."""
    try:
        judge(case)
    except Problem as found:
        return str(found)
    return None


def kind_of(what: str) -> str:
    return what.split(":")[0]


def shrink(case: Case, tries: int = 300) -> Case:
    """Return a case that still fails in the same kind, with as many options as can be at their simplest."""
    kind = kind_of(fails(case) or "")
    changed = True
    while changed and tries > 0:
        changed = False
        for option, values in options_of(case["function"]).items():
            for value in values[: values.index(case[option])]:
                tries -= 1
                smaller = {**case, option: value}
                if (still := fails(smaller)) is not None and kind_of(still) == kind:
                    case, changed = smaller, True
                    break
    return case
