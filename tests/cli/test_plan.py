"""``lowtide plan`` on a laptop: no GPU, no weights."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from lowtide.cli import main
from lowtide.memory import Adapters, plan_memory
from lowtide.memory.planner.gpus import GPUS
from lowtide.train.shapes import SHAPES

SMALL = ["plan", "--model", "llama-3.2-1b", "--seq-len", "4096", "--gpu", "h100"]


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--budget", "10GiB"]) == 0
    out = capsys.readouterr().out
    assert out == f"{plan_memory(SHAPES['llama-3.2-1b'], 4096, 1, 10, device='h100')}\n"


def test_json_on_the_standard_output_is_alone(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--budget", "24GB", "--host", "2GiB", "--batch-size", "4", "--grad-accum", "2", "--optimizer", "adamw-8bit"]
    assert main([*SMALL, *run, "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    plan = plan_memory(
        SHAPES["llama-3.2-1b"], 4096, 4, 24e9 / 2**30, 2, "h100", optimizer="adamw-8bit", keep_gradients=True
    )
    assert told == json.loads(json.dumps(plan.to_dict()))


def test_autocast_is_sixteen_bytes_a_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--autocast", "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["dtype"], told["autocast"]) == ("float32", True)
    parts = told["peak_parts_gib"]
    assert parts["weights"] + parts["optimizer"] == pytest.approx(12 * told["params"] / 2**30)


def test_adapters_and_a_mask(capsys: pytest.CaptureFixture[str]) -> None:
    lora = ["--lora-rank", "16", "--lora-targets", "q_proj", "v_proj", "--attention-mask"]
    assert main([*SMALL, *lora, "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    numbers = 16 * (16 * (2048 + 2048) + 16 * (2048 + 512))
    assert f"{numbers:,} numbers of adapters are trained, rank 16 on q_proj v_proj" in " ".join(told["notes"])
    assert any("mask of 0.0312 GiB" in note for note in told["notes"])
    plan = plan_memory(
        SHAPES["llama-3.2-1b"], 4096, 1, device="h100", adapters=Adapters(16, ("q_proj", "v_proj")), attention_mask=True
    )
    assert told == json.loads(json.dumps(plan.to_dict()))
    unknown = ["--lora-rank", "4", "--lora-targets", "lm_head"]
    for bad in (["--lora-rank", "0"], unknown, [*lora, "--check"], ["--check", "--no-fused-mlp"]):
        assert main([*SMALL, *bad]) == 2
    assert capsys.readouterr().err.count("\n") == 4


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--lora-targets", "q_proj"], "lora_targets: expected --lora-rank beside it, got none."),
        (["--lora-rank", "4", "--lora-targets", "zz"], "lora_targets: expected names of q_proj"),
    ],
)
def test_targets_go_with_a_rank_and_are_called_as_they_were_typed(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *given]) == 2
    assert capsys.readouterr().err.startswith(f"lowtide plan: {said}")


def test_adapters_of_stacked_projections_are_refused_in_the_words_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 42, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 6}
    settings = {"model_type": "phi3", "vocab_size": 131, "pad_token_id": 0, "tie_word_embeddings": False, **sizes}
    file = tmp_path / "phi3.json"
    file.write_text(json.dumps(settings))
    assert main(["plan", "--model", str(file), "--seq-len", "64", "--gpu", "h100", "--lora-rank", "8"]) == 2
    said = "lora_rank: expected none for a model of stacked projections, got 8. In Python, pass how many parameters"
    assert capsys.readouterr().err.startswith(f"lowtide plan: {said}")


def test_a_folder_without_a_config_is_called_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(tmp_path), "--seq-len", "4"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("lowtide plan: model: expected a folder with a config.json, a config as a .json file, or")
    assert f"got {tmp_path}, a folder without one. Models are not fetched" in err


def test_what_is_printed_says_what_its_words_mean_and_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL) == 0
    out = capsys.readouterr().out
    ladder = next(block for block in out.split("\n\n") if block.startswith("a layer saves"))
    for word in ("all:", "(/0)", "(/1)", "attention:", "input:"):
        assert word in ladder.split("input/1")[1], word
    assert "--gpu cuda" in out, "an option, not only an argument of Python"
    assert "\n\nin a script that has the model:\n\nimport lowtide\n" in out


def test_files_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture, numbers = tmp_path / "plan.png", tmp_path / "plan.json"
    assert main([*SMALL, "--png", str(picture), "--json", str(numbers)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(numbers.read_text())["gpu"] == "h100"
    out = capsys.readouterr().out
    assert "policies 16 x all/0" in out
    assert out.endswith(f"\nwritten: {picture}\nwritten: {numbers}\n")


def test_a_config_is_read_and_its_layers_counted_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["gemma-2-2b"]))
    run = ["plan", "--model", str(tmp_path), "--seq-len", "512", "--gpu", "a100-80gb", "--layers", "3", "--json", "-"]
    assert main(run) == 0
    model = json.loads(capsys.readouterr().out)["model"]
    assert model["layers"] == len(model["windows"]) == 3


def test_every_named_shape_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    for name in SHAPES:
        layers = ["--layers", "8"] if "70b" in name else []
        assert main(["plan", "--model", name, "--seq-len", "64", "--gpu", "b200", *layers]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--budget", "40 parsecs"], "budget: expected a size such as 40GiB"),
        (["--host", "-1"], "host: expected a size such as"),
        (["--budget", "1GiB"], "plan: budget, in GiB: expected at least"),
        (["--gpu", "abacus"], "plan: gpu: expected"),
        (["--model", "nobody"], "model: expected a folder with a config.json"),
        (["--model", "qwen3"], "got 'qwen3'. Did you mean qwen3-"),
        (["--model", "lama"], "got 'lama'. Did you mean llama-3.2-1b?"),
        (["--model", ""], "got ''."),
        (["--model", "~nobody-here/x"], "got '~nobody-here/x'."),
        (["--gpu", "h10"], "got 'h10'. Did you mean h100?"),
        (["--layers", "0"], "layers: expected at least 1"),
        (["--grad-accum", "0"], "grad_accum: expected at least 1"),
        (["--seq-len", "0"], "seq_len: expected at least 1"),
        (["--workspace-mib", "-3"], "workspace_mib: expected"),
        (["--optimizer", "lion"], "invalid choice"),
    ],
)
def test_what_cannot_be_is_one_line(change: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main([*SMALL, *change])
    except SystemExit as ended:
        status = int(str(ended.code))
    err = capsys.readouterr().err
    assert status == 2
    assert err.count("\n") == 1
    assert said in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_check_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--check"]) == 2
    assert "check: expected a CUDA GPU" in capsys.readouterr().err


@pytest.mark.parametrize("said", ["12", "12G", "12gib", "12288MiB", "12884901888B"])
def test_budgets_take_units(said: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert main([*SMALL, "--budget", said, "--host", said, "--json", str(file)]) == 0
    told = json.loads(file.read_text())
    assert (told["budget_gib"], told["host_budget_gib"]) == (12.0, 12.0)


def test_help_names_gpus_and_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    out = "".join(capsys.readouterr().out.split())  # lines are broken at hyphens too
    assert all(name in out for name in [*GPUS, *SHAPES])


def test_adapters_by_their_rank(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["plan", "--model", "llama-3-8b", "--seq-len", "4096", "--gpu", "h100", "--lora-rank"]
    assert main([*run, "16"]) == 0
    assert "41,943,040 numbers of adapters are trained" in capsys.readouterr().out, "as peft counts them"
    assert main([*run, "0"]) == 2
    assert "lowtide plan: lora_rank: expected at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--png"])
def test_a_file_that_cannot_be_is_said_before_anything_runs(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--check", option, "/nowhere/at/all"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == f"lowtide plan: {option[2:]}: expected a file in a folder that exists, got /nowhere/at/all.\n"


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    command, shown = re.findall(r"```console\n\$ lowtide (plan .*?)\n(.*?)```", page, re.DOTALL)[0]
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == shown


def test_the_pages_table_of_offloaded_states_is_what_is_planned() -> None:
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    rows = re.findall(r"^\| (\d+), ([\d.]+) GiB \| .* \| ([\d.]+) s, ([\d.]+) GiB.*\|$", page, re.MULTILINE)
    assert len(rows) == 5
    for tokens, budget, seconds, states in rows:
        plan = plan_memory(SHAPES["llama-3.2-1b"], int(tokens), 1, float(budget), 64, device="h100")
        assert (f"{plan.seconds:.3f}", f"{plan.chosen.states / 2**30:.2f}") == (seconds, states)
