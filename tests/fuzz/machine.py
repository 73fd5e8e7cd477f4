"""Runs a case, judges it, and shrinks what fails."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import lowtide
from fuzz import bounds, loss_cases, references
from fuzz.cases import Case, Program, program_of, tables
from lowtide.errors import LowtideError

SPACE = {
    name: value
    for module in (loss_cases, references)
    for name, value in vars(module).items()
    if not name.startswith("__")
}


class Refused(Exception):
    """A case that lowtide refuses, as it should."""


def highest(notes: dict[str, Any], t: dict[str, Tensor], ids: Tensor, k: int) -> bool:
    """Return whether ``ids`` [..., k] are classes of the k highest logits, to rounding."""
    z, ids = notes["student"][4].detach(), ids.reshape(*notes["student"][4].shape[:-1], k)
    scales = bounds.scales_of(notes)
    near = 8 * scales.kappa * notes["eps"]
    fine = z.isfinite().all(-1) & ~t.get("dead", torch.zeros(z.shape[:-1], dtype=torch.bool))
    if k > 1 and (ids.sort(-1).values.diff(dim=-1) == 0).any():
        return False
    chosen, true = z.gather(-1, ids), z.topk(k, -1).values
    return bool(((chosen - true).abs() <= near * (1 + true.abs())).all(-1)[fine].all())


def tensors_of(program: Program) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Run a program's set-up, and return its names and its tensors."""
    space = {**SPACE, "torch": torch, "F": F, "math": math, "lowtide": lowtide, "highest": highest}
    exec(compile("\n".join(program.setup), "<case>", "exec"), space)
    return space, {name: space[name] for name in program.tensors}


def function_of(space: dict[str, Any], names: list[str], expression: str, autocast: str | None) -> Callable[..., Any]:
    run = eval(f"lambda {', '.join(names)}: {expression}", space)
    if autocast is None:
        return run

    def cast(*args: Any) -> Any:
        with torch.autocast("cpu", getattr(torch, autocast)):
            return run(*args)

    return cast


