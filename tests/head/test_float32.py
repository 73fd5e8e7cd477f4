"""Float32 heads whose GEMMs are bfloat16 GEMMs of pieces: the arithmetic against float64, by emulation on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide import (
    HeadOptions,
    linear_apply,
    linear_cross_entropy,
    linear_divergence,
    linear_logprobs,
    linear_token_stats,
    plan_divergence,
    plan_head,
)
from lowtide.head import backends, nodes
from lowtide.head.backends import float32_pieces, splits_float32
from lowtide.head.call import Head
from lowtide.head.planner import MIB
from lowtide.head.ranks.parallel import Alone
from support import doubled, head, recorded_heads, relative_error, split_float32

BF16, CUDA = torch.bfloat16, torch.device("cuda")
UNIT = 2.0**-24  # float32's rounding error


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """See `split_float32`."""
    return partial(split_float32, monkeypatch)


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> list[Head]:
    """See `recorded_heads`."""
    return recorded_heads(monkeypatch)


# Of a head: each function's value, one number a token or one, from hidden states, weight, bias and targets.
Value = Callable[..., Tensor]


def focal(z: Tensor, y: Tensor) -> Tensor:
    logp = z.log_softmax(-1).gather(-1, y[:, None])[:, 0]
    return (1 - logp.exp()) ** 2 * logp


def statistics(x: Tensor, w: Tensor, b: Tensor | None, y: Tensor, **more: Any) -> Tensor:
    if x.dtype == torch.float64:
        z = F.linear(x, w, b)
        logp = z.log_softmax(-1)
        chosen = logp.gather(-1, y[:, None])[:, 0]
        return chosen - 0.3 * (logp.exp() * logp).sum(-1) + 0.1 * z.logsumexp(-1)
    found = linear_token_stats(x, w, y, want=("logprob", "entropy", "lse"), linear_bias=b, **more)
    assert found.logprob is not None
    assert found.entropy is not None
    assert found.lse is not None
    return found.logprob + 0.3 * found.entropy + 0.1 * found.lse


def smoothed(x: Tensor, w: Tensor, b: Tensor | None, y: Tensor, **more: Any) -> Tensor:
    if x.dtype == torch.float64:
        return F.cross_entropy(F.linear(x, w, b), y, label_smoothing=0.1)
    return linear_cross_entropy(x, w, y, linear_bias=b, label_smoothing=0.1, **more)


def each_token(x: Tensor, w: Tensor, b: Tensor | None, y: Tensor, **more: Any) -> Tensor:
    if x.dtype == torch.float64:
        return -F.cross_entropy(F.linear(x, w, b), y, reduction="none")
    return linear_logprobs(x, w, y, linear_bias=b, **more)


def applied(x: Tensor, w: Tensor, b: Tensor | None, y: Tensor, **more: Any) -> Tensor:
    if x.dtype == torch.float64:
        return focal(F.linear(x, w, b), y)
    return linear_apply(focal, x, w, y, linear_bias=b, **more)


def distilled(x: Tensor, w: Tensor, b: Tensor | None, y: Tensor, **more: Any) -> Tensor:
    tx, tw, _, _ = head(len(x), 11, len(w), seed=5, bias=False)
    tx, tw = tx.detach(), tw.detach()
    if x.dtype == torch.float64:
        a, t = F.linear(x, w, b).log_softmax(-1), F.linear(tx.double(), tw.double()).log_softmax(-1)
        return (a.exp() * (a - t)).sum(-1)
    return linear_divergence(x, w, tx, tw, kind="reverse_kl", linear_bias=b, **more)


VALUES: list[Value] = [smoothed, each_token, statistics, applied, distilled]


@pytest.mark.parametrize("workspace", [None, 0.06], ids=["all rows", "chunks"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("value", VALUES)
def test_values_and_gradients_are_float32s(value: Value, bias: bool, workspace: float | None, pieces: Any) -> None:
    """Three pieces err as float32 GEMMs do; two by 2**-16 of the products; one as bfloat16."""
    x, w, b, y = head(37, 19, 131, bias=bias)
    options = HeadOptions(workspace_mib=workspace)
    leaves = [t for t in (x, w, b) if t is not None]
    copies = doubled(x, w, b)
    true = value(*copies, y)
    upstream = torch.linspace(-1, 2, true.numel(), dtype=torch.float64).view(true.shape)
    exact = [true, *torch.autograd.grad(true, [t for t in copies if t is not None], upstream)]

    def errors() -> list[float]:
        got = value(x, w, b, y, options=options)
        found = [got, *torch.autograd.grad(got, leaves, upstream.float())]
        assert all(t.dtype == torch.float32 for t in found)
        return [relative_error(*both) for both in zip(found, exact, strict=True)]

    baseline = errors()
    of = {}
    for n in (3, 2, 1):
        pieces(n)
        of[n] = errors()
    for at, own in enumerate(baseline):
        assert of[3][at] <= 2 * own + 4 * UNIT
        assert of[2][at] <= own + 16 * 2.0**-16
        assert of[1][at] <= 16 * 2.0**-8
    assert max(of[2][1:3]) > 2 * max(baseline[1:3]), "two pieces show in the gradients of input and weight"


@pytest.mark.parametrize("frozen", ["input", "weight", "both", "no_grad"])
def test_gradients_that_nobody_needs(frozen: str, pieces: Any) -> None:
    pieces(3)
    x, w, b, y = head(23, 12, 50)
    for name, leaf in (("input", x), ("weight", w), ("weight", b)):
        assert leaf is not None
        leaf.requires_grad_(frozen not in (name, "both"))
    with torch.set_grad_enabled(frozen != "no_grad"):
        loss = linear_cross_entropy(x, w, y, linear_bias=b)
    copies = doubled(x, w, b)
    true = F.cross_entropy(F.linear(*copies), y)
    assert abs(loss.item() - true.item()) <= 8 * UNIT * true.item()
    if loss.requires_grad:
        loss.backward()
        true.backward()
    for leaf, copy in zip((x, w, b), copies, strict=True):
        assert leaf is not None
        assert (leaf.grad is None) == (copy.grad is None)
        assert leaf.grad is None or relative_error(leaf.grad, copy.grad) < 1e-6


def test_rows_that_count_for_nothing_and_none_at_all(pieces: Any, rows_of_no_use: None) -> None:
    pieces(3)
    x, w, b, y = head(11, 8, 30)
    y[2::3] = -100
    with torch.no_grad():
        x[2] = torch.nan
    linear_cross_entropy(x, w, y, linear_bias=b).backward()
    assert x.grad is not None
    assert w.grad is not None
    assert (x.grad[2::3] == 0).all()
    assert w.grad.isfinite().all()
    empty, *_ = head(0, 8, 30)
    loss = linear_cross_entropy(empty, w, torch.empty(0, dtype=torch.long), reduction="sum")
    loss.backward()
    assert loss == 0


@pytest.mark.parametrize("transposed", [False, True])
def test_an_infinite_hidden_state_gives_what_float32_gives(transposed: bool, pieces: Any) -> None:
    x, w, _, y = head(6, 16, 20, bias=False)
    w = w.detach().T.contiguous().T if transposed else w.detach()
    x = x.detach()
    x[1, 3], x[2, 4] = torch.inf, torch.nan
    stock = linear_logprobs(x, w, y)
    pieces(3)
    found = linear_logprobs(x, w, y)
    assert torch.equal(found.isnan(), stock.isnan())
    assert found.isnan().any()
    assert relative_error(found[~stock.isnan()], stock[~stock.isnan()]) < 1e-6


def casts(bias: bool = True) -> tuple[list[Tensor], Tensor]:
    """Return hidden states, weight and bias as bfloat16 leaves, and targets."""
    x, w, b, y = head(29, 16, 61, dtype=BF16, bias=bias)
    return [t for t in (x, w, b) if t is not None], y


@pytest.mark.parametrize("bias", [True, False])
def test_casts_of_bfloat16_tensors_take_bfloat16s_path(bias: bool, pieces: Any, heads: list[Head]) -> None:
    """The call has bfloat16 operands: what the bfloat16 call returns, and gradients no further from the truth."""
    pieces(3)
    leaves, y = casts(bias)
    names = ("input", "linear_weight", "linear_bias")[: len(leaves)]
    for value in (
        lambda **head: linear_cross_entropy(target=y, **head),
        lambda **head: linear_token_stats(target=y, want=("entropy",), **head).entropy.sum(),
    ):
        copies = doubled(*leaves)
        z = F.linear(*copies)
        logp = z.log_softmax(-1)
        is_loss = value(**dict(zip(names, leaves, strict=True))).item() == pytest.approx(F.nll_loss(logp, y).item())
        true = F.nll_loss(logp, y) if is_loss else -(logp.exp() * logp).sum()
        exact = torch.autograd.grad(true, copies)
        plain = value(**dict(zip(names, leaves, strict=True)))
        own = [relative_error(*g) for g in zip(torch.autograd.grad(plain, leaves), exact, strict=True)]
        got = value(**dict(zip(names, [t.float() for t in leaves], strict=True)))
        assert (heads[-1].dtype, got.dtype) == (BF16, torch.float32)
        assert got.item() == plain.item()
        found = torch.autograd.grad(got, leaves)
        assert all(g.dtype == BF16 for g in found)
        for error, of_bf16 in zip((relative_error(*g) for g in zip(found, exact, strict=True)), own, strict=True):
            assert error <= 1.1 * of_bf16 + 2.0**-9


def test_what_is_not_all_cast_is_split_and_says_what_is(pieces: Any, heads: list[Head]) -> None:
    """A float32 bias, a trained float32 weight, float32 hidden states: as exact as if nothing were known."""
    pieces(3)
    (x, w, b), y = casts()
    f32 = [t.detach().float().requires_grad_() for t in (x, w, b)]
    for tensors, known in (
        ((x.float(), w.float(), f32[2]), (True, True)),
        ((x.float(), f32[1], b.float()), (True, False)),
        ((f32[0], w.float(), f32[2]), (False, True)),
        ((f32[0], f32[1], f32[2]), (False, False)),
    ):
        loss = linear_cross_entropy(tensors[0], tensors[1], y, linear_bias=tensors[2])
        got = heads[-1]
        assert (got.dtype, got.bf16_input, got.bf16_weight) == (torch.float32, *known)
        found = torch.autograd.grad(loss, tensors)
        copies = doubled(*f32)
        exact = torch.autograd.grad(F.cross_entropy(F.linear(*copies), y), copies)
        assert max(relative_error(*g) for g in zip(found, exact, strict=True)) < 1e-6


def test_a_row_factor_makes_known_hidden_states_float32(pieces: Any) -> None:
    """dW is of ``factor * x``, which has more digits than x."""
    pieces(3)
    (x, w, _), y = casts()
    weight = torch.rand(len(y), generator=torch.Generator().manual_seed(3))
    w32 = w.detach().float().requires_grad_()
    loss = linear_cross_entropy(x.float(), w32, y, token_weight=weight, z_loss=1e-2, logit_scale=torch.tensor(0.7))
    (got,) = torch.autograd.grad(loss, w32)
    xd, wd = doubled(x, w32)
    z = F.linear(xd, wd) * 0.7
    each = F.cross_entropy(z, y, reduction="none") + 1e-2 * z.logsumexp(-1) ** 2
    (exact,) = torch.autograd.grad((each * weight.double()).mean(), wd)
    assert relative_error(got, exact) < 1e-6


def test_the_gradient_of_a_cast_is_there(pieces: Any) -> None:
    """What stands between the call and the bfloat16 leaves has its float32 gradient, as with a float32 GEMM."""
    pieces(3)
    (x, w, _), y = casts()
    x32, w32 = x.float(), w.float()
    dx, dw = torch.autograd.grad(linear_cross_entropy(x32, w32, y), (x32, w32))
    assert dx.dtype == dw.dtype == torch.float32
    copies = doubled(x, w)
    exact = torch.autograd.grad(F.cross_entropy(F.linear(*copies), y), copies)
    assert max(relative_error(*g) for g in zip((dx, dw), exact, strict=True)) < 2.0**-7


@pytest.fixture
def precision() -> Iterator[None]:
    """Leave PyTorch's setting as it was."""
    before = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = before


