"""Every function with every pair of its options (`head.contract.cases`) in parts, beside the whole in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils import _pytree as pytree

from distributed.launch import DEVICE, THOROUGH, main
from distributed.vocab_cases import (
    WAYS,
    D,
    V,
    exchanged,
    mesh,
    near,
    of_all_ranks,
    part_of,
    plain,
    plain_part,
    shard_of,
    spread,
    whole,
    with_each,
)
from head.contract.cases import FUNCTIONS, KINDS, TAILS, Arguments, arguments, counting, flat, pairs, total, trained
from lowtide.errors import ArgumentValueError
from support import in_float64, relative_error

IN_PARTS = {"input": False, "teacher_input": False}  # and whether it is the vocabulary's axis that is cut
IN_PARTS |= dict.fromkeys(("linear_weight", "linear_bias", "teacher_weight", "teacher_bias"), True)
FROZEN = [(), (), ("linear_weight",), ("input", "linear_weight"), ("input", "linear_weight", "linear_bias", "weights")]
FEWER: dict[str, list[Any]] = {  # options of which some values are enough here
    "leading": [(2, 7)],
    "accumulate": ["auto"],
    "workspace_mib": [0.004],
    "ignored": ["none", "some", "a class"],
    "kind": [*KINDS[:3], KINDS[-1]],
    "tail": [None, *TAILS],
    "topk": [4],
    "teacher_D": [9],
    "temperature": [1.0, "tensor"],
    "targets": [1, None, 3],
    "args": ["trained"],
}


def in_parts(kwargs: Arguments, way: str, i: int) -> Arguments:
    """Return the arguments as a user of this ``way`` has them."""
    ours = {
        name: spread(way, value, of_vocab=IN_PARTS[name]) if name in IN_PARTS and isinstance(value, Tensor) else value
        for name, value in kwargs.items()
    }
    if kwargs.get("weight") is not None and i % 2:
        ours["weight"] = part_of(kwargs["weight"]) if way == "local" else spread(way, kwargs["weight"], of_vocab=True)
    if way == "sequence" and i % 2 and kwargs.get("target") is not None and "weights" not in kwargs:
        ours["target"] = distribute_tensor(kwargs["target"], mesh(), [Shard(1)])
    for name in set(trained(kwargs)) - {*IN_PARTS}:
        ours[name] = kwargs[name].detach().clone().requires_grad_()
    return ours | shard_of(way, ours["linear_weight"])


def problem(name: str, choice: Arguments, i: int, classes: int = V, **form: Any) -> Arguments:
    """Return the contract's arguments, on the device of the cases; some tokens are sure, some leaves are frozen."""
    kwargs = arguments(name, seed=i, **({"D": D, "V": classes} | form), **choice)
    kwargs = pytree.tree_map_only(Tensor, lambda t: t.to(DEVICE).detach().requires_grad_(t.requires_grad), kwargs)
    with torch.no_grad():
        kwargs["input"] *= 1 + 3 * (i % 2)
        if kwargs.get("weight") is not None:
            kwargs["weight"][3] = 0
        if choice.get("targets") == 3:
            kwargs["target"][..., 1] = kwargs["target"][..., 0]  # the same class twice
    return kwargs | {n: kwargs[n].detach() for n in FROZEN[i % len(FROZEN)] if kwargs.get(n) is not None}


def through(t: Tensor) -> Tensor:
    """Give each value an upstream gradient of its own, of a size that loses no digits."""
    return t + t.sin() / 2


def compare(
    name: str,
    kwargs: Arguments,
    ways: Iterable[str],
    what: object,
    i: int = 0,
    bounds: Callable[[str], float] | None = None,
) -> None:
    """Hold values, and the gradients of all that can have one, against the whole's in float64.

    ``bounds`` are the relative errors, of "values" and by the name of what a gradient is of; None: float64's own.
    """
    wide = in_float64(kwargs)
    function, leaves = FUNCTIONS[name], trained(kwargs)
    want, true = flat(function.truth(**wide)), tuple[Tensor, ...]()
    if any(value.requires_grad for value in want.values()):
        true = torch.autograd.grad(
            total(want, through), [wide[n] for n in leaves], materialize_grads=True, allow_unused=True
        )

    if "want" not in kwargs and not kwargs.get("shift") and kwargs["input"].numel():
        with torch.no_grad():
            kwargs["input"][~counting(kwargs)] = torch.nan

    def agree(got: Tensor, e: Tensor, place: object, of: str) -> None:
        if bounds is None or not e.is_floating_point():
            near(got, e, place)
        else:
            assert relative_error(plain(got), e) <= bounds(of) or e.isnan().all(), place

    for way in ways:
        ours = in_parts(kwargs, way, i)
        got = {key: plain(value) for key, value in flat(function.run(**ours)).items()}
        assert got.keys() == want.keys(), (way, what)
        for key, value in want.items():
            assert got[key].requires_grad == value.requires_grad, (key, way, what)
            agree(got[key], value, (key, way, what), "values")
        grads = torch.autograd.grad(total(got, through), [ours[n] for n in leaves], allow_unused=True) if true else ()
        for n, grad, e in zip(leaves, grads, true, strict=bool(true)):
            if grad is None:
                assert not e.any(), (n, way, what)
            else:
                grad = whole(way, grad, of_vocab=IN_PARTS[n]) if n in IN_PARTS else plain(grad)
                agree(grad, e, (n, way, what), n)


