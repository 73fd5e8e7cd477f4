"""Measure a training step under every activation policy, beside PyTorch's and transformers' own ways.

    python benchmarks/policy.py [--model llama-3.2-1b] [--seq-len 32768] [--sdpa cudnn] [--output DIR]

Full fine-tuning of a model of random weights in bf16 with fused AdamW, one sequence a step, the loss without logits in
every row (`lowtide.patch`). Rows run one after the other, each with its own rounds; the first row runs again at the end
and shows how far the clocks have moved. A row that runs out of memory says so.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import functools
import gc
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import lowtide
from lowtide.bench.results import Files
from lowtide.measure.machine import describe_machine, source_commit
from lowtide.measure.resident import cuda_peak_bytes, reset_cuda_peak
from lowtide.measure.timing import time_side_by_side
from lowtide.measure.units import gib
from lowtide.memory import ActivationPolicy, apply_policy, remove_policy
from lowtide.train.model import model_config

SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
VOCABULARY = 32_000  # of the model that has none of its own
ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)


@contextlib.contextmanager
def policy(model: Any, keep: Any, offload: bool = False) -> Iterator[Callable[[], int]]:
    report = apply_policy(model, ActivationPolicy(keep=keep, offload=offload))
    try:
        yield lambda: report.host_bytes
    finally:
        remove_policy(model)


@contextlib.contextmanager
def transformers_own(model: Any, selective: bool = False, on_host: bool = False) -> Iterator[Callable[[], int]]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=True) if on_host else contextlib.nullcontext():
            own = {"context_fn": contexts} if selective else {}
            return checkpoint(*args, **kwargs, use_reentrant=False, **own)

    contexts = functools.partial(create_selective_checkpoint_contexts, list(ATTENTION))
    layers = model.model.layers
    for layer in layers:  # as gradient_checkpointing_enable does, under whatever name a version has it
        layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, run
    try:
        yield lambda: 0
    finally:
        for layer in layers:
            layer.gradient_checkpointing = False


ROWS: dict[str, Callable[[Any], Any]] = {
    "input": lambda m: policy(m, "input"),
    "attention": lambda m: policy(m, "attention"),
    "attention, offload": lambda m: policy(m, "attention", True),
    "input, offload": lambda m: policy(m, "input", True),
    "all": lambda m: policy(m, "all"),
    "transformers' checkpointing": transformers_own,
    "PyTorch's selective checkpoint": lambda m: transformers_own(m, selective=True),
    "transformers' checkpointing, offload": lambda m: transformers_own(m, on_host=True),
    "input, again": lambda m: policy(m, "input"),
}


def measure(model: Any, ids: torch.Tensor, name: str, warm: int, reps: int) -> dict[str, Any]:
    """Return one row of the table."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    row: dict[str, Any] = {"keep": name}
    try:
        with ROWS[name](model) as host_bytes:
            start = time.perf_counter()
            for _ in range(warm):
                step()
                torch.cuda.synchronize()
                row.setdefault("first_step_ms", round(1e3 * (time.perf_counter() - start), 1))  # it pins the memory
            reset_cuda_peak()
            timing = time_side_by_side({"step": step}, ids.device, warm=0, reps=reps)["step"]
            row |= {"step_ms": round(timing.median_ms, 2), "times_ms": [round(t, 2) for t in timing.times_ms]}
            row |= {"peak_gib": round(gib(cuda_peak_bytes()), 3), "host_gib": round(gib(host_bytes()), 3)}
    except (torch.OutOfMemoryError, lowtide.errors.LowtideError) as error:
        row["failed"] = str(error).splitlines()[0]
    return row


def _command(given: argparse.Namespace) -> str:
    """Return the command that measures the same, wherever its result goes."""
    told = {name: value for name, value in vars(given).items() if name != "output"}
    words = [[f"--{name.replace('_', '-')}", *map(str, v if isinstance(v, list) else [v])] for name, v in told.items()]
    return shlex.join(["python", "benchmarks/policy.py", *(word for option in words for word in option)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--seq-len", type=int, default=32768)
    parser.add_argument("--sdpa", default="cudnn", choices=SDPA)
    parser.add_argument("--only", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--output", default=str(Path(__file__).parent / "results"))
    given = parser.parse_args()
    device = torch.device("cuda")
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            model_config(given.model, vocab_size=VOCABULARY), dtype=torch.bfloat16
        ).train()
    report = lowtide.patch(model)
    sys.stdout.write(f"{report}\n")
    ids = torch.randint(0, model.config.vocab_size, (1, given.seq_len), device=device)
    machine = describe_machine()
    today = dt.date.today().isoformat()
    files = Files.prepare(given.output, f"{today}-policy-{given.seq_len}", machine["gpu"])
    told: dict[str, Any] = {
        "command": _command(given),
        "date": today, "commit": source_commit(),
        "machine": machine, "model": given.model, "seq_len": given.seq_len, "sdpa": given.sdpa,
        "patched": [part for part, line in report.parts.items() if line.patched], "rows": [],
    }  # fmt: skip
    with sdpa_kernel(SDPA[given.sdpa]):
        for name in given.only:
            row = measure(model, ids, name, given.warm, given.reps)
            told["rows"].append(row)
            model.zero_grad(set_to_none=True)
            gc.collect()
            torch.cuda.empty_cache()
            files.write_json(told)
            figures = row.get("failed") or (
                f"{row['step_ms']:9.1f} ms  {row['peak_gib']:6.2f} GiB  host {row['host_gib']:6.2f} GiB"
            )
            sys.stdout.write(f"{name:32}{figures}\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
