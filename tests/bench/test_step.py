"""``lowtide bench step`` from arguments to files, on a CPU and small."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from lowtide.bench import step, ways
from lowtide.bench.harness import OUT_OF_MEMORY
from lowtide.bench.train_config import StepBenchConfig
from lowtide.bench.way import Way
from lowtide.cli import main
from lowtide.errors import ArgumentValueError
from lowtide.measure import child
from lowtide.measure.child import ChildResult
from lowtide.memory import ActivationPolicy
from lowtide.memory.policy import layer_policies, mixture_of, parse_policies, split_states, words_of
from lowtide.train.shapes import SHAPES

KEEP_ALL = ActivationPolicy()


def result(folder: Path, name: str) -> dict[str, Any]:
    (file,) = folder.glob(f"*-{name}-cpu.json")
    return json.loads(file.read_text())


def config_of(*lengths: int, model: str = "lowtide-small", **more: Any) -> StepBenchConfig:
    tokens = tuple(map(str, lengths))
    return StepBenchConfig(tokens=tokens, model=model, warm=0, reps=1, dtype="float32", device="cpu", **more)


OFFLOADED = ActivationPolicy(keep="input", mlp_level=1, mlp_tile_tokens=64, offload=True)


@pytest.mark.parametrize(
    ("text", "policies"),
    [
        ("all", KEEP_ALL),
        ("all-mlp1", ActivationPolicy(mlp_level=1)),
        ("attention-mlp0-offload", ActivationPolicy(keep="attention", mlp_level=0, offload=True)),
        ("2xall+1xinput", [KEEP_ALL, KEEP_ALL, ActivationPolicy(keep="input")]),
        ("3xinput", [ActivationPolicy(keep="input")] * 3),
        ("2 x all/0, 1 x input/1 by 64 offloaded", [ActivationPolicy(mlp_level=0)] * 2 + [OFFLOADED]),
        ("1 x input/1 by 4096 offloaded, 2 x all", [replace(OFFLOADED, mlp_tile_tokens=4096), KEEP_ALL, KEEP_ALL]),
        ("2xall/0+1 x input-mlp1-tile64-offload", [ActivationPolicy(mlp_level=0)] * 2 + [OFFLOADED]),
    ],
)
def test_policies_as_words(text: str, policies: object) -> None:
    assert parse_policies(text, 3) == policies
    mixture = mixture_of(policies if isinstance(policies, list) else [policies] * 3)
    assert layer_policies(words_of(mixture), 3) == [policy for policy, n in mixture for _ in range(n)]


@pytest.mark.parametrize(
    "text",
    ["", "some", "all-mlp2", "all+input", "2xall+input", "all-offload", "2xall", "0xall", "input/1 by 0", "input/2"],
)
def test_what_is_no_policy(text: str) -> None:
    with pytest.raises(ArgumentValueError):
        parse_policies(text, 3)


@pytest.mark.parametrize(
    ("text", "policy", "states"),
    [
        ("all", "all", None),
        ("2xall+1xinput-offload@states", "2xall+1xinput-offload", {"gib": None, "late": False}),
        ("all@states=2.5", "all", {"gib": 2.5, "late": False}),
        ("input@states=4-late", "input", {"gib": 4.0, "late": True}),
        ("input@states-late", "input", {"gib": None, "late": True}),
    ],
)
def test_states_behind_a_policy(text: str, policy: str, states: object) -> None:
    assert split_states(text) == (policy, states)
    assert f"lowtide:{text}" in StepBenchConfig(policy=(text,)).ways


def test_states_are_offloaded_where_a_way_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(step, "offload_optimizer", lambda optimizer, model, **how: seen.append(how))
    for way in ("lowtide:all@states=2-late", "lowtide:all"):
        (row,) = step.rows_of(way, config_of(16))
        assert row["seconds"] > 0
    assert seen == [{"gib": 2.0, "late": True}]
    monkeypatch.undo()
    (row,) = step.rows_of("lowtide:all@states", config_of(16))
    assert "parameters on a CUDA device" in row["failed"]


@pytest.mark.usefixtures("forked_children")
def test_a_step_by_each_way_is_the_same_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--tokens 48 32 --peer stock --policy all 1xattention-mlp1+1xinput --model lowtide-small"
    command = ["bench", "step", *arguments.split(), "--warm", "1", "--reps", "1", "--output", str(tmp_path)]
    assert main([*command, "--device", "cpu"]) == 0
    told = result(tmp_path, "step")
    assert told["command"] == f"lowtide bench step {arguments} --warm 1 --reps 1 --device cpu"
    rows = {(row["way"], row["tokens"]): row for row in told["rows"]}
    ways = ("stock", "lowtide:all", "lowtide:1xattention-mlp1+1xinput")
    assert list(rows) == [(way, tokens) for way in ways for tokens in (32, 48)]
    for (way, tokens), row in rows.items():
        assert "failed" not in row, way
        assert row["losses"] == pytest.approx(rows["stock", tokens]["losses"], rel=1e-4)
        assert row["losses"][0] > row["losses"][1]
        assert row["seconds"] > 0
        assert row["peak_gib"] > 0
        assert row["attention"] == "sdpa"
    assert "1.000" in capsys.readouterr().out


def test_what_was_measured_before_an_end_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed, and one that is interrupted, had measured the first length."""
    command = "bench step --model lowtide-small --tokens 16 24 --peer none --policy all --device cpu --output"

    def child(*args: Any, **_: Any) -> Any:
        Path(args[-1]).write_text(json.dumps({"tokens": 16, "failed": "measured"}) + "\n")
        if ends == "interrupted":
            raise KeyboardInterrupt
        return ChildResult(returncode=-9, seconds=1.0, peak_bytes=0)

    monkeypatch.setattr(step, "run_child", child)
    ends = "killed"
    assert main([*command.split(), str(tmp_path / ends)]) == 1
    rows = result(tmp_path / ends, "step")["rows"]
    assert [row["failed"] for row in rows] == ["measured", "the process ended with status -9"]
    ends = "interrupted"
    assert main([*command.split(), str(tmp_path / ends)]) == 130
    assert [row["failed"] for row in result(tmp_path / ends, "step")["rows"]] == ["measured"]


