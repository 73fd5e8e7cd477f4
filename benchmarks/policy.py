"""Measure a training step under every activation policy, beside PyTorch's and transformers' own ways.

    python benchmarks/policy.py [--model llama-3.2-1b] [--seq-len 32768] [--sdpa cudnn] [--output DIR]

Full fine-tuning of a model of random weights in bf16 with fused AdamW, one sequence a step, the loss without logits in
every row (`lowtide.patch`). Rows run one after the other, each with its own rounds; the first row runs again at the end
and shows how far the clocks have moved. A row that runs out of memory says so.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from script import main
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import lowtide
from lowtide.bench.harness import Benchmark, Column, Run, Table, release
from lowtide.bench.settings import ScriptSettings, setting
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


def row_of(model: Any, ids: torch.Tensor, name: str, warm: int, reps: int) -> dict[str, Any]:
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


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(ScriptSettings):
    benchmark = "policy"
    device = "cuda"

    model: str = setting("llama-3.2-1b", "whose shape, as in lowtide train --model", metavar="NAME")
    seq_len: int = setting(32768, "tokens of the sequence", least=2)
    sdpa: Literal["flash", "cudnn", "efficient"] = setting("cudnn", "attention's kernel")
    only: tuple[str, ...] = setting(tuple(ROWS), "these rows alone", metavar="ROW", known=ROWS)
    warm: int = setting(2, "steps that do not count", least=0)
    reps: int = setting(3, "steps that count", least=1)


TABLE = Table(
    (Column("", "keep", "<32"),),
    (Column("ms", "step_ms", "9.1f"), Column("GiB", "peak_gib", "8.2f"), Column("host GiB", "host_gib", "10.2f")),
)


def measure(run: Run[PolicyConfig]) -> None:
    from transformers import AutoModelForCausalLM

    config, rows = run.config, run.result.setdefault("rows", [])
    torch.manual_seed(0)
    with run.device:
        model = AutoModelForCausalLM.from_config(
            model_config(config.model, vocab_size=VOCABULARY), dtype=torch.bfloat16
        ).train()
    report = lowtide.patch(model)
    run.say(f"{report}\n{TABLE.header}")
    ids = torch.randint(0, model.config.vocab_size, (1, config.seq_len), device=run.device)
    run.result |= {"model": config.model, "seq_len": config.seq_len, "sdpa": config.sdpa}
    run.result |= {"patched": [part for part, line in report.parts.items() if line.patched]}
    with sdpa_kernel(SDPA[config.sdpa]):
        for name in config.only:
            row = row_of(model, ids, name, config.warm, config.reps)
            model.zero_grad(set_to_none=True)
            release(run.device)
            run.add(row, rows, TABLE)


POLICY = Benchmark(name="policy-{seq_len}", measure=measure, failed=lambda _: False)

if __name__ == "__main__":
    sys.exit(main(POLICY, PolicyConfig, __doc__))
