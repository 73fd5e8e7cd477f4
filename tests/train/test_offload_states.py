"""Optimizer states in host memory, and the activation policy, during a run: the same run to the bit.

The host is one beside the host here: what is used before its copy has come is NaN.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.memory import copies
from lowtide.memory import optimizer_blocks as blocks
from lowtide.train import activations
from lowtide.train.activations import check_offload
from lowtide.train.config import TrainConfig
from memory.models import LazySide
from train.conftest import Run, assert_same_weights, losses

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


def optimizer_states(output: Path, step: int) -> list[torch.Tensor]:
    saved = torch.load(output / f"checkpoint-{step}" / "optimizer.pt")["state"]
    return [value for entry in saved.values() for value in entry.values()]


@pytest.mark.parametrize("lora", [False, True], ids=["accumulated", "adapters"])
def test_a_run_is_the_same_to_the_bit(
    lora: bool, tmp_path: Path, tiny: list[str], tune: Any, lowtide: Run, side: LazySide
) -> None:
    arguments = [*tiny, "--gradient_accumulation_steps", "3"]
    if lora:
        pytest.importorskip("trl")
        arguments = [*tune(**LORA, save_steps=3), "--policy", "input offloaded"]
    stock, away = tmp_path / "stock", tmp_path / "away"
    lowtide.done(*arguments, "--output", stock)
    out = lowtide.done(*arguments, "--offload-states", "--output", away)
    assert "in host memory" in out
    assert side.begun_back >= 5, "in each step but the first, which has none yet"

    def assert_same(output: Path) -> None:
        assert losses(output) == losses(stock)
        assert_same_weights(output / "model", stock / "model")
        for a, b in zip(optimizer_states(output, 6), optimizer_states(stock, 6), strict=True):
            assert torch.equal(a, b)

    assert_same(away)
    resume = ["train", "--resume_from_checkpoint", "true", "--output", away]
    shutil.rmtree(away / "checkpoint-6")
    before = side.begun_back
    lowtide.done(*resume)
    assert side.begun_back > before, "the setting is the run's"
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
