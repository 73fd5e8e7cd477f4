"""Probes: what a module computes, by running it on a few random rows beside a formula; and whether that still holds.

The rows go through a twin: the module's own forward with small random weights on the CPU, so that a probe needs no real
weights (they may be on no device yet, or on a full one) and takes a millisecond. Later calls compare the module's code
and settings with those that were probed (`ProbedCode`).
"""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from lowtide.code import Code, functions_in, settings
from lowtide.models.report import PatchReport

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


# The report that lists why a module runs its stock code.
_REPORTS: WeakKeyDictionary[nn.Module, "ref[PatchReport]"] = WeakKeyDictionary()

Settings = tuple[tuple[tuple[str, Any], ...], ...]  # of a module, and of each child that it depends on


def report_to(module: nn.Module, report: PatchReport) -> None:
    """Have `ProbedCode` add to ``report`` what changed for ``module``."""
    _REPORTS[module] = ref(report)


def code_of(classes: Sequence[type], found: Settings = ()) -> Code:
    """Return what modules of these classes run, and the functions among their settings."""
    return Code(classes, functions_in(found))


def settings_of(modules: Sequence[nn.Module], code: Code, *, but: str = "") -> Settings:
    """Return the attributes of each module that its code may read, except ``but``."""
    names = sorted(code.names - {but})
    return tuple(settings(module, names) for module in modules)


class ProbedCode:
    """The code and settings with which the modules of one fused class, a child of ``base``, were probed.

    ``look`` returns the current code; ``found`` are the settings of the probed module, None if they do not matter, and
    ``but`` is an attribute that may change. ``confirm`` probes whether a module is what this class was made for: if the
    class was made by reading a pickle, this process has not probed the code.
    """

    def __init__(
        self,
        base: Any,
        look: Callable[[], Code],
        found: Settings | None,
        confirm: Callable[[Any], bool],
        *,
        but: str = "",
    ) -> None:
        self._base, self._look, self._found, self._confirm, self._but = base, look, found, confirm, but
        self._code: Code | None = None
        self._forward: Any = None

    def look(self) -> None:
        """Record the current code as the probed one."""
        if self._code is None or self._code.exchanged() is not None:
            self._code = self._look()
            self._forward = self._base.forward
            self._names = tuple(sorted(self._code.names - {self._but}))

    def differs(self, module: nn.Module, children: Sequence[nn.Module] = ()) -> bool:
        """Whether the stock code of ``module`` may compute something else now than the fused operation."""
        if torch.compiler.is_compiling():
            if self._code is None or self._code.exchanged() is not None:
                return True
            # The compiler guards these. It does not guard torch's own functions, in stock code neither.
            return self._base.forward is not self._forward or self._set_differently(module)
        if self._code is None and self._confirm(module):
            self.look()
        why = "code that was not probed" if self._code is None else self._code.exchanged()
        if why is None and self._found is not None:
            for one, found in zip((module, *children), self._found, strict=True):
                if settings(one, self._names) != found:
                    why = f"an attribute of {type(one).__name__}"
        if why is None:
            return False
        report = _REPORTS.get(module, lambda: None)()
        if report is not None:
            report.note_exchanged(why)
        return True

    def _set_differently(self, module: Any) -> bool:
        """Whether a number among the module's settings has changed; the compiler guards these reads."""
        numbers = [pair for pair in (self._found[0] if self._found else ()) if isinstance(pair[1], bool | int | float)]
        return any(getattr(module, name, None) != value for name, value in numbers)
