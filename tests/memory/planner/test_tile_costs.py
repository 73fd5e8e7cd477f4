"""Plans with layers in tiles: bytes by hand and by the allocator, time, and when they are chosen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.measure.allocations import track_allocations
from lowtide.memory import ActivationPolicy, Adapters, apply_policy, plan_memory
from lowtide.memory.planner.gpus import GPUS, attention_reaches
from lowtide.memory.planner.job import Job
from lowtide.memory.planner.kind_costs import LayerCosts
from lowtide.memory.planner.search import Search
from lowtide.memory.planner.settings import with_layers
from lowtide.memory.planner.shapes import read_shape
from lowtide.memory.planner.step_costs import StepCosts
from lowtide.memory.planner.tile_costs import SLOWER, tile_policies
from lowtide.memory.policy import layer_policies
from lowtide.train.shapes import SHAPES

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
T, H, KEYS, TILE = 131072, 4096, 2 * 1024, 16384
LLAMA = Job(read_shape(SHAPES["llama-3-8b"]), T, 1, GPUS["h100"], torch.bfloat16, "sgd")
INPUT = ActivationPolicy(keep="input", mlp_level=1)
TILED = replace(INPUT, tile_tokens=TILE)


@pytest.mark.parametrize("keep", ["input", "attention"])
def test_bytes_by_hand(keep: str) -> None:
    """Of all tokens: the output; the input, gradients of both, keys, values and in float32 their gradients."""
    plain, tiled = (replace(policy, keep=keep) for policy in (INPUT, TILED))
    at_once, tile = LayerCosts(LLAMA)[plain], LayerCosts(replace(LLAMA, seq_len=TILE))[plain]
    cost = LayerCosts(LLAMA)[tiled]
    assert cost.saved == at_once.saved
    assert cost.whole - tile.whole == at_once.saved
    assert cost.forward_bytes - tile.forward_bytes == T * 2 * (H + KEYS)
    layer = 2 * H * (H + 1024) + 3 * H * 14336 + 2 * H
    assert cost.backward_bytes - tile.backward_bytes == T * (2 * 2 * H + (2 + 4) * KEYS) + 6 * layer
    adapted = replace(LLAMA, adapters=Adapters(16))
    cost, tile = LayerCosts(adapted)[tiled], LayerCosts(replace(adapted, seq_len=TILE))[plain]
    assert cost.backward_bytes - tile.backward_bytes == T * (2 * 2 * H + (2 + 4) * KEYS)
    assert cost.whole + cost.backward_bytes < 0.5 * (at_once.whole + at_once.backward_bytes)


def test_time() -> None:
    """Keys and values are computed once more, and tiles take a little longer; a short one waits for the host."""
    at_once, cost = LayerCosts(LLAMA)[INPUT], LayerCosts(LLAMA)[TILED]
    assert cost.flop - at_once.flop == 2 * T * H * KEYS
    assert cost.forward == SLOWER * at_once.forward
    assert SLOWER * at_once.backward < cost.backward < (SLOWER + 0.03) * at_once.backward
    small = LayerCosts(LLAMA)[replace(TILED, tile_tokens=64)]
    assert small.forward > 2 * at_once.forward
    assert small.backward > 2 * at_once.backward
    assert LayerCosts(LLAMA)[replace(TILED, tile_tokens=T)].forward == at_once.forward


SIZES = {
    "model_type": "llama", "vocab_size": 61, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 1,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 8192,
    "pad_token_id": 0,
}  # fmt: skip


def measured(policy: ActivationPolicy, tokens: int) -> int:
    """The most that backward of a frozen layer holds beyond its input and its output's gradient, by the allocator."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, attn_implementation="sdpa")
    model = transformers.LlamaModel(config).to(torch.bfloat16).requires_grad_(False)
    apply_policy(model, policy)
    x, gradient = torch.randn(2, 1, tokens, 64, dtype=torch.bfloat16)
    positions = model.rotary_emb(x, torch.arange(tokens)[None])

    def forward() -> torch.Tensor:
        return model.layers[0](x.detach().requires_grad_(), position_embeddings=positions)

    forward().backward(gradient)
    output = forward()
    with track_allocations() as seen:
        output.backward(gradient)
    return seen.peak_bytes


@pytest.mark.parametrize("keep", ["input", "attention"])
def test_bytes_are_those_of_the_allocator(keep: str) -> None:
    """By token of the whole sequence, in tiles of one size: to a few bytes."""
    policy = replace(TILED, keep=keep, mlp_level=None, tile_tokens=128)

    def expected(tokens: int) -> int:
        job = Job(read_shape(SIZES), tokens, 1, GPUS["h100"], torch.bfloat16, "sgd", adapters=1)
        cost = LayerCosts(job)[policy]
        return cost.whole + cost.backward_bytes - cost.saved - tokens * 2 * 64

    got, want = (f(4096) - f(2048) for f in (partial(measured, policy), expected))
    assert got == pytest.approx(want, abs=2048 * 8)


