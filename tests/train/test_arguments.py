"""The command line: TRL's options under their own names, and what is wrong with one before anything is loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowtide.cli import main
from lowtide.errors import ArgumentValueError
from lowtide.train.arguments import Arguments, RunArguments, parse
from promises import promise
from train.conftest import Files, words

pytestmark = promise("commands")


def test_each_option_of_trl_sft_is_one_here_and_keeps_its_default(files: Files) -> None:
    from trl.scripts.sft import make_parser

    known = {action.dest for action in make_parser()._actions} - {"help"}
    found = parse(files.tune())
    ours = {name for part in (found.script, found.training, found.model, found.mixture) for name in vars(part)}
    assert known <= ours
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        stock = make_parser().parse_args_and_config([*files.tune()[:-2], "--bf16=false", "--use_cpu"])
    changed = {
        name
        for part, own in zip(stock, (found.script, found.training, found.model, found.mixture), strict=True)
        for name in vars(part)
        if name in known and getattr(part, name) != getattr(own, name)
    }
    assert changed <= {"lora_dropout", "logging_nan_inf_filter", "ddp_find_unused_parameters", "disable_tqdm"}, changed


def test_a_file_has_options_that_the_command_line_overrides(files: Files, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("learning_rate: 3e-4\nlora_target_modules: [q_proj, v_proj]\nheld_out: 5\nmax_length: 77\n")
    tuned = parse([*words(config=config, max_length=64), *files.tune()[:2]])
    assert (tuned.training.learning_rate, tuned.training.max_length, tuned.run.held_out) == (3e-4, 64, 5)
    assert tuned.model.lora_target_modules == ["q_proj", "v_proj"]
    config.write_text("learning_rate: 3e-4\nmax_length: 77\nmax_steps: 9\n")
    scratch = parse(words(config=config, max_length=64))
    assert (scratch.training.learning_rate, scratch.training.max_length, scratch.training.max_steps) == (3e-4, 64, 9)


def test_random_weights_have_a_schedule_of_their_own() -> None:
    args = parse([]).training
    assert (args.max_steps, args.lr_scheduler_type, args.learning_rate) == (500, "cosine", 2e-3)
    assert args.get_warmup_steps(500) == 50
    epochs = parse(["--num_train_epochs", "2"]).training
    assert (epochs.max_steps, epochs.num_train_epochs) == (-1, 2)


def test_a_run_is_resumed_by_its_own_command() -> None:
    resuming = ("--resume_from_checkpoint", "auto")
    for given in (("--output_dir", "a b"), ("--output_dir", "a b", *resuming)):
        found = Arguments(run=RunArguments(), training=None, model=None, words=given)
        assert found.resume == "lowtide train --output_dir 'a b' --resume_from_checkpoint auto"


@pytest.mark.parametrize("in_file", [False, True])
def test_accelerate_starts_processes_that_know_the_whole_command(
    in_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They name it where a run ends early. Its configurations are TRL's."""
    started: list[Any] = []
    monkeypatch.setattr("accelerate.commands.launch.launch_command", started.append)
    monkeypatch.setattr("os.environ", {**os.environ})
    (tmp_path / "run.yaml").write_text("accelerate_config: fsdp2\nnum_processes: 2\n")
    given = words(config=tmp_path / "run.yaml") if in_file else words(accelerate_config="fsdp2", num_processes=2)
    assert main(["train", *given]) == 0
    (launch,) = started
    assert (Path(launch.config_file).name, launch.num_processes) == ("fsdp2.yaml", 2)
    assert Path(launch.config_file).is_file()
    assert [launch.training_script, *launch.training_script_args] == ["lowtide", "train", *given]
    assert parse(given).resume == f"lowtide train {' '.join(given)} --resume_from_checkpoint auto"


# What is given beside a run's usual options, whether it fine-tunes, and what the error says.
WRONG = {
    "a name that is near": ("tune", ["--weight_dacay", "0.1"], ["--weight_dacay", "Did you mean --weight_decay?"]),
    "TRL's, of random weights": ("scratch", ["--packing"], ["--packing", "expected an option"]),
    "no number": ("tune", ["--learning_rate", "fast"], ["--learning_rate", "fast"]),
    "no choice": ("tune", ["--packing_strategy", "tight"], ["--packing_strategy", "bfd"]),
    "no batch": ("scratch", ["--per_device_train_batch_size", "0"], ["at least 1, got 0"]),
    "a config": ("tune", ["--config", "none.yaml"], ["--config", "none.yaml (No such file or directory)"]),
    "data": ("tune", ["--dataset_name", "{folder}/chat.jsonl"], ["--dataset_name", "Did you mean chats.jsonl?"]),
    "a model": ("scratch", ["--model_name_or_path", "llama-3.2-1"], ["Did you mean llama-3.2-1b?"]),
    "the Hub's": ("scratch", ["--model_name_or_path", "meta/llama"], ["'meta/llama'", "hf download meta/llama"]),
    "held out": ("tune", ["--held_out", "0"], ["--held-out", "at least 1"]),
    "a host alone": ("tune", ["--host_budget", "1GiB"], ["--host-budget", "a memory_budget beside it"]),
    "a stock budget": ("tune", ["--memory_budget", "1GiB", "--no_patch"], ["--no-patch", "no --memory-budget"]),
    "one token": ("scratch", ["--max_length", "1"], ["--max_length", "at least 2"]),
    "a launch": ("scratch", ["--accelerate_config", "zero4"], ["--accelerate_config", "zero3", "got zero4"]),
    "figures of none": ("scratch", ["--json", "x.json"], ["--json", "--compare beside it"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_option_is_one_line(case: str, files: Files, refused: Callable[..., str]) -> None:
    kind, more, says = WRONG[case]
    given = [word.replace("{folder}", str(files.chats.parent)) for word in more]
    line = refused(*getattr(files, kind)(output_dir="nowhere"), *given)
    assert all(part in line for part in says), line
    assert not Path("nowhere").exists()


@pytest.mark.parametrize(
    ("option", "package"), [("--load_in_4bit", "bitsandbytes"), ("--use_peft", "peft"), ("--report_to=wandb", "wandb")]
)
def test_a_package_that_is_missing_is_named(
    option: str, package: str, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowtide.train.arguments.find_spec", lambda name: None if name == package else True)
    says = f"{option.partition('=')[0]}.*expected {package} to be installed.*pip install {package}"
    with pytest.raises(ArgumentValueError, match=says):
        parse([*files.tune(output_dir="x"), option])


def test_a_models_name_is_looked_up_in_the_local_cache_alone(
    files: Files, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(*_: str, local_files_only: bool) -> str:
        raise OSError(asked.append((local_files_only, os.environ.get("HF_HUB_OFFLINE"))))

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    wanted = files.tune(model_name_or_path="nobody/nothing", output_dir="nowhere")
    refused(*wanted)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    refused(*wanted)
    assert asked == [(True, "1"), (False, "0")]


def test_what_is_not_there_is_said_before_a_library_is_loaded(files: Files) -> None:
    code = (
        "import json, sys\n"
        "from lowtide.cli import main\n"
        "status = [main(['train', *words]) for words in json.loads(sys.argv[1])]\n"
        "assert status == [2] * 3 and not {'torch', 'transformers'} & set(sys.modules), status\n"
    )
    wrong = [["--config", "none"], ["--dataset_name", "none.txt"], ["--model_name_or_path", "none/"]]
    ended = subprocess.run([sys.executable, "-c", code, json.dumps(wrong)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