@pytest.mark.parametrize(
    "error", [torch.cuda.OutOfMemoryError("no"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_memory_that_does_not_suffice_ends_a_way(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows"
    seen: list[str] = []

    def steps(model: Any, optimizer: Any, config: Any, tokens: int, *args: Any, **rounds: int) -> dict[str, Any]:
        seen.append(file.read_text() if file.exists() else "")
        if tokens > 10:
            raise error
        return {"seconds": 1.0}

    monkeypatch.setattr(step, "steps", steps)
    step.measure_way("stock", json.loads(json.dumps(vars(config_of(10, 20, 30)))), str(file))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert seen == ["", json.dumps(rows[0]) + "\n"], "rows are written as they come"
    failed = {"failed": OUT_OF_MEMORY}
    assert rows == [{"tokens": 10, "seconds": 1.0}, {"tokens": 20, **failed}, {"tokens": 30, **failed}]


@pytest.mark.parametrize(
    ("environment", "setting"),
    [
        ({}, ""),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native", "PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"},
         "backend:cudaMallocAsync"),
    ],
)  # fmt: skip
def test_a_row_says_what_the_allocator_held_and_how_it_was_set(
    environment: dict[str, str], setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 5 * 2**30)
    told = step._memory(torch.device("cuda"))
    assert told == {"peak_gib": 3.0, "reserved_gib": 5.0, "allocator": setting}
    assert step._memory(torch.device("cpu")).keys() == {"peak_gib"}
    own = {} if setting else {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert child._for_children() == own, "whoever has set it is asked no more"


def test_a_model_without_fused_attention_takes_its_own_and_says_so(tmp_path: Path) -> None:
    """Gemma 2 caps its scores, which PyTorch's fused attention cannot."""
    shape = {**SHAPES["lowtide-small"], "model_type": "gemma2", "vocab_size": 99, "head_dim": 32}
    file = tmp_path / "gemma2.json"
    file.write_text(json.dumps(shape))
    (row,) = step.rows_of("lowtide:all", config_of(16, model=str(file)))
    assert row["attention"] == "eager"
    (row,) = step.rows_of("stock", config_of(16, model=str(file), sdpa="flash"))
    assert "sdpa: expected auto for attention by eager, got flash" in row["failed"]


def test_peers_keep_what_their_names_say(monkeypatch: pytest.MonkeyPatch) -> None:
    enabled = []
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):  # by version
        monkeypatch.setattr(
            f"transformers.PreTrainedModel.{name}", lambda self, kwargs: enabled.append(kwargs), raising=False
        )
    for way in ("stock", "stock-attention", "stock-all"):
        ways.build_way(Way.named(way), "lowtide-small", torch.float32, torch.device("cpu"), seed=0)
    assert [kwargs.keys() for kwargs in enabled] == [{"use_reentrant"}, {"use_reentrant", "context_fn"}]


@pytest.mark.parametrize("way", ["compile", "compile-all"])
def test_compile_is_the_stock_model_with_compiled_layers(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda function, **kwargs: compiled.append(kwargs) or function)
    model = ways.build_way(Way.named(way), "lowtide-small", torch.float32, torch.device("cpu"), seed=0)
    assert compiled == [{"dynamic": False}] * (len(model.model.layers) + 1)  # and the loss
    assert type(model).__name__ == "LlamaForCausalLM"


def test_compiled_layers_come_after_each_policy() -> None:
    config = StepBenchConfig(peer=("stock",), policy=("all", "input"), compile_layers=True)
    ours = ("lowtide:all", "lowtide:input", "lowtide-compile:all", "lowtide-compile:input")
    assert config.ways == ("stock", *ours)
    assert [Way.named(name).compiles_layers for name in config.ways] == [False, False, False, True, True]


@pytest.mark.filterwarnings("ignore")  # of torch.compile
def test_lowtide_compiles_each_policys_layers_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More layers than dynamo would recompile for; the loss and gradients are those of layers that are not compiled."""
    counted, compile_module = CompileCounterWithBackend("aot_eager"), torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda layer, **kw: compile_module(layer, backend=counted, fullgraph=True, **kw)
    )
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**SHAPES["lowtide-small"], "vocab_size": 50, "num_hidden_layers": 12}))
    got = []
    for name in ("lowtide", "lowtide-compile"):
        way = Way(impl=name, policy="5xattention/0+7xall/1")
        model = ways.build_way(way, str(file), torch.float32, torch.device("cpu"), seed=0)
        ids = torch.arange(40)[None]
        for _ in range(2):
            model.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        got.append({"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}})
    torch.testing.assert_close(*got)
    assert counted.frame_count == 2


@pytest.mark.filterwarnings("ignore")  # of torch.compile
@pytest.mark.slow
def test_a_compiled_step_is_the_same_step(tmp_path: Path) -> None:
    arguments = "--tokens 16 --peer stock compile compile-all --policy all --model lowtide-small --warm 1 --reps 1"
    assert main(["bench", "step", *arguments.split(), "--output", str(tmp_path), "--device", "cpu"]) == 0
    rows = result(tmp_path, "step")["rows"]
    assert [row["way"] for row in rows] == ["stock", "compile", "compile-all", "lowtide:all"]
    for row in rows:
        assert row["losses"] == pytest.approx(rows[0]["losses"], rel=1e-4), row
