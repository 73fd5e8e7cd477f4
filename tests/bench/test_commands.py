"""Every ``lowtide bench`` and script: its help, its errors, a small run from arguments to a file, its exit status."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.bench import head, mlp, stats, step, sweep
from lowtide.bench.config import BENCHMARKS
from lowtide.bench.harness import Run
from lowtide.bench.variant import Variant
from lowtide.cli import _parser, main
from lowtide.errors import UnsupportedError
from lowtide.memory.policy import parse_policies, split_states
from lowtide.train.shapes import SHAPES
from promises import promise

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

pytestmark = promise("commands")
CONFIGS = {config.benchmark: config for config in BENCHMARKS}
MODULES: dict[str, Any] = {"head": head, "sweep": sweep, "stats": stats, "mlp": mlp, "step": step}
PEERS: dict[str, Any] = {kind: module.PEERS for kind, module in MODULES.items()}
QUICK = ["--warm", "0", "--reps", "1", "--device", "cpu"]
SIZES = {  # small ones, in the place of an example's
    "head": "--shape 32,8,64",
    "sweep": "--shape 9,4,64",
    "stats": "--shape 32,8,64",
    "mlp": "--shape 1,8,4,6",
    "step": "--tokens 16 --model small.json",
}
MEASURED = {"name", "ms", "limit_ms", "share", "spread", "tflops", "forward_ms", "kept_mib", "peak_mib"}
IN_ROWS = {
    "head": MEASURED | {"loss_error", "dx_error", "dw_error"},
    "sweep": MEASURED | {"loss_error", "dx_error", "dw_error"},
    "stats": MEASURED | {"logprob_error"},
    "mlp": MEASURED | {"gemms"},
    "step": {"way", "tokens", "seconds", "spread", "tokens_per_s", "peak_gib", "losses"},
}


def rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a result, of all its tables if it has several."""
    rows: list[dict[str, Any]] = found.get("rows", []) + [
        row for table in found.get("tables", ()) for row in table["rows"]
    ]
    return rows


