"""plan_head: what will run and the bytes it takes, by arithmetic alone."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest
import torch

from lowtide import HeadOptions, HeadPlan, plan_divergence, plan_head
from lowtide.errors import LowtideError
from lowtide.head.backends import choose, why_not_exp, why_not_row
from lowtide.head.options import Backend
from lowtide.head.plan import plan_of
from lowtide.head.planner import MIB, Work
from support import every_pair

SHAPES = [(16384, 2048, 131072), (8192, 2304, 256000), (1, 16, 2), (37, 896, 50257), (2**20, 64, 2**19), (100, 0, 9)]


CUDA, BF16 = torch.device("cuda"), torch.bfloat16
EACH: dict[str, Any] = {"device": CUDA, "dtype": BF16, "D": 64, "V": 100}
CHOICES: list[tuple[str, dict[str, Any], str, str]] = [  # work, what is not as in EACH, what runs, and why
    ("cross entropy", {}, "exp", "Hopper"),
    ("cross entropy", {"D": 63}, "row", "multiple of 16 bytes"),
    ("cross entropy", {"dtype": torch.float16}, "row", "range"),
    ("cross entropy", {"dtype": torch.float32}, "row", "float32"),
    ("cross entropy", {"dtype": torch.float64}, "torch", "float64"),
    ("cross entropy", {"V": 0}, "torch", "empty"),
    ("cross entropy", {"device": torch.device("cpu")}, "torch", "NVIDIA GPUs.* cpu"),
    ("cross entropy", {"capped_and_smoothed": True}, "row", "soft cap"),
    ("cross entropy", {"weight_fits": False}, "row", "weight's do not"),
    *(("cross entropy", {"capability": of}, "row", "compute capability 9.0") for of in ((8, 0), (8, 9), (12, 0))),
    *(("statistics", {"stats": stats}, "exp", "Hopper") for stats in ((0, 0), (1, 1), (64, 64))),
    ("statistics", {"stats": (65, 0)}, "torch", "64 targets.*65"),
    ("statistics", {"stats": (1, 65)}, "torch", "64 highest.*65"),
    *(("divergence", {"dtype": dtype}, "row", "both sides") for dtype in (BF16, torch.float16, torch.float32)),
    ("divergence", {"dtype": torch.float64}, "torch", "computes in float32"),
    ("divergence", {"topk": True}, "torch", "top k"),
    ("divergence", {"device": torch.device("cpu")}, "torch", "NVIDIA GPUs"),
]


@pytest.mark.parametrize(("work", "change", "runs", "why"), CHOICES)
def test_which_implementation_runs_and_why(
    work: str, change: dict[str, Any], runs: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fastest that can, with its reason, or what is against a faster one; an explicit one runs or raises."""
    place = EACH | change
    capability = place.pop("capability", None)
    if capability or torch.cuda.is_available():  # as on a machine with such a GPU
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability or (9, 0))
    of_row = {name: place.pop(name) for name in ("topk",) if name in place}
    why_not = {}
    if work != "divergence":
        why_not["exp"] = why_not_exp(**place)
    if work != "statistics":
        why_not["row"] = why_not_row(place["device"], place["dtype"], place["V"], **of_row)
    got, reason = choose(work, HeadOptions(), **why_not)
    assert got == runs
    assert re.search(why, reason)
    for backend in get_args(Backend)[1:]:
        options = HeadOptions(backend=backend)
        if backend == "torch" or (backend in why_not and why_not[backend] is None):
            assert choose(work, options, **why_not)[0] == backend
            continue
        against = re.escape(why_not[backend]) if backend in why_not else ""
        with pytest.raises(LowtideError, match=f"backend: expected 'auto'.* or 'torch', got '{backend}'.*{against}"):
            choose(work, options, **why_not)


def exponentials(N: int, D: int, V: int, mib: float | None = None, **kwargs: Any) -> HeadPlan:
    work: dict[str, Any] = {"gradient": "forward", "weight_frozen": False, "choice": ("exp", ""), **kwargs}
    bf16 = {"dtype": torch.bfloat16, "weight_dtype": torch.bfloat16, "device": torch.device("cuda")}
    return plan_of(Work(size=(N, D, V), options=HeadOptions(workspace_mib=mib), **bf16, **work))


