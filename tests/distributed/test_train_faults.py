"""What befalls one rank of `lowtide train`: all end in time with one message, and the last checkpoint is whole."""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch.distributed as dist

from distributed.train_ranks import Ended
from distributed.train_runs import SEQUENCES, Runs, assert_same, runs, sharing, wait_for
from lowtide.train.checkpoints import checkpoints

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="ranks on CPUs use gloo")

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

SECONDS = 600  # until ranks that hang are killed, which is no ending that a test takes
SIX = 6  # sequences of a step: three, two and one ranks have as many each
LOST = "lowtide train: another process has ended or does not answer ("


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return runs(tmp_path_factory.getbasetemp())


def train(made: Runs, case: str, output: Path, fault: str, *more: object, ranks: int = 2, rows: int = 2) -> Ended:
    """Train ``KIND ENGINE`` with a fault."""
    kind, engine = case.split()
    given = [*made.arguments(kind), *sharing(engine), "--per_device_train_batch_size", rows, "--output", output]
    return made.ranks(ranks, *given, *more, seconds=SECONDS, FAULT=fault, **made.spies(engine))


def resume(made: Runs, case: str, output: Path, ranks: int, rows: int) -> Ended:
    return made.resume(output, ranks, "--per_device_train_batch_size", rows, engine=case.split()[1], seconds=SECONDS)


def names(output: Path) -> list[str]:
    return [path.name for path in checkpoints(output)]


def how(output: Path) -> str:
    return f"Resume with: lowtide train --resume_from_checkpoint true --output {output}\n"


SLOW = pytest.mark.slow


def engines(first: str, *names: str) -> list[object]:
    """Return cases as parameters, all but the first of which are slow tests."""
    slow = [pytest.param(name, marks=[SLOW, *([needs_deepspeed] * ("zero" in name))], id=name) for name in names]
    return [pytest.param(first, id=first), *slow]


