"""Options: lowtide's, TRL's and transformers' are one list, read from the libraries' sources before any is imported."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lowtide.cli import _parser
from lowtide.cli.train import _config
from lowtide.errors import ArgumentValueError
from lowtide.train import settings
from lowtide.train.config import TrainConfig
from lowtide.train.options import ALIASES, PRETRAINING, names, parse
from lowtide.train.settings import trainer_settings
from train.conftest import Run

trl = pytest.importorskip("trl")

# Arguments, whether they are of a fine-tuning, and words of the one line that is printed: without importing anything.
WRONG: dict[str, tuple[list[str], list[str]]] = {
    "misspelled": (["--packng"], ["--packng", "Did you mean --packing?"]),
    "misspelled setting": (["--memory_bugdet", "4GiB"], ["Did you mean --memory_budget?"]),
    "neither library's": (["--frobnicate"], ["--frobnicate: expected an option of lowtide train, TRL's SFTConfig or"]),
    "no option": (["."], ["arguments", "'.'"]),
    "TRL's from random weights": (["--loss_type", "dft"], ["--loss_type", "got TRL's", "--model to fine-tune"]),
    "two names": (["--max_length", "8", "--seq-len", "9"], ["one of --max_length and --seq-len, got both"]),
    "no number": (["--learning_rate", "high"], ["lr: expected a number, got 'high'"]),
    "no file": (["--config", "no.yaml"], ["--config", "no.yaml", "No such file"]),
    "no mapping": (["--config", "list.yaml"], ["--config", "something else in list.yaml"]),
    "unknown in a file": (["--config", "unknown.yaml"], ["Did you mean --packing?"]),
    "no model": (["--model", "meta-llama/Nothing"], ["model", "hf download meta-llama/Nothing"]),
    "no data": (["--data", "nowhere"], ["data", "nowhere"]),
    "no rate": (["--lr", "-1"], ["lr: expected a number above 0, got -1.0"]),
    "json alone": (["--json", "x.json"], ["json", "--compare"]),
    "compare and resume": (["--compare", "--resume_from_checkpoint", "true"], ["compare", "--resume_from_checkpoint"]),
    "columns": (["--columns", "promt=q"], ["columns: expected FORMAT=COLUMN", "prompt, completion", "('promt=q',)"]),
}
FILES = {
    "list.yaml": "- 1",
    "unknown.yaml": "packng: true",
    "run.yaml": "model: MODEL\nlearning_rate: 1e-5\nmax-length: 64\ndata: [text.txt]\npatch: false\nseed: 3\n"
    "lr_scheduler_kwargs: {min_lr: 0.5}\nlora_target_modules: [q_proj, v_proj]\npacking: true\neval_steps:\n",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files of options, and no cache of the Hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "text.txt").write_text("words\n")
    return tmp_path


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_option_is_one_line_and_status_2(case: str, lowtide: Run) -> None:
    words, named = WRONG[case]
    status, out, err = lowtide("train", *words)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("lowtide train: ")
    assert not [word for word in named if word not in err], err


def test_none_of_them_imports_torch() -> None:
    code = """
import contextlib, io, json, sys
from lowtide.cli import main
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as err:
        assert main(["train", *words]) == 2
    heavy = {"torch", "transformers", "trl", "datasets", "accelerate", "rich"} & set(sys.modules)
    assert err.getvalue() and not heavy, (words, heavy)
