"""Measure the head on several GPUs: its vocabulary sharded over them, and whole under FSDP2.

    torchrun --standalone --nproc-per-node 4 benchmarks/ranks.py
    torchrun --standalone --nproc-per-node 2 benchmarks/ranks.py --shape 64,32,1000 --device cpu   # to try it

Sharded, each rank holds V / ranks classes and all tokens. Beside lowtide: PyTorch's loss_parallel, a loss over sharded
logits as Megatron-LM computes it (written here, in peers_of_ranks.py), Liger's tensor-parallel function where it is
installed, and the limit: the three local GEMMs alone. "high priority" is the same on a group whose NCCL stream has
priority over the GEMMs. Under FSDP2 each rank has
its own tokens, and the head is in the root's unit.

Times are of loss and all gradients on the slowest rank; peaks are of the rank with the highest. "alone" is a call on an
idle GPU and includes the launch of the first kernel; "queued" is launched while the GPU is busy, as in training. The
same GEMMs run before each call, so that all start on an equally warm GPU. Each row is written as it is known, so an
interrupted run keeps its rows.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from heads_of_ranks import Runs, fsdp_ways, sharded_ways
from rounds_of_ranks import PATIENCE, measure
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lowtide.bench.case import make_case
from lowtide.bench.harness import Table, begin, write_json
from lowtide.bench.settings import Shape

SHAPES = ("8192,4096,128256", "8192,4096,151936")  # a Llama-3-8B's and a Qwen's head
RESULTS = Path(__file__).parent / "results"


def measure_sharded(
    result: dict[str, Any], device: torch.device, meshes: Mapping[str, Any], args: argparse.Namespace, save: Any
) -> None:
    """Add the rows of a shape whose vocabulary is sharded."""
    ranks, dtype = result["ranks"], dtype_on(device)
    N, rows = result["N"], result["V"] // ranks
    local = make_case(Shape(N=N, D=result["D"], V=rows), dtype, device, seed=dist.get_rank())
    x = local.x.detach()
    dist.broadcast(x, 0)
    y = torch.randint(0, rows * ranks, (N,), generator=torch.Generator().manual_seed(1)).to(device)
    bare: Runs = {f"products, {c} rows": partial(local.bare, c) for c in local.sizes}
    ways, notes = sharded_ways(x, local.w, y, meshes)
    measure(result["rows"], ways, bare, device, args.warm, args.reps, notes=notes, save=save)


def measure_whole(
    result: dict[str, Any], device: torch.device, meshes: Mapping[str, Any], args: argparse.Namespace, save: Any
) -> None:
    """Add the rows of a shape under FSDP2."""
    ways = fsdp_ways(Shape(N=result["N"], D=result["D"], V=result["V"]), dtype_on(device), device, meshes[""])
    measure(result["rows"], ways, {}, device, 1, max(1, args.reps // 3), save=save)


def dtype_on(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def meshes_of(device: torch.device) -> dict[str, Any]:
    """Return the mesh of all ranks, and with NCCL one whose exchanges have priority over GEMMs."""
    found: dict[str, Any] = {"": init_device_mesh(device.type, (dist.get_world_size(),))}
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        group = dist.new_group(pg_options=options)
        assert group is not None
        found[", high priority"] = DeviceMesh.from_group(group, device.type)
    return found


TABLE = Table(
    {
        "name": "<32", "ms": "10.2f", "share_of_limit": "16.3f", "queued_ms": "11.2f", "queued_share_of_limit": "23.3f",
        "peak_mib": "10.0f",
    },
)  # fmt: skip


def table(results: list[dict[str, Any]]) -> str:
    """Return a few columns of all rows."""
    lines = [TABLE.header]
    for result in results:
        lines.append(f"{result['N']} x {result['D']} x {result['V']}, {result['ranks']} ranks\n")
        lines += [TABLE.line({"name": name, **row}) for name, row in result["rows"].items()]
    return "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", help="N,D,V; V is cut to a multiple of the ranks")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--reps", type=int, default=12)
    parser.add_argument("--output", default=str(RESULTS))
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, timeout=PATIENCE)
    else:
        dist.init_process_group("gloo", timeout=PATIENCE)
    meshes, ranks = meshes_of(device), dist.get_world_size()
    shapes = [tuple(map(int, text.split(","))) for text in args.shape or SHAPES]
    results: list[dict[str, Any]] = [
        {"N": N, "D": D, "V": V // ranks * ranks, "ranks": ranks, "dtype": str(dtype_on(device)), "rows": {}}
        for N, D, V in shapes
    ]
    file, first = None, {}
    if dist.get_rank() == 0:
        command = ["torchrun", "--standalone", "--nproc-per-node", str(ranks), "benchmarks/ranks.py"]
        command += [word for text in args.shape or [] for word in ("--shape", text)]
        command += ["--device", args.device, "--warm", str(args.warm), "--reps", str(args.reps)]
        file, first = begin(args.output, f"ranks-{ranks}", shlex.join(command), device, ["liger-kernel"])
        first["settings"] = {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "TORCH_NCCL_"))}
        if device.type == "cuda":
            first["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))

    def save() -> None:
        if file is not None:
            write_json(file, first | {"results": results})

    for part in (measure_sharded, measure_whole):  # first what no other benchmark measures
        for result in results:
            part(result, device, meshes, args, save)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    if file is not None:
        print(file)
        print(table(results), end="", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may free tensors during the interpreter's teardown, which aborts it


if __name__ == "__main__":
    main()
