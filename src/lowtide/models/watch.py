"""Whether a fused module would still run the code, with the settings, that the probe of it has seen."""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from lowtide.code import Code, functions_in, settings
from lowtide.models.report import PatchReport

# Whose report tells that a module runs its stock code.
_REPORTS: WeakKeyDictionary[nn.Module, "ref[PatchReport]"] = WeakKeyDictionary()

Settings = tuple[tuple[tuple[str, Any], ...], ...]  # of a module, and of each of its children that count


def report_to(module: nn.Module, report: PatchReport) -> None:
    """Let `Watch` tell ``report`` of what it finds out about ``module``."""
    _REPORTS[module] = ref(report)


def code_of(classes: Sequence[type], found: Settings = ()) -> Code:
    """Return what modules of these classes run, and the functions among their settings."""
    return Code(classes, functions_in(found))


def settings_of(modules: Sequence[nn.Module], code: Code, *, but: str = "") -> Settings:
    """Return the attributes of each module that its code may read, but the one of that name."""
    names = sorted(code.names - {but})
    return tuple(settings(module, names) for module in modules)


class Watch:
    """What the modules of one class of ours were when their code was probed.

    Args:
        base: The stock class of these modules.
        look: Returns the code as it is now.
        found: The settings that the probed module had; None where they do not count.
        but: The name of an attribute that may change.
        confirm: Whether a module is, by a probe, what this class was made for. Asked where the class was made by
            reading a pickle: this process has not seen the code.
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
        """Take the code as it is now for what was probed."""
        if self._code is None or self._code.exchanged() is not None:
            self._code = self._look()
            self._forward = self._base.forward
            self._names = tuple(sorted(self._code.names - {self._but}))

    def differs(self, module: nn.Module, children: Sequence[nn.Module] = ()) -> bool:
        """Whether the stock code of ``module`` may do something else now than what runs in its place."""
        if torch.compiler.is_compiling():
            if self._code is None or self._code.exchanged() is not None:
                return True
            # Of these the compiler makes guards; of torch's own functions it makes none, in stock code neither.
            return self._base.forward is not self._forward or self._set_differently(module)
        if self._code is None and self._confirm(module):
            self.look()
        why = "code that it has not seen" if self._code is None else self._code.exchanged()
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
        """Whether a number among the module's settings is another one: the compiler makes guards of these looks."""
        for name, value in self._found[0] if self._found else ():
            if isinstance(value, bool | int | float) and getattr(module, name, None) != value:
                return True
        return False
