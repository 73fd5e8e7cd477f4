"""Kernels on a sharded vocabulary: without a GPU in Triton's interpreter; tokens that do not count hold NaN."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from contract.cases import FUNCTIONS, NARROW, Arguments, trained
from distributed.launch import DEVICE, main
from distributed.option_cases import FEWER
from distributed.sharded import WAYS, compare, head, kernels, plain, problem, shard_of, spread
from lowtide import linear_token_stats
from support import in_float64, oracle, pairs, relative_error

SINGLE = torch.float32
RUNS = {  # dtypes, one option more, and how near values come; on a GPU statistics have kernels in bfloat16
    "linear_token_stats": ([SINGLE], 1e-5) if DEVICE == "cpu" else ([torch.bfloat16], 2e-4),
    "linear_divergence": ([SINGLE] if DEVICE == "cpu" else [SINGLE, *NARROW], 1e-5),
} | ({"linear_cross_entropy": ([SINGLE], 2e-5)} if DEVICE == "cpu" else {})  # on GPUs: tests/gpu/rank_cases.py
FEW: dict[str, list[Any]] = {
    "leading": [(2, 4)],  # two chunks of rows, and a rank without any of them
    "ignored": ["some"],
    "logit_scale": [-0.7, "tensor"],
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
    for way in WAYS[:1] if DEVICE == "cpu" else WAYS:
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


if __name__ == "__main__":
    main(vars())
