"""What a head on a sharded vocabulary exchanges, allocates and refuses; checkpoints, compilers, several heads."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import lowtide
from distributed.launch import DEVICE, main, slow
from distributed.sharded import (
    LEADING,
    WAYS,
    D,
    V,
    exchanged,
    head,
    mesh,
    near,
    part_of,
    plain,
    same_on_all_ranks,
    shard_of,
    sizes,
    spread,
    whole,
)
from lowtide.errors import ArgumentTypeError, ArgumentValueError, TargetIndexError, UnsupportedError
from lowtide.measure.timing import peak_above
from support import oracle


def checkpointed() -> None:
    """Where all ranks train and call backward alike, a checkpoint around the call exchanges anew in backward."""
    x, w, b, y = head(LEADING, D, V, dtype=torch.float64, seed=15)
    ways = [("sequence", True, True, "mean"), ("local", True, False, "none"), ("sequence", False, False, "none")]
    for way, hidden, reentrant, reduction in ways:
        x.requires_grad_(hidden)
        px, pw, pb = (spread(way, t, of_vocab=k > 0) for k, t in enumerate((x, w, b)))
        scale, true_scale = (torch.tensor(0.8, dtype=torch.float64, device=DEVICE, requires_grad=True) for _ in "ab")
        call = functools.partial(lowtide.linear_cross_entropy, reduction=reduction, **shard_of(way, pw))

        def score(x: Any, w: Any, b: Any, scale: Tensor, call: Any = call) -> Any:
            return call(x, w, y, linear_bias=b, logit_scale=scale)

        loss = plain(checkpoint(score, px, pw, pb, scale, use_reentrant=reentrant)).sum()
        want = oracle(x, w, y, linear_bias=b, logit_scale=true_scale, reduction=reduction).sum()
        near(loss, want, (way, reduction))
        loss.backward()  # a reentrant checkpoint refuses torch.autograd.grad
        of_scale, *others = torch.autograd.grad(want, (true_scale, w, b))
        near(scale.grad, of_scale, way)
        for mine, true in zip((pw, pb), others, strict=True):
            near(whole(way, mine.grad, of_vocab=True), true, (way, hidden, reentrant, reduction))


@slow
def compiled() -> None:
    """A compiler ends its graph before ranks exchange, and says why where it may not."""
    x, w, _, y = head(LEADING, D, V, dtype=torch.float64, seed=21, bias=False)
    want = oracle(x, w, y)
    want.backward()

    def score(x: Any, w: Any, labels: Tensor, shard: Any) -> Any:
        return lowtide.linear_cross_entropy(x * 1.0, w, labels, vocab_shard=shard)

    way = ("sequence", "local")[dist.get_world_size() % 2]
    px, pw = spread(way, x, of_vocab=False), spread(way, w, of_vocab=True)
    shard = shard_of(way, pw).get("vocab_shard")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="exchanges_between_ranks"):
        torch.compile(score, backend="eager", fullgraph=True)(px, pw, y, shard)
    torch._dynamo.reset()
    loss = plain(torch.compile(score, backend="eager")(px, pw, y, shard))
    loss.backward()
    near(loss, want, way)
    near(whole(way, px.grad, of_vocab=False), x.grad, way)
    near(whole(way, pw.grad, of_vocab=True), w.grad, way)


def the_same_on_every_rank() -> None:
    """Loss and hidden states' gradient, bit for bit; otherwise replicas would drift apart."""
    x, w, _, y = head(LEADING, D, V, seed=2, bias=False)
    for way in ("replicated", "local"):
        px, pw = spread(way, x, of_vocab=False), spread(way, w, of_vocab=True)
        loss = lowtide.linear_cross_entropy(px, pw, y, label_smoothing=0.1, **shard_of(way, pw))
        loss.backward()
        for value in (plain(loss.detach()), px.grad.to_local() if way == "replicated" else px.grad):
            assert same_on_all_ranks(value)


def several_heads() -> None:
    """Multi-token prediction: heads of one weight as one call, and a call each."""
    x, w, _, y = head((3, *LEADING), D, V, dtype=torch.float64, seed=5, bias=False)
    y = y[0].masked_fill(y[1] % 5 == 0, -100)
    want = lowtide.losses.multi_token_loss(x, w, y, weights=[1, 0.5, 0.25])
    want.loss.backward()
    for way, own in (("replicated", True), ("sequence", False), ("local", True), ("local", False)):
        px, pw = [spread(way, part, of_vocab=False) for part in x], spread(way, w, of_vocab=True)
        weight = [pw] * 3 if own else pw
        got = lowtide.losses.multi_token_loss(px, weight, y, weights=[1, 0.5, 0.25], **shard_of(way, pw))
        plain(got.loss).backward()
        near(got.loss, want.loss, way)
        near(got.steps, want.steps, way)
        for part, grad in zip(px, x.grad, strict=True):
            near(whole(way, part.grad, of_vocab=False), grad, way)
        near(whole(way, pw.grad, of_vocab=True), w.grad, way)


