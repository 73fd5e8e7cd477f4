"""The numbers: every option against float64, odd shapes, narrow dtypes beside plain PyTorch, the same bits again."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import support
from contract.cases import LAYOUT, LEAVES
from contract.function import NARROW, WIDE, Function, Mode, check, leaves, total, trained
from contract.table import FUNCTIONS, HEADS, each, every_mode, every_pair_of_modes
from promises import promise
from support import in_float64, pairs, relative_error

every_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
MOST = 4000  # combinations of a function's options with --slow
SIZES = [(1, 1, 1), (1, 3, 2), (7, 1, 5003), (5, 896, 3), (65, 33, 517), (4, 0, 9), (0, 5, 11)]


@promise("values", "options")
@every_function
def test_every_pair_of_options(function: Function) -> None:
    for case in pairs(function.options | {"dtype": WIDE}, seed=int(torch.randint(2**31, ()))):
        check(function, case, case.pop("dtype"))


@pytest.mark.slow
@promise("options")
@every_function
def test_many_of_the_product_of_options(function: Function) -> None:
    """All of a product of some hundreds; of a divergence's 653,184 a draw."""
    options = function.options
    company = itertools.cycle(itertools.chain.from_iterable(pairs(options, seed) for seed in range(9)))
    chosen = [option for option in options if option not in LAYOUT]
    product = list(itertools.product(*(options[option] for option in chosen)))
    for values in random.sample(product, min(len(product), MOST)):
        check(function, next(company) | dict(zip(chosen, values, strict=True)), torch.float64)


@promise("layouts")
@each(HEADS)
def test_odd_sizes(mode: Mode) -> None:
    for (N, D, V), workspace in zip(SIZES, itertools.cycle([None, 1e-6, 0.01]), strict=False):
        if N or mode.per_token or mode.choice.get("reduction", "mean") == "sum":  # else 0 / 0
            V = 50257 if V == 5003 and mode is HEADS["mean"] else V
            sizes = {"leading": (N,), "D": D, "V": V, "workspace_mib": workspace}
            check(mode.function, mode.choice | sizes, torch.float64)


@promise("values")
@every_pair_of_modes(dtype=NARROW, workspace_mib=[None, 0.05])
def test_narrow_dtypes_err_no_more_than_plain_pytorch(mode: Mode, dtype: torch.dtype, workspace_mib: Any) -> None:
    """The baseline is plain PyTorch of the same operands; both are held against float64."""
    light = {"out": "light " + mode.choice.get("out", "token")} if mode.name == "linear_apply" else {}
    kwargs = mode.arguments(300, dtype=dtype, large=True, workspace_mib=workspace_mib, **light)
    wide = in_float64(kwargs)
    ours, naive, true = mode.run(kwargs), mode.truth(kwargs), mode.truth(wide)
    keys = [key for key in true if true[key].requires_grad]
    eps = torch.finfo(dtype).eps
    for key in keys:
        near = 1e-5 if mode.function.widens else 2 * relative_error(naive[key], true[key]) + eps / 8
        assert relative_error(ours[key], true[key]) < near
    # what a user's function makes of its own parameters, chunk by chunk, is rounded as often
    names = [n for n in trained(kwargs) if kwargs[n].dim() and (mode.name != "linear_apply" or n in LEAVES)]
    for used in [*([key] for key in keys), keys]:
        upstream = [torch.rand_like(true[key]) / 300 if true[key].dim() else torch.ones_like(true[key]) for key in used]
        got, base, want = (
            torch.autograd.grad(
                [found[key] for key in used], [given[n] for n in names],
                [u.to(found[key].dtype) for u, key in zip(upstream, used, strict=True)],
                retain_graph=True, allow_unused=True, materialize_grads=True,
            )
            for found, given in ((ours, kwargs), (naive, kwargs), (true, wide))
        )  # fmt: skip
        # all rows of the mean logit's gradient are the same numbers: a few roundings, whose norm varies
        least = eps if used == [".mean_logit"] else eps / 16
        if support.DEVICE != "cpu":  # the weight's gradient is added up in the inputs' dtype over some chunks
            least += eps / 2
        for n, g, b, e in zip(names, got, base, want, strict=True):
            assert relative_error(g, e) <= mode.function.beside_plain * relative_error(b, e) + least, (n, used)


@promise("layouts")
@every_mode
@pytest.mark.parametrize("grad", [True, False])
def test_shapes_and_dtypes_are_known_without_numbers(mode: Mode, grad: bool) -> None:
    """On the meta device, as `torch.nn` modules are planned and deferred."""
    kwargs = mode.arguments((2, 3))
    bare = pytree.tree_map_only(Tensor, lambda t: t.detach().to("meta").requires_grad_(t.requires_grad), kwargs)
    with torch.set_grad_enabled(grad):
        there, here = mode.run(bare), mode.run(kwargs)
    assert there.keys() == here.keys()
    for key, value in here.items():
        assert there[key].is_meta
        forms = [(t.shape, t.dtype, t.requires_grad) for t in (there[key], value)]
        assert forms[0] == forms[1], key
    if grad:
        for leaf, g in zip(leaves(bare), torch.autograd.grad(total(there), leaves(bare)), strict=True):
            assert g.is_meta
            assert (g.shape, g.dtype) == (leaf.shape, leaf.dtype)


@promise("bitwise")
@every_mode
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_from_run_to_run_and_no_number_from_beside_a_row(mode: Mode, dtype: torch.dtype) -> None:
    many = {"targets": 9} if "targets" in mode.choice else {}  # a token, most of them of the same few classes
    kwargs = mode.arguments(200, dtype=dtype, large=True, workspace_mib=0.1, **many)
    if many:
        kwargs["target"] %= 7
    runs = []
    for _ in range(2):
        found = mode.run(kwargs)
        value = total(found, lambda t: t * torch.linspace(1, 2, t.numel(), device=t.device).view(t.shape))
        runs.append((*found.values(), *torch.autograd.grad(value, leaves(kwargs))))
    for one, two in zip(*runs, strict=True):
        assert many or one.isfinite().all()
        assert torch.equal(one, two)
