"""``lowtide plan`` on a laptop: no GPU, no weights."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.cli import main
from lowtide.plan import Adapters, plan_memory
from lowtide.plan.gpus import GPUS
from lowtide.plan.settings import read_settings, with_layers
from lowtide.train.shapes import SHAPES

SMALL = ["plan", "--model", "llama-3.2-1b", "--seq-len", "4096", "--gpu", "h100"]
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")


def as_json(capsys: pytest.CaptureFixture[str], *options: str, command: list[str] = SMALL) -> dict[str, Any]:
    """The plan that a command writes to the standard output, and nothing else there."""
    assert main([*command, *options, "--json", "-"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--budget", "10GiB"]) == 0
    out = capsys.readouterr().out
    assert out == f"{plan_memory(SHAPES['llama-3.2-1b'], 4096, 1, 10, device='h100')}\n"
    ladder = next(block for block in out.split("\n\n") if block.startswith("a layer saves"))
    for word in ("all:", "(/0)", "(/1)", "attention:", "input:"):
        assert word in ladder.split("input/1")[-1], word
    assert "\n\nin a script that has the model:\n\nimport lowtide\n" in out


@pytest.mark.parametrize(
    ("options", "arguments", "settings"),
    [
        (
            "--budget 24GB --host 2GiB --batch-size 4 --grad-accum 2 --optimizer adamw-8bit",
            (4, 24e9 / 2**30, 2),
            {"optimizer": "adamw-8bit", "keep_gradients": True},
        ),
        (
            "--lora-rank 16 --lora-targets q_proj v_proj --attention-mask",
            (1,),
            {"adapters": Adapters(16, ("q_proj", "v_proj")), "attention_mask": True},
        ),
        ("--autocast --no-fused-mlp", (1,), {"autocast": True, "fused_mlp": False}),
        (
            "--gpus 4 --parallel fsdp2 --link 50GB --autocast",
            (1,),
            {"gpus": 4, "parallel": "fsdp2", "link": "50GB", "autocast": True},
        ),
    ],
)
def test_json_is_the_plan_of_the_same_arguments(
    options: str, arguments: tuple[Any, ...], settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_memory(SHAPES["llama-3.2-1b"], 4096, *arguments, **{"device": "h100", **settings})
    assert as_json(capsys, *options.split()) == json.loads(json.dumps(plan.to_dict()))


def test_adapters_and_a_mask_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    notes = as_json(capsys, *["--lora-rank", "16", "--lora-targets", "q_proj", "v_proj", "--attention-mask"])["notes"]
    numbers = 16 * (16 * (2048 + 2048) + 16 * (2048 + 512))
    assert f"{numbers:,} numbers of adapters are trained, rank 16 on q_proj v_proj" in " ".join(notes)
    assert any("mask of 0.0312 GiB" in note for note in notes)
    whole = as_json(capsys, "--lora-rank", "16", command=[*SMALL[:2], "llama-3-8b", *SMALL[3:]])["notes"]
    assert "41,943,040 numbers of adapters are trained" in " ".join(whole), "as peft counts them"


def test_a_config_is_read_and_its_layers_counted_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["gemma-2-2b"]))
    run = ["plan", "--model", str(tmp_path), "--seq-len", "512", "--gpu", "a100-80gb", "--layers", "3"]
    model = as_json(capsys, command=run)["model"]
    assert model["layers"] == len(model["windows"]) == 3


def test_every_named_shape_is_planned() -> None:
    for settings in SHAPES.values():
        plan_memory(with_layers(read_settings(settings), 2), 64, 1, device="b200")


@pytest.mark.filterwarnings("ignore")  # what transformers says of its own code
def test_a_type_of_any_folder_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"model_type": "olmo2", "vocab_size": 131, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    sizes = {"hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 6}
    (tmp_path / "config.json").write_text(json.dumps({**settings, **sizes, "tie_word_embeddings": False}))
    run = ["plan", "--model", str(tmp_path), "--seq-len", "64", "--gpu", "l4", "--budget", "0.25GiB", "--layers", "2"]
    report = as_json(capsys, command=run)
    assert report["model"]["model_class"] == "Olmo2ForCausalLM"
    assert len(report["model"]["kind_of"]) == report["model"]["layers"] == 2
    assert [cost["policy"] for cost in report["ladder"]][:2] == ["all/0", "all/1"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("--budget '40 parsecs'", "plan: budget: expected a size such as 40GiB"),
        ("--host -1", "plan: host: expected a size such as"),
        ("--budget 1GiB", "plan: budget, in GiB: expected at least"),
        ("--gpu abacus", "plan: gpu: expected"),
        ("--gpu h10", "got 'h10'. Did you mean h100?"),
        ("--model nobody", "model: expected a folder with a config.json"),
        ("--model .", "model: expected a folder with a config.json, a config as a .json file, or"),
        ("--model .", "got ., a folder without one. Models are not downloaded"),
        ("--model qwen3", "got 'qwen3'. Did you mean qwen3-"),
        ("--model lama", "got 'lama'. Did you mean llama-3.2-1b?"),
        ("--model ''", "got ''."),
        ("--model ~nobody-here/x", "got '~nobody-here/x'."),
        ("--layers 0", "layers: expected at least 1"),
        ("--grad-accum 0", "grad_accum: expected at least 1"),
        ("--seq-len 0", "seq_len: expected at least 1"),
        ("--workspace-mib -3", "workspace_mib: expected"),
        ("--optimizer lion", "invalid choice"),
        ("--compile-layers=some", "--compile-layers: ignored explicit argument 'some'"),
        ("--lora-rank 0", "plan: lora_rank: expected at least 1"),
        ("--lora-targets q_proj", "plan: lora_targets: expected --lora-rank beside it, got none."),
        ("--lora-rank 4 --lora-targets lm_head", "plan: lora_targets: expected names of the layers' projections"),
        (
            "--lora-rank 4 --load-in-4bit --check",
            "check: expected a plan of weights in 16 or 32 bits, patched, without a mask, on one GPU",
        ),
        ("--attention-mask --check", "without a mask, on one GPU, got --attention-mask"),
        ("--no-fused-mlp --check", "without a mask, on one GPU, got --no-fused-mlp"),
        ("--gpus 2 --parallel fsdp2 --check", "without a mask, on one GPU, got --gpus"),
        ("--gpus 2 --parallel pp", "argument --parallel: invalid choice: 'pp' (choose from"),
        ("--gpus 1 --parallel zero3", "plan: parallel: expected --gpus above 1 beside it, got 1."),
        ("--gpus 2 --parallel fsdp2 --host 8GiB", "plan: host, in GiB: expected 0: offloading is planned for one GPU"),
        ("--gpus 2 --parallel fsdp2 --lora-rank 8", "plan: lora_rank: expected None: adapters are planned for one GPU"),
        ("--parallel zero3", "plan: parallel: expected --gpus above 1 beside it, got none."),
        ("--link 50GB", "plan: link: expected --gpus above 1 beside it, got none."),
        ("--gpus 2 --parallel fsdp2 --link fast", "plan: link: expected a size such as"),
        ("--check --json /nowhere/x", "plan: json: expected a file in a folder that exists, got /nowhere/x.\n"),
        ("--check --png /nowhere/x", "plan: png: expected a file in a folder that exists, got /nowhere/x.\n"),
        ("--check --json .", "plan: json: expected a file, got the folder ..\n"),
        ("--check --png .", "plan: png: expected a file, got the folder ..\n"),
        ("--check --json x --png ./x", "plan: png: expected another file than json's, got x.\n"),
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
    assert status == 2
    assert err.count("\n") == 1
    assert err.startswith("lowtide plan: ")
    assert said in err
    assert out == "" or change == "--check"  # a file that cannot be is said before anything runs


def test_help_names_gpus_and_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    out = "".join(capsys.readouterr().out.split())  # lines are broken at hyphens too
    assert all(name in out for name in [*GPUS, *SHAPES])
