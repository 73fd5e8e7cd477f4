"""The longest sequence that runs: the search by itself, what is predicted, and real steps of a tiny model on a CPU."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lowtide.bench import longest, longest_way
from lowtide.bench.longest import Fit, parameter_sizes, pinned_bytes
from lowtide.bench.longest_way import OUT_OF_HOST, OUT_OF_TIME, Watch, out_of
from lowtide.bench.train_config import LongestBenchConfig
from lowtide.bench.ways import config_of
from lowtide.cli import main
from lowtide.errors import ArgumentValueError, UnsupportedError
from lowtide.measure.child import ChildResult
from lowtide.memory.planner.disk import DiskSpace
from lowtide.memory.planner.gpus import GPUS
from lowtide.memory.planner.runs import runs_of
from lowtide.memory.planner.shapes import read_shape
from lowtide.train.shapes import SHAPES

GIB = 2**30
SHAPE = read_shape(SHAPES["llama-3-8b"])
FIT = Fit(
    way="lowtide", train="full", shape=SHAPE, gpu=GPUS["h100"], dtype=torch.bfloat16, gpu_bytes=73 * GIB,
    host_bytes=122 * GIB, tile=16384,
)  # fmt: skip
TINY: dict[str, Any] = {"model": "lowtide-small", "layers": None, "dtype": "float32", "device": "cpu", "sdpa": "auto"}
needs_ranks = pytest.mark.skipif(not dist.is_available(), reason="torch.distributed is not in this build")


def measured(
    way: str, train: str, tokens: int = 40, policies: str = "2xinput-mlp1-in16", *, warm: int = 1,
    least_bytes: int = 2**20, **changed: Any,
) -> Any:  # fmt: skip
    settings = json.loads(json.dumps(vars(LongestBenchConfig(train=train, **{**TINY, **changed}))))
    return longest_way.measure(way, settings, tokens, policies, 1.0, (warm, 1), 300.0, least_bytes)


@needs_ranks
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers by an old name
@pytest.mark.parametrize("train", ["full", "lora"])
def test_a_step_is_the_same_by_each_way(train: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    reports: list[Any] = []
    patch = longest_way.patch
    monkeypatch.setattr(longest_way, "patch", lambda model: reports.append(patch(model)))
    rows = {way: measured(way, train) for way in ("lowtide", "stock", "stock-offload")}
    for way, row in rows.items():
        assert "failed" not in row, (way, row)
        assert row["losses"] == pytest.approx(rows["stock"]["losses"], rel=1e-4)
        assert row["losses"][0] > row["losses"][1], "the optimizer's step counts"
        assert row["host_gib"] >= 0
    assert not dist.is_initialized()
    (report,) = reports
    assert (report.calls_fused, report.calls_materialised) == (2, 0), "of long sequences the logits are all memory"
    assert all(part.patched for part in report.parts.values())


@needs_ranks
@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_on_the_host_and_as_a_model_begins(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "lowtide-small", {**SHAPES["lowtide-small"], "tie_word_embeddings": tied})
    with longest_way._world(torch.device("cpu"), needed=True):
        model = longest_way.build("stock", LongestBenchConfig(**{**TINY, "layers": 3}))
        assert len(model.model.layers) == 3
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        for name, p in model.named_parameters():
            local = p.to_local()
            assert local.device.type == "cpu"
            assert local.shape == p.shape
            if "norm" in name:
                assert torch.equal(local, torch.ones_like(local))
            else:
                assert local.std().item() == pytest.approx(longest_way.INIT_STD, rel=0.1)
        assert not any(buffer.is_meta for buffer in model.buffers())


def test_fewer_layers_are_of_the_kinds_that_the_plan_counts(tmp_path: Path) -> None:
    """Gemma's layers take turns with a window: a config of fewer has as many kinds."""
    file = tmp_path / "gemma.json"
    file.write_text(json.dumps({"model_type": "gemma3_text", "num_hidden_layers": 8, "sliding_window": 16}))
    config = config_of(str(file), 7)
    assert (config.num_hidden_layers, len(config.layer_types)) == (7, 7)
    assert config.layer_types.count("full_attention") == 1
    assert read_shape(config).windows == (16,) * 5 + (0, 16)
    with pytest.raises(ArgumentValueError, match="layers: expected at least 1"):
        config_of(str(file), 0)


