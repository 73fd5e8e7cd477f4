"""The Hopper kernel beside float32 PyTorch: odd sizes, guard regions, ignored tokens, the same bits each time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from lowtide.head.kernels.exp_logits import ExpRows
from lowtide.head.kernels.exp_logits_hopper import exp_logits_hopper

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
hopper = pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")

COLUMNS = 256
E_TOLERANCE = 4e-3  # bfloat16 rounds by 2e-3; the rest is for the products' order and the exponential
SUM_TOLERANCE = 1e-3
SHAPES = [
    # C, D, V
    (1, 8, 8),
    (5, 776, 1000),
    (129, 8, 131072),
    (129, 72, 5003),
    (257, 776, 8),
    (1000, 776, 5000),
    (1000, 2048, 264),
    (2048, 776, 40008),
]


@dataclass
class Case:
    """Arguments, and outputs within larger buffers of NaN."""

    x: Tensor
    w: Tensor
    reference: Tensor
    y: Tensor
    coefficient: Tensor
    e_buffer: Tensor
    sum_buffer: Tensor

    @property
    def e(self) -> Tensor:
        return self.e_buffer[: len(self.x), : len(self.w)]

    @property
    def sums(self) -> Tensor:
        return self.sum_buffer[: len(self.x), : -(-len(self.w) // COLUMNS)]

    def run(
        self, *, e: bool = True, sums: bool = True, coefficient: bool = False, first_class: int = 0, programs: int = 0
    ) -> None:
        self.e_buffer.fill_(torch.nan)
        self.sum_buffer.fill_(torch.nan)
        e_CV, sum_CP = self.e if e else None, self.sums if sums else None
        of_target = self.coefficient if coefficient else None
        rows = ExpRows.of(self.reference, self.y, sum_CP, of_target, first_class)
        exp_logits_hopper(self.x, self.w, e_CV, rows, programs or None)

    def check(self, *, e: bool = True, sums: bool = True, coefficient: bool = False, first_class: int = 0) -> None:
        C, V = self.e.shape
        y = (self.y - first_class).long()
        here = ((y >= 0) & (y < V) & (self.y >= 0)).nonzero()[:, 0]
        true = (self.x.float() @ self.w.float().T).sub_(self.reference.nan_to_num(0.0)[:, None]).exp_()
        true[self.y < 0] = 0
        true[here, y[here]] = 0
        if sums:
            padded = torch.nn.functional.pad(true, (0, -V % COLUMNS)).view(C, -1, COLUMNS)
            assert_close(self.sums, padded.sum(2, dtype=torch.float64), SUM_TOLERANCE)
        assert_untouched(self.sum_buffer, self.sums.shape if sums else (0, 0))
        if e:
            if coefficient:
                true[here, y[here]] = self.coefficient[here]
            assert_close(self.e, true, E_TOLERANCE)
        assert_untouched(self.e_buffer, (C, V) if e else (0, 0))


def make_case(C: int, D: int, V: int, *, rows_of_weight: int | None = None) -> Case:
    """Return a case whose targets count among ``V`` classes; some are ignored, some stand at the edges."""
    g = torch.Generator("cuda").manual_seed(C + D + V)
    x = torch.randn(C, D, device="cuda", generator=g).bfloat16()
    w = (2 / D**0.5 * torch.randn(V, D, device="cuda", generator=g)).bfloat16()
    y = torch.randint(0, V, (C,), device="cuda", generator=g, dtype=torch.int32)
    reference = (x.float() * w[y].float()).sum(1)
    if C > 4:
        y[0], y[1], y[2] = V - 1, 0, min(V - 1, COLUMNS - 1)
        y[3::7] = -1
        reference[:3] = (x[:3].float() * w[y[:3]].float()).sum(1)
        reference[3::7] = torch.nan  # must not be read
    return Case(
        x, w, reference, y, torch.randn(C, device="cuda", generator=g),
        torch.empty(C + 3, -(-V // 8) * 8 + 8, device="cuda", dtype=torch.bfloat16),
        torch.empty(C + 2, -(-V // COLUMNS) + 3, device="cuda"),
    )  # fmt: skip


def assert_close(got: Tensor, true: Tensor, tolerance: float) -> None:
    """Each element on its own, relative to itself; zeros and NaN exactly."""
    assert bool(((got.float() - true).abs() <= tolerance * true.abs()).all())


def assert_untouched(buffer: Tensor, shape: tuple[int, ...] | torch.Size) -> None:
    """All of the buffer beyond its upper left corner is still NaN; TMA may write to the end of 16 bytes."""
    step = 16 // buffer.element_size()
    assert bool(buffer[shape[0] :].isnan().all())
    assert bool(buffer[:, -(-shape[1] // step) * step :].isnan().all())


@pytest.fixture(autouse=True)
def _full_float32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@hopper
@pytest.mark.parametrize("shape", SHAPES)
def test_values(shape: tuple[int, int, int]) -> None:
    case = make_case(*shape)
    for coefficient in (False, True):
        for e, sums in ((True, True), (True, False), (False, True)):
            case.run(e=e, sums=sums, coefficient=coefficient)
            case.check(e=e, sums=sums, coefficient=coefficient)


@hopper
@pytest.mark.parametrize("programs", [1, 3, 1000])
def test_any_number_of_programs(programs: int) -> None:
    for D in (64, 72, 256, 328):  # 1, 2, 4 and 6 steps: less than, as many as and more than there are stages
        case = make_case(257, D, 5003)
        case.run(programs=programs)
        case.check()


@hopper
@pytest.mark.parametrize("coefficient", [False, True])
def test_slices_of_the_vocabulary(coefficient: bool) -> None:
    case = make_case(257, 200, 5003)
    w = case.w
    for first, last in ((0, 1000), (1000, 1256), (1256, 4000), (4000, 5003)):
        case.w = w[first:last]
        case.run(coefficient=coefficient, first_class=first)
        case.check(coefficient=coefficient, first_class=first)


@hopper
@pytest.mark.parametrize("V", [5003, 5120])
def test_ignored_rows_that_are_not_finite(V: int) -> None:
    case = make_case(300, 200, V)
    case.x[3::7] = torch.inf
    case.x[10::7, ::2] = torch.nan
    case.run(coefficient=True)
    case.x[3::7] = 0  # for the truth
    case.check(coefficient=True)


@hopper
def test_rows_of_a_larger_tensor() -> None:
    """Strides that are not the widths."""
    case = make_case(257, 200, 1000)
    wide_x, wide_w = torch.full((257, 248), torch.nan, device="cuda"), torch.full((1000, 208), torch.nan, device="cuda")
    wide_x[:, 8:208], wide_w[:, :200] = case.x, case.w
    case.x, case.w = wide_x.bfloat16()[:, 8:208], wide_w.bfloat16()[:, :200]
    case.run()
    case.check()


@hopper
@pytest.mark.parametrize("shape", [(1000, 776, 5003), (2048, 328, 40008)])
def test_bitwise_the_same_each_time(shape: tuple[int, int, int]) -> None:
    case = make_case(*shape)
    case.run()
    e, sums = case.e.clone(), case.sums.clone()
    for _ in range(50):
        case.run()
        assert torch.equal(case.e, e)
        assert torch.equal(case.sums, sums)
