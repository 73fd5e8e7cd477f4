"""Plans of several GPUs: by hand, beside measured steps, and what is refused. tests/distributed counts what is held."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from lowtide.errors import ArgumentValueError
from lowtide.memory import ActivationPolicy
from lowtide.plan import plan_memory
from lowtide.plan.gpus import GPUS
from lowtide.plan.job import Job
from lowtide.plan.sharding import BUCKET, LIVE, SUB_GROUP
from lowtide.plan.step_costs import Phase, StepCosts
from lowtide.train.shapes import SHAPES
from planner.jobs import job_of, saved_by

T, H, V, LAYER, PARAMS = 8192, 4096, 128_256, 218_112_000, 8_030_261_248  # of Llama-3-8B
VOCAB, TAIL = V * H, V * H + H  # the embedding's unit, and that of the last norm and the output layer
ALL, INPUT = ActivationPolicy(mlp_level=0), ActivationPolicy(keep="input", mlp_level=0)


def one(name: str = "llama-3-8b", **changes: Any) -> Job:
    return job_of(name, **{"seq_len": T, "gpu": GPUS["h200"], "optimizer": "adamw", **changes})


def tied() -> Job:
    return one("llama-3.2-1b")


def shared(job: Job, gpus: int, parallel: str = "fsdp2") -> Job:
    return replace(job, gpus=gpus, parallel=parallel)


def phases_of(job: Job, policy: ActivationPolicy = ALL) -> dict[str, Phase]:
    return {str(phase): phase for phase in StepCosts(job).phases(((policy, job.shape.layers),))}


@pytest.mark.parametrize(
    ("model", "tokens", "gpus", "parallel", "batch", "gib", "seconds"),
    [
        ("llama-3.2-1b", 8192, 1, "fsdp2", 1, 9.86, 0.182),
        ("llama-3-8b", 8192, 1, "fsdp2", 1, 60.09, 0.947),
        ("llama-3.2-1b", 8192, 2, "fsdp2", 1, 6.33, 0.223),
        ("llama-3-8b", 8192, 2, "fsdp2", 1, 32.38, 1.0),
        ("llama-3.2-1b", 16384, 2, "fsdp2", 1, 7.08, 0.461),
        ("llama-3-8b", 16384, 2, "fsdp2", 1, 33.57, 2.161),
        ("llama-3.2-1b", 16384, 1, "fsdp2", 1, 10.48, 0.442),
        ("llama-3-8b", 16384, 1, "fsdp2", 1, 61.0, 2.087),
        ("llama-3-8b", 8192, 4, "zero3", 1, 42.07, 1.166),
        ("llama-3-8b", 8192, 2, "zero3", 2, 78.01, 1.974),
    ],
)
def test_steps_on_h200_took_what_is_planned(
    model: str, tokens: int, gpus: int, parallel: str, batch: int, gib: float, seconds: float
) -> None:
    """Measured with every layer checkpointed, in bfloat16; by ZeRO-3 with float32 gradients, which are not planned."""
    job = one(model, seq_len=tokens, batch_size=batch, gpus=gpus, parallel=parallel)
    costs, groups = StepCosts(job), ((INPUT, job.shape.layers),)
    more = 2 * job.shape.params / gpus * (parallel == "zero3")
    assert (costs.peak(groups).bytes + more) / 2**30 == pytest.approx(gib, rel=0.03)
    assert costs.seconds(groups) == pytest.approx(seconds, rel=0.15)


def test_fsdp2_by_hand() -> None:
    """Two bytes per number, on two GPUs; what is gathered is whole."""
    alone, phases = phases_of(one()), phases_of(shared(one(), 2))
    for name, phase in phases.items():
        assert (phase.weights, phase.optimizer) == (PARAMS, 2 * PARAMS)
        if name in alone:
            same = ("activations", "head", "other")
            assert [getattr(phase, part) for part in same] == [getattr(alone[name], part) for part in same]
    first, last = phases["backward of layer 0"], phases["backward of layer 31"]
    assert first.gathered == 2 * (LAYER + VOCAB + LAYER)  # its own, the next one to come, the reduction of the last
    assert last.gathered == 2 * (LAYER + LAYER + TAIL)
    assert phases["backward of layer 1"].gathered == 2 * 3 * LAYER
    assert first.gradients == 31 * LAYER + TAIL
    assert last.gradients == TAIL
    assert phases["forward of layer 31"].gathered == 2 * 2 * LAYER
    assert phases["head"].gathered == 2 * 2 * TAIL
    assert phases["embedding"].gathered == 2 * (2 * VOCAB + LAYER)
    assert phases["embedding"].gradients == PARAMS - VOCAB
    assert (phases["optimizer"].gathered, phases["optimizer"].gradients) == (0, PARAMS)


def test_a_tied_head_stays_gathered_with_its_gradient_from_forward_to_the_end() -> None:
    layer, unit = tied().shape.layer_params[0], tied().shape.vocab_params + tied().shape.hidden
    phases = phases_of(shared(tied(), 4))
    assert phases["forward of layer 15"].gathered == 2 * (2 * layer + unit)
    assert phases["head"].gathered == 2 * (unit + layer)
    assert phases["backward of layer 0"].gathered == 2 * (layer + layer + unit)
    assert phases["backward of layer 15"].gathered == 2 * (layer + layer + unit)
    assert phases["backward of layer 14"].gathered == 2 * (3 * layer + unit)
    grad = 2 * tied().shape.vocab_params
    assert phases["backward of layer 15"].gradients == grad
    assert phases["embedding"].gathered == 2 * (2 * unit + layer)


def test_under_autocast_float32_shards_are_gathered_in_16_bits_and_reduced_in_32() -> None:
    job = shared(one(dtype=torch.float32, autocast=True), 2)
    phases = phases_of(job)
    narrow = phases_of(shared(one(), 2))
    first = phases["backward of layer 0"]
    assert (first.weights, first.optimizer) == (2 * PARAMS, 4 * PARAMS)
    assert first.gathered == 2 * (LAYER + VOCAB) + 4 * LAYER
    assert first.activations == narrow["backward of layer 0"].activations
    assert StepCosts(job).layers[ALL].saved == saved_by(one(), ALL)
    assert phases["head"].gathered == 4 * TAIL + 2 * TAIL + 2 * LAYER  # its reduction, more than two copies of it


def test_accumulated_gradients_are_whole_until_the_last_pass() -> None:
    for job, size in ((one(), 2), (one(dtype=torch.float32, autocast=True), 4)):
        phases = phases_of(replace(shared(job, 4), keep_gradients=True))
        assert phases.pop("optimizer").gradients == size * PARAMS / 4
        assert {phase.gradients for phase in phases.values()} == {size * PARAMS}
    sharded = phases_of(replace(shared(one(), 4, "zero3"), keep_gradients=True))
    assert {phase.gradients for phase in sharded.values()} == {2 * PARAMS / 4}


def test_zero3_by_hand() -> None:
    for job in (one(), one(dtype=torch.float32, autocast=True)):
        phases = phases_of(shared(job, 4, "zero3"))
        for phase in phases.values():
            assert (phase.weights, phase.gradients, phase.optimizer) == (PARAMS / 2, PARAMS / 2, 3 * PARAMS)
        assert phases["forward of layer 0"].gathered == 2 * (LIVE + BUCKET)
        assert phases["backward of layer 0"].gathered == 2 * (LIVE + BUCKET) + 2 * TAIL
        assert phases["optimizer"].gathered == 2 * BUCKET + 4 * SUB_GROUP


@pytest.mark.parametrize(("gathered", "reduced"), [(2, 2), (2, 4)])
def test_exchanges_of_fsdp2_are_those_of_scale_on_paper(gathered: int, reduced: int) -> None:
    job = one() if reduced == 2 else one(dtype=torch.float32, autocast=True)
    costs = StepCosts(shared(job, 8))
    found = costs.exchanged
    twice, once = 32 * LAYER + VOCAB, TAIL
    assert found.bytes == pytest.approx(7 / 8 * (twice * (2 * gathered + reduced) + once * (gathered + reduced)))
    # nothing runs beside the first two gathers, and the last reduction
    assert found.before == pytest.approx(7 / 8 * ((VOCAB + LAYER) * gathered + VOCAB * reduced))


def test_a_slower_link_takes_its_time() -> None:
    seconds = [
        StepCosts(replace(shared(one(), 2), link=link)).seconds(((ALL, 32),)) for link in (900e9, None, 50e9, 10e9, 5e9)
    ]
    assert seconds == sorted(set(seconds))
    received = StepCosts(shared(one(), 2)).exchanged.bytes
    assert seconds[-1] > received / 5e9  # the link is the bottleneck
    assert seconds[-1] < seconds[1] + 2 * received / 5e9


@pytest.mark.parametrize(
    ("name", "seq_len", "parallel"),
    [("llama-3-8b", 64, "fsdp2"), ("llama-3-8b", 65536, "zero3"), ("llama-3.2-1b", 8192, "fsdp2")],
)
def test_more_gpus_never_take_more_memory_each(name: str, seq_len: int, parallel: str) -> None:
    job = one(name)
    for policy in (ALL, INPUT):
        groups = ((policy, job.shape.layers),)
        worlds = (2, 3, 4, 8, 64, 1024)
        peaks = [StepCosts(shared(replace(job, seq_len=seq_len), n, parallel)).peak(groups).bytes for n in worlds]
        assert peaks == sorted(peaks, reverse=True)
        assert peaks[-1] < peaks[0]
    if parallel == "fsdp2" and name == "llama-3-8b":
        assert peaks[0] < StepCosts(replace(job, seq_len=seq_len)).peak(groups).bytes


@pytest.mark.parametrize("parallel", ["fsdp2", "zero3"])
def test_the_answer_comes_first(parallel: str) -> None:
    plan = plan_memory(SHAPES["llama-3-8b"], 8192, 1, 120, device="h200", gpus=2, parallel=parallel, link="100GB")
    lines = str(plan).splitlines()
    assert f"on 2 x h200 by {parallel}" in lines[0]
    assert "tokens on each GPU" in lines[0]
    assert lines[1].startswith("policies 32 x all/")
    assert f"of 120.00 GiB on each GPU; {plan.seconds:.3f} s per step" in lines[2]
    assert plan.tokens_per_second == pytest.approx(2 * 8192 / plan.seconds)
    assert f"{plan.tokens_per_second / 2:,.0f} tokens/s per GPU, {plan.tokens_per_second:,.0f} in all" in lines[2]
    assert lines[3].startswith(f"each GPU receives {plan.exchanged.bytes / 2**30:.2f} GiB per step: ")
    table = str(plan).split("\n\n")[1]
    assert "gathered, to exchange" in table
    assert any("exchanges at 100 GB/s each way" in note for note in plan.notes)
    assert not any(policy.every > 1 or policy.offload for policy in plan.policies)
    report = plan.to_dict()
    json.dumps(report, allow_nan=False)
    assert (report["gpus"], report["parallel"], report["link_gb_s"]) == (2, parallel, pytest.approx(100))
    assert report["exchange"]["gib"] == plan.exchanged.bytes / 2**30
    assert report["tokens_per_second_per_gpu"] == plan.tokens_per_second / 2


def test_what_fits_on_more_gpus_is_in_the_error() -> None:
    with pytest.raises(ArgumentValueError, match="gpus=4 fits") as caught:
        plan_memory(SHAPES["llama-3-8b"], 2048, 1, 24, device="h100", gpus=2, parallel="fsdp2")
    assert "adamw-8bit" not in str(caught.value)
    assert "host_gib" not in str(caught.value)
    assert "LoRA" not in str(caught.value), "adapters are planned for one GPU"
    plan_memory(SHAPES["llama-3-8b"], 2048, 1, 24, device="h100", gpus=4, parallel="fsdp2")


def test_a_batch_and_a_length_that_are_too_large_together() -> None:
    given = {"budget_gib": 8, "device": "h100", "gpus": 2, "parallel": "zero3"}
    shape = {**SHAPES["llama-3-8b"], "num_hidden_layers": 1, "vocab_size": 256}
    with pytest.raises(ArgumentValueError) as caught:
        plan_memory(shape, 2**20, 2**15, **given)  # type: ignore[arg-type]
    found = re.search(r"What would help: batch_size=1 with seq_len=(\d+) fits\.$", str(caught.value))
    assert found, caught.value
    plan_memory(shape, int(found[1]), 1, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"parallel": "tp"}, "parallel: expected 'fsdp2' or 'zero3', got 'tp'"),
        ({"gpus": 0}, "gpus: expected at least 1"),
        ({"link": 0}, "link: expected a finite number of GiB, above 0"),
        ({"host_gib": 4}, "host_gib: expected 0: offloading is planned for one GPU alone, got 4"),
        ({"adapters": 1000}, "adapters: expected None"),
        ({"optimizer": "adamw-8bit"}, "optimizer: expected one that shards: adamw, "),
        ({"parallel": "zero3", "dtype": "float32"}, "dtype: expected bfloat16 or float16, or autocast"),
    ],
)
def test_refusals(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentValueError) as caught:
        plan_memory(SHAPES["llama-3.2-1b"], 1024, 1, **{"gpus": 2, "device": "h100", **change})
    assert said in str(caught.value)
