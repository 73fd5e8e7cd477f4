"""Kernels on a sharded vocabulary: without a GPU in Triton's interpreter; tokens that do not count hold NaN."""

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
from distributed.launch import DEVICE, main
from distributed.option_cases import FEWER
from distributed.sharded import WAYS, compare, head, kernels, plain, problem, same_on_all_ranks, shard_of, spread, whole
from head.contract.cases import FUNCTIONS, NARROW, Arguments, trained
from lowtide import linear_cross_entropy, linear_token_stats
from lowtide.head.call import CrossEntropyArgs, Wanted
from lowtide.head.engine import Chunks
from lowtide.head.exponentials import even, loops
from lowtide.head.kernels import gradient_gemms_hopper
from lowtide.head.matmul import matmul_into
from lowtide.head.plan import plan_cross_entropy
from lowtide.head.ranks import tokens
from lowtide.head.ranks.parallel import Ranks
from lowtide.head.ranks.shard import Limits
from lowtide.head.token_stats import WANTS
from support import in_float64, oracle, pairs, relative_error

SINGLE = torch.float32
RUNS = {  # dtypes, one option more, and how near values come; on a GPU statistics have kernels in bfloat16
    "linear_token_stats": ([SINGLE], 1e-5) if DEVICE == "cpu" else ([torch.bfloat16], 2e-4),
    "linear_divergence": ([SINGLE, *NARROW], 1e-5),
} | ({"linear_cross_entropy": ([SINGLE], 2e-5)} if DEVICE == "cpu" else {})  # on GPUs: tests/gpu/rank_cases.py
FEW: dict[str, list[Any]] = {
    "leading": [(2, 4)],  # two chunks of rows, and a rank without any of them
    "ignored": ["some"],
    "logit_scale": [1.0, -0.7, "tensor"],
    "num_items": [None],
    "reduction": ["none", "mean"],
    "tail": [None],
    "targets": [1, 3],
    "teacher_bias": [True],
    "teacher_softcap": [None, 1.5],
    "temperature": ["tensor"],
    "workspace_mib": [None],
}


def every_option() -> None:
    """Every pair of options; of the cross entropy in both schedules, and with huge logits."""
    ways = itertools.cycle(WAYS)
    for name, (dtypes, near) in RUNS.items():
        function, backend = FUNCTIONS[name], "row" if name == "linear_divergence" else "exp"
        fewer = FEWER | FEW | ({"workspace_mib": [0.004]} if DEVICE != "cpu" else {})
        loss = name == "linear_cross_entropy"
        options = function.options | {option: values for option, values in fewer.items() if option in function.options}
        options |= {"dtype": dtypes} | ({"schedule": ["chunks", "blocks"], "huge": [False, True]} if loss else {})
        for i, choice in enumerate(pairs(options, seed=2)):
            dtype, schedule, huge = choice.pop("dtype"), choice.pop("schedule", "chunks"), choice.pop("huge", False)
            kwargs = problem(name, choice, i, V=61, D=24, dtype=dtype)
            most = {"values": near}
            most |= dict.fromkeys(kwargs, 4 * near if loss else function.tolerance[dtype][1])
            if huge:
                kwargs["input"].data[:, :1] *= 100
                most = lost_in_float32(kwargs, most)
            with kernels(schedule) as used:
                compare(name, kwargs, [next(ways)], (dtype, schedule, huge, choice), i, most.__getitem__)
            whole = loss and choice["softcap"] and choice["label_smoothing"]
            assert DEVICE != "cpu" or set(used) == (set() if whole else {backend})


def lost_in_float32(kwargs: Arguments, most: dict[str, float]) -> dict[str, float]:
    """Return the bounds with what a single product may err, and four times what plain PyTorch does."""
    digits = (kwargs["input"].abs() @ kwargs["linear_weight"].abs().T).max().item() * 2**-22
    wide, single = in_float64(kwargs), {n: value for n, value in kwargs.items() if n != "options"}
    true, got = (oracle(**given).sum() for given in (wide, single))
    more = {"values": digits + 4 * relative_error(got, true)}
    for n in trained(kwargs):
        got_n, true_n = (torch.autograd.grad(v, g[n], retain_graph=True)[0] for v, g in ((got, single), (true, wide)))
        more[n] = digits + 4 * relative_error(got_n, true_n)
    return {n: bound + more.get(n, 0) for n, bound in most.items()}


def statistics_of_few_classes() -> None:
    """A rank has no class, or none that is possible; some tokens are sure."""
    want = tuple(name for name in WANTS if name != "mean_logit")
    choice = {"leading": (2, 5), "targets": 2, "linear_bias": True, "want": want, "ignored": "some"}
    for i, (classes, way) in enumerate(((2, "replicated"), (2, "sequence"), *((61, way) for way in WAYS))):
        kwargs = problem("linear_token_stats", choice, 2 * i, V=classes, D=24, dtype=SINGLE)
        with torch.no_grad():
            kwargs["input"][:, :2] *= 10
            if classes == 61:
                kwargs["linear_bias"].requires_grad_(False)[:40] = -torch.inf
                kwargs["target"] = kwargs["target"].where(kwargs["target"] < 0, kwargs["target"] % 21 + 40)
        with kernels():
            compare("linear_token_stats", kwargs, [way], (classes, way), i, lambda of: 2e-5 if of == "values" else 2e-4)


