"""One rank of the weak-scaling benchmark: the steps of ``lowtide train`` on random tokens, with a model of some way."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import TrainerCallback, default_data_collator
from transformers.trainer_callback import PrinterCallback

from lowtide.bench.harness import reason_of, release
from lowtide.bench.way import Way
from lowtide.bench.ways import LEARNING_RATE, build_way
from lowtide.measure.resident import cuda_peak_bytes, peak_resident_bytes
from lowtide.measure.units import gib
from lowtide.train.config import TrainConfig
from lowtide.train.monitor import Monitor, StepMetrics
from lowtide.train.parallel import all_read, engine_of, in_group, launched_rank
from lowtide.train.quiet import quiet_transformers
from lowtide.train.result import WARM_STEPS
from lowtide.train.settings import trainer_settings
from lowtide.train.trainers import PreTrainer

VOCABULARY = 1000  # of the model that has none of its own


class RandomBlocks(Dataset[dict[str, torch.Tensor]]):
    """Blocks of random tokens, each the same whenever it is read."""

    def __init__(self, vocabulary: int, tokens: int, *, blocks: int, seed: int) -> None:
        self._vocabulary, self._tokens, self._blocks, self._seed = vocabulary, tokens, blocks, seed

    def __len__(self) -> int:
        """Return their number."""
        return self._blocks

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return one."""
        generator = torch.Generator().manual_seed(self._seed * self._blocks + index)
        ids = torch.randint(0, self._vocabulary, (self._tokens,), generator=generator)
        return {"input_ids": ids, "labels": ids}


class Clock(TrainerCallback):  # type: ignore[misc]
    """Takes the time at each step's end, which Trainer knows by the loss that it has read from the device."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        """Take it."""
        del args, state, control
        if "loss" in logs:
            self.times.append(time.perf_counter())


def measure(
    way: str, model: str, *, parallel: str, tokens: int, batch: int, steps: int, weights: str, seed: int
) -> dict[str, Any]:
    """Return seconds, tokens a second and GPU, and peak of a training step of this rank's run.

    Args:
        way: whose model, as `Way.named` reads it; layers are checkpointed where it says nothing else.
        model: whose shape, as in ``lowtide train --model``.
        parallel: the engine, as in ``lowtide train --parallel``; one rank has nothing to share.
        tokens: of a sequence.
        batch: sequences of a rank.
        steps: that count; `WARM_STEPS` before them do not.
        weights: the dtype of weights, gradients and states; float32 ones have products in bfloat16.
        seed: of weights and tokens.
    """
    options = {"dtype": weights, "per_device_train_batch_size": batch, "bf16": torch.cuda.is_available()}
    options |= {"max_steps": WARM_STEPS + 1 + steps, "learning_rate": LEARNING_RATE}
    config = TrainConfig(parallel=parallel, options=options)  # type: ignore[arg-type]
    with engine_of(config), tempfile.TemporaryDirectory(prefix="lowtide-scaling-") as folder:
        all_read()  # nothing is on the host: each builds the model on its GPU
        args = trainer_settings(config, Path(folder), save=False).args
        built = build_way(Way.named(way), model, getattr(torch, weights), args.device, seed=seed, vocab_size=VOCABULARY)
        rows = args.max_steps * batch * args.world_size
        blocks = RandomBlocks(built.config.vocab_size, tokens, blocks=rows, seed=seed)
        metrics, clock = StepMetrics(), Clock()
        trainer: Any = PreTrainer(
            metrics=metrics,
            model=built,
            args=args,
            train_dataset=blocks,
            data_collator=default_data_collator,
            callbacks=[Monitor(metrics), clock],
        )
        trainer.remove_callback(PrinterCallback)
        parameters = sum(p.numel() for p in built.parameters())
        trainer.train()
        # the step after the warm ones resets the peak as it begins: its time is left out
        times = [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)][WARM_STEPS:]
        seconds = statistics.median(times)
        peak = torch.tensor(cuda_peak_bytes() if args.device.type == "cuda" else peak_resident_bytes()).to(args.device)
        if in_group():
            dist.all_reduce(peak, dist.ReduceOp.MAX)
        return {
            "parameters": parameters,
            "seconds": seconds,
            "times": [round(each, 5) for each in times],
            "tokens_per_s_per_gpu": batch * tokens / seconds,
            "peak_gib": gib(int(peak.item())),
            "losses": list(metrics.losses.values()),
        }


def main() -> None:
    """Be a rank that torchrun starts: measure each way and model in turn, as one argument of JSON says."""
    from accelerate.state import AcceleratorState

    told = json.loads(sys.argv[1])
    file, cases = Path(told.pop("file")), told.pop("cases")
    quiet_transformers()
    for way, model in cases:
        try:
            row = measure(way, model, **told)
        except Exception as error:  # whatever it is, it is the row; the launcher ends the other ranks
            file.with_suffix(f".failed{launched_rank()}").write_text(reason_of(error))
            raise
        if launched_rank() == 0:
            with file.open("a") as out:
                out.write(json.dumps(row) + "\n")
        AcceleratorState._reset_state()
        release(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if in_group():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