def test_the_setting_is_pytorchs(precision: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_capability", lambda _: (9, 0))
    assert float32_pieces(CUDA) == 3
    for name, n in (("high", 2), ("medium", 1), ("highest", 3)):
        torch.set_float32_matmul_precision(name)
        assert float32_pieces(CUDA) == n
    torch.backends.cuda.matmul.allow_tf32 = True
    assert float32_pieces(CUDA) == 2
    torch.backends.cuda.matmul.allow_tf32 = False
    assert float32_pieces(CUDA) == 3
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # PyTorch's other getter raises now
    assert float32_pieces(CUDA) == 2
    assert float32_pieces(torch.device("cpu")) == 0


@pytest.mark.parametrize(
    ("capability", "splits"),
    [
        ((7, 5), False),
        ((8, 0), True),
        ((8, 6), False),
        ((8, 9), False),
        ((9, 0), True),
        ((10, 0), True),
        ((12, 0), False),
    ],
)
def test_gpus_whose_bfloat16_gemms_are_not_six_times_as_fast_keep_float32s(
    capability: tuple[int, int], splits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert splits_float32(CUDA, capability) == splits
    plan = plan_head(64, 32, 1000, torch.float32, "cuda", capability=capability)
    assert (plan.logits_gemm, plan.backward_gemm) == (("pieces",) * 2 if splits else ("same",) * 2)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not splits_float32(CUDA, capability)


def test_the_plan_says_so_and_counts_the_pieces() -> None:
    plan = plan_head(8192, 4096, 151936, torch.float32, "cuda")
    assert "6 products of 3 pieces" in str(plan)
    rows, block, D, V = plan.chunk_rows, plan.block_rows, 4096, 151936
    assert plan.scratch_bytes >= 4 * rows * V + 12 * (block * D + rows * (block + D)) + 4 * rows * D
    assert plan.scratch_bytes <= 2048 * MIB
    bounded = plan_head(8192, 4096, 151936, torch.float32, "cuda", HeadOptions(workspace_mib=200))
    assert bounded.scratch_bytes <= 200 * MIB
    assert bounded.block_rows % 8 == 0
    for other in (torch.bfloat16, torch.float16, torch.float64):
        assert plan_head(64, 32, 1000, other, "cuda").pieces == 0
    pair = plan_divergence(512, 2048, 128256, 4096, torch.float32, "cuda")
    assert (pair.pieces, pair.logits_gemm) == (3, "pieces")
    assert plan_head(64, 32, 1000, torch.float32, "cpu").pieces == 0


@pytest.mark.parametrize("bf16_side", ["student", "teacher"])
def test_sides_of_two_dtypes(bf16_side: str, pieces: Any) -> None:
    """Only the float32 side is split."""
    pieces(3)
    x, w, _, _ = head(13, 10, 40, bias=False, dtype=BF16 if bf16_side == "student" else torch.float32)
    tx, tw, _, _ = head(13, 7, 40, bias=False, seed=1, dtype=BF16 if bf16_side == "teacher" else torch.float32)
    got = linear_divergence(x, w, tx, tw)
    a, t = (F.linear(*doubled(*side)).log_softmax(-1) for side in ((x, w), (tx, tw)))
    assert relative_error(got, (t.exp() * (t - a)).sum(-1)) < 1e-5


def test_bits_are_the_same_from_run_to_run(pieces: Any) -> None:
    pieces(3)
    runs = []
    for _ in range(2):
        x, w, b, y = head(37, 19, 131)
        loss = linear_cross_entropy(x, w, y, linear_bias=b, options=HeadOptions(workspace_mib=0.06))
        runs.append([loss, *torch.autograd.grad(loss, [x, w, b])])
    assert all(torch.equal(*both) for both in zip(*runs, strict=True))


def test_ranks_and_compilers_learn_nothing(pieces: Any) -> None:
    """Where the graph may differ from rank to rank, or is being traced, no operand is known to be a cast."""
    pieces(3)
    (x, w, _), _ = casts()
    asked = None, "auto", "auto", "auto", 0.0, False, 0, 0
    of = Head(x.float(), w.float(), None, None, None, torch.float32, *asked, False, False, Alone(61))
    assert nodes.with_known_numbers(of).dtype == BF16
    assert nodes.with_known_numbers(of._replace(dtype=torch.float64)).dtype == torch.float64

    class Several:
        alone = False

    ranks: Any = Several()
    sharded = nodes.with_known_numbers(of._replace(ranks=ranks))
    assert (sharded.dtype, sharded.bf16_input, sharded.bf16_weight) == (torch.float32, False, False)
