"""`plan_memory`: the fastest that fits, what is said, and refusals that help."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from lowtide.memory.policy import words_of
from lowtide.plan import Adapters, MemoryPlan, plan_memory
from lowtide.plan.config import nf4
from lowtide.plan.gpus import GPUS
from lowtide.plan.search import Candidate
from lowtide.train.shapes import SHAPES
from planner.jobs import FEW, GIB, plan
from promises import promise

pytestmark = promise("plans")
pytest.importorskip("transformers")


@pytest.mark.parametrize(("seq_len", "host_gib"), [(1024, 0), (32768, 0.1), (32768, 50)])
def test_no_mixture_beats_the_choice(seq_len: int, host_gib: float) -> None:
    """All mixtures of a model of 4 layers in the order of memory, one by one, for budgets from the least up."""
    search = plan(seq_len=seq_len, budget=60, host_gib=host_gib).search
    saved = {policy: int(search.costs.of_layers(policy).saved.sum()) for policy in search.ladder}
    by_memory = sorted(saved, key=lambda policy: (0, saved[policy]) if policy.offload else (saved[policy], 0))
    every = []
    for layers in itertools.combinations_with_replacement(by_memory, 4):
        every += search.candidates_of([(policy, len(list(same))) for policy, same in itertools.groupby(layers)])
    least, most = min(one.peak for one in every), max(one.peak for one in every)
    assert search.front[0].peak <= search.leanest().peak <= least * 1.0005
    for share in (0.03, 0.1, 0.35, 0.5, 1):
        budget = int(least + share * (most - least))
        found = search.fastest(budget)
        assert found is not None
        assert found.peak <= budget
        assert found.host <= host_gib * GIB
        fastest = min(one.seconds for one in every if one.peak <= budget)
        assert found.seconds == pytest.approx(fastest, rel=5e-3)  # mixtures of four and more are not tried
    for a, b in itertools.pairwise(search.front):
        assert (a.peak < b.peak, a.seconds > b.seconds) == (True, True)


def test_the_last_resort_is_one_input_for_several_layers() -> None:
    """Chosen where nothing else fits, and never where it does."""
    given: dict[str, Any] = {"model": SHAPES["llama-3.2-1b"], "seq_len": 65536, "optimizer": "sgd"}
    front = plan(budget=74, **given).search.front
    most = [one for one in front if any(policy.every > 1 for policy, _ in one.groups)]
    assert most == front[: len(most)]
    tight = plan(budget=most[-1].peak / GIB, **given)
    assert any(policy.every > 1 for policy in tight.policies)
    assert words_of(tight.chosen.groups) in str(tight)
    with pytest.raises(ArgumentValueError, match="every 2"):
        plan(budget=6, **given)


def test_a_budget_that_is_too_small_is_refused_with_what_is_lacking() -> None:
    given: dict[str, Any] = {"seq_len": 32768, "batch_size": 2}
    with pytest.raises(ArgumentValueError) as caught:
        plan(budget=8, **given)
    text = str(caught.value)
    needed, got, lacking = (
        float(x) for x in re.findall(r"least ([\d.]+) .*got ([\d.]+) GiB of the h100, ([\d.]+) GiB", text)[0]
    )
    assert (got, lacking) == (8, pytest.approx(needed - got, abs=0.011))
    assert plan(budget=needed + 0.01, **given).peak_bytes <= (needed + 0.01) * GIB
    host = int(re.findall(r"host_gib=(\d+) fits", text)[0])
    assert plan(budget=8, host_gib=host, **given).peak_bytes <= 8 * GIB
    sequence = int(re.findall(r"seq_len=(\d+) fits", text)[0])
    assert plan(budget=8, seq_len=sequence, batch_size=2).peak_bytes <= 8 * GIB
    assert "batch_size=1 fits" in text
    assert "sgd" not in text, "nobody would take it"


def test_what_helps_where_states_alone_do_not_fit() -> None:
    llama = SHAPES["llama-3-8b"]
    with pytest.raises(ArgumentValueError, match=r"help: .*states alone take 59\.83 GiB: train adapters \(LoRA\) or"):
        plan(llama, budget=30)
    with pytest.raises(ArgumentValueError, match=r"help: optimizer=adamw-8bit fits; .* alone take 59\.83 GiB"):
        plan(llama, budget=50)
    with pytest.raises(ArgumentValueError, match="or store weights and states in 16 bits"):
        plan(llama, budget=30, dtype=None)
    with pytest.raises(ArgumentValueError, match="help: gpus=4 fits"):
        plan(llama, seq_len=2048, budget=24, gpus=2)
    large = {**SHAPES["llama-3-70b"], "num_hidden_layers": 60}
    with pytest.raises(
        ArgumentValueError, match=r"budget_gib.*: put the frozen weights into 4 bits .*, --load-in-4bit"
    ):
        plan(large, seq_len=1024, budget=60, adapters=Adapters(16))
    packed = plan({**large, "quantization_config": nf4(nested=True)}, 1024, 60, adapters=Adapters(16))
    assert "layers in 4 bits, double quantisation" in packed.answer()


def chosen_where(is_wanted: Callable[[Candidate], bool], **given: Any) -> MemoryPlan:
    """A plan in a budget in which something wanted is the fastest."""
    wanted = [one for one in plan(budget=60, **given).search.front if is_wanted(one)]
    return plan(budget=wanted[len(wanted) // 2].peak / GIB, **given)


@pytest.mark.parametrize("late", [False, True])
def test_what_is_said_of_offloaded_states(late: bool) -> None:
    def moves(one: Candidate) -> bool:
        return one.states > 0 and one.late == late

    found = chosen_where(moves, seq_len=32768, host_gib=64)
    assert moves(found.chosen)
    everything = found.chosen.states == found.search.costs.states
    assert found.states_gib == (None if everything else found.chosen.states / GIB)
    assert f"{found.chosen.states / GIB:.2f} GiB of states offloaded" in found.answer()
    assert ("until after backward" in found.answer().splitlines()[0]) == late
    assert any("expandable_segments" in note for note in found.notes)
    assert plan(seq_len=32768, budget=60, host_gib=64).chosen.states == 0, "everything fits as it is"


def test_the_answer_comes_first_and_the_other_precision_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """As lowtide train and TRL have it where nothing is said: float32 weights and states under autocast."""
    found, narrow = plan(dtype=None), plan()
    lines = str(found).splitlines()
    assert lines[0].startswith(
        f"float32 weights under bfloat16 autocast: peak {found.peak_bytes / GIB:.2f} of 16.00 GiB"
    )
    assert f"{found.seconds:.3f} s per step, {16384 / found.seconds:,.0f} tokens/s; {found.chosen}" in lines[0]
    assert lines[1].startswith(f"bfloat16 weights (--dtype bfloat16): peak {narrow.peak_bytes / GIB:.2f} GiB, ")
    assert lines[2] == "llama, 0.51 billion parameters in 4 layers; 1 x 16384 tokens, adamw, on h100"
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert (told["choice"]["seconds"], told["other"]["seconds"]) == (found.seconds, narrow.seconds)
    tight = plan(dtype="bfloat16", budget=8)
    assert "(--dtype float32): does not fit" in tight.answer()
    short = plan(seq_len=512)
    assert "at least 0.0" in short.answer()
    assert any("the host, which launches the kernels, sets the pace" in note for note in short.notes)
    assert "at least" not in found.answer()
    several = plan(gpus=2, link="100GB", budget=40)
    rate = several.tokens_per_second
    assert f"{rate / 2:,.0f} tokens/s per GPU, {rate:,.0f} in all" in several.answer()
    assert "on 2 x h100 by fsdp2" in several.title
    assert any("GiB per step at 100 GB/s" in note for note in several.notes)
    assert "at least" in plan(gpus=2, parallel="zero3", budget=60).answer(), "its hooks take time"
    alone = plan(seq_len=640)
    monkeypatch.setattr("lowtide.plan.report.Search.fastest", Mock(side_effect=ArgumentValueError("scalar type")))
    assert (alone.other, len(alone.answer().splitlines())) == (None, 2)


def test_notes_say_what_is_assumed() -> None:
    said = {
        "have sliding windows": plan({**FEW, "model_type": "mistral", "sliding_window": 1024}, 8192, 70),
        "caps its scores": plan(SHAPES["gemma-2-2b"], 512, 70),
        "float32: assumes attention": plan(seq_len=512, dtype="float32", autocast=False),
        "numbers of adapters are trained": plan(adapters=Adapters(16)),
        "attention has a mask of 0.5 GiB": plan(attention_mask=True),
        "and stay in 16": plan({**EXPERTS, "quantization_config": nf4(nested=False)}, adapters=Adapters(4)),
    }
    for words, found in said.items():
        assert words in " ".join(found.notes)
        assert words not in " ".join(plan(seq_len=8192).notes)


EXPERTS = {
    "model_type": "mixtral", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 999,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8, "tie_word_embeddings": False,
}  # fmt: skip


def test_adapters_over_experts_are_planned_under_autocast() -> None:
    """Which peft turns off where it adds them to the experts' weights, whose dtype may not change."""
    found = plan(EXPERTS, 512, dtype=None, adapters=Adapters(4))
    assert (found.job.autocast, found.job.model.adapter_params > 0) == (True, True)


