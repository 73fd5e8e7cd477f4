"""The exponential path with the vocabulary in parts: kernels by Triton's interpreter, in float32, on several ranks."""

from __future__ import annotations

import itertools
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lowtide
from distributed.kernel_cases import kernels
from distributed.launch import THOROUGH, main
from distributed.vocab_cases import exchanged, of_all_ranks, plain, shard_of, spread, whole
from lowtide.head import plan as planner
from lowtide.head.call import CrossEntropyArgs, Wanted
from lowtide.head.engine import Chunks
from lowtide.head.exponentials import loops, losses
from lowtide.head.matmul import matmul_into
from lowtide.head.ranks import tokens
from lowtide.head.ranks.parallel import Ranks
from lowtide.head.ranks.shard import Limits
from support import head, oracle

N, D, V = 20, 16, 50


def edges() -> None:
    """Few tokens or none, ranks without a class or a token, all ignored, unlike requires_grad, a graph used twice."""
    for way in ("replicated", "local"):  # at a group's first call its ranks tell each other what they can do
        x, w, _, y = head((1, 3), D, V)
        px, pw = spread(way, x, of_vocab=False), spread(way, w, of_vocab=True)
        lowtide.linear_cross_entropy(px, pw, y, **shard_of(way, pw))
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
        schedule = ("chunks", "blocks")[i % 2]
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
        with kernels(schedule):
            with exchanged() as seen:
                loss = plain(lowtide.linear_cross_entropy(px, pw, y, **kwargs, **shard))
            again = loss
            if n == 7:
                with torch.no_grad():
                    again = plain(lowtide.linear_cross_entropy(px, pw, y, **kwargs, **shard))
            (loss * 0.3).backward(retain_graph=True)
            (loss * 0.7).backward()
        of_tokens(seen, n, way, kwargs, schedule)
        want = oracle(x, w, y, **kwargs)
        torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-6, msg=lambda m, w=(i, way): f"{w} {m}")
        torch.testing.assert_close(again, want, rtol=1e-5, atol=1e-6)
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
    """Hidden states that need no gradient, and a weight that one rank trains: all ask for the same exchanges.

    The others may compute under no_grad, and have no backward. Nobody exchanges anything twice.
    """
    ways: Any = [
        ("replicated", "chunks", 0.0, "auto"),
        ("replicated", "blocks", 0.1, "auto"),
        ("sequence", "blocks", 0.0, "auto"),
        ("replicated", "blocks", 0.0, "recompute"),
        ("sequence", "chunks", 0.1, "auto"),
        ("sequence", "blocks", 0.1, "recompute"),
    ]
    if THOROUGH:
        ways = itertools.product(("replicated", "sequence"), ("chunks", "blocks"), (0.0, 0.1), ("auto", "recompute"))
    for i, (way, schedule, smoothing, gradient) in enumerate(ways):
        x, w, _, y = head((1, N), D, V, seed=i, bias=False)
        px, pw = spread(way, x.detach(), of_vocab=False), spread(way, w.detach(), of_vocab=True)
        options = lowtide.HeadOptions(gradient=gradient)
        trained = dist.get_rank() == 0
        with kernels(schedule), exchanged() as seen, torch.set_grad_enabled(trained or i % 5 > 0):
            pw.requires_grad_(trained)
            loss = plain(lowtide.linear_cross_entropy(px, pw, y, label_smoothing=smoothing, options=options))
            if trained:
                loss.backward()
        asked = of_all_ranks(seen)
        assert all(other == seen for other in asked), (way, schedule, smoothing, gradient, asked)
        held = -(-N // dist.get_world_size())
        gathered = sum(size for name, size in seen if name.startswith("all_gather"))
        numbers = (3 + (smoothing > 0)) * (held * dist.get_world_size() if way == "sequence" else N)
        assert gathered == 1 + numbers + (held * D if way == "sequence" else 0), (way, schedule, smoothing, seen)
        want = oracle(x, w, y, label_smoothing=smoothing)
        want.backward()
        torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-6)
        assert w.grad is not None
        if trained:
            mine = pw.grad.to_local()
            torch.testing.assert_close(mine, w.grad[: len(mine)], rtol=2e-5, atol=2e-6)