def result(folder: Path, last: int = 1) -> dict[str, Any]:
    """Return the result of a run, which has the number of the runs before it on the same day in its name."""
    (file,) = folder.glob("*-cpu.json" if last == 1 else f"*-cpu-{last}.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def run(kind: str, *more: str) -> int:
    return main(["bench", kind, *more, *SIZES[kind].split(), *QUICK])


def examples(kind: str, capsys: pytest.CaptureFixture[str]) -> tuple[str, list[str]]:
    """Return a help in words, and its examples."""
    with pytest.raises(SystemExit):
        _parser().parse_args(["bench", kind, "--help"])
    out = capsys.readouterr().out
    return " ".join(out.split()), re.findall(r"^  (lowtide bench .*)$", out.partition("examples:\n")[2], re.MULTILINE)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What would have a process of its own runs here, in an empty folder; COMMIT is set, and sweeps are short."""

    def here(function: Any, *args: Any, **_: Any) -> Any:
        return json.loads(json.dumps(function(*json.loads(json.dumps(args)))))

    for module in (step, *map(importlib.import_module, ("host_time", "cpu_loss"))):
        monkeypatch.setattr(module, "run_child", here)
    monkeypatch.setattr("lowtide.bench.config.AROUND", (1 / 8, 2))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # slow, as is collecting garbage
    monkeypatch.setattr(gc, "collect", lambda: 0)
    monkeypatch.setenv("COMMIT", "abc")  # else git looks through all files, each time
    monkeypatch.chdir(tmp_path)
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 99, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    Path("small.json").write_text(json.dumps({**SHAPES["llama-3.2-1b"], **small, **heads}))


def planned_row(way: str, *_: object) -> dict[str, Any]:
    """Return a row as of steps, where the variant's policy is for as many layers as the model has."""
    policy, _states = split_states(way)
    parse_policies(Variant.named(policy).policy, 16)
    return {"seconds": 1.0, "losses": [1.0]}


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_example_of_a_help_runs_from_arguments_to_a_file(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU and at a small size, of some peers; Liger, which some name, does not run there."""
    words, commands = examples(kind, capsys)
    for field in dataclasses.fields(CONFIGS[kind]):
        assert f"--{field.name.replace('_', '-')}" in words
    assert "Exit status 1 where" in words
    assert len(commands) >= 3
    assert sum("--device cpu" in command for command in commands) == 1
    names = next((f.metadata["names"] for f in dataclasses.fields(CONFIGS[kind]) if f.name == "only"), ())
    assert tuple(PEERS[kind]) == tuple(names)
    some = {"lowtide", "lowtide-0", "lowtide-1-tiled", "liger", "naive"}
    monkeypatch.setattr(MODULES[kind], "PEERS", {k: v for k, v in PEERS[kind].items() if k in some})
    row_of_step = step.row_of
    for number, command in enumerate(commands, 1):
        if not (whole := "--device cpu" in command):  # a step of each would take a quarter of a minute
            monkeypatch.setattr(step, "row_of", planned_row)
        given = shlex.split(command)[2:]
        assert run(*given) == 0, command
        monkeypatch.setattr(step, "row_of", row_of_step)
        found, out = result(tmp_path, number), capsys.readouterr().out
        assert found["command"] == shlex.join(["lowtide", "bench", *given, *SIZES[kind].split(), *QUICK])
        assert re.search(rf"written: \d{{4}}-\d\d-\d\d-{kind}-cpu(-\d)?\.json$", out.strip())
        if whole or kind != "step":
            rows = [row for row in rows_of(found) if row.get("name") != "liger"]
            assert all(IN_ROWS[kind] <= set(row) and "failed" not in row for row in rows), rows
            assert rows
    assert {"command", "date", "commit", "machine"} <= set(found)
    assert {peer.package for peer in MODULES[kind].PEERS.values()} - {""} <= set(found["machine"])
    if kind == "step":
        assert rows[0]["losses"] == pytest.approx(rows[1]["losses"], rel=1e-4)
    if kind == "sweep":
        assert [point["N"] for point in found["tables"]] == [9, 1, 18, 9, 9, 9]
        assert rows[0]["tflops"] == pytest.approx(6 * 9 * 4 * 64 / rows[0]["ms"] / 1e9)


BAD = {
    "head": {
        "--reps 0": "--reps: expected a whole number of at least 1",
        "--shape nonsense": "--shape: expected llama-1b",
        "--shape ²,2,3": "--shape: expected",
        "--shape 1,0,3": "--shape: expected",
        "--only nobody": "argument --only: invalid choice: 'nobody'",
    },
    "sweep": {
        "--shape all": "--shape: expected one shape",
    },
    "stats": {"--work nonsense": "argument --work: invalid choice"},
    "mlp": {"--shape 1,2,3": "--shape: expected llama-8b-32k, "},
    "step": {
        "--model nonsense": "--model: expected a folder with a config.json",
        "--tokens 1": "--tokens: expected a whole number of at least 2",
        "--peer nobody": "impl: expected names out of stock, compile",
        "--policy some": "--policy: expected all, attention",
    },
}
ALONE = """
import contextlib, io, json, sys
from lowtide.cli import main
for kind, arguments in json.load(sys.stdin).items():
    for words, message in arguments.items():
        text, status = io.StringIO(), None
        with contextlib.redirect_stderr(text):
            try:
                status = main(["bench", kind, *words.split()])
            except SystemExit as ended:
                status = ended.code
        assert (status, text.getvalue().count("\\n")) == (2, 1), (kind, words, text.getvalue())
        assert text.getvalue().startswith(f"lowtide bench {kind}: {message}"), (kind, words, text.getvalue())
heavy = {"torch", "transformers", "tokenizers", "accelerate", "triton"} & set(sys.modules)
assert not heavy, heavy
"""


@promise("errors", "commands")
def test_bad_arguments_load_no_torch_and_an_error_is_one_line() -> None:
    command = [sys.executable, "-W", "error", "-c", ALONE]
    ended = subprocess.run(command, input=json.dumps(BAD), capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("head --device cuda", "--device: expected a GPU that PyTorch can use, got none"),
        ("step --model t5.json --device cpu", "--model: expected a causal language model, got a t5."),
        ("head --device cpu --output t5.json", "--output: expected a folder that can be written, got t5.json"),
    ],
)
def test_what_cannot_run_here_is_one_line_and_writes_nothing(
    arguments: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("t5.json").write_text(json.dumps({"model_type": "t5", "d_model": 16}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"lowtide bench {arguments.split()[0]}: {error}")
    assert {file.name for file in tmp_path.iterdir()} == {"t5.json", "small.json"}


def broken(*_: object, **__: object) -> Any:
    raise RuntimeError("broken")


def unsupported(*_: object, **__: object) -> Any:
    raise UnsupportedError("not here")


def missing(*_: object, **__: object) -> Any:
    raise ModuleNotFoundError("No module named 'peer'")


@pytest.mark.parametrize(
    ("kind", "name", "build", "named", "status"),
    [
        ("head", "naive", broken, True, 0),
        ("head", "lowtide", broken, True, 1),
        ("head", "lowtide", unsupported, True, 0),
        ("head", "lowtide", missing, False, 1),
        ("head", "trl", missing, True, 1),
        ("head", "trl", missing, False, 0),
        ("stats", "lowtide", broken, True, 1),
        ("mlp", "lowtide-0", broken, True, 1),
    ],
)
def test_status_1_is_of_lowtides_own_failure_and_of_a_named_peer_that_is_not_there(
    kind: str, name: str, build: Any, named: bool, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = {key: PEERS[kind][key] for key in ("naive", name)}
    monkeypatch.setattr(MODULES[kind], "PEERS", peers | {name: dataclasses.replace(peers[name], build=build)})
    assert run(kind, *(["--only", name] if named else [])) == status
    reasons = [row.get("failed") for row in rows_of(result(tmp_path)) if row["name"] == name]
    hint = ". pip install trl" if name == "trl" else ""
    texts = {missing: f"cannot be imported: No module named 'peer'{hint}", unsupported: "not here"}
    assert set(reasons) == {texts.get(build, "RuntimeError: broken")}


def test_what_is_known_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second row does not come: Ctrl-C."""
    add, rows = Run.add, []

    def interrupted(self: Any, row: Any, *where: Any) -> None:
        rows.append(row)
        if len(rows) == 2:
            raise KeyboardInterrupt
        add(self, row, *where)

    monkeypatch.setattr(Run, "add", interrupted)
    assert run("head", "--only", "lowtide", "naive") == 130
    assert len(rows_of(result(tmp_path))) == 1


SCRIPTS = {
    "apply": ("--shape 32,8,64 --function focal", {"naive", "lowtide, two chunks", "lowtide, per token"}),
    "contrastive": ("--shape 32,8,64 --work masked --only lowtide naive", {"lowtide", "naive"}),
    "cpu_loss": ("--shape 32,8,64 --threads 1 --policy PASSIVE", set()),
    "divergence": ("--shape 32,8,64,12 --only lowtide naive", {"lowtide", "naive"}),
    "experts": ("--shape 8,4,6,3,2 --only lowtide-0 eager", {"lowtide-0", "eager"}),
    "host_time": ("--way stock lowtide --processes 1 --steps 1 --tokens 8 --model lowtide-small", {"stock", "lowtide"}),
    "layers": ("--tokens 64 --hidden 32 --heads 2 --kv-heads 1 --head-dim 8", {"lowtide", "eager", "F.rms_norm"}),
    "workspace": ("--shape 64,16,256 --only lowtide naive liger", {"lowtide", "naive"}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # of torch.compile
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "workspace")) for name in SCRIPTS]
)
def test_a_script_writes_its_rows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, measured = SCRIPTS[name]
    module = importlib.import_module(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments.split(), *QUICK, "--output", str(tmp_path)])
    config = next(value for key, value in vars(module).items() if key.endswith("Config"))
    script = importlib.import_module("script")
    peers = {} if name in ("apply", "cpu_loss", "host_time", "layers") else getattr(module, "PEERS", head.PEERS)
    assert script.main(module.measure, config, module.__doc__, peers) == 0
    found = result(tmp_path)
    rows = rows_of(found)
    assert {row.get("name", row.get("peer")) for row in rows if "ms" in row} >= measured
    for row in rows:
        assert max((value for key, value in row.items() if key.endswith("error")), default=0) < 1e-4, row
    plots = find_spec("matplotlib")
    if name == "workspace":
        assert len(found["tables"]) == 1
        others, workspaces = ([row for row in rows if ("workspace_mib" in row) == of] for of in (False, True))
        assert others[-1]["failed"] == "runs on GPUs only" or torch.cuda.is_available()
        assert others[0]["plan"]["chunks"] >= 1
        assert [row["workspace_mib"] for row in workspaces] == sorted({row["workspace_mib"] for row in workspaces})
        assert not plots or [file.stat().st_size > 20_000 for file in tmp_path.glob("*-64-16-256.png")] == [True]
