"""The kernels that turn two sides' logits into divergences and gradients, in Triton's interpreter without a GPU."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from fuzz.references import divergence_of
from head.kernels.rows import DEVICE, NARROW, padded
from lowtide.head.kernels.gemm import LogitTransform
from lowtide.head.kernels.pair_rows import Pair, pair_gradient, pair_logsumexps, pair_rows, pair_sums
from support import relative_error

LOOSE = {"wide": 5e-6, "bfloat16": 2**-8 if DEVICE == "cuda" else 2**-7, "float16": 2**-10}  # the interpreter cuts off


class Kind(NamedTuple):
    name: str
    beta: float


class RowNumbers(NamedTuple):
    value: Tensor
    lse: Tensor
    other_lse: Tensor
    pivot: Tensor


KINDS = [Kind("forward_kl", 0.5), Kind("reverse_kl", 0.5), Kind("jsd", 0.1), Kind("tv", 0.5)]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.name}-{kind.beta}")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy


def sides(C: int, V: int, U: int | None = None, spread: float = 2.0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(C + V)
    z, other = (spread * torch.randn(C, n, generator=g) for n in (V, U or V))
    return z.to(DEVICE), other.to(DEVICE)


def options(V: int, U: int | None = None) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    bias, other = torch.randn(V, generator=g), torch.randn(U or V, generator=g)
    return {"bias_V": bias.to(DEVICE), "teacher_bias_U": other.to(DEVICE), "scale": torch.tensor(0.6, device=DEVICE)}


ALL = tuple(options(1))


def run(z: Tensor, other: Tensor, kind: Kind, gradient: Any = "wide", **kwargs: Any) -> tuple[RowNumbers, Tensor]:
    """Return the numbers of the rows and the gradient, an fp16 one lifted; poison all around must stay as it is.

    The gradient comes both ways, after the rows' numbers and with the value: they must agree.
    """
    rows, separate = run_one_way(z, other, kind, gradient, at_once=False, **kwargs)
    value, at_once = run_one_way(z, other, kind, gradient, at_once=True, **kwargs)
    torch.testing.assert_close(value.value, rows.value, rtol=3e-6, atol=3e-7, equal_nan=True)  # compiled apart
    assert torch.equal(at_once.isnan(), separate.isnan()) or not z.abs().max() < 1e30
    size, floor = separate.nan_to_num().norm(dim=1), 5e-6 * (1 + value.value.nan_to_num(0, 0, 0))
    for name in ("factor_C", "scale"):
        floor = floor * kwargs.get(name, torch.ones((), device=DEVICE)).abs()
    away = (at_once - separate).nan_to_num(0, 0, 0).norm(dim=1)
    near = 5e-3 if kind.name == "tv" else 2 * LOOSE[gradient]  # where s is t but for rounding, its sign is luck
    assert (away <= near * size + floor).all()
    return rows, at_once if z[0, 0] < 0 else separate  # either is compared with the truth


def run_one_way(
    z: Tensor, other: Tensor, kind: Kind, gradient: Any, *, at_once: bool, **kwargs: Any
) -> tuple[RowNumbers, Tensor]:
    (C, V), U = z.shape, other.shape[1]
    room, other_room = padded(z), padded(other, -(-U // 8) * 8 + 16)
    before, other_before = room.clone(), other_room.clone()
    pair = pair_of(room[1:-1, :V], other_room[1:-1, :U], kind, kwargs)
    factor, pad = kwargs.get("factor_C"), room.shape[1]
    out_room = (
        room if gradient == "wide" else torch.full((C + 2, pad + 8), torch.nan, device=DEVICE).to(NARROW[gradient])
    )
    out = out_room[1:-1, :V]
    if at_once:
        value = torch.full((C,), torch.nan, device=DEVICE)
        lift = pair_gradient(pair, out, {"value": value}, factor)
        rows = RowNumbers(value, value, value, value)
    else:
        numbers = pair_rows(pair)
        rows = RowNumbers(**numbers)
        assert torch.equal(room.view(torch.int32), before.view(torch.int32))
        lift = pair_gradient(pair, out, numbers, factor)
    assert torch.equal(other_room.view(torch.int32), other_before.view(torch.int32))
    assert out_room[[0, -1]].isnan().all()
    assert (out_room[1:-1, V:pad] == 0).all()
    assert out_room[1:-1, pad:].isnan().all()
    if gradient != "wide":
        assert torch.equal(room.view(torch.int32), before.view(torch.int32))
    g = out.float()
    if lift is None:
        return rows, g
    assert g.nan_to_num().abs().max() <= 2**14
    return rows, g * lift[:, None]


def pair_of(z: Tensor, other: Tensor, kind: Kind, kwargs: dict[str, Any]) -> Pair:
    """Return both sides with a test's options: soft caps are of the logits before ``scale``."""
    scale = kwargs.get("scale")
    caps = []
    for name in ("softcap", "teacher_softcap"):
        cap = kwargs.get(name)
        caps.append(None if cap is None else torch.tensor(float(cap), device=DEVICE) * (1 if scale is None else scale))
    student = LogitTransform(kwargs.get("bias_V"), scale, caps[0])
    teacher = LogitTransform(kwargs.get("teacher_bias_U"), scale, caps[1])
    return Pair(z, other, *kind, kwargs.get("kept_C"), student, teacher, kwargs.get("longest_block"))


