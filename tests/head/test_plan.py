"""plan_head: what will run and the bytes it takes, by arithmetic alone."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest
import torch

from lowtide import HeadOptions, plan_divergence, plan_head
from lowtide.errors import LowtideError
from lowtide.head.backends import choose, why_not_exp, why_not_row
from lowtide.head.options import Backend
from lowtide.head.plan import MIB
from lowtide.head.rows import slices
from promises import promise
from support import every_pair

pytestmark = promise("plans")

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
    *(("statistics", {"targets": targets}, "exp", "Hopper") for targets in (0, 1, 64)),
    ("statistics", {"targets": 65}, "torch", "64 targets.*65"),
    ("statistics", {"highest": 65}, "torch", "64 highest.*65"),
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
    got, reason = choose(work, "auto", **why_not)
    assert got == runs
    assert re.search(why, reason)
    for backend in get_args(Backend)[1:]:
        if backend == "torch" or (backend in why_not and why_not[backend] is None):
            assert choose(work, backend, **why_not)[0] == backend
            continue
        against = re.escape(why_not[backend]) if backend in why_not else ""
        with pytest.raises(LowtideError, match=f"backend: expected 'auto'.* or 'torch', got '{backend}'.*{against}"):
            choose(work, backend, **why_not)


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
        parts = list(slices(plan.rows, plan.chunk_rows))
        assert [s.start for s in parts] == [0, *(s.stop for s in parts[:-1])]
        assert parts[-1].stop == shape[0]
        assert len(parts) == plan.chunks
        assert all(0 < s.stop - s.start <= plan.chunk_rows for s in parts)
    if workspace_mib is not None:
        assert plan.scratch_bytes <= workspace_mib * MIB or (plan.chunk_rows == 1 and "one row" in plan.note)
        more = plan_head(*shape, dtype, device, HeadOptions(workspace_mib=2 * workspace_mib))
        assert more.chunks <= plan.chunks or (plan.schedule, more.schedule) == ("blocks", "chunks")


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


RULE: list[tuple[tuple[int, int, int], float | None, str, int]] = [  # N, D, V, workspace_mib, what, rows
    ((16384, 2048, 131072), None, "chunks", 4096),
    ((65536, 896, 151936), None, "chunks", 8192),  # 8 of them
    ((32768, 768, 32000), None, "chunks", 16384),  # the same, in a GiB of E
    ((12345, 2880, 201088), None, "chunks", 3200),  # as many of one length
    ((8192, 2560, 262144), None, "chunks", 2048),  # up to 8192 tokens
    ((16384, 2048, 50304), None, "chunks", 4096),  # 2^39 multiplications
    ((16384, 2048, 131072), 64, "blocks", 2048),
    ((16384, 2048, 131072), 256, "chunks", 896),
    ((16384, 2048, 131072), 2048, "chunks", 4096),  # a power of 2
    ((65536, 896, 151936), 256, "blocks", 4096),  # chunks would be more than 48
]


@pytest.mark.parametrize(("sizes", "workspace_mib", "schedule", "rows"), RULE)
def test_the_rule_of_chunks_of_exponentials(
    sizes: tuple[int, int, int], workspace_mib: float | None, schedule: str, rows: int
) -> None:
    options, hopper = HeadOptions(workspace_mib=workspace_mib), {"capability": (9, 0), "device_bytes": 80 * 2**30}
    plan = plan_head(*sizes, BF16, CUDA, options, **hopper)  # type: ignore[arg-type]
    assert (plan.backend, plan.schedule, plan.chunk_rows) == ("exp", schedule, rows)


@pytest.mark.parametrize("function", [False, True])
def test_chunks_are_of_one_length(function: bool) -> None:
    """A last, tiny chunk would read the whole weight for a few rows."""
    for N in (100, 101, 127, 1000, 4097):
        for mib in (0.05, 0.2, 1.0):
            options = HeadOptions(workspace_mib=mib)
            plan = plan_head(N, 16, 1000, torch.float32, "cpu", options, function=function)
            lengths = [part.stop - part.start for part in slices(plan.rows, plan.chunk_rows)]
            assert max(lengths) == plan.chunk_rows
            assert min(lengths) >= plan.chunk_rows - len(lengths), lengths
            assert plan.chunks == 1 or plan.scratch_bytes > 0.5 * mib * MIB or plan.chunk_rows == 1


SIZE = (256, 32, 1000)


def test_where_gradients_are_summed_and_copies_that_are_counted() -> None:
    few, many = (plan_head(*SIZE, torch.bfloat16, "cpu", HeadOptions(workspace_mib=w)) for w in (1000, 0.05))
    assert (few.chunks, few.accumulate, few.accumulator_bytes) == (1, "input", 0)
    assert many.chunks > 1
    assert (many.accumulate, many.accumulator_bytes) == ("float32", 1000 * 32 * 4)
    asked = HeadOptions(workspace_mib=0.05, accumulate="input")
    assert plan_head(*SIZE, torch.bfloat16, "cpu", asked).accumulator_bytes == 0
    assert plan_head(*SIZE, torch.float32, "cpu", HeadOptions(accumulate="float32")).accumulator_bytes == 0
    half = plan_head(*SIZE, torch.float16, "cpu", HeadOptions(accumulate="input"))  # whatever is asked
    assert (half.accumulate, half.accumulator_bytes) == ("float32", (1000 + 256) * 32 * 4)
    for dtype in (torch.bfloat16, torch.float16):
        plan = plan_head(*SIZE, dtype, "cuda", weight_dtype=torch.float32)
        assert plan.cast_bytes == 1000 * 32 * 2
        waits = 256 * 32 * 4 if dtype == torch.float16 else 0  # the input's gradient
        assert plan.accumulator_bytes == waits, "the weight's gradient itself is float32"


def test_bad_sizes_and_options_are_refused() -> None:
    for plan in (
        lambda V=2, **kwargs: plan_head(1, 1, V, torch.float32, "cpu", **kwargs),
        lambda V=2, **kwargs: plan_divergence(1, 1, V, 1, torch.float32, "cpu", **kwargs),
    ):
        with pytest.raises(LowtideError, match=r"options: expected lowtide.HeadOptions or None, got dict"):
            plan(options={"workspace_mib": 1})
        with pytest.raises(LowtideError, match=r"reduction: expected .*, got 'avg'"):
            plan(reduction="avg")
        with pytest.raises(LowtideError, match="V: expected a size of 0 or more, got -1"):
            plan(V=-1)
    with pytest.raises(LowtideError, match=r"dtype: expected a torch\.dtype, got 'bf16'"):
        plan_head(1, 1, 2, "bf16", "cpu")  # type: ignore[arg-type]
    with pytest.raises(LowtideError, match=r"device: expected a torch\.device or its name, got 'gpu'"):
        plan_head(1, 1, 2, torch.float32, "gpu")
