"""Probes: what a module computes and which gradients it gives, by running it on a few random rows beside formulas.

The rows go through a twin: the module's own forward with small random weights on the CPU, so that a probe needs no real
weights (they may be on no device yet, or on a full one) and takes a millisecond.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lowtide.models.instance import children_of

# Small enough for an epsilon to matter, large enough for a clamp to; float16 holds a few times the largest.
ROW_SCALES = (1e-3, 0.3, 1.0, 1.0, 40.0, 4000.0)
# Of rows and of a weight, or of cos and sin. transformers' norms compute float64 rows in float32: they run stock code.
DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
)

# The results of a run and the gradients of its leaves, or what it raised.
Outcome = list[Tensor | None] | Exception
_Key = TypeVar("_Key")


@contextmanager
def surroundings() -> Iterator[None]:
    """Let probes inside have gradients, no autocast, and no lasting use of the global generator."""
    forked = torch.random.fork_rng(devices=[])
    with torch.inference_mode(False), torch.enable_grad(), forked, torch.autocast("cpu", enabled=False):
        yield


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
    module: nn.Module,
    base: type,
    *,
    modules: Mapping[str, nn.Module] | None = None,
    parameters: Mapping[str, nn.Parameter] | None = None,
) -> nn.Module:
    """Return an instance of the stock class ``base``: the module's attributes, but these ``parameters`` alone.

    ``modules`` are children in place of its own; it has copies of the others.
    """
    twin: Any = object.__new__(base)
    state = {name: copy.copy(value) if isinstance(value, dict) else value for name, value in vars(module).items()}
    others = (name for name in children_of(module) if name not in (modules or {}))
    children = {name: copy.deepcopy(children_of(module)[name]) for name in others}
    vars(twin).update(state, _modules={**children, **(modules or {})}, _parameters=dict(parameters or {}))
    return twin  # type: ignore[no-any-return]


def outcome(function: Callable[[], Any], leaves: Sequence[Tensor]) -> Outcome:
    """Return the tensors that ``function`` returns, one or a tuple, and their gradients for ``leaves``."""
    try:
        results = function()
        tensors: tuple[Tensor, ...] = results if isinstance(results, tuple) else (results,)
        trained = [y for y in tensors if y.requires_grad]
        upstream = [random(*y.shape, seed=100 + i).to(y.dtype) for i, y in enumerate(trained)]
        gradients = (
            torch.autograd.grad(trained, leaves, upstream, allow_unused=True) if trained else [None] * len(leaves)
        )
        return [*tensors, *gradients]
    except Exception as error:  # whatever another library's forward raises means that it is not of our form
        return error.with_traceback(None)  # which holds frames, and they the module


def outcomes(base: Any, twin: nn.Module, *args: Tensor, leaves: Sequence[Tensor]) -> list[Outcome] | str:
    """Return what the forward of ``base`` gives with a twin in training and in evaluation; or why that is not all."""
    before = _attributes(twin)
    got = [outcome(functools.partial(base.forward, twin.train(mode), *args), leaves) for mode in (True, False)]
    for one in got:
        if isinstance(one, Exception):
            return f"its forward does not run on its projections alone ({type(one).__name__})"
    try:
        changed = before != _attributes(twin)
    except RuntimeError:  # another tensor
        changed = True
    return "its forward changes attributes of the module" if changed else got


def _attributes(twin: nn.Module) -> list[dict[str, Any]]:
    """Return the attributes of a module and its children, with the versions of tensors."""

    def state(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value, value._version
        return copy.copy(value) if isinstance(value, list | dict | set) else value

    return [{name: state(x) for name, x in vars(each).items() if name != "training"} for each in twin.modules()]


def agree(got: Outcome, expected: Outcome, tolerance: float) -> bool:
    """Whether two outcomes have like tensors, or None, in common, within ``tolerance`` of the largest values.

    That is of each row of the first; a gradient's rows may be next to nothing.
    """
    if isinstance(got, Exception) or isinstance(expected, Exception) or len(got) != len(expected):
        return False
    for i, (one, other) in enumerate(zip(got, expected, strict=True)):
        if one is None or other is None:
            if one is not other:
                return False
            continue
        largest = other.abs().amax(-1, keepdim=True) if i == 0 else other.abs().amax()
        if not is_like(one, other) or not ((one - other).abs() <= tolerance * largest).all():
            return False
    return True


def is_like(got: object, expected: object) -> bool:
    """Whether both are tensors of one shape and dtype."""
    if not isinstance(got, Tensor) or not isinstance(expected, Tensor):
        return False
    return got.shape == expected.shape and got.dtype == expected.dtype


def first_of(
    formulas: Iterable[tuple[_Key, Callable[[], Any]]],
    got: Sequence[Outcome],
    leaves: Sequence[Tensor],
    tolerance: float,
) -> _Key | None:
    """Return the key of the first formula that gives what a module gave in training and in evaluation."""
    for key, formula in formulas:
        expected = outcome(formula, leaves)
        if all(agree(one, expected, tolerance) for one in got):
            return key
    return None