def in_float64(program: Program, t: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return leaves of the same numbers in float64; under autocast of the numbers that are multiplied."""
    found = {}
    for name, x in t.items():
        if not x.is_floating_point():
            found[name] = x
            continue
        y = x.detach()
        if program.autocast and name in MULTIPLIED and y.dtype != torch.float64:
            y = y.to(getattr(torch, program.autocast))
        found[name] = y.double().requires_grad_(x.requires_grad)
    return found


MULTIPLIED = {
    "input", "linear_weight", "teacher_input", "teacher_weight", "gate_weight", "up_weight", "down_weight", "gate_bias",
    "up_bias", "down_bias",
}  # fmt: skip


def upstreams(case: Case, outputs: list[Tensor], t: dict[str, Tensor]) -> list[Tensor]:
    """Return one upstream gradient for each output."""
    g = torch.Generator().manual_seed(case["seed"] + 1)
    kind, found = case["upstream"], []
    for out in outputs:
        ones = torch.ones(out.shape, dtype=torch.float64)
        if isinstance(kind, float):
            up = kind * ones
        elif kind == "0":
            up = 0 * ones
        elif kind == "one":
            up = ones
        else:
            up = torch.randn(out.shape, generator=g, dtype=torch.float64)
            if kind == "some 0":
                up = up * (torch.rand(out.shape, generator=g) < 0.5)
            if kind.endswith("where ignored") and out.dim():
                nothing = ignored(case, t, out)
                up = up.masked_fill(nothing, math.nan if kind.startswith("nan") else math.inf)
        if "dead" in t and t["dead"].dim() <= out.dim():
            up = up.masked_fill(t["dead"].view((*t["dead"].shape, *[1] * (out.dim() - t["dead"].dim()))), 0)
        found.append(up.to(out.dtype))
    return found


def ignored(case: Case, t: dict[str, Tensor], out: Tensor) -> Tensor:
    """Return where a value counts for nothing, as far as that is said for each of them."""
    if "mask" in t and t["mask"].shape == out.shape:
        return ~t["mask"]
    target = t.get("target")
    if target is None or "want" in case:
        return torch.zeros(out.shape, dtype=torch.bool)
    if case.get("shift") and target.dim():
        target = target[..., 1:]
    index = 200 if target.dtype == torch.uint8 else case["ignore_index"]
    return (target == index) if target.shape == out.shape else torch.zeros(out.shape, dtype=torch.bool)


@contextlib.contextmanager
def saved_elsewhere(on: bool) -> Iterator[None]:
    if not on:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x):
        yield


def run_ours(
    case: Case, f: Callable[..., Any], t: dict[str, Tensor], leaves: list[str]
) -> tuple[list[Tensor], list[Tensor], list[Tensor | None]]:
    """Return outputs, the upstream gradients of those that have one, and the leaves' gradients, in a case's way."""
    way, args = case["way"], list(t.values())
    if way == "reentrant" and not may_train(case):
        way = "once"  # PyTorch refuses it where nothing is differentiable
    if way == "no_grad" or not leaves:
        with torch.no_grad() if way == "no_grad" else contextlib.nullcontext():
            outs = list(f(*args))
        problem(any(o.requires_grad for o in outs), "a result requires a gradient that nothing needs")
        return outs, [], []
    with saved_elsewhere(way == "hooks"):
        if way == "checkpoint":
            outs = list(checkpoint(f, *args, use_reentrant=False))
        elif way == "reentrant":
            outs = list(checkpoint(f, *args, use_reentrant=True))
        else:
            outs = list(f(*args))
        trained = [o for o in outs if o.requires_grad]
        problem(not trained and may_train(case), "no result requires a gradient")
        if not trained:
            return outs, [], []
        ups = upstreams(case, trained, t)
        kept = [u.clone() for u in ups]
        wanted = leaves[:1] if way == "subset" else leaves
        if way == "two uses":
            trained = trained + [o for o in f(*args) if o.requires_grad]
            ups = ups + ups
        if way == "reentrant":  # torch.autograd.grad is not for these
            torch.autograd.backward(trained, ups)
            grads = [t[n].grad for n in wanted]
            problem(not all(equal(a, b) for a, b in zip(kept, ups, strict=True)), "the upstream gradient was changed")
            return outs, ups, grads
        grads = list(
            torch.autograd.grad(trained, [t[n] for n in wanted], ups, allow_unused=True, retain_graph=way == "twice")
        )
        if way == "twice":
            first = [None if g is None else g.clone() for g in grads]
            again = torch.autograd.grad(trained, [t[n] for n in wanted], ups, allow_unused=True)
            problem(not all(equal(a, b) for a, b in zip(first, again, strict=True)), "a second backward differs")
            problem(
                not all(equal(a, b) for a, b in zip(first, grads, strict=True)),
                "a second backward changes the first's gradients",
            )
    problem(not all(equal(a, b) for a, b in zip(kept, ups, strict=False)), "the upstream gradient was changed")
    return outs, ups, grads


def may_train(case: Case) -> bool:
    return case.get("want") not in (["argmax"],) and case["trained"] != "nothing"


def equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


class Problem(AssertionError):
    """What is wrong with a case."""


def problem(is_one: bool, what: str) -> None:
    if is_one:
        raise Problem(what)


def expected_refusal(case: Case, error: LowtideError) -> bool:
    """Return whether a case asks for what no function of the head can do."""
    return case.get("gradient") == "forward" and "gradient" in str(error).split(":", 1)[0]


def run_reference(
    program: Program, space: dict[str, Any], t: dict[str, Tensor], leaves: list[str], ups: list[Tensor], times: int
) -> tuple[list[Tensor], list[Tensor | None], dict[str, Any]]:
    references.NOTES.update(kept=True)
    dtype_is_truth = all(x.dtype == torch.float64 for x in t.values() if x.is_floating_point())
    f = function_of(space, list(t), program.reference, None if dtype_is_truth else program.autocast)
    outs = list(f(*t.values()))
    trained = [o for o in outs if o.requires_grad]
    grads: list[Tensor | None] = []
    if ups and trained:
        for out, up in zip(trained, ups, strict=False):
            out.backward((times * up.double()).to(out.dtype), retain_graph=True)
        grads = [t[n].grad for n in leaves]
    notes = dict(references.NOTES)
    references.NOTES.clear()
    return outs, grads, notes


def judge(case: Case) -> float:
    """Run a case and return its worst error as a share of the bound.

    Raises:
        Problem: It is wrong.
        Refused: lowtide refuses it, as documented.
    """
    program = program_of(case)
    space, t = tensors_of(program)
    leaves = [n for n in t if t[n].requires_grad and not n.startswith("teacher")]
    before = {n: (x.detach().clone(), x._version) for n, x in t.items()}
    random_state = torch.get_rng_state()
    f = function_of(space, list(t), program.ours, program.autocast)
    try:
        outs, ups, grads = run_ours(case, f, t, leaves)
    except LowtideError as error:
        if expected_refusal(case, error):
            raise Refused from error
        raise Problem(f"refused: {error}") from error
    except Problem:
        raise
    except Exception as error:
        raise Problem(f"{type(error).__name__}: {error}") from error
    problem(not torch.equal(random_state, torch.get_rng_state()), "the random state was changed")
    for n, (x, version) in before.items():
        problem(t[n]._version != version or not equal(t[n].detach(), x), f"{n} was changed")
    if "loss" not in case:  # those are plain PyTorch, where a sum's gradient is the upstream one expanded
        no_aliases(t, outs, ups, grads)
    return compare(case, program, space, t, leaves, outs, ups, grads)


def no_aliases(t: dict[str, Tensor], outs: list[Tensor], ups: list[Tensor], grads: list[Tensor | None]) -> None:
    def place(x: Tensor) -> int:
        return x.untyped_storage().data_ptr() if x.numel() else 0

    given = {place(x) for x in (*t.values(), *ups)} - {0}
    made = [place(x) for x in (*outs, *(g for g in grads if g is not None)) if place(x)]
    problem(not given.isdisjoint(made), "a result shares memory with an argument")
    gradients = [place(g) for g in grads if g is not None and place(g)]
    problem("residual" not in t and len(set(gradients)) != len(gradients), "two gradients share memory")


def compare(
    case: Case, program: Program, space: dict[str, Any], t: dict[str, Tensor], leaves: list[str], outs: list[Tensor],
    ups: list[Tensor], grads: list[Tensor | None],
) -> float:  # fmt: skip
    """Return the worst error as a share of its bound."""
    times = 2 if case["way"] == "two uses" else 1
    exact = in_float64(program, t)
    usual = {n: x.detach().clone().requires_grad_(x.requires_grad) for n, x in t.items()}
    true, true_grads, notes = run_reference(program, space, exact, leaves, ups, times)
    plain, plain_grads, _ = run_reference(program, space, usual, leaves, ups, times)
    low = torch.float32 if not outs else t[next(iter(t))].dtype
    if program.autocast and low != torch.float64:
        low = getattr(torch, program.autocast)
    eps = bounds.precision(torch.float64 if low == torch.float64 else torch.float32)
    notes["eps"] = eps
    notes["stretch"] = stretch(case)
    notes["upstream"] = times * max([0.0, *(u.abs().nan_to_num(0, 0, 0).max().item() for u in ups if u.numel())])
    scales = None if case["function"] == "LinearCrossEntropyLoss" else bounds.scales_of(notes)
    worst, kappa = 0.0, (4.0 if "loss" in case else 1.0) if scales is None else scales.kappa

    def bounded(what: str, got: Tensor, want: Tensor, usually: Tensor | None, **given: Any) -> float:
        ratio, error = bounds.excess(got, want, usually, eps=eps, kappa=kappa, **given)
        problem(ratio > 1, f"{what}: {ratio:.3g} times the bound ({error})")
        return ratio

    for i, (got, want) in enumerate(zip(outs, true, strict=False)):
        scale = None if scales is None else scales.of_name.get("value")
        if notes.get("rows") and scales is not None:
            scale = value_scale(case, notes, t, want)
        if case["function"] == "LinearCrossEntropyLoss" and not want.any():  # one class: a difference of equal numbers
            scale = torch.ones_like(want)
        own = bounds.precision(got.dtype) if got.dtype != torch.float64 else 0.0
        low_of_value = 0.0 if notes.get("rows") and scales is not None else own
        worst = max(worst, bounded(f"value {i}", got, want, plain[i], low=low_of_value, scale=scale))
    for check in program.checks:
        problem(not eval(check, {**space, "t": t, "got": outs, "notes": notes}), f"not {check}")
    once = "loss" in case and times == 1  # a leaf is cast once, and so is its gradient
    wanted = leaves[:1] if case["way"] == "subset" else leaves
    # Probabilities below the smallest normal number are 0, whatever factor comes after.
    smallest = 2.0**-24 * kappa if low == torch.float16 else 0.0
    if low in (torch.float32, torch.bfloat16):
        smallest = 1e-36 * notes["upstream"] * max(1.0, notes["stretch"])
    for name, got, want, usually in zip(wanted, grads, true_grads, plain_grads, strict=False):
        if got is None or want is None:
            problem(
                got is not want and (want is None or bool((want != 0).any())),
                f"the gradient of {name} is {'missing' if got is None else 'not needed'}",
            )
            continue
        problem(got.dtype != t[name].dtype, f"the gradient of {name} is {got.dtype}")
        narrow = low in (torch.bfloat16, torch.float16)
        rounded = bounds.precision(low if narrow else got.dtype) if narrow or got.dtype != torch.float64 else eps
        scale = None if scales is None else scales.of_name.get(name)
        if scale is not None and scale.shape != want.shape and case.get("shift"):
            scale = F.pad(scale, (0, 0, 0, 1))  # the last token predicts nothing
        lost = ~(usually.isfinite() | got.isfinite())  # float64 has digits where plain PyTorch has none either
        if case.get("kind") == "tv" and case["V"] == 1:  # s is t but for rounding, so the sign of s - t is luck
            continue
        nothing = case.get("D") == 0 and name == "logit_scale"  # of no products, that are not even NaN
        if nothing:
            lost = ~want.isfinite()
        if case["function"] == "linear_apply" or "loss" in case or low == torch.float16 or nothing:
            got, want, usually = (x.masked_fill(lost, 0) for x in (got, want, usually))
        if case["function"] == "LinearCrossEntropyLoss":  # differences of probabilities, of which nothing may be left
            scale = want.abs() + times * notes["upstream"]
        steps = 0.0 if once else bounds.LOW_STEPS
        given = {"low": rounded, "scale": scale, "smallest": smallest, "low_steps": steps}
        worst = max(worst, bounded(f"gradient of {name}", got, want, usually, **given))
    return worst


def stretch(case: Case) -> float:
    """Return by how much what comes after the logits' product may stretch its errors."""
    scale = case.get("logit_scale", 1.0)
    number = float(scale) if isinstance(scale, int | float) else 0.8
    temperature = case.get("temperature", 1)
    return abs(number) / (float(temperature) if isinstance(temperature, int | float) else 1.7)


def value_scale(case: Case, notes: dict[str, Any], t: dict[str, Tensor], want: Tensor) -> Tensor:
    """Return what a value's error is relative to: a logit's error is kappa, and a loss has its factors too."""
    coefficient = 1.0
    for name in ("weight", "token_weight"):
        if name in t and t[name].numel() and name in ("weight", "token_weight"):
            coefficient *= max(1.0, t[name].max().item())
    largest = max([1.0, *(r.detach().abs().nan_to_num(0, 0, 0).max().item() for r in notes["rows"] if r.numel())])
    each = want.detach().abs().nan_to_num(0, 0, 0) + coefficient * (1 + 0.02 * largest)
    if want.dim() == 0 and notes["rows"] and notes["rows"][0].dim():
        rows = notes["rows"][0]
        count = 1.0 if case.get("reduction") == "mean" and case.get("num_items") is None else max(1, rows.numel())
        each = each * count
    return each


def fails(case: Case) -> str | None:
    """Return what is wrong with a case, None where nothing is."""
    try:
        judge(case)
    except Refused:
        return None
    except Problem as found:
        return str(found)
    return None


def kind_of(problem: str) -> str:
    return problem.split(":")[0].rstrip("0123456789 ")


def shrink(case: Case, wrong: Callable[[Case], str | None] = fails, tries: int = 400) -> Case:
    """Return a case that still fails in the same kind, with as many options as can be at their simplest."""
    found = wrong(case)
    kind, table = kind_of(found), tables()[case["function"]][1]
    changed = True
    while changed and tries > 0:
        changed = False
        for option, values in table.items():
            for value in values[: values.index(case[option])]:
                tries -= 1
                smaller = {**case, option: value}
                if (still := wrong(smaller)) is not None and kind_of(still) == kind:
                    case, changed = smaller, True
                    break
    return case
