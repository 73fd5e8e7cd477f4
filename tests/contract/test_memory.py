"""What the head's functions really allocate, seen by the allocator and not by a dispatch mode: no logits, ever."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import support
from contract.cases import LEAVES, MODES, counting
from contract.function import Arguments, Mode, total, trained
from contract.table import UNLIKE, each, every_head
from lowtide import HeadOptions, HeadPlan
from lowtide.measure.allocations import track_allocations
from promises import promise
from support import counted_flop, gemm_flop

pytestmark = pytest.mark.skipif(support.DEVICE != "cpu", reason="the CPU's allocator; a GPU's peaks: tests/gpu")

MIB = 2**20
CASES = [  # a dtype, what else, and MiB
    *((torch.float32, case, 1) for case in ("plain", "busy", "frozen head", "ignored", "autocast", "some rows")),
    (torch.float32, "plain", 8),
    (torch.bfloat16, "plain", 1),
    (torch.float16, "busy", 1),
]
WORKSPACES = [
    (name, *case) for name in MODES for case in CASES if name in UNLIKE or case[:2] == (torch.float32, "busy")
]
WIDTHS = [pytest.param(name, torch.float32, marks=pytest.mark.slow) for name in MODES if name not in UNLIKE] + [
    *itertools.product(UNLIKE, [torch.float32, torch.bfloat16]),
    *itertools.product(["mean"], [torch.float64, torch.float16]),
]


def arguments(mode: Mode, N: Any, D: int, V: int, **kwargs: Any) -> Arguments:
    """Return a mode's arguments; the user's function takes a few numbers of a row."""
    kwargs = {**mode.choice, "shift": False, "dtype": torch.float32, "workspace_mib": None} | kwargs
    if mode.name == "linear_apply":
        kwargs["out"] = "light " + kwargs.get("out", "token")
    return mode.arguments(N, D=D, V=V, **kwargs)


def peak_of(mode: Mode, kwargs: Arguments, *, every: int = 1, **context: Any) -> tuple[Any, int]:
    """Return the allocations of forward and backward, from ``every`` so many rows, and the bytes of the gradients."""

    def chosen(t: Tensor) -> Tensor:
        return t.abs() if every == 1 else t.abs() * (torch.arange(len(t)) % every == 0).view(-1, *[1] * (t.dim() - 1))

    with track_allocations() as seen, torch.autocast("cpu", torch.bfloat16, **({"enabled": False} | context)):
        total(mode.run(kwargs), chosen).backward()
    return seen, sum(kwargs[n].grad.nbytes for n in trained(kwargs))


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize(("name", "dtype"), WIDTHS)
def test_no_quarter_of_the_logits_is_ever_allocated(name: str, dtype: torch.dtype) -> None:
    N, D, V = 256, 8, 1201
    mode, ignored = MODES[name], "some" if dtype == torch.bfloat16 else "none"
    seen, _ = peak_of(
        mode, arguments(mode, N, D, V, dtype=dtype, **mode.function.busy | {"ignored": ignored, "shift": False})
    )
    narrow = 4 if mode.name == "linear_apply" else 2
    assert 0 < seen.largest_bytes < N * V / 4 * (8 if dtype == torch.float64 else narrow)


def plan_of(mode: Mode, kwargs: Arguments, operand: torch.dtype, frozen: bool) -> HeadPlan:
    """Return what the library says that it will take."""
    (*leading, D), V, options = kwargs["input"].shape, len(kwargs["linear_weight"]), kwargs["options"]
    N = int(torch.Size(leading).numel() if kwargs.get("mask") is None else kwargs["mask"].sum())
    given: Arguments = {"weight_dtype": kwargs["linear_weight"].dtype}
    if mode.name == "linear_apply":
        return mode.function.plan(N, D, V, operand, "cpu", options, function=True, **given)
    given |= {"reduction": kwargs.get("reduction", "none"), "weight_frozen": frozen}
    if mode.name != "linear_divergence":
        return mode.function.plan(N, D, V, operand, "cpu", options, **given)
    topk = kwargs["teacher_topk"][0].shape[-1] if "teacher_topk" in kwargs else None
    teacher_D = kwargs["teacher_input"].shape[-1] if topk is None else None
    given |= {} if teacher_D is None else {"teacher_V": len(kwargs["teacher_weight"])}
    return mode.function.plan(N, D, V, teacher_D, operand, "cpu", options, topk=topk, **given)


@pytest.mark.parametrize(("name", "dtype", "case", "workspace_mib"), WORKSPACES)
def test_the_workspace_is_kept(name: str, dtype: torch.dtype, case: str, workspace_mib: float) -> None:
    mode = MODES[name]
    if case == "some rows" and not mode.per_token:
        pytest.skip("one upstream gradient for all rows")
    D, V, autocast, frozen = 48, 4099, case == "autocast", case == "frozen head"
    choice = {"busy": mode.function.busy | {"shift": False}, "ignored": {"ignored": "some"}}.get(case, {})
    kwargs = arguments(
        mode, (7, 9 if workspace_mib < 2 else 30), D, V, dtype=dtype, **choice
    )  # several chunks either way
    kwargs["options"] = HeadOptions(workspace_mib=workspace_mib, gradient=kwargs["options"].gradient)
    kwargs |= {n: kwargs[n].detach() for n in LEAVES[1:] if frozen}
    plan = plan_of(mode, kwargs, torch.bfloat16 if autocast else dtype, frozen)
    seen, returned = peak_of(mode, kwargs, every=3 if case == "some rows" else 1, enabled=autocast)
    beyond = seen.peak_bytes - returned - plan.accumulator_bytes - plan.cast_bytes
    assert plan.scratch_bytes <= workspace_mib * MIB
    assert beyond <= workspace_mib * MIB
    if (
        workspace_mib < 4
        and dtype == torch.float32
        and case == "plain"
        and name != "sets"
        and mode.name != "linear_apply"
    ):
        assert beyond >= 0.3 * workspace_mib * MIB, "what is allowed is put to use"


def test_the_workspace_has_room_for_what_all_tokens_hold() -> None:
    mode, workspace_mib = MODES["mean"], 0.6
    kwargs = arguments(mode, (4, 2000), 8, 300)
    kwargs["options"] = HeadOptions(workspace_mib=workspace_mib)
    seen, returned = peak_of(mode, kwargs)
    assert 0.3 * MIB < seen.peak_bytes - returned <= workspace_mib * MIB


@every_head
@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_saved_between_forward_and_backward(mode: Mode, frozen: bool) -> None:
    """Gradients in forward: they alone, which backward hands on where they lie. Recomputed: O(N)."""
    N, D, V = 400, 32, 2000
    kwargs = arguments(mode, N, D, V, linear_bias=False)
    kwargs |= {n: kwargs[n].detach() for n in LEAVES[1:2] if frozen}
    stored = mode.stored or (frozen and mode.stored_where_frozen)
    with track_allocations() as seen:
        found = mode.run(kwargs)
    returned = sum(value.nbytes for value in found.values())
    held = sum(kwargs[n].nbytes for n in trained(kwargs)) if stored else 0
    of_sets = 8 * kwargs["support"].numel() if "support" in kwargs else 0  # a logit and an id each
    assert held <= seen.events[-1].total_bytes <= held + 64 * N + of_sets + returned
    if stored and not mode.per_token and mode.name != "linear_apply":
        value = total(found, torch.abs)
        with track_allocations() as seen:
            value.backward()
        assert seen.peak_bytes <= 4096, "scaled where they lie"


OPERATORS = {name: mode for name, mode in MODES.items() if mode.name != "linear_apply"}


@promise("host")
@each(OPERATORS)
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
        kwargs = mode.arguments(N, D=D, V=V, dtype=torch.float32)
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


@promise("host")
@each({name: mode for name, mode in OPERATORS.items() if mode.per_token})
def test_tokens_of_no_use_cost_nothing_on_the_cpu(mode: Mode) -> None:
    """Those that do not count, in forward, and those to which nothing flows back."""
    kwargs = mode.arguments(40, D=6, V=70, dtype=torch.float32, linear_bias=False)
    values = [v for v in mode.run(kwargs).values() if v.requires_grad]
    upstream = [(torch.arange(40) < 10).view(-1, *[1] * (v.dim() - 1)).to(v.dtype).expand_as(v) for v in values]
    some = mode.arguments(40, D=6, V=70, dtype=torch.float32, linear_bias=False, ignored="some")
    run = torch.no_grad()(mode.run)
    back, back_of_used, whole, part = gemm_flop(
        lambda: torch.autograd.backward(values, [torch.ones_like(v) for v in values], retain_graph=True),
        lambda: torch.autograd.backward(values, upstream),
        lambda: run(kwargs),
        lambda: run(some),
    )
    assert back_of_used == back / 4
    assert "want" in mode.choice or part == whole * counting(some).sum() / 40
