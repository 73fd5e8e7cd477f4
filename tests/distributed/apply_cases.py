"""Any function of a sharded vocabulary's logits, beside plain autograd on the whole in float64, on each rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import lowtide
from distributed.launch import DEVICE, main, named
from distributed.vocab_cases import (
    LEADING,
    WAYS,
    D,
    V,
    exchanged,
    head,
    in_ways,
    mesh,
    near,
    part_of,
    plain,
    rand,
    shard_of,
    sizes,
    spread,
    whole,
)
from lowtide.errors import ArgumentValueError
from lowtide.measure import peak_above, track_allocations

TINY = 0.03  # MiB: several chunks, and several pieces of each
OPTIONS: list[dict[str, Any]] = [
    {},
    {"out": "sum", "bias": True},
    {"bias": True, "softcap": 2.0, "logit_scale": 0.7, "params": True},
    {"out": "sum", "softcap": 1.5, "params": True, "token_args": True},
    {"out": "sum", "gradient": "recompute", "mask": True, "token_args": True, "params": True},
    {"mask": True, "bias": True, "token_args": True},
    {"out": "sum", "mask": True, "logit_scale": "trained", "bias": True},
    {"logit_scale": "trained", "params": True, "softcap": 3.0},
    {"out": "sum", "several": True, "token_args": True},
    {"frozen": "xw", "params": True, "token_args": True},
    {"frozen": "w", "out": "sum", "bias": True},
    {"frozen": "xwbap", "bias": True},
]


def loss(z: Tensor, y: Tensor, a: Tensor, p: Tensor) -> Any:
    """Return a loss, and what is not differentiable or none."""
    z = z + p[0] * z.square()
    each = a * p[1] * F.cross_entropy(z, y, reduction="none") + z.log_softmax(-1).exp().square().sum(-1)
    return {"loss": each, "right": z.argmax(-1) == y, "none": None}


def summed(z: Tensor, y: Tensor, a: Tensor, p: Tensor) -> Any:
    found = loss(z, y, a, p)
    return {"loss": found["loss"].sum(), "right": found["right"].sum(), "none": None}


def two_sums(z: Tensor, y: Tensor, a: Tensor, p: Tensor) -> Any:
    return summed(z, y, a, p) | {"other": z.logsumexp(-1).square().sum()}


def function_of(options: dict[str, Any]) -> Any:
    if options.get("several"):
        return two_sums
    return summed if options.get("out") == "sum" else loss


def every_option() -> None:
    """Every option in every way: values, and the gradients of all that can have one."""
    for i, options, way in in_ways(OPTIONS):
        x, w, b, y = head(LEADING, D, V, dtype=torch.float64, seed=i, bias="bias" in options)
        a, p = rand(*LEADING, seed=20 + i).requires_grad_(), rand(2, seed=30 + i).requires_grad_()
        a.requires_grad_("token_args" in options)
        p.requires_grad_("params" in options)
        for name, tensor in zip("xwbap", (x, w, b, a, p), strict=True):
            if tensor is not None and name in options.get("frozen", ""):
                tensor.requires_grad_(False)
        scales: list[Any] = [options.get("logit_scale", 1.0)] * 2
        if scales[0] == "trained":
            scales = [torch.tensor(0.8, dtype=torch.float64, device=DEVICE, requires_grad=True) for _ in range(2)]
        mask = rand(*LEADING, seed=40 + i) < 0.6 if "mask" in options else None
        px, pw, pb = (spread(way, t, of_vocab=k > 0) for k, t in enumerate((x, w, b)))
        pa, pp = (t.detach().clone().requires_grad_(t.requires_grad) for t in (a, p))
        got = lowtide.linear_apply(
            function_of(options), px, pw, y, pa, linear_bias=pb, params=(pp,), mask=mask,
            out=options.get("out", "token"), softcap=options.get("softcap"), logit_scale=scales[0],
            options=lowtide.HeadOptions(workspace_mib=TINY, gradient=options.get("gradient", "auto")),
            **shard_of(way, pw),
        )  # fmt: skip
        want = in_full(options, x, w, b, scales[1], mask, y, a, p)
        what = (options, way)
        assert got["none"] is None
        assert torch.equal(plain(got["right"]), want["right"]), what
        outputs = [name for name in want if want[name] is not None and want[name].is_floating_point()]
        for name in outputs:
            near(got[name], want[name], (name, what))
            assert plain(got[name]).requires_grad == want[name].requires_grad, (name, what)
        if not want["loss"].requires_grad:
            continue
        factors = {name: rand(*want[name].shape, seed=50 + i) for name in outputs}
        sum((plain(got[name]) * factors[name]).sum() for name in outputs).backward()
        sum((want[name] * factors[name]).sum() for name in outputs).backward()
        for k, (ours, true) in enumerate(zip((px, pw, pb), (x, w, b), strict=True)):
            if true is not None and true.requires_grad:
                near(whole(way, ours.grad, of_vocab=k > 0), true.grad, ("xwb"[k], what))
        for name, ours, true in (("a", pa, a), ("p", pp, p), ("scale", *scales)):
            if isinstance(true, Tensor) and true.requires_grad:
                near(ours.grad, true.grad, (name, what))


def in_full(options: dict[str, Any], x: Any, w: Any, b: Any, scale: Any, mask: Any, *args: Any) -> Any:
    """The same by plain autograd, every rank the whole."""
    z = F.linear(x, w, b) * scale
    if "softcap" in options:
        z = options["softcap"] * torch.tanh(z / options["softcap"])
    leading = z.shape[:-1]
    y, a, p = args
    kept = torch.ones(leading, dtype=torch.bool, device=DEVICE) if mask is None else mask
    found = function_of(options)(z[kept], y[kept], a[kept], p)
    if options.get("out") == "sum":
        return found
    return {k: v if v is None else v.new_zeros(leading).masked_scatter(kept, v) for k, v in found.items()}


def random_numbers() -> None:
    """Each row's are drawn by one rank, and backward draws them again: the gradient is that of its own forward."""

    def noisy(z: Tensor) -> Any:
        drawn = torch.rand_like(z)
        return (z * drawn).sum(-1), drawn

    for way in WAYS:
        x, w, _, _ = head(LEADING, D, V, dtype=torch.float64, bias=False)
        px, pw = spread(way, x, of_vocab=False), spread(way, w, of_vocab=True)
        torch.manual_seed(3 + dist.get_rank())
        options = lowtide.HeadOptions(workspace_mib=TINY)
        value, drawn = lowtide.linear_apply(noisy, px, pw, options=options, **shard_of(way, pw))
        drawn = plain(drawn)
        assert 0.4 < drawn.mean() < 0.6
        want = (F.linear(x, w) * drawn).sum(-1)
        near(value, want, way)
        state = torch.get_rng_state()
        plain(value).square().sum().backward()
        assert torch.equal(state, torch.get_rng_state())
        want.square().sum().backward()
        near(whole(way, px.grad, of_vocab=False), x.grad, way)
        near(whole(way, pw.grad, of_vocab=True), w.grad, way)
        for gradient in ("forward", "recompute"):  # of a linear function: value = x dx
            px.grad = None
            options = lowtide.HeadOptions(workspace_mib=TINY, gradient=gradient)
            total = lowtide.linear_apply(
                lambda z: noisy(z)[0].sum(), px, pw, out="sum", options=options, **shard_of(way, pw)
            )
            plain(total).backward()
            near((whole(way, px.grad, of_vocab=False) * x).sum(), plain(total).detach(), (way, gradient))


