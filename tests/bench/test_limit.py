"""The limit is exactly the products it says, and its numbers of rows are those that fit."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lowtide.bench.limit import MOST_LOGITS, bare_gemms, limit_rows, measure_limit
from lowtide.bench.problem import PLAIN, SETTINGS, Setting, make_problem
from lowtide.bench.shapes import Shape, parse_shape

SHAPE = parse_shape("50,12,120")


@pytest.mark.parametrize("setting", [PLAIN, *SETTINGS], ids=lambda setting: setting.name)
@pytest.mark.parametrize("rows", [50, 16, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bare_products_do_what_the_setting_needs_and_no_more(
    setting: Setting, rows: int, dtype: torch.dtype
) -> None:
    problem = make_problem(SHAPE, dtype, "cpu").in_setting(setting)
    with FlopCounterMode(display=False) as counter:
        bare_gemms(problem, rows)()
    assert counter.get_total_flops() == setting.gemms * 2 * 50 * 12 * 120 == SHAPE.flops(setting.gemms)


def test_rows_are_2048_4096_and_all() -> None:
    assert limit_rows(16384, 2) == (2048, 4096, 16384)
    assert limit_rows(3000, 2) == (2048, 3000)
    assert limit_rows(1000, 2) == (1000,)
    assert limit_rows(262144, MOST_LOGITS // 5000) == (2048, 4096)
    assert limit_rows(8192, MOST_LOGITS) == (2048,)  # there is always one


def test_the_limit_is_a_time_for_each() -> None:
    problem = make_problem(Shape("", 2100, 2, 3), torch.float32, "cpu")
    limit = measure_limit(problem, partial(bare_gemms, problem), warm=0, reps=1)
    assert set(limit) == {2048, 2100}
    assert all(ms > 0 for ms in limit.values())
