"""``lowtide bench step``: ways and policies by name, losses of peers, memory that runs out, models it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lowtide.bench import step, ways
from lowtide.bench.config import StepBenchConfig
from lowtide.bench.harness import OUT_OF_MEMORY
from lowtide.bench.loss_peers import PEERS
from lowtide.bench.way import GPU_ALONE, HEADS, Way
from lowtide.errors import ArgumentValueError, UnsupportedError
from lowtide.measure import child
from lowtide.memory.policy import split_states
from lowtide.train.shapes import SHAPES

CPU = torch.device("cpu")
transformers = pytest.importorskip("transformers")


def rows_of(way: str, *lengths: int, **more: Any) -> list[dict[str, Any]]:
    settings = {"model": "lowtide-small", "layers": 2, "warm": 0, "reps": 1, "dtype": "float32", "device": "cpu"}
    config = StepBenchConfig(**{"tokens": tuple(map(str, lengths or (16,))), **settings, **more})
    return step.rows_of(way, json.loads(json.dumps(vars(config))))


@pytest.mark.parametrize(
    ("text", "policy", "states"),
    [
        ("all", "all", None),
        ("2xall+1xinput-offload@states", "2xall+1xinput-offload", {"gib": None, "late": False}),
        ("input@states=4-late", "input", {"gib": 4.0, "late": True}),
    ],
)
def test_states_behind_a_policy(text: str, policy: str, states: object) -> None:
    assert split_states(text) == (policy, states)
    assert f"lowtide:{text}" in StepBenchConfig(policy=(text,)).ways


def test_states_are_offloaded_where_a_way_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(step, "offload_optimizer", lambda optimizer, model, **how: seen.append(how))
    for way in ("lowtide:all@states=2-late", "lowtide:all"):
        (row,) = rows_of(way)
        assert row["seconds"] > 0
    assert seen == [{"gib": 2.0, "late": True}]


def test_what_does_not_fit_ends_a_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(model: Any, optimizer: Any, config: Any, tokens: int) -> dict[str, Any]:
        if tokens > 10:
            raise torch.cuda.OutOfMemoryError("no")
        return {"seconds": 1.0}

    monkeypatch.setattr(step, "steps", steps)
    failed = {"failed": OUT_OF_MEMORY}
    rows = rows_of("stock", 10, 20, 30)
    assert rows == [{"tokens": 10, "seconds": 1.0}, {"tokens": 20, **failed}, {"tokens": 30, **failed}]


@pytest.mark.parametrize(
    ("environment", "setting"),
    [
        ({}, ""),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native", "PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"},
         "backend:cudaMallocAsync"),
    ],
)  # fmt: skip
def test_a_row_says_how_the_allocator_was_set(
    environment: dict[str, str], setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert child.allocator_setting() == setting
    own = {} if setting else {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert child._for_children() == own


def gemma2(folder: Path, **more: Any) -> str:
    file = folder / "gemma2.json"
    shape = {**SHAPES["lowtide-small"], "model_type": "gemma2", "vocab_size": 99, "head_dim": 32, **more}
    file.write_text(json.dumps(shape))
    return str(file)


def test_a_model_without_fused_attention_takes_its_own_and_says_so(tmp_path: Path) -> None:
    """Gemma 2 caps its scores, which PyTorch's fused attention cannot."""
    (row,) = rows_of("lowtide:all", model=gemma2(tmp_path))
    assert row["attention"] == "eager"
    (row,) = rows_of("stock", model=gemma2(tmp_path), sdpa="flash")
    assert row["unsupported"]
    assert "sdpa: expected auto for attention by eager, got flash" in row["failed"]


@pytest.mark.parametrize("way", ["compile", "compile-all"])
def test_compile_is_the_stock_model_with_compiled_layers(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda function, **kwargs: compiled.append(kwargs) or function)
    model = ways.build_way(Way.named(way), "lowtide-small", torch.float32, CPU, seed=0)
    assert compiled == [{"dynamic": False}] * (len(model.model.layers) + 1)  # and the loss
    assert type(model).__name__ == "LlamaForCausalLM"


def test_compiled_layers_come_after_each_policy() -> None:
    config = StepBenchConfig(peer=("stock",), policy=("all", "input"), compile_layers=True)
    ours = ("lowtide:all", "lowtide:input", "lowtide-compile:all", "lowtide-compile:input")
    assert config.ways == ("stock", *ours)
    assert [Way.named(name).compiles_layers for name in config.ways] == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("name", "impl", "policy"),
    [
        ("torchtune-8:all", "torchtune-8", "all"), ("checkpoint-8-all", "checkpoint-8", "all"),
        ("checkpoint-compile-8-input-offload", "checkpoint-compile-8", "input-offload"), ("stock-all", "stock", "all"),
    ],
)  # fmt: skip
def test_ways_by_name(name: str, impl: str, policy: str) -> None:
    way = Way.named(name)
    assert (way.impl, way.policy) == (impl, policy)
    assert set(HEADS) <= set(PEERS)


def test_ways_that_are_none() -> None:
    for wrong in ("torchtune-3", "forward", "torchtune-8-attention", "torchtune-8:2xall"):
        with pytest.raises(ArgumentValueError):
            Way.named(wrong)


NAMES = ["checkpoint-8", "torchtune-8", "trl", "torch", "stock-attention", "stock-all", "stock:input-offload"]


@pytest.mark.parametrize("name", NAMES)
def test_a_step_by_a_peer_is_the_same_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "trl":
        pytest.importorskip("trl")
    if name == "torch" and not hasattr(F, "linear_cross_entropy"):
        pytest.skip("an older torch")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    (stock,), (row,) = (rows_of(way, 33, batch=2, warm=1) for way in ("stock", name))
    assert "failed" not in row, row
    assert row["losses"] == pytest.approx(stock["losses"], rel=1e-4)
    assert row["losses"][0] > row["losses"][1]


def test_a_way_that_does_not_run_here_says_why() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is there")
    for name in GPU_ALONE:
        (row,) = rows_of(name)
        assert row["unsupported"], name
        assert "GPUs only" in row["failed"] or "pip install" in row["failed"], row


def test_a_model_with_capped_logits_is_refused(tmp_path: Path) -> None:
    model = gemma2(tmp_path, final_logit_softcapping=0.01)
    with pytest.raises(UnsupportedError, match="scaled, capped or biased"):
        ways.build_way(Way.named("checkpoint-8"), model, torch.float32, CPU, seed=0)


@pytest.mark.parametrize("model_type", ["bart", "whisper", "t5", "musicgen", "bert", "roberta", "bert-generation"])
def test_sequence_to_sequence_models_and_encoders_are_refused(model_type: str) -> None:
    config = transformers.AutoConfig.for_model(model_type)
    with pytest.raises(ArgumentValueError, match=f"model: expected a causal language model, got a {model_type}"):
        ways.language_part(config)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mamba", "xlnet"])
def test_causal_models_are_taken(model_type: str) -> None:
    config = transformers.AutoConfig.for_model(model_type)
    assert ways.language_part(config) is config
    bert = transformers.AutoConfig.for_model("bert", is_decoder=True)
    assert ways.language_part(bert) is bert


@pytest.mark.parametrize("model_type", ["llava", "gemma3"])
def test_of_a_model_that_sees_the_language_model_is_taken(model_type: str) -> None:
    config = transformers.AutoConfig.for_model(model_type)
    assert ways.language_part(config) is config.get_text_config()
