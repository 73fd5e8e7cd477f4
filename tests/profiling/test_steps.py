"""One implementation's steps: figures that hang together, memory that runs out, hooks that only look."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.bench.models import build_model, make_optimizer
from lowtide.bench.variant import Variant
from lowtide.measure.allocations import track_allocations
from lowtide.profile import steps as module
from lowtide.profile.phases import KINDS
from lowtide.profile.steps import Steps, measure
from lowtide.train.shapes import model_config
from promises import promise

pytestmark = promise("commands")

CPU = torch.device("cpu")
CONFIG = {
    "model_type": "llama", "vocab_size": 613, "hidden_size": 48, "intermediate_size": 112, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
SETTINGS = {
    "seq_len": 61, "batch_size": 2, "dtype": "float32", "device": "cpu", "optimizer": "adamw",
    "lora": 0, "steps": 1, "warm": 1, "seed": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("model") / "tiny.json"
    file.write_text(json.dumps(CONFIG))
    return {**SETTINGS, "model": str(file)}


def run(impl: str, policy: str, settings: dict[str, Any]) -> dict[str, Any]:
    return measure({"impl": impl, "policy": policy}, settings, str(Path(settings["model"]).with_suffix("")))


def parts(found: dict[str, Any]) -> list[str]:
    return [one["name"] for one in found["segments"]]


PLAIN = [
    "embedding", "forward of layer 0", "forward of layer 1", "head", "backward of the head", "backward of layer 1",
    "backward of layer 0", "backward of the embedding", "optimizer",
]  # fmt: skip
AGAIN = [*PLAIN[:5]]
for layer in (1, 0):
    AGAIN += [f"{kind} of layer {layer}" for kind in ("backward", "recompute", "backward")]
AGAIN += PLAIN[-2:]


@pytest.mark.parametrize(
    ("impl", "policy", "phases"),
    [
        ("stock", "all", PLAIN),
        ("stock", "input", AGAIN),
        ("stock", "attention", AGAIN),
        ("stock", "input-offload", AGAIN),
        ("lowtide", "2 x all/1", PLAIN),
        ("lowtide", "attention", AGAIN),
        ("lowtide", "1xinput+1xall", [*AGAIN[:5], "backward of layer 1", *AGAIN[8:]]),
    ],
)
def test_a_step_hangs_together(impl: str, policy: str, phases: list[str], settings: dict[str, Any]) -> None:
    found = run(impl, policy, settings)
    assert "failed" not in found
    assert parts(found) == phases
    ends = [one["end_ms"] for one in found["segments"]]
    assert [one["begin_ms"] for one in found["segments"]] == [0, *ends[:-1]]
    assert ends[-1] == pytest.approx(found["seconds"] * 1e3)
    assert sum(found["time_by_kind_ms"].values()) == pytest.approx(ends[-1])
    assert set(found["time_by_kind_ms"]) == set(KINDS)
    assert found["tokens_per_s"] == pytest.approx(122 / found["seconds"])
    peak, weights = found["peak"], found["parameters"] * 4 / 2**30
    assert sum(peak["owners_gib"].values()) == pytest.approx(peak["gib"])
    assert peak["owners_gib"]["weights"] == pytest.approx(weights)
    assert peak["owners_gib"]["optimizer"] == pytest.approx(2 * weights, rel=1e-3)
    assert max(found["timeline"]["gib"]) == pytest.approx(peak["gib"], rel=1e-5)
    assert len(found["losses"]) == 2
    assert "note" not in found


@pytest.mark.parametrize(("impl", "policy"), [("lowtide", "attention"), ("lowtide", "all-mlp1"), ("stock", "input")])
def test_looking_changes_nothing_and_misses_no_byte(
    impl: str, policy: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Hooks in the wrong place make modules run other code: the same step takes other memory then."""
    model = build_model(Variant(impl=impl, policy=policy), model_config(settings["model"]), torch.float32, CPU, seed=3)
    optimizer = make_optimizer("adamw", list(model.parameters()))
    ids = torch.randint(0, 613, (2, 61), generator=torch.Generator().manual_seed(3))

    losses = []

    def step() -> None:
        losses.append(model(input_ids=ids, labels=ids).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    with track_allocations() as seen:
        step()
    watched = Steps(Variant(impl=impl, policy=policy), settings)
    watched.step()
    with track_allocations() as recorded:
        watched.step()
    assert recorded.peak_bytes == seen.peak_bytes
    assert [event.bytes for event in recorded.events] == [event.bytes for event in seen.events]
    parameters = sum(p.nbytes for p in model.parameters())
    peak = watched.record(str(tmp_path / "step"), [])["peak"]
    assert round(peak["owners_gib"]["weights"] * 2**30) == parameters
    before = sum(round(peak["owners_gib"][owner] * 2**30) for owner in ("weights", "optimizer", "other"))
    assert round(peak["gib"] * 2**30) == before + seen.peak_bytes, (peak, before, seen.peak_bytes)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
def test_lora_trains_adapters_alone(settings: dict[str, Any]) -> None:
    pytest.importorskip("peft")
    found = run("stock", "input", {**settings, "lora": 3})
    assert "failed" not in found, found["failed"]
    adapters = 3 * 2 * (2 * 48 + 2 * (48 + 24) + 2 * 48 + 3 * (48 + 112))
    assert found["trained_parameters"] == adapters
    assert found["peak"]["owners_gib"]["optimizer"] == pytest.approx(2 * adapters * 4 / 2**30, rel=0.01)


@pytest.mark.parametrize(("where", "at"), [("forward", 1), ("backward", 0)])
def test_memory_that_runs_out_is_a_row_with_a_picture(
    where: str, at: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the last layer: by a step that counts, and by the first."""
    steps = [0]

    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    def hook(module: Any, args: Any, output: Any) -> None:
        steps[0] += 1
        if steps[0] > at:
            full() if where == "forward" else output.register_hook(full)

    def build(*args: Any, **kwargs: Any) -> Any:
        model = build_model(*args, **kwargs)
        model.model.layers[1].mlp.register_forward_hook(hook)
        return model

    monkeypatch.setattr(module, "build_model", build)
    found = run("stock", "all", {**settings, "steps": 2})
    assert found["failed"] == f"out of memory in the {where} of layer 1"
    assert parts(found)[-1] == f"{where} of layer 1"
    assert all(one["end_ms"] > one["begin_ms"] for one in found["segments"])
    assert found["note"] == "times are those of the recorded step, which recording slows"
    assert found["peak"]["owners_gib"]["activations"] > 0
    assert "seconds" not in found
    assert len(found["losses"]) == at


def test_phases_are_as_long_as_in_the_median_step(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    given = iter([[9.0] * 9, [1.0] * 9, [2.0] * 9, [30.0] * 9])  # the last is the recorded step's
    monkeypatch.setattr(module.PhaseMarks, "lengths_ms", lambda _: next(given))
    found = run("stock", "all", {**settings, "steps": 3})
    assert found["steps_ms"] == [81, 9, 18]
    assert (found["seconds"], found["tokens_per_s"]) == (0.018, 122 / 0.018)
    assert [part["end_ms"] for part in found["segments"]] == list(range(2, 20, 2))
    assert "note" not in found


def test_compiled_layers_are_checkpointed_from_outside(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    variant = Variant(impl="compile", policy="input")
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled.append(function) or function)
    model = build_model(variant, model_config(settings["model"]), torch.float32, CPU, seed=3)
    assert len(compiled) == 3  # two layers and the loss
    monkeypatch.setattr(module, "build_model", lambda *_, **__: model)
    assert parts(run("compile", "input", settings)) == AGAIN


def test_what_cannot_be_built_and_what_breaks_is_a_row_that_says_why(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "one for each of 2 layers" in run("lowtide", "5xall", settings)["failed"]

    def step(self: Steps) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(Steps, "step", step)
    assert run("stock", "all", settings)["failed"] == "ValueError: broken"
