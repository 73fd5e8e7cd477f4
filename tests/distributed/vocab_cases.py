"""A sharded vocabulary beside the whole in float64, which each rank computes; all options: option_cases."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import lowtide
from distributed.launch import DEVICE, THOROUGH, main
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


def unlike_scales() -> None:
    """A `logit_scale` that some ranks alone train: an error on every rank, before anybody waits in backward."""
    x, w, b, y = head(LEADING, D, V)
    statistics = functools.partial(lowtide.linear_token_stats, want=("entropy", "logprob"))
    calls: tuple[Any, ...] = (lowtide.linear_cross_entropy, lowtide.linear_logprobs, statistics)
    for way, call, trained in itertools.product(WAYS, calls, (False, True)):
        px, pw, pb = (spread(way, t.detach(), of_vocab=k > 0) for k, t in enumerate((x, w, b)))
        px.requires_grad_(trained)
        scale = torch.tensor(0.8, device=DEVICE, requires_grad=dist.get_rank() == 0)
        with pytest.raises(ArgumentValueError, match=r"logit_scale: .*every rank.*it on ranks \[0\] of"):
            call(px, pw, y, linear_bias=pb, logit_scale=scale, **shard_of(way, pw))
        # where all train it, the hidden states' product with it gets a gradient everywhere, whoever trains these
        px = px.detach().requires_grad_(dist.get_rank() == 0)
        scale = scale.detach().requires_grad_()
        got = call(px, pw, y, linear_bias=pb, logit_scale=scale, **shard_of(way, pw))
        of_scale = [plain(t).sum() for t in (got if isinstance(got, tuple) else (got,)) if t is not None]
        assert len(torch.autograd.grad(torch.stack(of_scale).sum(), (scale, px) if px.requires_grad else (scale,)))


def checkpointed() -> None:
    """Where all ranks train and call backward alike, a checkpoint around the call exchanges anew in backward."""
    x, w, b, y = head(LEADING, D, V, dtype=torch.float64, seed=15)
    for way, hidden, reentrant in itertools.product(WAYS, (False, True), (False, True)):
        if (reentrant and not hidden) or (way == "replicated" and not THOROUGH):
            continue  # PyTorch gives no gradients of frozen hidden states in a reentrant one
        px, pw, pb = (spread(way, t, of_vocab=k > 0) for k, t in enumerate((x if hidden else x.detach(), w, b)))
        for reduction in ("mean", "none"):
            scale, true_scale = (
                torch.tensor(0.8, dtype=torch.float64, device=DEVICE, requires_grad=True) for _ in "ab"
            )
            call = functools.partial(lowtide.linear_cross_entropy, reduction=reduction, **shard_of(way, pw))

            def score(x: Any, w: Any, b: Any, scale: Tensor, call: Any = call) -> Any:
                return call(x, w, y, linear_bias=b, logit_scale=scale)

            loss = plain(checkpoint(score, px, pw, pb, scale, use_reentrant=reentrant)).sum()
            want = oracle(x, w, y, linear_bias=b, logit_scale=true_scale, reduction=reduction).sum()
            near(loss, want, (way, reduction))
            got = torch.autograd.grad(loss, (scale, pw, pb)) if not reentrant else backward(loss, (scale, pw, pb))
            for k, true in enumerate(torch.autograd.grad(want, (true_scale, w, b))):
                mine = whole(way, got[k], of_vocab=True) if k else got[k]
                near(mine, true, (way, hidden, reentrant, reduction, k))


def backward(loss: Tensor, leaves: tuple[Any, ...]) -> list[Any]:
    """As `torch.autograd.grad`, which a reentrant checkpoint refuses."""
    for leaf in leaves:
        leaf.grad = None
    loss.backward()
    return [leaf.grad for leaf in leaves]


def compiled() -> None:
    """A compiler ends its graph before ranks exchange, and says why where it may not."""
    if not THOROUGH:
        return
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
    for way, own in itertools.product(WAYS, (False, True)):
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
    """A few numbers a row and the input's gradient, and the same whatever the targets are."""
    N, classes = 60, 1000
    for way in WAYS:
        x, w, _, y = head(N, D, classes, seed=2, bias=False)
        counts = []
        for target in (y, torch.full_like(y, -100)):
            px, pw = spread(way, x[None], of_vocab=False), spread(way, w, of_vocab=True)
            kwargs = {**shard_of(way, pw), "num_items": 7.0, "options": lowtide.HeadOptions(workspace_mib=0.1)}
            if not counts:  # at a group's first call its ranks exchange what they can do
                lowtide.linear_cross_entropy(px, pw, target[None], **kwargs)
            with exchanged() as seen:
                plain(lowtide.linear_cross_entropy(px, pw, target[None], **kwargs)).backward()
            counts.append(sorted(seen))
        assert counts[0] == counts[1]
        hidden = N * D * (2 if way == "sequence" else 1)  # the gradient, and the parts of a sequence
        assert sum(size for _, size in counts[0]) <= hidden + 4 * N + 16, (way, counts[0])


