"""Out of memory: advice with numbers in place of a stack trace, a status of its own, and checkpoints as they were."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

from lowtide.cli import main
from lowtide.measure.failures import is_out_of_memory
from lowtide.memory.policy import layer_policies, words_of
from lowtide.plan import Adapters, plan_memory
from lowtide.plan.four_bit import config_of
from lowtide.train import checkpoints
from lowtide.train.advice import OutOfMemory, advise
from lowtide.train.config import TrainConfig
from lowtide.train.model import model_config
from lowtide.train.run_state import RunState
from lowtide.train.settings import Settings
from lowtide.train.trainers import PreTrainer
from train.conftest import Run

KINDS = {
    "cuda": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.83 GiB. GPU 0 has\nmore to say"),
    "host": lambda: MemoryError(),
    "cpu": lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: 12"),
}


def fail_in_step(monkeypatch: pytest.MonkeyPatch, step: int, error: Callable[[], BaseException]) -> None:
    original = PreTrainer.training_step

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step + 1 == step:
            raise error()
        return original(self, *args, **kwargs)

    monkeypatch.setattr(PreTrainer, "training_step", training_step)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_does_not_fit(
    kind: str, tmp_path: Path, tiny: list[str], lowtide: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    fail_in_step(monkeypatch, 5, KINDS[kind])
    status, _, err = lowtide(*tiny, "--output", output)
    assert status == 3
    assert err.startswith("lowtide train: out of memory in step 5, at 2 x 32 tokens. ")
    assert "Traceback" not in err
    assert "more to say" not in err
    expected = r"According to the planner this step takes \d+\.\d\d GiB; this machine has \d+\.\d\d GiB for it"
    assert re.search(expected, err)
    assert "No smaller step would take much less" in err, "the planner's workspaces are most of it"
    assert f"Resume with: lowtide train --resume_from_checkpoint true --output {output}" in err
    assert [p.name for p in checkpoints.checkpoints(output)] == ["checkpoint-3"]
    line = re.search(r"The figures: lowtide (plan .*)", err)
    assert line
    assert main([*shlex.split(line[1]), "--gpu", "h100"]) in (0, 2), "it parses; such a small budget may hold nothing"
    monkeypatch.undo()
    lowtide.done("train", "--resume_from_checkpoint", "true", "--output", output)


def test_before_the_model_is_there(
    tmp_path: Path, tiny: list[str], lowtide: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*args: Any, **kwargs: Any) -> Any:
        raise KINDS["cuda"]()

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_config", build)
    status, _, err = lowtide(*tiny, "--output", tmp_path / "out")
    assert status == 3
    assert "out of memory before the first step" in err
    assert "--dtype bfloat16" in err
    assert not (tmp_path / "out" / "run.json").exists()


def test_other_errors_keep_their_trace(tmp_path: Path, tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fail_in_step(monkeypatch, 1, lambda: RuntimeError("shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ"):
        main([*tiny, "--output", str(tmp_path / "out")])
    assert not is_out_of_memory(OutOfMemory("already reported"))


def advice(
    memory_gib: float,
    monkeypatch: pytest.MonkeyPatch,
    levels: bool = True,
    device: str = "cpu",
    adapters: Adapters | int | None = None,
    batch_size: int = 4,
    dtype: str = "float32",
    seq_len: int = 8192,
    padded: bool = False,
    four_bit: bool = False,
    arguments: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> str:
    """The advice for a Llama-3.2-1B on a GPU with so much memory left, without any GPU or weights."""
    monkeypatch.setattr("lowtide.train.advice._memory", lambda args: (int(memory_gib * 2**30), "this GPU"))
    config = TrainConfig(model="llama-3.2-1b", seq_len=seq_len, **settings)
    given = {
        "optim": "adamw_torch_fused",
        "bf16": True,
        "fp16": False,
        "world_size": 2,
        "process_index": 1,
        "device": torch.device(device),
        "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": batch_size,
        "gradient_checkpointing": False,
        "packing": False,
        **arguments,
    }
    shape = model_config(config.model, vocab_size=0)
    shape._attn_implementation = "sdpa"
    if four_bit:
        shape.quantization_config = config_of(nested=False)
    names = [f"layers.{i}.q_proj.lora_A.default.weight" for i in range(2 if adapters is not None else 0)]
    model = SimpleNamespace(config=shape, named_parameters=lambda: [(name, None) for name in names])
    monkeypatch.setattr("lowtide.train.activations.has_levels", lambda model: levels)
    monkeypatch.setattr("lowtide.train.activations._adapters", lambda model: adapters)
    error = torch.OutOfMemoryError("x")
    of_run = Settings(SimpleNamespace(**given), SimpleNamespace(dtype=dtype), None)
    trainer = SimpleNamespace(state=SimpleNamespace(global_step=6))
    run = RunState(config, Path(), settings=of_run, model=model, trainer=trainer, seq_len=seq_len, padded=padded)
    return str(advise(error, run))


def takes(text: str) -> float:
    found = re.search(r"this step takes (\d+\.\d+) GiB", text)
    assert found
    return float(found[1])


def test_what_is_advised_fits_by_the_planners_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    text = advice(40, monkeypatch)
    assert text.startswith("out of memory on rank 1 in step 7, at 4 x 8192 tokens.")
    policy = re.search(r"--policy ('[^']+'|\S+) +(\d+\.\d\d) GiB", text)
    assert policy
    assert float(policy[2]) <= 40
    assert len(layer_policies(policy[1].strip("'"), 16)) == 16
    plan = plan_memory(model_config("llama-3.2-1b", vocab_size=0), 8192, 4, 40, device="h100", autocast=True)
    assert words_of(plan.chosen.groups) == policy[1].strip("'")
    assert f"{plan.peak_bytes / 2**30:.2f}" == policy[2]
    for options, size in re.findall(r"(--(?:per_device_train_batch_size|seq-len).*?)  +(\d+\.\d\d) GiB", text):
        assert float(size) <= 40, options
    assert "lowtide plan --model llama-3.2-1b --seq-len 8192 --batch-size 4 --budget 40.00GiB --autocast" in text


def test_what_just_failed_is_never_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the planner thinks that the run should have fitted, it has to take less than that."""
    expected = takes(advice(1000, monkeypatch))
    sizes = re.findall(r"  --.* (\d+\.\d\d) GiB", advice(1000, monkeypatch))
    assert len(sizes) == 3
    assert all(float(size) < 0.96 * expected for size in sizes)
    assert "--policy all/0 " not in advice(1000, monkeypatch, policy="all/0")


