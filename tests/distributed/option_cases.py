"""Every function with its options (`contract.cases`) on a sharded vocabulary, beside the whole in float64.

Tokens that do not count hold NaN.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from contract.cases import FUNCTIONS, KINDS, LEAVES, OF_SETS, TAILS, Arguments
from distributed.launch import DEVICE, THOROUGH, main
from distributed.sharded import WAYS, V, compare, frozen, problem
from support import pairs

LOSS, STATS = "linear_cross_entropy", "linear_token_stats"
FEWER: dict[str, list[Any]] = {  # options of which some values are enough here
    "leading": [(2, 7)],
    "accumulate": ["auto"],
    "workspace_mib": [0.004],
    "ignored": ["some"],
    "softcap": [3.0],
    "logit_scale": [0.5, "trained"],
    "num_items": [None, 2.5],
    "kind": KINDS[:3],
    "tail": [None, *TAILS[:2]],
    "label_smoothing": [0.0, 0.1],
    "out": ["token", "sums"],
    "topk": [4],
    "teacher_D": [9],
    "teacher_softcap": [0.7],
    "temperature": ["tensor"],
    "targets": [1, None, 3],
    "args": ["trained"],
    "ignored_tokens": ["auto"],
}
FROZEN = [(), (), ("linear_weight",), ("input", "linear_weight"), ("input", "linear_weight", "linear_bias", "weights")]


def every_option() -> None:
    """Pairs of options, and of the ways in which a user has the arguments, or half of these; some leaves are frozen."""
    for name, function in FUNCTIONS.items():
        if name == "linear_contrastive":
            continue
        fewer = {option: values for option, values in FEWER.items() if option in function.options}
        options = function.options | fewer | {"way": [*WAYS]}
        for i, choice in itertools.islice(enumerate(pairs(options, seed=1)), 0, None, 1 if THOROUGH else 3):
            way = choice.pop("way")
            kwargs = frozen(problem(name, choice, i), *FROZEN[i % len(FROZEN)])
            compare(name, kwargs, WAYS if THOROUGH else [way], (name, choice), i)


def sets_of_classes() -> None:
    """Each rank scores the ids that it holds; one set for all tokens, or one for each."""
    options: dict[str, list[Any]] = {
        "linear_bias": [True, False],
        "ignored": ["none", "some"],
        "softcap": [3.0],
        "logit_scale": [1.0, "trained"],
        "targets": [1, 3],
        "workspace_mib": [None, 1e-3],
        "form": ["padded", "shared"],
        "way": [*WAYS],
    }
    for i, choice in enumerate(pairs(options, seed=4)):
        form, way = choice.pop("form"), choice.pop("way")
        kwargs = problem(STATS, {"leading": (2, 7), "support": 4, "want": OF_SETS, **choice}, i)
        if form == "shared":  # every target is in it
            kwargs["support"] = torch.cat((kwargs["support"].reshape(-1), kwargs["support"].new_tensor([-1, 3, 3])))
        compare(STATS, kwargs, [way], (form, choice), i)


def few_tokens_and_classes() -> None:
    """No token and one, all ignored, fewer classes than ranks, targets of the first rank alone; masks of few tokens."""
    ranks = dist.get_world_size()
    own = V // ranks // 2  # classes that only the first rank holds, in every way of cutting
    calls: list[tuple[Arguments, int, int]] = [
        ({"leading": (2, 0), "num_items": 2.5}, V, V),
        ({"leading": (1, 1), "gradient": "recompute", "reduction": "sum"}, V, V),
        ({"leading": (2, 3)}, ranks, ranks),
        ({"leading": (2, 3), "gradient": "recompute"}, 1, 1),
        ({"leading": (3, 5)}, V, own),
        ({"ignored": "all"}, V, V),
        ({"ignored": "all", "num_items": 2.5, "gradient": "recompute"}, V, V),
    ]
    for choice, classes, most in calls:
        kwargs = problem(LOSS, choice, 0, classes)
        if choice.get("ignored") != "all":
            kwargs["target"] %= most
        compare(LOSS, kwargs, WAYS if classes == V else WAYS[:2], (choice, classes, most))
    masks: list[list[bool]] = [[], [False], [True], [True] + [False] * 4, [False] * 4 + [True], [False] * 5]
    for (i, mask), out in itertools.product(enumerate(masks), ("token", "sum")):
        kwargs = problem("linear_apply", {"leading": (1, len(mask)), "out": out, "workspace_mib": 0.03})
        kwargs["mask"] = torch.tensor(mask, dtype=torch.bool, device=DEVICE).view(1, -1)
        compare("linear_apply", kwargs, [WAYS[i % 3]], (mask, out))


def uses_of_autograd() -> None:
    """Subsets that need gradients, a graph kept and used twice, no gradients, each dtype, autocast."""
    subsets = itertools.product((True, False), repeat=3)
    for (i, needed), gradient in itertools.product(enumerate(subsets), ("forward", "recompute")):
        names = [n for n, trains in zip(LEAVES, needed, strict=True) if not trains]
        kwargs = frozen(problem(LOSS, {"gradient": gradient}), *names)
        way = WAYS[(i + (gradient == "forward")) % 3]
        compare(LOSS, kwargs, WAYS if THOROUGH else [way], (gradient, names), passes=2)
    with torch.no_grad():
        compare("linear_logprobs", problem("linear_logprobs", {}), WAYS, "no_grad")
    for dtype in (torch.float32, torch.bfloat16):
        values, gradients = FUNCTIONS[LOSS].tolerance[dtype]
        bounds = {"values": values, **dict.fromkeys(LEAVES, gradients)}
        compare(LOSS, problem(LOSS, {}, dtype=dtype), WAYS, dtype, bounds=bounds.__getitem__)
    with torch.autocast(DEVICE, torch.bfloat16):
        compare(LOSS, problem(LOSS, {}, dtype=torch.float32), WAYS, "autocast", bounds=lambda _: 3e-2)


def dropped() -> None:
    """With "drop" ignored tokens have no row in any GEMM, also where the tokens' sequence is sharded."""
    calls: list[tuple[str, Arguments, float]] = [  # and which share of the tokens is ignored
        (LOSS, {"shift": True}, 0.6),
        (LOSS, {"gradient": "recompute", "reduction": "sum", "weight": True, "label_smoothing": 0.1}, 0.6),
        (LOSS, {"reduction": "none", "shift": True}, 1.0),
        ("linear_logprobs", {"targets": 3}, 0.6),
        (STATS, {"want": ("logprob", "is_top1")}, 0.6),
        ("linear_divergence", {"reduction": "mean"}, 0.6),
        ("linear_divergence", {}, 1.0),
    ]
    for i, (name, choice, share) in enumerate(calls):
        kwargs = problem(name, choice)
        ignored = torch.rand(kwargs["input"].shape[:-1], generator=torch.Generator().manual_seed(i)) < share
        if "mask" in kwargs:
            kwargs["mask"] = ~ignored.to(DEVICE)
        else:
            kwargs["target"][ignored] = kwargs["ignore_index"]
        kwargs["options"] = replace(kwargs["options"], ignored_tokens="drop")
        compare(name, kwargs, ["sequence", WAYS[i % 3]], (choice, share))


if __name__ == "__main__":
    main(vars())
