"""Plans with one saved input for several layers: bytes by hand and by the allocator, time, when they are chosen."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from lowtide.errors import ArgumentValueError
from lowtide.measure.allocations import track_allocations
from lowtide.memory import ActivationPolicy, apply_policy
from lowtide.memory.policy import layer_policies, mixture_of, words_of
from lowtide.models import patch
from lowtide.plan import plan_memory
from lowtide.plan.gpus import GPUS
from lowtide.plan.job import Job
from lowtide.plan.layer_costs import PAGES, LayerCosts
from lowtide.plan.runs import runs_of
from lowtide.plan.search import Search
from lowtide.plan.shapes import read_shape
from lowtide.plan.step_costs import StepCosts
from lowtide.train.shapes import SHAPES
from planner.jobs import FLASH_STATES, job_of, saved_by

GIB, T, H = 2**30, 8192, 4096
INPUT = ActivationPolicy(keep="input", mlp_level=1)
TWO, FOUR = (replace(INPUT, every=k) for k in (2, 4))
ONE, WHOLE = T * 2 * H, T * (13 * H + 8 + 32 * 4) + FLASH_STATES  # bytes that a layer saves


def test_bytes_by_phase() -> None:
    """Seven groups of 4 and one of 2: what the groups save, and in backward the inputs before the layer's own."""
    groups = ((FOUR, 30), (INPUT, 2))
    phases = {str(phase): phase.activations for phase in StepCosts(job_of()).phases(groups)}
    assert saved_by(job_of(), FOUR) == ONE
    assert phases["head"] == (8 + 2) * ONE + 2 * 2 * T * H
    assert phases["backward of layer 31"] == (8 + 1) * ONE + WHOLE
    assert phases["backward of layer 29"] == 8 * ONE + 1 * ONE + WHOLE - ONE
    assert phases["backward of layer 28"] == 8 * ONE + WHOLE - ONE
    assert phases["backward of layer 27"] == 7 * ONE + 3 * ONE + WHOLE - ONE
    assert phases["backward of layer 3"] == 1 * ONE + 3 * ONE + WHOLE - ONE
    assert phases["backward of layer 0"] == WHOLE
    assert phases["forward of layer 29"] == (8 + 1) * ONE  # its own input is there too
    assert phases["forward of layer 28"] == 8 * ONE


def test_offloaded_groups() -> None:
    """The last two groups' inputs stay; a group's own and that of the one before are on the GPU in its backward."""
    away = replace(FOUR, offload=True)
    assert runs_of([(away, 30), (INPUT, 2)]) == [(away, 24, True), (away, 6, False), (INPUT, 2, False)]
    assert runs_of([(away, 8)]) == [(away, 8, False)]
    costs = StepCosts(job_of())
    groups = ((away, 30), (INPUT, 2))
    assert costs.on_host(groups) == 6 * (ONE + PAGES)
    phases = {str(phase): phase.activations for phase in costs.phases(groups)}
    assert phases["head"] == (2 + 2) * ONE + 2 * 2 * T * H
    assert phases["backward of layer 23"] == (1 + 1 + 3) * ONE + PAGES + WHOLE - ONE
    assert phases["backward of layer 3"] == 3 * ONE + WHOLE  # no group before it
    assert phases["backward of layer 0"] == WHOLE
    cost = costs.layers[away]
    assert cost.transfer == pytest.approx(ONE / 4 / job_of().gpu.pcie)


def test_what_it_takes() -> None:
    """A forward more for three of four layers: FLOP, and seconds where the GPU sets the pace."""
    job = job_of(seq_len=32768)
    one, four = (LayerCosts(job)[policy] for policy in (INPUT, FOUR))
    gemms = 2 * job.tokens * (2 * H * H + 2 * H * 1024 + 3 * H * 14336)
    attention = 4 * job.tokens**2 / 2 * H
    assert four.flop - one.flop == pytest.approx(3 / 4 * (gemms + attention))
    assert four.forward == one.forward
    assert four.backward - one.backward == pytest.approx(3 / 4 * one.forward, rel=0.02)


SIZES = {
    "model_type": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 1024,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip


def measured(text: str, dtype: torch.dtype) -> tuple[int, int]:
    """Return what a model's forward leaves, and the most that its step holds from then on, by the allocator."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).to(dtype)
    model.config.use_cache = False
    patch(model)
    apply_policy(model, layer_policies(text, 8))
    ids = torch.randint(1, 61, (1, 1024))
    model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad()
    gc.collect()
    with track_allocations() as forward:
        loss = model(input_ids=ids, labels=ids).loss
    with track_allocations() as backward:
        loss.backward()
    saved = forward.events[-1].total_bytes
    return saved, saved + backward.peak_bytes


def planned(text: str, dtype: torch.dtype) -> tuple[int, int]:
    job = Job(read_shape(SIZES), 1024, 1, GPUS["h100"], dtype, "sgd")
    phases = StepCosts(job).phases(mixture_of(layer_policies(text, 8)))
    of = {name: max(p.bytes for p in phases if p.name == name) for name in ("head", "backward")}
    return of["head"], of["backward"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("text", ["8 x input/1 every 2", "8 x input/1 every 4", "6 x input/1 every 4, 2 x input/1"])
def test_bytes_are_those_of_the_allocator(text: str, dtype: torch.dtype) -> None:
    """To the byte what forward saves less than with every layer's input, but for a random state of each layer."""
    every = [layer.every > 1 for layer in layer_policies(text, 8)]
    states = sum(every) * torch.get_rng_state().numel()
    both = [(measured(one, dtype), planned(one, dtype)) for one in (text, "8 x input/1")]
    (got, want), (base, want_base) = both
    saved, most = ((a - b) - (c - d) for a, b, c, d in zip(got, base, want, want_base, strict=True))
    assert saved == states
    assert 0 <= most <= states
    assert want_base[1] - want[1] > 3 * states


def test_the_last_resort() -> None:
    """Chosen where nothing else fits, and never where it does."""
    model = SHAPES["llama-3-8b"]
    roomy = plan_memory(model, 65536, 1, 74, device="h100", optimizer="sgd")
    assert all(policy.every == 1 for policy in roomy.policies)
    search = Search(roomy.job, 0)
    least_without = min(one.peak for one in search.candidates if all(p.every == 1 for p, _ in one.groups))
    assert all(policy.every == 1 for one in search.front if one.peak >= least_without for policy, _ in one.groups)
    tight = plan_memory(model, 65536, 1, (least_without - 1) / GIB, device="h100", optimizer="sgd")
    assert any(policy.every > 1 for policy in tight.policies)
    assert search.least().peak == search.front[0].peak < least_without
    assert tight.longest_sequence >= 65536
    text = str(tight)
    assert "input/1 every 2   " in text
    assert words_of(mixture_of(tight.policies)) in text
    assert [cost.policy.every for cost in tight.ladder][-2:] == [2, 4]
    each = {one["policy"]: one["bytes_per_token"] for one in tight.to_dict()["ladder"]}
    assert each["input/1"] == 2 * each["input/1 every 2"] == 4 * each["input/1 every 4"] == 2 * H


def test_compiled_layers_have_none() -> None:
    found: Any = plan_memory(SHAPES["llama-3.2-1b"], 8192, 1, 60, device="h100", compile_layers=True)
    assert all(cost.policy.every == 1 for cost in found.ladder)
    assert Search(found.job, 2**34).sparse == []


def test_a_budget_below_it_is_refused() -> None:
    with pytest.raises(ArgumentValueError, match="every 4"):
        plan_memory(SHAPES["llama-3.2-1b"], 262144, 1, 16, device="h100")
