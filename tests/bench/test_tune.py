"""The search for tile sizes: right ones only, the fastest of them, in time; with a kernel and a timer of the test."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.bench import tune as tuning
from lowtide.bench.config import TuneConfig
from lowtide.bench.harness import Row
from lowtide.bench.shapes import HEADS
from lowtide.bench.tune import CALLS, CANDIDATES, NO_TIME, Chunk, build_kernel, fastest, in_order, tune
from lowtide.cli import main
from lowtide.errors import UnsupportedError
from lowtide.head.kernels import configs
from lowtide.head.kernels.configs import TABLE, GemmConfig
from lowtide.measure.timing import Timing

SHAPE = HEADS.one("24,16,72")
A, B, C = (GemmConfig(columns=32, group=group) for group in (1, 2, 3))
KIB = 1024


@pytest.fixture(scope="module")
def chunk() -> Chunk:
    return Chunk.random(SHAPE, torch.bfloat16, "cpu")


def plain(chunk: Chunk, config: GemmConfig) -> tuple[Callable[[], None], Tensor]:
    """The kernel in torch."""
    sums = torch.empty(len(chunk.x_CD), -(-len(chunk.w_VD) // config.columns))

    def run() -> None:
        e = (chunk.x_CD.float() @ chunk.w_VD.float().T - chunk.reference_C[:, None]).exp()
        e.scatter_(1, chunk.y_C[:, None].long(), 0.0)
        chunk.e_CV.copy_(e)
        torch.stack([part.sum(1) for part in torch.split(e, config.columns, 1)], 1, out=sums)

    return run, sums


@dataclass
class Gpu:
    """A kernel and a timer: each candidate takes ``ms``, its trial ``seconds``; ``mm`` is the product's time."""

    ms: Mapping[GemmConfig, float] = field(default_factory=dict)
    seconds: Mapping[GemmConfig, float] = field(default_factory=dict)
    mm: Mapping[GemmConfig, float] = field(default_factory=dict)
    spoil: Callable[[Chunk, Tensor, int], Any] = lambda chunk, sums, call: None
    broken: Mapping[GemmConfig, Exception] = field(default_factory=dict)
    now: float = 100.0
    built: list[GemmConfig] = field(default_factory=list)
    timed: list[GemmConfig] = field(default_factory=list)

    def build(self, chunk: Chunk, config: GemmConfig) -> tuple[Callable[[], None], Tensor]:
        self.built.append(config)
        self.now += self.seconds.get(config, 1.0)
        kernel, sums = plain(chunk, config)
        calls = 0

        def run() -> None:
            nonlocal calls
            if config in self.broken:
                raise self.broken[config]
            kernel()
            calls += 1
            if config == B:
                self.spoil(chunk, sums, calls)

        return run, sums

    def timer(self, functions: Mapping[str, Callable[[], object]]) -> dict[str, Timing]:
        for function in functions.values():
            function()
        config = self.built[-1]
        self.timed.append(config)
        times = {"kernel": self.ms.get(config, 1.0), "mm": self.mm.get(config, 0.5)}
        return {name: Timing((9e9, CALLS * times[name], 0.0)) for name in functions}

    def tune(self, chunk: Chunk, *candidates: GemmConfig, seconds: float = 1e9) -> list[Row]:
        end = self.now + seconds
        return list(tune(candidates, chunk, self.build, self.timer, end=end, clock=lambda: self.now))


def test_the_fastest_beside_the_product_of_its_own_rounds(chunk: Chunk) -> None:
    gpu = Gpu(ms={A: 1.0, B: 0.8, C: 0.9}, mm={C: 0.9})
    trials = gpu.tune(chunk, A, B, C)
    assert [(row["config"], row["ms"], row["mm_ms"]) for row in trials] == [(A, 1.0, 0.5), (B, 0.8, 0.5), (C, 0.9, 0.9)]
    assert [row["share"] for row in trials] == pytest.approx([0.5, 0.625, 1.0])
    best = fastest(trials)
    assert best is not None
    assert best["config"] == C


def one_sum(chunk: Chunk, sums: Tensor, call: int) -> None:
    sums[-1, -1] *= 1.05