def every_option() -> None:
    """How many ranks there are, and the way in which they have the arguments, are two options more."""
    for name, function in FUNCTIONS.items():
        fewer = {option: values for option, values in FEWER.items() if option in function.options}
        for i, choice in enumerate(pairs(function.options | fewer | {"ranks": [2, 3], "way": [*WAYS]}, seed=1)):
            ranks, way = choice.pop("ranks"), choice.pop("way")
            if THOROUGH or ranks == dist.get_world_size():
                compare(name, problem(name, choice, i), WAYS if THOROUGH else (way,), choice, i)


def few_tokens() -> None:
    """Fewer tokens than ranks, none, and masks that leave a rank or all ranks without."""
    masks: list[list[bool]] = [[], [True], [False], [True] + [False] * 4, [False] * 4 + [True], [False] * 5]
    counts = [(N, None) for N in (0, 1, 5)] + [(len(mask), mask) for mask in masks]
    for (i, (N, mask)), k in itertools.product(enumerate(counts), (0, 1)):
        out = ("token", "sum")[k]
        kwargs = problem("linear_apply", {"leading": (1, N), "out": out, "workspace_mib": 0.03}, 0)
        kwargs["mask"] = None if mask is None else torch.tensor(mask, dtype=torch.bool, device=DEVICE).view(1, N)
        # each way with each count of tokens and with each result
        ways = [way for j, way in enumerate(WAYS) if THOROUGH or (i + j + k) % 2]
        compare("linear_apply", kwargs, ways, (N, mask, out))


def few_classes() -> None:
    """No token, one, targets of one rank alone, and a class a rank; gradients stored and recomputed."""
    own = V // dist.get_world_size() // 2  # classes that only the first rank holds, in every way of cutting
    ranks = dist.get_world_size()
    for leading, classes, most in (((2, 0), V, V), ((1, 1), V, V), ((2, 3), ranks, ranks), ((3, 5), V, own)):
        for gradient, reduction in itertools.product(("auto", "recompute"), ("sum", "mean")):
            choice = {"leading": leading, "gradient": gradient, "reduction": reduction}
            kwargs = problem("linear_cross_entropy", choice | {"num_items": 2.5}, 0, classes)
            kwargs["target"] %= most
            compare("linear_cross_entropy", kwargs, WAYS if classes == V else WAYS[:2], (choice, classes, most))


def all_ignored() -> None:
    """The mean is 0 / 0, or 0 where the number of items is given; all gradients are 0."""
    for gradient, items in itertools.product(("auto", "recompute"), (None, 2.5)):
        kwargs = problem("linear_cross_entropy", {"ignored": "all", "gradient": gradient, "num_items": items}, 0)
        compare("linear_cross_entropy", kwargs, WAYS, (gradient, items))


ALONE: list[tuple[str, Arguments]] = [  # functions whose weight one rank trains, or whose hidden states
    ("linear_cross_entropy", {"label_smoothing": 0.1}),
    ("linear_cross_entropy", {"shift": True, "gradient": "recompute"}),
    *(("linear_cross_entropy", {"weight": True, "gradient": gradient}) for gradient in ("auto", "recompute")),
    ("linear_logprobs", {}),
    ("linear_token_stats", {"want": ("entropy", "logprob")}),
    ("linear_divergence", {"kind": ("jsd", 0.5)}),
    ("linear_divergence", {"tail": "bucket", "softcap": 3.0, "gradient": "recompute"}),
    ("linear_divergence", {"tail": "bucket", "reduction": "mean"}),
]


def trained_on_one_rank() -> None:
    """A weight that one rank trains on frozen hidden states: the others, which have no backward, keep step with it."""
    for (way, recording), (name, choice) in itertools.product(with_each((True, False)), ALONE):
        rank = 0 if recording else dist.get_world_size() - 1
        here, what = dist.get_rank() == rank, (way, recording, name, choice)
        kwargs = problem(name, {"workspace_mib": 0.001, "linear_bias": False, **choice}, 0)
        kwargs |= {n: kwargs[n].detach() for n in trained(kwargs) if n != "linear_weight"}
        wide = in_float64(kwargs)
        want = total(flat(FUNCTIONS[name].truth(**wide)))
        ours = in_parts(kwargs, way, 0)
        ours["linear_weight"].requires_grad_(here)
        with exchanged() as seen, torch.set_grad_enabled(here or recording):
            got = total({key: plain(value) for key, value in flat(FUNCTIONS[name].run(**ours)).items()})
            assert got.requires_grad == here
            for _ in range(2 if here else 0):
                (grad,) = torch.autograd.grad(got, ours["linear_weight"], retain_graph=True)
        near(got.detach(), want.detach(), what)
        if here:
            (true,) = torch.autograd.grad(want, wide["linear_weight"])
            mine = plain_part(grad)
            near(mine, true[-len(mine) :] if rank else true[: len(mine)], what)
        asked = of_all_ranks(seen)
        assert all(other == seen for other in asked), (what, asked)


def unlike_grad_modes() -> None:
    """Hidden states that get a gradient on some ranks alone, by no_grad or by themselves: an error on every rank."""
    first = dist.get_rank() == 0
    for way, (name, choice) in itertools.product(WAYS, [ALONE[0], *ALONE[2:3], *ALONE[4:6], ALONE[-1]]):
        kwargs = problem(name, {"linear_bias": False, **choice}, 0)
        for hidden, recording in ((True, first), (first, True)):
            ours = in_parts(kwargs | {"input": kwargs["input"].detach().requires_grad_(hidden)}, way, 0)
            with (
                torch.set_grad_enabled(recording),
                pytest.raises(ArgumentValueError, match=r"input: .*every rank.*it on ranks \[0\] of"),
            ):
                FUNCTIONS[name].run(**ours)


if __name__ == "__main__":
    main(vars())