def few_tokens() -> None:
    """Fewer tokens than ranks, none, and masks that leave a rank or all ranks without."""
    masks = (None, [True] + [False] * 4, [False] * 4 + [True], [False] * 5)
    for way in WAYS:
        for N, mask, out in ((N, m, o) for N in (0, 1, 5) for m in masks for o in ("token", "sum")):
            x, w, b, y = head((1, N), D, V, dtype=torch.float64)
            px, pw, pb = (spread(way, t, of_vocab=k > 0) for k, t in enumerate((x, w, b)))
            p = torch.ones(2, dtype=torch.float64, device=DEVICE, requires_grad=True)
            kept = None if mask is None else torch.tensor(mask[:N], dtype=torch.bool, device=DEVICE).view(1, N)
            a = torch.ones(1, N, dtype=torch.float64, device=DEVICE)
            fn = function_of({"out": out})
            found = lowtide.linear_apply(
                fn, px, pw, y, a, linear_bias=pb, params=(p,), mask=kept, out=out,
                options=lowtide.HeadOptions(workspace_mib=TINY), **shard_of(way, pw),
            )  # fmt: skip
            q = p.detach().clone().requires_grad_()
            want = in_full({"out": out}, x, w, b, 1.0, kept, y, a, q)
            what = (way, N, mask, out)
            near(found["loss"], want["loss"], what)
            plain(found["loss"]).sum().backward()
            want["loss"].sum().backward()
            near(p.grad, q.grad, what)
            for k, (ours, true) in enumerate(zip((px, pw, pb), (x, w, b), strict=True)):
                near(whole(way, ours.grad, of_vocab=k > 0), true.grad, ("xwb"[k], what))


