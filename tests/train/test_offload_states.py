"""Optimizer states in host memory, and the activation policy, during a run: the same run to the bit.

The host is one beside the host here: what is used before its copy has come is NaN.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from lowtide.memory import Adapters, copies, plan_memory
from lowtide.memory import optimizer_blocks as blocks
from lowtide.train import activations
from lowtide.train.activations import OffloadStates, check_offload
from lowtide.train.config import TrainConfig
from lowtide.train.model import model_config
from lowtide.train.run_state import RunState
from lowtide.train.settings import Settings
from memory.models import LazySide
from train.conftest import SHAPE, Run, assert_same_weights, losses

LORA = {"use_peft": True, "lora_r": 4, "lora_dropout": 0}


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Iterator[LazySide]:
    lazy = LazySide()
    monkeypatch.setattr(copies, "available", lambda: True)
    monkeypatch.setattr(copies, "side_for", lambda device: lazy)
    monkeypatch.setattr(blocks, "MIN_BYTES", 64)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 20_000)
    yield lazy
    assert lazy.lost == 0, "memory was freed while its copy was under way"


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """Every handle that a run makes, and the arguments."""
    made: list[tuple[Any, dict[str, Any]]] = []
    original = activations.offload_optimizer

    def spy(*args: Any, **kwargs: Any) -> Any:
        made.append((original(*args, **kwargs), kwargs))
        return made[-1][0]

    monkeypatch.setattr(activations, "offload_optimizer", spy)
    return made


def optimizer_states(output: Path, step: int) -> list[torch.Tensor]:
    saved = torch.load(output / f"checkpoint-{step}" / "optimizer.pt")["state"]
    return [value for entry in saved.values() for value in entry.values()]


@pytest.mark.parametrize("lora", [False, True], ids=["accumulated", "adapters"])
def test_a_run_is_the_same_to_the_bit(
    lora: bool, tmp_path: Path, tiny: list[str], tune: Any, lowtide: Run, side: LazySide, handles: list[Any]
) -> None:
    arguments = [*tiny, "--gradient_accumulation_steps", "3"]
    if lora:
        pytest.importorskip("trl")
        arguments = [*tune(**LORA, save_steps=3), "--policy", "input offloaded"]
    stock, away = tmp_path / "stock", tmp_path / "away"
    lowtide.done(*arguments, "--output", stock)
    assert not handles
    out = lowtide.done(*arguments, "--offload-states", "--output", away)
    assert "in host memory" in out
    ((handle, given),) = handles
    assert given["backwards_per_step"] == (1 if lora else 3)
    assert handle.offloaded_bytes > 0
    assert side.begun_back >= 5, "in each step but the first, which has none yet"

    def assert_same(output: Path) -> None:
        assert losses(output) == losses(stock)
        assert_same_weights(output / "model", stock / "model")
        for a, b in zip(optimizer_states(output, 6), optimizer_states(stock, 6), strict=True):
            assert torch.equal(a, b)

    assert_same(away)
    resume = ["train", "--resume_from_checkpoint", "true", "--output", away]
    shutil.rmtree(away / "checkpoint-6")
    lowtide.done(*resume)
    assert handles[-1][0].offloaded_bytes == handle.offloaded_bytes, "the setting is the run's"
    assert_same(away)


def test_what_it_cannot_be_combined_with(
    tmp_path: Path, tiny: list[str], lowtide: Run, side: LazySide, monkeypatch: pytest.MonkeyPatch
) -> None:
    del side
    arguments = [*tiny, "--offload-states", "--output", tmp_path / "out"]
    err = lowtide.refused(*arguments, "--memory-budget", "1GiB")
    assert "--host-budget" in err
    monkeypatch.setattr(activations, "uses_fsdp", lambda: True)
    with pytest.raises(RuntimeError, match="whole on each GPU"):
        check_offload(TrainConfig(offload_states=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_it_is_refused_before_anything_is_written(tmp_path: Path, tiny: list[str], lowtide: Run) -> None:
    err = lowtide.refused(*tiny, "--offload-states", "--output", tmp_path / "out")
    assert "offload_states: expected a CUDA GPU" in err
    assert not (tmp_path / "out").exists()


def test_a_plan_chooses_how_many_bytes_are_offloaded(monkeypatch: pytest.MonkeyPatch, side: LazySide) -> None:
    del side
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(activations, "has_levels", lambda model: True)
    monkeypatch.setattr(activations, "apply_policy", lambda model, policies, **kwargs: None)
    monkeypatch.setattr(activations, "offload_optimizer", lambda optimizer, model, **kwargs: made.append(kwargs))
    given = {"optim": "adamw_torch_fused", "bf16": True, "fp16": False, "gradient_accumulation_steps": 1}
    given |= {"per_device_train_batch_size": 1, "device": torch.device("cpu"), "world_size": 1}
    args = SimpleNamespace(**given)
    of_run = Settings(args, SimpleNamespace(dtype="float32"), None)
    shape = SimpleNamespace(config=model_config("llama-3.2-1b", vocab_size=0), named_parameters=list)

    def planned(offloads: bool) -> Any:
        config = TrainConfig(model="llama-3.2-1b", memory_budget="24GiB", host_budget="64GiB", offload_states=offloads)
        run = RunState(config, Path(), settings=of_run, model=shape, seq_len=16_384)
        activations.plan_and_apply(run)
        if offloads:
            OffloadStates(run.plan, config.host_gib).on_train_begin(args, None, None, model=None, optimizer=None)
            assert any("of the optimizer states are offloaded" in line for line in run.lines)
        return run.plan

    without, plan = planned(False), planned(True)
    assert without.chosen.states == 0 < plan.chosen.states
    assert plan.seconds < without.seconds
    late = plan.chosen.late
    assert made == [{"gib": plan.states_gib, "host_gib": 64, "late": late, "backwards_per_step": 1}]
    OffloadStates(None, 3.0).on_train_begin(args, None, None, model=None, optimizer=None)
    assert made[1:] == [{"gib": None, "host_gib": 3.0, "late": False, "backwards_per_step": 1}]


def test_a_budget_chooses_a_policy_and_prints_what_it_does_here(
    tmp_path: Path, tiny: list[str], lowtide: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    applied, original = [], activations.apply_policy
    monkeypatch.setattr(activations, "apply_policy", lambda m, p, **k: (applied.append(p), original(m, p, **k))[1])
    out = lowtide.done(*tiny, "--memory-budget", "1GiB", "--output", tmp_path / "o")
    assert re.search(r"policy +\S.*expected peak 0\.\d+ of 1\.00 GiB", out)
    assert "no GPU here" in out
    assert "rates of the h100 from a table" in out
    assert len(applied[0]) == 2
    err = lowtide.refused(*tiny, "--memory-budget", "1MiB", "--output", tmp_path / "p")
    assert "memory_budget, in GiB: expected" in err
    assert not (tmp_path / "p" / "run.json").exists()


def test_a_budget_counts_the_adapters_and_the_mask(tune: Any, lowtide: Run, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    more = {"memory-budget": "1GiB", "max-steps": 1, "packing": True, "attn_implementation": "sdpa"}
    arguments = tune("messages", **LORA, **more, lora_target_modules=("v_proj", "q_proj"))
    out = lowtide.done(*arguments, "--output", tmp_path / "some")
    numbers = 2 * 4 * ((32 + 32) + (32 + 16))
    assert f"{numbers} numbers of adapters are trained, rank 4 on q_proj v_proj\n" in out
    assert "attention has a mask of" in out


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")  # peft's calls
@pytest.mark.parametrize("model_type", ["phi3", "llama"])
def test_adapters_are_given_as_the_planner_takes_them(model_type: str) -> None:
    """By their rank and the projections' names, and with as many parameters."""
    targets, small = ("o_proj", "down_proj"), {**SHAPE, "pad_token_id": 0, "tie_word_embeddings": False}
    config: Any = AutoConfig.for_model(**{**small, "model_type": model_type})
    model = get_peft_model(
        AutoModelForCausalLM.from_config(config), LoraConfig(r=5, target_modules=list(targets), task_type="CAUSAL_LM")
    )
    numbers = sum(p.numel() for p in model.parameters() if p.requires_grad)
    adapters = activations._adapters(model)
    assert adapters == Adapters(5, targets)
    plan = plan_memory(config, 64, 1, 1, dtype=torch.float32, adapters=adapters)
    assert plan.job.trained_adapters == numbers
