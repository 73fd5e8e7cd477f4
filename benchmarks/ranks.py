"""Measure the head with its vocabulary sharded over GPUs, beside PyTorch's loss_parallel and the bare local products.

    torchrun --standalone --nproc-per-node 4 benchmarks/ranks.py
    torchrun --standalone --nproc-per-node 2 benchmarks/ranks.py --shape 64,32,1000 --device cpu   # to try it

Each rank holds V / ranks classes; times are of the slowest rank, bytes of the fullest.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

import lowtide
from lowtide.bench.limit import bare_gemms, limit_rows
from lowtide.bench.problem import make_problem
from lowtide.bench.results import short_gpu
from lowtide.bench.shapes import SHAPES, Shape
from lowtide.measure import describe_machine, peak_above, source_commit, time_side_by_side

NAMES = ("llama-1b", "llama-8b", "qwen-4k")
RESULTS = Path(__file__).parent / "results"


def ways(x: Tensor, w: Tensor, y: Tensor, mesh: Any) -> dict[str, Callable[[], None]]:
    """Return what is measured, by name: loss and both gradients."""
    ranks, rank = mesh.size(), mesh.get_local_rank()
    weight = DTensor.from_local(w.detach(), mesh, [Shard(0)]).requires_grad_()
    same = DTensor.from_local(x.detach(), mesh, [Replicate()]).requires_grad_()
    part = DTensor.from_local(x.detach().chunk(ranks)[rank], mesh, [Shard(0)]).requires_grad_()

    def clear() -> None:
        weight.grad = same.grad = part.grad = None

    def ours(input: Tensor, **options: Any) -> Callable[[], None]:
        def run() -> None:
            clear()
            lowtide.linear_cross_entropy(input, weight, y, options=lowtide.HeadOptions(**options)).backward()

        return run

    def torch_loss_parallel() -> None:
        clear()
        with loss_parallel():
            F.cross_entropy(F.linear(same, weight).float(), y).backward()

    return {
        "lowtide": ours(same),
        "lowtide, hidden states sharded": ours(part),
        "lowtide, recompute": ours(same, gradient="recompute"),
        "loss_parallel": torch_loss_parallel,
    }


def measure(shape: Shape, device: torch.device, mesh: Any, warm: int, reps: int) -> dict[str, Any]:
    N, D, V = shape.N, shape.D, shape.V
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    rows = V // mesh.size()
    local = make_problem(Shape(f"{N},{D},{rows}", N, D, rows), dtype, device)
    x, w = local.x.detach(), local.w.detach()
    dist.broadcast(x, 0)
    y = torch.randint(0, rows * mesh.size(), (N,), generator=torch.Generator().manual_seed(1)).to(device)
    found: dict[str, Any] = {"N": N, "D": D, "V": rows * mesh.size(), "ranks": mesh.size(), "dtype": str(dtype)}
    runs = ways(x, w, y, mesh)
    found["peak_mib"], failed = {}, {}
    for name in list(runs):
        try:
            runs[name]()
            found["peak_mib"][name] = highest(peak_above(runs[name], device) / 2**20, device)
        except torch.OutOfMemoryError as error:  # on every rank alike: all hold as much
            failed[name] = str(error).splitlines()[0]
            del runs[name]
    bare = {f"bare products, {c} rows": bare_gemms(local, c) for c in limit_rows(N, rows * dtype.itemsize)}
    timings = time_side_by_side({**runs, **bare}, device, warm=warm, reps=reps)
    found["ms"] = {name: highest(timing.median_ms, device) for name, timing in timings.items()}
    limit = min(ms for name, ms in found["ms"].items() if name in bare)
    found["share_of_bare_products"] = {name: limit / found["ms"][name] for name in runs}
    return found | {"failed": failed}


def highest(value: float, device: torch.device) -> float:
    """Return the highest of the ranks' values."""
    told = torch.tensor(value, device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return round(told.item(), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", help="N,D,V; V is cut to a multiple of the ranks")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--reps", type=int, default=15)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    device = torch.device(args.device, dist.get_rank() if args.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mesh = init_device_mesh(args.device, (dist.get_world_size(),))
    shapes = [SHAPES[name] for name in NAMES]
    if args.shape:
        shapes = [Shape(text, *map(int, text.split(","))) for text in args.shape]
    results = [measure(shape, device, mesh, args.warm, args.reps) for shape in shapes]
    if dist.get_rank() == 0:
        told = {"command": "benchmarks/ranks.py", "machine": describe_machine(), "commit": source_commit()}
        name = short_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else "cpu"
        file = args.output / f"{dt.date.today()}-ranks-{mesh.size()}-{name}.json"
        file.write_text(json.dumps(told | {"results": results}, indent=1) + "\n")
        print(json.dumps(results, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
