"""How `lowtide train` on several ranks begins and ends: launchers, signals, lost ranks and errors."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import psutil
import pytest
import torch.distributed as dist

from distributed.train_runs import REORDERED, Runs, history, runs, wait_for
from lowtide.cli import main
from lowtide.train.checkpoints import checkpoints
from lowtide.train.config import Parallel
from lowtide.train.parallel import correct_fsdp2, let_first_report, variables

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="ranks on CPUs use gloo")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return runs(tmp_path_factory.getbasetemp())


def steps_logged(output: Path) -> int:
    file = output / "log.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return max((json.loads(line)["step"] for line in lines), default=0)


def long_run(made: Runs, kind: str, output: Path, *more: object) -> list[object]:
    return [*made.arguments(kind), "--max-steps", 10_000, "--per_device_train_batch_size", 2, "--output", output, *more]


def goes_on(made: Runs, kind: str, output: Path, step: int, engine: str) -> None:
    """Resume a run for a step: DDP's on one process."""
    ranks = 1 if engine == "ddp" else 2
    ended = made.resume(output, ranks, "--max-steps", step + 1, engine=engine)
    assert ended.statuses == [0] * ranks, ended
    assert not (output / ".incoming").exists()
    losses = history(output, step + 1)["loss"]
    assert len(losses) == step + 1
    assert losses[0] == pytest.approx(history(made.of(kind, "one")[0])["loss"][0], rel=REORDERED)


