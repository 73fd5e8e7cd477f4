"""The settings of ``lowtide bench longest``: which model, trained how, by whom, and for how long to look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lowtide.bench.settings import Dtype, RunSettings, Sdpa, StepSettings, setting
from lowtide.measure.units import parse_gib

Train = Literal["full", "lora"]
OFFLOADED = "-offload"  # ends the name of a way whose checkpoints lie in host memory
WAYS = ("lowtide", "liger", f"liger{OFFLOADED}", "stock", f"stock{OFFLOADED}")


@dataclass(frozen=True, kw_only=True)
class LongestBenchConfig(StepSettings, RunSettings):
    """What `lowtide.bench.longest` measures; each field is the option of ``lowtide bench longest`` of that name.

    Raises:
        ArgumentValueError: a value that no run could use.
    """

    benchmark = "longest"

    train: Train = setting(  # noqa: RUF009
        "full", "full: every parameter, in host memory with gradients and optimizer; lora: adapters of rank 16"
    )
    way: tuple[str, ...] = setting(("lowtide", "liger", "liger-offload"), "by whom: {known}", metavar="WAY", known=WAYS)
    model: str = setting("llama-3-8b", "whose shape, as in lowtide train --model; random weights", metavar="NAME")
    layers: int | None = setting(None, "so many layers instead of the model's: a look in less time", least=1)
    tokens: int = setting(32768, "length of the rate, where lowtide keeps what makes it fastest; 0: none")
    search: bool = setting(True, "measure the rate alone, and look for no longest sequence")
    start: int | None = setting(
        None, "length to begin the search with; without it, the longest that should fit", least=2
    )
    step: int = setting(8192, "tokens: how near to the longest sequence the search goes", least=1)
    seconds: float = setting(
        1800.0, "for each way's rate and search: what takes longer is ended, or not tried", metavar="S"
    )
    tile: int = setting(16384, "tokens that lowtide's MLPs work on at a time", least=1)
    budget: str | None = setting(
        None, "GPU memory that is counted on, such as 70GiB; without it, 93% of it", metavar="SIZE"
    )
    host: str | None = setting(
        None, "host memory, such as 120GiB; without it, what is free now, less 6 GiB", metavar="SIZE"
    )
    sdpa: Sdpa = setting("auto", "attention's kernel, the same for all; auto: as PyTorch chooses")  # noqa: RUF009
    warm: int = setting(1, "steps that do not count, where the rate is measured", last=True, least=0)
    reps: int = setting(2, "steps that count there; of a long sequence one step is run", last=True, least=1)
    dtype: Dtype = setting("auto", "of the weights; auto: bfloat16 on a GPU, float32 on a CPU", last=True)  # noqa: RUF009
    seed: int = setting(0, "of weights and tokens", last=True, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("way", bool(self.way), f"names out of {', '.join(WAYS)}")
        self._require("tokens", self.tokens == 0 or self.tokens > 1, "0, or a whole number above 1")
        self._require("search", self.search or self.tokens > 0, "--tokens above 0 beside --no-search")
        self._require_positive("seconds")
        for name in ("budget", "host"):
            if getattr(self, name) is not None:
                parse_gib(name, getattr(self, name))
