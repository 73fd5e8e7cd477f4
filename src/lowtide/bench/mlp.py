"""The benchmark of `swiglu_mlp`: forward, backward, what is kept and the peak, beside peers and the bare GEMMs."""

from __future__ import annotations

from collections.abc import Callable

from lowtide.bench.config import MlpBenchConfig
from lowtide.bench.harness import Benchmark, Column, Row, Run, Table, reason_in, release
from lowtide.bench.mlp_peers import MLP_PEERS, MlpPeer, Stack, bare_products, make_stack
from lowtide.bench.peers import LOWTIDE
from lowtide.measure.timing import kept_above, peak_above, time_side_by_side
from lowtide.measure.units import mib

TABLE = Table(
    (Column("", "name", "<18"),),
    (
        Column("forward ms", "forward_ms", "11.2f"), Column("backward ms", "backward_ms", "12.2f"),
        Column("both ms", "ms", "9.2f"), Column("limit ms", "limit_ms", "9.2f"), Column("over it", "over", "9.1%"),
        Column("kept MiB", "kept_mib", "10.1f"), Column("peak MiB", "peak_mib", "10.1f"),
        Column("all GB", "all_gb", "8.2f"), Column("again GB", "again_gb", "9.2f"),
    ),
)  # fmt: skip


def row_of(peer: MlpPeer, stack: Stack, *, warm: int, reps: int) -> Row:
    """Return a peer's row, measured interleaved with the bare GEMMs.

    A row has the peer's ``name`` and its ``gemms``, the products a layer that it cannot do without, and ``limit_ms``,
    their time in the same rounds; ``forward_ms``, the median time of forward with a graph, ``ms``, that of forward and
    backward, and ``backward_ms``, the difference; ``over``, ``ms / limit_ms - 1``; ``spread``, the slowest round over
    the fastest, less 1; ``kept_mib``, what is alive after forward for backward's sake, the input with it, weights and
    last output without, and ``kept_bytes``, the same in bytes a token and layer; ``peak_mib``, the most memory at once
    above input and weights, gradients included, and ``all_gb``, that with input and weights, in GB of 10**9 bytes;
    ``again_gb``, the same of a step that adds to the gradients of the one before, these counted. Or ``cannot``, why
    it does not do the shape.
    """
    device, shape = stack.x.device, stack.shape
    row: Row = {"name": peer.name, "gemms": peer.gemms}
    with reason_in(row, cannot="cannot"):
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
        forward, both, limit = (timings[name].median_ms for name in ("forward", "step", "limit"))
        row |= {"forward_ms": forward, "backward_ms": both - forward, "ms": both, "limit_ms": limit}
        row |= {"over": both / limit - 1, "spread": timings["step"].spread}
        row |= {"kept_mib": mib(kept), "kept_bytes": kept / (shape.N * shape.layers), "peak_mib": mib(peak)}
        row |= {"all_gb": (peak + stack.bytes) / 1e9, "again_gb": (again + 2 * stack.bytes) / 1e9}
    stack.clear()
    release(device)
    return row


def measure(run: Run[MlpBenchConfig]) -> None:
    """Measure the peers on each shape."""
    config = run.config
    run.result |= {"dtype": run.dtype_name, "warm": config.warm, "reps": config.reps, "shapes": []}
    for shape in config.shapes:
        stack = make_stack(shape, run.dtype, run.device, config.seed)
        rows: list[Row] = []
        run.result["shapes"].append({**vars(shape), "tokens": shape.N, "rows": rows})
        run.say(f"\n{shape} {run.dtype_name}\n{TABLE.header}")
        for peer in config.peers:
            run.add(row_of(MLP_PEERS[peer], stack, warm=config.warm, reps=config.reps), rows, TABLE)
        del stack
        release(run.device)


MLP = Benchmark(
    name="mlp-{dtype}",
    measure=measure,
    failed=lambda row: "failed" in row and row["name"].startswith(LOWTIDE),
    peers=MLP_PEERS,
)