def test_a_way_that_fails_says_why_and_what_ran_out() -> None:
    row = measured("liger", "full", model="nonsense")
    assert row["out_of"] is None
    assert row["failed"].startswith("ArgumentValueError: model: expected")


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), "GPU memory"),
        (RuntimeError("CUDA error: out of memory"), "host memory"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), "host memory"),
        (MemoryError(), "host memory"),
        (UnsupportedError("host_gib: expected 3 GiB of host memory for 3 offloaded layers, got 2"), "host memory"),
        (RuntimeError("shapes cannot be multiplied"), None),
        (UnsupportedError("model.layers.0: expected a layer"), None),
    ],
)
def test_which_memory_ran_out(error: Exception, memory: str | None) -> None:
    assert out_of(error) == memory


def test_the_watch_ends_a_process_before_the_host_has_none_left() -> None:
    ended: list[int] = []
    free = iter([10 * GIB, 7 * GIB, 3 * GIB, 2**20])
    with Watch(2**30, 100.0, ended.append, lambda: next(free, 9 * GIB)) as watch:
        while not ended:
            time.sleep(0.01)
    assert ended == [OUT_OF_HOST]
    assert watch.taken == 10 * GIB - 2**20
    late: list[int] = []  # once more with each look, as here it does not end
    with Watch(2**30, 0.15, late.append, lambda: 5 * GIB):
        while not late:
            time.sleep(0.01)
    assert set(late) == {OUT_OF_TIME}
    never: list[int] = []
    with Watch(2**30, 100.0, never.append, lambda: 0) as unknown:  # a system that does not tell
        time.sleep(0.25)
    assert (never, unknown.taken) == ([], 0)


def moves(groups: Any) -> int:
    """How many layers' checkpoints go to the host."""
    return sum(n for _, n, moved in runs_of(groups) if moved)


def test_what_is_on_the_host_by_hand() -> None:
    layer = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336
    assert sum(parameter_sizes(SHAPE)) == 32 * layer + 2 * 128256 * 4096
    assert [pinned_bytes(n) for n in (0, 1, 2, 3, 1024, 1025)] == [0, 1, 2, 4, 1024, 2048]
    mlp, square = 2**27, 2**25  # 117 MB and 32 MiB, as PyTorch pins them
    pinned = 32 * (3 * mlp + 2 * square + 2 * 2**23) + 2 * 2**30
    assert FIT.states == 2 * pinned + 4 * SHAPE.params
    assert replace(FIT, train="lora").states == 0
    T = 65536
    kept = 30 * (T * 4096 * 2 + 6 * 4096)  # the last two stay
    assert FIT.at(T).host == FIT.states + kept
    assert moves(FIT.at(T).groups) == 30
    stream, weight, logits = T * 4096 * 2, 2**30, 32 * GIB  # of two bytes, of the vocabulary, of 31.3 GiB
    offloaded = replace(FIT, way="liger-offload").at(T)
    assert offloaded.host == FIT.states + 34 * stream + weight
    adapted = replace(FIT, way="liger-offload", train="lora").at(T)
    assert adapted.host == 34 * stream, "a frozen weight has no gradient"
    assert replace(FIT, way="stock-offload").at(T).host == FIT.states + 38 * stream + weight + 2 * logits
    assert replace(FIT, way="liger").at(T).host == FIT.states
    for way in ("lowtide", "liger-offload"):
        on_cpu = replace(FIT, way=way, gpu_bytes=None).at(T)
        assert on_cpu.host == FIT.states + on_cpu.gpu


def test_stock_logits_are_on_the_gpu() -> None:
    """Measured end to end, a Llama-3.2-1B at 32768 tokens: 56.5 GiB, and 12.3 with Liger's loss."""
    fit = replace(FIT, shape=read_shape(SHAPES["llama-3.2-1b"]), train="lora", way="liger")
    liger, stock = fit.at(32768).gpu, replace(fit, way="stock").at(32768).gpu
    assert stock - liger == pytest.approx((56.5 - 12.3) * GIB, rel=0.1)


@needs_ranks
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # as above
@pytest.mark.parametrize("train", ["full", "lora"])
def test_what_save_on_cpu_takes_is_counted(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the sizes of all that autograd saves in a real step, with hooks in the place of `save_on_cpu`'s."""
    pytest.importorskip("peft")
    monkeypatch.setitem(SHAPES, "lowtide-small", {**SHAPES["lowtide-small"], "num_hidden_layers": 3})
    shape, T, saved = read_shape({"vocab_size": 1000, **SHAPES["lowtide-small"]}), 37, []
    keep = longest_way._keep

    def hooks(*args: Any) -> Any:
        keep(*args)
        return torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)

    monkeypatch.setattr(longest_way, "_keep", hooks)
    row = measured("stock-offload", train, tokens=T, dtype="bfloat16", warm=0)
    assert "failed" not in row
    fit = replace(FIT, way="stock-offload", train=train, shape=shape)
    expected = [T * shape.hidden * 2] * shape.layers + fit.saved_outside(T)
    found = sorted((t.nbytes for t in saved), reverse=True)
    assert found[: len(expected)] == sorted(expected, reverse=True)
    assert sum(found[len(expected) :]) < T * 64, "a few numbers a token"


