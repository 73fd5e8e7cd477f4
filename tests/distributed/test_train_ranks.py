"""`lowtide train` on two ranks: its steps are those of one process, and it ends with one message in whatever way."""

from __future__ import annotations

import os
import re
import signal
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from distributed.train_runs import ENGINES, REORDERED, STEPS, Runs, assert_same, history, runs, wait_for, weights
from lowtide.train.checkpoints import checkpoints
from promises import promise

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="ranks on CPUs use gloo")
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
LOST = "lowtide train: another process has ended or does not answer ("
SECONDS = 600  # until ranks that hang are killed, which is no ending that a test takes


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return runs(tmp_path_factory.getbasetemp())


def cases(*names: str, slow: tuple[str, ...] = ()) -> list[Any]:
    """Return cases of several words as parameters."""
    marks = {name: [pytest.mark.slow] * (name in slow) + [needs_deepspeed] * ("zero" in name) for name in names + slow}
    return [pytest.param(*name.split(), marks=own, id=name) for name, own in marks.items()]


def resume_text(output: Path) -> str:
    return rf"Resume with: lowtide train .*--output_dir {re.escape(str(output))} .*--resume_from_checkpoint auto\n"


@promise("ranks")
@pytest.mark.parametrize(
    ("kind", "engine"),
    cases("tune fsdp2", slow=("pretrain ddp", "pretrain fsdp2", "tune ddp", "adapt fsdp2", "tune zero3")),
)
def test_steps_are_those_of_one_process(kind: str, engine: str, made: Runs) -> None:
    """Also with ranks whose sequences have different numbers of tokens."""
    alone, (output, ended) = made.of(kind, "one")[0], made.of(kind, engine)
    assert_same(output, alone)
    assert re.search(r"^losses   [1-9]\d* without logits, 0 with$", ended.out[0], re.MULTILINE), ended.out[0]
    assert f"on 2 x cpu, {'FSDP' if engine == 'fsdp2' else 'D'}" in ended.out[0]
    assert not ended.out[1].strip(), "one rank prints"
    assert [path.name for path in checkpoints(output)] == ["checkpoint-2", "checkpoint-4"]
    if kind != "adapt":
        loaded = AutoModelForCausalLM.from_pretrained(output).state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in weights(output).items())


@promise("resume")
@pytest.mark.parametrize(
    ("kind", "wrote", "engine"),
    cases(
        "pretrain ddp one",
        slow=("tune fsdp2 fsdp2", "pretrain one ddp", "adapt fsdp2 fsdp2", "tune zero2 zero2"),
    ),
)
def test_resumes(kind: str, wrote: str, engine: str, made: Runs, tmp_path: Path) -> None:
    """One process and DDP read each other's checkpoints."""
    output = made.copy(kind, wrote, tmp_path / "run")
    ended = made.resume(kind, engine, output)
    assert set(ended.statuses) == {0}, ended
    assert_same(output, made.of(kind, wrote)[0], 0.0 if wrote == engine else REORDERED)


@promise("errors")
def test_a_row_that_cannot_be_trained_on_ends_all_ranks(made: Runs, tmp_path: Path) -> None:
    """Also one that another rank would read."""
    bad = tmp_path / "bad.jsonl"
    rows = ['{"prompt": "a", "completion": "b"}'] * 40
    rows[30] = '{"prompt": "a", "completion": 3}'
    bad.write_text("\n".join(rows))
    ended = made.run("tune", "ddp", tmp_path / "run", "--dataset_name", bad)
    assert ended.statuses == [2, 2], ended
    (said,) = [line for line in ended.err[0].splitlines() if line.startswith("lowtide train: ")]
    assert f"line 31 of {bad}: completion that is no text but 3" in said


