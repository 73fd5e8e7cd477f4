"""Under FSDP2 the first rank alone reads a model: the others' memory is their part's, and the run is the same."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lowtide.train.first_rank import Form
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from distributed.test_train_ranks import history
from distributed.train_ranks import Ranks, shared
from lowtide.train.parallel import variables
from train.conftest import SHAPE, tiny_arguments

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="ranks on a CPU speak gloo")

EACH_READS = {**variables("fsdp2"), "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}  # as an accelerate file may have it


@pytest.fixture
def ranks() -> Ranks:
    return shared()


def assert_same_bits(folder: Path, other: Path, step: int) -> None:
    assert history(folder, step) == history(other, step)
    weights, others = (load_file(next((at / "model").glob("*.safetensors"))) for at in (folder, other))
    assert weights.keys() == others.keys()
    for name, value in weights.items():
        assert torch.equal(value, others[name]), name


def shaped(folder: Path, **settings: object) -> list[str]:
    arguments = [*tiny_arguments(folder), "--max-steps", "2", "--save-every", "1"]
    (folder / "tiny.json").write_text(json.dumps({**SHAPE, **settings}))
    return arguments


def test_the_same_bits_with_less_memory(ranks: Ranks, tmp_path: Path) -> None:
    """Of weights of 65 MiB, each a sixtieth at the most, a second rank has none, and then its half.

    On a CPU that half is in the same memory, with what gloo sends and receives.
    """
    size = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 16, "max_position_embeddings": 32}
    arguments = shaped(tmp_path, **size)
    grown = []
    for name, env in {"first": variables("fsdp2"), "each": EACH_READS}.items():
        said = ["--max-steps", 1, "--save-every", 0, "--eval-blocks", 1, "--output", tmp_path / name]
        ended = ranks.succeed(2, *arguments, *said, SPY="distributed.spy_memory", **env)
        found = {word: float(size) for word, size in re.findall(r"spied (\w+) ([\d.]+) MiB", ended.out[1])[:2]}
        grown.append(found)
    assert_same_bits(tmp_path / "first", tmp_path / "each", 1)
    first, each = grown
    assert first["read"] < 16, grown
    assert each["read"] > 64, grown
    assert first["shared"] < each["shared"] - 20, grown


OPTIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "lora": ({}, ["--lora-rank", "2", "--dtype", "bfloat16"]),
    "gemma": ({"model_type": "gemma2", "head_dim": 16, "tie_word_embeddings": False}, ["--weights", "bfloat16"]),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_same_bits(name: str, ranks: Ranks, tmp_path: Path) -> None:
    """Also after a resume, whose checkpoint the first rank alone reads."""
    settings, options = OPTIONS[name]
    arguments = [*shaped(tmp_path, **settings), *options]
    first, each = tmp_path / "first", tmp_path / "each"
    for output, env in ((first, variables("fsdp2")), (each, EACH_READS)):
        ranks.succeed(2, *arguments, "--output", output, **env)
    assert_same_bits(first, each, 2)
    shutil.rmtree(first / "checkpoint-2")
    ranks.succeed(2, "train", "--resume", "--output", first, **variables("fsdp2"))
    assert_same_bits(first, each, 2)


def test_what_the_first_rank_cannot_read_ends_all(ranks: Ranks, tmp_path: Path) -> None:
    arguments, output, folder = shaped(tmp_path), tmp_path / "run", tmp_path / "model"
    ranks.succeed(2, *arguments, "--parallel", "fsdp2", "--output", output)
    shutil.copytree(output / "model", folder)
    shutil.rmtree(output / "checkpoint-2")
    begin = [*arguments, "--model", folder, "--parallel", "fsdp2", "--output", tmp_path / "other"]
    go_on = ["train", "--resume", "--output", output]
    for broken, again in ((folder, begin), (output / "checkpoint-1", go_on)):
        file = broken / "model.safetensors"
        file.write_bytes(file.read_bytes()[:1000])
        ended = ranks(2, *again)
        assert ended.statuses == [2, 2], ended
        assert ended.err[0].count("\n") == 1, ended
        assert str(broken) in ended.err[0]


@pytest.mark.parametrize("what", ["a buffer is saved", "untied by the file"])
def test_what_cannot_be_handed_on_is_read_by_each(what: str) -> None:
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "model_type": "llama"}))
    form = Form.of(model)
    assert form is not None
    other = form.model()
    assert {name: p.shape for name, p in other.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert other.lm_head.weight is other.model.embed_tokens.weight
    assert {p.device.type for p in other.parameters()} == {"cpu"}
    for name, buffer in other.named_buffers():
        assert torch.equal(buffer, model.get_buffer(name))
    if what == "a buffer is saved":
        model.model.register_buffer("steps", torch.zeros(()))
    else:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    assert Form.of(model) is None
