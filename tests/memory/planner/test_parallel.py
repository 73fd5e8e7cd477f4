"""Plans of several GPUs: by hand, beside measured steps, and what is refused. tests/distributed counts what is held."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.errors import ArgumentTypeError, ArgumentValueError
from lowtide.memory import ActivationPolicy, plan_memory
from lowtide.memory.planner.gpus import GPUS
from lowtide.memory.planner.job import Job
from lowtide.memory.planner.layer_costs import checkpoint_bytes
from lowtide.memory.planner.parallel import BUCKET, LIVE, SUB_GROUP, ranks_of
from lowtide.memory.planner.shapes import read_shape
from lowtide.memory.planner.step_costs import Phase, StepCosts
from lowtide.memory.planner.ways import name_of
from lowtide.train.shapes import SHAPES

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
T, H, V, LAYER, PARAMS = 8192, 4096, 128_256, 218_112_000, 8_030_261_248  # of Llama-3-8B
VOCAB, TAIL = V * H, V * H + H  # the embedding's unit, and that of the last norm and the output layer
ONE = Job(read_shape(SHAPES["llama-3-8b"]), T, 1, GPUS["h200"], torch.bfloat16, "adamw")
TIED = replace(ONE, shape=read_shape(SHAPES["llama-3.2-1b"]))
ALL, INPUT = ActivationPolicy(mlp_level=0), ActivationPolicy(keep="input", mlp_level=0)
ATTENTION = ActivationPolicy(keep="attention", mlp_level=0)


def shared(job: Job, gpus: int, parallel: str = "fsdp2") -> Job:
    return replace(job, gpus=gpus, parallel=parallel)


def phases_of(job: Job, policy: ActivationPolicy = ALL) -> dict[str, Phase]:
    return {str(phase): phase for phase in StepCosts(job).phases(((policy, job.shape.layers),))}


def measured(tokens: int) -> list[Any]:
    file = RESULTS / f"2026-11-21-scaling-{tokens}-h200.json"
    rows = json.loads(file.read_text())["rows"]
    return [pytest.param(tokens, row, id=f"{row['model']}-{tokens}-{row['ranks']}") for row in rows if _is_ours(row)]


def _is_ours(row: dict[str, Any]) -> bool:
    return bool(row["way"] == "lowtide")


@pytest.mark.parametrize(("tokens", "row"), [*measured(8192), *measured(16384)])
def test_steps_of_one_and_two_gpus_took_what_is_planned(tokens: int, row: dict[str, Any]) -> None:
    """With every layer checkpointed, in bfloat16, by FSDP2."""
    shape = read_shape(SHAPES[row["model"]])
    costs = StepCosts(shared(replace(ONE, shape=shape, seq_len=tokens), row["ranks"]))
    groups = ((INPUT, shape.layers),)
    assert costs.peak(groups).bytes / 2**30 == pytest.approx(row["peak_gib"], rel=0.001)
    assert costs.seconds(groups) == pytest.approx(row["seconds"], rel=0.07)


def test_the_pages_table_is_what_is_planned() -> None:
    page = (RESULTS.parents[1] / "docs" / "plan.md").read_text()
    rows = re.findall(r"^\| (llama-[\w.-]+), (\d+) \| (\d) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert len(rows) == 8
    for model, tokens, gpus, peak, seconds in rows:
        shape = read_shape(SHAPES[model])
        costs, groups = (
            StepCosts(shared(replace(ONE, shape=shape, seq_len=int(tokens)), int(gpus))),
            ((INPUT, shape.layers),),
        )
        assert (f"{costs.peak(groups).bytes / 2**30:.2f}", f"{costs.seconds(groups):.3f}") == (peak, seconds)


def test_fsdp2_by_hand() -> None:
    """Two bytes per number, on two GPUs; what is gathered is whole."""
    alone, phases = phases_of(ONE), phases_of(shared(ONE, 2))
    for name, phase in phases.items():
        assert (phase.weights, phase.optimizer) == (PARAMS, 2 * PARAMS)
        if name in alone:
            same = ("activations", "head", "other")
            assert [getattr(phase, part) for part in same] == [getattr(alone[name], part) for part in same]
    first, last = phases["backward of layer 0"], phases["backward of layer 31"]
    mlp = 2 * (H * 14336)  # the gradient of one projection, whole
    assert first.gathered == 2 * (LAYER + VOCAB + LAYER)  # its own, the next one to come, the reduction of the last
    assert last.gathered == 2 * (LAYER + LAYER + TAIL)
    assert phases["backward of layer 1"].gathered == 2 * 3 * LAYER
    assert first.gradients == 31 * LAYER + TAIL + mlp
    assert last.gradients == TAIL + mlp
    assert phases["forward of layer 31"].gathered == 2 * 2 * LAYER
    assert phases["head"].gathered == 2 * 2 * TAIL
    assert phases["embedding"].gathered == 2 * (2 * VOCAB + LAYER)
    assert phases["embedding"].gradients == PARAMS - VOCAB
    assert (phases["optimizer"].gathered, phases["optimizer"].gradients) == (0, PARAMS)


def test_a_tied_head_stays_gathered_with_its_gradient_from_forward_to_the_end() -> None:
    layer, unit = TIED.shape.layer_params, TIED.shape.vocab_params + TIED.shape.hidden
    phases = phases_of(shared(TIED, 4))
    assert phases["forward of layer 15"].gathered == 2 * (2 * layer + unit)
    assert phases["head"].gathered == 2 * (unit + layer)
    assert phases["backward of layer 0"].gathered == 2 * (layer + layer + unit)
    assert phases["backward of layer 15"].gathered == 2 * (layer + layer + unit)
    assert phases["backward of layer 14"].gathered == 2 * (3 * layer + unit)
    grad = 2 * TIED.shape.vocab_params
    assert phases["backward of layer 15"].gradients == grad + 2 * (2048 * 8192)
    assert phases["embedding"].gathered == 2 * (2 * unit + layer)


def test_under_autocast_float32_shards_are_gathered_in_16_bits_and_reduced_in_32() -> None:
    job = shared(replace(ONE, dtype=torch.float32, autocast=True), 2)
    phases = phases_of(job)
    narrow = phases_of(shared(ONE, 2))
    first = phases["backward of layer 0"]
    assert (first.weights, first.optimizer) == (2 * PARAMS, 4 * PARAMS)
    assert first.gathered == 2 * (LAYER + VOCAB) + 4 * LAYER
    assert first.activations == narrow["backward of layer 0"].activations
    assert StepCosts(job).layers[ALL].saved == checkpoint_bytes(ONE, ALL)
    assert phases["head"].gathered == 4 * TAIL + 2 * TAIL + 2 * LAYER  # its reduction, more than two copies of it


def test_accumulated_gradients_are_whole_until_the_last_pass() -> None:
    for job, size in ((ONE, 2), (replace(ONE, dtype=torch.float32, autocast=True), 4)):
        phases = phases_of(replace(shared(job, 4), keep_gradients=True))
        assert phases.pop("optimizer").gradients == size * PARAMS / 4
        assert {phase.gradients for phase in phases.values()} == {size * PARAMS}
    sharded = phases_of(replace(shared(ONE, 4, "zero3"), keep_gradients=True))
    assert {phase.gradients for phase in sharded.values()} == {2 * PARAMS / 4}


def test_with_few_tokens_a_layers_gradients_are_the_peak_of_its_backward() -> None:
    few = replace(shared(ONE, 2), seq_len=16)
    costs, phase = StepCosts(few), phases_of(few)["backward of layer 1"]
    assert phase.gradients + phase.transients + phase.activations == pytest.approx(
        30 * LAYER + TAIL + 2 * LAYER + costs.layers[ALL].saved, rel=1e-3
    )


def test_zero3_by_hand() -> None:
    for job in (ONE, replace(ONE, dtype=torch.float32, autocast=True)):
        phases = phases_of(shared(job, 4, "zero3"))
        for phase in phases.values():
            assert (phase.weights, phase.gradients, phase.optimizer) == (PARAMS / 2, PARAMS / 2, 3 * PARAMS)
        assert phases["forward of layer 0"].gathered == 2 * (LIVE + BUCKET)
        assert phases["backward of layer 0"].gathered == 2 * (LIVE + BUCKET) + 2 * TAIL
        assert phases["optimizer"].gathered == 2 * BUCKET + 4 * SUB_GROUP


def test_tensor_parallelism_by_hand() -> None:
    n, tokens = 8, T
    costs = StepCosts(shared(ONE, n, "tp"))
    norms = 65 * H
    assert costs.weights == 2 * ((PARAMS - norms) // n + norms)
    h, f = 2 * H, 2 * 14336 // n
    # the layer's input, attention's before and after its norm, queries to output of a share, MLP's input twice
    saved = 2 * h + (h + h // 4 + h // 4 + h) // n + 2 * h + 2 * f + 8 + 4 * 32 // n
    assert costs.layers[ALL].saved == tokens * saved
    assert costs.job.head_plan.scratch_bytes < StepCosts(ONE).job.head_plan.scratch_bytes
    one = 2 * (n - 1) / n * tokens * h
    assert costs.exchanged(((ALL, 32),)).before == pytest.approx(32 * 6 * one + one + 12 * (n - 1) * tokens)
    assert costs.exchanged(((INPUT, 32),)).before == pytest.approx(32 * 7 * one + one + 12 * (n - 1) * tokens)
    assert costs.exchanged(((ALL, 32),)).beside == 2 * one  # the hidden states' gradient, in float32


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_fsdp2_over_groups_by_hand(groups: int) -> None:
    """Of each GPU's share of a layer and of the vocabulary a part, and what a group exchanges beside it."""
    n = 2
    shared_alone = phases_of(shared(ONE, n, "tp"))
    phases = phases_of(replace(shared(ONE, groups * n), tensor_parallel=n))
    norms = 65 * H
    share = (PARAMS - norms) // n + norms
    layer, vocab = (LAYER - 2 * H) // n + 2 * H, VOCAB // n
    stream = 2 * T * H
    for name, phase in phases.items():
        assert (phase.weights, phase.optimizer) == (2 * share // groups, 4 * share // groups)
        if name in shared_alone:
            same = ("activations", "head", "other")
            assert [getattr(phase, part) for part in same] == [getattr(shared_alone[name], part) for part in same]
    assert phases["backward of layer 1"].gathered == 2 * 3 * layer + stream
    assert phases["forward of layer 31"].gathered == 2 * 2 * layer + stream
    assert phases["embedding"].gathered == 2 * (2 * vocab + layer)
    # the stream's gradient, its rows in float32, and the whole vocabulary's gradient
    assert phases["embedding"].transients == stream + 4 * T * H + 2 * VOCAB
    costs, one = StepCosts(replace(shared(ONE, groups * n), tensor_parallel=n)), StepCosts(shared(ONE, n, "tp"))
    group = ((ALL, 32),)
    twice, once = 32 * layer + vocab, vocab + H
    among = (groups - 1) / groups * (6 * twice + 4 * once)
    assert costs.exchanged(group).bytes == pytest.approx(one.exchanged(group).bytes + among)
    assert costs.ranks.tokens == groups * T


def test_steps_by_zero3_took_what_is_planned() -> None:
    """With float32 gradients, which the plan does not have: 2 bytes a parameter more, and twice the bytes reduced."""
    rows = json.loads((RESULTS / "2026-11-28-scaling-strong-ranks-4-h200.json").read_text())["rows"]
    found = [row for row in rows if row["parallel"] == "zero3" and row["way"] == "lowtide"]
    assert sorted(row["ranks"] for row in found) == [2, 4]
    for row in found:
        n = row["ranks"]
        costs, groups = StepCosts(replace(shared(ONE, n, "zero3"), batch_size=4 // n)), ((INPUT, 32),)
        assert (costs.peak(groups).bytes + 2 * PARAMS / n) / 2**30 == pytest.approx(row["peak_gib"], rel=0.01)
        assert costs.seconds(groups) == pytest.approx(row["seconds"], rel=0.06)


def test_a_step_of_shared_layers_took_what_is_planned() -> None:
    """Two sequences of two GPUs that share each layer; its time is what the host's share was fitted to."""
    rows = json.loads((RESULTS / "2026-11-28-scaling-ranks-2-h100.json").read_text())["rows"]
    (row,) = [row for row in rows if row["tensor_parallel"] == 2 and row["way"] == "lowtide"]
    job = replace(shared(TIED, 2), gpu=GPUS["h100"], seq_len=8192, batch_size=2, tensor_parallel=2)
    costs, groups = StepCosts(job), ((INPUT, 16),)
    assert costs.peak(groups).bytes / 2**30 == pytest.approx(row["peak_gib"], rel=0.05)
    # it was measured with PyTorch's checkpoint, which took the host 0.7 ms a layer more
    assert costs.seconds(groups) + 16 * 0.7e-3 == pytest.approx(row["seconds"], rel=0.05)


def test_the_fastest_way_that_fits_is_recommended() -> None:
    model, settings = SHAPES["llama-3-8b"], {"device": "h200", "gpus": 4}
    plan = plan_memory(model, 8192, 1, **settings)
    names = ["fsdp2", "zero3", "cp", "fsdp2 x tp 2", "tp"]
    assert sorted(name_of(way.job) for way in plan.ways) == sorted(names)
    rates = [way.tokens_per_second for way in plan.ways]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == plan.tokens_per_second
    for way in plan.ways:
        size = way.job.tensor_parallel
        alone = plan_memory(model, 8192, 1, parallel=way.job.parallel, tensor_parallel=size, **settings)
        assert way.tokens_per_second == alone.tokens_per_second
        assert way.chosen == alone.chosen
        assert alone.ways == ()
    table = str(plan).split("\n\n")[1].splitlines()
    assert table[0].split() == ["way", "tokens/s", "tokens", "peak", "GiB", "policies"]
    assert [line.startswith(name_of(way.job)) for way, line in zip(plan.ways, table[1:], strict=True)] == [True] * 5
    ways = plan.to_dict()["ways"]
    assert ways[0]["tokens_per_second"] == plan.tokens_per_second
    assert {(way["parallel"], way["tensor_parallel"]) for way in ways} >= {("fsdp2", 2), ("tp", 4)}


def test_layers_that_are_gathered_together() -> None:
    """They take less of the host's time, which bounds a small model's step, and more memory."""
    model, settings = SHAPES["llama-3.2-1b"], {"device": "h200", "gpus": 2}
    plans = [plan_memory(model, 8192, 1, parallel="fsdp2", fsdp_layers=n, **settings) for n in (1, 2, 4, 99)]
    groups = ((INPUT, 16),)
    peaks = [StepCosts(one.job).peak(groups).bytes for one in plans]
    assert peaks == sorted(set(peaks))
    seconds = [StepCosts(one.job).seconds(groups) for one in plans]
    assert seconds[0] > seconds[1] > seconds[2]
    assert plans[-1].job.fsdp_layers == 16
    assert len({StepCosts(one.job).exchanged(groups).bytes for one in plans}) == 1
    assert "every 4 layers" in str(plans[2])
    assert "for i in range(0, len(layers), 4):\n    fully_shard(layers[i : i + 4])" in plans[2].lines()
    assert "--fsdp-layers 4" in plans[2].lines()
    found = plan_memory(model, 8192, 1, fsdp_layers=4, **settings)
    expected = {"fsdp2, 4 layers": 4, "cp, 4 layers": 4, "tp": 1, "zero3": 1}
    assert {name_of(way.job): way.job.fsdp_layers for way in found.ways} == expected
    assert {way["parallel"]: way["fsdp_layers"] for way in found.to_dict()["ways"]}["fsdp2"] == 4


def test_where_little_fits_the_way_that_does_is_recommended() -> None:
    plan = plan_memory(SHAPES["llama-3-8b"], 262_144, 1, 100, device="h200", gpus=4)
    assert plan.job.parallel == "cp"
    left = [way for way in plan.ways if way.chosen is None]
    assert left
    for way in left:
        assert way.least > 100 * 2**30
    assert "needs more than the budget" in str(plan)
    with pytest.raises(ArgumentValueError, match=r"budget_gib: expected at least .* by (cp|tp)"):
        plan_memory(SHAPES["llama-3-8b"], 262_144, 1, 8, device="h200", gpus=4)


def test_what_cannot_share_the_step_is_told_beside_what_can() -> None:
    few = {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    plan = plan_memory({**SHAPES["llama-3-8b"], "model_type": "mixtral", **few}, 1024, 1, device="h100", gpus=3)
    refused = {name_of(way.job): way.refused for way in plan.ways if way.refused}
    assert refused["tp"] == "parallel has to be fsdp2 or zero3 alone for a mixture of experts"
    assert refused["cp"] == "seq_len has to be a multiple of 6"
    assert "not planned: seq_len has to be a multiple of 6" in str(plan)
    json.dumps(plan.to_dict(), allow_nan=False)


def test_where_nothing_fits_more_gpus_are_told_in_whichever_way_they_help() -> None:
    """Tensor parallelism takes the least memory, and no more GPUs than the model has key and value heads."""
    model, settings = SHAPES["llama-3-70b"], {"device": "h100", "gpus": 4}
    with pytest.raises(ArgumentValueError, match=r"by tp .*gpus=(\d+) fits, by ([a-z0-9 ]+);") as caught:
        plan_memory(model, 8192, 1, **settings)
    found = re.search(r"gpus=(\d+) fits, by ([a-z0-9 ]+);", str(caught.value))
    assert found
    gpus = int(found[1])
    plan = plan_memory(model, 8192, 1, **{**settings, "gpus": gpus})
    assert found[2] in [name_of(way.job) for way in plan.ways if way.chosen]
    with pytest.raises(ArgumentValueError, match="budget_gib"):
        plan_memory(model, 8192, 1, **{**settings, "gpus": gpus // 2})
    with pytest.raises(ArgumentValueError, match="gpus=8 fits;"):
        plan_memory(model, 8192, 1, parallel="tp", **settings)


def test_gpus_that_are_refused_are_not_advised() -> None:
    """Sixteen would have no whole parts of the sequence."""
    with pytest.raises(ArgumentValueError, match="budget_gib") as caught:
        plan_memory(SHAPES["llama-3-8b"], 3080, 1, 8, device="h200", gpus=2, parallel="cp")
    assert "gpus=" not in str(caught.value)


@pytest.mark.parametrize("gpus", [3, 6, 12])
def test_the_longest_sequence_of_a_ring_can_be_planned(gpus: int) -> None:
    settings: Any = {"device": "h200", "gpus": gpus, "parallel": "cp"}
    plan = plan_memory(SHAPES["llama-3-8b"], 24 * 512, 1, 60, **settings)
    assert plan.longest_sequence % 256 == 0
    assert plan_memory(SHAPES["llama-3-8b"], plan.longest_sequence, 1, 60, **settings).peak_bytes <= 60 * 2**30


@pytest.mark.parametrize("width", [60, 72])
def test_the_ways_are_as_wide_as_the_terminal(width: int) -> None:
    """What does not fit goes on below the last column."""
    plan = plan_memory(SHAPES["llama-3-8b"], 8190, 1, device="h200", gpus=12)
    head, *rows = plan.text(width).split("\n\n")[1].splitlines()
    assert max(map(len, rows)) <= width
    assert len(rows) > len(plan.ways)
    below = [row for row in rows if row.startswith(" ")]
    assert below
    assert {len(row) - len(row.lstrip()) for row in below} == {head.index("policies")}


def test_tensor_parallelism_over_all_gpus_may_be_given_their_number() -> None:
    settings: Any = {"device": "h200", "gpus": 4, "parallel": "tp"}
    named, plain = (plan_memory(SHAPES["llama-3-8b"], 8192, 1, tensor_parallel=n, **settings) for n in (4, 1))
    assert str(named) == str(plain)
    assert "on 4 x h200 by tp\n" in str(named)


@pytest.mark.parametrize(("gathered", "reduced"), [(2, 2), (2, 4)])
def test_exchanges_of_fsdp2_are_those_of_scale_on_paper(gathered: int, reduced: int) -> None:
    job = ONE if reduced == 2 else replace(ONE, dtype=torch.float32, autocast=True)
    costs = StepCosts(shared(job, 8))
    found = costs.exchanged(((ALL, 32),))
    twice, once = 32 * LAYER + VOCAB, TAIL
    assert found.bytes == pytest.approx(7 / 8 * (twice * (2 * gathered + reduced) + once * (gathered + reduced)))
    # nothing runs beside the first two gathers, and the last reduction
    assert found.before == pytest.approx(7 / 8 * ((VOCAB + LAYER) * gathered + VOCAB * reduced))


def test_a_slower_link_takes_its_time() -> None:
    seconds = [
        StepCosts(replace(shared(ONE, 2), link=link)).seconds(((ALL, 32),)) for link in (900e9, None, 50e9, 10e9, 5e9)
    ]
    assert seconds == sorted(set(seconds))
    received = StepCosts(shared(ONE, 2)).exchanged(((ALL, 32),)).bytes
    assert seconds[-1] > received / 5e9  # the link is the bottleneck
    assert seconds[-1] < seconds[1] + 2 * received / 5e9


@pytest.mark.parametrize("parallel", ["fsdp2", "zero3"])
@pytest.mark.parametrize("job", [ONE, TIED], ids=["own head", "tied"])
@pytest.mark.parametrize("seq_len", [64, 8192, 65536])
def test_more_gpus_never_take_more_memory_each(job: Job, seq_len: int, parallel: str) -> None:
    for policy in (ALL, INPUT):
        groups = ((policy, job.shape.layers),)
        worlds = (2, 3, 4, 8, 64, 1024)
        peaks = [StepCosts(shared(replace(job, seq_len=seq_len), n, parallel)).peak(groups).bytes for n in worlds]
        assert peaks == sorted(peaks, reverse=True)
        assert peaks[-1] < peaks[0]
    if parallel == "fsdp2" and job is ONE:
        assert peaks[0] < StepCosts(replace(job, seq_len=seq_len)).peak(groups).bytes


def test_one_gpu_is_planned_as_ever() -> None:
    plain = plan_memory(SHAPES["llama-3.2-1b"], 4096, 1, device="h100")
    for parallel in ("fsdp2", "tp", "zero3"):
        plan = plan_memory(SHAPES["llama-3.2-1b"], 4096, 1, device="h100", gpus=1, parallel=parallel, link="3GB")
        assert str(plan) == str(plain)
        assert plan.to_dict() == plain.to_dict()
    ranks = ranks_of(ONE)
    assert ranks.job is ONE
    assert not any((*ranks.forward, *ranks.backward, *ranks.whole_gradients, ranks.head, ranks.embedding, ranks.step))


@pytest.mark.parametrize("parallel", ["fsdp2", "zero3", "tp"])
def test_the_answer_comes_first(parallel: str) -> None:
    plan = plan_memory(SHAPES["llama-3-8b"], 8192, 1, 120, device="h200", gpus=2, parallel=parallel, link="100GB")
    lines = str(plan).splitlines()
    tokens = 8192 * (1 if parallel == "tp" else 2)
    assert f"on 2 x h200 by {parallel}" in lines[0]
    assert ("on each GPU" in lines[0]) == (parallel != "tp")
    assert lines[1].startswith("policies 32 x all/")
    assert f"of 120.00 GiB on each GPU; {plan.seconds:.3f} s per step" in lines[2]
    assert plan.tokens_per_second == pytest.approx(tokens / plan.seconds)
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


def test_layers_that_are_shared_are_sharded_by_fsdp2() -> None:
    given = {"device": "h100", "gpus": 4, "tensor_parallel": 2}
    plan, same = (
        plan_memory(SHAPES["llama-3-8b"], 2048, 1, parallel=way, **given)  # type: ignore[arg-type]
        for way in (None, "fsdp2")
    )
    assert plan.job == same.job
    assert not plan.ways


def test_the_longest_sequence_is_that_of_the_way_that_was_chosen() -> None:
    plan = plan_memory(SHAPES["llama-3.2-1b"], 2048, 1, 12, device="h100", gpus=4)
    assert f"longest sequence in this budget by {name_of(plan.job)}: " in str(plan)
    alone = plan_memory(SHAPES["llama-3.2-1b"], 2048, 1, 12, device="h100", gpus=4, parallel="fsdp2")
    assert "longest sequence in this budget: " in str(alone)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"parallel": "pp"}, "parallel: expected 'fsdp2', 'tp', 'cp' or 'zero3', got 'pp'"),
        ({"parallel": "pp", "gpus": 1}, "parallel: expected 'fsdp2', 'tp', 'cp' or 'zero3', got 'pp'"),
        ({"parallel": "cp", "attention_mask": True}, "attention_mask: expected False: the ring takes none"),
        ({"parallel": "cp", "gpus": 3}, "seq_len: expected a multiple of 6, got 1024"),
        ({"parallel": "cp", "model": "olmo2"}, "'cp' for olmo2"),
        ({"parallel": None, "adapters": 1000}, "adapters: expected None"),
        ({"tensor_parallel": 0}, "tensor_parallel: expected at least 1"),
        ({"fsdp_layers": 0}, "fsdp_layers: expected at least 1"),
        (
            {"fsdp_layers": 2, "parallel": "zero3"},
            "fsdp_layers: expected 1 for zero3, which has no units of FSDP2, got 2",
        ),
        ({"tensor_parallel": 4}, "tensor_parallel: expected a divisor of gpus=2, got 4"),
        ({"tensor_parallel": 2, "gpus": 1}, "tensor_parallel: expected a divisor of gpus=1, got 2"),
        ({"tensor_parallel": 2, "parallel": "zero3"}, "tensor_parallel: expected 1 beside zero3"),
        ({"tensor_parallel": 2, "parallel": "cp", "gpus": 4}, "tensor_parallel: expected 1 beside cp"),
        ({"tensor_parallel": 2, "parallel": "tp", "gpus": 4}, "tensor_parallel: expected 4, or fsdp2 beside it, got 2"),
        (
            {"tensor_parallel": 16, "gpus": 32},
            "tensor_parallel: expected a divisor of the model's 8 key and value heads, got 16",
        ),
        ({"tensor_parallel": 2, "model": "mixtral"}, "parallel: expected fsdp2 or zero3 alone for a mixture"),
        ({"gpus": 0}, "gpus: expected at least 1"),
        ({"link": 0}, "link: expected a finite number of GiB, above 0"),
        ({"host_gib": 4}, "host_gib: expected 0: offloading is planned for one GPU alone, got 4"),
        ({"adapters": 1000}, "adapters: expected None"),
        ({"optimizer": "adamw-8bit"}, "optimizer: expected one that shards: adamw, "),
        ({"parallel": "zero3", "dtype": "float32"}, "dtype: expected bfloat16 or float16, or autocast"),
        ({"parallel": "tp", "gpus": 3}, "gpus: expected a divisor of the model's 32 attention heads, got 3"),
        ({"parallel": "tp", "gpus": 16}, "gpus: expected a divisor of the model's 8 key and value heads, got 16"),
        ({"parallel": "tp", "model": "mixtral"}, "parallel: expected fsdp2 or zero3 alone for a mixture of experts"),
        ({"parallel": "tp", "model": "olmo2"}, "parallel: expected fsdp2 or zero3 alone for traced layers"),
    ],
)
def test_refusals(change: dict[str, Any], said: str) -> None:
    few = {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    small = {"hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 6}
    ids = {"vocab_size": 131, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    models = {
        "mixtral": {**SHAPES["llama-3-8b"], "model_type": "mixtral", **few},
        "olmo2": {"model_type": "olmo2", **small, **ids},
    }
    settings = {"gpus": 2, "parallel": "fsdp2", "device": "h100", **change}
    model = models.get(settings.pop("model", ""), SHAPES["llama-3-8b"])
    with pytest.raises((ArgumentTypeError, ArgumentValueError)) as caught:
        plan_memory(model, 1024, 1, **settings)
    assert said in str(caught.value)


@pytest.mark.parametrize("gpus", [2, 4])
def test_context_parallelism_by_hand(gpus: int) -> None:
    """As FSDP2 with an Nth of the sequence, but for attention, its buffers and its exchanges."""
    whole = replace(ONE, seq_len=16 * T)
    share, own = shared(replace(whole, seq_len=16 * T // gpus), gpus), shared(whole, gpus, "cp")
    keys, queries = 16 * T // gpus * 2 * 1024, 16 * T // gpus * H  # numbers of a GPU's keys and values, and queries
    sharded, ring = phases_of(share, INPUT), phases_of(own, INPUT)
    assert sharded.keys() == ring.keys()
    for name, phase in ring.items():
        gathered = {"forward": 2 * (gpus + 1) * keys, "backward": (2 * gpus + 3 * 4) * keys}
        more = gathered[phase.name] + 4 * queries if phase.name in gathered else 0
        assert phase.gathered - sharded[name].gathered == more
        same = ("weights", "gradients", "optimizer", "activations", "head", "transients")
        assert [getattr(phase, part) for part in same] == [getattr(sharded[name], part) for part in same]
    costs, alone, part = StepCosts(own), StepCosts(whole), StepCosts(share)
    pairs = 4 * (16 * T) ** 2 / 2 * H  # of one layer, in forward
    assert costs.layers[INPUT].flop - costs.layers[ATTENTION].flop == pytest.approx(pairs / gpus)
    assert alone.layers[INPUT].flop - alone.layers[ATTENTION].flop == pytest.approx(pairs)
    groups = ((INPUT, 32),)
    received = costs.exchanged(groups).bytes - part.exchanged(groups).bytes
    assert received == pytest.approx(32 * (3 * (gpus - 1) * 2 + gpus * 4) * keys)  # forward, recompute and backward
    assert costs.ranks.tokens == 16 * T
    assert costs.seconds(groups) == pytest.approx(alone.seconds(groups) / gpus, rel=0.1)


def test_traced_layers_are_sharded_too() -> None:
    small = {"hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 6}
    settings = {"model_type": "olmo2", "vocab_size": 131, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    plan = plan_memory({**settings, **small}, 64, 2, device="h100", gpus=2, parallel="fsdp2")
    assert plan.phase.weights == plan.job.shape.params
    assert plan.phases[1].gathered > 0
