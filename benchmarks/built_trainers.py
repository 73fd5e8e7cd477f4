"""The trainers of `trl_trainers.py`, on random tokens, and the clock of their steps."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback

WARM_STEPS = 2
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def now() -> float:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class Clock(TrainerCallback):  # type: ignore[misc]
    """Times each step, waiting for the GPU at both ends, and what generation takes of it."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.generation: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if len(self.steps) == WARM_STEPS and DEVICE.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.generation.append(0.0)
        self.start = now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append(now() - self.start)

    def around(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = now()
            try:
                return generate(*args, **kwargs)
            finally:
                self.generation[-1] += now() - start

        return timed


def tokenizer_of(vocab_size: int) -> Any:
    """One word for each id."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(vocab_size)}
    built = Tokenizer(models.WordLevel(words, unk_token="w2"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=built, pad_token="w0", eos_token="w1", unk_token="w2")


def make_trainer(trainer: str, model: Any, way: str, args: argparse.Namespace, folder: str, clock: Clock) -> Any:
    import trl
    from datasets import Dataset

    vocab, steps = model.config.vocab_size, WARM_STEPS + args.steps
    common = {
        "output_dir": folder, "max_steps": steps, "per_device_train_batch_size": args.batch, "report_to": [],
        "save_strategy": "no", "logging_steps": steps, "bf16": False, "use_cpu": DEVICE.type == "cpu",
        "optim": "adamw_torch_fused", "use_liger_kernel": way == "liger", "learning_rate": 1e-5, "disable_tqdm": True,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    if trainer == "SFT":
        ids = torch.randint(3, vocab, (steps * args.batch, args.tokens), generator=generator)
        loss = {"loss_type": "nll"} if way == "liger" else {}  # Liger's is TRL's "nll"; the default is the chunked one
        built = trl.SFTTrainer(
            model=model,
            args=trl.SFTConfig(**common, **loss, max_length=args.tokens),
            train_dataset=Dataset.from_dict({"input_ids": ids.tolist()}),
            processing_class=tokenizer_of(vocab),
            callbacks=[clock],
        )
    else:
        prompts = torch.randint(3, vocab, (steps, args.prompt), generator=generator).tolist()
        built = trl.GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
            args=trl.GRPOConfig(
                **common, num_generations=args.batch, max_completion_length=args.tokens, beta=0.0,
                generation_kwargs={"min_new_tokens": args.tokens},
            ),
            train_dataset=Dataset.from_dict({"prompt": [" ".join(f"w{i}" for i in row) for row in prompts]}),
            processing_class=tokenizer_of(vocab),
            callbacks=[clock],
        )  # fmt: skip
        built._generate = clock.around(built._generate)
    built.remove_callback(PrinterCallback)
    return built
