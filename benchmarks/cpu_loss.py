"""Measure forward and backward of the loss on the CPU interleaved with stock PyTorch's, one child process per setting.

    python benchmarks/cpu_loss.py
    python benchmarks/cpu_loss.py --threads 1 2 8 --policy PASSIVE ACTIVE --dtype float32 bfloat16 --shape 2048x256x8192

Prints milliseconds of both, the ratio of the fastest calls and the median ratio of consecutive calls.
The step of a training run is `lowtide train --compare`.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide import linear_cross_entropy
from lowtide.bench.harness import begin, write_json
from lowtide.measure.child import run_child

RESULTS = Path(__file__).parent / "results"
SHAPES = ["2048x256x8192", "1024x1024x32000", "256x2048x128256"]


def stock(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), y)


def measure(shape: str, dtype: str, pairs: int) -> dict[str, float]:
    """Return the times of one setting in this process, in milliseconds."""
    N, D, V = map(int, shape.split("x"))
    torch.manual_seed(0)
    x, w = torch.randn(N, D), torch.randn(V, D) / D**0.5
    x, w = (t.to(getattr(torch, dtype)).requires_grad_() for t in (x, w))
    y = torch.randint(V, (N,))
    times: dict[str, list[float]] = {"stock": [], "lowtide": []}
    for _ in range(pairs + 1):
        for name, loss in (("stock", stock), ("lowtide", linear_cross_entropy)):
            x.grad = w.grad = None
            start = time.perf_counter()
            loss(x, w, y).backward()
            times[name].append(1e3 * (time.perf_counter() - start))
    stock_ms, ours_ms = times["stock"][1:], times["lowtide"][1:]  # the first of each warms up
    ratios = [b / a for a, b in zip(stock_ms, ours_ms, strict=True)]
    return {
        "stock_ms": min(stock_ms),
        "lowtide_ms": min(ours_ms),
        "ratio": min(ours_ms) / min(stock_ms),
        "median_ratio": median(ratios),
    }


def main() -> int:
    from cpu_loss import measure as importable  # a child can import nothing from __main__

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=SHAPES, help="N x D x V, such as 2048x256x8192")
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2, 8])
    parser.add_argument("--policy", nargs="+", default=["PASSIVE", "ACTIVE"], help="OMP_WAIT_POLICY")
    parser.add_argument("--pairs", type=int, default=7, help="calls of each, interleaved")
    parser.add_argument("--output", default=str(RESULTS))
    args = parser.parse_args()
    command = shlex.join(["python", "benchmarks/cpu_loss.py", *sys.argv[1:]])
    file, result = begin(args.output, "loss", command, torch.device("cpu"))
    rows: list[dict[str, Any]] = []
    result["rows"] = rows
    print(f"{'N x D x V':18} {'dtype':9} threads policy   stock ms lowtide ms  ratio median")
    for shape, dtype, threads, policy in product(args.shape, args.dtype, args.threads, args.policy):
        env = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": policy}
        value = run_child(importable, shape, dtype, args.pairs, env=env)
        if "failed" in value:
            sys.exit(value["failed"])
        rows.append({"shape": shape, "dtype": dtype, "threads": threads, "policy": policy, **value})
        print(
            f"{shape:18} {dtype:9} {threads:7} {policy:8} {value['stock_ms']:8.1f}"
            f" {value['lowtide_ms']:10.1f} {value['ratio']:6.3f} {value['median_ratio']:6.3f}",
            flush=True,
        )
        write_json(file, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
