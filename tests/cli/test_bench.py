"""What every ``lowtide bench`` promises: its help, its errors, a small run from arguments to files, its exit status."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.results import result
from lowtide.bench.config import HEAD_PEERS, SweepBenchConfig
from lowtide.bench.harness import Run
from lowtide.bench.settings import RunSettings
from lowtide.bench.shapes import APPLY_SHAPES, BATCH_SHAPES, EXPERTS, MLPS, PAIR_SHAPES, SHAPES
from lowtide.cli import _parser, bench, main
from lowtide.cli.parser import given
from lowtide.errors import ArgumentValueError
from lowtide.measure import plots

CONFIGS = {config.benchmark: config for config in bench.BENCHMARKS}
KINDS = (
    "head",
    "sweep",
    "stats",
    "divergence",
    "contrastive",
    "apply",
    "layers",
    "step",
    "mlp",
    "experts",
)
SHAPED = {
    "head": SHAPES, "sweep": SHAPES, "stats": SHAPES, "divergence": PAIR_SHAPES, "contrastive": BATCH_SHAPES,
    "apply": APPLY_SHAPES, "mlp": (*MLPS.named, *MLPS.groups), "experts": (*EXPERTS.named,),
}  # fmt: skip
QUICK = ["--warm", "0", "--reps", "1", "--device", "cpu"]

# A run of one case; below the rows of it, as its result file has them.
SMALL = {
    "head": "--shape 32,8,64 --only lowtide naive --no-error",
    "sweep": "--shape 9,4,30 --tokens 9 --hidden none --vocab none --only lowtide naive --no-error",
    "stats": "--shape 32,8,64 --work logprob --only lowtide naive --no-error",
    "divergence": "--shape 32,8,64,12 --work jsd --only lowtide naive --no-error",
    "contrastive": "--shape 32,8,64 --work masked --only lowtide naive --no-error",
    "apply": "--shape 32,8,64 --only focal",
    "layers": "--op norm --only lowtide eager --tokens 64 --hidden 32",
    "step": "--tokens 16 --model lowtide-small --peer stock --policy all",
    "mlp": "--shape 1,8,4,6,1 --only lowtide-0 naive",
    "experts": "--shape 8,4,6,3,2 --only lowtide-0 eager",
}
MEASURED = {"ms", "peak_mib"}
IN_ROWS = {
    **dict.fromkeys(("head", "stats", "divergence", "contrastive"), MEASURED | {"name", "limit_ms", "share", "spread"}),
    "sweep": MEASURED | {"name", "limit_ms", "tflops"},
    "apply": MEASURED | {"function", "name", "of_naive", "value", "value_error", "dx_error", "dw_error", "db_error"},
    "layers": {"op", "peer", "forward_ms", "ms", "forward_gb_per_s", "gb_per_s", "kept_mib", "error"},
    "step": {"way", "tokens", "seconds", "spread", "tokens_per_s", "peak_gib", "losses", "attention"},
    **dict.fromkeys(
        ("mlp", "experts"),
        MEASURED | {"name", "gemms", "forward_ms", "backward_ms", "limit_ms", "over", "kept_bytes", "again_gb"},
    ),
}


def rows_of(kind: str, told: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a result, wherever its benchmark has them."""
    if kind == "sweep":
        return [row for point in told["points"] for row in point["rows"]]
    tables = {"head": "table", "apply": "rows", "mlp": "rows", "experts": "rows"}
    tables |= dict.fromkeys(("stats", "divergence", "contrastive"), "tables")
    if kind not in tables:
        return told["rows"]
    found = [row for shape in told["shapes"] for row in shape[tables[kind]]]
    return [row for table in found for row in table["rows"]] if tables[kind] == "tables" else found


def run(kind: str, folder: Path, *more: str) -> int:
    return main(["bench", kind, *SMALL[kind].split(), *QUICK, "--output", str(folder), *more])


def parsed(command: str) -> Any:
    """Return the settings that a command line means, as its benchmark gets them."""
    arguments, unknown = _parser().parse_known_args(shlex.split(command)[1:])
    assert not unknown, unknown
    return arguments.config(**given(arguments, arguments.config))