@pytest.mark.parametrize(("size", "parts"), [(3, {"1": "3"}), (6, {"3": "2", "2": "3", "1": "6"}), (1, {})])
def test_a_smaller_batch_is_made_whole_by_more_of_them(
    size: int, parts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for room in (32, 45, 60):
        found |= re.findall(
            r"--per_device_train_batch_size (\d+) and (\d+) times", advice(room, monkeypatch, batch_size=size)
        )
    assert bool(found) == bool(parts)
    assert found.items() <= parts.items()


def test_the_numbers_are_those_of_a_run_with_adapters_and_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"dtype": "bfloat16"}
    text = advice(24, monkeypatch, adapters=Adapters(8, ("q_proj",)), padded=True, **settings)
    line = re.search(r"The figures: lowtide (plan .*)", text)
    assert line
    assert "--lora-rank 8 --lora-targets q_proj --attention-mask" in line[1]
    assert main([*shlex.split(line[1]), "--gpu", "h100"]) == 0
    assert takes(text) > takes(advice(24, monkeypatch, adapters=Adapters(8, ("q_proj",)), **settings)) + 10
    assert "The figures" not in advice(24, monkeypatch, adapters=12_345, **settings), "the command has no option for it"
    text = advice(1, monkeypatch, adapters=Adapters(8), **settings)
    assert "Nothing fits" in text
    assert "--use_peft" not in text


def test_states_on_the_host_are_advised_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"batch_size": 1, "seq_len": 16_384}
    text = advice(30, monkeypatch, device="cuda", **settings)
    there = re.search(r"--offload-states +(\d+\.\d+) GiB", text)
    assert there
    assert "given another --policy and --offload-states" in text
    again = advice(30, monkeypatch, device="cuda", offload_states=True, **settings)
    assert takes(again) == pytest.approx(float(there[1]), abs=0.01)
    assert "--offload-states  " not in again
    assert "--offload-states" not in advice(30, monkeypatch, **settings), "no GPU"


def test_advice_for_a_stock_model_is_to_patch_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "leave --no-patch out" in advice(40, monkeypatch, patch=False)
    assert "--policy" not in advice(40, monkeypatch, patch=False)


def test_where_nothing_fits_other_ways_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    text = advice(5, monkeypatch)
    assert "Nothing fits in 5.00 GiB" in text
    assert "--use_peft" in text
    for four_bit in (False, True):
        text = advice(1, monkeypatch, adapters=Adapters(16), four_bit=four_bit)
        assert ("--load_in_4bit" in text) != four_bit
