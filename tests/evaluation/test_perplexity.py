"""``lowtide eval --data``: its figures beside those of a float64 model that is given each token by itself."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from lowtide.cli import main
from lowtide.evaluation.config import EvalConfig
from lowtide.evaluation.run import run
from lowtide.evaluation.windows import Document, Windows, batches, document_of
from lowtide.measure.allocations import track_allocations
from lowtide.train.model import pretrained_model
from lowtide.train.tokenizer import load_tokenizer
from train.conftest import write_rows

DOCUMENTS = ["the tide came in", "gulls", "and went out over sand while gulls counted waves, één voor één 🌊"]
CONVERSATION = [{"role": "user", "content": "waves?"}, {"role": "assistant", "content": "seven"}]
KINDS: dict[str, list[dict[str, Any]]] = {
    "texts": [{"text": text} for text in DOCUMENTS],
    "conversations": [{"messages": CONVERSATION}],
    "completions": [{"prompt": "the tide ", "completion": text} for text in DOCUMENTS],
    "conversational completions": [{"prompt": CONVERSATION[:1], "completion": CONVERSATION[1:]}],
}


def figures(*arguments: object) -> dict[str, Any]:
    """What `lowtide eval` writes."""
    file = Path(str(arguments[1])).parent / "figures.json"
    assert main(["eval", *map(str, arguments), "--json", str(file)]) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Any:
    return load_tokenizer(model_folder)


def one_by_one(folder: Path, tokenizer: Any, documents: list[Document], seq_len: int, stride: int) -> float:
    """The nats of each token given the tokens that its window has before it, in float64."""
    model = pretrained_model(folder).double().eval()
    nats = 0.0
    for document in documents:
        before, text = ([tokenizer.eos_token_id], [])
        before += tokenizer(document.context)["input_ids"]
        text = tokenizer(document.text)["input_ids"]
        ids, first = before + text, len(before)
        for i in range(first, len(ids)):
            end = min(first + ((i - first) // stride + 1) * stride, len(ids))  # of its window
            begin = max(0, end - 1 - seq_len)
            with torch.no_grad():
                logits = model(torch.tensor([ids[begin:i]])).logits[0, -1]
            nats -= float(logits.log_softmax(-1)[ids[i]])
    return nats


@pytest.mark.parametrize(("seq_len", "stride", "batch_size"), [(128, None, 8), (16, None, 3), (16, 5, 2), (16, 1, 8)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_figures_are_those_of_every_token_by_itself(
    kind: str, seq_len: int, stride: int | None, batch_size: int, model_folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", KINDS[kind])
    more = [] if stride is None else ["--stride", stride]
    found = figures("--data", data, "--model", model_folder, "--seq-len", seq_len, "--batch-size", batch_size, *more)
    rows = [dict(row) for row in KINDS[kind]]
    documents = [document_of(row, tokenizer) for row in rows]
    nats = one_by_one(model_folder, tokenizer, documents, seq_len, stride or seq_len)
    size = sum(len(document.text.encode()) for document in documents)
    tokens = sum(len(tokenizer(document.text)["input_ids"]) for document in documents)
    data_figures = found["data"]
    assert (data_figures["documents"], data_figures["tokens"], data_figures["bytes"]) == (len(rows), tokens, size)
    assert data_figures["nats"] == pytest.approx(nats, rel=1e-5)
    assert data_figures["mean_loss"] == pytest.approx(nats / tokens, rel=1e-5)
    assert data_figures["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    assert data_figures["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert found["calls"]["built"] == 0
    assert found["calls"]["scored"] == -(-data_figures["windows"] // batch_size)


def test_what_is_scored_of_conversations_and_completions(tokenizer: Any) -> None:
    whole = "<|im_start|>user\nwaves?<|im_end|>\n<|im_start|>assistant\nseven<|im_end|>\n"
    assert document_of({"messages": CONVERSATION}, tokenizer) == Document(whole)
    one = document_of({"prompt": CONVERSATION[:1], "completion": CONVERSATION[1:]}, tokenizer)
    assert one == Document("seven<|im_end|>\n", whole.removesuffix("seven<|im_end|>\n"))
    assert document_of({"prompt": "a", "completion": "b"}, tokenizer) == Document("b", "a")


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize(("seq_len", "stride"), [(7, 7), (7, 3), (7, 1), (200, 200), (200, 64)])
def test_every_token_is_scored_once_after_as_many_as_fit(seq_len: int, stride: int, pack: bool, tokenizer: Any) -> None:
    eos, ids = tokenizer.eos_token_id, [list(tokenizer(text)["input_ids"]) for text in DOCUMENTS]
    sequences = [[eos, *one] for one in ids]
    if pack:
        sequences = [[eos, *(token for one in ids for token in (*one, eos))]]
    windows = Windows(map(Document, DOCUMENTS), tokenizer, seq_len=seq_len, stride=stride, pack=pack)
    found = list(windows)
    assert [token for one in found for token in one.ids[-one.scored :]] == [t for one in sequences for t in one[1:]]
    assert windows.documents == len(DOCUMENTS)
    assert windows.bytes == sum(len(text.encode()) for text in DOCUMENTS)
    at = iter([(sequence, i) for sequence in sequences for i in range(1, len(sequence))])
    for window in found:
        assert 1 <= window.scored <= stride
        assert len(window.ids) <= seq_len + 1
        places = [next(at) for _ in range(window.scored)]
        sequence, last = places[-1]
        assert list(window.ids) == sequence[max(0, last - seq_len) : last + 1]


def test_batches_have_each_window_once_and_mask_what_is_padded(tokenizer: Any) -> None:
    windows = list(Windows(map(Document, DOCUMENTS), tokenizer, seq_len=9, stride=4, pack=False))
    seen = []
    for batch in batches(iter(windows), 4):
        assert len(batch.input_ids) <= 4
        for ids, mask, targets in zip(batch.input_ids, batch.attention_mask, batch.targets, strict=True):
            n, scored = int(mask.sum()), int((targets != -100).sum())
            assert mask[:n].all()
            assert (targets[: n - scored] == -100).all()
            assert (targets[n:] == -100).all()
            seen.append((*ids[:n].tolist(), int(targets[n - 1]), scored))
    assert sorted(seen) == sorted((*window.ids, window.scored) for window in windows)


@pytest.mark.parametrize("pack", [[], ["--pack"]])
def test_stock_has_the_same_figures(pack: list[str], model_folder: Path, tmp_path: Path, capsys: Any) -> None:
    data = tmp_path / "text.txt"
    data.write_text("\n".join(DOCUMENTS * 9))
    both = [
        figures("--data", data, "--model", model_folder, "--seq-len", 32, *pack, *more) for more in ([], ["--no-patch"])
    ]
    ours, stocks = (one["data"] for one in both)
    assert ours["nats"] == pytest.approx(stocks["nats"], rel=1e-6)
    assert ours["tokens"] == stocks["tokens"]
    assert "calls" not in both[1]
    out = capsys.readouterr().out
    assert f"perplexity       {ours['perplexity']:,.3f}\n" in out
    assert "scored without logits, 0 with the logits built\n" in out


def test_16_bits_are_summed_in_float32(model_folder: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", KINDS["texts"])
    found = figures("--data", data, "--model", model_folder, "--dtype", "bfloat16")
    expected = figures("--data", data, "--model", model_folder)
    assert found["data"]["nats"] == pytest.approx(expected["data"]["nats"], rel=2e-3)
    assert found["data"]["nats"] != expected["data"]["nats"]
    assert found["data"]["nats"] * 2**12 % 1 != 0  # as the sum of losses above 1/16 in bfloat16 would be


def test_no_logits_of_a_batch_are_allocated(tmp_path: Path) -> None:
    from train.conftest import save_model

    folder = save_model(tmp_path / "wide", vocab_size=2**16)
    data = tmp_path / "text.txt"
    data.write_text("the tide came in and went out\n" * 64)
    logits_bytes = 8 * 128 * 2**16 * 4
    peaks = {}
    for patch in (True, False):
        config = EvalConfig(model=str(folder), data=(str(data),), seq_len=128, patch=patch)
        with track_allocations() as seen:
            run(config, lambda _: None)
        peaks[patch] = seen.peak_bytes
    assert peaks[False] > 2 * logits_bytes
    assert peaks[True] < logits_bytes


def test_the_first_documents_alone(model_folder: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", KINDS["texts"])
    found = figures("--data", data, "--model", model_folder, "--limit", 2)["data"]
    assert (found["documents"], found["bytes"]) == (2, len("".join(DOCUMENTS[:2])))


def test_rows_that_are_skipped_are_counted(model_folder: Path, tmp_path: Path, capsys: Any) -> None:
    rows = [*KINDS["conversations"], {"messages": CONVERSATION[:1]}]
    found = figures("--model", model_folder, "--data", write_rows(tmp_path / "rows.jsonl", rows))
    assert (found["data"]["documents"], found["data"]["skipped"]) == (1, 1)
    assert "of 1 documents, in 1 windows; 1 rows skipped\n" in capsys.readouterr().out


def test_a_file_is_replaced_when_it_is_whole(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    data, file = write_rows(tmp_path / "rows.jsonl", KINDS["texts"]), tmp_path / "old.json"
    file.write_text("old")
    arguments = ["eval", "--model", str(model_folder), "--data", str(data), "--json", str(file)]

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        assert main(arguments) == 2
    assert file.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old.json", "rows.jsonl"]
    assert "json: expected a file that can be written" in capsys.readouterr().err
    assert main(arguments) == 0
    found = json.loads(file.read_text())
    assert found["machine"]["torch"] == torch.__version__
    assert found["command"] == f"lowtide eval --model {model_folder} --data {data}"


ERRORS = {
    "no model": (["--data", "{rows}"], "model: expected a folder with a pretrained model"),
    "no data": (["--model", "{model}"], "data: expected --data, --tasks or both"),
    "a shape": (["--model", "llama-3-8b", "--data", "{rows}"], "A built-in shape has no weights"),
    "no such model": (["--model", "/nobody", "--data", "{rows}"], "model: expected a folder"),
    "no such data": (["--model", "{model}", "--data", "/nobody.txt"], "data: expected a file or folder"),
    "a stride": (["--model", "{model}", "--data", "{rows}", "--seq-len", "8", "--stride", "9"], "stride: expected at"),
    "a length": (["--model", "{model}", "--data", "{rows}", "--seq-len", "1"], "seq_len: expected a whole number"),
    "columns": (["--model", "{model}", "--data", "{rows}", "--columns", "x"], "columns: expected FORMAT=COLUMN"),
    "no such folder": (["--model", "{model}", "--data", "{rows}", "--json", "/nobody/x"], "json: expected a file"),
    "a folder": (["--model", "{model}", "--data", "{rows}", "--json", "{model}"], "json: expected a file, got the"),
    "a long name": (["--model", "{model}", "--data", "{rows}", "--json", "x" * 250], "json: expected a file that can"),
    "no tokens": (["--model", "{words}", "--data", "{blank}"], "data: expected texts with at least one token"),
    "no such task file": (["--model", "{model}", "--tasks", "nobody.yaml"], "tasks: expected a YAML file"),
    "no weights": (["--model", "{config}", "--data", "{rows}"], "model: expected a"),
    "no texts": (["--model", "{model}", "--data", "{other}"], "data: expected rows with a text"),
}


def _without_spaces(model_folder: Path, folder: Path) -> Path:
    """The model with a tokenizer whose tokens are words."""
    shutil.copytree(model_folder, folder)
    words = Tokenizer(WordLevel({"<|unknown|>": 0, "<|endoftext|>": 1}, unk_token="<|unknown|>"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_is_one_line(case: str, model_folder: Path, tmp_path: Path, capsys: Any) -> None:
    arguments, says = ERRORS[case]
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text((model_folder / "config.json").read_text())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "bare" / name).write_text((model_folder / name).read_text())
    names = {
        "{model}": model_folder,
        "{config}": tmp_path / "bare",
        "{words}": _without_spaces(model_folder, tmp_path / "words"),
        "{blank}": write_rows(tmp_path / "blank.jsonl", [{"text": "  "}]),
        "{rows}": write_rows(tmp_path / "rows.jsonl", KINDS["texts"]),
        "{other}": write_rows(tmp_path / "other.jsonl", [{"x": 1}]),
    }
    assert main(["eval", *(str(names.get(word, word)) for word in arguments)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"lowtide eval: {says}") or (says in err and err.startswith("lowtide eval: "))
    assert err.count("\n") == 1
