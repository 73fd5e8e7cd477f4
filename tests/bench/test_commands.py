"""Every ``lowtide bench`` and script: its help, its errors, a small run from arguments to a file, its exit status."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.bench import head, mlp, stats, step, sweep
from lowtide.bench.harness import CannotError, Run
from lowtide.cli import _parser, bench, main
from lowtide.cli.parser import given
from lowtide.measure import plots
from lowtide.measure.child import ChildResult
from promises import promise

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

pytestmark = promise("commands")
CONFIGS = {config.benchmark: config for config in bench.BENCHMARKS}
BENCHMARKS = {"head": head.HEAD, "sweep": sweep.SWEEP, "stats": stats.STATS, "mlp": mlp.MLP, "step": step.STEP}
QUICK = ["--warm", "0", "--reps", "1", "--device", "cpu"]
SMALL = {  # a run of one case
    "head": "--shape 32,8,64 --only lowtide naive --no-error",
    "sweep": "--shape 9,4,30 --tokens 9 18 --hidden none --vocab none --only lowtide naive --no-error",
    "stats": "--shape 32,8,64 --work logprob --only lowtide naive --no-error",
    "mlp": "--shape 1,8,4,6,1 --only lowtide-0 naive",
    "step": "--tokens 16 --model lowtide-small --layers 1 --peer stock --policy all",
}
MEASURED = {"name", "ms", "limit_ms", "peak_mib"}
IN_ROWS = {
    "head": MEASURED | {"share", "spread", "setting", "tokens"},
    "sweep": MEASURED | {"tflops"},
    "stats": MEASURED | {"share", "spread"},
    "mlp": MEASURED | {"gemms", "forward_ms", "backward_ms", "over", "kept_bytes", "again_gb"},
    "step": {"way", "tokens", "seconds", "spread", "tokens_per_s", "peak_gib", "losses", "attention"},
}


def rows_of(found: Any) -> list[dict[str, Any]]:
    """Return the rows of a result, wherever its benchmark has them: the dicts of lists called so."""
    if isinstance(found, list):
        return [row for each in found for row in rows_of(each)]
    if not isinstance(found, dict):
        return []
    rows = [row for key in ("rows", "table", "sweep") for row in found.get(key, ())]
    return rows + [row for key in ("shapes", "tables", "points") for row in rows_of(found.get(key))]


def result(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("*.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def run(kind: str, folder: Path, *more: str) -> int:
    return main(["bench", kind, *SMALL[kind].split(), *QUICK, "--output", str(folder), *more])


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would have a process of its own runs here, at a commit of that name."""

    def here(function: Any, *args: Any, **_: Any) -> ChildResult:
        value = function(*json.loads(json.dumps(args)))
        return ChildResult(returncode=0, value=json.loads(json.dumps(value)))

    monkeypatch.setattr(step, "run_child", here)
    monkeypatch.setenv("COMMIT", "abc")  # else git looks through all files, each time


