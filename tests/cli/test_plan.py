"""``lowtide plan`` on a laptop: no GPU, no weights."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lowtide.cli import main
from lowtide.plan import Adapters, plan_memory
from lowtide.plan.config import read_settings, with_layers
from lowtide.train.shapes import SHAPES
from promises import promise

pytestmark = promise("commands")
SMALL = ["plan", "--model", "llama-3.2-1b", "--layers", "2", "--seq-len", "4096", "--gpu", "h100"]
FEW = {**SHAPES["llama-3.2-1b"], "num_hidden_layers": 2}
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")


def as_json(capsys: pytest.CaptureFixture[str], *options: str, command: list[str] = SMALL) -> dict[str, Any]:
    """The plan that a command writes to the standard output, and nothing else there."""
    assert main([*command, *options, "--json", "-"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_the_plan_is_printed_and_its_file_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    assert main([*SMALL, "--budget", "10GiB", "--json", str(file)]) == 0
    plan = plan_memory(FEW, 4096, 1, 10, device="h100")
    assert capsys.readouterr().out == f"{plan}\nwritten: {file}\n"
    assert json.loads(file.read_text())["choice"]["seconds"] == plan.seconds


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (
            "--budget 24GB --host 2GiB --batch-size 4 --keep-gradients --optimizer adamw-8bit --dtype bfloat16",
            {"batch_size": 4, "budget_gib": "24GB", "host_gib": 2, "optimizer": "adamw-8bit",
             "keep_gradients": True, "dtype": "bfloat16"},
        ),
        (
            "--lora-rank 16 --lora-targets q_proj v_proj --attention-mask --no-fused-mlp",
            {"adapters": Adapters(16, ("q_proj", "v_proj")), "attention_mask": True, "fused_mlp": False},
        ),
        ("--gpus 4 --parallel ddp --link 50GB --no-autocast",
         {"gpus": 4, "parallel": "ddp", "link": "50GB", "autocast": False}),
    ],
)  # fmt: skip
def test_json_is_the_plan_of_the_same_arguments(
    options: str, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_memory(FEW, 4096, **{"device": "h100", **settings})
    assert as_json(capsys, *options.split()) == json.loads(json.dumps(plan.to_dict()))


def test_a_run_is_planned_as_its_config_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is given beside it counts more."""
    (tmp_path / "config.json").write_text(json.dumps(FEW))
    run = {"model_name_or_path": str(tmp_path), "max_length": 512, "use_peft": True, "lora_r": 4, "load_in_4bit": True}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(run))
    assert main(["plan", str(file), "--gpu", "l4", "--batch-size", "2"]) == 0
    answer = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert answer[0].startswith("bfloat16 weights, layers in 4 bits: peak ")
    assert "2 x 512 tokens, adamw, LoRA of rank 4 on peft's own projections, on l4" in answer[1]
    assert answer[2].startswith("with gradient_checkpointing, as the run has it: ")
    assert answer[2].endswith("2 x input/0")


def test_a_config_is_read_and_its_layers_counted_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also one that transformers has written, with numbers that JSON lacks."""
    sizes = {"hidden_size": 48, "num_heads": 8, "head_dim": 12, "vocab_size": 131, "num_hidden_layers": 3}
    settings = {"model_type": "mamba2", **sizes, "time_step_limit": [0.0, {"__float__": "Infinity"}]}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    run = ["plan", "--model", str(tmp_path), "--seq-len", "64", "--gpu", "l4", "--layers", "2"]
    report = as_json(capsys, command=run)
    assert report["model"]["model_class"] == "Mamba2ForCausalLM"
    assert len(report["model"]["kind_of"]) == report["model"]["layers"] == 2


@pytest.mark.slow
def test_every_named_shape_is_planned() -> None:
    for settings in SHAPES.values():
        plan_memory(with_layers(read_settings(settings), 2), 64, 1, device="b200")


@promise("errors")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("--budget '40 parsecs'", "plan: --budget: expected a size such as 40GiB"),
        ("--budget 1GiB", "plan: --budget: expected at least"),
        ("--gpu h10", "got 'h10'. Did you mean h100?"),
        ("--model .", "model: expected a folder with a config.json, a config as a .json file, or"),
        ("--model lama", "got 'lama'. Did you mean llama-3.2-1b?"),
        ("--layers 0", "layers: expected at least 1"),
        ("--seq-len 0", "--seq-len: expected at least 1"),
        ("--optimizer lion", "plan: --optimizer: expected one of adamw"),
        ("--lora-rank 0", "plan: --lora-rank: expected at least 1"),
        ("--lora-targets q_proj", "plan: --lora-targets: expected --lora-rank beside it, got none."),
        ("--lora-rank 4 --lora-targets lm_head", "plan: --lora-targets: expected names of the layers' projections"),
        ("--gpus 2 --check", "plan: --check: expected a plan of a patched model, without a mask, on one GPU"),
        ("--budget 2GiB --dtype bfloat16 --gpus 2", "--gpus 16 fits"),
        ("--gpus 2 --host 8GiB", "plan: --host: expected 0: offloading is planned for one GPU"),
        ("--parallel zero3", "plan: --parallel: expected --gpus beside it, got none."),
        ("--check --json nowhere/x", "plan: --json: expected a file in a folder that exists, got nowhere/x.\n"),
        ("nowhere.yaml", "plan: run: expected a config in YAML or JSON, got nowhere.yaml (No such file or directory)"),
        ("qwen3-8b", "plan: run: expected a YAML file, got qwen3-8b. Give --model qwen3-8b."),
        pytest.param("--check", "check: expected a CUDA GPU", marks=NO_GPU),
    ],
)
def test_what_cannot_be_is_one_line(
    change: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        status = main([*SMALL, *shlex.split(change)])
    except SystemExit as ended:
        status = int(str(ended.code))
    out, err = capsys.readouterr()
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith("lowtide plan: ")
    assert said in err
    assert out == "" or change == "--check"  # a file that cannot be is said before anything runs
