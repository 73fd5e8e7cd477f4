"""The benchmark as lines of text, each printed as soon as it is known."""

from __future__ import annotations

from lowtide.bench.rows import Bench, Row

_COLUMNS = f"{'':24}{'ms':>9}{'share':>8}{'MiB':>9}{'loss err':>10}{'dX err':>10}{'dW err':>10}"


def header(bench: Bench) -> str:
    """Return the shape, the setting, the limit and the columns' names."""
    problem = bench.problem
    tried = ", ".join(f"{rows} rows {ms:.2f} ms" for rows, ms in bench.limit.items())
    dtype = str(problem.dtype).removeprefix("torch.")
    return (
        f"\n{problem.shape} {dtype}, {problem.setting.name}: {problem.setting.gemms} bare GEMMs take {tried}"
        f" ({bench.tflops:.3g} TFLOP/s); gradients {bench.gradients_mib:.1f} MiB\n{_COLUMNS}\n"
    )


def line(row: Row) -> str:
    """Return a row; of lowtide's errors also how many times the roundings' own they are."""
    if row.ms is None:
        return f"{row.name:24}{row.failed}\n"
    text = f"{row.name:24}{row.ms:9.2f}{row.share or 0:8.3f}{row.peak_mib or 0:9.1f}"
    for error in (row.loss_error, row.dx_error, row.dw_error):
        text += f"{'':>10}" if error is None else f"{error:10.1e}"
    floors = [
        f"{name} {error / floor:.3f}"
        for name, error, floor in (("dX", row.dx_error, row.dx_floor), ("dW", row.dw_error, row.dw_floor))
        if error is not None and floor
    ]
    notes = [f"of the floor: {', '.join(floors)}"] if floors else []
    if row.plan is not None:
        notes.append(f"{row.plan.backend}, {row.plan.chunks} x {row.plan.chunk_rows} rows")
    if row.failed:
        notes.append(row.failed)
    return f"{text}  {'; '.join(notes)}".rstrip() + "\n"


def ratio(lowtide: Row | None, liger: Row | None) -> str:
    """Return how lowtide does in Liger's memory; nothing where one of them has no time."""
    if lowtide is None or liger is None or lowtide.ms is None or liger.ms is None:
        return ""
    return (
        f"in the memory of Liger's default: {lowtide.ms:.2f} ms of {liger.ms:.2f}, {lowtide.ms / liger.ms:.3f};"
        f" peak {lowtide.peak_mib:.0f} MiB of {liger.peak_mib:.0f}\n"
    )
