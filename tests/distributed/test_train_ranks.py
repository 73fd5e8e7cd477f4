"""`lowtide train` on several processes: its steps are those of one, it goes on on any other number, and ends well."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import psutil
import pytest
import torch
import torch.distributed as dist
from lowtide.train.packing import Batches
from lowtide.train.ranks import Shares, let_first_speak
from safetensors.torch import load_file

from distributed.train_ranks import Ended, Ranks, shared
from lowtide.cli import main
from lowtide.train.checkpoints import checkpoints, log_history
from lowtide.train.config import Parallel
from lowtide.train.parallel import variables
from train.conftest import tiny_arguments

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="ranks on a CPU speak gloo")

# Other batches add the same numbers up in another order: some float32 roundings of each value.
REORDERED = 1e-5


@pytest.fixture(scope="module")
def ranks() -> Ranks:
    return shared()


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [*tiny_arguments(tmp_path_factory.mktemp("tiny")), "--keep", "5"]


def history(folder: Path, step: int) -> dict[str, list[float]]:
    logs = log_history(folder / f"checkpoint-{step}")
    return {name: [entry[name] for entry in logs if name in entry] for name in ("loss", "grad_norm", "eval_loss")}


def assert_same(folder: Path, other: Path, step: int) -> None:
    got, want = history(folder, step), history(other, step)
    for name, values in got.items():
        assert len(values) == len(want[name]) > 0, name
        assert values == pytest.approx(want[name], rel=REORDERED), name


def wait_for(what: Callable[[], Any], seconds: float = 120) -> Any:
    until = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.05)
    return found


def steps_logged(output: Path) -> int:
    file = output / "log.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return max((json.loads(line)["step"] for line in lines), default=0)


@pytest.mark.parametrize(
    ("streams", "ranks", "rows"), [(4, 3, 2), (4, 1, 2), (3, 2, 1), (5, 2, 2), (7, 3, 1), (6, 6, 4), (1, 1, 1)]
)
def test_shares_deal_out_every_stream_once(streams: int, ranks: int, rows: int) -> None:
    parts = [Shares(streams=streams, ranks=ranks, rank=rank, rows=rows) for rank in range(ranks)]
    dealt = [number for part in parts for number in range(part.first, part.first + part.count)]
    assert dealt == list(range(streams))
    assert len({part.batches for part in parts}) == 1
    for part in parts:
        assert len(part.sizes) == part.batches
        assert sum(part.sizes) == part.count
        assert max(part.sizes) <= rows


def test_batches_take_the_blocks_in_order_and_fill_none_up() -> None:
    batches = iter(Batches(list(range(100)), [2, 1, 0], -1))  # type: ignore[arg-type]
    assert [next(batches) for _ in range(5)] == [[0, 1], [2], [-1], [3, 4], [5]]


@pytest.mark.parametrize("rank", [0, 1])
def test_other_ranks_let_the_first_say_an_error(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as a launcher needs to see that it has ended; the ranks of the other tests see it at once."""
    waits: list[float] = []
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr("lowtide.train.ranks.time.sleep", waits.append)
    let_first_speak()
    assert waits == [3.0] * rank


