"""A step that distils from a teacher's stored states beside plain fine-tuning: time and peak memory, interleaved.

    python benchmarks/distillation.py

Qwen3-4B's shape by default, random weights, patched, AdamW in the weights' dtype; the teacher's head is of one with
`--teacher-hidden` sizes, and a batch's states come from pinned host memory, as `lowtide train --teacher FOLDER` has
them. Peaks are above what is there before a step: weights, optimizer states and the teacher's head.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from script import main
from transformers import Qwen3Config, Qwen3ForCausalLM

import lowtide
from lowtide.bench.harness import Row, Run, Table
from lowtide.bench.settings import RoundSettings, setting
from lowtide.measure.timing import peak_above, time_side_by_side
from lowtide.measure.units import mib
from lowtide.train.distillation import Distillation

TABLE = Table({"step": "<20", "ms": "10.1f", "ratio": "8.3f", "peak_mib": "10.1f"})


@dataclass(frozen=True, kw_only=True)
class DistillationConfig(RoundSettings):
    benchmark, packages = "distillation", ()
    tokens: int = setting(8192, "N, one sequence", least=16)
    hidden: int = setting(2560, "D, of the student", least=8)
    intermediate: int = setting(9728, "F", least=8)
    layers: int = setting(36, "of the student", least=1)
    heads: int = setting(32, "of queries; a fourth of them of keys", least=4)
    head_dim: int = setting(128, "of a head", least=2)
    vocab: int = setting(151936, "V", least=8)
    teacher_hidden: int = setting(5120, "of the teacher", least=8)


class Stored(Distillation):
    """The loss of `Distillation` without a run: of states that are given for each step."""

    def __init__(self, weight_VD: torch.Tensor, alpha: float, task: Callable[..., Any]) -> None:
        self._run: Any = SimpleNamespace(alpha=alpha, temperature=1.0, divergence="forward_kl")
        self._head, self._files, self._task = {"weight": weight_VD}, {}, task


def measure(run: Run) -> None:
    config, device = run.config, run.device
    shape = Qwen3Config(
        hidden_size=config.hidden, intermediate_size=config.intermediate, num_hidden_layers=config.layers,
        num_attention_heads=config.heads, num_key_value_heads=config.heads // 4, head_dim=config.head_dim,
        vocab_size=config.vocab, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    with device:
        model: Any = Qwen3ForCausalLM(shape).to(run.dtype)
        ids = torch.randint(config.vocab, (1, config.tokens))
        teacher = torch.randn(config.vocab, config.teacher_hidden, dtype=run.dtype) * config.teacher_hidden**-0.5
    lowtide.patch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device.type == "cuda")
    states = torch.randn(1, config.tokens, config.teacher_hidden, dtype=run.dtype)
    states = states.pin_memory() if device.type == "cuda" else states
    task = model.loss_function

    def step(alpha: float | None) -> Callable[[], None]:
        stored = None if alpha is None else Stored(teacher, alpha, task)

        def one() -> None:
            model.loss_function = task
            if stored is not None:
                stored._states = states.to(device, non_blocking=True)
                model.loss_function = stored._loss
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return one

    steps = {"fine-tuning": step(None), "distilled": step(1.0), "both, alpha 0.5": step(0.5)}
    for one in steps.values():
        one()
    times = time_side_by_side(steps, device, warm=config.warm, reps=config.reps)
    run.say(f"\n{run.dtype_name}\n{TABLE.header}")
    rows: list[Row] = run.result.setdefault("rows", [])
    first = times["fine-tuning"].median_ms
    for name, one in steps.items():
        ms = times[name].median_ms
        row: Row = {"step": name, "ms": ms, "ratio": ms / first, "peak_mib": mib(peak_above(one, device))}
        run.add(row, rows, TABLE)


if __name__ == "__main__":
    sys.exit(main(measure, DistillationConfig, __doc__))
