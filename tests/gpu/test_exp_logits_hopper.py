"""The Hopper kernel beside float32 PyTorch: odd sizes, guard regions, ignored tokens, the same bits each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from gpu.conftest import HOPPER, ON_GPU
from lowtide.head.kernels import hopper, stats
from lowtide.head.kernels.exp_logits import ExpRows, exp_tile
from lowtide.head.kernels.gemm import ALL, LogitTransform, gemm_tiles, matrix
from lowtide.head.kernels.hopper import exp_logits_hopper
from promises import promise

pytestmark = [*ON_GPU, HOPPER, promise("kernels")]

COLUMNS = 256
E_TOLERANCE = 4e-3  # bfloat16 rounds by 2e-3; the rest is for the products' order and the exponential
SUM_TOLERANCE = 1e-3
SHAPES = [  # C, D, V
    (1, 8, 8), (5, 776, 1000), (129, 8, 131072), (129, 72, 5003), (257, 776, 8), (1000, 2048, 264), (2048, 776, 40008),
]  # fmt: skip


class Case:
    """Arguments, whose targets count among ``V`` classes; some are ignored, some stand at the edges."""

    def __init__(self, C: int, D: int, V: int) -> None:
        self.x = torch.randn(C, D, device="cuda").bfloat16()
        self.w = (2 / D**0.5 * torch.randn(V, D, device="cuda")).bfloat16()
        self.y = torch.randint(0, V, (C,), device="cuda", dtype=torch.int32)
        if C > 4:
            self.y[0], self.y[1], self.y[2] = V - 1, 0, min(V - 1, COLUMNS - 1)
        self.reference = (self.x.float() * self.w[self.y].float()).sum(1)
        if C > 4:
            self.y[3::7], self.reference[3::7] = -1, torch.nan  # which must not be read
        self.coefficient = torch.randn(C, device="cuda")

    def check(
        self, *, e: bool = True, sums: bool = True, coefficient: bool = False, first_class: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Run into larger buffers of NaN, compare what is written, and return it."""
        C, V = len(self.x), len(self.w)
        e_buffer = torch.full((C + 3, -(-V // 8) * 8 + 8), torch.nan, device="cuda", dtype=torch.bfloat16)
        sum_buffer = torch.full((C + 2, -(-V // COLUMNS) + 3), torch.nan, device="cuda")
        e_CV, sum_CP = e_buffer[:C, :V], sum_buffer[:C, : -(-V // COLUMNS)]
        of_target = self.coefficient if coefficient else None
        rows = ExpRows(self.reference, self.y, of_target, first_class, *matrix(sum_CP if sums else None)[:2])
        exp_logits_hopper(self.x, self.w, e_CV if e else None, rows)

        y = (self.y - first_class).long()
        here = ((y >= 0) & (y < V) & (self.y >= 0)).nonzero()[:, 0]
        true = (self.x.float() @ self.w.float().T).sub_(self.reference.nan_to_num(0.0)[:, None]).exp_()
        true[self.y < 0] = 0
        true[here, y[here]] = 0
        if sums:
            padded = torch.nn.functional.pad(true, (0, -V % COLUMNS)).view(C, -1, COLUMNS)
            assert_close(sum_CP, padded.sum(2, dtype=torch.float64), SUM_TOLERANCE)
        if e:
            if coefficient:
                true[here, y[here]] = self.coefficient[here]
            assert_close(e_CV, true, E_TOLERANCE)
        assert_untouched(sum_buffer, sum_CP.shape if sums else (0, 0))
        assert_untouched(e_buffer, (C, V) if e else (0, 0))
        return e_CV, sum_CP


def assert_close(got: Tensor, true: Tensor, tolerance: float) -> None:
    """Each element on its own, relative to itself; zeros and NaN exactly."""
    assert bool(((got.float() - true).abs() <= tolerance * true.abs()).all())


def assert_untouched(buffer: Tensor, shape: tuple[int, ...] | torch.Size) -> None:
    """All of the buffer beyond its upper left corner is still NaN; TMA may write to the end of 16 bytes."""
    step = 16 // buffer.element_size()
    assert bool(buffer[shape[0] :].isnan().all())
    assert bool(buffer[:, -(-shape[1] // step) * step :].isnan().all())


@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_the_same_bits(shape: tuple[int, int, int]) -> None:
    case = Case(*shape)
    for coefficient in (False, True):
        for e, sums in ((True, False), (False, True), (True, True)):
            found = case.check(e=e, sums=sums, coefficient=coefficient)
    for _ in range(10):
        assert all(map(torch.equal, case.check(coefficient=True), found))


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_statistics_and_gradients_have_the_bits_of_tritons_kernels(shape: tuple[int, int, int]) -> None:
    """Which the interpreter runs: whole rows of NaN and one class in several places are among them."""
    case, P = Case(*shape), -(-shape[2] // COLUMNS)
    case.x[-2:], case.y[-2:] = torch.nan, 0  # of ignored ones the sums may be NaN
    case.w[::3] = case.w[1]
    C, V = len(case.x), len(case.w)

    def written(kernel: Callable[..., None]) -> list[Tensor]:
        sums = torch.full((7, C, P), torch.nan, device="cuda")
        planes = stats.planes_of(sums[1:], list(stats.WANTED))
        g = torch.full((C, -(-V // 8) * 8), torch.nan, device="cuda", dtype=torch.bfloat16)[:, :V]
        kernel(ExpRows(case.reference.nan_to_num(0.0), case.y, None, 0, sums[0], P, **planes), None)
        kernel(of_gradient, g)
        return [sums.nan_to_num(-1.0), g]

    def hoppers(rows: Any, out: Tensor | None) -> None:
        if out is None:
            exp_logits_hopper(case.x, case.w, None, rows)
        else:
            hopper.gradient_hopper(case.x, case.w, out, rows, ALL)

    def tritons(rows: Any, out: Tensor | None) -> None:
        epilogue = exp_tile if out is None else stats.gradient_tile
        gemm_tiles(epilogue, case.x, case.w, out, rows, LogitTransform())

    numbers = torch.randn(4, C, device="cuda")
    of_gradient: Any = stats.Gradient((numbers[0] > 0).float() * (case.x[:, 0] == case.x[:, 0]), *numbers, *[None] * 3)
    assert all(map(torch.equal, written(hoppers), written(tritons)))


@pytest.mark.parametrize("programs", [1, 3, 1000])
def test_any_number_of_programs(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "multiprocessors", lambda device: programs)
    for D in (64, 72, 256, 328):  # 1, 2, 4 and 6 steps: less than, as many as and more than there are stages
        Case(257, D, 5003).check()


@pytest.mark.parametrize("coefficient", [False, True])
def test_slices_of_the_vocabulary(coefficient: bool) -> None:
    case = Case(257, 200, 5003)
    w = case.w
    for first, last in ((0, 1000), (1000, 1256), (1256, 4000), (4000, 5003)):
        case.w = w[first:last]
        case.check(coefficient=coefficient, first_class=first)


@pytest.mark.parametrize("V", [5003, 5120])
def test_ignored_rows_that_are_not_finite(V: int) -> None:
    case = Case(300, 200, V)
    case.x[3::7] = torch.inf
    case.x[10::7, ::2] = torch.nan
    case.check(coefficient=True)
