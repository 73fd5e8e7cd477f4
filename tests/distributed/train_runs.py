"""Tiny runs of `lowtide train` on ranks: their data, each run made once, and what they leave in their folders."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from chat_data import byte_tokenizer
from distributed.train_ranks import Ended, Ranks, shared
from lowtide.train.parallel import variables

SHAPE: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": True,
}  # fmt: skip
EXPERTS = {"model_type": "qwen3_moe", "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
WORDS = ("the", "tide", "came", "in", "and", "went", "out", "over", "sand")
STEPS, SEQUENCES = 4, 4  # of a run, and of a step
# Other batches add the same numbers up in another order: some float32 roundings of each value.
REORDERED = 1e-5


class Runs:
    """Runs with four sequences a step, whatever the number of ranks, in a folder of their own.

    A kind is "pretrain", from random weights and tied; "tune", pretrained weights on prompts and completions of very
    different lengths; "adapt", LoRA on those; "experts", from random weights whose files have one for each expert.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "tie_word_embeddings": False, "attention_bias": True}))
        model.save_pretrained(folder / "pretrained")
        byte_tokenizer().save_pretrained(folder / "pretrained")
        (folder / "shape.json").write_text(json.dumps(SHAPE))
        (folder / "experts.json").write_text(json.dumps({**SHAPE, **EXPERTS}))
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
        both = f"--max-steps {STEPS} --held-out 4 --save_steps 2 --save_total_limit 5"
        pretrain = "train --model {0}/shape.json --data {0}/text.txt --vocab-size 400 --seq-len 32"
        tune = "train --model {0}/pretrained --data {0}/rows.jsonl --max_length 64 --lr 1e-3"
        own = {
            "pretrain": pretrain,
            "tune": tune,
            "experts": pretrain.replace("shape", "experts"),
            "adapt": f"{tune} --use_peft --lora_r 4 --lora_dropout 0",
        }
        return f"{own[kind]} {both}".format(self.folder).split()

    def spies(self, engine: str, *more: str) -> dict[str, str]:
        """Return the environment of ranks that share a model by an engine and print what `train_spy` sees of them."""
        spied = {"SPY": " ".join(["head", "result", *more, *(["zero"] if engine.startswith("zero") else [])])}
        return {**spied, **(SHARDS if engine == "shards" else {})}

    def of(self, kind: str, engine: str) -> tuple[Path, Ended]:
        """Return the folder of a finished run and what its ranks printed: "one" process, or two and an engine."""
        if (kind, engine) not in self.made:
            ranks = 1 if engine == "one" else 2
            rows = SEQUENCES // ranks
            given = sharing(engine)
            if (kind, engine) in ACCUMULATED:
                rows, given = rows // 2, [*given, "--gradient_accumulation_steps", 2]
            output = self.folder / f"{kind}-{engine}"
            given += ["--per_device_train_batch_size", rows, "--output", output]
            ended = self.ranks.succeed(ranks, *self.arguments(kind), *given, **self.spies(engine))
            self.made[kind, engine] = output, ended
        return self.made[kind, engine]

    def copy(self, kind: str, engine: str, output: Path) -> Path:
        """Copy a run as it was after half of its steps."""
        shutil.copytree(self.of(kind, engine)[0], output)
        shutil.rmtree(output / f"checkpoint-{STEPS}")
        shutil.rmtree(output / "model")
        return output

    def resume(self, output: Path, ranks: int, *arguments: object, engine: str, **options: Any) -> Ended:
        """Resume a run on so many ranks, with as many sequences a step."""
        given = ["--per_device_train_batch_size", SEQUENCES // ranks, *sharing(engine)]
        words = ["train", "--resume_from_checkpoint", "true", "--output", output, *given, *arguments]
        return self.ranks(ranks, *words, **self.spies(engine), **options)


ACCUMULATED = {("pretrain", "fsdp2"), ("tune", "zero3"), ("tune", "ddp")}
# FSDP2 whose checkpoints have a file for each rank: set by a launcher, since `--parallel fsdp2` sets the whole ones
SHARDS = {**variables("fsdp2"), "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}

# transformers' own option; what is "auto" it takes from the others
ZERO3 = {
    **dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"),
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
}


def wait_for(what: Callable[[], Any], seconds: float = 600) -> Any:
    """Return what a function returns once it is true."""
    until = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.05)
    return found


def sharing(engine: str) -> list[object]:
    """Return the options of an engine: none for "one" process, nor for "shards", which `Runs.spies` sets."""
    if engine in ("one", "shards"):
        return []
    if engine == "zero3-config":
        return ["--deepspeed", json.dumps(ZERO3)]
    return ["--parallel", engine]


@cache
def runs(folder: Path) -> Runs:
    """Return the runs of a folder, which all test modules of this process share."""
    return Runs(folder)


def spied(out: str, kind: str) -> Iterator[dict[str, Any]]:
    """Yield what `train_spy` printed of a rank."""
    for line in out.splitlines():
        if line.startswith(f"spied {kind} "):
            yield json.loads(line.removeprefix(f"spied {kind} "))


def history(output: Path, step: int = STEPS) -> dict[str, list[float]]:
    """Return the losses and gradient norms of a run's steps."""
    logs = json.loads((output / f"checkpoint-{step}" / "trainer_state.json").read_text())["log_history"]
    return {name: [entry[name] for entry in logs if name in entry] for name in ("loss", "grad_norm")}


def weights(output: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a run's final model."""
    (file,) = (output / "model").glob("*.safetensors")
    return load_file(file)


def assert_same(output: Path, other: Path, tolerance: float = REORDERED) -> None:
    """Compare two runs' steps and their final weights."""
    got, expected = history(output), history(other)
    for name, values in expected.items():
        assert len(values) == STEPS
        assert all(abs(a - b) <= tolerance * abs(b) for a, b in zip(got[name], values, strict=True)), (
            name,
            got,
            values,
        )
    got_weights, expected_weights = weights(output), weights(other)
    assert got_weights.keys() == expected_weights.keys()
    for name, value in expected_weights.items():
        torch.testing.assert_close(got_weights[name], value, rtol=0, atol=tolerance)