def memory() -> None:
    """What a rank allocates is that of its own part: no logits, weight or gradient of the whole vocabulary."""
    N, classes, hidden = 256, 6000, 32
    x, w, _, y = head(N, hidden, classes, seed=2, bias=False)
    whole_bytes = classes * hidden * 4
    for way in WAYS:
        px, pw = spread(way, x[None], of_vocab=False), spread(way, w, of_vocab=True)
        shard = shard_of(way, pw)
        options = lowtide.HeadOptions(workspace_mib=0.3)
        found: list[Tensor] = []

        def run(px: Any = px, pw: Any = pw, shard: Any = shard, options: Any = options, found: Any = found) -> None:
            found.append(lowtide.linear_cross_entropy(px, pw, y[None], options=options, **shard))

        peak = peak_above(run, DEVICE)
        mine = pw if way == "local" else pw.to_local()
        limit = mine.numel() * 4 + x.numel() * 4 + 0.3 * 2**20 + 100 * N
        assert mine.numel() * 4 < peak < limit, (way, peak, limit, whole_bytes)


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
        (UnsupportedError, "vocabulary is sharded", (px, pw), {"options": lowtide.HeadOptions(backend="row")}),
        (UnsupportedError, "gradient", (px, pw), stored),
    ]
    for kind, said, args, kwargs in wrong:
        with pytest.raises(kind, match=said):
            call(*args, y, **kwargs)
    if DEVICE == "cpu":
        with pytest.raises(TargetIndexError, match="0 to 49"):
            call(px, pw, torch.full_like(y, V))
    else:
        assert plain(call(px, pw, torch.full_like(y, V))).isnan()
    for numbers in ({"first": -1, "rows": 2}, {"first": 49, "rows": 2}, {"first": 0, "rows": 9, "largest": 5}):
        with pytest.raises(ArgumentValueError, match="VocabShard"):
            lowtide.VocabShard(group=dist.group.WORLD, vocab=V, **numbers)
    even = -(-V // dist.get_world_size())
    with pytest.raises(ArgumentValueError, match=rf"VocabShard: expected at most {even} rows.*largest"):
        lowtide.VocabShard(group=dist.group.WORLD, vocab=V, first=0, rows=even + 1)
    assert lowtide.VocabShard(group=dist.group.WORLD, vocab=V, first=0, rows=even).most_rows == even
    with pytest.raises(ArgumentValueError, match=r"teacher_weight: .*student's classes"):
        lowtide.linear_divergence(px, pw, px, distribute_tensor(w.detach()[:-1], mesh(), [Shard(0)]))
    loss = plain(call(px, pw, y))
    (grad,) = torch.autograd.grad(loss, px, create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivative"):
        plain(grad).sum().backward()


if __name__ == "__main__":
    main(vars())
