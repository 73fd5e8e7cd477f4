"""The planner's bytes and operations, by hand for Llama-3-8B (h = 4096, f = 3.5h, 32 heads and 8 of keys, 128 each)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowtide import HeadOptions, plan_head
from lowtide.memory import ActivationPolicy
from lowtide.plan.arguments import OPTIMIZERS
from lowtide.plan.gpus import GPUS
from lowtide.plan.job import Job
from lowtide.plan.layer_costs import PAGES, LayerCosts, flop_of_layers
from lowtide.plan.runs import Groups
from lowtide.plan.step_costs import BESIDE, WORKSPACE, Phase, StepCosts
from planner.jobs import FLASH_STATES, job_of, saved_by

T, H = 8192, 4096
ALL, ALL1 = ActivationPolicy(mlp_level=0), ActivationPolicy(mlp_level=1)
ATTENTION, INPUT = (ActivationPolicy(keep=keep, mlp_level=0) for keep in ("attention", "input"))
AWAY = replace(ATTENTION, offload=True)
NORMS, LSE = 2 * 4, 32 * 4  # bytes a token: a float32 for each row of a norm, and for each head


def phases_of(job: Job, groups: Groups, states: int = 0, *, late: bool = False) -> dict[str, Phase]:
    return {str(phase): phase for phase in StepCosts(job).phases(groups, states, late=late)}


@pytest.mark.parametrize(
    ("policy", "bytes_per_token"),
    [
        (ALL, 27 * H + NORMS + LSE),
        (ALL1, 13 * H + NORMS + LSE),
        (ATTENTION, 4 * H + LSE),
        (ActivationPolicy(keep="attention", mlp_level=1), 4 * H + LSE),
        (INPUT, 2 * H),
        (ActivationPolicy(keep="input", offload=True), 2 * H),
    ],
)
def test_bytes_that_a_layer_saves(policy: ActivationPolicy, bytes_per_token: int) -> None:
    states = FLASH_STATES * (policy.keep == "all")
    assert saved_by(job_of(), policy) == T * bytes_per_token + states
    assert saved_by(job_of(batch_size=3), policy) == 3 * T * bytes_per_token + states


def test_temporaries_of_a_layer() -> None:
    """The MLP's product and output; at level 1 gate and up too. In backward the weights' gradients besides."""
    h, f, mlp = 2 * T * H, 2 * T * 14336, 2 * 3 * H * 14336
    costs = LayerCosts(job_of())
    assert costs[ALL].forward_bytes == pytest.approx(f + h, rel=0.01)
    assert costs[ALL1].forward_bytes == pytest.approx(2 * f + h, rel=0.01)
    assert costs[INPUT].forward_bytes == pytest.approx(3 * f + 3 * h, rel=0.05)
    assert costs[ALL].backward_bytes == pytest.approx(mlp + f - 2 / 3 * mlp + 2 * h, rel=0.02)
    assert costs[ALL1].backward_bytes == pytest.approx(mlp + 3 * f - 2 / 3 * mlp + 2 * h, rel=0.02)
    tiled = costs[replace(ALL1, mlp_tile_tokens=T // 4)]
    sums = 2 * mlp  # in float32
    assert tiled.forward_bytes == pytest.approx(2 * f / 4 + h, rel=0.01)
    assert tiled.backward_bytes == pytest.approx(mlp + sums + 3 * f / 4 + 2 * h, rel=0.02)
    assert (tiled.saved, tiled.flop) == (costs[ALL1].saved, costs[ALL1].flop)


def test_phases_of_a_step_that_saves_all() -> None:
    phases = phases_of(job_of(), [(ALL, 32)])
    params, layer, vocab = 8_030_261_248, 218_112_000, 128_256 * H
    kept = T * (27 * H + NORMS + LSE) + FLASH_STATES
    other = 2 * WORKSPACE + 24 * T + 2 * T * 128 * 2
    scratch = plan_head(
        T, H, 128_256, torch.bfloat16, "cuda", capability=(9, 0), device_bytes=GPUS["h100"].memory_bytes
    ).scratch_bytes
    at_head, step = phases["head"], phases["optimizer"]
    assert (at_head.weights, at_head.optimizer) == (2 * params, 0)
    assert at_head.activations == 32 * kept + 2 * 2 * T * H
    assert at_head.head == 2 * T * H + 2 * vocab + scratch
    assert at_head.bytes == 2 * params + at_head.activations + at_head.head + other
    last, first = phases["backward of layer 31"], phases["backward of layer 0"]
    assert (last.activations, last.gradients) == (32 * kept, 2 * vocab)
    assert (first.activations, first.gradients) == (kept, 2 * (31 * layer + vocab))
    assert phases["embedding"].transients == 2 * T * H + 4 * T * H
    assert (step.gradients, step.bytes) == (2 * params, 4 * params + other)


def test_a_recomputed_layer_is_whole_while_its_backward_runs() -> None:
    phases = phases_of(job_of(), [(INPUT, 32)])
    whole, alone = saved_by(job_of(), ALL), saved_by(job_of(), INPUT)
    assert phases["backward of layer 31"].activations == 31 * alone + whole
    assert phases["backward of layer 0"].activations == whole


def test_offloaded_layers_are_on_the_host_but_for_those_in_flight() -> None:

    def host(groups: Groups) -> int:
        return StepCosts(job_of()).on_host(groups)

    one, whole = saved_by(job_of(), ATTENTION), saved_by(job_of(), ALL)
    groups = [(AWAY, 20), (ALL, 12)]
    phases = phases_of(job_of(), groups)
    assert phases["head"].activations == 2 * one + 12 * whole + 2 * 2 * T * H
    assert phases["backward of layer 17"].activations == whole + one + PAGES  # the next one is on its way back
    assert phases["backward of layer 19"].activations == one + whole
    assert phases["backward of layer 0"].activations == whole
    assert host(groups) == 18 * (one + PAGES)  # the last two offloaded layers stay
    assert host([(AWAY, 2), (ALL, 30)]) == 0
    mixed = [(AWAY, 1), (ActivationPolicy(keep="input", offload=True), 3), (ALL, 28)]
    assert host(mixed) == one + saved_by(job_of(), INPUT) + 2 * PAGES


def test_autocast_has_wide_parameters_and_narrow_gemms() -> None:
    job = job_of(dtype=torch.float32, autocast=True)
    memory = StepCosts(replace(job, optimizer="adamw"))
    assert memory.weights + memory.all_gradients + memory.states == 16 * 8_030_261_248
    assert job.head_plan.backend == "exp"
    assert job.head_plan.cast_bytes == 2 * 128_256 * H
    head = phases_of(memory.job, [(ALL, 32)])["head"]
    held = 4 * T * H + 4 * 128_256 * H + job.head_plan.scratch_bytes + job.head_plan.cast_bytes
    assert head.head == held + job.head_plan.accumulator_bytes
    assert LayerCosts(job)[ALL].forward < 1.3 * LayerCosts(job_of())[ALL].forward


def test_gradients_that_stay_are_there_in_every_phase() -> None:
    job = job_of(keep_gradients=True)
    for phase in StepCosts(job).phases([(ATTENTION, 32)]):
        assert phase.gradients == 2 * 8_030_261_248
    before, after = (StepCosts(one).peak([(ATTENTION, 32)]).bytes for one in (job_of(), job))
    assert after > before


@pytest.mark.parametrize(
    ("optimizer", "each"), [("adamw", 4), ("adamw-8bit", 2 + 8 / 256), ("sgd", 0), ("sgd-momentum", 2)]
)
def test_states_of_optimizers(optimizer: str, each: float) -> None:
    memory = StepCosts(job_of(optimizer=optimizer))
    assert memory.states == int(each * job_of().shape.params)
    in_float32 = StepCosts(job_of(optimizer=optimizer, dtype=torch.float32))
    assert in_float32.states == int((each if "8bit" in optimizer else 2 * each) * job_of().shape.params)


def test_the_foreach_optimizer_s_temporaries_can_be_the_peak() -> None:
    short = job_of(seq_len=16, optimizer="adamw-foreach")
    peak = StepCosts(short).peak([(ALL, 32)])
    assert peak.name == "optimizer"
    assert peak.transients == 2 * job_of().shape.params
    assert set(OPTIMIZERS) == {"adamw", "adamw-foreach", "adamw-8bit", "sgd", "sgd-momentum"}


def test_the_head_is_planned_for_the_gpu_that_is_named() -> None:
    assert job_of().head_plan.backend == "exp"
    assert job_of(gpu=GPUS["a100-80gb"]).head_plan.backend == "row"
    small = job_of(gpu=GPUS["rtx4090"]).head_plan
    assert small.backend == "row"
    assert small.scratch_bytes <= GPUS["rtx4090"].memory_bytes / 32
    mine = job_of(head=HeadOptions(workspace_mib=64)).head_plan
    assert mine.scratch_bytes <= 64 * 2**20


def attention_flop(job: Job) -> float:
    return flop_of_layers(job)[1] / 32


def test_operations_of_attention() -> None:
    job = job_of()
    assert attention_flop(job) == 4 * (T * T / 2) * 4096
    window = replace(job, shape=replace(job.shape, windows=(1024,) * 32))
    pairs = sum(min(i + 1, 1024) for i in range(T))  # one by one
    assert attention_flop(window) == pytest.approx(4 * pairs * 4096, rel=1e-3)
    half = replace(job, shape=replace(job.shape, windows=(1024, 0) * 16))
    assert (window.shape.widest_window, half.shape.widest_window, job.shape.widest_window) == (1024, 0, 0)
    assert attention_flop(half) == pytest.approx((attention_flop(window) + attention_flop(job)) / 2)


def test_what_recompute_costs() -> None:
    costs = LayerCosts(job_of())
    all_, all1, attention, input_ = (costs[p] for p in (ALL, ALL1, ATTENTION, INPUT))
    assert all_.flop == 0
    assert all1.flop == pytest.approx(2 * 2 * T * H * 14336)
    assert attention.flop == 2 * T * (218_112_000 - 2 * H - H * 14336)  # but for the down projection
    assert costs[ActivationPolicy(keep="attention", mlp_level=1)].flop == pytest.approx(attention.flop)
    assert input_.flop - attention.flop == attention_flop(job_of())
    assert all_.backward < all1.backward < attention.backward < input_.backward
    assert all_.forward == input_.forward
    assert attention.forward == pytest.approx(all_.forward, rel=0.01)
    assert costs[ActivationPolicy(keep="input", offload=True)].transfer == 2 * T * H / GPUS["h100"].pcie


@pytest.mark.parametrize("late", [False, True])
def test_offloaded_states_by_phase(late: bool) -> None:
    memory = StepCosts(job_of(optimizer="adamw"))
    every, groups, states = memory.states, [(INPUT, 20), (ALL, 12)], memory.states // 2
    assert {phase.optimizer for phase in memory.phases(groups)} == {every}
    phases = phases_of(job_of(optimizer="adamw"), groups, states, late=late)
    assert {name: phases[name].optimizer for name in phases if "layer" not in name} == {
        "head": every - states,
        "embedding": every - states * late,
        "optimizer": every,
    }
    forward, backward = (
        {k: phases[f"{way} of layer {k}"].optimizer for k in range(32) if f"{way} of layer {k}" in phases}
        for way in ("forward", "backward")
    )
    assert forward[0] == forward[3] == every  # those of four layers are on their way
    assert forward[31] == every - int(states * 28 / 31)
    assert backward[31] == every - states
    assert backward[1] == backward[0] == every - states * late
    assert backward[19] == every - int(states * (1 if late else 1 - 12 / 30))
    peak = max(phase.bytes for phase in phases.values())
    assert memory.peaks(groups, [states])[late] == [peak] == [memory.peak(groups, states, late=late).bytes]
    assert states < memory.states_on_host(states) == pytest.approx(states, rel=1e-3)


def test_a_slow_bus_sets_the_time_of_offloaded_layers() -> None:
    slow = job_of(gpu=replace(GPUS["h100"], pcie=1e9))
    away = ActivationPolicy(keep="input", mlp_level=0, offload=True)
    each, one = 2 * T * H / 1e9, LayerCosts(slow)[away]
    assert each > one.backward
    moved, times = 32 - 2, StepCosts(slow)
    difference = times.seconds([(away, 32)]) - times.fixed_seconds - 2 * (one.forward + one.backward)
    assert difference == pytest.approx(moved * 2 * each * (1 + BESIDE))
    quick = StepCosts(job_of()).seconds([(away, 32)]) - StepCosts(job_of()).seconds([(INPUT, 32)])
    assert quick == pytest.approx(moved * 2 * BESIDE * 2 * T * H / GPUS["h100"].pcie)
