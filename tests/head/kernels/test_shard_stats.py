"""Token statistics' kernels where each rank has some of the classes, beside float64: sums, entries, highest logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from lowtide.head.kernels.configs import GemmConfig
from lowtide.head.kernels.exp_terms import finish_input_grad
from lowtide.head.kernels.gemm import LogitTransform, gemm_tiles, tiles_across
from lowtide.head.kernels.stats_logits import Entries, Sums, gradient_tile, tile_stats
from lowtide.head.kernels.stats_rows import RowStats, merge_stats, prepare_stats, put_entries
from lowtide.head.kernels.stats_topk import highest_logits, merge_highest, shard_highest
from support import relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
SMALL = GemmConfig(rows=16, columns=32, depth=16, group=2, stages=1, warps=4, pieces=2)
CONFIG = GemmConfig() if DEVICE == "cuda" else SMALL
NEAR = 2e-4 if DEVICE == "cuda" else 5e-6
N, D, K = 19, 32, 3
SHARDS = [[61], [40, 33], [8, 0, 96, 7]]
ASKED = ("heat", "squares", "total")
OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "all": {"bias": True, "scale": -0.7, "softcap": 9.0}}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy
each = pytest.mark.parametrize(("shards", "name"), [(shards, name) for shards in SHARDS for name in OPTIONS])


class Case:
    """Operands, their logits in float64, and the ranks' classes."""

    def __init__(self, shards: list[int], name: str) -> None:
        g = torch.Generator().manual_seed(sum(shards))
        self.V, options = sum(shards), OPTIONS[name]
        self.x = (2 * torch.randn(N, D, generator=g)).to(DEVICE, DTYPE)
        self.w = (torch.randn(self.V, D, generator=g) / 3).to(DEVICE, DTYPE)
        bias = torch.randn(self.V, generator=g).to(DEVICE) if "bias" in options else None
        scale = torch.tensor(options["scale"], device=DEVICE) if "scale" in options else None
        self.transform = LogitTransform(bias, scale, options.get("softcap"))
        self.y = torch.randint(0, self.V, (N, K), generator=g).to(DEVICE)
        self.y[::3, 1] = self.y[::3, 0]
        self.y[:4, 2] = self.logits(self.x, self.w).argmax(1)[:4]
        ends = torch.tensor(shards).cumsum(0).tolist()
        self.parts = [slice(end - size, end) for end, size in zip(ends, shards, strict=True)]

    def logits(self, x: Tensor, w: Tensor) -> Tensor:
        bias, scale, cap = self.transform
        z = x.double() @ w.double().T
        z = (z if bias is None else z + bias.double()) * (1.0 if scale is None else scale.double())
        return z if cap is None else cap * torch.tanh(z / cap)

    def tiles(self, part: slice) -> Sums:
        w, P = self.w[part], tiles_across(part.stop - part.start, CONFIG)
        tiles = Sums.of(torch.empty(6, N, P, device=DEVICE), ASKED)
        if len(w):
            gemm_tiles(tile_stats, self.x, w, None, tiles, self.transform.of_classes(part), CONFIG)
        return tiles

    def merged(self) -> RowStats:
        told = []
        for part in self.parts:
            new = torch.empty if part.stop > part.start else torch.zeros
            told.append(new(6 + K, N, device=DEVICE))
            merge_stats(
                self.tiles(part), Sums.of(told[-1][..., None], ASKED), part.stop - part.start, self.y, self.x,
                self.w[part], transform=self.transform.of_classes(part), first_class=part.start,
            )  # fmt: skip
        out = blank()
        merge_stats(Sums.of(torch.stack(told).permute(1, 2, 0), ASKED), out, self.V, self.y)
        return out


def blank() -> RowStats:
    floats = torch.full((5, N), torch.nan, device=DEVICE)
    top = torch.full((N,), -1, device=DEVICE)
    return RowStats(
        lse=floats[0], top=top, top_logprob=floats[1], logprob=torch.full((N, K), torch.nan, device=DEVICE),
        entropy=floats[2], sum_sq_prob=floats[3], mean=floats[4],
    )  # fmt: skip


