"""Whether a fused module's stock code and settings are still those that were probed."""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from lowtide.code import Code, functions_in, settings
from lowtide.models.report import PatchReport

# The report that lists why a module runs its stock code.
_REPORTS: WeakKeyDictionary[nn.Module, "ref[PatchReport]"] = WeakKeyDictionary()

Settings = tuple[tuple[tuple[str, Any], ...], ...]  # of a module, and of each child that it depends on


def report_to(module: nn.Module, report: PatchReport) -> None:
    """Have `Watch` add to ``report`` what changed for ``module``."""
    _REPORTS[module] = ref(report)


def code_of(classes: Sequence[type], found: Settings = ()) -> Code:
    """Return what modules of these classes run, and the functions among their settings."""
    return Code(classes, functions_in(found))


def settings_of(modules: Sequence[nn.Module], code: Code, *, but: str = "") -> Settings:
    """Return the attributes of each module that its code may read, except ``but``."""
    names = sorted(code.names - {but})
    return tuple(settings(module, names) for module in modules)


class Watch:
    """The code and settings with which the modules of one fused class were probed.

    Args:
        base: The stock class of these modules.
        look: Returns the current code.
        found: The settings of the probed module; None if they do not matter.
        confirm: Probes whether a module is what this class was made for. Called if the class was made by reading a
            pickle, so that this process has not probed the code.
        but: The name of an attribute that may change.
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
        for name, value in self._found[0] if self._found else ():
            if isinstance(value, bool | int | float) and getattr(module, name, None) != value:
                return True
        return False