def sums_beside_products() -> None:
    """The hidden states' gradient begins to be summed before a product of the weight's, and is waited for after it."""
    x, w, _, y = head((1, N), D, V, seed=0, bias=False)
    for way, kind in itertools.product(("replicated", "sequence"), ("chunks", "blocks", "logits")):
        px, pw = spread(way, x, of_vocab=False), spread(way, w, of_vocab=True)
        events: list[str] = []

        def noted(event: str, function: Any, events: list[str] = events) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                if event != "product" or args[0].stride(0) == 1:  # E^T: the weight's, not the input's
                    events.append(event)
                return function(*args, **kwargs)

            return call

        with kernels(kind) if kind != "logits" else nullcontext(), pytest.MonkeyPatch.context() as patched:
            begin_sum = noted("begun", Ranks.begin_sum)
            patched.setattr(Ranks, "begin_sum", lambda *args, begin=begin_sum: noted("waited", begin(*args)))
            for module in (loops, losses):
                patched.setattr(module, "matmul_into", noted("product", matmul_into))
            patched.setattr(Chunks, "weight_grad", noted("weight's", Chunks.weight_grad))
            if kind == "logits":
                options = lowtide.HeadOptions(workspace_mib=0.01)
                plain(lowtide.linear_token_stats(px, pw, want=("entropy",), options=options).entropy.sum()).backward()
            else:
                plain(lowtide.linear_cross_entropy(px, pw, y)).backward()
        sums = [i for i, event in enumerate(events) if event == "begun"]
        assert len(sums) > 1
        assert events.count("waited") == len(sums)
        for k, i in enumerate(sums):  # the k-th that is waited for is the k-th that was begun
            waited = [j for j, event in enumerate(events) if event == "waited"][k]
            assert {"product", "weight's"} & {*events[i:waited]}, (way, kind, events)


def plans_of_what_is_fetched_ahead() -> None:
    """As many pieces of hidden states live at once as plans count, with sums alone and with gradients."""
    ranks = dist.get_world_size()
    x, w, _, y = head((1, 66), D, V, seed=0, bias=False)
    px, pw = spread("sequence", x, of_vocab=False), spread("sequence", w, of_vocab=True)
    live: list[Any] = []
    most = []
    begin_rows = tokens.SpreadTokens.begin_rows

    def watched(*args: Any) -> Any:
        told = begin_rows(*args)
        live.append(weakref.ref(told.value))
        most.append(sum(storage() is not None for storage in live))
        return told

    with kernels("blocks"), pytest.MonkeyPatch.context() as patched:
        patched.setattr(tokens.SpreadTokens, "begin_rows", watched)
        with torch.no_grad():
            lowtide.linear_cross_entropy(px, pw, y)
        of_sums = max(most)
        most.clear()
        plain(lowtide.linear_cross_entropy(px, pw, y, options=lowtide.HeadOptions(gradient="recompute"))).backward()
        rebuilding = max(most[len(most) // 2 :])
    assert (of_sums, rebuilding) == (4, 3), (of_sums, rebuilding)

    hidden, classes, mib = 4096, 32064, 160
    of_head: Any = SimpleNamespace(
        input=SimpleNamespace(device=torch.device("cpu")), dtype=torch.bfloat16,
        weight_VD=torch.empty(classes, hidden, dtype=torch.bfloat16, device="meta"), softcap=None,
        options=lowtide.HeadOptions(gradient="recompute", workspace_mib=mib),
    )  # fmt: skip
    of_loss = CrossEntropyArgs(torch.empty(0), None, None, None, "mean", -100, 0.0, 0.0)
    for is_spread in (False, True):  # hidden states are copied also where autocast rounds them
        of_head.ranks = SimpleNamespace(
            most_rows=classes, limits=Limits(80 << 30, True), spread=is_spread, alone=False, groups=ranks,
            slots=30000 // ranks * ranks,
        )  # fmt: skip
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(planner, "why_not_exp", lambda *_, **__: None)
            plan = planner.plan_cross_entropy(of_head, of_loss, 30000, Wanted(True, True, True))
        assert plan.schedule == "blocks"
        of_x = 2 * hidden
        in_sums = plan.sum_rows * (of_sums * of_x + 4 * classes // 128)
        # hidden states, s x, and the products in float32 of this chunk and of the one whose sum is under way
        in_gradients = plan.chunk_rows * ((rebuilding + 1) * of_x + 2 * 4 * hidden + 2 * plan.block_columns)
        assert max(in_sums, in_gradients) <= mib * 2**20, (is_spread, in_sums / 2**20, in_gradients / 2**20)


def of_tokens(seen: list[tuple[str, int]], n: int, way: str, options: dict[str, Any], schedule: str) -> None:
    """Check what was exchanged: three numbers a token, one more for either option, and the input's gradient."""
    ranks = dist.get_world_size()
    count, times = n, 1
    if way == "sequence":
        count = -(-n // ranks) * ranks  # parts are filled up
        times = 1 + (schedule == "blocks")  # blocks read the hidden states a second time
    numbers = sum(size for name, size in seen if name.startswith("all_gather"))
    want = count * (3 + ("label_smoothing" in options)) + (n + 1) * ("weight" in options)
    want += times * count // ranks * D if way == "sequence" else 0
    assert numbers == want + (n > 0), (way, n, options, seen)  # and one, whether a rank trains the hidden states
    assert sum(size for name, size in seen if name.startswith(("all_reduce", "reduce_scatter"))) == count * D
    assert max((size for _, size in seen), default=0) <= max(2, D) * max(count, 1)


if __name__ == "__main__":
    main(vars())
