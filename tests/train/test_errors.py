"""What a user can get wrong: one line that says what to do, status 2, and nothing half written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chat_data import byte_tokenizer
from lowtide.errors import ArgumentValueError
from lowtide.train import checkpoints, train
from train.conftest import Run, save_model, write_rows

Write = Callable[[Path], list[str]]


def config(**settings: object) -> Write:
    def write(folder: Path) -> list[str]:
        (folder / "m.json").write_text(json.dumps(settings))
        return ["--model", str(folder / "m.json")]

    return write


def file(option: str, name: str, text: str) -> Write:
    def write(folder: Path) -> list[str]:
        (folder / name).write_text(text)
        return [option, str(folder / name)]

    return write


def used_output(folder: Path) -> list[str]:
    (folder / "used").mkdir()
    (folder / "used" / "thesis.tex").touch()
    return ["--output", str(folder / "used")]


def output_below_a_file(folder: Path) -> list[str]:
    (folder / "file").touch()
    return ["--output", str(folder / "file" / "run")]


def given(*words: str) -> Write:
    return lambda folder: [word.replace("FOLDER", str(folder)) for word in words]


ENCODER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
LEARNED = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 512}

FROM_RANDOM_WEIGHTS: dict[str, tuple[Write, list[str]]] = {
    "missing data": (given("--data", "FOLDER/nowhere"), ["data", "nowhere"]),
    "too little text": (file("--data", "s.txt", "too short\n"), ["data", "more text"]),
    "wrong field": (file("--data", "d.jsonl", '{"content": "words"}\n' * 2000), ["data", "'text'", "line 1"]),
    "broken json": (file("--model", "m.json", '{"model_type": "llama", '), ["model", "JSON", "line 1"]),
    "no model type": (config(hidden_size=8), ["model", "model_type"]),
    "unknown model type": (config(model_type="lama"), ["model", "lama"]),
    "impossible shape": (config(model_type="llama", hidden_size=30, num_attention_heads=4), ["model"]),
    "misspelled model": (given("--model", "qwen3-0.6"), ["model", "Did you mean qwen3-0.6b?"]),
    "folder without a model": (given("--model", "FOLDER"), ["model", "a folder without one"]),
    "small vocabulary": (config(model_type="llama", vocab_size=256), ["model", "got 256", "--vocab-size"]),
    "encoder": (config(model_type="bert", vocab_size=512, **ENCODER), ["model", "causal", "is_decoder"]),
    "learned positions": (config(model_type="gpt2", **LEARNED), ["seq_len", "at most 16", "got 32"]),
    "no tokenizer": (given("--tokenizer", "FOLDER"), ["tokenizer"]),
    "used output": (used_output, ["output", "used", "new or empty"]),
    "output below a file": (output_below_a_file, ["output", "file/run (Not a directory)"]),
    "unwritable output": (given("--output", "/proc/run"), ["output", "/proc/run (No such file or directory)"]),
    "no steps": (given("--max-steps", "0"), ["max_steps", "at least 1", "got 0"]),
    "not a number": (given("--max-steps", "many"), ["--max-steps", "many", "--help"]),
    "unknown dtype": (given("--dtype", "float12"), ["dtype", "float12"]),
    "policy": (given("--policy", "everything"), ["policy", "'everything'", "12 x input/1"]),
    "policy of other layers": (given("--policy", "3 x all"), ["policy", "2 layers", "got 3"]),
    "policy without a fused MLP": (given("--policy", "all/0", "--no-patch"), ["checkpoint_level"]),
    "budget and policy": (given("--policy", "all", "--memory-budget", "1GiB"), ["--memory-budget, --policy"]),
    "budget without patch": (given("--memory-budget", "1GiB", "--no-patch"), ["memory_budget", "--no-patch"]),
    "budget": (given("--memory-budget", "much"), ["memory_budget", "40GiB", "'much'"]),
    "host alone": (given("--host-budget", "1GiB"), ["host_budget", "--memory-budget or --offload-states"]),
    "budget for another optimizer": (
        given("--memory-budget", "1GiB", "--optim", "adafactor"),
        ["memory_budget", "adafactor", "--policy"],
    ),
    "launcher": (given("--write-launch-file", "FOLDER/x.yaml"), ["write_launch_file", "--parallel"]),
}


def assert_one_line(lowtide: Run, arguments: list[str], named: list[str], output: Path) -> None:
    if "--output" not in arguments:
        arguments = [*arguments, "--output", str(output)]
    err = lowtide.refused(*arguments)
    assert not [word for word in named if word not in err], err
    left = {path.name for path in output.iterdir()} if output.exists() else set()
    assert left <= {"tokens.bin", "tokens.bin.json", "run.json", "log.jsonl"}, "nothing that a new run would not take"
    if left:
        assert checkpoints.new_output(str(output), "now") == output


@pytest.mark.parametrize("case", FROM_RANDOM_WEIGHTS)
def test_from_random_weights(case: str, tmp_path: Path, tiny: list[str], lowtide: Run) -> None:
    words, named = FROM_RANDOM_WEIGHTS[case]
    assert_one_line(lowtide, [*tiny, *words(tmp_path)], named, tmp_path / "out")


def without_template(folder: Path) -> list[str]:
    byte_tokenizer(None).save_pretrained(folder / "t")
    return ["--tokenizer", str(folder / "t")]


def without_end(folder: Path) -> list[str]:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder / "t")
    return ["--tokenizer", str(folder / "t")]


def without_weights(folder: Path) -> list[str]:
    from safetensors.torch import load_file, save_file

    model = save_model(folder / "m") / "model.safetensors"
    tensors = {name: value for name, value in load_file(model).items() if "layers.1." not in name}
    save_file(tensors, model, metadata={"format": "pt"})
    return ["--model", str(model.parent)]


def untied_head(folder: Path) -> list[str]:
    model = save_model(folder / "m", tie_word_embeddings=False)
    return ["--model", str(model), "--use_peft", "--lora_target_modules", "lm_head"]


def mixed(folder: Path) -> list[str]:
    rows = [{"text": "a text"}, {"prompt": "a", "completion": "b"}] * 20
    return ["--data", str(write_rows(folder / "x.jsonl", rows))]


def one_role(folder: Path) -> list[str]:
    rows = [{"messages": [{"role": "user", "content": "a"}]}] * 20
    return ["--data", str(write_rows(folder / "x.jsonl", rows))]


FINE_TUNING: dict[str, tuple[Write, list[str]]] = {
    "no chat template": (without_template, ["a chat template", "--chat_template_path"]),
    "no end of text": (without_end, ["tokenizer", "an end-of-text token", "--eos_token"]),
    "weights are missing": (without_weights, ["model", "layers.1."]),
    "rows of two kinds": (mixed, ["data", "rows of one kind", "line 2"]),
    "nobody answers": (one_role, ["data", "something to train on"]),
    "template that is not there": (
        given("--chat_template_path", "FOLDER/t.jinja"),
        ["--chat_template_path", "t.jinja"],
    ),
    "template that fails": (file("--chat_template_path", "t.jinja", "{{ raise_exception('no!') }}"), ["data", "no!"]),
    "no marks for the assistant": (
        file("--chat_template_path", "t.jinja", "{% for m in messages %}{{ m['content'] }}{% endfor %}"),
        ["generation"],
    ),
    "adapter on the head": (untied_head, ["options", "lm_head"]),
    "tokenizer of another model": (given("--tokenizer", "FOLDER"), ["tokenizer", "Hugging Face format"]),
    "no epochs": (given("--num_train_epochs", "0"), ["--num_train_epochs: expected a number above 0, got 0.0."]),
    "no rows": (
        given("--per_device_train_batch_size", "0"),
        ["--per_device_train_batch_size: expected a"],
    ),
    "model's arguments": (given("--model_init_kwargs", "no"), ["--model_init_kwargs: expected a JSON object"]),
    "recomputed twice": (
        given("--gradient_checkpointing", "--policy", "input"),
        ["--gradient_checkpointing: expected neither --policy"],
    ),
    "best of none": (given("--load_best_model_at_end"), ["options: expected values that SFTConfig accepts, got"]),
    "template of nothing": (
        given("--chat_template_path", "none/such"),
        ["--chat_template_path: expected a .jinja file, or a tokenizer with a chat"],
    ),
}


@pytest.mark.parametrize("case", FINE_TUNING)
def test_fine_tuning(case: str, tmp_path: Path, tune: Any, lowtide: Run) -> None:
    pytest.importorskip("trl")
    words, named = FINE_TUNING[case]
    arguments = tune(assistant_only_loss=True, **{"max-steps": None if "epochs" in case else 6})
    assert_one_line(lowtide, [*arguments, *words(tmp_path)], named, tmp_path / "out")


@pytest.mark.parametrize("module", ["huggingface_hub.errors", "httpx", "httpx2"])
def test_a_hub_that_takes_no_model_is_named(
    module: str, tmp_path: Path, tiny: list[str], lowtide: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise type("Refused", (OSError,), {"__module__": module})("no access")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", refuse)
    assert_one_line(
        lowtide, [*tiny, "--push_to_hub"], ["--push_to_hub", "no access", "hf auth login"], tmp_path / "out"
    )


def test_a_model_that_cannot_be_pushed_at_the_end_is_saved(
    tiny: list[str], lowtide: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise type("Refused", (OSError,), {"__module__": "huggingface_hub.errors"})("no access")

    made = SimpleNamespace(repo_id="me/model")
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda *_, **__: made)
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", refuse)
    output = tmp_path / "out"
    err = lowtide.refused(*tiny, "--push_to_hub", "--hub_strategy", "end", "--output", output)
    assert "--push_to_hub: expected a Hub that takes the model, got no access" in err
    assert (output / "model" / "model.safetensors").is_file()


def test_a_run_is_not_overwritten(tiny: list[str], finished: Path, lowtide: Run) -> None:
    err = lowtide.refused(*tiny, "--output", finished)
    assert "holds a run" in err
    assert "--resume_from_checkpoint true" in err


def test_a_loss_that_is_not_finite_ends_the_run_and_it_can_begin_again(
    tmp_path: Path, tiny: list[str], lowtide: Run
) -> None:
    output = tmp_path / "out"
    high = ["--lr", "1e30", "--warmup_steps", "0", "--save_steps", "50", "--max-steps", "12"]
    err = lowtide.refused(*tiny, *high, "--output", output)
    assert re.search("lr: expected a (training loss|gradient norm) that stays finite, got ", err)
    assert not (output / "model").exists()
    lowtide.done(*tiny, "--output", output)


def test_the_python_interface_raises_what_the_command_prints(tmp_path: Path) -> None:
    from lowtide.train import TrainConfig

    with pytest.raises(ArgumentValueError, match="data: expected"):
        train(TrainConfig(data=(str(tmp_path / "nowhere"),), output=str(tmp_path / "out")))
    with pytest.raises(ArgumentValueError, match="lr: expected a number above 0"):
        TrainConfig(lr=0.0)
