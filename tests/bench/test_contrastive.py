"""The contrastive benchmark: its truth is autograd's in float64, its peers agree, sentence-transformers' is called."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.bench import contrastive, task
from lowtide.bench.contrastive import CONTRASTIVE_PEERS, TEMPERATURE, contrastive_task, make_batch, random_mask
from lowtide.bench.harness import CannotError
from lowtide.bench.shapes import BATCHES
from lowtide.bench.task import Bench, truth
from support import relative_error

N, D, V = 75, 12, 130


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (task, contrastive):
        monkeypatch.setattr(module, "ROWS", 32)


def of_work(work: str, dtype: torch.dtype = torch.float32) -> contrastive.ContrastiveTask:
    return contrastive_task(make_batch(BATCHES.one(f"{N},{D},{V}"), dtype, "cpu"), work)


@pytest.mark.parametrize("work", contrastive.WORKS)
def test_truth_is_autograds(work: str) -> None:
    one = of_work(work)
    x, w = (t.detach().double().requires_grad_() for t in (one.head.x, one.head.w))
    z = x @ w.T / TEMPERATURE
    if one.mask is not None:
        assert 0 < one.mask.sum() < 0.03 * N * V
        assert not one.mask.diagonal().any()
        z = z.masked_fill(one.mask, -torch.inf)
    loss = F.cross_entropy(z, torch.arange(N))
    exact, found = torch.autograd.grad(loss, (x, w)), truth(one)
    assert abs(found.values["loss"].mean().item() - loss.item()) < 1e-12
    for got, want in zip((found.dx, found.dw), exact, strict=True):
        assert got is not None
        assert relative_error(got, want) < 1e-7  # its upstream gradient is 1 / N in float32


@pytest.mark.parametrize("work", contrastive.WORKS)
@pytest.mark.parametrize("peer", ["lowtide", "naive", "checkpoint"])
def test_peers_agree(work: str, peer: str) -> None:
    row = Bench(of_work(work), error=True, warm=0, reps=1).measure(CONTRASTIVE_PEERS[peer])
    assert row["errors"].keys() == {"loss", "dx", "dw"}
    assert max(row["errors"].values()) < 2e-5, row


def test_a_batch_is_neither_solved_nor_hopeless() -> None:
    batch = make_batch(BATCHES.one("512,128,700"), torch.float32, "cpu")
    for side in batch.leaves:
        torch.testing.assert_close(side.norm(dim=1), torch.ones(len(side)))
    cosines = (batch.x @ batch.w.T).detach()
    assert cosines.diagonal().mean().item() == pytest.approx(contrastive.LIKENESS, abs=0.03)
    assert random_mask(batch.shape, "cpu").float().mean().item() == pytest.approx(contrastive.MASKED, rel=0.1)


class Cached:
    """What the peer calls of sentence-transformers' loss, in mini-batches with their backward."""

    def __init__(self, model: Any, *, scale: float, similarity_fct: Any, mini_batch_size: int) -> None:
        assert model[0] is None
        self.scale, self.similarity, self.size = scale, similarity_fct, mini_batch_size

    def calculate_loss(self, reps: list[list[Tensor]], *, with_backward: bool) -> Tensor:
        assert with_backward
        anchors, candidates = (torch.cat(part) for part in reps)
        losses = []
        for rows in torch.arange(len(anchors)).split(self.size):
            scores = self.similarity(anchors[rows], candidates) * self.scale
            loss = F.cross_entropy(scores, rows, reduction="sum") / len(anchors)
            loss.backward(retain_graph=True)
            losses.append(loss.detach())
        return torch.stack(losses).sum()


def test_the_loss_step_of_sentence_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    losses, util = SimpleNamespace(CachedMultipleNegativesRankingLoss=Cached), SimpleNamespace()
    util.dot_score = lambda a, b: a @ b.T
    for name, module in (("", ModuleType("x")), (".losses", losses), (".util", util)):
        monkeypatch.setitem(sys.modules, f"sentence_transformers{name}", module)  # type: ignore[arg-type]
    bench = Bench(of_work("in-batch"), error=True, warm=0, reps=1)
    for name in ("cached-mnrl", "cached-mnrl-1024"):
        row = bench.measure(CONTRASTIVE_PEERS[name])
        assert max(row["errors"].values()) < 2e-5, row
    with pytest.raises(CannotError, match="has no mask"):
        CONTRASTIVE_PEERS["cached-mnrl"].built(of_work("masked"))
