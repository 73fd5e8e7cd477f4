"""The model of time by which the exponential path's schedules are chosen."""

import pytest
import torch

from lowtide import HeadOptions, plan_head
from lowtide.head.cost import HOPPER, Schedule
from lowtide.head.planner import MIB

SHAPES = [(16384, 2048, 131072), (8192, 4096, 128256), (32768, 768, 32000), (12345, 2880, 201088), (65536, 896, 151936)]


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
