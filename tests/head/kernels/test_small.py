"""The small kernels: elementary functions, tokens that count, logits' gradients, what scales stored ones.

On a GPU, or in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from head.kernels.rows import DEVICE, INF, NAN
from lowtide.head.kernels import elementary, stats_logits, stats_rows
from lowtide.head.kernels.elementwise import (
    COLUMNS,
    ROWS_PER_PROGRAM,
    SCALE_BLOCK,
    SELECT_BLOCK,
    bias_sums,
    put_logit_grad,
    scale_,
    select,
    take_counted,
    valid_first,
)
from lowtide.head.kernels.exp_terms import finish_input_grad
from lowtide.head.kernels.gemm import Used
from support import every_pair, relative_error

CLASSES = 50
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy
TINY = [0.0, 1.2e-38, 1e-30, 1e-20, 3e-8, 5.9e-8, 6e-8, 1.2e-7, 1e-7, 1e-6, 1e-5, 1e-3, 0.1, 0.19, 0.21, 0.7, 1.0, 1.7]
HUGE = [3.0, 8.0, 9.5, 16.0, 80.0, 87.0, 103.0, 105.0, 1e3, 1e10, 2.0**64, 3.4e38, INF, NAN]


@triton.jit  # type: ignore[untyped-decorator]
def _each(x_ptr, out_ptr, WHICH: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    if WHICH == "tanh":
        out = elementary.tanh(x)
    elif WHICH == "log1p":
        out = elementary.log1p(x)
    else:
        out = elementary.expm1(x)
    tl.store(out_ptr + at, out)


@pytest.mark.parametrize(("which", "sign"), [("tanh", 1), ("tanh", -1), ("log1p", 1), ("expm1", -1)])
def test_relative_precision(which: str, sign: int) -> None:
    x = sign * torch.tensor(TINY + HUGE, device=DEVICE)
    out = torch.zeros_like(x)
    _each[(1,)](x, out, WHICH=which, N=len(x))
    want = getattr(x.double(), which)()
    torch.testing.assert_close(out.double(), want, rtol=1.5e-6, atol=0, equal_nan=True)
    if which == "tanh":
        assert out.nan_to_num().abs().max() == 1


@every_pair(
    N=[0, 1, 37, SELECT_BLOCK, 2 * SELECT_BLOCK + 1],
    token_weights=[False, True],
    class_weights=[False, True],
    ignore_index=[-100, 3, 2**40],
)
def test_tokens_that_count(N: int, token_weights: bool, class_weights: bool, ignore_index: int) -> None:
    target = torch.randint(0, CLASSES, (N,), device=DEVICE)
    target[::5] = ignore_index
    target[1::7] = CLASSES  # no class
    target[2::11] = -1
    weight = torch.rand(N, device=DEVICE) if token_weights else None
    q = torch.rand(CLASSES, device=DEVICE) if class_weights else None
    y, unit, counted, _ = select(target, CLASSES, ignore_index, weight, q)

    kept = target != ignore_index
    is_class = (target >= 0) & (target < CLASSES)
    inside = target.where(is_class, 0)
    expected = torch.ones(N, device=DEVICE) if weight is None else weight
    assert y.dtype == torch.int32
    assert torch.equal(y.long(), inside.where(kept, -1))
    torch.testing.assert_close(unit, expected.where(is_class, torch.nan).where(kept, 0), rtol=0, atol=0, equal_nan=True)
    one_each = torch.ones(N, device=DEVICE) if q is None else q[inside]
    torch.testing.assert_close(counted.double().sum(), one_each.where(kept, 0).double().sum(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("N", [0, 1, 37, SELECT_BLOCK, 2 * SELECT_BLOCK + 1])
@pytest.mark.parametrize("share", [0, 0.1, 0.5, 1])
def test_valid_tokens_first(N: int, share: float) -> None:
    kept = torch.rand(N, device=DEVICE) < share
    target = torch.randint(0, CLASSES, (N,), device=DEVICE).where(kept, -100)
    chosen = select(target, CLASSES, -100, torch.rand(N, device=DEVICE), None)
    y, unit, index, count = chosen.valid_first()
    order = kept.logical_not().to(torch.uint8).argsort(stable=True)
    assert torch.equal(index, order)
    assert count.tolist() == [int(kept.sum())]
    assert torch.equal(y, chosen.y_N[order])
    assert torch.equal(unit, chosen.unit_N[order])
    same_index, same_count = valid_first(kept)
    assert torch.equal(same_index, index)
    assert torch.equal(same_count, count)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda x: x,
    "shifted": lambda x: x.view(3, 10, -1)[:, :-1],
    "other way round": lambda x: x.view(3, 10, -1).transpose(0, 1),
    "columns": lambda x: x.t().contiguous().t(),
    "three axes": lambda x: x.view(3, 5, 2, -1)[:2, :4, :1],
    "one": lambda x: x[3],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("count", [0, 1, 13, 99])
@pytest.mark.parametrize("first", [0, 4])
def test_hidden_states_of_valid_tokens(layout: Callable[[torch.Tensor], torch.Tensor], count: int, first: int) -> None:
    x = layout(torch.randn(30, 24, device=DEVICE))
    N = x[..., 0].numel()
    index, valid = torch.randperm(N, device=DEVICE), min(count, N)
    flat = x.reshape(N, 24).clone()
    flat[index[valid:]] = NAN
    used = Used(torch.tensor([valid], dtype=torch.int32, device=DEVICE), first)
    part = index[first : first + 12]
    out = torch.full((len(part), 24), NAN, device=DEVICE)
    take_counted(x, part, used, out)
    rows = max(0, min(len(part), valid - first))
    assert torch.equal(out[:rows], flat[part[:rows]])
    assert not out[rows:].nan_to_num().any()  # zeros in the rest of the tile
    assert rows or layout is not LAYOUTS["shifted"] or out.isnan().all()  # nothing is written


@pytest.mark.parametrize("N", [0, 1, SELECT_BLOCK + 13])
@pytest.mark.parametrize(("first", "width"), [(0, CLASSES), (0, 20), (20, 30), (50, 0)])
def test_tokens_that_count_for_a_shard(N: int, first: int, width: int) -> None:
    target = torch.randint(0, CLASSES, (N,), device=DEVICE)
    target[::5] = -100
    target[1::7] = CLASSES  # no class: the first one stands in its place, on the rank that has it
    whole, unit, counted, _ = select(target, CLASSES, -100, None, None)
    y, unit_here, counted_here, _ = select(target, CLASSES, -100, None, None, (first, width, 999))
    here = (whole >= first) & (whole < first + width)
    assert torch.equal(y, (whole - first).where(here, 999).where(whole >= 0, -1).int())
    torch.testing.assert_close(unit_here, unit, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(counted_here, counted)


SIZES = [(0, 5), (1, 1), (17, COLUMNS + 3), (ROWS_PER_PROGRAM, 7), (ROWS_PER_PROGRAM + 1, 2 * COLUMNS)]


@every_pair(
    size=SIZES,
    dtype=[torch.float32, torch.bfloat16],
    scaled=[False, True],
    summed=[False, True],
    form=["contiguous", "a column for all", "transposed", "one number"],
)
def test_a_logit_gradient(size: tuple[int, int], dtype: torch.dtype, scaled: bool, summed: bool, form: str) -> None:
    C, V = size
    g = {
        "contiguous": torch.randn(C, V),
        "a column for all": torch.randn(C, 1).expand(C, V),
        "transposed": torch.randn(V, C).T,
        "one number": torch.randn(()).expand(C, V),
    }[form].to(DEVICE)
    scale = torch.tensor(0.7, device=DEVICE) if scaled else None
    held = torch.full((C, 2 * V + 8), 5.0, dtype=dtype, device=DEVICE)
    sums = bias_sums(C + 2, V, torch.device(DEVICE)) + 1 if summed else None
    put_logit_grad(g, scale, held[:, 4 : V + 4], sums)
    expected = g if scale is None else g * scale
    cut = 2**-7 if DEVICE == "cpu" and dtype == torch.bfloat16 else 0  # the interpreter cuts off where a GPU rounds
    torch.testing.assert_close(held[:, 4 : V + 4], expected.to(dtype), rtol=cut, atol=0)
    assert (held[:, :4] == 5).all()
    assert (held[:, V + 4 :] == 5).all()
    if sums is not None:
        torch.testing.assert_close((sums - 1).sum(0), expected.sum(0), rtol=1e-5, atol=1e-4)


@every_pair(
    n=[0, 1, 37, SCALE_BLOCK, 2 * SCALE_BLOCK + 1],
    dtype=[torch.float32, torch.float16, torch.float64],
    value=[1.0, 0.0, -2.5, 1 / 3, INF, NAN],
)
def test_a_stored_gradient_is_scaled_in_place(n: int, dtype: torch.dtype, value: float) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    whole = torch.randn(n + 8, device=DEVICE).to(dtype)
    before = whole.clone()
    factor = torch.tensor(value, dtype=wide, device=DEVICE)
    scale_(whole[4 : n + 4], factor)
    expected = (before[4 : n + 4].to(wide) * factor).to(dtype)
    torch.testing.assert_close(whole[4 : n + 4], expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(whole[:4], before[:4])
    assert torch.equal(whole[n + 4 :], before[n + 4 :])


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter's")
@pytest.mark.parametrize("room", [0, 5])  # for rows of a chunk that a shorter last one has not
def test_entries_of_statistics_are_rounded_once(room: int) -> None:
    """What the entry of each of several targets loses in a narrow buffer is found again in the input's gradient."""
    N, K, V, D = 9, 4, 40, 24
    x, w, ids = torch.randn(N, D).bfloat16(), torch.randn(V, D).bfloat16(), torch.randint(0, V, (N, K))
    ids[:, 2] = ids[:, 1]
    logp = (x.double() @ w.double().T).log_softmax(1)
    g = torch.randn(N, K)
    entries = stats_logits.Entries.empty(N + room, K, x.device, heat=False, even=False)
    known = stats_rows.RowStats(
        lse=(x.double() @ w.double().T).logsumexp(1).float(), top=logp.argmax(1), top_logprob=logp.amax(1).float(),
        logprob=logp.gather(1, ids).float(),
    )  # fmt: skip
    stats_rows.prepare_stats(known, stats_rows.RowStats(logprob=g), ids.int(), x, entries, V)
    softmax_part = (logp.exp() * -g.double().sum(1, keepdim=True)) / entries.s[:N, None]
    e = softmax_part.bfloat16()
    stats_rows.put_entries(e, entries, 0)
    dx = torch.empty(N, D)
    finish_input_grad(e.float() @ w.float(), dx, w, entries.s, entries.id[:, 1:], entries.rest)
    exact = softmax_part.scatter_add(1, ids, g.double() / entries.s[:N, None])
    torch.testing.assert_close(e.double(), exact, rtol=2**-7, atol=1e-6)  # the interpreter cuts digits off
    rounded = e.double().scatter(1, ids, exact.gather(1, ids))
    want = entries.s[:N, None] * (rounded @ w.double())
    assert relative_error(dx, want) < 5e-6
