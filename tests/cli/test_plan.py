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
from promises import promise

pytestmark = promise("commands")

SMALL = ["plan", "--model", "llama-3.2-1b", "--layers", "2", "--seq-len", "4096", "--gpu", "h100"]
TWO = with_layers(read_settings(SHAPES["llama-3.2-1b"]), 2)
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")


def as_json(capsys: pytest.CaptureFixture[str], *options: str, command: list[str] = SMALL) -> dict[str, Any]:
    """The plan that a command writes to the standard output, and nothing else there."""
    assert main([*command, *options, "--json", "-"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--budget", "10GiB"]) == 0
    out = capsys.readouterr().out
    assert out == f"{plan_memory(TWO, 4096, 1, 10, device='h100')}\n"
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
        ("--no-autocast --no-fused-mlp", (1,), {"autocast": False, "fused_mlp": False}),
        ("--gpus 4 --parallel fsdp2 --link 50GB", (1,), {"gpus": 4, "parallel": "fsdp2", "link": "50GB"}),
    ],
)
def test_json_is_the_plan_of_the_same_arguments(
    options: str, arguments: tuple[Any, ...], settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_memory(TWO, 4096, *arguments, **{"device": "h100", **settings})
    assert as_json(capsys, *options.split()) == json.loads(json.dumps(plan.to_dict()))


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
        ("--model .", "got ., a folder without one. Models are not downloaded"),
        ("--model lama", "got 'lama'. Did you mean llama-3.2-1b?"),
        ("--layers 0", "layers: expected at least 1"),
        ("--seq-len 0", "seq_len: expected at least 1"),
        ("--workspace-mib -3", "workspace_mib: expected"),
        ("--optimizer lion", "optimizer: expected one of adamw, "),
        ("--lora-rank 0", "plan: lora_rank: expected at least 1"),
        ("--lora-targets q_proj", "plan: lora_targets: expected --lora-rank beside it, got none."),
        ("--lora-rank 4 --lora-targets lm_head", "plan: lora_targets: expected names of the layers' projections"),
        (
            "--lora-rank 4 --load-in-4bit --check",
            "check: expected a plan of weights in 16 or 32 bits, patched, without a mask, on one GPU",
        ),
        ("--gpus 2 --parallel fsdp2 --check", "without a mask, on one GPU, got --gpus"),
        ("--gpus 2 --parallel pp", "parallel: expected one of ddp, "),
        ("--gpus 1 --parallel zero3", "plan: parallel: expected --gpus above 1 beside it, got 1."),
        ("--gpus 2 --parallel fsdp2 --host 8GiB", "plan: host, in GiB: expected 0: offloading is planned for one GPU"),
        ("--gpus 2 --parallel fsdp2 --lora-rank 8", "plan: lora_rank: expected None: adapters are planned for one GPU"),
        ("--parallel zero3", "plan: parallel: expected --gpus above 1 beside it, got none."),
        ("--link 50GB", "plan: link: expected --gpus above 1 beside it, got none."),
        ("--gpus 2 --parallel fsdp2 --link fast", "plan: link: expected a size such as"),
        ("--check --json /nowhere/x", "plan: json: expected a file in a folder that exists, got /nowhere/x.\n"),
        ("--check --json .", "plan: json: expected a file, got the folder ..\n"),
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
