"""Any function of a sharded vocabulary's logits, beside plain autograd on the whole in float64: see option_cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import lowtide
from distributed.launch import DEVICE, main
from distributed.sharded import (
    LEADING,
    WAYS,
    D,
    V,
    head,
    mesh,
    near,
    part_of,
    plain,
    shard_of,
    spread,
    whole,
)
from lowtide.errors import ArgumentValueError
from lowtide.measure.allocations import track_allocations
from lowtide.measure.timing import peak_above

TINY = 0.03  # MiB: several chunks, and several pieces of each


def random_numbers() -> None:
    """Every rank draws the same, and backward draws them again: the gradient is that of its own forward."""

    def noisy(z: Tensor) -> Any:
        drawn = torch.rand_like(z)
        return (z * drawn).sum(-1), drawn

    for way in WAYS:
        x, w, _, _ = head(LEADING, D, V, dtype=torch.float64, bias=False)
        px, pw = spread(way, x, of_vocab=False), spread(way, w, of_vocab=True)
        torch.manual_seed(3)
        options = lowtide.HeadOptions(workspace_mib=TINY)
        value, drawn = lowtide.linear_apply(noisy, px, pw, options=options, **shard_of(way, pw))
        drawn = plain(drawn)
        assert drawn.unique().numel() == drawn.numel()
        want = (F.linear(x, w) * drawn).sum(-1)
        near(value, want, way)
        state = torch.get_rng_state()
        plain(value).square().sum().backward()
        assert torch.equal(state, torch.get_rng_state())
        want.square().sum().backward()
        near(whole(way, px.grad, of_vocab=False), x.grad, way)
        near(whole(way, pw.grad, of_vocab=True), w.grad, way)


def memory() -> None:
    """A chunk's logits of this rank's classes, and whole ones: never all tokens' logits."""
    N, classes = 200, 3000
    x, w, _, _ = head((1, N), 16, classes, bias=False)
    pw, options = part_of(w), lowtide.HeadOptions(workspace_mib=0.5)
    shard = lowtide.VocabShard.of(pw)

    def run() -> None:
        loss = lowtide.linear_apply(lambda z: z.logsumexp(-1), x, pw, vocab_shard=shard, options=options)
        loss.sum().backward()

    if DEVICE == "cuda":
        assert peak_above(run, DEVICE) < N * classes * 4 / 2
    else:  # what gloo's threads free is not seen, so that no peak is
        with track_allocations() as seen:
            run()
        assert 0 < seen.largest_bytes < 2**20, seen.largest_bytes


def errors() -> None:
    """Coupled tokens; labels as a DTensor."""
    x, w, b, y = head(LEADING, D, V, dtype=torch.float64)
    pw = part_of(w)
    shard = lowtide.VocabShard.of(pw)
    with pytest.raises(ArgumentValueError, match="depend on the other tokens"):
        lowtide.linear_apply(lambda z: z - z.mean(0), x, pw, vocab_shard=shard)
    with pytest.raises(ArgumentValueError, match="does not add up"):
        lowtide.linear_apply(lambda z: z.mean(), x, pw, out="sum", vocab_shard=shard)
    sequence = distribute_tensor(x.detach(), mesh(), [Shard(1)])
    weight, bias = (distribute_tensor(t.detach(), mesh(), [Shard(0)]) for t in (w, b))
    with pytest.raises(ArgumentValueError, match="depend on the other tokens"):
        lowtide.linear_apply(lambda z: z - z.mean(0), sequence, weight, linear_bias=bias)
    labels = distribute_tensor(y, mesh(), [Replicate()])
    found = lowtide.linear_apply(lambda z, y: z.gather(1, y[:, None]), sequence, weight, labels)
    near(found, F.linear(x, w).gather(-1, y[..., None]), "labels as a DTensor")


if __name__ == "__main__":
    main(vars())
