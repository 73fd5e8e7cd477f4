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

from cli.results import result
from lowtide.bench import head, mlp, stats, step, sweep
from lowtide.bench.harness import Run
from lowtide.cli import _parser, bench, main
from lowtide.cli.parser import given
from lowtide.measure import plots

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

CONFIGS = {config.benchmark: config for config in bench.BENCHMARKS}
BENCHMARKS = {"head": head.HEAD, "sweep": sweep.SWEEP, "stats": stats.STATS, "mlp": mlp.MLP, "step": step.STEP}
QUICK = ["--warm", "0", "--reps", "1", "--device", "cpu"]
SMALL = {  # a run of one case
    "head": "--shape 32,8,64 --only lowtide naive --no-error",
    "sweep": "--shape 9,4,30 --tokens 9 18 --hidden none --vocab none --only lowtide naive --no-error",
    "stats": "--shape 32,8,64 --work logprob --only lowtide naive --no-error",
    "mlp": "--shape 1,8,4,6,1 --only lowtide-0 naive",
    "step": "--tokens 16 --model lowtide-small --peer stock --policy all",
}
MEASURED = {"name", "ms", "limit_ms", "peak_mib"}
IN_ROWS = {
    "head": MEASURED | {"share", "spread", "setting", "tokens"},
    "sweep": MEASURED | {"tflops"},
    "stats": MEASURED | {"share", "spread"},
    "mlp": MEASURED | {"gemms", "forward_ms", "backward_ms", "over", "kept_bytes", "again_gb"},
    "step": {"way", "tokens", "seconds", "spread", "tokens_per_s", "peak_gib", "losses", "attention"},
}


def rows_of(told: Any) -> list[dict[str, Any]]:
    """Return the rows of a result, wherever its benchmark has them: the dicts of lists called so."""
    if isinstance(told, list):
        return [row for each in told for row in rows_of(each)]
    if not isinstance(told, dict):
        return []
    own = [row for key in ("rows", "table") for row in told.get(key, ())]
    own = [row for row in own if "rows" not in row]
    return own + [row for key in ("shapes", "tables", "points") for row in rows_of(told.get(key))]


def run(kind: str, folder: Path, *more: str) -> int:
    return main(["bench", kind, *SMALL[kind].split(), *QUICK, "--output", str(folder), *more])


def parsed(command: str) -> Any:
    """Return the settings that a command line means, as its benchmark gets them."""
    arguments, unknown = _parser().parse_known_args(shlex.split(command)[1:])
    assert not unknown, unknown
    return arguments.config(**given(arguments, arguments.config))


@pytest.mark.parametrize("kind", CONFIGS)
def test_help_has_every_setting_and_examples_that_run(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parser().parse_args(["bench", kind, "--help"])
    out, config = capsys.readouterr().out, CONFIGS[kind]
    words = " ".join(out.split())
    for field in dataclasses.fields(config):
        flag = field.name.replace("_", "-")
        assert f"--no-{flag}" in words if field.default is True else f"--{flag}" in words
    assert "{" not in re.sub(r"\{[a-z0-9,]+\}", "", words), "a name that nothing stands for"
    assert "Exit status 1 where" in words
    _, _, examples = out.partition("examples:\n")
    commands = [line.strip() for line in examples.splitlines() if line.strip().startswith("lowtide bench")]
    assert len(commands) >= 3
    assert "--device cpu" in examples
    for command in commands:  # a config's own command means the same config
        asked = parsed(command)
        assert parsed(asked.command()) == dataclasses.replace(asked, output=".")


COMMON = {
    "--reps 0": "reps: expected a whole number of at least 1",
    f"--seed {2**32 - 1}": "seed: expected a whole number below",
    "--output=": "output: expected a name",
}
BAD = {
    "head": {
        **COMMON,
        "--shape nonsense": "shape: expected llama-1b",
        "--shape 1,2": "shape: expected",
        "--shape ²,2,3": "shape: expected",
        "--only nobody": "only: expected names out of lowtide",
        "--only naive --skip naive": "skip: expected at least one peer that is left",
        "--workspace-mib 4": "workspace_mib: expected --sweep beside it, got 4",
        "--sweep --workspace-mib nan": "workspace_mib: expected numbers above 0",
        "--tokens 1.5": "tokens: expected numbers",
        "--tokens -1": "tokens: expected whole numbers above 0",
        "--no-table": "table: expected --sweep, --settings or --tokens",
    },
    "sweep": {
        "--shape all": "shape: expected",
        "--tokens 0": "tokens: expected whole numbers above 0",
        "--tokens none --hidden none --vocab none": "tokens: expected one line that is not none",
    },
    "stats": {"--work nonsense": "work: expected names out of"},
    "mlp": {"--shape 1,2,3,4": "shape: expected published-1, "},
    "step": {
        "--model nonsense": "model: expected a folder with a config.json",
        "--tokens 1": "tokens: expected whole numbers above 1",
        "--peer nobody": "peer: expected names out of liger",
        "--policy some": "policy: expected all, attention",
        "--policy all@states=0": "policy: expected all, attention",
    },
}
ALONE = """
import contextlib, io, json, sys
from lowtide.cli import main
bad = json.load(sys.stdin)
for words in [["bench", "--help"], *(["bench", kind, "--help"] for kind in bad)]:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main(words)
for kind, arguments in bad.items():
    for words in arguments:
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            status = main(["bench", kind, *words.split()])
        assert status == 2 and said.getvalue().count("\\n") == 1, (kind, words, said.getvalue())
        assert said.getvalue().startswith(f"lowtide bench {kind}: {arguments[words]}"), (kind, words, said.getvalue())
heavy = {"torch", "transformers", "tokenizers", "accelerate", "triton"} & set(sys.modules)
assert not heavy, heavy
"""


def test_help_and_bad_arguments_load_no_torch_and_an_error_is_one_line() -> None:
    command = [sys.executable, "-W", "error", "-c", ALONE]
    ended = subprocess.run(command, input=json.dumps(BAD), capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("head --sweep --device cpu", "sweep: expected matplotlib"),
        ("sweep --device cpu", "sweep: expected matplotlib"),
        ("head --device cuda", "device: expected a GPU that PyTorch can use, got none"),
    ],
)
def test_what_cannot_run_here_is_one_line_and_writes_nothing(
    arguments: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if "matplotlib" in error:
        monkeypatch.setattr(plots.importlib.util, "find_spec", lambda _: None)
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"lowtide bench {arguments.split()[0]}: {error}")
    assert not list(tmp_path.iterdir())


