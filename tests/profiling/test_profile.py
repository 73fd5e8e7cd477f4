"""``lowtide profile`` from arguments to files, on a CPU and small: the plot, the page, rows that fail, settings."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lowtide.bench.variant import Variant
from lowtide.cli import main
from lowtide.errors import ArgumentValueError
from lowtide.measure.child import ChildResult
from lowtide.plan.arguments import OPTIMIZERS
from lowtide.profile import run as profiling
from lowtide.profile.config import ProfileConfig
from lowtide.profile.memory import OWNERS
from lowtide.profile.phases import BACKWARD, FORWARD, HEAD, HEAD_BACKWARD, KINDS
from lowtide.profile.plot import draw_profile
from lowtide.profile.report import ROWS, tables, write_page
from promises import promise

pytestmark = promise("commands")
TINY = {
    "model_type": "llama", "vocab_size": 613, "hidden_size": 48, "intermediate_size": 112, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
PATTERN = "*-profile-cpu"


def row(name: str, impl: str, peak: float, ms: float, layers: int = 4, **more: Any) -> dict[str, Any]:
    """One implementation's part of the json, made up."""
    kinds: list[tuple[str, int | None]] = [("embedding", None), *(("forward", i) for i in range(layers))]
    kinds += [("head", None), ("head backward", None)]
    for i in reversed(range(layers)):
        kinds += [("recompute", i), ("backward", i)]
    kinds += [("embedding backward", None), ("optimizer", None)]
    each = ms / len(kinds)
    parts = [
        {"name": f"{kind} {layer}", "kind": kind, "layer": layer, "begin_ms": i * each, "end_ms": (i + 1) * each}
        for i, (kind, layer) in enumerate(kinds)
    ]
    gib = [peak * share for share in (0.4, 0.7, 1.0, 0.7)]
    shares = dict.fromkeys(OWNERS, peak / len(OWNERS))
    found = {
        "name": name, "impl": impl, "policy": "input", "segments": parts, "peak_gib": peak, "loss": 11.5,
        "timeline": {"ms": [0.0, ms / 3, ms / 2, ms], "gib": gib},
        "peak": {
            "gib": peak, "ms": ms / 2, "phase": "backward of the head", "owners_gib": shares,
            "activations_gib": {f"layer {i}": 0.1 for i in range(layers)},
            "largest": [{"gib": 1.5, "operation": "aten::<mm> & co", "phase": "head", "owner": "head"}],
        },
        "time_by_kind_ms": dict.fromkeys(KINDS, ms / len(KINDS)), "losses": [11.5, None], "files": {},
        "seconds": ms / 1e3, "tokens_per_s": 1e6 / ms, "tflops": {"step": 300.0, "head": 500.0}, "mfu": 0.41,
        **more,
    }  # fmt: skip
    if "failed" in more:
        for key in ("seconds", "tokens_per_s", "tflops", "mfu"):
            del found[key]
    return found


def profile(*rows: dict[str, Any]) -> dict[str, Any]:
    machine = {"cpu": "A CPU", "gpu": "A GPU </script><b>", "torch": "2.13", "transformers": "5.23", "peft": None}
    settings = {
        "device": "cuda", "dtype": "bfloat16", "optimizer": "adamw", "lora": 16, "batch_size": 1, "seq_len": 32768,
    }  # fmt: skip
    return {
        "machine": machine, "settings": settings, "model": {"name": "llama-3-8b"}, "peak_tflops": 989.0,
        "flop_note": None, "implementations": list(rows),
    }  # fmt: skip


FAILED = row("stock", "stock", 79.0, 900, failed="out of memory at 79.00 GiB, in the backward of layer 3")
BARE = {"name": "compile", "impl": "compile", "policy": "all", "failed": "ended by signal 9"}
WHOLE = profile(FAILED, BARE, row("liger", "liger", 30.0, 1400), row("lowtide:2xall", "lowtide", 22.0, 1200))


