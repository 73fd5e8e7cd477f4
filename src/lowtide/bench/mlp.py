"""The benchmark of `swiglu_mlp`: forward, backward, what is kept and the peak, beside peers and the bare GEMMs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lowtide.bench.config import MlpBenchConfig
from lowtide.bench.harness import CannotError, chosen_device, chosen_dtype, reason_of, release
from lowtide.bench.mlp_peers import MLP_PEERS, MlpPeer, Stack, bare_products, make_stack
from lowtide.bench.peers import LOWTIDE
from lowtide.bench.results import begin
from lowtide.measure.timing import kept_above, peak_above, time_side_by_side
from lowtide.measure.units import mib

_COLUMNS = (
    f"{'':18}{'forward ms':>11}{'backward ms':>12}{'both ms':>9}{'limit ms':>9}{'over it':>9}"
    f"{'kept MiB':>10}{'peak MiB':>10}{'all GB':>8}{'again GB':>9}"
)


@dataclass(kw_only=True)
class MlpRow:
    """What was measured of one peer; None: not measured, one of the last two says why.

    Attributes:
        name: the peer's.
        gemms: products a layer that it cannot do without; ``limit_ms`` their time in the same rounds.
        forward_ms: median time of forward with a graph; ``ms`` of forward and backward, ``backward_ms`` the difference.
        over: ``ms / limit_ms - 1``.
        spread: the slowest round over the fastest, less 1.
        kept_mib: what is alive after forward for backward's sake, the input with it, weights and last output without.
        kept_bytes: the same, bytes a token and layer.
        peak_mib: most memory at once above input and weights, gradients included.
        all_gb: that with input and weights, in GB of 10**9 bytes.
        again_gb: the same of a step that adds to the gradients of the one before, these counted.
        cannot: why it does not do the shape.
        failed: why else there are no figures.
    """

    name: str
    gemms: int
    forward_ms: float | None = None
    backward_ms: float | None = None
    ms: float | None = None
    limit_ms: float | None = None
    over: float | None = None
    spread: float | None = None
    kept_mib: float | None = None
    kept_bytes: float | None = None
    peak_mib: float | None = None
    all_gb: float | None = None
    again_gb: float | None = None
    cannot: str | None = None
    failed: str | None = None

    @property
    def own(self) -> bool:
        """Whether it is lowtide's."""
        return self.name.startswith(LOWTIDE)

    def to_json(self) -> dict[str, Any]:
        """Return what is known."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


def measure(peer: MlpPeer, stack: Stack, *, warm: int, reps: int) -> MlpRow:
    """Return a peer's row, measured interleaved with the bare GEMMs."""
    device, shape = stack.x.device, stack.shape
    row = MlpRow(name=peer.name, gemms=peer.gemms)
    try:
        layer = peer.build(stack)
        functions: dict[str, Callable[[], object]] = {
            "limit": bare_products(stack, peer.gemms),
            "forward": lambda: stack.forward(layer),
            "step": lambda: stack.step(layer),
        }
        timings = time_side_by_side(functions, device, warm=warm, reps=reps)
        stack.clear()
        kept = kept_above(lambda: stack.forward(layer), device)
        kept += stack.x.nbytes - stack.upstream.nbytes  # the input, and not the output, which is of the same size
        peak = peak_above(lambda: stack.step(layer), device)
        again = peak_above(lambda: stack.add(layer), device)
        row.forward_ms, row.ms, row.limit_ms = (timings[name].median_ms for name in ("forward", "step", "limit"))
        row.backward_ms, row.over = row.ms - row.forward_ms, row.ms / row.limit_ms - 1
        row.spread = timings["step"].spread
        row.kept_mib, row.kept_bytes = mib(kept), kept / (shape.N * shape.layers)
        row.peak_mib, row.all_gb = mib(peak), (peak + stack.bytes) / 1e9
        row.again_gb = (again + 2 * stack.bytes) / 1e9
    except CannotError as cannot:
        row.cannot = str(cannot)
    except Exception as error:  # whatever a peer raises is its row
        row.failed = reason_of(error)
    stack.clear()
    release(device)
    return row


def line(row: MlpRow) -> str:
    """Return a row as text."""
    if row.ms is None:
        return f"{row.name:18}{row.failed or row.cannot}\n"
    return (
        f"{row.name:18}{row.forward_ms:11.2f}{row.backward_ms:12.2f}{row.ms:9.2f}{row.limit_ms:9.2f}{row.over:9.1%}"
        f"{row.kept_mib:10.1f}{row.peak_mib:10.1f}{row.all_gb:8.2f}{row.again_gb:9.2f}\n"
    )


def run(config: MlpBenchConfig, say: Callable[[str], object]) -> list[MlpRow]:
    """Measure, tell each line as it is known, and write the result after each row.

    Args:
        config: what.
        say: gets the text, a line or more at a time.

    Returns:
        list: All rows.

    Raises:
        UnsupportedError: there is no such device.
        ArgumentValueError: the folder for the results cannot be written.
    """
    device = chosen_device(config.device)
    dtype = chosen_dtype(config.dtype, device)
    name = str(dtype).removeprefix("torch.")
    packages = (peer.package for peer in MLP_PEERS.values())
    files, about = begin(config.output, f"mlp-{name}", config.command(), device, packages)
    shapes: list[dict[str, Any]] = []
    told = {**about, "dtype": name, "warm": config.warm, "reps": config.reps, "shapes": shapes}
    found: list[MlpRow] = []
    for shape in config.shapes:
        stack = make_stack(shape, dtype, device, config.seed)
        rows: list[dict[str, Any]] = []
        shapes.append({**vars(shape), "tokens": shape.N, "rows": rows})
        say(f"\n{shape} {name}\n{_COLUMNS}\n")
        for peer in config.peers:
            found.append(measure(MLP_PEERS[peer], stack, warm=config.warm, reps=config.reps))
            rows.append(found[-1].to_json())
            say(line(found[-1]))
            files.write_json(told)
        del stack
        release(device)
    say(f"written: {files.json}\n")
    return found
