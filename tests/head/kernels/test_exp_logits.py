"""The GEMM that leaves exponentials, against float64: bf16 on a GPU, else float32 in Triton's interpreter."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from head.kernels.rows import DEVICE, DTYPE, INF, NAN, POISON, UNIT, apart, ordered, unordered
from lowtide.head.kernels.configs import GemmConfig
from lowtide.head.kernels.exp_logits import ExpRows, exp_tile, shifted_exp_logits
from lowtide.head.kernels.gemm import LogitTransform, gemm_tiles, tiles_across
from lowtide.kernel_launch import multiprocessors

SMALL = {"rows": 16, "columns": 32, "depth": 16, "group": 2, "stages": 1, "warps": 4}
CONFIGS = [GemmConfig()] if DEVICE == "cuda" else [GemmConfig(**SMALL, pieces=1), GemmConfig(**SMALL, pieces=2)]
CONFIG = CONFIGS[-1]
PROGRAMS = multiprocessors(torch.device(DEVICE))
NEAR = 2e-5 if DEVICE == "cuda" else 3e-6  # of float32 sums
NEAR_E = 2**-8 if DEVICE == "cuda" else NEAR
OPTIONS = ["bias_V", "scale", "softcap"]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy

each_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"pieces{c.pieces}")


class Batch(NamedTuple):
    x: Tensor
    w: Tensor
    reference: Tensor
    y: Tensor

    def rows(self, keep: Tensor | slice) -> Batch:
        return Batch(self.x[keep], self.w, self.reference[keep], self.y[keep])


class Result(NamedTuple):
    e: Tensor | None
    sums: Tensor | None  # [C, P]


def batch(C: int, V: int, D: int, *, size: float | None = None) -> Batch:
    """Return random operands; with a size, of multiples of a power of two, so that float32 logits are exact."""
    g = torch.Generator().manual_seed(C * V + D)
    if size is None:
        x, w = torch.randn(C, D, generator=g), 2 * torch.randn(V, D, generator=g) / D**0.5
    else:
        x, w = (torch.randint(-8, 9, shape, generator=g) / 4 for shape in ((C, D), (V, D)))
        x *= size
    y = torch.randint(0, V, (C,), generator=g, dtype=torch.int32)
    y[0], y[-1] = 0, V - 1
    x, w, y = apart(x), apart(w), y.to(DEVICE)
    t = (x.double() * w.double()[y.long()]).sum(1).float()
    return Batch(x, w, t + 0.5 * torch.randn(C, generator=g).to(DEVICE), y)


def options(V: int, names: tuple[str, ...]) -> dict[str, Any]:
    g = torch.Generator().manual_seed(1)
    values = {
        "bias_V": torch.randn(V, generator=g).to(DEVICE),
        "scale": torch.tensor(-0.7, device=DEVICE),
        "softcap": 3.0,
    }
    return {name: values[name] for name in names}


def logits(b: Batch, bias_V: Tensor | None = None, scale: Tensor | None = None, softcap: float | None = None) -> Tensor:
    z = b.x.double() @ b.w.double().T
    if bias_V is not None:
        z = z + bias_V.double()
    if scale is not None:
        z = z * scale.double()
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def at_target(b: Batch, first_class: int = 0) -> Tensor:
    return torch.arange(len(b.w), device=DEVICE) + first_class == b.y[:, None]


def truth(
    b: Batch, reference: Tensor | None = None, coefficient: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Return E [C, V], and what its rows sum up to before the cap's slope."""
    z = logits(b, **kwargs)
    e = (z - (b.reference if reference is None else reference).double()[:, None]).exp().where(~at_target(b), 0)
    cap = kwargs.get("softcap")
    stored = e if cap is None else e * (1 - (z / cap) ** 2)
    if coefficient is not None:
        stored = stored.where(~at_target(b), coefficient.double()[:, None])
    return stored, e.sum(1)