def logprobs(z: Tensor, bias: Tensor | None, scale: Tensor | None, width: int, softcap: float | None = None) -> Tensor:
    z = z if bias is None else z + bias.double()
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    z = z if scale is None else z * scale.double()
    z = torch.nn.functional.pad(z, (0, width - z.shape[1]), value=-torch.inf)
    return z.log_softmax(1)


def truth(z: Tensor, other: Tensor, kind: Kind, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Return the divergence in float64 from its definition, and autograd's gradient by the products."""
    leaf, width = z.double().requires_grad_(), max(z.shape[1], other.shape[1])
    a = logprobs(leaf, kwargs.get("bias_V"), kwargs.get("scale"), width, kwargs.get("softcap"))
    cap = kwargs.get("teacher_softcap")
    b = logprobs(other.double(), kwargs.get("teacher_bias_U"), kwargs.get("scale"), width, cap)
    # -inf minus -inf is NaN on its way back, even where it is not taken: a floor, whose exp is 0 too
    if kind.name == "jsd":
        value = mixture_divergence(a, b, kind.beta)
    else:
        value = divergence_of(a.clamp(min=-1e5), b.clamp(min=-1e5), kind.name)
    factor = kwargs.get("factor_C", torch.ones(len(z), device=DEVICE)).double()
    (g,) = torch.autograd.grad((value * factor).sum(), leaf)
    return value.detach(), g


def mixture_divergence(a: Tensor, b: Tensor, beta: float) -> Tensor:
    """The jsd from entropies: that of the mixture above the mixture of the two."""
    s, t = a.exp(), b.exp()
    m = beta * t + (1 - beta) * s

    def entropy(p: Tensor) -> Tensor:
        return -(p * torch.where(p > 0, p, 1).log()).sum(1)

    return entropy(m) - beta * entropy(t) - (1 - beta) * entropy(s)


def check(
    z: Tensor, other: Tensor, kind: Kind, gradient: str = "wide", near: float = 5e-6, block: int = 16, **kwargs: Any
) -> None:
    rows, g = run(z, other, kind, gradient, longest_block=block, **kwargs)
    value, want = truth(z, other, kind, **kwargs)
    torch.testing.assert_close(rows.value.double(), value, rtol=near, atol=2e-7)
    for name, cap, side, found in (
        ("bias_V", "softcap", z, rows.lse),
        ("teacher_bias_U", "teacher_softcap", other, rows.other_lse),
    ):
        scaled = side.double() + kwargs.get(name, torch.zeros(1, device=DEVICE)).double()
        if cap in kwargs:
            scaled = kwargs[cap] * torch.tanh(scaled / kwargs[cap])
        lse = (scaled * kwargs.get("scale", torch.ones((), device=DEVICE)).double()).logsumexp(1)
        torch.testing.assert_close(found.double(), lse, rtol=1e-6, atol=1e-6)
    for got, true, v in zip(g, want, value, strict=True):  # row by row, so that a large row hides no other
        floor = 3e-7 * (1 + v)  # what float32 holds of a logarithm that is compared with the row's mean of them
        assert (got.double() - true).norm() <= max(near, LOOSE[gradient]) * true.norm() + floor


@pytest.mark.parametrize(
    ("V", "U", "block", "gradient"),
    [
        *((V, V, block, "wide") for V, block in ((1, 4096), (2, 8), (37, 16), (1003, 256), (96, 32))),
        *((37, 37, 16, gradient) for gradient in NARROW),
        (1, 1, 4096, "float16"),
        (2, 2, 8, "bfloat16"),
        (96, 96, 32, "bfloat16"),
        (1003, 1003, 256, "float16"),
    ],
)
@every_kind
def test_sizes(kind: Kind, V: int, U: int, block: int, gradient: str) -> None:
    z, other = sides(2, V, U)
    check(z, other, kind, gradient, block=block, **options(V, U))
    if gradient == "wide":  # what is stored, and how, does not depend on the options
        check(z, other, kind, gradient, block=block)


FACTOR = torch.tensor([-1 / 3, 0.0, 1e-2, 5.0], device=DEVICE)


@pytest.mark.parametrize(
    ("C", "V", "spread", "caps", "gradient", "names"),
    [
        *((3, 37, 2.0, {}, "wide", (name,)) for name in ("bias_V", "teacher_bias_U", "scale")),
        (2, 45, 4.0, {"softcap": 3.0}, "wide", ()),
        (2, 45, 4.0, {"softcap": 3.0}, "float16", ALL),
        (2, 45, 4.0, {"teacher_softcap": 2.0}, "wide", ()),
        (2, 45, 4.0, {"teacher_softcap": 2.0}, "bfloat16", ALL),
        # tanh is all but 1: its slope must not cancel
        *((2, 45, 4.0, {"softcap": 0.4, "teacher_softcap": 30}, gradient, ALL) for gradient in LOOSE),
        (4, 37, 2.0, {"factor_C": FACTOR}, "wide", ALL),
    ],
)
@every_kind
def test_options(
    kind: Kind, C: int, V: int, spread: float, caps: dict[str, Any], gradient: str, names: tuple[str, ...]
) -> None:
    check(*sides(C, V, spread=spread), kind, gradient, **caps, **{name: options(V)[name] for name in names})


@pytest.mark.parametrize(("gradient", "poison"), [*((g, torch.nan) for g in LOOSE), ("wide", torch.inf)])
@every_kind
def test_rows_that_are_not_kept_are_not_read(kind: Kind, gradient: str, poison: float) -> None:
    z, other = sides(5, 37)
    kept = torch.tensor([True, False, True, False, True], device=DEVICE)
    z[1], other[3] = poison, poison
    rows, g = run(z, other, kind, gradient, kept_C=kept, longest_block=16)
    for numbers in rows:
        assert (numbers[~kept] == 0).all()
    assert (g[~kept] == 0).all()
    clean = run(z[kept], other[kept], kind, gradient, longest_block=16)
    for got, want in zip((*rows, g), (*clean[0], clean[1]), strict=True):
        assert torch.equal(got[kept], want)


@pytest.mark.parametrize("side", [0, 1])
@every_kind
def test_rows_that_are_no_numbers(kind: Kind, side: int) -> None:
    both = sides(6, 37)
    both[side][1, 20], both[side][2, 3], both[side][4] = torch.nan, torch.inf, -torch.inf
    rows, g = run(*both, kind, longest_block=16)
    bad = torch.tensor([False, True, True, False, True, False], device=DEVICE)
    assert torch.equal(rows.value.isnan(), bad)
    assert torch.equal((rows.lse, rows.other_lse)[side].isnan(), bad)
    assert torch.equal(g.isnan().all(1), bad)
    assert torch.equal(g.isnan().any(1), bad)


@every_kind
def test_huge_logits(kind: Kind) -> None:
    z, other = sides(2, 53, spread=100.0)
    z += 1e4  # of which half of the digits are lost, in the products already
    for gradient in LOOSE:
        check(z, other, kind, gradient, near=2e-3)
    rows, g = run(3e34 * z, other, kind)
    assert not rows.value.isnan().any()
    assert not g.isnan().any() or kind.name in ("forward_kl", "reverse_kl")


@every_kind
def test_a_student_close_to_its_teacher(kind: Kind) -> None:
    """The divergence is far below the rounding of a sum of exponentials: no term may cancel."""
    _, other = sides(3, 1003)
    shift = 1e-3 * torch.randn(3, 1003, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    z = other + shift + 0.125  # what is the same in all classes shifts the logsumexp alone
    rows, g = run(z, other, kind, longest_block=256)
    value, want = truth(z, other, kind)
    assert kind.name == "tv" or value.max() < 1e-6
    assert relative_error(rows.value, value) < 1e-3
    assert relative_error(g, want) < 2e-3
    same, g = run(other, other, kind, longest_block=256)
    assert (same.value == 0).all()
    assert g.abs().max() < 1e-7


@pytest.mark.parametrize(("spread", "scale"), [(0.01, 3e-5), (0.01, 50.0), (2.0, 1.0), (60.0, 3e-5), (60.0, 50.0)])
@every_kind
def test_a_lifted_row_fits_fp16(kind: Kind, spread: float, scale: float) -> None:
    z, other = sides(2, 203, spread=spread / scale)
    rows, g = run(z, other, kind, "float16", scale=torch.tensor(scale, device=DEVICE), longest_block=64)
    _, want = run(z, other, kind, "wide", scale=torch.tensor(scale, device=DEVICE), longest_block=64)
    assert rows.value.isfinite().all()
    for got, true in zip(g, want, strict=True):
        assert (got - true).norm() <= 2**-10 * true.norm() + 1e-7 * scale


@pytest.mark.parametrize(("C", "V"), [(2, 4099), *([(300, 50257), (300, 131072)] if DEVICE == "cuda" else [])])
def test_no_thread_writes_over_what_another_still_reads(C: int, V: int) -> None:
    """Rows of many blocks; the interpreter, which has no threads, runs through it only."""
    z, other = sides(C, V)
    for gradient in LOOSE:
        rows, g = run(z, other, KINDS[0], gradient)
        s, t = z.double().softmax(1), other.double().softmax(1)
        assert relative_error(g, s - t) < LOOSE[gradient]
        kl = torch.nn.functional.kl_div(s.log(), t, reduction="none").sum(1)
        assert relative_error(rows.value, kl) < 2e-6


@pytest.mark.parametrize("edges", [(0, 16, 40, 61), (0, 0, 61, 61), (0, 8, 24, 24, 61)])
@pytest.mark.parametrize("with_options", [False, True])
@every_kind
def test_classes_on_several_ranks(kind: Kind, with_options: bool, edges: tuple[int, ...]) -> None:
    """Each part's sums, put together, are the whole's; some parts have no class, or none that is possible in a row."""
    z, other = sides(4, edges[-1])
    kwargs: dict[str, Any] = {"longest_block": 16}
    if with_options:
        kept = torch.tensor([True, False, True, True], device=DEVICE)
        kwargs |= {**options(edges[-1]), "softcap": 3.0, "kept_C": kept}
        z[1] = torch.nan
    else:
        z[0, :40] = other[0, :40] = -torch.inf  # of the first ranks'
        z[2, -1], other[3, 1] = torch.nan, torch.inf
    parts = []
    for first, stop in pairwise(edges):
        rooms = (padded(x[:, first:stop].contiguous(), 64)[1:-1, : stop - first] for x in (z, other))
        of_part = {name: x[first:stop] if "bias" in name else x for name, x in kwargs.items()}
        parts.append(pair_of(*rooms, kind, of_part))
    whole = pair_of(padded(z, 64)[1:-1, : edges[-1]], padded(other, 64)[1:-1, : edges[-1]], kind, kwargs)
    value, *known = pair_rows(whole).values()
    lse = torch.stack([pair_logsumexps(part) for part in parts]).logsumexp(0)
    sums = torch.stack([pair_sums(part, lse) for part in parts]).sum(0)
    kept = slice(None) if not with_options else kwargs["kept_C"]
    torch.testing.assert_close(lse[:, kept], torch.stack(known[:2])[:, kept], rtol=1e-6, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(sums[0], value, rtol=3e-6, atol=3e-7, equal_nan=True)
    if kind.name != "forward_kl":
        pivot = sums[1] / sums[2]
        torch.testing.assert_close(pivot[kept], known[2][kept], rtol=3e-6, atol=3e-7, equal_nan=True)
