"""The settings of ``lowtide bench models``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lowtide.bench.models_case import MAPPINGS
from lowtide.bench.settings import Settings, command_of, setting


@dataclass(frozen=True, kw_only=True)
class ModelsBenchConfig(Settings):
    """What `lowtide.bench.models.run` checks; each field is the option of ``lowtide bench models`` with the same name.

    Raises:
        ArgumentValueError: a value that no run could use.
    """

    device: ClassVar[str] = "cpu"
    dtype: ClassVar[str] = "float32"

    kind: tuple[str, ...] = setting((), "model types of these kinds: {kinds}; without it, all", metavar="KIND")
    only: tuple[str, ...] = setting((), "these types alone, by their model_type", metavar="TYPE")
    workers: int = setting(2, "processes at a time, each with one thread")
    timeout: int = setting(120, "seconds after which a type is given up", metavar="S")
    seed: int = setting(0, "of weights and tokens")
    resume: str = setting("", "a result to go on with: what was compared there is not run again", metavar="FILE")
    table: str = setting("", "also write the table as Markdown", metavar="FILE")
    output: str = setting(".", "folder for the result (json)", metavar="DIR", last=True)

    def __post_init__(self) -> None:
        for name, least in (("workers", 1), ("timeout", 1), ("seed", 0)):
            self._require_at_least(name, least)
        self._require("kind", all(kind in MAPPINGS for kind in self.kind), f"names out of {', '.join(MAPPINGS)}")
        self._require("output", self.output != "", "a name that is not empty")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that are swept, in order."""
        return tuple(kind for kind in MAPPINGS if not self.kind or kind in self.kind)

    def command(self) -> str:
        """Return the command that says the same."""
        return command_of("models", self)
