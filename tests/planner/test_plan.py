"""`plan_memory`: the fastest that fits, the longest and the largest that fit, and refusals that help."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lowtide
from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from lowtide.memory import ActivationPolicy
from lowtide.plan import MemoryPlan, plan_memory
from lowtide.plan.gpus import GPUS
from lowtide.plan.search import Search, ladder
from lowtide.train.shapes import SHAPES

GIB = 2**30
LLAMA = SHAPES["llama-3.2-1b"]
FEW = {**LLAMA, "num_hidden_layers": 5}


PLANS: dict[str, MemoryPlan] = {}


def plan(model: Any = LLAMA, seq_len: int = 16384, batch: int = 1, budget: float = 16, **kwargs: Any) -> MemoryPlan:
    """A plan, which is made once for several tests: it takes up to a second."""
    key = repr((model, seq_len, batch, budget, kwargs))
    if key not in PLANS or not isinstance(model, dict):
        PLANS[key] = plan_memory(model, seq_len, batch, budget, **{"device": "h100", **kwargs})
    return PLANS[key]


@pytest.mark.parametrize("host_gib", [0, 3])
def test_more_budget_is_never_slower_and_none_is_overdrawn(host_gib: float) -> None:
    """Of one search, which `plan_memory` would make anew for each budget; what it returns is the search's choice."""
    most = plan(budget=79, host_gib=host_gib)
    search = Search(most.job, int(host_gib * GIB))
    last = float("inf")
    for budget in (11, 11.5, 12, 13, 14, 15.7, 18, 22, 30, 79):
        found = search.fastest(int(budget * GIB))
        assert found is not None
        assert found.peak <= budget * GIB
        assert found.host <= host_gib * GIB
        assert found.seconds <= last
        assert len(found.policies) == 16
        last = found.seconds
    assert set(most.policies) == {ActivationPolicy(mlp_level=0)}
    assert (most.chosen, most.peak_bytes, most.host_bytes) == (found, found.peak, found.host)
    assert (most.policies, most.seconds) == (found.policies, found.seconds)


@pytest.mark.parametrize(("host_gib", "seq_len"), [(0, 1024), (0.1, 32768), (50, 32768)])
def test_no_mixture_beats_the_choice(seq_len: int, host_gib: float) -> None:
    """All mixtures of a model of 5 layers in the order of memory, one by one, for budgets from the least up."""
    search = Search(plan(FEW, seq_len, budget=60, host_gib=host_gib).job, int(host_gib * GIB))
    by_memory = sorted(
        ladder(search.job, offload=host_gib > 0), key=lambda p: search.costs.layers[p].places(moves=p.offload)
    )
    every = []
    for layers in itertools.combinations_with_replacement(by_memory, 5):
        one = search.candidate([(policy, len(list(same))) for policy, same in itertools.groupby(layers)])
        if one.host <= host_gib * GIB:
            every += search.with_offloads(one)
    least, most = min(one.peak for one in every), max(one.peak for one in every)
    assert search.least().peak <= least * 1.0005
    for share in (0.03, 0.1, 0.2, 0.35, 0.5, 0.75, 1):
        budget = least + share * (most - least)
        fastest = min(one.seconds for one in every if one.peak <= budget)
        found = search.fastest(int(budget))
        assert found is not None
        assert found.seconds == pytest.approx(fastest, rel=5e-3)  # mixtures of four and more are not tried
    assert plan(FEW, seq_len, budget=budget / GIB, host_gib=host_gib).chosen == found


def test_the_front_is_one() -> None:
    front = plan(host_gib=8).front
    for a, b in itertools.pairwise(front):
        assert a.peak < b.peak
        assert a.seconds > b.seconds


@pytest.mark.parametrize("host_gib", [0])
def test_the_longest_sequence_is_really_the_longest(host_gib: int) -> None:
    found = plan(seq_len=2048, host_gib=host_gib)
    for more in (0, 256, 512, 4096):
        longer = dataclasses.replace(found.job, seq_len=found.longest_sequence + more)
        assert (Search(longer, host_gib * GIB).fastest(16 * GIB) is None) == (more > 0)
    if not host_gib:
        with pytest.raises(ArgumentValueError, match=r"^budget_gib: expected at least"):
            plan(seq_len=found.longest_sequence + 256)


def test_the_largest_batch_is_really_the_largest() -> None:
    largest = plan(seq_len=4096).largest_batch
    assert plan(seq_len=4096, batch=largest).peak_bytes <= 16 * GIB
    with pytest.raises(ArgumentValueError, match=f"batch_size={largest} fits"):
        plan(seq_len=4096, batch=largest + 1)