def sure_tokens_and_equal_logits() -> None:
    """What is left of 1 has as many digits as the others' probabilities; equal logits have their classes' order."""
    x, w, _, _ = head((1, 13), 32, 73, seed=3, bias=False)
    with torch.no_grad():
        w /= 3
        w[60] = 0
        w[5] = x[0, 0] * 20 / x[0, 0].square().sum()
        x[0, 3], x[0, 4] = torch.nan, torch.inf
    z = (x[0, :1].double() @ w.double().T).detach()
    others = (z - z[:, 5:6]).exp().scatter(1, torch.tensor([[5]], device=DEVICE), 0).sum(1)
    bias = torch.full((73,), -torch.inf, device=DEVICE)
    bias[[3, 50, 51, 71]] = torch.tensor([1.0, 2.0, 2.0, 1.0], device=DEVICE)
    for way in WAYS:
        px, nothing = (spread(way, t.detach(), of_vocab=False) for t in (x, torch.zeros_like(x)))
        pw, pb = (spread(way, t.detach(), of_vocab=True) for t in (w, bias))
        y = torch.full((1, 13, 2), 5, device=DEVICE)
        with kernels():
            logprob = plain(linear_token_stats(px, pw, y, want=("logprob",), **shard_of(way, pw)).logprob)
            kwargs = {"linear_bias": pb, "want": ("topk",), "topk": 9, **shard_of(way, pw)}
            ids = plain(linear_token_stats(nothing, pw, **kwargs).topk.ids)
        torch.testing.assert_close(logprob[0, :1, 0].double(), -others.log1p(), rtol=1e-4, atol=0)
        assert torch.equal(logprob[0].isnan().all(1).nonzero()[:, 0].cpu(), torch.tensor([3, 4]))
        assert not logprob[0, 5:].isnan().any()
        assert (ids == torch.tensor([50, 51, 3, 71, 0, 1, 2, 4, 5], device=DEVICE)).all()


def a_target_without_a_chance() -> None:
    """A bias of -inf at the target: the loss is infinite and the gradients are finite, as in plain PyTorch."""
    x, w, b, y = head((1, 6), 24, 61)
    with torch.no_grad():
        b[20], y[0], y[0, 1] = -torch.inf, 5, 20
    want = oracle(x, w, y, linear_bias=b, reduction="none")
    true = torch.autograd.grad(want.sum(), (x, w, b))
    for way in WAYS:
        px, pw, pb = (spread(way, t, of_vocab=k > 0) for k, t in enumerate((x, w, b)))
        with kernels():
            loss = linear_cross_entropy(px, pw, y, linear_bias=pb, reduction="none", **shard_of(way, pw))
            grads = torch.autograd.grad(plain(loss).sum(), (px, pw, pb))
        torch.testing.assert_close(plain(loss), want, rtol=1e-5, atol=1e-5)
        for k, (g, e) in enumerate(zip(grads, true, strict=True)):
            assert relative_error(whole(way, g, of_vocab=k > 0), e) < 1e-5, (way, k)
        assert plain(loss)[0, 1] == torch.inf
        assert same_on_all_ranks(plain(loss))


def sums_beside_products() -> None:
    """The hidden states' gradient begins to be summed before a product of the weight's, and is waited for after it."""
    x, w, _, y = head((1, 20), 16, 50, seed=0, bias=False)
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
            for module in (loops, even):
                patched.setattr(module, "matmul_into", noted("product", matmul_into))
            patched.setattr(Chunks, "weight_grad", noted("weight's", Chunks.weight_grad))
            of_weight = noted("weight's", gradient_gemms_hopper.weight_grad)
            patched.setattr(gradient_gemms_hopper, "weight_grad", of_weight)
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
    x, w, _, y = head((1, 66), 16, 50, seed=0, bias=False)
    px, pw = spread("sequence", x, of_vocab=False), spread("sequence", w, of_vocab=True)
    live: list[Any] = []
    most = []
    begin_rows = tokens.SpreadTokens.begin_rows

    def watched(*args: Any) -> Any:
        begun = begin_rows(*args)
        live.append(weakref.ref(begun.value))
        most.append(sum(storage() is not None for storage in live))
        return begun

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
        input=SimpleNamespace(device=torch.device("cpu")), dtype=torch.bfloat16, ignored_tokens="auto", order=0,
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
            patched.setattr("lowtide.head.choice.why_not_exp", lambda *_, **__: None)
            plan = plan_cross_entropy(of_head, of_loss, 30000, Wanted(True, True, True))
        assert plan.schedule == "blocks"
        of_x = 2 * hidden
        in_sums = plan.sum_rows * (of_sums * of_x + 4 * classes // 128)
        # hidden states, s x, and the products in float32 of this chunk and of the one whose sum is under way
        in_gradients = plan.chunk_rows * ((rebuilding + 1) * of_x + 2 * 4 * hidden + 2 * plan.block_columns)
        assert max(in_sums, in_gradients) <= mib * 2**20, (is_spread, in_sums / 2**20, in_gradients / 2**20)


if __name__ == "__main__":
    main(vars())