@pytest.mark.parametrize("rank", [0, 1])
def test_other_ranks_let_the_first_print_an_error(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as a launcher needs to see that it has ended; the ranks of the other tests see it at once."""
    waits: list[float] = []
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr("lowtide.train.parallel.time.sleep", waits.append)
    let_first_report()
    assert waits == [3.0] * rank


@pytest.mark.parametrize(
    ("kind", "engine", "number", "whom"),
    [("pretrain", "ddp", signal.SIGTERM, "all, twice"), ("tune", "fsdp2", signal.SIGINT, "one")],
)
def test_a_signal_to_any_rank_ends_all_with_a_checkpoint(
    kind: str, engine: str, number: int, whom: str, made: Runs, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    made.ranks.start(2, *long_run(made, kind, output, "--save_steps", 10_000, "--parallel", engine))
    wait_for(lambda: steps_logged(output) >= 2)
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
    (checkpoint,) = checkpoints(output)
    step = int(checkpoint.name.rpartition("-")[2])
    assert steps_logged(output) == step >= 2
    name = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}[signal.Signals(number)]
    resume = f"Resume with: lowtide train --resume_from_checkpoint true --output {output}"
    assert ended.err == [f"lowtide train: ended by {name} after step {step}. {resume}\n", ""]
    assert not (output / "model").exists()
    goes_on(made, kind, output, step, engine)


def test_a_lost_rank_is_one_error(made: Runs, tmp_path: Path) -> None:
    output = tmp_path / "run"
    made.ranks.start(2, *long_run(made, "tune", output, "--save_steps", 10_000))
    wait_for(lambda: steps_logged(output) >= 1)
    os.kill(made.ranks.pids()[1], signal.SIGKILL)
    ended = made.ranks.end()
    assert ended.statuses == [2, -9], ended
    assert ended.err[0].startswith("lowtide train: another process has ended or does not answer ("), ended
    assert ended.err[0].count("\n") == 1, ended


WRONG: dict[str, tuple[list[str], dict[str, str], list[str]]] = {
    "option": (["--lrr", "1"], {}, ["--lrr", "--lr"]),
    "data": (["--data", "bad.jsonl"], {}, ["bad.jsonl", "line 7"]),
    "model": (["--model", "cut"], {}, ["model", "cut"]),
    "output": (["--output", "."], {}, ["output", "a folder that is new or empty"]),
    "two engines": ([], {"ACCELERATE_USE_DEEPSPEED": "true"}, ["parallel", "ACCELERATE_USE_DEEPSPEED=true"]),
    "an unknown engine": ([], {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, ["parallel", "DDP, FSDP2"]),
    "two precisions": ([], {"ACCELERATE_MIXED_PRECISION": "bf16"}, ["mixed_precision", "expected 'no'"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_for_all_is_one_error(name: str, made: Runs, tmp_path: Path) -> None:
    rows = (made.folder / "rows.jsonl").read_text().splitlines()
    (tmp_path / "bad.jsonl").write_text("\n".join([*rows[:6], '{"prompt": 1, "completion": [2]}', *rows[6:]]))
    shutil.copytree(made.folder / "pretrained", tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    options, environment, words = WRONG[name]
    options = [str(tmp_path / word) if word in ("bad.jsonl", "cut", ".") else word for word in options]
    given = ["--parallel", "fsdp2", "--output", tmp_path / "run", *options]
    ended = made.ranks(2, *made.arguments("tune"), *given, **environment)
    assert ended.statuses == [2, 2], ended
    assert ended.err[0].count("\n") == 1, ended
    assert all(word in ended.err[0] for word in words), ended
    assert not (tmp_path / "run").exists()


def test_fsdp_in_its_first_version_is_refused() -> None:
    state = SimpleNamespace(distributed_type=None, fsdp_plugin=SimpleNamespace(fsdp_version=1))
    with pytest.raises(ValueError, match="parallel: expected FSDP in its second version, got 1"):
        correct_fsdp2(SimpleNamespace(state=state))


def test_ranks_need_the_name_of_a_folder(made: Runs) -> None:
    ended = made.ranks(2, *made.arguments("pretrain"))
    assert ended.statuses == [2, 2]
    assert "output: expected a folder that all ranks share" in ended.err[0]


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="DeepSpeed is installed")
def test_without_deepspeed_is_one_error(made: Runs, tmp_path: Path) -> None:
    ended = made.ranks(2, *made.arguments("tune"), "--parallel", "zero3", "--output", tmp_path / "run")
    assert ended.statuses == [2, 2]
    assert ended.err[0].count("\n") == 1
    assert "pip install deepspeed" in ended.err[0]
    assert not (tmp_path / "run").exists()


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
    arguments, config, _ = _validate_launch_command(arguments)
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(config.deepspeed_config)  # as launch_command does
        env = prepare_deepspeed_cmd_env(arguments)[1]
    else:
        env = prepare_multi_gpu_env(arguments)
    own = variables(name)
    assert own.items() <= env.items()
    assert bool(own) == (name != "ddp")
    assert env["ACCELERATE_MIXED_PRECISION"] == "no"


@pytest.mark.slow
def test_accelerate_launch_and_a_killed_rank(made: Runs, tmp_path: Path) -> None:
    """torchrun, which accelerate starts, ends the others; killed while it saves, more likely than not: it always does.

    The ranks resume.
    """
    file, output = tmp_path / "fsdp2.yaml", tmp_path / "run"
    assert main(["train", "--parallel", "fsdp2", "--write-launch-file", str(file)]) == 0
    script = tmp_path / "launch.py"  # the launcher is forked, and starts its ranks itself
    script.write_text("from accelerate.commands.launch import main\nmain()\n")
    launch = ["--config_file", file, "--num_processes", 2, "-m", "lowtide"]
    made.ranks.start(1, *launch, *long_run(made, "pretrain", output, "--save_steps", 1), script=script)
    wait_for(lambda: checkpoints(output))
    children = psutil.Process(made.ranks.pids()[0]).children()
    assert len(children) == 2
    children[1].send_signal(signal.SIGKILL)
    ended = made.ranks.end()
    assert ended.statuses != [0]
    assert not any(child.is_running() for child in children)
    assert "Signal 9" in ended.err[0]
    newest = checkpoints(output)[-1]
    assert (newest / "pytorch_model_fsdp.bin").is_file(), "FSDP2 was taken"
    step = int(newest.name.rpartition("-")[2])
    goes_on(made, "pretrain", output, step, "fsdp2")