def test_a_budget_that_is_too_small_is_refused_with_what_is_lacking() -> None:
    with pytest.raises(ArgumentValueError) as caught:
        plan(seq_len=49152, batch=2, budget=16)
    text = str(caught.value)
    needed, got, lacking = (float(x) for x in re.findall(r"least ([\d.]+) .*got ([\d.]+), ([\d.]+) GiB", text)[0])
    assert got == 16
    assert lacking == pytest.approx(needed - got, abs=0.011)
    assert plan(seq_len=49152, batch=2, budget=needed + 0.01).peak_bytes <= (needed + 0.01) * GIB
    host = int(re.findall(r"host_gib=(\d+) fits", text)[0])
    assert plan(seq_len=49152, batch=2, budget=16, host_gib=host).peak_bytes <= 16 * GIB
    sequence = int(re.findall(r"seq_len=(\d+) fits", text)[0])
    assert plan(seq_len=sequence, batch=2, budget=16).peak_bytes <= 16 * GIB
    assert "batch_size=1 fits" in text


def test_states_that_do_not_fit_are_named_as_the_cause() -> None:
    with pytest.raises(ArgumentValueError, match=r"help: parameters.*states alone take 59\.83 GiB: train adapters"):
        plan(SHAPES["llama-3-8b"], budget=30)
    with pytest.raises(ArgumentValueError, match=r"help: optimizer sgd fits; .* alone take 59\.83 GiB\.$"):
        plan(SHAPES["llama-3-8b"], budget=40)
    assert plan(SHAPES["llama-3-8b"], budget=40, optimizer="sgd").peak_bytes <= 40 * GIB
    with pytest.raises(ArgumentValueError, match=r"help: optimizer adamw-8bit or sgd or sgd-momentum fits; "):
        plan(SHAPES["llama-3-8b"], budget=56)