"""
    words = [words for words, _ in WRONG.values()]
    ended = subprocess.run([sys.executable, "-c", code, json.dumps(words)], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_names_are_those_of_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    def fields(*classes: Any) -> set[str]:
        return {field.name for one in classes for field in dataclasses.fields(one)}

    assert names(fine_tunes=True) == fields(trl.SFTConfig, trl.ModelConfig)
    assert names(fine_tunes=False) == fields(transformers.TrainingArguments) | {*PRETRAINING}
    assert fields(trl.SFTConfig, trl.ModelConfig) >= {*PRETRAINING, *ALIASES} - {"dataset_name"}  # of TRL's scripts
    names.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)  # as where they lie in an archive
    assert parse({}, ["--packng"]) == ({}, {"packng": True}), "TRL itself refuses it later"
    names.cache_clear()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--gradient-accumulation-steps", "4"], {"gradient_accumulation_steps": "4"}),
        (["--gradient_accumulation_steps=4"], {"gradient_accumulation_steps": "4"}),
        (["--packing", "--seed", "-1"], {"packing": True, "seed": "-1"}),
        (["--lora_target_modules", "q_proj", "v_proj", "--use-peft"],
         {"lora_target_modules": ["q_proj", "v_proj"], "use_peft": True}),
        (["--run_name=a=b"], {"run_name": "a=b"}),
        (["--seed", "1", "--seed", "2"], {"seed": "2"}),
        (["--no_dataloader_pin_memory"], {"no_dataloader_pin_memory": True}),
    ],
)  # fmt: skip
def test_options_are_read_with_dashes_underscores_and_equals_signs(words: list[str], expected: dict[str, Any]) -> None:
    assert parse({}, words) == ({}, expected)


def test_a_file_has_settings_and_options_that_the_command_line_overrides(folder: Path, pretrained: Path) -> None:
    (folder / "run.yaml").write_text((folder / "run.yaml").read_text().replace("MODEL", str(pretrained)))

    def config(*words: str) -> TrainConfig:
        arguments, unknown = _parser().parse_known_args(["train", "--config", "run.yaml", *words])
        arguments.unknown = unknown
        own = {name: value for name, value in vars(arguments).items() if name in TrainConfig.__dataclass_fields__}
        return _config(own, arguments)

    alone = config()
    assert (alone.model, alone.lr, alone.seq_len, alone.data) == (str(pretrained), 1e-5, 64, ("text.txt",))
    assert (alone.patch, alone.options["seed"], "eval_steps" in alone.options) == (False, 3, False)
    for words in (["--lr", "2.0"], ["--learning_rate", "2"], ["--learning-rate=2"]):
        assert config(*words).lr == 2
    assert config("--max_length", "5", "--seed", "4").options["seed"] == "4"
    assert config("--seq-len", "5").seq_len == 5
    settings = trainer_settings(alone, folder, save=True)
    assert (settings.args.lr_scheduler_kwargs, settings.args.seed) == ({"min_lr": 0.5}, 3)
    assert (settings.args.packing, settings.args.max_length, settings.args.learning_rate) == (True, 64, 1e-5)
    assert settings.model.lora_target_modules == ["q_proj", "v_proj"]


@pytest.mark.parametrize(
    ("options", "launched", "expected"),
    [
        ({}, False, True),
        ({"dtype": "bfloat16"}, False, False),
        ({"dtype": "bfloat16"}, True, True),
        ({"dtype": "bfloat16", "deepspeed": "ds.json"}, False, True),
        ({"dtype": "bfloat16", "fp16": True}, True, False),
    ],
)
def test_bf16_is_on_beside_bfloat16_weights_under_deepspeed(
    options: dict[str, Any], launched: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", str(launched).lower())
    config = TrainConfig(model="lowtide-small", options=options)
    assert settings._defaults(config, options, text=False)["bf16"] is expected


def test_defaults_are_the_libraries_except_those_that_help_names(pretrained: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # TRL's own defaults
        dull = {
            "report_to": "none",
            "disable_tqdm": False,
            "use_cpu": not torch.accelerator.is_available(),
            "bf16": False,
        }
        stock = [one(str(tmp_path), **dull) for one in (trl.SFTConfig, transformers.TrainingArguments)]

    def changed(model: object, *, text: bool = False, **options: Any) -> dict[str, Any]:
        """What the arguments of a run have that its library's do not."""
        config = TrainConfig(model=str(model), options=options)
        args, beside = trainer_settings(config, tmp_path, save=True, text=text).args, stock[not config.fine_tunes]
        found = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
        return {name: value for name, value in found.items() if value != getattr(beside, name)}

    both = {"logging_steps": 1, "logging_first_step": True, "logging_nan_inf_filter": False, "save_steps": 100}
    both |= {"eval_steps": 100, "log_level_replica": "error"}
    both |= {"disable_tqdm": True, "log_on_each_node": False, "ddp_find_unused_parameters": False}
    both |= {"bf16": True} if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else {}
    on = [name for name in ("gradient_checkpointing", "activation_checkpointing") if getattr(stock[0], name, None)]
    assert on, "TRL sets the first, and newer versions of transformers the second with it"
    tuning = {**both, **dict.fromkeys(on, False)}
    assert changed(pretrained) == tuning
    assert changed(pretrained, text=True) == {**tuning, "packing": True, "packing_strategy": "wrapped"}
    assert changed(pretrained, save_steps="7", disable_tqdm="false").get("save_steps") == 7
    schedule = {"learning_rate": 2e-3, "adam_beta2": 0.95, "lr_scheduler_type": "cosine"}
    assert changed("lowtide-small") == {**both, **schedule, "max_steps": 500, "warmup_steps": 50}
    assert changed("lowtide-small", max_steps="15")["warmup_steps"] == 2
    epochs = {"num_train_epochs": 2, "warmup_steps": 0.1}
    assert changed("lowtide-small", num_train_epochs="2") == {**both, **schedule, **epochs}


@pytest.mark.parametrize(
    ("fine_tunes", "given", "named"),
    [
        (True, {"optim": "none"}, ["optim", "none"]),
        (True, {"packing": "perhaps"}, ["--packing"]),
        (False, {"seed": "many"}, ["--seed", "many"]),
        (True, {"eval_strategy": "steps", "save_strategy": "epoch", "load_best_model_at_end": "true"}, ["strategy"]),
        (True, {"dataset_kwargs": "{}"}, ["--dataset_kwargs", "--columns"]),
        (False, {"use_liger_kernel": "true"}, ["--use_liger_kernel", "--no-patch"]),
        (False, {"adam_beta1": None, "lr_scheduler_type": "cosin"}, ["lr_scheduler_type", "cosin"]),
        (True, {"load_in_4bit": "true", "dtype": "auto"}, ["--dtype", "got auto", "Give --dtype bfloat16"]),
    ],
)
def test_a_value_that_a_library_refuses_is_one_error(
    fine_tunes: bool, given: dict[str, Any], named: list[str], pretrained: Path, tmp_path: Path
) -> None:
    config = TrainConfig(model=str(pretrained) if fine_tunes else "lowtide-small", options=given)
    with pytest.raises(ArgumentValueError) as error:
        trainer_settings(config, tmp_path, save=True)
    assert not [word for word in named if word not in str(error.value)], error.value


def test_a_config_survives_json() -> None:
    config = TrainConfig(data=("a", "b"), lr=0.5, options={"seed": "1", "lora_target_modules": ["a"], "x": {"a": 1}})
    assert TrainConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    assert TrainConfig.from_json({"lr": 1.0, "of_another_version": 2}) == TrainConfig(lr=1.0)