def result(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob(f"{PATTERN}.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """An implementation runs here, at a commit of that name."""

    def here(function: Any, *args: Any, **_: Any) -> ChildResult:
        return ended(json.loads(json.dumps(function(*json.loads(json.dumps(args))))))

    monkeypatch.setattr(profiling, "run_child", here)
    monkeypatch.setenv("COMMIT", "abc")  # else git looks through all files


def ended(value: Any = None, status: int = 0, stderr: str = "") -> ChildResult:
    return ChildResult(returncode=status, seconds=1, value=value, stderr=stderr)


def test_two_implementations_from_arguments_to_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    words = "--impl stock,lowtide:2xall/1 --policy all --seq-len 64 --steps 2 --device cpu"
    command = f"profile --model {tmp_path} {words}"
    assert main([*command.split(), "--output", str(tmp_path / "out")]) == 0
    found = result(tmp_path / "out")
    assert found["command"] == f"lowtide {command}"
    assert {"commit", "date", "machine", "settings", "model"} <= set(found)
    assert "liger-kernel" in found["machine"]
    stock, lowtide = found["implementations"]
    assert [each["name"] for each in (stock, lowtide)] == ["stock", "lowtide:2xall/1"]
    assert stock["losses"] == pytest.approx(lowtide["losses"], rel=1e-4)
    assert stock["losses"][0] > stock["losses"][-1]
    assert lowtide["peak"]["owners_gib"]["head"] < stock["peak"]["owners_gib"]["head"]
    assert lowtide["peak"]["gib"] < stock["peak"]["gib"]
    # 2 a multiplication; half of attention's scores; backward twice forward
    T, D, F, V = 64, 48, 112, 613
    products = 2 * T * (D * D * 2 + D * 24 * 2 + 3 * D * F) + 4 * T * T / 2 * D
    flop = 3 * (2 * products + 2 * T * D * V)
    assert sum(found["step_tflop"].values()) * 1e12 == pytest.approx(flop)
    assert stock["tflops"]["step"] == pytest.approx(flop / stock["seconds"] / 1e12)
    assert "mfu" not in stock
    stem = next((tmp_path / "out").glob(f"{PATTERN}.json")).stem
    traces = [f"{stem}-{name}-trace.json.gz" for name in ("stock", "lowtide-2xall-1")]
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {*traces, *(f"{stem}.{ending}" for ending in ("json", "png", "html"))}
    assert [each["files"]["trace"] for each in (stock, lowtide)] == traces
    out = capsys.readouterr().out
    for text in ("peak, MiB", "optimizer states", "head: logits, loss", "time, ms", "layers, forward", "tokens/s"):
        assert text in out
    assert ROWS.line(lowtide) in out


def test_tables_of_rows_that_failed() -> None:
    failed = tables(profile(FAILED, BARE))
    assert "out of memory" in failed
    assert "time, ms" not in failed
    assert tables(profile(BARE)) == "\n"


def test_the_page_has_the_plot_and_all_tables(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    write_page(tmp_path / "a.html", WHOLE, tmp_path / "a.png")
    page = (tmp_path / "a.html").read_text()
    assert "data:image/png;base64," in page
    assert "A GPU &lt;/script&gt;&lt;b&gt;" in page
    assert page.count("<table>") == page.count("</table>") == 3 + 3  # and the largest blocks of each
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


@pytest.mark.parametrize(
    ("child", "reason", "status"),
    [
        (ended({"failed": "out of memory at 3.00 GiB, in the head"}), "out of memory at 3.00 GiB, in the head", 0),
        (ended({"failed": "ValueError: x"}), "ValueError: x", 1),
        (ended(None, -9), "ended by signal 9 (the system kills processes that take too much host memory)", 1),
        (ended(None, 1, "Trace\nRuntimeError: no\n  and why\n"), "RuntimeError: no", 1),
        (ended(None, 3), "ended with status 3", 1),
    ],
)
def test_one_that_fails_is_a_row_and_the_others_run(
    child: ChildResult, reason: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Without matplotlib, which torch and transformers do not bring, there is no plot, and a line that says so."""
    good = {k: v for k, v in row("stock", "stock", 1.0, 10).items() if k not in ("name", "impl", "policy", "mfu")}
    answers = {"lowtide": child, "stock": ended(good)}
    monkeypatch.setattr(profiling, "run_child", lambda _, variant, *args, **kwargs: answers[variant["impl"]])
    monkeypatch.setattr("lowtide.profile.run.importlib.util.find_spec", lambda _: None)
    assert main(["profile", "--impl", "lowtide", "stock", "--device", "cpu", "--output", str(tmp_path)]) == status
    lowtide, stock = result(tmp_path)["implementations"]
    assert lowtide["failed"] == reason
    assert stock["seconds"] == 0.01
    out = capsys.readouterr().out
    assert reason in out
    assert "no plot: matplotlib is not installed. pip install 'lowtide[plot]'" in out
    assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".html"}


@promise("errors", "commands")
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--impl nobody", "impl: expected names out of stock, compile, liger, lowtide, lowtide-compile"),
        ("--impl ,", "impl: expected names out of"),
        ("--impl stock,stock", "impl: expected each name once"),
        ("--impl stock,liger", "impl: expected the package liger-kernel to be installed"),
        ("--impl stock --policy some", "policy: expected all, attention or input"),
        ("--impl stock --policy all-mlp1", "policy: expected for stock all, attention or input"),
        ("--impl lowtide --policy 2xall@states=2.5", "policy: expected nothing of optimizer states"),
        ("--impl compile:attention", "policy: expected for compile all or input"),
        ("--model nothing", "model: expected a folder with a config.json"),
        ("--seq-len 1", "seq_len: expected at least 2 tokens"),
        ("--steps 0", "steps: expected a whole number of at least 1"),
        ("--memory-limit 3GiB --device cpu", "memory_limit: expected a GPU"),
        ("--memory-limit 0 --device cpu", "memory_limit: expected a size above 0"),
        ("--seed -1", "seed: expected"),
    ],
)
def test_what_cannot_be_profiled_is_one_line(
    arguments: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lowtide.bench.variant.importlib.util.find_spec", lambda _: None)
    assert main(["profile", *arguments.split(), "--output", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"lowtide profile: {error}" in err
    assert list(tmp_path.iterdir()) == []


def test_policies_of_all_and_of_one() -> None:
    config = ProfileConfig(impl=("stock,compile", "lowtide", "lowtide:12 x input/1, 4 x all/0,lowtide-compile:2xall"))
    assert config.variants == {
        "stock": Variant(impl="stock"),
        "compile": Variant(impl="compile"),
        "lowtide": Variant(impl="lowtide"),
        "lowtide:12 x input/1, 4 x all/0": Variant(impl="lowtide", policy="12 x input/1, 4 x all/0"),
        "lowtide-compile:2xall": Variant(impl="lowtide-compile", policy="2xall"),
    }
    for name in OPTIMIZERS:
        ProfileConfig(optimizer=name)  # type: ignore[arg-type]
    with pytest.raises(ArgumentValueError, match="optimizer"):
        ProfileConfig(optimizer="lion")  # type: ignore[arg-type]


def test_the_share_of_a_known_gpus_peak() -> None:
    found = {"seconds": 2.0, "time_by_kind_ms": {FORWARD: 500.0, HEAD: 100.0, HEAD_BACKWARD: 0.0, BACKWARD: 1000.0}}
    tflop = {FORWARD: 100.0, HEAD: 10.0, HEAD_BACKWARD: 20.0, BACKWARD: 200.0}
    profiling.add_rates(found, tflop, 989.0)
    assert found["tflops"] == {"forward": 200, "head": 300, "backward": 200, "step": 165}
    assert found["mfu"] == pytest.approx(165 / 989)


def test_the_plot_names_peaks_phases_and_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Figure = pytest.importorskip("matplotlib.figure").Figure
    texts: list[str] = []

    def look(figure: Any, *_: Any, **__: Any) -> None:
        for axes in figure.axes:
            texts.extend(text.get_text() for text in (*axes.texts, *axes.get_legend().get_texts()))

    monkeypatch.setattr(Figure, "savefig", look)
    draw_profile(tmp_path / "a.png", profile(row("stock", "stock", 3.0, 90, layers=40), BARE, FAILED))
    for text in (
        "stock, input: 3 GiB in backward of the head, 90 ms",
        "stock, input: 79 GiB in backward of the head, out of memory",
        "layers, recomputed",
        "optimizer states",
    ):
        assert text in texts
    assert {"0", "3"} <= set(texts), "of four layers each has its number"
    assert "39" not in texts