def what_is_exchanged() -> None:
    """A few numbers a row and the input's gradient, and the same whatever the targets are; of sets an id's logit."""
    N, classes = 60, 1000
    x, w, _, y = head(N, D, classes, seed=2, bias=False)
    for way in WAYS:
        counts = []
        for target in (y, torch.full_like(y, -100)):
            px, pw = spread(way, x[None], of_vocab=False), spread(way, w, of_vocab=True)
            kwargs = {**shard_of(way, pw), "num_items": 7.0, "options": lowtide.HeadOptions(workspace_mib=0.1)}
            with exchanged() as seen:
                plain(lowtide.linear_cross_entropy(px, pw, target[None], **kwargs)).backward()
            counts.append(sorted(seen))
        assert counts[0] == counts[1]
        hidden = N * D * (2 if way == "sequence" else 1)  # the gradient, and the parts of a sequence
        assert sum(size for _, size in counts[0]) <= hidden + 4 * N + 16, (way, counts[0])
    ids, pw = torch.cat((y[:, None], torch.randint_like(y, classes)[:, None]), 1), part_of(w)
    shard = shard_of("local", pw)
    with exchanged() as seen:
        logprob = lowtide.linear_logprobs(x, pw, y, support=ids, **shard)
        dx, _ = torch.autograd.grad(logprob.sum(), (x, pw))
    assert sum(count for _, count in seen) <= ids.numel() + 1 + x.numel()
    assert same_on_all_ranks(dx)


def memory() -> None:
    """What a rank allocates is that of its own part: no logits, weight or gradient of the whole vocabulary."""
    N, classes, hidden = 256, 6000, 32
    x, w, _, y = head(N, hidden, classes, seed=2, bias=False)
    for way in WAYS[1:]:
        px, pw = spread(way, x[None], of_vocab=False), spread(way, w, of_vocab=True)
        kwargs = {**shard_of(way, pw), "options": lowtide.HeadOptions(workspace_mib=0.3)}
        found: list[Tensor] = []

        def call(px: Any = px, pw: Any = pw, kwargs: Any = kwargs, found: Any = found) -> None:
            found.append(lowtide.linear_cross_entropy(px, pw, y[None], **kwargs))

        peak = peak_above(call, DEVICE)
        mine = pw if way == "local" else pw.to_local()
        limit = mine.numel() * 4 + x.numel() * 4 + 0.3 * 2**20 + 100 * N
        assert mine.numel() * 4 < peak < limit, (way, peak, limit)


def errors() -> None:
    """One clear error, on every rank, before anything is exchanged."""
    x, w, b, y = head(LEADING, D, V, dtype=torch.float64)
    px, pw = spread("replicated", x, of_vocab=False), spread("replicated", w, of_vocab=True)
    call = lowtide.linear_cross_entropy
    part = part_of(w)
    shard = lowtide.VocabShard.of(part)
    assert (shard.vocab, shard.rows, shard.largest) == (V, sizes(V)[dist.get_rank()], max(sizes(V)))
    on_one = r"linear_weight: expected a DTensor with Shard\(0\)"
    sums = DTensor.from_local(x.detach(), mesh(), [Partial()])
    columns = distribute_tensor(x.detach(), mesh(), [Shard(2)])
    one_more = {"weight": torch.ones(V + 1, device=DEVICE)}
    stored = {"reduction": "none", "options": lowtide.HeadOptions(gradient="forward")}
    wrong: list[tuple[Any, str, tuple[Any, Any], dict[str, Any]]] = [
        (ArgumentTypeError, r"linear_weight: .*tensor parallelism", (x, pw), {}),
        (ArgumentTypeError, r"linear_weight: expected a DTensor", (px, w), {}),
        (ArgumentTypeError, r"linear_bias: expected a DTensor", (px, pw), {"linear_bias": b}),
        (ArgumentValueError, on_one, (px, distribute_tensor(w.detach(), mesh(), [Shard(1)])), {}),
        (ArgumentValueError, on_one, (px, distribute_tensor(w.detach(), mesh(), [Replicate()])), {}),
        (ArgumentValueError, "input: expected placement", (columns, pw), {}),
        (ArgumentValueError, "input: expected placement", (sums, pw), {}),
        (ArgumentTypeError, "vocab_shard: expected lowtide.VocabShard", (x, part), {"vocab_shard": dist.group.WORLD}),
        (ArgumentValueError, r"linear_weight: expected shape \[", (x, w), {"vocab_shard": shard}),
        (ArgumentTypeError, r"linear_weight: .*DTensor", (x, pw), {"vocab_shard": shard}),
        (ArgumentValueError, "weight: expected one class weight for each of 50", (px, pw), one_more),
        (UnsupportedError, "all classes on one rank", (px, pw), {"options": lowtide.HeadOptions(backend="row")}),
        (UnsupportedError, "gradient", (px, pw), stored),
    ]
    for kind, said, args, kwargs in wrong:
        with pytest.raises(kind, match=said):
            call(*args, y, **kwargs)
    if DEVICE == "cpu":
        with pytest.raises(TargetIndexError, match="0 to 49"):
            call(px, pw, torch.full_like(y, V))
        with pytest.raises(TargetIndexError, match="ids from 0 to 49"):
            lowtide.linear_token_stats(x, part, y, support=torch.full((3,), V), vocab_shard=shard)
    else:
        assert plain(call(px, pw, torch.full_like(y, V))).isnan()
    even = -(-V // dist.get_world_size())
    for numbers in (
        {"first": -1, "rows": 2},
        {"first": 49, "rows": 2},
        {"first": 0, "rows": 9, "largest": 5},
        {"first": 0, "rows": even + 1},
    ):
        with pytest.raises(ArgumentValueError, match="VocabShard"):
            lowtide.VocabShard(group=dist.group.WORLD, vocab=V, **numbers)
    with pytest.raises(ArgumentValueError, match=r"teacher_weight: .*student's classes"):
        lowtide.linear_divergence(px, pw, px, distribute_tensor(w.detach()[:-1], mesh(), [Shard(0)]))
    (grad,) = torch.autograd.grad(plain(call(px, pw, y)), px, create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivative"):
        plain(grad).sum().backward()


if __name__ == "__main__":
    main(vars())