def results_of_any_kind() -> None:
    """Complex numbers, whole numbers, minus zeros, infinities and NaN come to every rank bit for bit."""

    def fn(z: Tensor) -> Any:
        odd = torch.stack((z[:, 0] / 0, -0.0 * z[:, 1].abs(), z[:, 2] * torch.nan), 1)
        return torch.complex(z[:, :2], z[:, 2:4]), z.topk(3)[1].short(), odd, z.bfloat16()

    x, w, _, _ = head(LEADING, D, V, bias=False)
    with torch.no_grad():
        got = lowtide.linear_apply(fn, x, part_of(w), vocab_shard=lowtide.VocabShard.of(part_of(w)))
        want = lowtide.linear_apply(fn, x, w)
    for ours, true in zip(got, want, strict=True):
        assert (ours.dtype, ours.shape) == (true.dtype, true.shape)
        torch.testing.assert_close(ours, true, equal_nan=True)
    assert torch.equal(got[2][..., 1].signbit(), want[2][..., 1].signbit())
    everyone = [torch.empty_like(got[3]) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, got[3])
    assert all(torch.equal(other, got[3]) for other in everyone)


def checkpointed_and_compiled() -> None:
    """Inside torch.utils.checkpoint, in bfloat16 under autocast, and with fn compiled."""
    x, w, b, y = head(LEADING, D, V)
    px, pw, pb = (spread("local", t, of_vocab=k > 0) for k, t in enumerate((x, w, b)))
    shard = lowtide.VocabShard.of(pw)

    def run(x: Tensor, w: Tensor, b: Tensor | None, **kwargs: Any) -> Tensor:
        return lowtide.linear_apply(
            lambda z, y: F.cross_entropy(z, y, reduction="none"), x, w, y, linear_bias=b, **kwargs
        )

    for compile in (False, True):
        px.grad = pw.grad = x.grad = w.grad = None
        with torch.autocast(DEVICE, torch.bfloat16):
            checkpoint(run, px, pw, pb, vocab_shard=shard, compile=compile, use_reentrant=False).sum().backward()
            run(x, w, b).sum().backward()
        for ours, true in ((px.grad, x.grad), (whole("local", pw.grad, of_vocab=True), w.grad)):
            torch.testing.assert_close(ours, true, rtol=2e-2, atol=2e-2)


def the_same_exchanges_whatever_the_numbers() -> None:
    x, w, _, y = head((1, 40), D, V)
    pw = part_of(w)
    shard = lowtide.VocabShard.of(pw)
    a, p = torch.ones(1, 40, device=DEVICE), torch.ones(2, device=DEVICE)
    seen = []
    for factor in (1.0, torch.nan):
        with exchanged() as made:
            found = lowtide.linear_apply(
                loss, x.detach() * factor, pw, y, a, params=(p,), vocab_shard=shard,
                options=lowtide.HeadOptions(workspace_mib=0.2),
            )  # fmt: skip
            found["loss"].sum().backward()
        seen.append(list(made))
    assert seen[0] == seen[1]
    others: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(others, [name for name, _ in seen[0]])
    assert all(other == others[0] for other in others)


