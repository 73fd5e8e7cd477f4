"""Kernels on a sharded vocabulary: without a GPU in Triton's interpreter; tokens that do not count hold NaN."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from contract.cases import FUNCTIONS, OF_SETS, Arguments, trained
from distributed.launch import DEVICE, THOROUGH, main
from distributed.option_cases import FEWER
from distributed.sharded import WAYS, compare, kernels, problem
from head.kernel_plans import use_set_kernels
from support import in_float64, oracle, pairs, relative_error

SINGLE = torch.float32
RUNS = {  # dtypes, one option more, and how near values come; on a GPU statistics have kernels in bfloat16
    "linear_token_stats": ([SINGLE], 1e-5) if DEVICE == "cpu" else ([torch.bfloat16], 2e-4),
} | ({"linear_cross_entropy": ([SINGLE], 2e-5)} if DEVICE == "cpu" else {})  # on GPUs: tests/gpu/rank_cases.py
FEW: dict[str, list[Any]] = {
    "linear_bias": [True],
    "leading": [(2, 4)],  # two chunks of rows, and a rank without any of them
    "ignored": ["some"],
    "logit_scale": ["trained"],
    "softcap": [None, 3.0],
    "num_items": [None],
    "shift": [False],
    "token_weight": [True],
    "z_loss": [1e-2],
    "weight": [True],
    "reduction": ["none", "mean"],
    "targets": [1, 3],
}


def every_option() -> None:
    """Pairs of options, or half of these; of the cross entropy in both schedules, and with huge logits."""
    for name, (dtypes, near) in RUNS.items():
        function = FUNCTIONS[name]
        loss = name == "linear_cross_entropy"
        fewer = FEWER | FEW | {"workspace_mib": [0.004 if DEVICE != "cpu" else None]}
        options = function.options | {option: values for option, values in fewer.items() if option in function.options}
        options |= {"dtype": dtypes, "way": [*WAYS[1:]]}
        options |= (
            {"schedule": ["chunks", "blocks"], "huge": [False, True], "label_smoothing": [0.0, 0.1]} if loss else {}
        )
        for i, choice in itertools.islice(enumerate(pairs(options, seed=2)), 0, None, 1 if THOROUGH else 2):
            dtype, way = choice.pop("dtype"), choice.pop("way")
            schedule, huge = choice.pop("schedule", "chunks"), choice.pop("huge", False)
            kwargs = problem(name, choice, i, V=41, D=16, dtype=dtype)
            most = {"values": near}
            most |= dict.fromkeys(kwargs, 4 * near if loss else function.tolerance[dtype][1])
            if huge:
                kwargs["input"].data[:, :1] *= 100
                most = lost_in_float32(kwargs, most)
            with kernels(schedule) as used:
                ways = WAYS if THOROUGH else WAYS[1:] if loss else [way]
                compare(name, kwargs, ways, (schedule, huge, choice), i, most.__getitem__)
            whole = loss and choice["softcap"] and choice["label_smoothing"]
            assert DEVICE != "cpu" or set(used) == (set() if whole else {"exp"})


def lost_in_float32(kwargs: Arguments, most: dict[str, float]) -> dict[str, float]:
    """Return the bounds with four times what a single product may err, and what plain PyTorch does."""
    digits = (kwargs["input"].abs() @ kwargs["linear_weight"].abs().T).max().item() * 2**-20
    wide, single = in_float64(kwargs), {n: value for n, value in kwargs.items() if n != "options"}
    true, got = (oracle(**given).sum() for given in (wide, single))
    more = {"values": digits + 4 * relative_error(got, true)}
    for n in trained(kwargs):
        got_n, true_n = (torch.autograd.grad(v, g[n], retain_graph=True)[0] for v, g in ((got, single), (true, wide)))
        more[n] = digits + 4 * relative_error(got_n, true_n)
    return {n: bound + more.get(n, 0) for n, bound in most.items()}


def few_classes() -> None:
    """No token, fewer classes than ranks, all ignored: by both schedules of the cross entropy."""
    calls: list[tuple[Arguments, int]] = [({"leading": (2, 0), "num_items": 2.5}, 50), ({"leading": (2, 3)}, 1)]
    for i, (choice, classes) in enumerate([*calls, ({"ignored": "all", "leading": (2, 3)}, 50)]):
        kwargs = problem("linear_cross_entropy", choice, 0, classes, D=16, dtype=SINGLE)
        with kernels(("chunks", "blocks")[i % 2]):
            compare("linear_cross_entropy", kwargs, WAYS[:1], (choice, classes))


def sets_of_classes() -> None:
    """The kernel that scores ids, of which each rank holds some."""
    if DEVICE != "cpu":
        return
    for i, way in enumerate(WAYS):
        choice = {"leading": (2, 7), "support": 4, "want": OF_SETS, "targets": (1, 3)[i % 2]}
        kwargs = problem("linear_token_stats", choice, i, D=16, dtype=SINGLE)
        with pytest.MonkeyPatch.context() as patched:
            used = use_set_kernels(patched)
            compare("linear_token_stats", kwargs, [way], choice, i)
        assert "score" in used


if __name__ == "__main__":
    main(vars())
