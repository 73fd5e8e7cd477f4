"""``lowtide bench step``: variants and policies by name, memory that runs out, models it takes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from lowtide.bench import models, step
from lowtide.bench.config import StepBenchConfig
from lowtide.bench.harness import OUT_OF_MEMORY
from lowtide.bench.variant import Variant
from lowtide.errors import ArgumentValueError
from promises import promise

pytestmark = promise("commands")
transformers = pytest.importorskip("transformers")


def row_of(way: str, tokens: int = 16, **more: Any) -> dict[str, Any]:
    settings = {"model": "lowtide-small", "warm": 0, "reps": 1, "dtype": "float32", "device": "cpu"}
    return step.row_of(way, tokens, json.loads(json.dumps(vars(StepBenchConfig(**{**settings, **more})))))


def test_states_are_offloaded_where_a_name_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(models, "offload_optimizer", lambda optimizer, model, **how: seen.append(how))
    for way in ("lowtide:all@states=2", "lowtide:all"):
        row = row_of(way)
        assert row["seconds"] > 0
    assert [how["gib"] for how in seen] == [2.0]


def test_what_does_not_fit_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(*_: Any, **__: Any) -> dict[str, Any]:
        raise torch.cuda.OutOfMemoryError("no")

    monkeypatch.setattr(step, "measure_steps", steps)
    assert row_of("stock") == {"failed": OUT_OF_MEMORY}


def test_variants_by_name() -> None:
    config = StepBenchConfig(peer=("stock",), policy=("all", "input"))
    assert config.variants == ("stock", "lowtide:all", "lowtide:input")
    names = ("stock", "lowtide-compile:all", "compile:input", "stock:input-offload")
    variants = [Variant.named(name) for name in names]
    assert [variant.compiles_layers for variant in variants] == [False, True, True, False]
    assert [variant.policy for variant in variants] == ["input", "all", "input", "input-offload"]
    for wrong in ("quack", "stock:2xall", "compile:attention", "stock:all-mlp1"):
        with pytest.raises(ArgumentValueError):
            Variant.named(wrong)


@pytest.mark.parametrize("name", ["stock:attention", "stock:all", "stock:input-offload", "lowtide:attention"])
def test_a_step_by_any_variant_is_the_same_step(name: str) -> None:
    stock, row = (row_of(way, 33, batch=2, warm=1) for way in ("stock", name))
    assert "failed" not in row, row
    assert row["losses"] == pytest.approx(stock["losses"], rel=1e-4)
    assert row["losses"][0] > row["losses"][1]
    assert row["tokens_per_s"] == pytest.approx(66 / row["seconds"])


def test_causal_language_models_are_taken_and_others_refused() -> None:
    for name in ("llama", "mamba", "xlnet", "llava"):  # of a model that sees, the language model
        config = transformers.AutoConfig.for_model(name)
        assert models.language_part(config) is config.get_text_config()
    for name in ("bart", "t5"):
        with pytest.raises(ArgumentValueError, match=f"model: expected a causal language model, got a {name}"):
            models.language_part(transformers.AutoConfig.for_model(name))