def test_where_they_are_planned() -> None:
    """In long sequences of layers that can run so; only for peaks that nothing else reaches."""
    assert {policy.tile_tokens for policy in tile_policies(LLAMA, offload=True)} == {TILE}
    assert [one.tile_tokens for one in tile_policies(replace(LLAMA, seq_len=9000), offload=False)] == [1024] * 4
    changes: tuple[dict[str, Any], ...]
    changes = ({"seq_len": 8191}, {"dtype": torch.float32}, {"attention_mask": True}, {"compile_layers": True})
    changes += tuple({"gpus": 2, "parallel": way} for way in ("zero3", "tp"))
    assert not any(tile_policies(replace(LLAMA, **change), offload=True) for change in changes)
    sharded = tile_policies(replace(LLAMA, gpus=2, parallel="fsdp2"), offload=False)
    assert [(one.keep, one.every) for one in sharded] == [("attention", 1), ("input", 1)]
    windows = (4096, 0) * 16
    assert not tile_policies(replace(LLAMA, shape=replace(LLAMA.shape, windows=windows)), offload=True)
    front = Search(LLAMA, 0).front
    tiled = [any(policy.tile_tokens for policy, _ in one.groups) for one in front]
    assert tiled == sorted(tiled, reverse=True)
    assert any(tiled)
    assert not all(tiled)


def test_a_plan() -> None:
    model = SHAPES["llama-3-8b"]
    plan = plan_memory(model, 500_000, 1, 73, 110, device="h100", adapters=Adapters(16))
    assert any(policy.tile_tokens for policy in plan.policies)
    assert plan.peak_bytes <= 73 * 2**30
    assert "tile_tokens=16384" in plan.lines()
    assert plan.longest_sequence >= 500_000
    assert any(cost.policy.tile_tokens for cost in plan.ladder)


def _measured() -> Iterator[Any]:
    """Steps of long sequences: model, layers, tokens, whether LoRA, the policies, seconds, how near plans are."""
    for model, file in (("llama-3-8b", "step-tiles-8b"), ("llama-3.2-1b", "step-tiles-1b")):
        found = json.loads((RESULTS / f"2026-11-27-{file}-h100.json").read_text())
        for row in found["rows"]:
            policy = row["way"].partition(":")[2]
            yield pytest.param(model, found["config"]["layers"], row["tokens"], False, policy, row["seconds"], 0.03)
    for model, layers, lora, file, near in (
        ("llama-3-8b", None, True, "21-longest-lora-196608-h100", 0.03),
        ("llama-3-8b", None, True, "21-longest-lora-360448-h100", 0.03),
        ("llama-3.2-1b", None, False, "27-longest-1b-524288-h100", 0.03),
        ("llama-3-8b", 8, True, "27-longest-lora-499712-h200", 0.1),  # a first step, which pins the host's memory too
    ):
        row = json.loads((RESULTS / f"2026-11-{file}.json").read_text())["rows"][0]
        yield pytest.param(model, layers, row["tokens"], lora, row["kept"], row["seconds"], near)


@pytest.mark.parametrize(("model", "layers", "tokens", "lora", "policy", "seconds", "near"), [*_measured()])
def test_steps_of_long_sequences_took_what_is_planned(
    model: str, layers: int | None, tokens: int, lora: bool, policy: str, seconds: float, near: float
) -> None:
    settings = SHAPES[model] if layers is None else with_layers(SHAPES[model], layers)
    adapters = Adapters(16, ("q_proj", "v_proj")) if lora else None
    job = Job(read_shape(settings), tokens, 1, GPUS["h100"], torch.bfloat16, "adamw", adapters=adapters)
    groups = tuple((one, 1) for one in layer_policies(policy, job.shape.layers))
    assert StepCosts(job).seconds(groups) == pytest.approx(seconds, rel=near)


def test_windows_leave_keys_and_values_in_the_cache() -> None:
    """A token of a longer sequence takes no longer, but for the share of tokens whose windows begin before it."""

    def seconds(windows: tuple[int, ...], tokens: int) -> float:
        job = replace(LLAMA, shape=replace(LLAMA.shape, windows=windows), seq_len=tokens)
        return LayerCosts(job)[INPUT].backward / tokens

    few, many = 65_536, 524_288
    assert seconds((4096,) * 32, many) == pytest.approx(seconds((4096,) * 32, few), rel=5e-3)
    assert seconds((4096, 0) * 16, many) > seconds((4096, 0) * 16, few)
    assert attention_reaches(many, 4096) > attention_reaches(few) > attention_reaches(many)
    assert attention_reaches(2048, 4096) == attention_reaches(2048)