def assert_close(got: Tensor | None, want: Tensor) -> None:
    assert got is not None
    torch.testing.assert_close(got.double(), want, rtol=NEAR, atol=20 * NEAR)


@each
def test_ranks_together_find_what_one_pass_does(shards: list[int], name: str) -> None:
    case = Case(shards, name)
    z = case.logits(case.x, case.w)
    logp = z.log_softmax(1)
    got, whole = case.merged(), blank()
    merge_stats(case.tiles(slice(0, case.V)), whole, case.V, case.y, case.x, case.w, transform=case.transform)
    for found in (got, whole):
        assert found.top is not None
        assert torch.equal(found.top, z.argmax(1))
        assert_close(found.lse, z.logsumexp(1))
        assert_close(found.top_logprob, logp.amax(1))
        assert_close(found.logprob, logp.gather(1, case.y))
        assert_close(found.entropy, -(logp.exp() * logp).sum(1))
        assert_close(found.sum_sq_prob, logp.exp().square().sum(1))
        assert_close(found.mean, z.mean(1))


def test_sure_rows_keep_their_digits() -> None:
    """The others' probabilities are of 1e-9: what is left of 1 has as many digits as they."""
    case = Case([40, 33], "plain")
    case.w[5] = case.w[60] = 0
    case.w[5] = case.x[0] * 20 / case.x[0].double().square().sum()
    case.y[:, 0] = 5
    z = case.logits(case.x[:1], case.w)
    others = (z - z[:, 5:6]).exp().scatter(1, torch.full((1, 1), 5, device=DEVICE), 0).sum(1)
    got = case.merged().logprob
    assert got is not None
    torch.testing.assert_close(got[:1, 0].double(), -others.log1p(), rtol=1e-4 if DEVICE == "cpu" else 2e-2, atol=0)


def test_ranks_without_a_possible_class_and_rows_that_are_no_numbers() -> None:
    case = Case([40, 33], "all")
    assert case.transform.bias_V is not None
    case.transform.bias_V[:40] = -torch.inf  # the whole first rank
    case.transform = case.transform._replace(scale=None, softcap=None)
    case.y.clamp_(min=40)
    case.x[3], case.x[4] = torch.nan, torch.inf
    good = torch.tensor([i for i in range(N) if i not in (3, 4)], device=DEVICE)
    z = case.logits(case.x[good], case.w)
    got, logp = case.merged(), z.log_softmax(1)
    assert got.lse is not None
    assert got.top is not None
    assert got.entropy is not None
    assert got.logprob is not None
    assert torch.equal(got.top[good], z.argmax(1))
    assert_close(got.lse[good], z.logsumexp(1))
    assert_close(got.entropy[good], -(logp.exp() * logp.clamp(min=-1e4)).sum(1))
    assert_close(got.logprob[good], logp.gather(1, case.y[good]))
    for field in (got.lse, got.entropy, got.logprob[:, 0]):
        assert field[[3, 4]].isnan().all()
    assert (got.top < case.V).all()


