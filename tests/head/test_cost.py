"""The model of time by which the exponential path's schedules are chosen."""

import pytest
import torch

from lowtide import HeadOptions, plan_head
from lowtide.head.cost import EXP_TILES, HOPPER, Schedule, gpu_of
from lowtide.head.planner import MIB

SHAPES = [(16384, 2048, 131072), (8192, 4096, 128256), (32768, 768, 32000), (12345, 2880, 201088), (65536, 896, 151936)]


def test_a_wave_costs_as_much_when_it_is_not_full() -> None:
    def seconds(tiles_across: int) -> float:
        return HOPPER.gemm(12 * 128, 256 * tiles_across, 4096, EXP_TILES)

    assert seconds(6) == seconds(11)
    assert seconds(12) == seconds(22) == pytest.approx(2 * seconds(11))
    assert seconds(11) == pytest.approx(2 * 12 * 128 * 11 * 256 * 4096 / HOPPER.rate)


def test_few_rows_cost_what_reading_the_weight_does() -> None:
    assert HOPPER.gemm(1, 131072, 2048, EXP_TILES) == pytest.approx(2 * 131072 * 2048 / HOPPER.bandwidth, rel=1e-3)


def test_short_chunks_pay_for_the_sum_and_blocks_for_a_gemm_more() -> None:
    size = (16384, 4096, 128256)
    head, frozen = (Schedule(HOPPER, size, trained) for trained in (True, False))
    assert head.in_chunks(512, 4) > head.in_chunks(512, 2) > 1.1 * head.in_chunks(4096, 2)
    assert 1.25 < head.in_blocks(4096, 16896, 8192, 2) / head.in_chunks(4096, 2) < 1.4
    assert frozen.in_chunks(512, 2) < 1.1 * frozen.in_chunks(4096, 2), "no sum, nothing to gain"


def test_without_a_gpu_hopper_is_planned_for() -> None:
    assert gpu_of(torch.device("cpu")) == HOPPER


@pytest.mark.parametrize("shape", SHAPES)
def test_more_memory_is_never_slower(shape: tuple[int, int, int]) -> None:
    """By the model; and the default is nearly as fast as with all without taking more than its share of the GPU."""
    schedule, last = Schedule(HOPPER, shape, True), float("inf")
    for mib in (32, 64, 128, 256, 512, 1024, 2048, None):
        plan = plan_head(*shape, torch.bfloat16, "cuda", HeadOptions(workspace_mib=mib))
        wide = 4 if plan.accumulate == "float32" else 2
        if plan.schedule == "chunks":
            seconds = schedule.in_chunks(plan.chunk_rows, wide)
        else:
            seconds = schedule.in_blocks(plan.chunk_rows, plan.block_columns, plan.sum_rows, wide)
        assert mib is None or seconds <= 1.01 * last
        last = seconds
    assert last <= 1.03 * schedule.in_chunks(min(shape[0], 8192), 2)
    assert plan.scratch_bytes <= 81079 * MIB / 24


def test_the_default_pays_for_speed_within_bounds() -> None:
    """Of a GPU with half the memory half as much, and of one without a choice what there is."""
    size = (16384, 4096, 128256)
    large, small = (
        plan_head(*size, torch.bfloat16, "cuda", device_bytes=of << 30).scratch_bytes / MIB for of in (80, 24)
    )
    assert small <= 1024 < large <= 80 * 1024 / 24