def needs(kind: str) -> None:
    if kind == "step":
        pytest.importorskip("transformers")
    if kind == "sweep":
        pytest.importorskip("matplotlib")


@pytest.mark.usefixtures("forked_children")
@pytest.mark.parametrize("kind", CONFIGS)
def test_from_arguments_to_a_file(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needs(kind)
    assert run(kind, tmp_path) == 0
    told = result(tmp_path)
    (file,) = tmp_path.glob("*.json")
    stem = f"mlp-{told['dtype']}" if kind == "mlp" else kind
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d-{stem}-cpu", file.stem)
    assert {"command", "date", "commit", "machine"} <= set(told)
    assert parsed(told["command"]) == parsed(shlex.join(["lowtide", "bench", kind, *SMALL[kind].split(), *QUICK]))
    rows = rows_of(told)
    assert len(rows) == (4 if kind == "sweep" else 2)
    for row in rows:
        assert IN_ROWS[kind] <= set(row), row
        assert "failed" not in row
        assert "--no-error" not in SMALL[kind] or not [key for key in row if "error" in key]
    if kind == "step":
        assert rows[0]["losses"] == pytest.approx(rows[1]["losses"], rel=1e-4)
    if kind == "sweep":
        assert [point["N"] for point in told["points"]] == [9, 18]
        assert (tmp_path / f"{file.stem}-lines.png").stat().st_size > 20_000
    assert capsys.readouterr().out.endswith(f"written: {file}\n")
    benchmark = BENCHMARKS[kind]
    assert tuple(benchmark.peers) == tuple(CONFIGS[kind].known.get("peers", ()))
    assert {peer.package for peer in benchmark.peers.values()} - {""} <= set(told["machine"])


def broken(*_: object, **__: object) -> Any:
    raise RuntimeError("broken")


@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind != "step"])
def test_lowtides_own_failure_is_status_1_and_a_peers_is_not(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(kind)
    monkeypatch.setattr(sweep, "draw_sweep", lambda _, files: files.json)
    peers = BENCHMARKS[kind].peers
    for status, name in enumerate(("naive", next(iter(peers)))):
        with monkeypatch.context() as patched:
            patched.setitem(peers, name, dataclasses.replace(peers[name], build=broken))
            assert run(kind, tmp_path / name) == status
        reasons = [row.get("failed") for row in rows_of(result(tmp_path / name))]
        assert set(reasons) == {None, "RuntimeError: broken"}


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


def test_head_with_all_that_options_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    more = ["--sweep", "--workspace-mib", "0.05", "0.5", "--settings", "--tokens", "16", "32"]
    only = ["--only", "lowtide", "naive", "liger", "--dtype", "bfloat16"]
    assert main(["bench", "head", "--shape", "64,16,256", *only, *more, *QUICK, "--output", str(tmp_path)]) == 0
    (shape,) = result(tmp_path)["shapes"]
    lowtide, naive, liger = shape["table"]
    for row in (lowtide, naive):
        assert {"ms", "share", "peak_mib", "loss_error", "dx_error", "dw_error"} <= set(row)
    assert {"dx_floor", "dw_floor", "plan"} <= set(lowtide)
    assert liger["failed"] == "runs on GPUs only"
    assert [row["workspace_mib"] for row in shape["sweep"]] == [0.05, 0.5]
    assert {row["setting"] for row in shape["settings"]} == {setting.name for setting in head.SETTINGS}
    assert [row["tokens"] for row in shape["tokens"]] == [16, 16, 16, 32, 32, 32]
    assert [limit["tokens"] for limit in shape["limits"]] == [64] * (1 + len(head.SETTINGS)) + [16, 32]
    stem = next(tmp_path.glob("*.json")).stem
    assert [file.name for file in tmp_path.glob("*.png")] == [f"{stem}-64-16-256.png"]
    assert "of the floor" in capsys.readouterr().out


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
    if name == "experts":
        pytest.importorskip("transformers")
    monkeypatch.setattr(torch, "compile", broken)
    module = importlib.import_module(name)
    arguments = [name, *arguments.split(), *QUICK, "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    config = next(value for key, value in vars(module).items() if key.lower() == f"{name}config")
    assert module.main(getattr(module, name.upper()), config, module.__doc__) == 0
    rows = rows_of(result(tmp_path))
    assert {row.get("name", row.get("peer")) for row in rows if "ms" in row} == measured
    for row in rows:
        errors = [value for key, value in row.items() if key.endswith("error")] + list(row.get("errors", {}).values())
        assert max(errors, default=0) < 1e-4, row