def e_room(C: int, V: int) -> Tensor:
    return torch.full((C + 2, -(-V // UNIT) * UNIT + UNIT), POISON, dtype=DTYPE, device=DEVICE)


def around_is_poison(room: Tensor, width: int) -> bool:
    return bool((room[[0, -1]] == POISON).all() and (room[:, width:] == POISON).all())


def stored_width(V: int) -> int:
    """Return how far a row of E is written: TMA writes units of 16 bytes, and rows are as long."""
    return -(-V // UNIT) * UNIT if DEVICE == "cuda" else V


def run(
    b: Batch, config: GemmConfig = CONFIG, *, e: bool = True, sums: bool = True,
    coefficient_C: Tensor | None = None, first_class: int = 0,
    **kwargs: Any,
) -> Result:  # fmt: skip
    """Return what the kernel wrote, after a look at what stands around it."""
    C, V = len(b.x), len(b.w)
    P = tiles_across(V, config)
    room = e_room(C, V)
    narrow = torch.full((C + 2, P + 3), POISON, device=DEVICE)
    s = narrow[1 : C + 1, :P]
    rows = ExpRows.of(b.reference, b.y, s if sums else None, coefficient_C, first_class)
    e_CV = room[1 : C + 1, :V] if e else None
    gemm_tiles(exp_tile, b.x, b.w, e_CV, rows, LogitTransform(**kwargs), config, PROGRAMS)
    assert around_is_poison(room, stored_width(V))
    assert around_is_poison(narrow, P)
    return Result(room[1 : C + 1, :V] if e else None, s if sums else None)


def assert_rows_close(got: Tensor | None, want: Tensor, tolerance: float) -> None:
    """Row by row, so that a large row hides no other; exact where a row is 0."""
    assert got.shape == want.shape
    error, norm = (got.double() - want).norm(dim=-1), want.norm(dim=-1)
    assert (error <= tolerance * norm).all(), (error / norm).max()


def assert_sums_close(got: Tensor | None, want_C: Tensor, size_C: Tensor | None = None) -> None:
    error = (got.double().sum(1) - want_C).abs()
    assert (error <= NEAR * (want_C if size_C is None else size_C)).all(), error.max()


SIZES = [(1, 1, 1), (3, 2, 1), (16, 32, 4), (17, 37, 5), (33, 64, 3), (50, 100, 9)]  # C, V, D / UNIT
# depths that are no multiple of 16 bytes, in rows that are
SIZES += [(5, 37, D / UNIT) for D in (1, 3, 2 * UNIT + 1)]


@each_config
@pytest.mark.parametrize(("C", "V", "D"), SIZES + ([(300, 1003, 25), (513, 512, 32)] if DEVICE == "cuda" else []))
def test_sizes(C: int, V: int, D: float, config: GemmConfig) -> None:
    b = batch(C, V, round(D * UNIT))
    got = run(b, config)
    e, total = truth(b)
    assert_rows_close(got.e, e, NEAR_E)
    assert_sums_close(got.sums, total)


@pytest.mark.parametrize("V", [37, 64])
@pytest.mark.parametrize("coefficient", [False, True])
@pytest.mark.parametrize("names", [n for k in range(4) for n in itertools.combinations(OPTIONS, k)], ids="+".join)
def test_every_combination_of_options(names: tuple[str, ...], coefficient: bool, V: int) -> None:
    b, kwargs = batch(19, V, 5 * UNIT), options(V, names)
    c = torch.linspace(-2, 2, 19, device=DEVICE).to(DTYPE).float() if coefficient else None
    got = run(b, coefficient_C=c, **kwargs)
    e, total = truth(b, coefficient=c, **kwargs)
    assert_rows_close(got.e, e, NEAR_E)
    assert_sums_close(got.sums, total)
    if c is not None:
        assert torch.equal(got.e[at_target(b)].float(), c)


@each_config
@pytest.mark.parametrize("names", [(), tuple(OPTIONS)], ids=["plain", "all"])
def test_sums_alone_are_the_same_sums(names: tuple[str, ...], config: GemmConfig) -> None:
    b, kwargs = batch(19, 37, 5 * UNIT), options(37, names)
    whole = run(b, config, **kwargs)
    alone = run(b, config, e=False, **kwargs)
    assert torch.equal(alone.sums, whole.sums)
    e = run(b, config, sums=False, **kwargs).e
    assert torch.equal(e, whole.e)


@pytest.mark.parametrize("edges", [(0, 37, 74, 100), (0, 32, 64, 100), (0, 1, 99, 100)])
@pytest.mark.parametrize("names", [(), tuple(OPTIONS)], ids=["plain", "all"])
def test_slices_of_the_vocabulary(names: tuple[str, ...], edges: tuple[int, ...]) -> None:
    """The target has its coefficient, or 0 without one, in the slice that holds it, in the others it is nowhere."""
    V = 100
    b, kwargs = batch(40, V, 5 * UNIT), options(V, names)
    b.y[:6] = torch.tensor([0, 36, 37, 63, 64, 99])
    c = torch.linspace(-2, 2, 40, device=DEVICE).to(DTYPE).float() if names else None
    want, total = truth(b, coefficient=c, **kwargs)
    bias, sums = kwargs.pop("bias_V", None), torch.zeros(40, 1, device=DEVICE)
    for first, end in itertools.pairwise(edges):
        part = b._replace(w=b.w[first:end])
        of_part = kwargs | ({} if bias is None else {"bias_V": bias[first:end]})
        got = run(part, coefficient_C=c, first_class=first, **of_part)
        assert_rows_close(got.e, want[:, first:end], NEAR_E)
        here = at_target(part, first)
        assert torch.equal(
            got.e[here].float(), torch.zeros(40, device=DEVICE)[here.any(1)] if c is None else c[here.any(1)]
        )
        sums += got.sums.sum(1, keepdim=True)
    assert_sums_close(sums, total)


@each_config
@pytest.mark.parametrize("coefficient", [False, True])
@pytest.mark.parametrize("names", [(), tuple(OPTIONS)], ids=["plain", "all"])
@pytest.mark.parametrize("fraction", [0, 1])  # of a tile, beyond whole ones
def test_ignored_rows(fraction: int, names: tuple[str, ...], coefficient: bool, config: GemmConfig) -> None:
    """They are 0 beside any finite hidden state; NaN stays in them, where it is not 0 too. No other row sees it."""
    V = 2 * config.columns + 5 * fraction
    b, kwargs = batch(8, V, 5 * UNIT), options(V, names)
    kwargs["coefficient_C"] = torch.full((8,), 0.5, device=DEVICE) if coefficient else None
    clean = run(b, config, **kwargs)
    for i, value in ((1, NAN), (2, INF), (3, 1e5), (4, 0.0)):
        b.x[i] = value
        b.y[i] = -1
        b.reference[i] = NAN if i % 2 else 0.0
    got = run(b, config, **kwargs)
    zero_for_sure = [1, 2, 3, 4] if fraction or coefficient else [3, 4]
    for g, c in zip(got, clean, strict=True):
        assert torch.equal(g[[0, 5, 6, 7]], c[[0, 5, 6, 7]])
        if g.shape[1] == V or fraction == 0:
            assert (g[zero_for_sure] == 0).all()
    assert (got.sums[zero_for_sure] == 0).all()


@pytest.mark.parametrize("lead", [-30.0, 20.0, 60.0])
def test_sums_keep_their_relative_precision_far_from_1(lead: float) -> None:
    b = batch(6, 37, 5 * UNIT)
    far = b._replace(reference=b.reference + lead)
    got = run(far)
    e, total = truth(far)
    assert_rows_close(got.e, e, 2 * NEAR_E)
    loose = torch.full_like(total, 5) * total  # the exponent itself is rounded: 60 / 2**24
    assert_sums_close(got.sums, total, loose)


class Shifted(NamedTuple):
    e: Tensor
    sums: Tensor
    highest: Tensor


def run_shifted(
    b: Batch, rows: list[int], *, programs: int = PROGRAMS,
    config: GemmConfig = CONFIG, **kwargs: Any,
) -> Shifted:  # fmt: skip
    """Return what the kernel wrote into buffers of poison, after a look at what stands around them."""
    C, V = len(b.x), len(b.w)
    P = tiles_across(V, config)
    room = e_room(C, V)
    narrow = torch.full((C + 2, P + 3), POISON, device=DEVICE)
    t = logits(b, **kwargs).gather(1, b.y.clamp(min=0).long()[:, None])[:, 0]
    highest = ordered(t)
    listed = torch.full((C,), 2**30, dtype=torch.int32, device=DEVICE)  # read beyond the count, it would crash
    listed[: len(rows)] = torch.tensor(rows, dtype=torch.int32)
    count = torch.tensor([len(rows)], dtype=torch.int32, device=DEVICE)
    shifted_exp_logits(
        b.x, b.w, room[1 : C + 1, :V], ExpRows.of(highest, b.y, narrow[1 : C + 1, :P]), (listed, count),
        LogitTransform(**kwargs), config, programs,
    )  # fmt: skip
    others = torch.ones(C, dtype=torch.bool, device=DEVICE)
    others[rows] = False
    for part, width in ((room, V), (narrow, P)):
        assert around_is_poison(part, width)
        assert (part[1:-1][others] == POISON).all()
    assert torch.equal(highest[others], ordered(t)[others])
    return Shifted(room[1:-1, :V], narrow[1:-1, :P], highest)


@each_config
@pytest.mark.parametrize("size", [1.0, 256.0])  # logits of tens and of thousands
@pytest.mark.parametrize("names", [n for k in range(4) for n in itertools.combinations(OPTIONS, k)], ids="+".join)
def test_listed_rows_are_relative_to_their_highest_logit(
    names: tuple[str, ...], size: float, config: GemmConfig
) -> None:
    C, V = 21, 37
    b, kwargs = batch(C, V, 5 * UNIT, size=size), options(V, names)
    kwargs |= {"scale": torch.tensor(-0.5, device=DEVICE)} if "scale" in names else {}
    kwargs |= {"bias_V": (kwargs["bias_V"] * 16).round() / 16} if "bias_V" in names else {}
    rows = [20, 3, 0, *range(5, 19)]
    got = run_shifted(b, rows, config=config, **kwargs)
    highest = logits(b, **kwargs).amax(1).float()
    if "softcap" not in names:  # exact, otherwise
        assert torch.equal(got.highest[rows], ordered(highest)[rows])
    reference = unordered(got.highest)
    torch.testing.assert_close(reference[rows], highest[rows], rtol=1e-6, atol=1e-6)
    e, total = truth(b, reference=reference, **kwargs)
    flat = 1e-6 if "softcap" in names else 0  # what 1 - (z / cap)**2 leaves at the cap
    error = (got.e[rows].double() - e[rows]).norm(dim=1)
    assert (error <= NEAR_E * e[rows].norm(dim=1) + flat * total[rows] + 1e-37).all()
    torch.testing.assert_close(got.sums[rows].double().sum(1), total[rows], rtol=NEAR, atol=1e-37)


def test_the_order_of_the_list_changes_no_bit() -> None:
    b = batch(70, 100, 5 * UNIT, size=256.0)
    rows = list(range(0, 70, 2))
    want = run_shifted(b, rows)
    g = torch.Generator().manual_seed(0)
    for _ in range(2):
        order = torch.randperm(len(rows), generator=g).tolist()
        for got, w in zip(run_shifted(b, [rows[i] for i in order], programs=3), want, strict=True):
            assert torch.equal(got, w)