SPOILS: dict[str, Callable[[Chunk, Tensor, int], Any]] = {
    "one sum": one_sum,
    "one exponential": lambda chunk, sums, call: chunk.e_CV[3, 4].mul_(1.02),
    "the target": lambda chunk, sums, call: chunk.e_CV[0, chunk.y_C[0]].fill_(1.0),
    "a sum that is no number": lambda chunk, sums, call: sums[0, 0].fill_(torch.nan),
    "nothing written": lambda chunk, sums, call: chunk.e_CV.fill_(0.0),
    "a race": lambda chunk, sums, call: one_sum(chunk, sums, call) if call > 1 else None,
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_wrong_results_are_rejected(chunk: Chunk, spoil: str) -> None:
    gpu = Gpu(ms={B: 0.1}, spoil=SPOILS[spoil])
    a, b, c = gpu.tune(chunk, A, B, C)
    assert b["failed"].startswith("wrong: a row's sum is off by " if "sum" in spoil or "race" in spoil else "wrong: ")
    assert not {"ms", "share"} & set(b)
    assert gpu.timed == ([A, B, C] if spoil == "a race" else [A, C]), "untimed, where the first run shows it"
    assert fastest([a, b, c]) in (a, c)


def test_what_another_candidate_left_is_not_taken_for_a_result(chunk: Chunk) -> None:
    gpu = Gpu()

    def build(chunk: Chunk, config: GemmConfig) -> tuple[Callable[[], object], Tensor]:
        kernel, sums = gpu.build(chunk, config)
        kernel()
        return (kernel if config == A else lambda: None), sums

    a, b = tune((A, B), chunk, build, gpu.timer, end=1e9, clock=lambda: 0.0)
    assert "failed" not in a
    assert b["failed"] == "wrong: a row's sum is off by nan of it"


def test_one_that_fails_says_why_and_the_others_go_on(chunk: Chunk) -> None:
    class OutOfResources(Exception):
        pass

    gpu = Gpu(broken={A: OutOfResources("out of resource: shared memory, Required: 300000\nlong"), B: ValueError()})
    a, b, c = gpu.tune(chunk, A, B, C)
    assert a["failed"] == "OutOfResources: out of resource: shared memory, Required: 300000"
    assert b["failed"] == "ValueError"
    assert c["share"] == 0.5
    assert fastest([a, b]) is None
    assert tuning.TABLE.line(a).endswith("Required: 300000\n")


def test_a_candidate_is_begun_only_if_the_longest_yet_would_end_in_time(chunk: Chunk) -> None:
    gpu = Gpu(seconds={A: 2.0, B: 5.0, C: 1.0})
    begun = gpu.now
    trials = gpu.tune(chunk, A, B, C, A, seconds=10.0)  # after A and B 3 s are left, and one took 5
    assert [row.get("failed") for row in trials] == [None, None, NO_TIME, NO_TIME]
    assert gpu.now - begun <= 10.0
    assert [row.get("failed") for row in Gpu().tune(chunk, A, B, C, seconds=3.0)] == [None] * 3

    gpu = Gpu()  # and the first, however short the time
    trials = gpu.tune(chunk, A, B, C, seconds=-1.0)
    assert [row.get("failed") for row in trials] == [None, NO_TIME, NO_TIME]
    assert gpu.built == [A]


def test_what_is_in_use_comes_first_and_none_twice() -> None:
    assert in_order(A) == (A, *CANDIDATES)
    for config in (CANDIDATES[3], *TABLE.values()):
        order = in_order(config)
        assert order[0] == config
        assert len(set(order)) == len(order) == len(CANDIDATES)


def shared_bytes(c: GemmConfig) -> int:
    """Of bfloat16 tiles in flight, and of the one that is stored."""
    return 2 * (c.stages * c.depth * (c.rows + c.columns) + c.rows * c.columns // c.pieces)


@pytest.mark.parametrize("c", CANDIDATES, ids=str)
def test_candidates_fit_a_hopper_multiprocessor(c: GemmConfig) -> None:
    assert c.per_multiprocessor * (shared_bytes(c) + KIB) <= 228 * KIB
    assert c.rows * c.columns <= 128 * 32 * c.warps  # accumulators: at most 128 of a thread's 255 registers
    assert c.per_multiprocessor * c.rows * c.columns <= 2**15  # half the register file


def test_one_candidate_fits_the_smallest_gpus_that_have_tma() -> None:
    assert min(map(shared_bytes, CANDIDATES)) <= 99 * KIB


def test_the_truth_is_that_of_float64() -> None:
    chunk = Chunk.random(SHAPE, torch.float32, "cpu", seed=3)
    z = chunk.x_CD.double() @ chunk.w_VD.double().T
    y = chunk.y_C[:, None].long()
    e = (z - z.gather(1, y)).exp().scatter(1, y, 0.0)
    torch.testing.assert_close(chunk.true_e_CV.double(), e, rtol=1e-5, atol=0)
    assert chunk.e_CV.stride(0) * chunk.e_CV.element_size() % 16 == 0
    torch.testing.assert_close(chunk.multiply().double(), z, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy
def test_the_kernel_itself() -> None:
    pytest.importorskip("triton")
    on_gpu = torch.cuda.is_available()
    config = GemmConfig() if on_gpu else GemmConfig(rows=16, columns=32, depth=16, stages=1, warps=4)
    chunk = Chunk.random(SHAPE, *((torch.bfloat16, "cuda") if on_gpu else (torch.float32, "cpu")))
    gpu = Gpu(ms={config: 2.0})
    gpu.built.append(config)
    (trial,) = tune((config,), chunk, build_kernel, gpu.timer, end=0.0, clock=lambda: 0.0)
    assert trial == {"config": config, "ms": 2.0, "mm_ms": 0.5, "share": 0.25}


@pytest.fixture
def unknown_gpu(gemm_file: Path, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A GPU called unknown, which is the CPU; of the candidates the fifth is fastest."""
    gpu = Gpu(ms={CANDIDATES[4]: 0.6})
    monkeypatch.setattr(tuning, "suitable_device", lambda _: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _=None: "unknown")
    monkeypatch.setattr(tuning, "build_kernel", gpu.build)
    monkeypatch.setattr(tuning, "time_side_by_side", lambda functions, **_: gpu.timer(functions))
    return gpu


def run(config: TuneConfig, clock: Callable[[], float] = time.monotonic) -> tuple[GemmConfig | None, str]:
    said: list[str] = []
    found = tuning.run(config, said.append, clock)
    return found, "".join(said)


def test_the_winner_is_kept_but_not_by_a_dry_run(unknown_gpu: Gpu, gemm_file: Path) -> None:
    found, said = run(TuneConfig(shape="24,16,72", dry_run=True))
    assert found == CANDIDATES[4]
    assert said.endswith("not written: --dry-run\n")
    assert not gemm_file.exists()
    unknown_gpu.built.clear()
    found, said = run(TuneConfig(shape="24,16,72"))
    assert found == CANDIDATES[4] == configs.lookup("unknown")
    assert unknown_gpu.built == list(in_order(GemmConfig()))
    lines = said.splitlines()
    assert lines[0] == "unknown, 24,16,72 bfloat16; first what is in use now"
    assert len(lines) == 2 + len(CANDIDATES) + 2
    assert lines[6].split() == ["128", "x", "128", "x", "64", "4", "8", "1", "1", "8", "0.600", "0.833"]
    assert lines[-2] == "fastest: 0.833 of torch.mm, 1.667 times the speed of what was in use"
    assert lines[-1] == f"written: {gemm_file}"
    unknown_gpu.built.clear()
    run(TuneConfig(shape="24,16,72"))
    assert unknown_gpu.built[0] == CANDIDATES[4]


@pytest.mark.parametrize("status", [0, 1])
def test_the_command_fails_where_no_candidate_could_be_used(
    status: int, unknown_gpu: Gpu, gemm_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown_gpu.broken = {config: RuntimeError("no") for config in CANDIDATES} if status else {}
    command = ["bench", "tune", "--dry-run", "--seconds", "1e9", "--shape", "24,16,72", "--warm", "0", "--reps", "1"]
    assert main(command) == status
    assert capsys.readouterr().out.count("RuntimeError: no") == status * len(CANDIDATES)
    assert not gemm_file.exists()


def test_the_seconds_hold_for_the_whole_run(unknown_gpu: Gpu) -> None:
    _, said = run(TuneConfig(shape="24,16,72", seconds=3.0), lambda: unknown_gpu.now)
    assert len(unknown_gpu.built) == 3
    assert said.count(NO_TIME) == len(CANDIDATES) - 3


def test_a_gpu_or_a_shape_that_does_not_suit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "old")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(UnsupportedError, match=r"got old and 24,16,72\. Its loads and tiles need"):
        tuning.suitable_device(SHAPE)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    assert tuning.suitable_device(SHAPE) == torch.device("cuda", 0)
    with pytest.raises(UnsupportedError, match="the hidden size is 12"):
        tuning.suitable_device(replace(SHAPE, D=12))


def test_a_chunk_too_large_is_one_error(unknown_gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> Chunk:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Chunk, "random", full)
    with pytest.raises(UnsupportedError, match=r"^shape: expected one that this GPU's memory can hold"):
        run(TuneConfig(shape="24,16,72"))