def memory() -> None:
    """A chunk's logits of this rank's classes, and whole ones of its share of the rows: never all tokens' logits."""
    N, V = 1024, 4000
    x, w, _, _ = head((1, N), 16, V, bias=False)
    pw = part_of(w)
    shard = lowtide.VocabShard.of(pw)
    for out in ("token", "sum"):
        px = x.detach().requires_grad_()

        def run(px: Tensor = px, out: str = out) -> None:
            fn = (lambda z: z.logsumexp(-1)) if out == "token" else (lambda z: z.logsumexp(-1).sum())
            options = lowtide.HeadOptions(workspace_mib=2)
            lowtide.linear_apply(fn, px, pw, out=out, vocab_shard=shard, options=options).sum().backward()

        if DEVICE == "cuda":
            assert peak_above(run, DEVICE) < N * V * 4 / 2, out
        else:  # what gloo's threads free is not seen, so that no peak is
            with track_allocations() as seen:
                run()
            assert 0 < seen.largest_bytes < 2**20, (out, seen.largest_bytes)


def errors() -> None:
    """The same error on every rank, before any of them waits for another."""
    rank = dist.get_rank()
    x, w, b, y = head(LEADING, D, V, dtype=torch.float64)
    pw, shard = part_of(w), lowtide.VocabShard.of(part_of(w))

    def call(fn: Any = lambda z: z.sum(-1), x: Tensor = x, *args: Tensor, **kwargs: Any) -> Any:
        return lowtide.linear_apply(fn, x, kwargs.pop("w", pw), *args, vocab_shard=shard, **kwargs)

    first = rank == 0
    with pytest.raises(ArgumentValueError, match=r"out: expected the same on every rank"):
        call(lambda z: z.sum() if first else z.sum(-1), out="sum" if first else "token")
    with pytest.raises(ArgumentValueError, match=r"requires_grad of input: expected the same on every rank"):
        call(x=x.detach().requires_grad_(first))
    with pytest.raises(ArgumentValueError, match=r"requires_grad of linear_weight: expected the same on every rank"):
        call(w=pw.detach().requires_grad_(first))
    with pytest.raises(ArgumentValueError, match=r"requires_grad of token_args and params"):
        call(lambda z, p: z.sum(-1) * p, params=(torch.ones((), device=DEVICE, requires_grad=first),))
    with pytest.raises(ArgumentValueError, match=r"number of tokens: expected the same on every rank"):
        call(mask=torch.ones(LEADING, dtype=torch.bool, device=DEVICE) if first else y == 3)
    with pytest.raises(ArgumentValueError, match=r"gradient: expected the same on every rank"):
        call(options=lowtide.HeadOptions(gradient="recompute" if first else "auto"))
    with pytest.raises(ArgumentValueError, match=r"rows of a chunk: expected the same on every rank"):
        call(options=lowtide.HeadOptions(workspace_mib=0.001 if first else 1))
    with pytest.raises(ArgumentValueError, match="depend on the other tokens"):
        call(lambda z: z - z.mean(0))
    with pytest.raises(ArgumentValueError, match="does not add up"):
        call(lambda z: z.mean(), out="sum")
    other = lowtide.VocabShard(group=None, first=0, rows=sizes(V)[rank], vocab=V, largest=max(sizes(V)))
    with pytest.raises(ArgumentValueError, match=r"vocab_shard: expected parts of 50 classes, one after another"):
        lowtide.linear_apply(lambda z: z.sum(-1), x, pw, vocab_shard=other)
    sequence = distribute_tensor(x.detach(), mesh(), [Shard(1)])
    head_of = [distribute_tensor(t.detach(), mesh(), [Shard(0)]) for t in (w, b)]
    with pytest.raises(ArgumentValueError, match="depend on the other tokens"):
        lowtide.linear_apply(lambda z: z - z.mean(0), sequence, head_of[0], linear_bias=head_of[1])
    labels = distribute_tensor(y, mesh(), [Replicate()])
    found = lowtide.linear_apply(lambda z, y: z.gather(1, y[:, None]), sequence, head_of[0], labels)
    near(found, F.linear(x, w).gather(-1, y[..., None]), "labels as a DTensor")


CASES = named(
    every_option,
    random_numbers,
    few_tokens,
    results_of_any_kind,
    checkpointed_and_compiled,
    the_same_exchanges_whatever_the_numbers,
    memory,
    errors,
)

if __name__ == "__main__":
    main(CASES)