def help_of(kind: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        _parser().parse_args(["bench", *kind.split(), "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_all_kinds_are_here(capsys: pytest.CaptureFixture[str]) -> None:
    listed = re.findall(r"^    ([a-z]+)(?:  |$)", help_of("", capsys), re.MULTILINE)
    assert tuple(listed) == tuple(CONFIGS) == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_help_has_every_setting_every_name_and_examples_that_run(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, config = help_of(kind, capsys), CONFIGS[kind]
    words = " ".join(out.split())
    for field in dataclasses.fields(config):
        flag = field.name.replace("_", "-")
        assert f"--no-{flag}" in words if field.default is True else f"--{flag}" in words
    assert "{" not in re.sub(r"\{[a-z0-9,]+\}", "", words), "a name that nothing stands for"
    listed = words.replace("- ", "-")  # where a line ended in a name
    assert all(name in listed for name in (*SHAPED.get(kind, ()), *config.known.get("peers", ())))
    assert "Exit status 1 where" in words
    _, _, examples = out.partition("examples:\n")
    commands = [line.strip() for line in examples.splitlines() if line.strip().startswith("lowtide bench")]
    assert len(commands) >= 3
    for command in commands:
        assert command.startswith(f"lowtide bench {kind}"), command
        asked = parsed(command)
        # and a config's own command means the same config
        assert parsed(asked.command()) == dataclasses.replace(asked, output=".")
    assert f"The result is DIR/<date>-{kind}-" in words
    names = [field.name for field in sorted(dataclasses.fields(config), key=lambda f: f.metadata["last"])]
    common = [field.name for field in dataclasses.fields(RunSettings)]
    assert set(common) == set(names[-len(common) :])
    assert "--device cpu" in examples


TOKENS = {
    "--shape nonsense": "shape: expected",
    "--shape 1,2": "shape: expected",
    "--shape 1,2,3,0": "shape: expected",
    "--work nonsense": "work: expected names out of",
    "--only nonsense": "only: expected names out of lowtide",
    "--only naive --skip naive": "skip: expected at least one peer that is left",
}
COMMON = {
    "--reps 0": "reps: expected a whole number of at least 1",
    "--warm -1": "warm: expected a whole number of at least 0",
    f"--seed {2**32 - 1}": "seed: expected a whole number below",
    "--seed -1": "seed: expected a whole number of at least 0",
    "--output=": "output: expected a name",
}
BAD = {
    "head": {
        **COMMON,
        "--shape nonsense": "shape: expected llama-1b",
        "--shape 1,2": "shape: expected",
        "--shape 0,2,3": "shape: expected",
        "--shape ²,2,3": "shape: expected",
        "--only nobody": "only: expected names out of lowtide",
        "--skip nobody": "skip: expected names out of lowtide",
        f"--skip {' '.join(HEAD_PEERS)}": "skip: expected at least one peer that is left",
        "--workspace-mib 4": "workspace_mib: expected --sweep beside it, got 4",
        "--sweep --workspace-mib 0": "workspace_mib: expected numbers above 0",
        "--sweep --workspace-mib x": "workspace_mib: expected numbers, got 'x'",
        "--sweep --workspace-mib nan": "workspace_mib: expected numbers above 0",
        "--tokens 1.5": "tokens: expected numbers",
        "--tokens -1": "tokens: expected whole numbers above 0",
        "--no-table": "table: expected --sweep, --settings or --tokens",
    },
    "mlp": {
        **COMMON,
        "--shape nonsense": "shape: expected published-1, ",
        "--shape 1,2,3,4": "shape: expected published-1, ",
        "--shape 1,2,3,4,0": "shape: expected published-1, ",
        "--only nobody": "only: expected names out of lowtide-0",
        "--only naive --skip naive": "skip: expected at least one peer",
    },
    "experts": {
        **COMMON,
        "--shape nonsense": "shape: expected qwen3-30b-a3b, gpt-oss-20b",
        "--shape 1,2,3,4": "shape: expected qwen3-30b-a3b, gpt-oss-20b",
        "--only nobody": "only: expected names out of lowtide-0",
    },
    "apply": {
        **COMMON,
        "--shape nonsense": "shape: expected 4x4096, 64x512",
        "--only nobody": "only: expected names out of cross-entropy",
        "--no-table": "table: expected --train or --grpo beside --no-table",
        "--no-table --train --model nonsense": "model: expected a folder with a config.json",
        "--steps 0": "steps: expected a whole number of at least 1",
        "--seq-len 7": "seq_len: expected a whole number of at least 8",
    },
    "sweep": {
        **COMMON,
        "--shape all": "shape: expected",
        "--only nobody": "only: expected names out of lowtide",
        f"--skip {' '.join(SweepBenchConfig.usual_peers)}": "skip: expected at least one peer that is left",
        "--tokens 0": "tokens: expected whole numbers above 0, or none",
        "--hidden x": "hidden: expected numbers",
        "--seconds 0": "seconds: expected a number above 0",
        "--tokens none --hidden none --vocab none": "tokens: expected one line that is not none",
    },
    "stats": {**COMMON, **TOKENS},
    "divergence": {**COMMON, **TOKENS},
    "contrastive": {**COMMON, **TOKENS},
    "layers": {
        **COMMON,
        "--op mlp": "op: expected names out of norm",
        "--only nobody": "only: expected names out of lowtide",
        "--head-dim 7": "head_dim: expected an even number",
        "--tokens 1": "tokens: expected a whole number of at least 64",
        "--hidden 0": "hidden: expected a whole number of at least 1",
    },
    "step": {
        **COMMON,
        "--model nonsense": "model: expected a folder with a config.json",
        "--tokens 1": "tokens: expected whole numbers above 1",
        "--tokens many": "tokens: expected numbers",
        "--peer nobody": "peer: expected names out of liger",
        "--policy some": "policy: expected all, attention",
        "--batch 0": "batch: expected a whole number of at least 1",
        **{
            f"--policy {text}": "policy: expected all, attention"
            for text in ("all@", "all@state", "all@states=", "all@states=0", "all@states=-1", "@states", "all@states@")
        },
    },
}
UNFIT = {  # by this machine, or by files: found with torch
    "head --sweep --device cpu": "sweep and tokens: expected matplotlib",
    "sweep --device cpu": "sweep: expected matplotlib",
    "head --device cuda": "device: expected a GPU that PyTorch can use, got none",
}
ALONE = """
import contextlib, io, json, sys, time
from lowtide.cli import main
bad = json.load(sys.stdin)
for words in [["bench", "--help"], *(["bench", kind, "--help"] for kind in bad)]:
    began = time.process_time()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main(words)
    print(time.process_time() - began)
began = time.process_time()
sum(range(25_000_000))
print(time.process_time() - began)
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
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", ALONE], input=json.dumps(BAD), capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert set(BAD) == set(KINDS)
    *seconds, half_a_second = [float(line) for line in ended.stdout.split()]
    assert len(seconds) == 1 + len(KINDS)
    assert max(seconds) < half_a_second, "CPU seconds: a busy machine makes wall time of any length"


@pytest.mark.parametrize("arguments", UNFIT)
def test_what_cannot_run_here_is_one_line_and_writes_nothing(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if "matplotlib" in UNFIT[arguments]:
        monkeypatch.setattr(plots.importlib.util, "find_spec", lambda _: None)
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"lowtide bench {arguments.split()[0]}: {UNFIT[arguments]}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [["bench", "tail"], ["bench", "head", "--dtype", "int8"]])
def test_bad_usage_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def needs(kind: str) -> None:
    if kind == "step":
        pytest.importorskip("transformers")
    if kind == "sweep":
        pytest.importorskip("matplotlib")


@pytest.mark.usefixtures("forked_children")
@pytest.mark.parametrize("kind", KINDS)
def test_from_arguments_to_a_file(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs(kind)
    monkeypatch.setattr("lowtide.bench.sweep.draw_sweep", lambda told, files: files.json)
    assert run(kind, tmp_path) == 0
    told = result(tmp_path)
    stem = f"{kind}-{told['dtype']}" if kind in ("mlp", "experts") else kind
    (file,) = tmp_path.glob("*.json")
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d-{stem}-cpu", file.stem)
    assert {"command", "date", "commit", "machine"} <= set(told)
    asked = ["lowtide", "bench", kind, *SMALL[kind].split(), *QUICK]
    assert parsed(told["command"]) == parsed(shlex.join(asked))
    assert told["machine"]["torch"]
    rows = rows_of(kind, told)
    assert rows
    for row in rows:
        assert IN_ROWS[kind] <= set(row) or "cannot" in row, row
        assert "failed" not in row
        assert "--no-error" not in SMALL[kind] or not [key for key in row if "error" in key]
    out = capsys.readouterr().out
    assert out.endswith(f"written: {file}\n")
    module = import_module(f"lowtide.bench.{kind}")
    benchmark = getattr(module, kind.upper())
    assert tuple(benchmark.peers) == tuple(CONFIGS[kind].known.get("peers", ()))
    assert {peer.package for peer in benchmark.peers.values()} - {""} <= set(told["machine"])


def broken(*_: object, **__: object) -> Any:
    raise RuntimeError("broken")


FAILING = {  # how a peer fails and how lowtide does: a function that is replaced, or an option
    "apply": ("lowtide.bench.apply.linear_cross_entropy", "lowtide.bench.apply.linear_apply"),
    "layers": ("lowtide.bench.layers._hf_norm", "lowtide.bench.layers.rms_norm"),
    "step": ("--peer=liger", "--policy=5xall"),
    "experts": ("eager", "lowtide-0"),
}


@pytest.mark.usefixtures("forked_children")
@pytest.mark.parametrize("kind", KINDS)
def test_lowtides_own_failure_is_status_1_and_a_peers_is_not(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(kind)
    monkeypatch.setattr("lowtide.bench.sweep.draw_sweep", lambda told, files: files.json)
    peers = getattr(import_module(f"lowtide.bench.{kind}"), kind.upper()).peers
    for status, how in enumerate(FAILING.get(kind, ("naive", next(iter(peers), "")))):
        if not how:
            continue
        more = ["--only", "cross-entropy"] if kind == "apply" else []
        with monkeypatch.context() as patched:
            if peers:
                patched.setitem(peers, how, dataclasses.replace(peers[how], build=broken))
            elif how.startswith("--"):
                more = how.split("=")
            else:
                patched.setattr(how, broken)
            unable = kind == "step"  # liger, requested by name, is not installed or needs a GPU
            assert run(kind, tmp_path / str(status), *more) == (status or unable)
        rows = rows_of(kind, result(tmp_path / str(status)))
        reasons = [row["failed"] for row in rows if "failed" in row]
        assert 0 < len(reasons) < len(rows)
        assert kind == "step" or set(reasons) == {"RuntimeError: broken"}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_known_is_written_at_once(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second row does not come: Ctrl-C."""
    needs(kind)
    monkeypatch.setattr("lowtide.bench.sweep.draw_sweep", lambda told, files: files.json)
    add, rows = Run.add, []

    def interrupted(self: Any, row: Any, *where: Any) -> None:
        rows.append(row)
        if len(rows) == 2:
            raise KeyboardInterrupt
        add(self, row, *where)

    monkeypatch.setattr(Run, "add", interrupted)
    if kind == "step":
        row = json.dumps({"tokens": 16, "failed": "measured"}) + "\n"
        monkeypatch.setattr("lowtide.bench.step.run_child", lambda *args, **_: Path(args[-1]).write_text(row))
    assert run(kind, tmp_path) == 130
    assert len(rows_of(kind, result(tmp_path))) == 1


@pytest.mark.parametrize(
    ("kind", "shape", "names"),
    [
        ("head", (), ["llama-1b"]), ("head", ("all",), [*SHAPES]), ("head", ("llama-1b", "llama-1b"), ["llama-1b"]),
        ("stats", (), ["qwen-4k"]), ("stats", ("all",), [*SHAPES]),
        ("divergence", (), ["llama-8b-to-1b"]), ("divergence", ("all",), ["llama-8b-to-1b", "llama-8b-to-8b"]),
        ("contrastive", (), ["batch-64k"]), ("contrastive", ("all",), ["batch-64k", "batch-16k"]),
        ("apply", (), ["4x4096"]), ("apply", ("all",), ["4x4096", "64x512"]),
        ("mlp", (), ["llama-8b-32k"]), ("mlp", ("published",), [f"published-{i}" for i in range(1, 6)]),
        ("mlp", ("models", "llama-8b-8k"), ["llama-8b-8k", "llama-8b-32k", "llama-70b-8k", "llama-70b-32k"]),
        ("experts", (), ["qwen3-30b-a3b"]), ("experts", ("all",), ["qwen3-30b-a3b", "gpt-oss-20b"]),
    ],
)  # fmt: skip
def test_shapes_by_name(kind: str, shape: tuple[str, ...], names: list[str]) -> None:
    assert [shape.name for shape in CONFIGS[kind](shape=shape).shapes] == names


def test_the_published_sizes() -> None:
    published = [(s.batch, s.seq, s.D, s.F, s.layers) for s in MLPS.read("published")]
    assert published == [
        (16, 128, 512, 2048, 2), (32, 128, 512, 2048, 2), (8, 512, 1024, 4096, 3), (16, 512, 1024, 4096, 3),
        (4, 1024, 4096, 16384, 5),
    ]  # fmt: skip
    models = [(s.N, s.D, s.F) for s in MLPS.read("models")]
    assert models == [(8192, 4096, 14336), (32768, 4096, 14336), (8192, 8192, 28672), (32768, 8192, 28672)]
    assert [(s.N, s.D, s.V) for s in APPLY_SHAPES.values()] == [(16384, 4096, 128256), (32768, 768, 32000)]


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("step", {"sdpa": "own"}),
        ("step", {"dtype": "int8"}),
        ("step", {"device": "tpu"}),
    ],
)
def test_a_choice_is_checked_where_no_parser_does(kind: str, wrong: dict[str, str]) -> None:
    (name,) = wrong
    with pytest.raises(ArgumentValueError, match=f"^{name}: expected .* or "):
        CONFIGS[kind](**wrong)
