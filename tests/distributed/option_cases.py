"""Every function with its options (`contract.cases`) on a sharded vocabulary, beside the whole in float64.

By each engine: plain PyTorch, and the kernels. Tokens that do not count hold NaN.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from contract.cases import FUNCTIONS, KINDS, LEAVES, TAILS, Arguments, flat, total, trained
from distributed.launch import DEVICE, THOROUGH, main
from distributed.sharded import (
    ENGINES,
    WAYS,
    V,
    compare,
    exchanged,
    in_parts,
    near,
    of_all_ranks,
    plain,
    plain_part,
    problem,
    running,
    through,
    with_each,
)
from lowtide import linear_cross_entropy
from lowtide.errors import ArgumentValueError
from lowtide.head.engine import Chunks
from support import in_float64, pairs

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
    """No token, one, targets of one rank alone, a class a rank and a rank without; gradients stored and recomputed."""
    ranks = dist.get_world_size()
    own = V // ranks // 2  # classes that only the first rank holds, in every way of cutting
    shapes = (((2, 0), V, V), ((1, 1), V, V), ((2, 3), ranks, ranks), ((2, 3), 2, 2), ((3, 5), V, own))
    for (leading, classes, most), gradient, reduction in itertools.product(
        shapes, ("auto", "recompute"), ("sum", "mean")
    ):
        choice = {"leading": leading, "gradient": gradient, "reduction": reduction, "num_items": 2.5}
        kwargs = problem("linear_cross_entropy", choice, 0, classes)
        kwargs["target"] %= most
        compare("linear_cross_entropy", kwargs, WAYS if classes == V else WAYS[:2], (choice, classes, most))
    for engine in ENGINES[1:]:
        for leading, classes, most in shapes:
            kwargs = problem("linear_cross_entropy", {"leading": leading, "num_items": 2.5}, 0, classes, engine)
            kwargs["target"] %= most
            with running(engine):
                compare("linear_cross_entropy", kwargs, WAYS[:1], (engine, classes, most))


def all_ignored() -> None:
    """The mean is 0 / 0, or 0 where the number of items is given; all gradients are 0."""
    for engine, gradient, items in [*itertools.product(ENGINES[:1], ("auto", "recompute"), (None, 2.5))] + [
        (engine, "auto", None) for engine in ENGINES[1:]
    ]:
        choice = {"ignored": "all", "gradient": gradient, "num_items": items}
        kwargs = problem("linear_cross_entropy", choice, 0, engine=engine)
        with running(engine):
            ways = WAYS if engine == "torch" else WAYS[:1]
            compare("linear_cross_entropy", kwargs, ways, (engine, gradient, items))


def uses_of_autograd() -> None:
    """Every subset that needs gradients, a graph kept and used twice, no gradients, each dtype, autocast."""
    name = "linear_cross_entropy"
    for (way, gradient), trained_ones in itertools.product(
        with_each(("forward", "recompute")), itertools.product((True, False), repeat=3)
    ):
        kwargs = problem(name, {"gradient": gradient}, 0)
        frozen = [n for n, needed in zip(LEAVES, trained_ones, strict=True) if not needed]
        kwargs |= {n: kwargs[n].detach() for n in frozen}
        compare(name, kwargs, [way], (gradient, frozen), passes=2)
    for mode in (torch.enable_grad(), torch.no_grad()):
        with mode:
            kwargs = problem("linear_logprobs", {}, 0)
            compare("linear_logprobs", kwargs | {"linear_weight": kwargs["linear_weight"].detach()}, WAYS, mode)
    for dtype in (torch.float32, torch.bfloat16):
        values, gradients = FUNCTIONS[name].tolerance[dtype]
        bounds = {"values": values, **dict.fromkeys(LEAVES, gradients)}
        compare(name, problem(name, {}, 0, dtype=dtype), WAYS, dtype, bounds=bounds.__getitem__)
    with torch.autocast(DEVICE, torch.bfloat16):
        compare(name, problem(name, {}, 0, dtype=torch.float32), WAYS, "autocast", bounds=lambda _: 3e-2)


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
    ranks = dist.get_world_size()
    for (way, recording), (name, choice) in itertools.product(with_each((True, False)), ALONE):
        rank = 0 if recording else ranks - 1
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
        of_others = of_all_ranks(seen)
        assert all(other == seen for other in of_others), (what, of_others)


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


def dropped() -> None:
    """With "drop" no GEMM has a row of an ignored token, also where the tokens' sequence is sharded."""
    rows: list[int] = []
    logits = Chunks.logits

    def count(self: Chunks, x_CD: Tensor) -> Tensor:
        rows.append(len(x_CD))
        return logits(self, x_CD)

    loss, stats = "linear_cross_entropy", "linear_token_stats"
    calls: list[tuple[str, Arguments, int]] = [  # and how many GEMMs compute logits of each token
        (loss, {"shift": True}, 1),
        (loss, {"gradient": "recompute", "reduction": "sum", "weight": True}, 2),
        (loss, {"reduction": "none", "shift": True, "weight": True}, 2),
        ("linear_logprobs", {"targets": 3}, 2),
        (stats, {"want": ("logprob", "is_top1")}, 2),
        (stats, {"want": ("entropy", "logprob"), "targets": 3}, 0),  # of all tokens
        ("linear_divergence", {"reduction": "mean"}, 2),
        ("linear_divergence", {}, 4),
    ]
    for (i, (name, choice, passes)), share in itertools.product(enumerate(calls), (0.0, 0.6, 1.0)):
        kwargs = problem(name, choice, 0)
        ignored = torch.rand(kwargs["input"].shape[:-1], generator=torch.Generator().manual_seed(i)) < share
        if "mask" in kwargs:
            kwargs["mask"] = ~ignored.to(DEVICE)
        else:
            kwargs["target"][ignored] = kwargs["ignore_index"]
        kwargs["options"] = replace(kwargs["options"], ignored_tokens="drop")
        rows.clear()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Chunks, "logits", count)
            compare(name, kwargs, WAYS, (choice, share), upstream=half)
        valid = int((~(ignored[:, 1:] if choice.get("shift") else ignored)).sum())
        assert not passes or sum(rows) == valid * passes * len(WAYS), (name, choice, share, rows)

    kwargs = problem("linear_cross_entropy", {}, 0)
    kwargs["options"] = replace(kwargs["options"], ignored_tokens="drop")
    if dist.get_rank() == 0:
        kwargs["target"][0, :2] = kwargs["ignore_index"]
    with pytest.raises(ArgumentValueError, match=r"target \(number of valid tokens\): .*every rank"):
        linear_cross_entropy(**in_parts(kwargs, "local", 0))


def half(t: Tensor) -> Tensor:
    """Let nothing flow back to some valid tokens."""
    return through(t) if t.dim() == 0 else through(t)[..., ::2]


if __name__ == "__main__":
    main(vars())