@pytest.mark.parametrize("kind", CONFIGS)
def test_help_has_every_setting_and_examples_that_parse(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parser().parse_args(["bench", kind, "--help"])
    out, config = capsys.readouterr().out, CONFIGS[kind]
    words = " ".join(out.split())
    for field in dataclasses.fields(config):
        flag = field.name.replace("_", "-")
        assert f"--no-{flag}" in words if field.default is True else f"--{flag}" in words
    assert "{" not in re.sub(r"\{[a-z0-9,]+\}", "", words), "a name that nothing stands for"
    assert "Exit status 1 where" in words
    commands = re.findall(r"^  (lowtide bench .*)$", out.partition("examples:\n")[2], re.MULTILINE)
    assert len(commands) >= 3
    assert any("--device cpu" in command for command in commands)
    for command in commands:
        arguments = _parser().parse_args(shlex.split(command)[1:])
        assert arguments.config(**given(arguments, arguments.config))


BAD = {
    "head": {
        "--reps 0": "reps: expected a whole number of at least 1",
        "--shape nonsense": "shape: expected llama-1b",
        "--shape ²,2,3": "shape: expected",
        "--only nobody": "only: expected names out of lowtide",
        "--only naive --skip naive": "skip: expected at least one peer that is left",
        "--workspace-mib 4": "workspace_mib: expected --sweep beside it, got 4",
        "--sweep --workspace-mib nan": "workspace_mib: expected at least 0.001",
    },
    "sweep": {
        "--shape all": "shape: expected",
        "--tokens 1.5": "tokens: expected whole numbers above 0, or none",
        "--tokens none --hidden none --vocab none": "tokens: expected one line that is not none",
    },
    "stats": {"--work nonsense": "work: expected names out of"},
    "mlp": {"--shape 1,2,3,4": "shape: expected llama-8b-8k, "},
    "step": {
        "--model nonsense": "model: expected a folder with a config.json",
        "--tokens 1": "tokens: expected a whole number of at least 2",
        "--peer nobody": "peer: expected names out of liger",
        "--policy some": "policy: expected all, attention",
    },
}
ALONE = """
import contextlib, io, json, sys
from lowtide.cli import main
for kind, arguments in json.load(sys.stdin).items():
    for words, message in arguments.items():
        text = io.StringIO()
        with contextlib.redirect_stderr(text):
            status = main(["bench", kind, *words.split()])
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
        ("head --sweep --device cpu", "sweep: expected matplotlib"),
        ("sweep --device cpu", "sweep: expected matplotlib"),
        ("head --device cuda", "device: expected a GPU that PyTorch can use, got none"),
        ("step --model t5.json --device cpu", "model: expected a causal language model, got a t5."),
    ],
)
def test_what_cannot_run_here_is_one_line_and_writes_nothing(
    arguments: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t5.json").write_text(json.dumps({"model_type": "t5", "d_model": 16}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if "matplotlib" in error:
        monkeypatch.setattr(plots.importlib.util, "find_spec", lambda _: None)
    assert main(["bench", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"lowtide bench {arguments.split()[0]}: {error}")
    assert [file.name for file in tmp_path.iterdir()] == ["t5.json"]


@pytest.mark.parametrize("kind", CONFIGS)
def test_from_arguments_to_a_file(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if kind == "sweep":
        pytest.importorskip("matplotlib")
    assert run(kind, tmp_path) == 0
    found = result(tmp_path)
    (file,) = tmp_path.glob("*.json")
    stem = f"mlp-{found['dtype']}" if kind == "mlp" else kind
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d-{stem}-cpu", file.stem)
    assert {"command", "date", "commit", "machine"} <= set(found)
    assert found["command"] == shlex.join(["lowtide", "bench", kind, *SMALL[kind].split(), *QUICK])
    rows = rows_of(found)
    assert len(rows) == (4 if kind == "sweep" else 2)
    for row in rows:
        assert IN_ROWS[kind] <= set(row), row
        assert "failed" not in row
        assert "--no-error" not in SMALL[kind] or not [key for key in row if "error" in key]
    if kind == "step":
        assert rows[0]["losses"] == pytest.approx(rows[1]["losses"], rel=1e-4)
    if kind == "sweep":
        assert [point["N"] for point in found["points"]] == [9, 18]
        assert rows[0]["tflops"] == pytest.approx(6 * 9 * 4 * 30 / rows[0]["ms"] / 1e9)
        assert (tmp_path / f"{file.stem}-lines.png").stat().st_size > 20_000
    assert capsys.readouterr().out.endswith(f"written: {file}\n")
    benchmark = BENCHMARKS[kind]
    assert set(benchmark.peers) == set(CONFIGS[kind].known.get("peers", ()))
    assert {peer.package for peer in benchmark.peers.values()} - {""} <= set(found["machine"])


def broken(*_: object, **__: object) -> Any:
    raise RuntimeError("broken")


def unsupported(*_: object, **__: object) -> Any:
    raise CannotError("not here")


@pytest.mark.parametrize(
    ("kind", "name", "build", "status"),
    [
        ("head", "naive", broken, 0),
        ("head", "lowtide", broken, 1),
        ("head", "lowtide", unsupported, 0),
        ("stats", "lowtide", broken, 1),
        ("mlp", "lowtide-0", broken, 1),
    ],
)
def test_lowtides_own_failure_is_status_1_and_a_peers_is_not(
    kind: str, name: str, build: Any, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = BENCHMARKS[kind].peers
    monkeypatch.setitem(peers, name, dataclasses.replace(peers[name], build=build))
    assert run(kind, tmp_path) == status
    reasons = [row.get("failed", row.get("cannot")) for row in rows_of(result(tmp_path))]
    assert set(reasons) == {None, "not here" if build is unsupported else "RuntimeError: broken"}


def test_what_is_known_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second row does not come: Ctrl-C."""
    add, rows = Run.add, []

    def interrupted(self: Any, row: Any, *where: Any) -> None:
        rows.append(row)
        if len(rows) == 2:
            raise KeyboardInterrupt
        add(self, row, *where)

    monkeypatch.setattr(Run, "add", interrupted)
    assert run("head", tmp_path) == 130
    assert len(rows_of(result(tmp_path))) == 1


def test_heads_sweep_of_memory_and_errors(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    more = ["--sweep", "--workspace-mib", "0.05", "0.5", "--only", "lowtide", "naive", "liger"]
    assert main(["bench", "head", "--shape", "64,16,256", *more, *QUICK, "--output", str(tmp_path)]) == 0
    (shape,) = result(tmp_path)["shapes"]
    lowtide, naive, liger = shape["table"]
    for row in (lowtide, naive):
        assert max(row[f"{name}_error"] for name in ("loss", "dx", "dw")) < 1e-5
    assert lowtide["plan"]["chunks"] >= 1
    assert liger["failed"] == "runs on GPUs only"
    assert [row["workspace_mib"] for row in shape["sweep"]] == [0.05, 0.5]
    assert shape["limits"][0]["tokens"] == 64
    stem = next(tmp_path.glob("*.json")).stem
    assert [file.name for file in tmp_path.glob("*.png")] == [f"{stem}-64-16-256.png"]


SCRIPTS = {
    "apply": ("--shape 32,8,64 --only focal", {"naive", "two chunks", "default", "default, per token"}),
    "contrastive": ("--shape 32,8,64 --work masked --only lowtide naive", {"lowtide", "naive"}),
    "divergence": ("--shape 32,8,64,12 --only lowtide naive", {"lowtide", "naive"}),
    "experts": ("--shape 8,4,6,3,2 --only lowtide-0 eager", {"lowtide-0", "eager"}),
    "layers": ("--tokens 64 --hidden 32 --heads 2 --kv-heads 1 --head-dim 8", {"lowtide", "eager", "F.rms_norm"}),
}


@pytest.mark.filterwarnings("ignore")  # of torch.compile
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_writes_its_rows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, measured = SCRIPTS[name]
    monkeypatch.setattr(torch, "compile", broken)
    module = importlib.import_module(name)
    monkeypatch.setattr(sys, "argv", [name, *arguments.split(), *QUICK, "--output", str(tmp_path)])
    config = next(value for key, value in vars(module).items() if key.lower() == f"{name}config")
    script = importlib.import_module("script")
    assert script.main(getattr(module, name.upper()), config, module.__doc__) == 0
    rows = rows_of(result(tmp_path))
    assert {row.get("name", row.get("peer")) for row in rows if "ms" in row} == measured
    for row in rows:
        errors = [value for key, value in row.items() if key.endswith("error")] + list(row.get("errors", {}).values())
        assert max(errors, default=0) < 1e-4, row
