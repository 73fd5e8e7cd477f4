"""A sharded vocabulary beside the whole in float64, which each rank computes; all options: option_cases."""

from __future__ import annotations

import functools
import itertools
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import lowtide
from distributed.launch import DEVICE, main
from distributed.sharded import (
    ENGINES,
    LEADING,
    WAYS,
    D,
    V,
    exchanged,
    head,
    mesh,
    near,
    of_all_ranks,
    part_of,
    plain,
    running,
    same_on_all_ranks,
    shard_of,
    sizes,
    spread,
    whole,
)
from lowtide.errors import ArgumentTypeError, ArgumentValueError, TargetIndexError, UnsupportedError
from lowtide.head.call import CrossEntropyArgs, Wanted
from lowtide.head.plan import plan_cross_entropy
from lowtide.head.ranks import shard as vocab_shard
from lowtide.head.ranks.parallel import Ranks
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

    none = [t.detach()[:0] for t in (x[0], y[0])]  # without tokens there is no exchange, in which ranks could disagree
    pw, pb = part_of(w), part_of(b)
    scale = torch.tensor(0.8, device=DEVICE, requires_grad=dist.get_rank() == 0)
    kwargs = {"linear_bias": pb.detach(), "reduction": "sum", "logit_scale": scale, **shard_of("local", pw)}
    with exchanged() as seen:
        loss = lowtide.linear_cross_entropy(none[0], pw.detach(), none[1], **kwargs)
        if scale.requires_grad:
            assert torch.autograd.grad(loss, scale)[0] == 0
    assert not seen


def nothing_to_differentiate() -> None:
    """Statistics without a gradient: ranks exchange none, and may require what they like."""
    x, w, _, y = head(LEADING, D, V, dtype=torch.float64, seed=14, bias=False)
    want = F.linear(x, w).detach()
    for way in WAYS:
        px, pw = spread(way, x.detach(), of_vocab=False), spread(way, w.detach(), of_vocab=True)
        px.requires_grad_(dist.get_rank() == 0)
        scale = torch.tensor(1.0, device=DEVICE, requires_grad=dist.get_rank() == 1)
        kwargs = {"want": ("argmax", "is_top1"), "topk": 2, "logit_scale": scale, **shard_of(way, pw)}
        found = lowtide.linear_token_stats(px, pw, y, **kwargs)
        assert torch.equal(plain(found.argmax), want.argmax(-1))
        assert torch.equal(plain(found.is_top1), want.argmax(-1) == y)
        assert torch.equal(plain(found.topk.ids), want.topk(2).indices)


