"""The exponential path with the vocabulary in parts: kernels by Triton's interpreter, in float32, on several ranks."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import lowtide
from distributed.launch import main, named
from distributed.vocab_cases import exchanged, plain, shard_of, spread, whole
from lowtide.head.head_plan import HeadPlan
from lowtide.head.kernels import configs
from lowtide.head.vocab import cross_entropy as vocab_cross_entropy
from support import head, oracle, relative_error

SMALL = configs.GemmConfig(rows=16, columns=32, depth=16, group=2, stages=1, warps=4, pieces=2)
N, D, V = 22, 16, 50
OPTIONS: list[dict[str, Any]] = [
    {},
    {"softcap": 9.0, "z_loss": 0.01, "logit_scale": 0.7},
    {"label_smoothing": 0.1, "z_loss": 0.01, "weight": True, "token_weight": True},
    {"label_smoothing": 0.2, "reduction": "none"},
]
NEAR = 2e-5  # beside what plain PyTorch in float32 errs


def small_plan(job: Any, ranks: Any, options: lowtide.HeadOptions, wanted: Any) -> HeadPlan:
    blocks = options.gradient == "recompute" or SCHEDULE == "blocks"
    tokens = ranks.tokens.groups * ranks.tokens.length
    return HeadPlan(
        backend="exp", reason="", gradient="forward", accumulate="input", rows=tokens, chunks=-(-tokens // 16),
        chunk_rows=16, scratch_bytes=0, accumulator_bytes=0, cast_bytes=0, schedule="blocks" if blocks else "chunks",
        block_columns=24 if blocks else V, sum_rows=19, product_rows=6,
    )  # fmt: skip


SCHEDULE = "chunks"


def with_small_plans() -> None:
    vars(vocab_cross_entropy)["_plan"] = small_plan
    vars(configs)["of_device"] = lambda device: SMALL
    warnings.simplefilter("ignore", RuntimeWarning)  # the interpreter computes in NumPy


def values_and_gradients() -> None:
    """Ordinary and huge logits, each option, both schedules, forward and recompute."""
    global SCHEDULE
    with_small_plans()
    ways = itertools.product(OPTIONS, (False, True))
    for i, (options, huge) in enumerate(ways):
        way = ("replicated", "sequence", "local")[i % 3]
        SCHEDULE = ("chunks", "chunks", "blocks")[(i // 2) % 3]
        gradient = "recompute" if i == 1 else "auto"
        x, w, b, y = head((1, N), D, V, seed=i)
        y[0, 3::4] = -100
        with torch.no_grad():
            if huge:
                x[:, : N // 5] *= 100
        kwargs = dict(options)
        for key, size in (("weight", (V,)), ("token_weight", (1, N))):
            if key in kwargs:
                kwargs[key] = torch.rand(size, generator=torch.Generator().manual_seed(1)) + 0.1
        exact = [t.detach().double().requires_grad_() for t in (x, w, b)]
        usual = [t.detach().clone().requires_grad_() for t in (x, w, b)]
        wide = {k: v.double() if isinstance(v, Tensor) else v for k, v in kwargs.items()}
        want = oracle(exact[0], exact[1], y, linear_bias=exact[2], **wide)
        in_float32 = oracle(usual[0], usual[1], y, linear_bias=usual[2], **kwargs)
        u = torch.rand(want.shape, generator=torch.Generator().manual_seed(i))
        (want * u).sum().backward()
        (in_float32 * u).sum().backward()
        digits = (usual[0].abs() @ usual[1].abs().T).max().item() * 2**-22 if huge else 0.0
        with torch.no_grad():
            x[0, 3::4] = torch.nan
        px, pw, pb = (spread(way, t, of_vocab=k > 0) for k, t in enumerate((x, w, b)))
        loss = plain(
            lowtide.linear_cross_entropy(
                px, pw, y, linear_bias=pb, **kwargs, **shard_of(way, pw), options=lowtide.HeadOptions(gradient=gradient)
            )
        )
        what = (options, way, huge, SCHEDULE, gradient)
        assert relative_error(loss, want) < NEAR + digits + 4 * relative_error(in_float32, want), what
        (loss * u).sum().backward()
        for k, (part, leaf, baseline) in enumerate(zip((px, pw, pb), exact, usual, strict=True)):
            assert leaf.grad is not None
            assert baseline.grad is not None
            error = relative_error(whole(way, part.grad, of_vocab=k > 0), leaf.grad)
            assert error < 4 * NEAR + digits + 4 * relative_error(baseline.grad, leaf.grad), (what, k, error)


def edges() -> None:
    """Few tokens or none, ranks without a class or a token, all ignored, unlike requires_grad, a graph used twice."""
    global SCHEDULE
    with_small_plans()
    cases: list[tuple[int, int, dict[str, Any]]] = [
        (0, 20, {"reduction": "sum"}),
        (1, 20, {"label_smoothing": 0.1}),  # two ranks have no token of the sequence
        (5, 2, {"label_smoothing": 0.2, "z_loss": 0.01}),  # one rank has no class
        (5, 20, {"ignored": True, "num_items": 3.0}),
        (7, 20, {"weight": True, "frozen_on": 0}),
    ]
    for i, ((n, classes, options), way) in enumerate(itertools.product(cases, ("replicated", "sequence", "local"))):
        if way == "local" and classes < 20:
            continue
        SCHEDULE = ("chunks", "blocks")[i % 2]
        x, w, _, y = head((1, n), D, classes, seed=i, bias=False)
        kwargs = dict(options)
        frozen = kwargs.pop("frozen_on", None) == dist.get_rank()
        if kwargs.pop("ignored", False):
            y.fill_(-100)
        if "weight" in kwargs:
            kwargs["weight"] = torch.rand(classes, generator=torch.Generator().manual_seed(1)) + 0.1
        px, pw = spread(way, x, of_vocab=False), spread(way, w, of_vocab=True)
        pw.requires_grad_(not frozen)
        shard = shard_of(way, pw)
        with exchanged() as seen:
            loss = plain(lowtide.linear_cross_entropy(px, pw, y, **kwargs, **shard))
        of_tokens(seen, n, way, kwargs)
        again = loss
        if n == 7:
            with torch.no_grad():
                again = plain(lowtide.linear_cross_entropy(px, pw, y, **kwargs, **shard))
        want = oracle(x, w, y, **kwargs)
        torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-6, msg=lambda m, w=(i, way): f"{w} {m}")
        torch.testing.assert_close(again, want, rtol=1e-5, atol=1e-6)
        (loss * 0.3).backward(retain_graph=True)
        (loss * 0.7).backward()
        want.backward()
        assert (pw.grad is None) == frozen
        got = torch.zeros_like(pw) if pw.grad is None else pw.grad
        for part, leaf, of_vocab in ((px.grad, x, False), (got, w, True)):
            assert leaf.grad is not None
            in_full, true = whole(way, part, of_vocab=of_vocab), leaf.grad
            if of_vocab and options.get("frozen_on") is not None:  # that rank's rows are nobody's
                in_full, true = in_full[in_full.any(1)], true[in_full.any(1)]
                assert len(true)
            torch.testing.assert_close(in_full, true, rtol=2e-5, atol=2e-6, msg=lambda m, w=(i, way): f"{w} {m}")


def trained_on_one_rank() -> None:
    """Hidden states that need no gradient, and a weight that one rank trains: all ask for the same exchanges."""
    global SCHEDULE
    with_small_plans()
    ways = itertools.product(("replicated", "sequence"), ("chunks", "blocks"), (0.0, 0.1), ("auto", "recompute"))
    for i, (way, schedule, smoothing, gradient) in enumerate(ways):
        if way == "sequence" and gradient == "recompute":
            continue  # the others have no backward to gather hidden states in
        SCHEDULE = schedule
        x, w, _, y = head((1, N), D, V, seed=i, bias=False)
        px, pw = spread(way, x.detach(), of_vocab=False), spread(way, w.detach(), of_vocab=True)
        options = lowtide.HeadOptions(gradient=gradient)
        trained = dist.get_rank() == 0
        with exchanged() as seen:
            pw.requires_grad_(trained)
            loss = plain(lowtide.linear_cross_entropy(px, pw, y, label_smoothing=smoothing, options=options))
            if trained:
                loss.backward()
        asked: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(asked, seen)
        assert all(other == seen for other in asked), (way, schedule, smoothing, gradient, asked)
        want = oracle(x, w, y, label_smoothing=smoothing)
        want.backward()
        torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-6)
        assert w.grad is not None
        if trained:
            mine = pw.grad.to_local()
            torch.testing.assert_close(mine, w.grad[: len(mine)], rtol=2e-5, atol=2e-6)
        with torch.no_grad(), exchanged() as seen:  # nobody trains: nothing is exchanged for gradients
            lowtide.linear_cross_entropy(px, pw, y, label_smoothing=smoothing)
        tokens = -(-N // dist.get_world_size())
        gathered = sum(size for name, size in seen if name.startswith("all_gather"))
        numbers = (3 + (smoothing > 0)) * (tokens * dist.get_world_size() if way == "sequence" else N)
        assert gathered == numbers + (tokens * D if way == "sequence" else 0), (way, schedule, smoothing, seen)


def of_tokens(seen: list[tuple[str, int]], n: int, way: str, options: dict[str, Any]) -> None:
    """Check what was exchanged: three numbers a token, one more for either option, and the input's gradient."""
    ranks = dist.get_world_size()
    tokens, times = n, 1
    if way == "sequence":
        tokens = -(-n // ranks) * ranks  # parts are filled up
        # smoothing's share of the weight's gradient reads the hidden states first; blocks read them a second time
        times = 1 + ("label_smoothing" in options) + (SCHEDULE == "blocks")
    numbers = sum(size for name, size in seen if name.startswith("all_gather"))
    want = tokens * (3 + ("label_smoothing" in options)) + (tokens + 1) * ("weight" in options)
    want += times * tokens // ranks * D if way == "sequence" else 0
    assert numbers == want, (way, n, options, seen)
    assert sum(size for name, size in seen if name.startswith(("all_reduce", "reduce_scatter"))) == tokens * D
    assert max((size for _, size in seen), default=0) <= max(2, D) * max(tokens, 1)


CASES = named(values_and_gradients, edges, trained_on_one_rank)

if __name__ == "__main__":
    main(CASES)
