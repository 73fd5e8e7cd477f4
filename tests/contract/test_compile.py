"""The head's functions under torch.compile, on fake tensors, and as registered operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import support
from contract import parts
from contract.function import Arguments, Mode, flat, gradients, leaves, total, trained
from contract.table import MODES
from promises import promise

# torch.compile warns of what it does itself, when it follows an autograd.Function and when inductor first loads
pytestmark = [
    promise("compile"),
    pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # dynamo's
]
SLOW = pytest.mark.slow
HEADS = ("mean", "each", "top-k")
QUICK = ("mean", "statistics", "apply-sum", "contrastive", *parts.COMPILED)


def split(kwargs: Arguments) -> tuple[Arguments, Arguments]:
    """Return tensors, which a compiled step takes, and the rest, which is constant in it."""
    is_input = {n: any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)) for n, value in kwargs.items()}
    return {n: v for n, v in kwargs.items() if is_input[n]}, {n: v for n, v in kwargs.items() if not is_input[n]}


def same(got: dict[str, Tensor], want: dict[str, Tensor], kwargs: Arguments, **near: float) -> None:
    """Compare what a compiled step returns, and its gradients, with what it returns when it is not."""
    torch.testing.assert_close(got, want, **near)
    grads = (torch.autograd.grad(total(found), leaves(kwargs)) for found in (got, want))
    for g, e in zip(*grads, strict=True):
        torch.testing.assert_close(g, e, **near)


@pytest.mark.parametrize(
    ("mode", "dynamic"),
    [
        *(pytest.param(m, True, marks=[] if n in QUICK else SLOW, id=n) for n, m in MODES.items()),
        pytest.param(MODES["apply"], None, marks=SLOW, id="apply-by-default"),
    ],
)
def test_one_graph_for_any_shape_and_scale(mode: Mode, dynamic: bool | None) -> None:
    """No plan is made in a trace, and no number or size is a constant of the graph; a user's function breaks it.

    By default (None) sizes become variables where the compiler has seen them change.
    """
    torch._dynamo.utils.counters.clear()
    drawn = {"dtype": torch.float32, "ignored": "some"}
    first = mode.busy(**drawn)
    constant, (tokens, *_) = split(first)[1], trained(first)
    whole = mode.name != "linear_apply"
    compiled = torch.compile(
        lambda given: mode.function.run(**(given | constant | {tokens: given[tokens] * 2})),
        fullgraph=whole,
        dynamic=dynamic,
        backend="aot_eager",
    )
    for i, leading in enumerate([(2, 6), (3, 5), (4, 9), *[(1, 7)] * (mode is MODES["apply"])]):
        sizes = {name: size + 2 * (i == 2) for name, size in mode.function.sizes.items()}
        kwargs = mode.busy(leading, **drawn, **sizes)
        for name in ("logit_scale", "temperature"):
            if isinstance(kwargs.get(name), Tensor):
                kwargs[name] = (kwargs[name].detach() * (1 + i / 10)).requires_grad_(kwargs[name].requires_grad)
        same(flat(compiled(split(kwargs)[0])), mode.run(kwargs | {tokens: kwargs[tokens] * 2}), kwargs)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        # the compiler takes an axis of 1 for a constant
        assert graphs == 1 or 1 in leading or not (whole and dynamic)


@pytest.mark.parametrize(
    "case", ["autocast", *(pytest.param(case, marks=SLOW) for case in ("inductor", "numbers that change"))]
)
def test_a_model_with_several_heads(case: str) -> None:
    """The compiler takes a number for a constant until it sees it change, once."""
    changing = case == "numbers that change"
    plain: Arguments = {"logit_scale": 1.0, "temperature": 1.0} if changing else {}
    dtype = torch.bfloat16 if case == "inductor" else torch.float32
    given = {name: MODES[name].busy(dtype=dtype, ignored="some", **plain) for name in HEADS}
    parts = {name: split(kwargs) for name, kwargs in given.items()}

    def step(tensors: dict[str, Arguments], scale: float) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in HEADS:
            numbers = {n: scale for n in plain if n in parts[name][1]}
            with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
                found[name] = MODES[name].function.run(**tensors[name], **(parts[name][1] | numbers))
        return found

    tensors = {name: inputs for name, (inputs, _) in parts.items()}
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(step, fullgraph=True, backend="inductor" if case == "inductor" else "aot_eager")
    for scale in (0.5, 0.6, 0.7, 0.8) if changing else (1.0,):
        got, want = compiled(tensors, scale), step(tensors, scale)
        # a compiled kernel does not round to bfloat16 between two operations, and so sums other numbers into a scalar
        near = {"autocast": {"rtol": 0.0, "atol": 0.0}, "inductor": {"rtol": 1.6e-2, "atol": 1e-5}}.get(case, {})
        same(
            flat(got),
            flat(want),
            {name + n: kwargs[n] for name, kwargs in given.items() for n in trained(kwargs)},
            **near,
        )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (2 if changing else 1)


class Recorded(TorchDispatchMode):
    """Every call of an operator of lowtide's."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "lowtide":
            self.calls[str(func)] = (
                func,
                pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), (args, kwargs or {})),
            )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "mode",
    [pytest.param(m, id=n, marks=[] if n in QUICK else SLOW) for n, m in MODES.items() if m.name != "linear_apply"],
)
@pytest.mark.skipif(support.DEVICE != "cpu", reason="a kernel leaves what no backward reads as it was")
def test_the_registered_operators_pass_opcheck(mode: Mode) -> None:
    """Those that a call of the function runs, forward and backward, for all its gradients and for the input's alone.

    Their graph is traced once: in another dtype, and with other gradients, results alone are unlike.
    """
    other = torch.float16 if mode.stored or mode.stored_where_frozen else torch.float64
    cases = [(torch.float32, False), (torch.float32, mode.stored_where_frozen), (other, not mode.stored), (other, True)]
    traced = set[Any]()
    for dtype, frozen in dict.fromkeys(cases):
        kwargs = mode.busy(dtype=dtype, ignored="some")
        kwargs |= {n: kwargs[n].detach() for n in trained(kwargs)[1:] if frozen}
        with Recorded() as recorded:
            gradients(mode, kwargs)
        assert recorded.calls
        for operator, (args, rest) in recorded.calls.values():
            tests = ("test_schema", "test_autograd_registration", "test_faketensor")
            torch.library.opcheck(
                operator, args, rest, test_utils=tests + ("test_aot_dispatch_dynamic",) * (operator not in traced)
            )
            traced.add(operator)