@pytest.mark.parametrize("mib", [1e-3, 0.1, 1, 16, None])
@pytest.mark.parametrize("gradient", ["forward", "recompute"])
@pytest.mark.parametrize("backend", get_args(Backend)[1:])
def test_a_chunk_has_a_row_of_each_rank(backend: str, gradient: str, mib: float | None) -> None:
    """However small the workspace: a chunk's rows come from all ranks alike."""
    plan = exponentials(8 * 40, 24, 61, mib, gradient=gradient, choice=(backend, ""), sharded=True, groups=8)
    assert plan.chunk_rows >= 8
    if backend == "exp":
        assert min(plan.sum_rows, plan.product_rows) >= 8
    teacher = 24, 61, torch.bfloat16
    pair = exponentials(8 * 40, 24, 61, mib, gradient=gradient, choice=("row", ""), groups=8, teacher=teacher)
    assert pair.chunk_rows >= 8


@every_pair(
    device=["cpu", "cuda", "mps"],
    dtype=[torch.float32, torch.bfloat16, torch.float16, torch.float64],
    shape=SHAPES,
    workspace_mib=[None, 1e-3, 16, 64, 1000, 1e6],
)
def test_chunks_cover_the_rows_within_the_workspace(
    device: str, dtype: torch.dtype, shape: tuple[int, int, int], workspace_mib: float | None
) -> None:
    plan = plan_head(*shape, dtype, device, HeadOptions(workspace_mib=workspace_mib))
    assert (plan.chunks - 1) * plan.chunk_rows < shape[0] <= plan.chunks * plan.chunk_rows
    if plan.chunks < 1000:
        slices = list(plan.slices())
        assert [s.start for s in slices] == [0, *(s.stop for s in slices[:-1])]
        assert slices[-1].stop == shape[0]
        assert len(slices) == plan.chunks
        assert all(0 < s.stop - s.start <= plan.chunk_rows for s in slices)
    if workspace_mib is not None:
        assert plan.scratch_bytes <= workspace_mib * MIB or (plan.chunk_rows == 1 and "one row" in plan.note)
        more = plan_head(*shape, dtype, device, HeadOptions(workspace_mib=2 * workspace_mib))
        assert more.chunks <= plan.chunks or (plan.schedule, more.schedule) == ("blocks", "chunks")


def test_the_automatic_choice_is_sane_on_a_laptop_and_on_a_gpu() -> None:
    laptop = plan_head(4096, 2048, 131072, torch.float32, "cpu")
    assert laptop.scratch_bytes <= 160 * MIB
    assert laptop.chunk_rows >= 128
    gpu = plan_head(16384, 2048, 131072, torch.bfloat16, "cuda")
    assert gpu.scratch_bytes <= 81079 * MIB / 24
    assert gpu.chunk_rows >= 1024
    assert gpu.chunk_rows % 128 == 0


def test_accumulation_follows_the_number_of_chunks() -> None:
    few, many = (plan_head(256, 32, 1000, torch.bfloat16, "cpu", HeadOptions(workspace_mib=w)) for w in (1000, 0.05))
    assert (few.chunks, few.accumulate, few.accumulator_bytes) == (1, "input", 0)
    assert many.chunks > 1
    assert (many.accumulate, many.accumulator_bytes) == ("float32", 1000 * 32 * 4)
    forced = plan_head(256, 32, 1000, torch.bfloat16, "cpu", HeadOptions(workspace_mib=0.05, accumulate="input"))
    assert forced.accumulator_bytes == 0
    assert plan_head(256, 32, 1000, torch.float32, "cpu", HeadOptions(accumulate="float32")).accumulator_bytes == 0


def test_fp16_sums_are_float32_whatever_is_asked() -> None:
    plan = plan_head(256, 32, 1000, torch.float16, "cpu", HeadOptions(accumulate="input"))
    assert (plan.accumulate, plan.accumulator_bytes) == ("float32", (1000 + 256) * 32 * 4)


def test_the_copy_that_autocast_makes_is_counted() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        plan = plan_head(256, 32, 1000, dtype, "cuda", weight_dtype=torch.float32)
        assert plan.cast_bytes == 1000 * 32 * 2
        waits = 256 * 32 * 4 if dtype == torch.float16 else 0  # the input's gradient
        assert plan.accumulator_bytes == waits, "the weight's gradient itself is float32"


