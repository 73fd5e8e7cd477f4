"""``lowtide profile`` from arguments to files, on a CPU and small: the plot, the page, rows that fail, settings."""

from __future__ import annotations

import importlib.util
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from distributed.train_ranks import run_command, shared
from lowtide.bench.way import Way
from lowtide.cli import main
from lowtide.errors import ArgumentValueError
from lowtide.measure.child import ChildResult
from lowtide.plan.arguments import OPTIMIZERS
from lowtide.profile import run as profiling
from lowtide.profile.config import ProfileConfig
from lowtide.profile.owners import OWNERS
from lowtide.profile.page import write_page
from lowtide.profile.phases import BACKWARD, FORWARD, HEAD, HEAD_BACKWARD, KINDS
from lowtide.profile.plot import draw_profile
from lowtide.profile.tables import ROWS, tables

TINY = {
    "model_type": "llama", "vocab_size": 613, "hidden_size": 48, "intermediate_size": 112, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
PATTERN = "*-profile-cpu"


def row(name: str, impl: str, peak: float, ms: float, layers: int = 4, **more: Any) -> dict[str, Any]:
    """One implementation's part of the json, made up."""
    parts, now = [], 0.0
    kinds = [("embedding", None), *(("forward", i) for i in range(layers)), ("head", None), ("head backward", None)]
    for i in reversed(range(layers)):
        kinds += [("recompute", i), ("backward", i)]
    kinds += [("embedding backward", None), ("optimizer", None)]
    for kind, layer in kinds:
        text = kind if layer is None else f"{kind} of layer {layer}"
        parts.append({"name": text, "kind": kind, "layer": layer, "begin_ms": now, "end_ms": now + ms / len(kinds)})
        now += ms / len(kinds)
    points = 50
    at = [now * i / points for i in range(points)]
    gib = [peak * (0.4 + 0.6 * (1 - abs(2 * i / points - 1))) for i in range(points)]
    shares = {owner: 1 / len(OWNERS) for owner in OWNERS}
    told = {
        "name": name, "impl": impl, "policy": "input", "segments": parts,
        "timeline": {"ms": at, "gib": gib, "owners": {o: [g * s for g in gib] for o, s in shares.items()}},
        "peak": {
            "gib": peak, "ms": at[points // 2], "phase": "backward of the head",
            "owners_gib": {o: peak * s for o, s in shares.items()},
            "activations_gib": {f"layer {i}": 0.1 for i in range(layers)},
            "largest": [{"gib": 1.5, "operation": "aten::<mm> & co", "phase": "head", "owner": "head"}],
        },
        "time_by_kind_ms": {k: sum(p["end_ms"] - p["begin_ms"] for p in parts if p["kind"] == k) for k in KINDS},
        "losses": [11.5, None], "files": {"trace": "a.json.gz"}, "host_peak_gib": 1.0,
        "seconds": ms / 1e3, "tokens_per_s": 1e6 / ms, "tflops": {"step": 300.0, "head": 500.0}, "mfu": 0.41,
        **more,
    }  # fmt: skip
    if "failed" in more:
        for key in ("seconds", "tokens_per_s", "tflops", "mfu"):
            del told[key]
    return told


def profile(*rows: dict[str, Any]) -> dict[str, Any]:
    machine = {"cpu": "A CPU", "gpu": "A GPU </script><b>", "torch": "2.13", "transformers": "5.23", "peft": None}
    settings = {
        "device": "cuda", "dtype": "bfloat16", "optimizer": "adamw", "lora": 16, "offload_params": True, "gpus": 1,
        "sharding": "zero3", "batch_size": 1, "seq_len": 32768,
    }  # fmt: skip
    return {
        "command": "lowtide profile --model '<x>'", "date": "2026-11-21", "commit": "abc", "machine": machine,
        "settings": settings, "model": {"name": "llama-3-8b"}, "peak_tflops": 989.0, "step_tflop": {},
        "flop_note": None, "implementations": list(rows),
    }  # fmt: skip


FAILED = row("stock", "stock", 79.0, 900, failed="out of memory at 79.00 GiB, in the backward of layer 3")
BARE = {"name": "compile", "impl": "compile", "policy": "all", "failed": "ended by signal 9"}
WHOLE = profile(
    FAILED, BARE, row("liger", "liger", 30.0, 1400), row("lowtide", "lowtide", 22.0, 1200),
    row("lowtide:2xall+2xattention-mlp1", "lowtide", 28.0, 1100),
)  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("model") / "config.json"
    file.write_text(json.dumps(TINY))
    return file


@pytest.fixture(scope="module")
def written(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two implementations."""
    folder = tmp_path_factory.mktemp("out")
    arguments = ["--impl", "stock,lowtide:2xall/1", "--policy", "all", "--seq-len", 64, "--steps", 2]
    everything = ["profile", "--model", tiny.parent, *arguments, "--device", "cpu", "--output", folder]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lowtide.measure.child.run_command", run_command)
        assert main(list(map(str, everything))) == 0
    return folder


def result(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob(f"{PATTERN}.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_two_implementations_from_arguments_to_files(written: Path, tiny: Path) -> None:
    told = result(written)
    assert told["command"] == (
        f"lowtide profile --model {tiny.parent} --impl stock,lowtide:2xall/1 --seq-len 64 --policy all --steps 2"
        " --device cpu"
    )
    assert {"commit", "date", "machine", "settings", "model"} <= set(told)
    assert told["machine"]["torch"]
    assert "liger-kernel" in told["machine"]
    stock, lowtide = told["implementations"]
    assert [one["name"] for one in (stock, lowtide)] == ["stock", "lowtide:2xall/1"]
    assert stock["losses"] == pytest.approx(lowtide["losses"], rel=1e-4)
    assert stock["losses"][0] > stock["losses"][-1]
    assert lowtide["peak"]["owners_gib"]["head"] < stock["peak"]["owners_gib"]["head"]
    assert lowtide["peak"]["gib"] < stock["peak"]["gib"]
    # 2 a multiplication; half of attention's scores; backward twice forward
    T, D, F, V = 64, 48, 112, 613
    products = 2 * T * (D * D * 2 + D * 24 * 2 + 3 * D * F) + 4 * T * T / 2 * D
    flop = 3 * (2 * products + 2 * T * D * V)
    assert sum(told["step_tflop"].values()) * 1e12 == pytest.approx(flop)
    assert stock["tflops"]["step"] == pytest.approx(flop / stock["seconds"] / 1e12)
    assert "mfu" not in stock
    stems = [f"{next(written.glob(f'{PATTERN}.json')).stem}{rest}" for rest in ("-stock", "-lowtide-2xall-1")]
    names = {file.name for file in written.iterdir()}
    assert names == {f"{stem}-trace.json.gz" for stem in stems} | {
        file.name for ending in ("json", "png", "html") for file in written.glob(f"{PATTERN}.{ending}")
    }
    assert [one["files"]["trace"] for one in (stock, lowtide)] == [f"{stem}-trace.json.gz" for stem in stems]


def test_what_is_written_to_the_terminal(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = result(written)
    text = tables(told)
    for words in ("peak, MiB", "optimizer states", "head: logits, loss", "time, ms", "layers, forward", "tokens/s"):
        assert words in text
    assert "2xall/1" in ROWS.line(told["implementations"][1])
    failed = tables(profile(row("stock", "stock", 79.0, 900, failed="out of memory at 79.00 GiB"), BARE))
    assert "out of memory" in failed
    assert "time, ms" not in failed
    assert tables(profile(BARE)) == "\n"


def test_the_page_has_the_plot_and_all_tables(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    write_page(tmp_path / "a.html", WHOLE, tmp_path / "a.png")
    page = (tmp_path / "a.html").read_text()
    assert "data:image/png;base64," in page
    assert "A GPU &lt;/script&gt;&lt;b&gt;" in page
    assert page.count("<table>") == page.count("</table>") == 3 + 4  # and the largest blocks of each
    for text in (
        "layer 3",
        "optimizer states",
        "layers, recomputed",
        "aten::&lt;mm&gt; &amp; co",
        "not finite",
        "41.0%",
    ):
        assert f"<td>{text}</td>" in page, text
    assert not re.search("(src|href)=.http", page)
    write_page(tmp_path / "b.html", profile(BARE), None)
    assert "<img" not in (tmp_path / "b.html").read_text()


@pytest.mark.usefixtures("forked_children")
def test_parameters_on_the_host_and_adapters(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    command = f"profile --model {tiny} --impl lowtide --seq-len 33 --steps 1 --lora 2 --offload-params --no-trace"
    assert main([*command.split(), "--device", "cpu", "--output", str(tmp_path)]) == 0
    told = result(tmp_path)
    (lowtide,) = told["implementations"]
    assert "failed" not in lowtide
    assert told["settings"]["sharding"] == "zero3"
    assert lowtide["trained_parameters"] < 0.2 * lowtide["parameters"]
    # on a CPU the shards and what is gathered of them lie in the same memory
    weights = lowtide["parameters"] * 4 / 2**30
    assert weights < lowtide["peak"]["owners_gib"]["weights"] <= 2 * weights
    assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".png", ".html"}


RANK = """
import json, os
os.environ.update(json.loads(os.environ["EACH"])[int(os.environ["RANK"])])
from lowtide.measure.child import _call_here
_call_here()
"""


class Together:
    """As `run_command` of `train_ranks`, for ranks that are started one by one: they begin when all have come."""

    def __init__(self, ranks: int, script: Path) -> None:
        self.ranks, self.script = ranks, script
        self.given: dict[int, dict[str, str]] = {}
        self.all_here = threading.Barrier(ranks, self._run)
        script.write_text(RANK)

    def _run(self) -> None:
        each = [self.given[rank] for rank in range(self.ranks)]
        self.ended = shared()(self.ranks, script=self.script, EACH=json.dumps(each))

    def __call__(self, command: list[str], *, env: dict[str, str], capture: bool) -> ChildResult:
        rank = int(env["RANK"])
        self.given[rank] = {name: value for name, value in env.items() if not name.startswith("MASTER")}
        self.all_here.wait()
        return ended(status=self.ended.statuses[rank], stderr=self.ended.err[rank])


def test_two_ranks_of_which_the_first_is_shown(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.measure.child.run_command", Together(2, tmp_path / "rank.py"))
    command = f"profile --model {tiny} --impl lowtide --seq-len 33 --steps 1 --fsdp zero3 --gpus 2 --policy all"
    assert main([*command.split(), "--device", "cpu", "--output", str(tmp_path)]) == 0
    told = result(tmp_path)
    (lowtide,) = told["implementations"]
    assert "failed" not in lowtide
    # Half of the optimizer's states lie here; what is gathered of the weights comes and goes.
    states = [gib for gib in lowtide["timeline"]["owners"]["optimizer"] if gib]
    assert states == pytest.approx([lowtide["parameters"] * 4 / 2**30] * len(states), rel=0.02)
    weights = lowtide["timeline"]["owners"]["weights"]
    assert min(weights) == pytest.approx(lowtide["parameters"] * 4 / 2 / 2**30, rel=0.02)
    assert max(weights) > 1.5 * min(weights)
    assert lowtide["tokens_per_s"] == pytest.approx(66 / lowtide["seconds"])
    assert len(list(tmp_path.glob("*-trace.json.gz"))) == 1


def ended(value: Any = None, status: int = 0, stderr: str = "") -> ChildResult:
    return ChildResult(returncode=status, seconds=1, peak_bytes=0, value=value, stderr=stderr)


@pytest.mark.parametrize(
    ("child", "says", "status"),
    [
        (ended({"failed": "out of memory at 3.00 GiB, in the head"}), "out of memory at 3.00 GiB, in the head", 0),
        (ended({"failed": "ValueError: x"}), "ValueError: x", 1),
        (ended(None, -9), "ended by signal 9 (the system kills processes that take too much host memory)", 1),
        (ended(None, -6), "ended by signal 6", 1),
        (ended(None, 1, "Trace\nRuntimeError: no\n  and why\n"), "RuntimeError: no", 1),
        (ended(None, 1, "x\nlowtide.errors.UnsupportedError: out of memory at 3 GiB\n"), "out of memory at 3 GiB", 0),
        (ended(None, 3), "ended with status 3", 1),
    ],
)
def test_one_that_fails_is_a_row_and_the_others_run(
    child: ChildResult, says: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    good = row("stock", "stock", 1.0, 10)
    own = ("name", "impl", "policy", "mfu")
    answers = {"lowtide": child, "stock": ended({k: v for k, v in good.items() if k not in own})}
    monkeypatch.setattr(profiling, "run_child", lambda _, way, *args, **kwargs: answers[way["impl"]])
    if child.returncode != 0:  # one picture is enough, and takes longer than all else
        monkeypatch.setattr(profiling, "draw_profile", lambda at, told: at.touch())
    arguments = ["--impl", "lowtide", "stock", "--device", "cpu", "--output", str(tmp_path)]
    assert main(["profile", *arguments]) == status
    lowtide, stock = result(tmp_path)["implementations"]
    assert lowtide["failed"] == says
    assert stock["seconds"] == 0.01
    out = capsys.readouterr().out
    assert says in out
    assert next(tmp_path.glob(f"{PATTERN}.html")).exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--impl nobody", "impl: expected names out of stock, compile, liger, lowtide, lowtide-compile, torch, "),
        ("--impl ,", "impl: expected names out of"),
        ("--impl stock,stock", "impl: expected each name once"),
        ("--impl stock --policy some", "policy: expected all, attention or input"),
        ("--impl stock --policy all-mlp1", "policy: expected for stock all, attention or input"),
        ("--impl stock --policy 1xall+1xinput", "policy: expected for stock"),
        ("--impl compile:attention", "policy: expected for compile all or input"),
        ("--model nothing", "model: expected a folder with a config.json"),
        ("--seq-len 1", "seq_len: expected at least 2 tokens"),
        ("--steps 0", "steps: expected a whole number of at least 1"),
        ("--warm 0", "warm: expected"),
        ("--gpus 2", "gpus: expected 1, or --fsdp"),
        ("--offload-params --fsdp zero2", "fsdp: expected none or zero3"),
        ("--offload-params --optimizer adamw-8bit", "optimizer: expected another with --offload-params"),
        ("--memory-limit 3GiB --device cpu", "memory_limit: expected a GPU"),
        ("--memory-limit 0 --device cpu", "memory_limit: expected a size above 0"),
        ("--memory-limit some --device cpu", "memory_limit: expected a size such as 40GiB"),
        ("--seed -1", "seed: expected"),
    ],
)
def test_what_cannot_be_profiled_is_one_line(
    arguments: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", *arguments.split(), "--output", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"lowtide profile: {says}" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "module", "says"),
    [
        ("--impl stock,liger", "liger_kernel", "impl: expected the package liger-kernel to be installed"),
    ],
)
def test_a_package_that_is_missing_is_named(
    arguments: str, module: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find(name))
    assert main(["profile", *arguments.split(), "--output", str(tmp_path)]) == 2
    assert f"lowtide profile: {says}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["profile", "bench step"])
def test_what_is_no_causal_language_model_is_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "t5.json"
    file.write_text(json.dumps({"model_type": "t5", "d_model": 16}))
    output = tmp_path / "out"
    assert main([*command.split(), "--model", str(file), "--output", str(output)]) == 2
    assert ": model: expected a causal language model, got a t5." in capsys.readouterr().err
    assert not output.exists()


def test_policies_of_all_and_of_one() -> None:
    config = ProfileConfig(impl=("stock,compile", "lowtide", "lowtide:all,lowtide-compile:2xall"), policy="input")
    assert config.ways == {
        "stock": Way(impl="stock"),
        "compile": Way(impl="compile"),
        "lowtide": Way(impl="lowtide"),
        "lowtide:all": Way(impl="lowtide", policy="all"),
        "lowtide-compile:2xall": Way(impl="lowtide-compile", policy="2xall"),
    }


def test_a_policy_as_lowtide_plan_prints_it_behind_a_name() -> None:
    config = ProfileConfig(impl=("stock,lowtide:12 x input/1, 4 x all/0,compile",))
    assert config.ways["lowtide:12 x input/1, 4 x all/0"].policy == "12 x input/1, 4 x all/0"
    assert list(config.ways)[::2] == ["stock", "compile"]


@pytest.mark.parametrize("where", [{"policy": "2xall@states=2.5"}, {"impl": ("lowtide:all@states",)}])
def test_states_in_host_memory_are_not_profiled(where: dict[str, Any]) -> None:
    with pytest.raises(ArgumentValueError, match="optimizer states"):
        ProfileConfig(**where)


def test_every_optimizer_of_the_planner_can_be_profiled() -> None:
    for name in OPTIMIZERS:
        ProfileConfig(optimizer=name)  # type: ignore[arg-type]
    with pytest.raises(ArgumentValueError, match="optimizer"):
        ProfileConfig(optimizer="lion")  # type: ignore[arg-type]


def test_the_share_of_a_known_gpus_peak() -> None:
    told = {"seconds": 2.0, "time_by_kind_ms": {FORWARD: 500.0, HEAD: 100.0, HEAD_BACKWARD: 0.0, BACKWARD: 1000.0}}
    tflop = {FORWARD: 100.0, HEAD: 10.0, HEAD_BACKWARD: 20.0, BACKWARD: 200.0}
    profiling.add_rates(told, tflop, 989.0)
    assert told["tflops"] == {"forward": 200, "head": 300, "backward": 200, "step": 165}
    assert told["mfu"] == pytest.approx(165 / 989)


def test_the_plot_names_peaks_phases_and_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Figure = pytest.importorskip("matplotlib.figure").Figure
    texts: list[str] = []
    save = Figure.savefig

    def look(figure: Any, *args: Any, **kwargs: Any) -> None:
        for axes in figure.axes:
            texts.extend(text.get_text() for text in (*axes.texts, *axes.get_legend().get_texts()))
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", look)
    deep = row("stock", "stock", 3.0, 90, layers=40)
    failed = row("lowtide", "lowtide", 2.9, 80, failed="out of memory at 2.9")
    draw_profile(tmp_path / "a.png", profile(deep, BARE, failed))
    for text in (
        "stock, input: 3 GiB in backward of the head, 90 ms",
        "lowtide, input: 2.9 GiB in backward of the head, out of memory",
        "layers, recomputed",
        "optimizer states",
    ):
        assert text in texts
    assert {"0", "3"} <= set(texts), "of four layers each has its number"
    assert "39" not in texts


def test_a_plot_that_is_missing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without matplotlib, which torch and transformers do not bring."""
    monkeypatch.setattr(profiling, "run_child", lambda *args, **kwargs: ended(row("stock", "stock", 1.0, 10)))
    monkeypatch.setattr("lowtide.profile.run.importlib.util.find_spec", lambda _: None)
    assert main(["profile", "--impl", "stock", "--device", "cpu", "--output", str(tmp_path)]) == 0
    assert "no plot: matplotlib is not installed. pip install 'lowtide[plot]'" in capsys.readouterr().out
    assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".html"}
