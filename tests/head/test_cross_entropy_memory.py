"""What linear_cross_entropy really allocates, seen by the allocator and not by a dispatch mode: no logits, ever."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lowtide import HeadOptions, linear_cross_entropy, plan_head
from lowtide.measure import track_allocations
from support import head

MIB = 2**20
CASES = ("plain", "all options", "frozen head", "per token", "ignored rows")


def naive(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, **_: Any) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, w).float(), y)


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("gradient", ["auto", "recompute"])
def test_no_quarter_of_the_logits_is_ever_allocated(reduction: str, dtype: torch.dtype, gradient: str) -> None:
    N, D, V = 256, 16, 3001
    x, w, b, y = head(N, D, V, dtype=dtype)
    y[::7] = -100
    kwargs = {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 9.0, "weight": torch.rand(V), "reduction": reduction}
    with track_allocations() as seen:
        loss = linear_cross_entropy(x, w, y, linear_bias=b, **kwargs, options=HeadOptions(gradient=gradient))
        loss.sum().backward()
    least_itemsize = 8 if dtype == torch.float64 else 2
    assert 0 < seen.largest_bytes < N * V / 4 * least_itemsize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_logits_are_seen_where_there_are_any(dtype: torch.dtype) -> None:
    N, D, V = 512, 16, 3001
    x, w, _, y = head(N, D, V, dtype=dtype)
    with track_allocations() as seen:
        naive(x, w, y).backward()
    assert seen.largest_bytes >= N * V * 4


@pytest.mark.parametrize(
    ("dtype", "case", "workspace_mib"),
    [
        *itertools.product([torch.float32], [*CASES, "autocast"], [0.25, 1, 10]),
        *itertools.product([torch.bfloat16, torch.float16], CASES, [0.25]),
        *itertools.product([torch.bfloat16, torch.float16], ["plain", "all options"], [10]),
    ],
)
def test_the_workspace_is_kept(workspace_mib: float, dtype: torch.dtype, case: str) -> None:
    N, D, V = 210, 48, 4099
    x, w, b, y = head((7, 30), D, V, dtype=dtype)
    w.requires_grad_(case != "frozen head")
    b.requires_grad_(case != "frozen head")
    kwargs: dict[str, Any] = {"options": HeadOptions(workspace_mib=workspace_mib)}
    if case == "all options":
        kwargs |= {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 9.0, "logit_scale": 0.5, "shift": True}
        kwargs |= {"weight": torch.rand(V), "token_weight": torch.rand(7, 30)}
    if case == "per token":
        kwargs["reduction"] = "none"
    if case == "ignored rows":
        y[:, ::3] = -100
    operand = dtype if case != "autocast" else torch.bfloat16
    plan = plan_head(
        N, D, V, operand, "cpu", kwargs["options"], weight_dtype=w.dtype,
        reduction=kwargs.get("reduction", "mean"), weight_frozen=case == "frozen head",
    )  # fmt: skip
    with track_allocations() as seen, torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        linear_cross_entropy(x, w, y, linear_bias=b, **kwargs).sum().backward()
    returned = sum(t.grad.nbytes for t in (x, w, b) if t.grad is not None)
    beyond = seen.peak_bytes - returned - plan.accumulator_bytes - plan.cast_bytes
    assert plan.scratch_bytes <= workspace_mib * MIB
    assert beyond <= workspace_mib * MIB
    if workspace_mib < 4 and dtype == torch.float32:  # else the accumulator's last use hides what the chunks take
        assert beyond >= 0.3 * workspace_mib * MIB, "what is allowed is put to use"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("accumulate", ["auto", "input"])
def test_the_accumulator_is_in_the_plan(dtype: torch.dtype, accumulate: str) -> None:
    N, D, V = 256, 512, 8000
    x, w, _, y = head(N, D, V, dtype=dtype, bias=False)
    for workspace_mib in (4, 40):
        options = HeadOptions(workspace_mib=workspace_mib, accumulate=accumulate)
        plan = plan_head(N, D, V, dtype, "cpu", options)
        x.grad = w.grad = None
        with track_allocations() as seen:
            linear_cross_entropy(x, w, y, options=options).backward()
        beyond = seen.peak_bytes - x.nbytes - w.nbytes
        assert plan.scratch_bytes <= workspace_mib * MIB
        assert beyond <= plan.scratch_bytes + plan.accumulator_bytes


def test_what_is_kept_between_forward_and_backward() -> None:
    """Gradients in forward: they alone. Recompute and per token: O(N)."""
    N, D, V = 400, 32, 2000
    for kwargs in ({}, {"reduction": "none"}, {"options": HeadOptions(gradient="recompute")}):
        x, w, _, y = head(N, D, V)
        with track_allocations() as seen:
            loss = linear_cross_entropy(x, w, y, **kwargs)
        held = seen.events[-1].total_bytes
        assert loss.requires_grad
        assert held <= (x.nbytes + w.nbytes if not kwargs else 0) + 64 * N


def test_shift_copies_no_hidden_states() -> None:
    x, w, _, y = head((2, 4096), 64, 50)
    with torch.no_grad(), track_allocations() as seen:
        linear_cross_entropy(x, w, y, shift=True, options=HeadOptions(workspace_mib=0.5))
    assert seen.largest_bytes < x.nbytes / 4


def test_float32_weights_are_copied_to_no_wider_dtype() -> None:
    """bf16 operands give float32 logits without a float32 weight."""
    x, w, _, y = head(64, 256, 5000, dtype=torch.bfloat16)
    with torch.no_grad(), track_allocations() as seen:
        linear_cross_entropy(x, w, y, options=HeadOptions(workspace_mib=1))
    assert seen.peak_bytes < 1.0 * MIB < w.nbytes


CHILD = """
import sys, torch, torch.nn.functional as F
from lowtide import linear_cross_entropy
from lowtide.measure import peak_resident_bytes
torch.manual_seed(0)
torch.set_num_threads(1)
N, D, V = 4096, 32, 16384
x, w = torch.randn(N, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
y = torch.randint(0, V, (N,))
linear_cross_entropy(x[:64], w, y[:64]).backward()
F.cross_entropy(F.linear(x[:64], w), y[:64]).backward()
before = peak_resident_bytes()
linear_cross_entropy(x, w, y).backward()
lowtide = peak_resident_bytes() - before
F.cross_entropy(F.linear(x, w), y).backward()
sys.stdout.write(f"{lowtide} {peak_resident_bytes() - before}")
"""


def test_peak_resident_memory_of_a_process() -> None:
    """Logits of 256 MiB: plain PyTorch, which comes after, holds several copies; lowtide a workspace."""
    child = subprocess.run([sys.executable, "-c", textwrap.dedent(CHILD)], check=True, capture_output=True, text=True)
    lowtide, naive = map(int, child.stdout.split())
    assert naive > 512 * MIB
    assert lowtide < 128 * MIB