@pytest.mark.parametrize("device", ["h100", "rtx4090", "small"])
def test_a_budget_leaves_the_allocator_its_part_of_the_gpu(device: Any) -> None:
    """2% and at least 1 GiB: a plan of more would not run."""
    gpu = GPUS.get(device) or dataclasses.replace(GPUS["h100"], memory_gib=8.0, name="small")
    found, own = (plan_memory(FEW, 512, budget_gib=budget, device=gpu, dtype="bfloat16") for budget in (1000, None))
    most = min(int(0.98 * gpu.memory_bytes), gpu.memory_bytes - GIB)
    assert (found.budget_bytes, own.budget_bytes) == (most, min(most, int(0.93 * gpu.memory_bytes)))
    with pytest.raises(ArgumentValueError, match=rf"got [\d.]+ GiB of the {device}, "):
        plan_memory(FEW, 2**23, budget_gib=1000, device=gpu)


@promise("errors")
@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"seq_len": 0}, ArgumentValueError, "seq_len"),
        ({"seq_len": 8.0}, ArgumentTypeError, "seq_len"),
        ({"batch_size": True}, ArgumentTypeError, "batch_size"),
        ({"budget_gib": 0}, ArgumentValueError, "budget_gib"),
        ({"host_gib": -1}, ArgumentValueError, "host_gib"),
        ({"link": 0}, ArgumentValueError, "link"),
        ({"device": "h1000"}, ArgumentValueError, "device"),
        ({"device": 3}, ArgumentValueError, "device"),
        ({"dtype": torch.int8}, ArgumentValueError, "dtype"),
        ({"optimizer": ["adamw"]}, ArgumentValueError, "optimizer"),
        ({"autocast": "on"}, ArgumentValueError, "autocast"),
        ({"autocast": True, "dtype": "bfloat16"}, ArgumentValueError, "autocast"),
        ({"keep_gradients": None}, ArgumentValueError, "keep_gradients"),
        ({"options": {}}, ArgumentTypeError, "options"),
        ({"adapters": 16}, ArgumentTypeError, "adapters"),
        ({"gpus": 0}, ArgumentValueError, "gpus"),
        ({"gpus": 2, "parallel": "tp"}, ArgumentValueError, "parallel"),
        ({"gpus": 2, "host_gib": 4}, ArgumentValueError, "host_gib"),
        ({"gpus": 2, "optimizer": "adamw-8bit"}, ArgumentValueError, "optimizer"),
        ({"gpus": 2, "parallel": "zero3", "dtype": "float32", "autocast": False}, ArgumentValueError, "dtype"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], error: type[Exception], named: str) -> None:
    given = {"config": FEW, "seq_len": 8, "batch_size": 1, "budget_gib": 20, "device": "h100", **change}
    with pytest.raises(error, match=f"^{named}: expected"):
        plan_memory(**given)


