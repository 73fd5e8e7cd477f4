"""Tiny runs of `lowtide train` on ranks: their data, each run made once, and what they leave in their folders."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from chat_data import byte_tokenizer
from distributed.forks import Ended, Ranks, shared

SHAPE: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": True,
}  # fmt: skip
WORDS = ("the", "tide", "came", "in", "and", "went", "out", "over", "sand")
STEPS, SEQUENCES = 4, 4  # of a run, and of a step
# Other batches add the same numbers up in another order: some float32 roundings of each value.
REORDERED = 1e-5

_FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}
_ZERO = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_CONFIG_DS_FIELDS": "zero_stage",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "auto",
    "ACCELERATE_GRADIENT_CLIPPING": "auto",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
    "ZERO": "gloo",  # for forks
}
# What `accelerate launch` sets for its configurations.
ENGINES: dict[str, dict[str, str]] = {
    "one": {},
    "ddp": {},
    "fsdp2": _FSDP2,
    "zero2": {**_ZERO, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
    "zero3": {**_ZERO, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true"},
}


class Runs:
    """Runs with four sequences a step, whatever the number of ranks, in a folder of their own.

    A kind is "pretrain", from random weights and tied; "tune", pretrained weights on prompts and completions of very
    different lengths; "adapt", LoRA on those.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "tie_word_embeddings": False, "attention_bias": True}))
        model.save_pretrained(folder / "pretrained")
        byte_tokenizer().save_pretrained(folder / "pretrained")
        (folder / "shape.json").write_text(json.dumps(SHAPE))
        rng = random.Random(0)
        with (folder / "rows.jsonl").open("w") as rows:
            for _ in range(60):
                prompt, completion = (" ".join(rng.choices(WORDS, k=rng.randint(1, most))) for most in (3, 12))
                rows.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")
        (folder / "text.txt").write_text("\n".join(" ".join(rng.choices(WORDS, k=9)) for _ in range(600)))
        self.made: dict[tuple[str, str], tuple[Path, Ended]] = {}

    @property
    def ranks(self) -> Ranks:
        """What starts the ranks of this process's tests."""
        return shared()

    def arguments(self, kind: str) -> list[str]:
        """Return the arguments of a run, without its ranks, rows and output."""
        both = f"--max_steps {STEPS} --held_out 4 --save_steps 2 --logging_steps 1"
        tune = "train --model_name_or_path {0}/pretrained --dataset_name {0}/rows.jsonl --max_length 64"
        own = {
            "pretrain": "train --model_name_or_path {0}/shape.json --dataset_name {0}/text.txt --max_length 32",
            "tune": f"{tune} --learning_rate 1e-3",
            "adapt": f"{tune} --learning_rate 1e-3 --use_peft --lora_r 4",
        }
        return f"{own[kind]} {both}".format(self.folder).split()

    def run(self, kind: str, engine: str, output: Path, *more: object, **options: Any) -> Ended:
        """Train: "one" process, or two that share the model by an engine."""
        ranks = 1 if engine == "one" else 2
        given = ["--per_device_train_batch_size", SEQUENCES // ranks, "--output_dir", output]
        return self.ranks(ranks, *self.arguments(kind), *given, *more, **ENGINES[engine], **options)

    def of(self, kind: str, engine: str) -> tuple[Path, Ended]:
        """Return the folder of a finished run and what its ranks printed."""
        if (kind, engine) not in self.made:
            output = self.folder / f"{kind}-{engine}"
            ended = self.run(kind, engine, output)
            assert set(ended.statuses) == {0}, ended
            self.made[kind, engine] = output, ended
        return self.made[kind, engine]

    def copy(self, kind: str, engine: str, output: Path) -> Path:
        """Copy a run as it was after half of its steps."""
        shutil.copytree(self.of(kind, engine)[0], output)
        shutil.rmtree(output / f"checkpoint-{STEPS}")
        for file in output.glob("*.safetensors"):
            file.unlink()
        return output

    def resume(self, kind: str, engine: str, output: Path, *more: object, **options: Any) -> Ended:
        """Resume a run."""
        return self.run(kind, engine, output, "--resume_from_checkpoint", "auto", *more, **options)


def wait_for(what: Callable[[], Any], seconds: float = 600) -> Any:
    """Return what a function returns once it is true."""
    until = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.05)
    return found


@cache
def runs(folder: Path) -> Runs:
    """Return the runs of a folder, which all test modules of this process share."""
    return Runs(folder)


def history(output: Path, step: int = STEPS) -> dict[str, list[float]]:
    """Return the losses and gradient norms of a run's steps."""
    logs = json.loads((output / f"checkpoint-{step}" / "trainer_state.json").read_text())["log_history"]
    return {name: [entry[name] for entry in logs if name in entry] for name in ("loss", "grad_norm")}


def weights(output: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a run's final model."""
    (file,) = output.glob("*.safetensors")
    return load_file(file)


def assert_same(output: Path, other: Path, tolerance: float = REORDERED) -> None:
    """Compare two runs' steps and their final weights."""
    got, expected = history(output), history(other)
    for name, values in expected.items():
        assert len(values) == STEPS
        close = [abs(a - b) <= tolerance * abs(b) for a, b in zip(got[name], values, strict=True)]
        assert all(close), (name, got, values)
    got_weights, expected_weights = weights(output), weights(other)
    assert got_weights.keys() - expected_weights.keys() <= {"lm_head.weight"}  # tied, and saved twice under FSDP2
    for name, value in expected_weights.items():
        torch.testing.assert_close(got_weights[name], value, rtol=0, atol=tolerance)