def run_lines(found: MemoryPlan, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a plan's lines of Python; return the arguments of what they call."""
    calls: dict[str, Any] = {}
    for name in ("lowtide.patch", "lowtide.memory.apply_policy", "lowtide.memory.offload_optimizer"):
        of = name.rpartition(".")[2]
        monkeypatch.setattr(name, lambda *args, of=of, **kwargs: calls.update({of: (*args, kwargs)}))
    model = SimpleNamespace(config=SimpleNamespace(use_cache=True))
    exec(found.lines(), {"model": model, "optimizer": 7})
    assert not model.config.use_cache
    assert all(model in args for args in calls.values())
    return {of: tuple(one for one in args if one is not model) for of, args in calls.items()}


def test_the_lines_are_python_that_makes_the_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan(seq_len=32768, budget=13, host_gib=2)
    assert any(policy.offload for policy in found.policies)
    assert run_lines(found, monkeypatch) == {"patch": ({},), "apply_policy": (list(found.policies), {"host_gib": 2})}
    options = lowtide.HeadOptions(workspace_mib=100.5, gradient="recompute")
    found = plan(FEW, seq_len=2048, budget=40, options=options)
    assert run_lines(found, monkeypatch) == {
        "patch": ({"options": options},),
        "apply_policy": (list(found.policies), {}),
    }
    bare = plan(FEW, seq_len=2048, budget=40, options=lowtide.HeadOptions())
    assert "lowtide.patch(model)\n" in bare.lines()


@pytest.mark.parametrize(("seq_len", "budget", "late"), [(32768, 16, False), (8192, 10.5, False), (98304, 16, True)])
def test_the_lines_offload_the_optimizers_states(
    seq_len: int, budget: float, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = plan(seq_len=seq_len, budget=budget, host_gib=64)
    assert found.chosen.states > 0
    assert found.chosen.late == late
    optimizer, settings = run_lines(found, monkeypatch)["offload_optimizer"]
    everything = Search(found.job, 0).costs.states
    amount = {"gib": found.chosen.states / GIB} if found.chosen.states < everything else {}
    assert (optimizer, settings) == (7, {**amount, **({"late": True} if late else {})})
    assert f"{found.chosen.states / GIB:.2f} GiB of states offloaded" in str(found)
    assert "states leave and come back in each step: set PYTORCH_CUDA_ALLOC_CONF" in str(found)
    told = found.to_dict()["choice"]
    assert (told["states_gib"], told["late"]) == (found.chosen.states / GIB, late)


def test_states_stay_where_requested_or_where_nothing_is_gained() -> None:
    for found in (
        plan(seq_len=32768, host_gib=64, offload_states=False),
        plan(seq_len=32768, host_gib=0),
        plan(seq_len=32768, host_gib=64, budget=60),  # everything fits as it is
    ):
        assert found.chosen.states == 0
        assert "offload_optimizer" not in found.lines()
        assert "states leave" not in str(found)
    assert plan(seq_len=32768, host_gib=64).seconds < plan(seq_len=32768, host_gib=64, offload_states=False).seconds


def test_states_that_come_back_late_make_sequences_longer() -> None:
    found = plan(seq_len=2048, host_gib=64)
    assert found.longest_sequence > 1.5 * plan(seq_len=2048, host_gib=64, offload_states=False).longest_sequence
    longest = plan(seq_len=found.longest_sequence, host_gib=64)
    assert longest.chosen.late
    assert longest.peak_bytes <= 16 * GIB
    assert "until after backward" in str(longest)


@pytest.mark.parametrize("device", ["h100", "rtx4090"])
def test_a_budget_leaves_the_allocator_its_part_of_the_gpu(device: str) -> None:
    """2% and at least 1 GiB: a plan of more would not run."""
    memory = GPUS[device].memory_bytes
    found = plan(FEW, seq_len=512, budget=1000, device=device)
    assert found.budget_bytes == min(int(0.98 * memory), memory - 2**30)
    assert found.peak_bytes <= found.budget_bytes
    assert "GiB, not 1000.00: of the" in str(found).splitlines()[1]
    assert "not" not in str(plan(FEW, seq_len=512, budget=8, device=device)).splitlines()[1]
    with pytest.raises(ArgumentValueError, match=f"got 1000.00, of which the {device} can use"):
        plan(FEW, seq_len=2**22, budget=1000, device=device)


def test_a_gpus_own_budget_leaves_the_allocator_its_part() -> None:
    small = dataclasses.replace(GPUS["h100"], memory_gib=8.0, name="small")
    for device, expected in ((small, 7 * GIB), ("rtx4090", int(GPUS["rtx4090"].memory_bytes * 0.93))):
        found = plan_memory(FEW, 512, 1, None, 0, device)
        assert found.budget_bytes == found.requested_bytes == expected
        assert "not" not in str(found).splitlines()[1]


def test_it_prints_what_it_found() -> None:
    found = plan(seq_len=32768, budget=16)
    text = str(found)
    assert str(found.chosen) in text
    assert found.lines() in text
    assert f"peak {found.peak_bytes / GIB:.2f} of 16.00 GiB" in text
    assert f"{found.longest_sequence:,} tokens" in text
    assert "the peak" in text
    for line in found.chart().splitlines():
        assert len(line) <= 80
    alone = plan({**LLAMA, "num_hidden_layers": 1}, seq_len=16, budget=16)  # the front's only point
    assert found.chart().count("X") == alone.chart().count("X") == 2  # and in the legend
    assert json.loads(json.dumps(found.to_dict()))["choice"]["seconds"] == found.seconds


def test_a_model_on_the_meta_device_is_planned_like_its_config() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**FEW)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert plan(model, 4096).to_dict() == plan(config, 4096).to_dict() == plan(FEW, 4096).to_dict()
    in_float32 = plan(model.float(), 4096)
    assert in_float32.job.dtype == torch.float32
    assert in_float32.peak_bytes > plan(model.bfloat16(), 4096).peak_bytes


def test_mixtures_of_experts_have_levels_where_they_are_fused() -> None:
    experts = {
        "model_type": "mixtral", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
        "vocab_size": 999, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8,
        "num_experts_per_tok": 2, "tie_word_embeddings": False,
    }  # fmt: skip
    found, stock = plan(experts, 1024), plan(experts, 1024, fused_mlp=False)
    assert {policy.mlp_level for policy in found.policies} == {0}
    assert {policy.mlp_level for policy in stock.policies} == {None}
    assert any("experts are not fused" in note for note in stock.notes)
    assert not any("experts are not fused" in note for note in found.notes)


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"seq_len": 0}, ArgumentValueError, "seq_len"),
        ({"seq_len": 8.0}, ArgumentTypeError, "seq_len"),
        ({"batch_size": True}, ArgumentTypeError, "batch_size"),
        ({"budget_gib": 0}, ArgumentValueError, "budget_gib"),
        ({"budget_gib": float("nan")}, ArgumentValueError, "budget_gib"),
        ({"budget_gib": "40"}, ArgumentTypeError, "budget_gib"),
        ({"budget_gib": 1e300}, ArgumentValueError, "budget_gib"),
        ({"host_gib": 10**400}, ArgumentValueError, "host_gib"),
        ({"host_gib": -1}, ArgumentValueError, "host_gib"),
        ({"offload_states": True}, ArgumentValueError, "offload_states"),
        ({"offload_states": 0}, ArgumentValueError, "offload_states"),
        ({"device": "h1000"}, ArgumentValueError, "device"),
        ({"device": 3}, ArgumentTypeError, "device"),
        ({"dtype": "int8"}, ArgumentValueError, "dtype"),
        ({"dtype": torch.int8}, ArgumentValueError, "dtype"),
        ({"optimizer": "adam"}, ArgumentValueError, "optimizer"),
        ({"optimizer": ["adamw"]}, ArgumentValueError, "optimizer"),
        ({"autocast": 1}, ArgumentTypeError, "autocast"),
        ({"autocast": True, "dtype": "bfloat16"}, ArgumentValueError, "dtype"),
        ({"keep_gradients": 1}, ArgumentTypeError, "keep_gradients"),
        ({"options": {}}, ArgumentTypeError, "options"),
        ({"adapters": 0}, ArgumentValueError, "adapters"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], error: type[Exception], named: str) -> None:
    arguments = {"model_or_config": LLAMA, "seq_len": 8, "batch_size": 1, "budget_gib": 20, "device": "h100", **change}
    with pytest.raises(error, match=f"^{named}: expected"):
        plan_memory(**arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_no_gpu_can_be_measured_where_there_is_none() -> None:
    with pytest.raises(UnsupportedError, match=r"^device: expected a CUDA GPU"):
        plan(device="cuda")
    assert plan_memory(LLAMA, 1024, 1).job.gpu.name == "h100"