@pytest.mark.parametrize("case", engines("tune fsdp2 1", "pretrain ddp 0", "tune shards 2"))
def test_a_rank_killed_in_a_step_and_two_of_three_go_on(case: str, made: Runs, tmp_path: Path) -> None:
    case, rank = case[:-2], int(case[-1])
    output, alone = tmp_path / "run", made.folder / f"{case.split()[0]}-six"
    if not alone.exists():
        given = ["--per_device_train_batch_size", SIX, "--output", alone]
        made.ranks.succeed(1, *made.arguments(case.split()[0]), *given, **made.spies("one"))
    ended = train(made, case, output, f"kill {rank} 3", ranks=3, rows=SIX // 3)
    assert ended.statuses == [-9 if r == rank else 2 for r in range(3)], ended
    for r in {0, 1, 2} - {rank}:
        assert ended.err[r].startswith(LOST), ended
        assert ended.err[r].endswith(how(output)), ended
        assert ended.err[r].count("\n") == 1, ended
    assert names(output) == ["checkpoint-2"]
    ended = resume(made, case, output, 2, SIX // 2)
    assert ended.statuses == [0, 0], ended
    assert_same(output, alone)


@SLOW
@needs_deepspeed
@pytest.mark.parametrize("case", ["pretrain zero2", "tune zero3"])
def test_deepspeed_goes_on_with_as_many_ranks(case: str, made: Runs, tmp_path: Path) -> None:
    """Its files are for that number, as the error says."""
    output = tmp_path / "run"
    ended = train(made, case, output, "kill 1 3")
    assert ended.statuses == [2, -9], ended
    assert ended.err[0].startswith(LOST), ended
    assert names(output) == ["checkpoint-2"]
    ended = resume(made, case, output, 1, SEQUENCES)
    assert ended.statuses == [2], ended
    assert "on 2 processes, which wrote checkpoint-2, got" in ended.err[0], ended
    ended = resume(made, case, output, 2, 2)
    assert ended.statuses == [0, 0], ended
    assert_same(output, made.of(case.split()[0], "one")[0])


@SLOW
@pytest.mark.parametrize("case", engines("pretrain ddp", "tune zero2"))
def test_no_rank_waits_longer_than_the_timeout(case: str, made: Runs, tmp_path: Path) -> None:
    """For one that is there and does nothing; zero2 has process groups of its own."""
    output = tmp_path / "run"
    kind, engine = case.split()
    given = [*made.arguments(kind), *sharing(engine), "--per_device_train_batch_size", 2, "--ddp_timeout", 20]
    made.ranks.start(2, *given, "--output", output, seconds=SECONDS, FAULT="stop 1 3", **made.spies(engine))
    wait_for(lambda: len(made.ranks.pids()) == 2)
    wait_for(lambda: len(made.ranks.pids()) < 2)
    for stopped in made.ranks.pids():
        os.kill(stopped, signal.SIGKILL)
    ended = made.ranks.end()
    assert ended.statuses == [2, -9], ended
    assert ended.err[0].startswith(f"{LOST}Timed out waiting 20000ms"), ended
    assert ended.err[0].endswith(how(output)), ended
    assert names(output) == ["checkpoint-2"]


FULL = ["pretrain fsdp2 0", "pretrain ddp 1", "tune shards 1", "pretrain zero3 1"]


@pytest.mark.parametrize("case", engines(*FULL))
def test_a_rank_whose_disk_takes_no_more(case: str, made: Runs, tmp_path: Path) -> None:
    """While it writes a checkpoint; with room again the ranks go on from the one before."""
    case, rank = case[:-2], int(case[-1])
    output = tmp_path / "run"
    ended = train(made, case, output, f"full {rank} 4")
    assert ended.statuses == [2, 2], ended
    assert ended.err[rank].startswith(f"lowtide train: could not write {output / 'checkpoint-4'} ("), ended
    assert ended.err[rank].endswith(f"Make room or choose another --output. {how(output)}"), ended
    other = ended.err[1 - rank]
    assert other == ended.err[rank] or (other.startswith(LOST) and other.endswith(how(output))), ended
    assert "".join(ended.err).count("\n") == 2, ended
    assert names(output) == ["checkpoint-2"]
    ended = resume(made, case, output, 2, 2)
    assert ended.statuses == [0, 0], ended
    assert_same(output, made.of(case.split()[0], "one")[0])


NAN = {
    "pretrain fsdp2": ("nan", [], "nan at step 3 on rank 1 of 2"),
    "tune ddp": ("inf", [], "inf at step 3 on rank 1 of 2"),
    "tune zero3": ("nan", [], "nan at step 3 on rank 1 of 2"),
    # logged before it is saved; by then all ranks' are NaN
    "pretrain ddp": ("nan", ["--logging_steps", 10], "nan in steps 3 to 4 on rank 0 and 1 of 2"),
}


@pytest.mark.parametrize("case", engines(*NAN))
def test_a_loss_of_one_rank_that_is_not_finite(case: str, made: Runs, tmp_path: Path) -> None:
    """No weights that it made are saved: as if it had come from the hardware, the ranks go on from before."""
    kind, more, got = NAN[case]
    output = tmp_path / "run"
    ended = train(made, case, output, f"{kind} 1 3", *more)
    assert ended.statuses == [2, 2], ended
    expected = "lowtide train: lr: expected a training loss that stays finite"
    assert ended.err[0].startswith(f"{expected}, got {got}. Start again with a lower --lr"), ended
    assert ended.err[0] == ended.err[1], ended
    assert names(output) == ["checkpoint-2"]
    assert not (output / "model").exists()
    if not more:
        ended = resume(made, case, output, 2, 2)
        assert ended.statuses == [0, 0], ended
        assert_same(output, made.of(case.split()[0], "one")[0])


def test_a_restart_without_auto_says_how_to_resume(made: Runs, tmp_path: Path) -> None:
    output = made.copy("pretrain", "one", tmp_path / "run")
    ended = made.ranks(2, *made.arguments("pretrain"), "--output", output)
    assert ended.statuses == [2, 2], ended
    assert "Resume it with --resume_from_checkpoint true (auto, if a launcher starts it again)" in ended.err[0]
