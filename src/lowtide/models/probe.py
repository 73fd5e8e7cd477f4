"""Probes: what a module computes, by running it on a few random rows beside a formula; and whether that still holds.

The rows go through a twin: the module's own forward with small random weights on the CPU, so that a probe needs no real
weights (they may be on no device yet, or on a full one) and takes a millisecond. Later calls compare the forward of the
class (`StockForward`) and the module's settings with those that were probed.
"""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from lowtide.models.instance import stock_class, undecorated

# Small enough for an epsilon to matter, large enough for a clamp to; float16 holds a few times the largest.
ROW_SCALES = (1e-3, 0.3, 1.0, 1.0, 40.0, 4000.0)
# Of rows and of a weight, or of cos and sin. transformers' norms compute float64 rows in float32: they run stock code.
DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
)


def random(*shape: int, seed: int) -> Tensor:
    """Return normal float32 numbers on the CPU; the global generators stay as they are."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32)


def rows(D: int) -> Tensor:
    """Return one random row of each of `ROW_SCALES` [2, 3, D]."""
    scales = torch.tensor(ROW_SCALES, device="cpu", dtype=torch.float32)  # whatever the default dtype is
    return (random(len(ROW_SCALES), D, seed=0) * scales[:, None]).view(2, -1, D)


def linear(rows: int, columns: int, seed: int, *, bias: bool = False) -> nn.Linear:
    """Return a linear layer with a random weight [rows, columns] and, with ``bias``, a random bias."""
    layer = nn.Linear(columns, rows, bias=bias, device="meta")
    layer.weight = nn.Parameter(random(rows, columns, seed=seed))
    if bias:
        layer.bias = nn.Parameter(random(rows, seed=seed + 50))
    return layer


def twin_of(
    module: nn.Module, base: type, *, modules: Mapping[str, nn.Module], parameters: Mapping[str, nn.Parameter]
) -> nn.Module:
    """Return an instance of the stock class ``base``: the module's attributes, but these children and parameters."""
    twin: Any = object.__new__(base)
    state = {name: copy.copy(value) if isinstance(value, dict) else value for name, value in vars(module).items()}
    vars(twin).update(state, _modules=dict(modules), _parameters=dict(parameters))
    return twin.train()  # type: ignore[no-any-return]


def outcome(function: Callable[[], Any]) -> Any:
    """Run ``function`` without gradients, autocast and lasting use of the global generator; return what it raises."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
            return function()
    except Exception as error:  # whatever another library's forward raises means that it is not of our form
        return error.with_traceback(None)  # which holds frames, and they the module


def outcomes(base: Any, twin: nn.Module, x: Tensor) -> list[Any]:
    """Return what the forward of ``base`` computes with a twin's weights from ``x``, in training and in evaluation."""
    return [outcome(functools.partial(base.forward, twin.train(mode), x)) for mode in (True, False)]


def is_like(got: object, expected: Tensor) -> TypeGuard[Tensor]:
    """Whether ``got`` is a tensor of the shape and dtype of ``expected``."""
    return isinstance(got, Tensor) and got.shape == expected.shape and got.dtype == expected.dtype


def agree(got: object, expected: Tensor, tolerance: float) -> bool:
    """Whether ``got`` is a tensor like ``expected``, each row within ``tolerance`` of its largest value."""
    largest = expected.abs().amax(-1, keepdim=True)
    return is_like(got, expected) and bool(((got - expected).abs() <= tolerance * largest).all())


# The plain attributes that the code of a module, and of each child that it depends on, reads.
Settings = tuple[tuple[tuple[str, Any], ...], ...]
_PLAIN = (bool, int, float, str, type(None), torch.dtype, FunctionType, BuiltinFunctionType)


def settings_of(modules: Sequence[nn.Module], *, but: str = "", all_of: bool = False) -> Settings:
    """Return the numbers, texts and functions among the attributes that the code of these modules reads.

    ``but`` is an attribute that may change. ``all_of``: those too that only functions outside of the class read.
    """
    return tuple(
        tuple(
            (name, _comparable(vars(module)[name]))
            for name in (sorted(vars(module)) if all_of else _names_read(stock_class(module)))
            if name in vars(module)
            and name not in ("training", but)
            and isinstance(vars(module)[name], (*_PLAIN, functools.partial))
        )
        for module in modules
    )


def have_changed(modules: Sequence[nn.Module], settings: Settings) -> bool:
    """Whether an attribute among the ``settings`` of these modules has another value now."""
    for module, values in zip(modules, settings, strict=True):
        for name, value in values:
            if _comparable(getattr(module, name, None)) != value:
                return True
    return False


def _comparable(value: Any) -> Any:
    if isinstance(value, functools.partial):
        return value.func, value.args, tuple(sorted(value.keywords.items()))
    return value


def _names_read(kind: Any) -> list[str]:
    """Return the names in the code of a class's forward, and of the methods that it calls."""
    functions, names = [undecorated(kind.forward)], set[str]()
    for function in functions:
        new = set() if function is None else set(function.__code__.co_names) - names
        names |= new
        functions += [
            undecorated(getattr(kind, name)) for name in new if not hasattr(nn.Module, name) and hasattr(kind, name)
        ]
    return sorted(names)


class StockForward:
    """The forward of a stock class as it was when a module of that class was patched last.

    Code that is replaced later is compared no further than this: `lowtide.patch` again looks at it again.
    """

    def __init__(self, base: Any) -> None:
        self._base = base
        self.forward: Any = None
        self.record()

    def record(self) -> None:
        """Record the present forward as the one that was probed."""
        self.forward = self._base.forward

    def is_replaced(self) -> bool:
        """Whether another forward was set on the class since."""
        return self._base.forward is not self.forward
