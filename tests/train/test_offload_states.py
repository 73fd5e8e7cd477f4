"""Optimizer states in host memory during a run: the same run to the bit, saved and resumed too.

The host is one beside the host here: what is used before its copy has come is NaN.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowtide.memory import apply, offload
from lowtide.memory import optimizer_blocks as blocks
from lowtide.train import offloading
from lowtide.train.activations import plan_run, states_away
from lowtide.train.config import TrainConfig
from lowtide.train.model import model_config
from lowtide.train.offloading import StatesAway
from memory.models import LazySide
from train.test_features import assert_same_weights, losses, weights

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> Iterator[LazySide]:
    lazy = LazySide()
    for module in (offloading, apply):
        monkeypatch.setattr(module, "available", lambda: True)
    monkeypatch.setattr(offload, "side_for", lambda device: lazy)
    monkeypatch.setattr(blocks, "MIN_BYTES", 64)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 20_000)
    yield lazy
    assert lazy.lost == 0, "memory was freed while its copy was under way"


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """Every handle that a run makes, and what it was asked for."""
    made: list[tuple[Any, dict[str, Any]]] = []
    original = offloading.offload_optimizer

    def spy(*args: Any, **kwargs: Any) -> Any:
        made.append((original(*args, **kwargs), kwargs))
        return made[-1][0]

    monkeypatch.setattr(offloading, "offload_optimizer", spy)
    return made


def optimizer_states(output: Path, step: int) -> list[torch.Tensor]:
    saved = torch.load(output / f"checkpoint-{step}" / "optimizer.pt")["state"]
    return [value for entry in saved.values() for value in entry.values()]


@pytest.mark.parametrize(
    "extra",
    [["--grad-accum", "3", "--eval-every", "2"], ["--lora-rank", "4", "--policy", "input offloaded"]],
    ids=" ".join,
)
def test_a_run_is_the_same_to_the_bit(
    extra: list[str],
    tmp_path: Path,
    chat_arguments: list[str],
    lowtide: Run,
    side: LazySide,
    handles: list[tuple[Any, dict[str, Any]]],
) -> None:
    stock, away = tmp_path / "stock", tmp_path / "away"
    assert lowtide(*chat_arguments, *extra, "--output", stock)[::2] == (0, "")
    assert not handles
    status, out, err = lowtide(*chat_arguments, *extra, "--offload-states", "--output", away)
    assert (status, err) == (0, "")
    assert "in host memory" in out
    ((handle, asked),) = handles
    assert asked["backwards_per_step"] == (3 if "--grad-accum" in extra else 1)
    assert handle.offloaded_bytes > 0
    assert side.begun_back >= 5, "in each step but the first, which has none yet"
    file = "adapter_model.safetensors" if "--lora-rank" in extra else "model.safetensors"

    def assert_same(output: Path) -> None:
        assert losses(output) == losses(stock)
        assert_same_weights(weights(output, file), weights(stock, file))
        for a, b in zip(optimizer_states(output, 6), optimizer_states(stock, 6), strict=True):
            assert torch.equal(a, b)

    assert_same(away)
    if "--lora-rank" in extra:
        return
    for step in (4, 6):
        shutil.rmtree(away / f"checkpoint-{step}")
    shutil.rmtree(away / "model")
    assert lowtide("train", "--resume", "--output", away)[::2] == (0, "")
    assert handles[-1][0].offloaded_bytes == handle.offloaded_bytes, "the setting is the run's"
    assert_same(away)
    shutil.rmtree(stock / "checkpoint-6")  # a checkpoint does not say whether its states were away
    assert lowtide("train", "--resume", "--offload-states", "--output", stock)[::2] == (0, "")
    assert len(handles) == 3
    assert_same(away)


def test_what_it_cannot_be_had_with(
    tmp_path: Path, tiny: list[str], lowtide: Run, side: LazySide, monkeypatch: pytest.MonkeyPatch
) -> None:
    del side
    arguments = [*tiny, "--offload-states", "--output", tmp_path / "out"]
    status, _, err = lowtide(*arguments, "--memory-budget", "1GiB")
    assert (status, err.count("\n")) == (2, 1), err
    assert "--host-budget" in err
    monkeypatch.setattr(offloading, "uses_fsdp", lambda: True)
    with pytest.raises(RuntimeError, match="whole on each GPU"):
        offloading.check_states(TrainConfig(offload_states=True), SimpleNamespace(device=torch.device("cpu")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_it_is_refused_before_anything_is_written(tmp_path: Path, tiny: list[str], lowtide: Run) -> None:
    status, _, err = lowtide(*tiny, "--offload-states", "--output", tmp_path / "out")
    assert (status, err.count("\n")) == (2, 1)
    assert "offload_states: expected a CUDA GPU" in err
    assert not (tmp_path / "out").exists()


def test_a_plan_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.train.planned.has_levels", lambda model: True)
    args = SimpleNamespace(optim="adamw_torch_fused", bf16=True, fp16=False, gradient_accumulation_steps=1)
    shape = SimpleNamespace(config=model_config("llama-3.2-1b", vocab_size=0))
    settings: dict[str, Any] = {"model": "llama-3.2-1b", "seq_len": 16_384, "batch_size": 1, "memory_budget": "24GiB"}
    settings["host_budget"] = "64GiB"

    def planned(**more: Any) -> tuple[Any, StatesAway | None]:
        config = TrainConfig(**settings, **more)
        plan = plan_run(shape, config, args, "joined", budget_gib=24, host=64)
        return plan, states_away(config, SimpleNamespace(plan=plan))  # type: ignore[arg-type]

    without, none = planned()
    assert (without.chosen.states, none) == (0, None)
    plan, away = planned(offload_states=True)
    assert plan.chosen.states > 0
    assert plan.seconds < without.seconds
    assert away == StatesAway(plan.states_gib, 64, plan.chosen.late)
    assert states_away(TrainConfig(), None) is None
    assert states_away(TrainConfig(offload_states=True, host_budget="3GiB"), None) == StatesAway(None, 3.0, False)