@promise("resume")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "engine", "number", "whom"),
    [("pretrain", "ddp", signal.SIGTERM, "all, twice"), ("tune", "fsdp2", signal.SIGINT, "one")],
)
def test_a_signal_to_any_rank_ends_all_with_a_checkpoint(
    kind: str, engine: str, number: int, whom: str, made: Runs, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    given = [*made.arguments(kind), "--max_steps", 10_000, "--per_device_train_batch_size", 2, "--output_dir", output]
    made.ranks.start(2, *given, seconds=SECONDS, **ENGINES[engine])
    wait_for(lambda: checkpoints(output))
    pids = made.ranks.pids()
    if whom == "one":
        os.kill(pids[1], number)
    else:  # as by a cluster, and by the launcher it signals too; while one stands still no rank ends
        os.kill(pids[0], signal.SIGSTOP)
        for pid in (pids[1], pids[1], pids[0]):
            os.kill(pid, number)
            time.sleep(0.002)  # a signal that waits already does not wait twice
        os.kill(pids[0], signal.SIGCONT)
    ended = made.ranks.end()
    assert ended.statuses == [128 + number] * 2, ended
    step = int(checkpoints(output)[-1].name.rpartition("-")[2])
    name = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}[signal.Signals(number)]
    said = f"lowtide train: ended by {name} after step {step}. "
    assert re.search(re.escape(said) + resume_text(output), ended.err[0]), ended
    assert said not in ended.err[1]
    ended = made.resume(kind, engine, output, "--max_steps", step + 1)
    assert ended.statuses == [0, 0], ended
    losses = history(output, step + 1)["loss"]
    assert len(losses) == step + 1
    assert losses[0] == pytest.approx(history(made.of(kind, "one")[0])["loss"][0], rel=REORDERED)


@promise("resume")
@pytest.mark.parametrize(("kind", "engine"), cases("pretrain ddp", slow=("tune fsdp2", "tune zero2")))
def test_a_rank_that_is_killed_in_a_step(kind: str, engine: str, made: Runs, tmp_path: Path) -> None:
    """The other one ends with a message, and both go on from the checkpoint before."""
    output = tmp_path / "run"
    ended = made.run(kind, engine, output, seconds=SECONDS, FAULT="kill 1 3")
    assert ended.statuses == [2, -9], ended
    assert re.search(re.escape(LOST) + ".*" + resume_text(output), ended.err[0]), ended
    assert [path.name for path in checkpoints(output)] == ["checkpoint-2"]
    ended = made.resume(kind, engine, output)
    assert ended.statuses == [0, 0], ended
    assert_same(output, made.of(kind, "one")[0])


@promise("resume")
@pytest.mark.parametrize(("kind", "engine", "rank"), cases(slow=("pretrain ddp 0", "pretrain fsdp2 0", "tune ddp 1")))
def test_a_rank_whose_disk_takes_no_more(kind: str, engine: str, rank: str, made: Runs, tmp_path: Path) -> None:
    """While it writes a checkpoint; with room again the ranks go on from the one before."""
    output, number = tmp_path / "run", int(rank)
    ended = made.run(kind, engine, output, seconds=SECONDS, FAULT=f"full {rank} {STEPS}")
    assert ended.statuses == [2, 2], ended
    said = f"lowtide train: could not write {output / f'checkpoint-{STEPS}'} ("
    ways = ".*Make room or choose another.*" + resume_text(output)
    assert re.search(re.escape(said) + ways, ended.err[number]), ended
    assert said in ended.err[1 - number] or LOST in ended.err[1 - number], ended
    assert [path.name for path in checkpoints(output)] == ["checkpoint-2"]
    ended = made.resume(kind, engine, output)
    assert ended.statuses == [0, 0], ended
    assert_same(output, made.of(kind, "one")[0])


NAN = {
    "tune ddp": ("inf", [], "inf by step 3"),
    "pretrain fsdp2": ("nan", [], "nan by step 3"),
    # logged before it is saved; by then all ranks' are NaN
    "pretrain ddp": ("nan", ["--logging_steps", 10], "nan by step 4"),
}


@promise("errors")
@pytest.mark.parametrize(("kind", "engine"), cases("tune ddp", slow=("pretrain fsdp2", "pretrain ddp")))
def test_a_loss_of_one_rank_that_is_not_finite(kind: str, engine: str, made: Runs, tmp_path: Path) -> None:
    """No weights that it made are saved."""
    fault, more, got = NAN[f"{kind} {engine}"]
    output = tmp_path / "run"
    ended = made.run(kind, engine, output, *more, seconds=SECONDS, FAULT=f"{fault} 1 3")
    assert ended.statuses == [2, 2], ended
    for err in ended.err:
        assert f"--learning_rate: expected a training loss that stays finite, got {got}. Start again" in err, ended
    assert [path.name for path in checkpoints(output)] == ["checkpoint-2"]
    assert not (output / "model.safetensors").exists()
