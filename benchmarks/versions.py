"""Two versions of lowtide on one GPU: the loss's time, idle and busy, and its peak memory, interleaved.

    python benchmarks/versions.py BASE_SRC NEW_SRC [--rounds 5] [--out FILE]

BASE_SRC and NEW_SRC are the `src` folders of two checkouts. Each version has a process of its own, and they measure one
after the other, shape by shape: a call on an idle GPU, with the host's launches, and calls that are queued behind other
work, as in training. A ratio is new over base in the same round; the table has the rounds' median and spread.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

CALLS = 6  # of one reading
SHAPES = {
    "llama-1b": (16384, 2048, 131072), "gemma-2b": (8192, 2304, 256000), "llama-8b": (16384, 4096, 128256),
    "small-32k": (32768, 768, 32000), "qwen-4k": (8192, 4096, 151936), "qwen-248k": (16384, 2048, 248320),
    "gemma-262k": (8192, 2560, 262144),
}  # fmt: skip


def read(call: Callable[[], None]) -> dict[str, float]:
    """Return the milliseconds of a call on an idle and on a busy GPU, and its peak above the inputs in MiB."""
    import torch

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    idle = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        idle.append(1e3 * (time.perf_counter() - start))
    peak = torch.cuda.max_memory_allocated() - before
    work = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(20):  # 30 ms, in which the host launches ahead
        work @ work
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    torch.cuda.synchronize()
    return {"idle": median(idle), "busy": begin.elapsed_time(end) / CALLS, "mib": peak / 2**20}


def serve() -> None:
    """Read a shape from each line of standard input, and print its readings."""
    import torch

    import lowtide

    for line in sys.stdin:
        N, D, V = json.loads(line)
        torch.manual_seed(0)
        x = torch.randn(N, D, device="cuda", dtype=torch.bfloat16).requires_grad_()
        w = (torch.randn(V, D, device="cuda", dtype=torch.bfloat16) * D**-0.5).requires_grad_()
        y = torch.randint(0, V, (N,), device="cuda")

        def call(x: Any = x, w: Any = w, y: Any = y) -> None:
            torch.autograd.grad(lowtide.linear_cross_entropy(x, w, y), [x, w])

        print(json.dumps(read(call)), flush=True)
        del x, w, y, call
        torch.cuda.empty_cache()


def main() -> None:
    if sys.argv[1:] == ["--serve"]:
        serve()
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base")
    parser.add_argument("new")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    sides = {"base": arguments.base, "new": arguments.new}
    runs = {
        side: subprocess.Popen(
            [sys.executable, __file__, "--serve"], env=os.environ | {"PYTHONPATH": src}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for side, src in sides.items()
    }  # fmt: skip

    def reading(side: str, shape: tuple[int, int, int]) -> dict[str, float]:
        run = runs[side]
        assert run.stdin is not None
        assert run.stdout is not None
        print(json.dumps(shape), file=run.stdin, flush=True)
        result: dict[str, float] = json.loads(run.stdout.readline())
        return result

    rows = []
    for name, shape in SHAPES.items():
        rounds = [{side: reading(side, shape) for side in runs} for _ in range(arguments.rounds + 1)][1:]
        row: dict[str, Any] = {"shape": f"{name} {shape}"}
        for kind in ("idle", "busy", "mib"):
            ratios = sorted(pair["new"][kind] / pair["base"][kind] for pair in rounds)
            values = {side: median(pair[side][kind] for pair in rounds) for side in runs}
            row[kind] = {**values, "ratio": median(ratios), "lowest": ratios[0], "highest": ratios[-1]}
        rows.append(row)
        readings = (
            "{base:9.3f} -> {new:9.3f} ({ratio:.3f}, {lowest:.3f}-{highest:.3f})".format(**row[k])
            for k in row
            if k != "shape"
        )
        print(f"{row['shape']:34}", *readings, flush=True)
    for run in runs.values():
        run.communicate()
    if arguments.out:
        sys.path.insert(0, arguments.new)  # lowtide need not be installed
        from lowtide.measure.machine import describe_machine

        command = f"python benchmarks/versions.py BASE_SRC NEW_SRC --rounds {arguments.rounds}"
        result = {"command": command, "machine": describe_machine(), "rows": rows}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
