"""``lowtide profile`` from arguments to files, on a CPU and small: the plot, the page, rows that fail, settings."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from lowtide.cli import main
from lowtide.profile import run as profiling
from lowtide.profile.report import text_of, write_page
from promises import promise

pytestmark = promise("commands")
TINY = {
    "model_type": "llama", "vocab_size": 613, "hidden_size": 48, "intermediate_size": 112, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
PATTERN = "*-profile-cpu"
BARE = {"name": "compile", "impl": "compile", "policy": "all", "failed": "ended by signal 9"}
WORDS = "--impl stock lowtide:2xall/1 --policy all --seq-len 64 --steps 2 --device cpu"


def result(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob(f"{PATTERN}.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two implementations, in this process."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("profile")
    (folder / "config.json").write_text(json.dumps(TINY))

    def here(function: Any, *args: Any, **_: Any) -> Any:
        return json.loads(json.dumps(function(*json.loads(json.dumps(args)))))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiling, "run_child", here)
        assert main(["profile", "--model", str(folder), *WORDS.split(), "--output", str(folder / "out")]) == 0
    return folder / "out"


def test_two_implementations_from_arguments_to_files(written: Path) -> None:
    found = result(written)
    assert found["command"] == f"lowtide profile --model {written.parent} {WORDS}"
    assert {"commit", "date", "machine", "settings", "model"} <= set(found)
    assert "liger-kernel" in found["machine"]
    stock, lowtide = found["implementations"]
    assert [each["name"] for each in (stock, lowtide)] == ["stock", "lowtide:2xall/1"]
    assert stock["losses"] == pytest.approx(lowtide["losses"], rel=1e-4)
    assert stock["losses"][0] > stock["losses"][-1]
    assert lowtide["peak"]["owners_gib"]["head"] < stock["peak"]["owners_gib"]["head"]
    assert lowtide["peak"]["gib"] < stock["peak"]["gib"]
    stem = next(written.glob(f"{PATTERN}.json")).stem
    traces = [f"{stem}-{name}-trace.json.gz" for name in ("stock", "lowtide-2xall-1")]
    names = {file.name for file in written.iterdir()}
    assert names == {*traces, *(f"{stem}.{ending}" for ending in ("json", "png", "html"))}
    assert [each["files"]["trace"] for each in (stock, lowtide)] == traces
    with gzip.open(written / traces[0], "rt") as file:
        assert any(event.get("name") == "aten::mm" for event in json.load(file)["traceEvents"])


def test_the_page_has_the_plot_and_all_tables(written: Path, tmp_path: Path) -> None:
    found = result(written)
    page = next(written.glob(f"{PATTERN}.html")).read_text()
    assert "data:image/png;base64," in page
    assert page.count("<pre>") == page.count("</pre>") == 3
    assert not re.search("(src|href)=.http", page)
    for words in ("peak, MiB", "optimizer states", "head: logits, loss", "time, ms", "layers, forward", "tokens/s"):
        assert words in page, words
        assert words in text_of(found)
    found["machine"]["cpu"] = "A CPU </script><b>"
    write_page(tmp_path / "a.html", {**found, "implementations": [BARE]}, None)
    bare = (tmp_path / "a.html").read_text()
    assert "A CPU &lt;/script&gt;&lt;b&gt;" in bare
    assert "<img" not in bare
    assert text_of({**found, "implementations": [BARE]}) == "\n"


@pytest.mark.parametrize(("reason", "status"), [("out of memory in the head", 0), ("ValueError: x", 1)])
def test_one_that_fails_is_a_row_and_the_others_run(
    reason: str, status: int, written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Without matplotlib, which torch and transformers do not bring, there is no plot, and a line that says so."""
    good = result(written)["implementations"][0]
    answers = {"lowtide": {"failed": reason}, "stock": good}
    monkeypatch.setattr(profiling, "run_child", lambda _, variant, *args, **kwargs: answers[variant["impl"]])
    monkeypatch.setattr("lowtide.profile.run.importlib.util.find_spec", lambda _: None)
    monkeypatch.setenv("COMMIT", "abc")  # else git looks through all files
    assert main(["profile", "--impl", "lowtide", "stock", "--device", "cpu", "--output", str(tmp_path)]) == status
    lowtide, stock = result(tmp_path)["implementations"]
    assert lowtide["failed"] == reason
    assert stock["seconds"] == good["seconds"]
    out = capsys.readouterr().out
    assert reason in out
    assert "no plot: matplotlib is not installed. pip install 'lowtide[plot]'" in out
    assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".html"}


@promise("errors", "commands")
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--impl nobody", "--impl: expected names out of stock, compile, liger, lowtide, lowtide-compile"),
        ("--impl stock stock", "--impl: expected each name once"),
        ("--impl stock liger", "--impl: expected the package liger-kernel to be installed"),
        ("--impl stock --policy some", "--policy: expected all, attention or input"),
        ("--impl stock --policy all-mlp1", "--policy: expected for stock all or input or"),
        ("--impl lowtide --policy 2xall@states=2.5", "--policy: expected all, attention"),
        ("--impl compile:attention", "--policy: expected for compile all or input or input-offload"),
        ("--model nothing", "--model: expected a folder with a config.json"),
        ("--seq-len 1", "--seq-len: expected at least 2 tokens"),
        ("--steps 0", "--steps: expected a whole number of at least 1"),
        ("--seed -1", "--seed: expected"),
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