def checkpointed() -> None:
    """Where all ranks train and call backward alike, a checkpoint around the call exchanges anew in backward."""
    x, w, b, y = head(LEADING, D, V, dtype=torch.float64, seed=15)
    for way, hidden, reentrant in itertools.product(WAYS, (False, True), (False, True)):
        if reentrant and not hidden:
            continue  # PyTorch gives no gradients there
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
    ranks = dist.get_world_size()
    thin: dict[str, dict[str, Any]] = {"torch": {}, "chunks": {}, "blocks": {"label_smoothing": 0.1, "weight": True}}
    for engine, way in itertools.product(ENGINES, WAYS):
        N, classes, hidden = (60, 1000, D) if engine == "torch" else (7, 50, 16)
        x, w, _, y = head(N, hidden, classes, seed=2, bias=False)
        held = -(-N // ranks)  # of a sequence, whose parts are filled up
        states = {"torch": 1, "chunks": 1, "blocks": 2}[engine]  # blocks read the hidden states a second time
        options = thin[engine]
        counts = []
        for target in (y, torch.full_like(y, -100), y % 3)[: 3 if engine == "torch" else 1]:
            px, pw = spread(way, x[None], of_vocab=False), spread(way, w, of_vocab=True)
            kwargs = {**shard_of(way, pw), **options, "num_items": 7.0}
            if engine == "torch":
                kwargs["options"] = lowtide.HeadOptions(workspace_mib=0.1)
            if "weight" in options:
                kwargs["weight"] = torch.ones(classes, device=DEVICE)
            with running(engine):
                if not counts:  # at a group's first call its ranks exchange what they can do
                    lowtide.linear_cross_entropy(px, pw, target[None], **kwargs)
                with exchanged() as seen:
                    plain(lowtide.linear_cross_entropy(px, pw, target[None], **kwargs)).backward()
            counts.append(sorted(seen))
        assert all(other == counts[0] for other in counts)
        count = held * ranks if way == "sequence" else N
        numbers = sum(size for name, size in counts[0] if name.startswith("all_gather"))
        gradient = sum(size for name, size in counts[0] if name.startswith(("all_reduce", "reduce_scatter")))
        expected = count * ((2 if engine == "torch" else 3) + ("label_smoothing" in options))
        expected += (N + 1) * ("weight" in options) + (states * held * hidden if way == "sequence" else 0)
        expected += DEVICE == "cpu"  # one number more: whether a rank trains the hidden states
        assert numbers == expected, (engine, way, options, counts[0])
        assert gradient == count * hidden, (engine, way, counts[0])
        assert max(size for _, size in counts[0]) <= max(N * classes // 8 - 1, count * hidden), "logits"


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


def unlike_gpus() -> None:
    """Ranks with GPUs of other sizes, or of another kind, plan alike: else they would wait for each other for ever."""
    rank, hidden, classes = dist.get_rank(), 4096, 30000
    for memory, kinds in (((80, 6, 24), (9, 9, 9)), ((80, 6, 24), (9, 8, 9)), ((24, 80, 40), (9, 9, 12))):
        with pytest.MonkeyPatch.context() as patched:
            gpu = torch.device("cuda")
            here = SimpleNamespace(total_memory=memory[rank] << 30)
            patched.setattr(torch.cuda, "is_available", lambda: True)
            patched.setattr(torch.cuda, "get_device_properties", lambda _, here=here: here)
            patched.setattr(torch.cuda, "get_device_capability", lambda _, kinds=kinds: (kinds[rank], 0))
            limits_here = vocab_shard._limits_here
            patched.setattr(vocab_shard, "_limits_here", lambda _, real=limits_here, gpu=gpu: real(gpu))
            group = dist.new_group()
            shard = lowtide.VocabShard.of(torch.empty(classes, 0, device=DEVICE), group)
            for dtype in (torch.bfloat16, torch.float32):
                ranks = Ranks(shard, (20000,), torch.device(DEVICE), None, None)
                weight = torch.empty(classes, hidden, dtype=dtype, device="meta")
                of_head: Any = SimpleNamespace(
                    input=SimpleNamespace(device=gpu), weight_VD=weight, dtype=dtype, ranks=ranks, softcap=None,
                    options=lowtide.HeadOptions(), ignored_tokens="skip", order=0,
                )  # fmt: skip
                of_loss = CrossEntropyArgs(torch.empty(0), None, None, None, "mean", -100, 0.0, 0.0)
                plan = plan_cross_entropy(of_head, of_loss, 20000, Wanted(True, True, True))
                plans = of_all_ranks((plan.backend, plan.chunk_rows, plan.chunks, plan.sum_rows))
                assert len(set(plans)) == 1, (memory, kinds, dtype, plans)
                if len({*kinds[: dist.get_world_size()]}) > 1:
                    of_head.options = lowtide.HeadOptions(backend="exp")
                    with pytest.raises(UnsupportedError, match="exp"):
                        plan_cross_entropy(of_head, of_loss, 20000, Wanted(True, True, True))
            dist.destroy_process_group(group)


def kinds_of_devices() -> None:
    """What a weight on the host tells of the ranks does not stand for their GPUs; None is the group of all ranks."""
    group = dist.new_group()
    numbers_of_all = vocab_shard.exchange.numbers_of_all
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            vocab_shard, "_limits_here", lambda device: (80 << 30, 1, 1, 1) if device.type == "cuda" else (0, 0, 0, 0)
        )
        patched.setattr(
            vocab_shard.exchange, "numbers_of_all", lambda numbers, its, _: numbers_of_all(numbers, its, DEVICE)
        )
        lowtide.VocabShard.of(torch.empty(4, 6), group)
        on_gpus = vocab_shard.limits_of(group, torch.device("cuda"))
        assert on_gpus == (80 << 30, True, True, True)
        lowtide.VocabShard.of(torch.empty(4, 6), group)
        assert vocab_shard.limits_of(group, torch.device("cuda")) == on_gpus
        assert vocab_shard.limits_of(group, torch.device("cpu")) == (None, False, False, False)
    dist.destroy_process_group(group)

    x, w, _, y = head(LEADING, D, V, dtype=torch.float64, bias=False)
    part = part_of(w)
    here = lowtide.VocabShard.of(part)
    given = lowtide.VocabShard(group=None, first=here.first, rows=here.rows, vocab=V, largest=here.largest)
    assert given == here
    near(lowtide.linear_cross_entropy(x, part, y, vocab_shard=given), oracle(x, w, y), "group=None")


def a_rank_that_never_comes() -> None:
    """The others' call ends with the process group's error, after its timeout."""
    group = dist.new_group()
    x, w, _, y = head(LEADING, D, V, bias=False)
    part = part_of(w)
    shard = lowtide.VocabShard.of(part, group)
    _set_pg_timeout(timedelta(seconds=0.2), group)  # what comes before may take longer
    if dist.get_rank() != 1:
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=r"(?i)time|timed out|closed|reset"):
            lowtide.linear_cross_entropy(x, part, y, vocab_shard=shard)
        assert time.monotonic() - start < 20


if __name__ == "__main__":
    main(vars())
