"""Optimizer states in host memory during a run: the same run to the bit, saved and resumed too.

The host is one beside the host here: what is used before its copy has come is NaN.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lowtide.train.offloading import StatesAway
from lowtide.train.resuming import resumed_config

from lowtide.memory import apply, offload
from lowtide.memory import optimizer_blocks as blocks
from lowtide.train import offloading
from lowtide.train.activations import plan_run, states_away
from lowtide.train.config import TrainConfig
from lowtide.train.model import model_config
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


def begun(folder: Path, **settings: Any) -> None:
    """Write what a resume reads of a run, with settings of its own."""
    (folder / "checkpoint-3").mkdir(parents=True)
    config = TrainConfig(**settings).absolute().to_json()
    (folder / "run.json").write_text(json.dumps({"config": config, "data": "x"}))


def test_another_policy_keeps_the_host_memory_of_the_states(tmp_path: Path, side: LazySide) -> None:
    del side
    begun(tmp_path, offload_states=True, host_budget="3GiB")
    given = {"resume": True, "output": str(tmp_path)}
    assert resumed_config({**given, "policy": "input"}).host_budget == "3GiB"
    config = resumed_config({**given, "memory_budget": "9GiB"})
    assert (config.host_budget, config.offload_states) == ("3GiB", True)


@pytest.mark.parametrize("budget", [None, "9GiB"])
@pytest.mark.parametrize("engine", ["auto", "fsdp2", "zero3"])
def test_a_resume_that_cannot_have_it_goes_on_without(
    engine: str, budget: str | None, tmp_path: Path, side: LazySide, monkeypatch: pytest.MonkeyPatch
) -> None:
    del side
    begun(tmp_path, offload_states=True, host_budget="3GiB", memory_budget=budget)
    given = {"resume": True, "output": str(tmp_path), "parallel": engine}
    if engine == "auto":
        monkeypatch.setattr(offloading, "available", lambda: False)
    else:
        assert resumed_config(given).offload_states, "one process has all of it"
        monkeypatch.setenv("WORLD_SIZE", "2")
    config = resumed_config(given)
    assert not config.offload_states
    assert config.host_budget == (budget and "3GiB"), "which has a use with a plan alone"
    assert resumed_config({**given, "offload_states": True}).offload_states, "asked for by name it is refused later on"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_resume_without_a_gpu_says_that_the_states_stay(finished: Path, tmp_path: Path, lowtide: Run) -> None:
    output = tmp_path / "out"
    shutil.copytree(finished, output)
    told = json.loads((output / "run.json").read_text())
    told["config"]["offload_states"] = True
    (output / "run.json").write_text(json.dumps(told))
    status, out, err = lowtide("train", "--resume", "--output", output, "--max-steps", 13)
    assert (status, err) == (0, "")
    assert "cannot be offloaded here" in out
    status, _, err = lowtide("train", "--resume", "--output", output, "--max-steps", 14, "--offload-states")
    assert (status, err.count("\n")) == (2, 1)
    assert "expected a CUDA GPU" in err
