"""The side by side: it agrees where it should, and says so loudly where not."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Trainer

from lowtide.measure.child import ChildResult
from lowtide.train import TrainConfig, comparison
from lowtide.train.result import (
    EARLY_STEPS,
    FLOAT32,
    Comparison,
    Tolerance,
    TrainResult,
)
from lowtide.train.turns import Turns
from train.conftest import Run, options

RESULT = TrainResult(
    losses={1: 6.0, 2: 5.0, 3: 4.0, EARLY_STEPS + 1: 3.0},
    held_out_before=6.0,
    held_out_after=4.0,
    tokens_per_second=10.0,
    step_seconds=1.0,
    peak_resident_bytes=2**30,
    peak_cuda_bytes=0,
    warm_bytes=2**29,
    peak_step_bytes=2**30,
    calls_fused=3,
    calls_materialised=0,
    seconds=3.0,
    saved=None,
    steps_seconds=[1.0] * 12,
)


def against(losses: dict[int, float]) -> Comparison:
    patched = dataclasses.replace(RESULT, losses=losses)
    return Comparison(stock=RESULT, patched=patched, tolerance=Tolerance(early=1e-3, late=1e-1), block=5)


class Children:
    """Runs children of `lowtide.train.comparison` in turn, in this process: what one trains is the same code."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: list[tuple[str, TrainConfig]] = []
        self.wrong: Callable[[], pytest.MonkeyPatch | None] | None = None
        self._one = threading.Lock()
        monkeypatch.setattr(comparison, "run_child", self)

    def __call__(
        self, function: Any, settings: Mapping[str, Any], turn: Any, label: str, *, capture: bool
    ) -> ChildResult:
        del capture
        with self._one:
            self.runs.append((label, TrainConfig.from_json(settings)))
            undo = self.wrong() if self.wrong is not None and label == "lowtide" else None
            value = json.loads(json.dumps(function(settings, None, label)))
            if undo is not None:
                undo.undo()
        return ChildResult(returncode=0, seconds=1.0, peak_bytes=0, value=value)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Children:
    return Children(monkeypatch)


def test_two_processes_agree_and_take_turns(tmp_path: Path, tiny: list[str], lowtide: Run) -> None:
    """The logits are 128 MiB here, the loss's scratch memory at most half of that."""
    shape = json.loads((tmp_path / "tiny.json").read_text()) | {"vocab_size": 32_768}
    (tmp_path / "wide.json").write_text(json.dumps(shape))
    size = options(**{"per_device_train_batch_size": 8, "seq-len": 128, "max-steps": 12})
    file = tmp_path / "c.json"
    model = ["--model", tmp_path / "wide.json"]
    status, out, _ = lowtide(*tiny, *model, *size, "--compare", "--json", file)
    assert status == 0, out
    for line in ("the same model, seed and data; stock: transformers' own loss", "loss, first step", "MiB above warm",
                 "tokens/s", "losses of 12 steps: equal to rounding", "took turns every 5 steps"):  # fmt: skip
        assert line in " ".join(out.split()), line
    figures = json.loads(file.read_text())
    assert figures["equal"]
    assert figures["max_loss_difference"] < 1e-5
    assert figures["tolerance"] == {"early": 2e-5, "late": 2e-3, "early_steps": 26}
    assert (figures["config"]["seq_len"], figures["steps_per_block"], figures["config"]["output"]) == (128, 5, None)
    assert {"torch", "transformers", "cpu_threads", "system", "OMP_WAIT_POLICY"} <= figures["machine"].keys()
    assert len(figures["stock"]["losses"]) == len(figures["patched"]["losses"]) == 12
    assert (figures["stock"]["calls_fused"], figures["patched"]["calls_materialised"]) == (None, 0)
    assert figures["patched"]["calls_fused"] >= 12
    assert figures["stock"]["peak_above_warm_mib"] > 2 * 128
    assert 0 <= figures["patched"]["peak_above_warm_mib"] < 128
    assert figures["step_ratio"] > 0


def test_a_fine_tuning_is_beside_trls_own_head(children: Children, tune: Any, tmp_path: Path, lowtide: Run) -> None:
    pytest.importorskip("trl")
    file = tmp_path / "c.json"
    arguments = tune("messages", use_peft=True, lora_r=2, lora_dropout=0.1, assistant_only_loss=True)
    out = lowtide.done(*arguments, "--compare", "--json", file)
    figures = json.loads(file.read_text())
    assert (figures["stock_is"], figures["stock"]["calls_fused"]) == ("TRL's own head", None)
    assert figures["patched"]["calls_fused"] > 0
    assert [(label, config.patch) for label, config in sorted(children.runs)] == [("lowtide", True), ("stock", False)]
    assert {str(config.options["lora_dropout"]) for _, config in children.runs} == {"0"}
    assert "lora_dropout is 0 in both runs" in out


