"""What `lowtide.patch_trl` replaced, and who computed what since."""

from dataclasses import dataclass, field


@dataclass
class TrlReport:
    """What was replaced in TRL, and live counts of the calls since.

    The counts go on as trainers run. What runs inside ``torch.compile`` is not counted.

    Args:
        version: TRL's version.
        replaced: Where TRL's modules refer to a function that was replaced, by its name; as of the last `patch_trl`.
        calls_lowtide: Calls that lowtide computed, by function.
        calls_trl: Calls that were handed to TRL's own function, by function.
        why_trl: How often each reason for handing a call to TRL came up.

    Example:
        >>> report = lowtide.patch_trl()
        >>> sorted(report.replaced)
        ['ChunkedDivergenceFunction', 'ChunkedLogProbFunction']
        >>> report.calls_lowtide, report.calls_trl  # until a trainer runs
        ({}, {})
        >>> lowtide.unpatch_trl()
    """

    version: str
    replaced: dict[str, list[str]] = field(default_factory=dict)
    calls_lowtide: dict[str, int] = field(default_factory=dict)
    calls_trl: dict[str, int] = field(default_factory=dict)
    why_trl: dict[str, int] = field(default_factory=dict)

    def count(self, function: str, why_trl: str | None) -> None:
        """Count one call: by lowtide, or by TRL for the reason given."""
        calls = self.calls_lowtide if why_trl is None else self.calls_trl
        calls[function] = calls.get(function, 0) + 1
        if why_trl is not None:
            self.why_trl[why_trl] = self.why_trl.get(why_trl, 0) + 1

    def __str__(self) -> str:
        lines = [f"TRL {self.version}"]
        for function, names in self.replaced.items():
            calls = f"{self.calls_lowtide.get(function, 0)} by lowtide, {self.calls_trl.get(function, 0)} by TRL"
            lines += [f"{function}: calls computed {calls}", *(f"  replaced {name}" for name in names)]
        lines += [f"{times} x TRL's own: {why}" for why, times in self.why_trl.items()]
        return "\n".join(lines)