@each
def test_gradients_of_all_ranks_add_up(shards: list[int], name: str) -> None:
    case = Case(shards, name)
    got = case.merged()
    g = torch.Generator().manual_seed(1)
    upstream = RowStats(
        logprob=torch.randn(N, K, generator=g).to(DEVICE), entropy=torch.randn(N, generator=g).to(DEVICE),
        lse=torch.randn(N, generator=g).to(DEVICE), mean=torch.randn(N, generator=g).to(DEVICE),
    )  # fmt: skip
    y = case.y.int()
    y[1::4, 2] = -1
    assert upstream.logprob is not None
    upstream.logprob[y < 0] = 0
    x, w = (t.double().requires_grad_() for t in (case.x, case.w))
    z = case.logits(x, w)
    logp = z.log_softmax(1)
    values = (logp.gather(1, case.y), -(logp.exp() * logp).sum(1), z.logsumexp(1), z.mean(1))
    given = (upstream.logprob, upstream.entropy, upstream.lse, upstream.mean)
    total = sum((value * u.double()).sum() for value, u in zip(values, given, strict=True))
    want_x, want_w = torch.autograd.grad(total, (x, w))

    dx, dw = torch.zeros(N, D, device=DEVICE), torch.empty(case.V, D, device=DEVICE)
    for part in case.parts:
        entries = Entries.empty(N, K, case.x.device, heat=True, even=True)
        scaled, out = torch.empty_like(case.x), torch.empty(N, D, device=DEVICE)
        prepare_stats(got, upstream, y, case.x, entries, case.V, transform=case.transform, scaled_CD=scaled)
        V = part.stop - part.start
        e = torch.full((N, V), torch.nan, dtype=DTYPE, device=DEVICE)
        for block in (slice(0, V // 2), slice(V // 2, V)) if V else ():
            first = part.start + block.start
            classes = slice(first, part.start + block.stop)
            of_block = torch.full((N, -(-V // 8) * 8 + 8), torch.nan, dtype=DTYPE, device=DEVICE)[
                :, : len(case.w[classes])
            ]
            transform = case.transform.of_classes(classes)
            gemm_tiles(gradient_tile, case.x, case.w[classes], of_block, entries, transform, CONFIG)
            put_entries(of_block, entries, first)
            e[:, block] = of_block
        w, of_targets = case.w[part], (entries.s, entries.id[:, 1:], entries.rest)
        finish_input_grad(e.float() @ w.float(), out, w, *of_targets, part.start)
        dx += out
        dw[part] = e.float().T @ scaled.float()
    assert relative_error(dx, want_x) < (4 * NEAR if DEVICE == "cpu" else 1e-2)
    assert relative_error(dw, want_w) < (4 * NEAR if DEVICE == "cpu" else 1e-2)


@each
@pytest.mark.parametrize("k", [1, 7, 40])
def test_highest_logits_of_all_ranks(shards: list[int], name: str, k: int) -> None:
    case = Case(shards, name)
    values, ids = torch.empty(N, k, device=DEVICE), torch.empty(N, k, dtype=torch.int64, device=DEVICE)
    told = [
        shard_highest(
            case.x, case.w[part], case.tiles(part), CONFIG, k, part.start, case.transform.of_classes(part)
        )
        for part in case.parts
    ]  # fmt: skip
    merge_highest(torch.stack(told), values, ids)
    alone, alone_ids = torch.empty_like(values), torch.empty_like(ids)
    highest_logits(case.x, case.w, case.tiles(slice(0, case.V)), CONFIG, alone, alone_ids, transform=case.transform)
    assert_close(values, case.logits(case.x, case.w).topk(k, 1).values)
    if DEVICE == "cpu":  # the same products, whoever computes them
        assert torch.equal(ids, alone_ids)


def test_equal_and_impossible_logits_are_chosen_in_the_order_of_their_classes() -> None:
    case = Case([8, 0, 96, 7], "all")
    case.x[:] = 0
    bias = torch.full((case.V,), -torch.inf, device=DEVICE)
    bias[[3, 50, 51, 110]] = torch.tensor([1.0, 2.0, 2.0, 1.0], device=DEVICE)
    case.transform = LogitTransform(bias)
    values, ids = torch.empty(N, 9, device=DEVICE), torch.empty(N, 9, dtype=torch.int64, device=DEVICE)
    told = [
        shard_highest(
            case.x, case.w[part], case.tiles(part), CONFIG, 9, part.start, case.transform.of_classes(part)
        )
        for part in case.parts
    ]  # fmt: skip
    merge_highest(torch.stack(told), values, ids)
    assert ids[0].tolist() == [50, 51, 3, 110, 0, 1, 2, 4, 5]