def test_layers_that_the_host_has_no_room_for_stay_on_the_gpu() -> None:
    T = 8192 * 40
    groups = FIT.at(T).groups
    assert [policy.offload for policy, _ in groups] == [True, False]
    each = T * 4096 * 2 + 6 * 4096
    room = (FIT.host_bytes - FIT.states) // each
    assert groups[0][1] == room + 2
    assert FIT.at(T).host <= FIT.host_bytes
    none = replace(FIT, host_bytes=FIT.states).at(T).groups
    assert [policy.offload for policy, _ in none] == [False]


def test_layers_that_the_host_has_no_room_for_go_to_the_disk() -> None:
    T, each = 8192 * 60, 8192 * 60 * 4096 * 2 + 6 * 4096
    fit = replace(FIT, host_bytes=FIT.states + 8 * each)
    here, there = fit.at(T), replace(fit, disk=DiskSpace(2**40)).at(T)
    assert (moves(here.groups), moves(there.groups)) == (8, 30)
    assert (here.disk, there.disk) == (0, (30 - 8 + 4) * each), "four are on their way"
    assert there.host <= fit.host_bytes
    assert there.gpu == pytest.approx(here.gpu - 22 * each, rel=0.05)
    assert replace(fit, disk=DiskSpace(10 * each)).at(T) == here, "a disk that has no room either"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--budget 8GiB", "budget: expected a GPU, whose memory it is, got a CPU. Leave it out."),
        ("--budget 0", "budget: expected a size above 0, got '0'."),
        ("--sdpa cudnn", "sdpa: expected auto, flash or math on a CPU, got cudnn."),
        ("--sdpa efficient", "sdpa: expected auto, flash or math on a CPU, got efficient."),
    ],
)
def test_what_is_for_gpus(given: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["bench", "longest", "--model", "lowtide-small", "--device", "cpu", "--output", str(tmp_path)]
    assert main([*settings, *given.split()]) == 2
    assert capsys.readouterr().err == f"lowtide bench longest: {said}\n"
    assert not list(tmp_path.iterdir())


def test_a_disk_is_for_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["bench", "longest", "--model", "lowtide-small", "--device", "cpu", "--output", str(tmp_path)]
    assert main([*settings, "--disk", str(tmp_path)]) == 2
    assert "disk: expected a GPU" in capsys.readouterr().err
    assert main([*settings, "--disk", str(tmp_path / "none")]) == 2
    assert "disk: expected a folder" in capsys.readouterr().err


@pytest.mark.parametrize("train", ["full", "lora"])
def test_the_fastest_that_should_fit(train: Any) -> None:
    """Where the rate is measured, memory that is free is spent; of a sequence that fills it there is little choice."""
    fit = replace(FIT, train=train)
    fastest, leanest = fit.fastest(32768), fit.at(32768)
    assert fastest.seconds < 0.95 * leanest.seconds
    assert leanest.gpu < 0.9 * 73 * GIB < fastest.gpu <= 73 * GIB
    assert (fastest.host, moves(fastest.groups)) == (fit.states, 0)
    smaller = replace(fit, gpu_bytes=40 * GIB).fastest(32768)
    assert fastest.seconds < smaller.seconds < leanest.seconds
    assert smaller.gpu <= 40 * GIB
    longest = fit.longest(8192)
    found, leanest = fit.fastest(longest), fit.at(longest)
    assert max(found.gpu, leanest.gpu) <= 73 * GIB
    assert 0.9 * leanest.seconds <= found.seconds <= leanest.seconds
    assert all(policy.every == 1 for policy, _ in found.groups) or train == "lora"
    assert replace(fit, way="liger").fastest(32768) == replace(fit, way="liger").at(32768)
    assert replace(fit, gpu_bytes=None).fastest(32768) == replace(fit, gpu_bytes=None).at(32768)


@pytest.mark.parametrize("train", ["full", "lora"])
@pytest.mark.parametrize("way", LongestBenchConfig.known["ways"])
def test_the_longest_that_should_fit(way: str, train: Any) -> None:
    fit = replace(FIT, way=way, train=train)
    longest = fit.longest(8192)
    assert fit.fits(longest)
    assert not fit.fits(longest + 8192)
    assert longest % 8192 == 0
    if way != "lowtide":
        assert longest < replace(FIT, train=train).longest(8192)


class Machine:
    """Runs what is at most ``most`` tokens long, as the children of a search would, and has a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int, seconds: float = 1.0) -> None:
        self.most, self.each, self.now, self.asked, self.left = most, seconds, 0.0, [], []
        self.status: int | None = None
        monkeypatch.setattr(longest, "run_child", self.child)
        monkeypatch.setattr(longest.time, "monotonic", lambda: self.now)

    def child(self, function: Any, way: str, settings: Any, T: int, *args: Any, env: Any) -> Any:
        assert function is longest_way.measure
        self.asked.append(T)
        self.left.append(args[-1])
        self.now += self.each
        if self.status is not None:
            return ChildResult(returncode=self.status, seconds=1.0, peak_bytes=0, stderr="a\nlast words\n")
        value: dict[str, Any] = {"failed": "out of memory", "out_of": "GPU memory"}
        if self.most >= T:
            value = {"seconds": 0.5, "tokens_per_s": T / 0.5, "peak_gib": 1.0, "host_gib": 1.0}
        return ChildResult(returncode=0, seconds=1.0, peak_bytes=0, value=value)


def look(config: LongestBenchConfig, fit: Fit = FIT) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    tries = longest.Tries(fit, {}, rows.append)
    return longest.search(tries, config, lambda text: None, longest.time.monotonic() + config.seconds), rows


@pytest.mark.parametrize("most", [100, 8192, 8193, 30000, 300_000, 376_832, 376_833, 393_000])
def test_the_search_finds_the_longest(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, most)
    found, rows = look(LongestBenchConfig(seconds=1e9))
    assert found["longest"] == most // 8192 * 8192
    assert found["shortest_failed"] - found["longest"] <= 8192 or found["longest"] == 0
    assert len(machine.asked) == len(set(machine.asked)) == len([row for row in rows if "not tried" not in str(row)])
    assert machine.asked[0] == found["predicted"] == FIT.longest(8192)
    assert len(machine.asked) < 16
    assert all(T % 8192 == 0 for T in machine.asked)


def test_what_the_host_has_no_room_for_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 10**9)
    found, rows = look(LongestBenchConfig(seconds=1e9), replace(FIT, way="liger-offload"))
    assert max(machine.asked) == found["longest"] < 10**6
    refused = [row for row in rows if "not tried" in row.get("failed", "")]
    assert refused
    assert all(row["out_of"] == "host memory" for row in refused)
    assert not {row["tokens"] for row in refused} & set(machine.asked)


def test_the_search_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 10**9, seconds=400.0)
    found, _ = look(LongestBenchConfig(seconds=1000.0, start=65536))
    assert machine.asked == [65536, 73728]
    assert found["longest"] == 73728
    assert "would take about 4" in found["ended"]
    machine.asked.clear()
    found, rows = look(LongestBenchConfig(seconds=10.0))
    assert (machine.asked, rows, found["longest"]) == ([], [], 0)


@pytest.mark.parametrize(
    ("status", "memory", "says"),
    [
        (-9, "host memory", "no memory left"),
        (OUT_OF_HOST, "host memory", "no memory left"),
        (OUT_OF_TIME, "time", "ended after"),
        (1, None, "status 1: last words"),
        (-11, None, "status -11"),
    ],
)
def test_a_process_that_ends_is_a_row(status: int, memory: str | None, says: str, monkeypatch: Any) -> None:
    machine = Machine(monkeypatch, 10**9)
    machine.status = status
    found, rows = look(LongestBenchConfig(seconds=1e6))
    assert rows[0].get("out_of") == memory
    assert says in rows[0]["failed"]
    assert found["longest"] == 0
    if memory != "host memory":  # what is no want of memory does not end with a shorter sequence
        assert len(rows) == 1
    assert [longest.LONGEST.failed(row) for row in rows] == [memory is None] * len(rows), "the exit status"


@pytest.mark.parametrize("each", [400.0, 1200.0])
def test_the_rate_takes_of_each_ways_time(each: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 10**9, seconds=each)
    config = LongestBenchConfig(
        model="lowtide-small", way=("lowtide", "stock"), tokens=24, start=64, step=16, seconds=1000.0, device="cpu",
        host="60GiB", output=str(tmp_path),
    )  # fmt: skip
    told = longest.LONGEST.run(config, lambda text: None).result
    if each == 400.0:
        assert machine.asked == [24, 64, 24, 64], "the third try would have ended too late"
        assert machine.left == [1000.0, 600.0, 1000.0, 600.0]
    else:
        assert (machine.asked, machine.left) == ([24, 24], [1000.0] * 2)
    assert all("that are left" in way["ended"] for way in told["ways"])