def test_when_the_gradients_are_computed() -> None:
    def gradient(**kwargs: object) -> str:
        return plan_head(8, 4, 9, torch.float32, "cpu", **kwargs).gradient  # type: ignore[arg-type]

    assert gradient() == "forward"
    assert gradient(reduction="none") == "recompute"
    assert gradient(reduction="none", weight_frozen=True) == "forward"
    assert gradient(options=HeadOptions(gradient="recompute")) == "recompute"


def test_the_plan_prints_what_a_reader_wants_to_know() -> None:
    text = str(plan_head(100, 8, 1000, torch.bfloat16, "cpu", HeadOptions(workspace_mib=1e-3)))
    for part in ("backend torch", "100 rows in 100 chunks of 1", "scratch", "MiB", "one row is computed at a time"):
        assert part in text


def test_sizes_below_zero_are_refused() -> None:
    with pytest.raises(LowtideError, match="V: expected a size of 0 or more, got -1"):
        plan_head(1, 1, -1, torch.float32, "cpu")


def test_what_is_no_option_and_no_reduction_is_refused() -> None:
    size = (1, 1, 2)
    for plan in (
        lambda **kwargs: plan_head(*size, torch.float32, "cpu", **kwargs),
        lambda **kwargs: plan_divergence(*size, 1, torch.float32, "cpu", **kwargs),
    ):
        with pytest.raises(LowtideError, match=r"options: expected lowtide.HeadOptions or None, got dict"):
            plan(options={"workspace_mib": 1})
        with pytest.raises(LowtideError, match=r"reduction: expected .*, got 'avg'"):
            plan(reduction="avg")


def test_rows_that_fit_are_one_chunk() -> None:
    """Also where they are no whole number of tiles: each chunk more is a rounding more of the weight's gradient."""
    for rows in (1, 100, 600, 701, 1500):
        assert plan_head(rows, 128, 5000, torch.bfloat16, "cuda").chunks == 1


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("N", [1, 512, 8192])
def test_skipping_tiles_fits_a_limit(N: int, weight_dtype: torch.dtype) -> None:
    """The ordered copy is scratch: below what it needs no tile is skipped; by default a long batch has room."""
    of = {"size": (N, 2048, 32000), "dtype": torch.bfloat16, "weight_dtype": weight_dtype, "device": CUDA}
    more: dict[str, Any] = {"choice": ("exp", ""), "gradient": "forward", "skips": True, "device_bytes": 80 << 30}
    for mib in (1.0, 64.0, 512.0, 2048.0, None):
        plan = plan_of(Work(**of, **more, options=HeadOptions(workspace_mib=mib), weight_frozen=False, kept=True))
        assert mib is None or not plan.kept or plan.scratch_bytes <= mib * MIB
        assert plan.kept or mib is not None or N < 8192
        assert not plan.kept or plan.scratch_bytes > 2048 * 32000 * weight_dtype.itemsize


@pytest.mark.parametrize(("N", "D", "V", "gib"), [(1000, 5120, 200000, 40), (16384, 8192, 151936, 16)])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_both_passes_skip_tiles_or_neither(N: int, D: int, V: int, gib: int, weight_dtype: torch.dtype) -> None:
    """Backward reads what forward saves of each tile; forward by itself computes no gradient."""
    sizes: dict[str, Any] = {"size": (N, D, V), "dtype": torch.bfloat16, "weight_dtype": weight_dtype, "device": CUDA}
    more: dict[str, Any] = {"choice": ("exp", ""), "skips": True, "kept": True, "device_bytes": gib << 30}
    values = plan_of(Work(**sizes, **more, options=HeadOptions(), weight_frozen=True, gradient="forward"))
    for frozen in (False, True):
        gradients = plan_of(Work(**sizes, **more, options=HeadOptions(), weight_frozen=frozen, gradient="recompute"))
        assert gradients.kept == values.kept


def test_a_plan_of_skipped_tiles() -> None:
    """It is in no more memory than without where the ordered copy fits, and says what it does."""
    sizes = 16384, 2048, 131072
    dense, found = (
        plan_head(*sizes, torch.bfloat16, "cuda", HeadOptions(skip=skip), capability=(9, 0), device_bytes=80 * 2**30)
        for skip in (None, 5e-3)
    )
    assert not dense.kept
    assert found.kept
    assert found.scratch_bytes <= dense.scratch_bytes
    assert "tiles" in str(found)
    frozen = plan_head(*sizes, torch.bfloat16, "cuda", HeadOptions(skip=5e-3), capability=(9, 0), weight_frozen=True)
    assert not frozen.kept