@promise("errors")
@pytest.mark.parametrize(
    ("model", "more", "error"),
    [
        ({}, {"adapters": None}, "adapters: expected LoRA for weights in 4 bits, which are frozen, got none"),
        ({}, {"autocast": True, "dtype": "float32"}, "autocast: expected False for weights in 4 or 16"),
        ({"llm_int8_skip_modules": ["lm_head", "model.layers.0.mlp"]}, {}, "modules, got .*model.layers.0.mlp"),
        ({"llm_int8_skip_modules": ["vision"]}, {}, "the output layer, .* among llm_int8_skip_modules, got vision"),
        ({"bnb_4bit_compute_dtype": "float32"}, {"dtype": "bfloat16"}, "expected bfloat16, .* got float32. Set it"),
        ({"load_in_4bit": False, "load_in_8bit": True}, {}, "expected unset, .* got bitsandbytes in 8 bits"),
        ({"quant_method": "gptq", "load_in_4bit": False}, {}, "expected unset.*got gptq. Plan its config without"),
    ],
)
def test_what_is_refused_of_quantised_weights(model: dict[str, Any], more: dict[str, Any], error: str) -> None:
    config = {**FEW, "quantization_config": {**nf4(nested=False), **model}}
    with pytest.raises(ArgumentValueError, match=error):
        plan_memory(config, 64, 1, device="h100", **{"adapters": Adapters(4), **more})


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_no_gpu_can_be_measured_where_there_is_none() -> None:
    with pytest.raises(UnsupportedError, match=r"^device: expected a CUDA GPU"):
        plan(device="cuda")
    assert plan_memory(FEW, 1024, 1).job.gpu.name == "h100"
