"""The settings of ``lowtide bench models``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lowtide.bench.models_case import MAPPINGS
from lowtide.bench.settings import Settings, setting


@dataclass(frozen=True, kw_only=True)
class ModelsBenchConfig(Settings):
    """What `lowtide.bench.models` checks; each field is the option of ``lowtide bench models`` with the same name.

    Raises:
        ArgumentValueError: a value that no run could use.
    """

    benchmark = "models"
    device: ClassVar[str] = "cpu"
    dtype: ClassVar[str] = "float32"

    kind: tuple[str, ...] = setting(
        (), "model types of these kinds: {known}; without it, all", metavar="KIND", known=MAPPINGS
    )
    only: tuple[str, ...] = setting((), "these types alone, by their model_type", metavar="TYPE")
    workers: int = setting(2, "processes at a time, each with one thread", least=1)
    timeout: int = setting(120, "seconds after which a type is given up", metavar="S", least=1)
    seed: int = setting(0, "of weights and tokens", least=0)
    resume: str = setting("", "a result to go on with: what was compared there is not run again", metavar="FILE")
    table: str = setting("", "also write the table as Markdown", metavar="FILE")
    output: str = setting(".", "folder for the result (json)", metavar="DIR", last=True)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that are swept, in order."""
        return tuple(kind for kind in MAPPINGS if not self.kind or kind in self.kind)
