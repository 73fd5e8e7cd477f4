"""The loss with ignored tokens: time over that of all tokens, on a busy GPU, and the peak above the inputs.

python benchmarks/ignored_tokens.py [--out FILE]
"""

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import torch

import lowtide
from lowtide.measure.machine import describe_machine

SHAPES = ((16384, 2048, 131072), (8192, 4096, 151936))
SHARES = (0.0, 0.6)  # of the tokens, at random
ROUNDS, CALLS = 3, 5


def readings(N: int, D: int, V: int) -> dict[str, Any]:
    """Return of each share of ignored tokens the median over rounds of its time over the time of no ignored token."""
    x = torch.randn(N, D, device="cuda", dtype=torch.bfloat16).requires_grad_()
    w = (torch.randn(V, D, device="cuda", dtype=torch.bfloat16) * D**-0.5).requires_grad_()
    full = torch.randint(0, V, (N,), device="cuda")
    work = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def busy(share: float, options: lowtide.HeadOptions) -> float:
        y = full.where(torch.rand(N, device="cuda") >= share, -100)
        times = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        for i in range(10 + CALLS):  # the first ten: what is counted takes some calls to show
            if i == 10:
                torch.cuda.synchronize()
                for _ in range(20):
                    work @ work
                times[0].record()
            torch.autograd.grad(lowtide.linear_cross_entropy(x, w, y, options=options), [x, w])
        times[1].record()
        torch.cuda.synchronize()
        return times[0].elapsed_time(times[1]) / CALLS

    ratios: dict[float, list[float]] = {share: [] for share in SHARES}
    for _ in range(ROUNDS):
        for share in SHARES:
            whole = busy(0.0, lowtide.HeadOptions(ignored_tokens="compute"))
            ratios[share].append(busy(share, lowtide.HeadOptions()) / whole)
    return {f"{share:.0%} ignored": round(median(values), 3) for share, values in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    rows = {" x ".join(map(str, shape)): readings(*shape) for shape in SHAPES}
    result = {"command": "python benchmarks/ignored_tokens.py", "machine": describe_machine(), "rows": rows}
    print(json.dumps(rows, indent=1))
    if out:
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