@pytest.fixture(scope="module")
def whole(ranks: Ranks, arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process on four sequences: what all others are to be equal to."""
    output = tmp_path_factory.mktemp("whole") / "run"
    ranks.succeed(1, *arguments, "--batch-size", 4, "--output", output)
    return output


# Each with four sequences a step, as the whole run: also on ranks that do not divide them, with batches that are empty
# on some.
GOES_ON = {
    "ddp 2": ("ddp", 2, 2, [("fsdp2", 3)]),
    "fsdp2 4": ("fsdp2", 4, 1, [("fsdp2", 3), ("auto", 1)]),
    "one process": ("auto", 1, 4, [("ddp", 3)]),
}


@pytest.mark.parametrize("name", GOES_ON)
def test_goes_on_on_another_number_of_ranks(
    name: str, ranks: Ranks, arguments: list[str], whole: Path, tmp_path: Path
) -> None:
    engine, before, rows, later = GOES_ON[name]
    output = whole
    if before > 1:
        output = tmp_path / "before"
        told = ["--max-steps", 6, "--batch-size", rows, "--parallel", engine, "--output", output]
        ended = ranks.succeed(before, *arguments, *told)
        assert_same_run(ended, output, whole)
    for then, after in later:
        resumed = tmp_path / f"{then}-{after}"
        shutil.copytree(output, resumed)
        shutil.rmtree(resumed / "checkpoint-6")
        ended = ranks.succeed(after, "train", "--resume", "--output", resumed, "--parallel", then)
        assert_same_run(ended, resumed, whole)


def assert_same_run(ended: Ended, output: Path, whole: Path) -> None:
    assert ended.out[0].count("held-out loss") == 1
    assert re.search(r"steps +6 of 4 sequences of 32 tokens, on", ended.out[0]), "whatever the ranks are"
    assert not any(ended.out[1:]), "one rank speaks"
    assert re.search(r"losses +\d+ without logits, 0 with\s", ended.out[0]), ended.out[0]
    assert_same(output, whole, 6)
    got, want = (load_file(folder / "model" / "model.safetensors") for folder in (output, whole))
    assert got.keys() == want.keys(), "a tied weight is saved once"
    for weight, value in want.items():
        torch.testing.assert_close(got[weight], value, rtol=0, atol=REORDERED)


def test_fsdp2_reduces_in_float32_under_bfloat16(ranks: Ranks, arguments: list[str], tmp_path: Path) -> None:
    """Each rank's loss and gradients have more digits than bfloat16; stock's are the same to what its products err.

    The mean over two ranks, which is logged, would have one more digit by itself.
    """
    curves = []
    spy = "distributed.spy_dtypes"
    for name, options in {"patched": [], "stock": ["--no-patch"]}.items():
        output = ["--output", tmp_path / name]
        ended = ranks.succeed(2, *arguments, "--parallel", "fsdp2", "--dtype", "bfloat16", *options, *output, SPY=spy)
        curves.append(history(tmp_path / name, 6)["loss"])
        for out in ended.out:
            steps = re.findall(r"^spied loss (\w+) gradients (\d+) (\d+)$", out, re.MULTILINE)
            assert len(steps) == 6
            assert "True" in [loss for loss, _, _ in steps]
            for _, gradients, finer in steps:
                assert int(finer) == int(gradients) > 0
    assert curves[0] == pytest.approx(curves[1], rel=2e-3)


def test_more_ranks_than_sequences_is_one_error(ranks: Ranks, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    ended = ranks(5, "train", "--resume", "--max-steps", 8, "--output", tmp_path / "run")
    assert ended.statuses == [2] * 5
    assert ended.err[0].count("\n") == 1
    assert "at most 4 ranks" in ended.err[0]


def test_sigterm_twice_saves_on_all_ranks(ranks: Ranks, arguments: list[str], whole: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    ranks.start(2, *arguments, "--max-steps", 10_000, "--save-every", 0, "--output", output)
    wait_for(lambda: steps_logged(output) >= 2)
    pids = ranks.pids()
    for pid in (*pids[1:], *pids):  # as by a cluster, and by the launcher that it signals too
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.002)  # a signal that waits already does not wait twice
    ended = ranks.end()
    assert ended.statuses == [143, 143], ended
    (checkpoint,) = checkpoints(output)
    assert "--resume" in ended.err[0]
    assert "lowtide train:" not in ended.err[1], "one rank speaks"
    assert checkpoint.name.rpartition("-")[2] in ended.err[0]
    step = int(checkpoint.name.rpartition("-")[2])
    assert steps_logged(output) == step >= 2
    assert not (output / "model").exists()
    ranks.succeed(1, "train", "--resume", "--output", output, "--max-steps", step + 2)
    assert history(output, step + 2)["loss"][:1] == pytest.approx(history(whole, 6)["loss"][:1], rel=REORDERED)


@pytest.mark.parametrize("name", get_args(Parallel)[1:])
def test_accelerate_launch_sets_what_the_option_sets(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    file = tmp_path / "launch.yaml"
    assert main(["train", "--parallel", name, "--write-launch-file", str(file)]) == 0
    assert f"accelerate launch --config_file {file} --num_processes N -m lowtide train" in capsys.readouterr().out
    arguments = launch_command_parser().parse_args(["--config_file", str(file), "--num_processes", "2", "script.py"])
    arguments, told, _ = _validate_launch_command(arguments)
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(told.deepspeed_config)  # as launch_command does
        env = prepare_deepspeed_cmd_env(arguments)[1]
    else:
        env = prepare_multi_gpu_env(arguments)
    own = variables(name)
    assert own.items() <= env.items()
    assert bool(own) == (name != "ddp")
    assert env["ACCELERATE_MIXED_PRECISION"] == "no"


WRONG = {
    "ACCELERATE_USE_DEEPSPEED": ("true", ["parallel", "fsdp2", "accelerate"]),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("true", ["parallel", "DDP, FSDP2"]),
    "ACCELERATE_MIXED_PRECISION": ("bf16", ["dtype", "--dtype"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_launcher_that_was_told_something_else_is_one_error(name: str, ranks: Ranks, arguments: list[str]) -> None:
    value, words = WRONG[name]
    ended = ranks(2, *arguments, "--output", "never-written", "--parallel", "fsdp2", **{name: value})
    assert ended.statuses == [2, 2], ended
    assert ended.err[0].count("\n") == 1, ended
    assert all(word in ended.err[0] for word in words), ended
    assert not Path("never-written").exists()


def test_accelerate_launch_and_a_killed_rank(ranks: Ranks, arguments: list[str], whole: Path, tmp_path: Path) -> None:
    """torchrun, which accelerate starts, ends the others; killed while it saves, more likely than not: it always does.

    One process goes on.
    """
    file, output = tmp_path / "fsdp2.yaml", tmp_path / "run"
    assert main(["train", "--parallel", "fsdp2", "--write-launch-file", str(file)]) == 0
    script = tmp_path / "launch.py"  # the launcher is forked, and starts its ranks itself
    script.write_text("from accelerate.commands.launch import main\nmain()\n")
    launch = ["--config_file", file, "--num_processes", 2, "-m", "lowtide"]
    ranks.start(1, *launch, *arguments, "--max-steps", 100_000, "--save-every", 1, "--output", output, script=script)
    wait_for(lambda: checkpoints(output))
    children = psutil.Process(ranks.pids()[0]).children()
    assert len(children) == 2
    children[1].send_signal(signal.SIGKILL)
    ended = ranks.end()
    assert ended.statuses != [0]
    assert not any(child.is_running() for child in children)
    assert "Signal 9" in ended.err[0]
    newest = checkpoints(output)[-1]
    assert (newest / "optimizer").is_dir(), "FSDP2 was taken"
    step = int(newest.name.rpartition("-")[2])
    ranks.succeed(1, "train", "--resume", "--output", output, "--max-steps", step + 1, "--parallel", "auto")
    assert not (output / ".incoming").exists()
    first = history(output, step + 1)
    assert len(first["loss"]) == step + 1
    assert first["loss"][0] == pytest.approx(history(whole, 6)["loss"][0], rel=REORDERED)


def test_a_lost_rank_is_one_error(ranks: Ranks, arguments: list[str], tmp_path: Path) -> None:
    output = tmp_path / "run"
    ranks.start(2, *arguments, "--max-steps", 100_000, "--save-every", 0, "--output", output)
    wait_for(lambda: steps_logged(output) >= 1)
    os.kill(ranks.pids()[1], signal.SIGKILL)
    ended = ranks.end()
    assert ended.statuses == [2, -9], ended
    assert ended.err[0].splitlines()[-1].startswith("lowtide train: another process has ended"), ended