def test_a_wrong_gradient_is_not_equal(
    children: Children, tiny: list[str], lowtide: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong() -> pytest.MonkeyPatch:
        patch, original = pytest.MonkeyPatch(), Trainer.training_step

        def training_step(trainer: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            loss = original(trainer, model, *args, **kwargs)
            for parameter in model.parameters():
                parameter.grad.mul_(1 + 0.02 * (parameter.grad > 0))
            return loss

        patch.setattr(Trainer, "training_step", training_step)
        return patch

    children.wrong = wrong
    status, out, _ = lowtide(*tiny, "--compare", "--max-steps", 12)
    assert (status, "NOT EQUAL" in out) == (1, True), out


def test_other_losses_are_not_equal() -> None:
    assert against(RESULT.losses | {2: 5.0005}).equal
    assert not against(RESULT.losses | {2: 5.002}).equal
    assert not against(RESULT.losses | {3: float("nan")}).equal
    empty = dataclasses.replace(RESULT, losses={})
    assert not Comparison(stock=empty, patched=empty, tolerance=FLOAT32, block=5).equal
    assert against(RESULT.losses | {EARLY_STEPS + 1: 3.09}).equal, "later, rounding has grown"
    assert not against(RESULT.losses | {EARLY_STEPS + 1: 3.11}).equal


def test_a_third_run_in_float32_sets_the_limit(
    tmp_path: Path, tiny: list[str], lowtide: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []

    def in_child(config: TrainConfig, turn: Any, console: Any, label: str) -> TrainResult:
        runs.append((label, config.patch, config.options.get("dtype"), turn is None))
        away = {"float32": {2: 5.1}, "lowtide": {2: 5.05}}.get(label, {})
        return dataclasses.replace(RESULT, losses=RESULT.losses | away)

    monkeypatch.setattr(comparison, "_in_child", in_child)
    arguments = [*tiny, "--compare", "--dtype", "bfloat16", "--json", tmp_path / "c.json"]
    status, out, _ = lowtide(*arguments)
    assert status == 0, out
    assert sorted(runs[:2]) == [("lowtide", True, "bfloat16", False), ("stock", False, "bfloat16", False)]
    assert runs[2:] == [("float32", False, "float32", True)]
    assert "rounding measured by a float32 run of the stock model" in out
    figures = json.loads((tmp_path / "c.json").read_text())
    assert figures["tolerance"]["early"] == pytest.approx(0.4)
    assert figures["float32"]["losses"]["2"] == 5.1


def test_the_ratio_is_that_of_paired_blocks() -> None:
    """A machine that is busy for a while slows both, and the blocks of that time have the same ratio."""

    def ratio(stock: list[float], patched: list[float], block: int = 5) -> float:
        times = [dataclasses.replace(RESULT, steps_seconds=[99.0, 99.0, *one]) for one in (stock, patched)]
        return Comparison(stock=times[0], patched=times[1], tolerance=FLOAT32, block=block).step_ratio

    quiet, busy = [1.0] * 5, [9.0] * 5
    assert ratio(quiet * 3, [0.8] * 15) == pytest.approx(0.8)
    slowed = [0.8 * each for each in quiet + busy + quiet]
    assert ratio(quiet + busy + quiet, slowed) == pytest.approx(0.8)
    assert ratio(quiet + [1.0] * 2, [0.8] * 5 + [9.0] * 2) == pytest.approx(0.8), "part of a block"


@pytest.mark.parametrize("fails", ["stock", "lowtide"])
def test_a_run_that_fails_is_named(
    fails: str, tiny: list[str], lowtide: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def child(function: Any, settings: Any, turn: Any, label: str, **_: Any) -> ChildResult:
        del function, settings
        if label == fails:
            error = "Traceback (most recent call last):\n  File\nlowtide.errors.ArgumentValueError: bad\nsecond line\n"
            return ChildResult(returncode=1, seconds=1.0, peak_bytes=0, stderr=error)
        turns = Turns(Path(turn[0]), turn[1], turn[2], turn[3])
        for _ in range(20):  # it would wait for a turn that nobody gives
            turns.on_step_begin(SimpleNamespace(device=SimpleNamespace(type="cpu")), None, None)
        value = RESULT.to_json() | {"steps_seconds": []}
        return ChildResult(returncode=0, seconds=1.0, peak_bytes=0, value=json.loads(json.dumps(value)))

    monkeypatch.setattr(comparison, "run_child", child)
    err = lowtide.refused(*tiny, "--compare")
    assert f"the {fails} run failed: lowtide.errors.ArgumentValueError: bad second line" in err
    assert lowtide(*tiny, "--compare", "--json", tmp_path / "no" / "c.json")[::2] == (
        2,
        f"lowtide train: json: expected a file in a folder that exists, got {tmp_path / 'no' / 'c.json'}.\n",
    )
