"""The benchmark of skipped tiles: rows of calls that skip, a random head, a model's own hidden states."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.results import result
from lowtide.bench.skip import held_out, measure_head, peers, random_head
from lowtide.bench.train_config import SkipBenchConfig
from lowtide.cli import main

CPU = torch.device("cpu")


def config(**more: Any) -> SkipBenchConfig:
    small = {"tokens": 150, "hidden": 24, "vocab": 1100, "calls": 2, "warm": 0, "reps": 1}
    return SkipBenchConfig(**{**small, **more})


def test_names() -> None:
    names = [peer.name for peer in peers(config(accepted=("1e-2", "5e-3"), unbiased=True))]
    assert names == [
        "lowtide",
        *("lowtide skip=1e-2", "lowtide skip=1e-2 unbiased", "lowtide skip=5e-3", "lowtide skip=5e-3 unbiased"),
    ]


def test_errors_and_speeds_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A panel for each limit, a line for each shape and form; labels are apart, and what cannot run has no point."""
    pytest.importorskip("transformers")
    figure_of = pytest.importorskip("matplotlib.figure").Figure
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import skipping

    def row(name: str, speed: float, dx: float, dw: float) -> dict[str, Any]:
        return {"name": f"lowtide{name}", "speed": speed, "input_error": dx, "weight_error": dw}

    rows = [
        {"name": "three GEMMs", "speed": 1.0}, row("", 0.94, 1.8e-3, 2.5e-3), row(" skip=5e-3", 1.5, 3.4e-3, 4.5e-3),
        row(" skip=5e-3 unbiased", 1.48, 4.6e-3, 4e-3), row(" skip=3e-3", 1.375, 2.2e-3, 2.8e-3),
        row(" skip=3e-3 unbiased", 1.37, 2.7e-3, 2.74e-3),
    ]  # fmt: skip
    other = [row("", 0.95, 1.8e-3, 2.9e-3), {"name": "lowtide skip=5e-3", "cannot": "out of memory"}]
    axes = {"tokens": 16384, "hidden": 1024}
    shapes = [{**axes, "vocab": 65536, "rows": rows, "per_token": rows[:2]}, {**axes, "vocab": 9, "rows": other}]
    figures, write = list[Any](), figure_of.savefig
    monkeypatch.setattr(figure_of, "savefig", lambda self, *a, **k: (figures.append(self), write(self, *a, **k)))
    skipping.draw_heads(tmp_path / "a.png", shapes)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    ((of_mean, per_token),) = (figure.axes for figure in figures)
    lines = [line.get_xydata().tolist() for line in of_mean.lines[:-1]]
    assert lines == [
        [[2.8e-3, 1.375], [4.5e-3, 1.5]], [[2.74e-3, 1.37], [4.6e-3, 1.48]], [[2.5e-3, 0.94]], [[2.9e-3, 0.95]],
    ]  # fmt: skip
    assert (of_mean.get_ylabel(), per_token.get_ylabel()) == ("three GEMMs / time", "four GEMMs / time")
    boxes = [(text.get_text(), text.get_window_extent()) for text in of_mean.texts]
    assert [name for name, _ in boxes] == ["5e-3", "3e-3", "5e-3 unbiased", "3e-3 unbiased", "dense", "dense"]
    assert not any(a.overlaps(b) for (_, a), (_, b) in combinations(boxes, 2))


def test_where_nothing_can_be_skipped_rows_have_the_reason() -> None:
    asked = config(accepted=("1e-2",), tokens=20, vocab=50)
    *_, row = measure_head(*random_head(asked, torch.float32, CPU), asked)
    assert row.keys() == {"name", "cannot", "unsupported"}
    assert "No tile is skipped: its kernels are for GPUs" in row["cannot"]


def test_a_random_head_is_as_concentrated_as_a_trained_one() -> None:
    asked = config(tokens=500, hidden=256, vocab=5000)
    x, w, y = random_head(asked, torch.bfloat16, CPU)
    assert (x.shape, w.shape, y.shape, x.dtype, w.dtype) == ((500, 256), (5000, 256), (500,), *2 * (torch.bfloat16,))
    logits = x.double() @ w.double().T
    assert 0.2 < torch.nn.functional.cross_entropy(logits, y).item() < math.log(5000) / 2
    largest = logits.softmax(1).mean(0).sort(descending=True).values
    assert largest[:500].sum() > 0.5, "a tenth of the classes has most of the mean probability"
    assert all(map(torch.equal, (x, w, y), random_head(asked, torch.bfloat16, CPU)))
    assert not torch.equal(w, random_head(config(tokens=500, hidden=256, vocab=5000, seed=1), torch.bfloat16, CPU)[1])


def test_a_models_own_hidden_states(tmp_path: Path) -> None:
    """They times the head are the model's logits, sequence by sequence; the text has to be long enough."""
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from train.conftest import save_model

    folder, text = save_model(tmp_path / "model"), tmp_path / "held-out.txt"
    text.write_text("the tide is low, and the sand is dry " * 3)
    asked = config(model=str(folder), data=(str(text),), tokens=50, seq_len=16)
    (x, w, y), same = held_out(asked, torch.float32, CPU)
    assert same == asked, "the model has no soft cap"
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "final_logit_softcapping": 7.0}))
    assert held_out(asked, torch.float32, CPU)[1] == replace(asked, softcap=7.0)
    (folder / "config.json").write_text(json.dumps(described))
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(text.read_text())["input_ids"])[:51]
    assert torch.equal(y, ids[1:])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = torch.cat([model(part[None]).logits[0] for part in ids[:-1].split(16)])
    torch.testing.assert_close(x @ w.T, logits)

    words = ["bench", "skip", "--model", str(folder), "--data", str(text), "--device", "cpu", "--seq-len", "16"]
    assert main([*words, "--tokens", "50", "--reps", "1", "--output", str(tmp_path)]) == 0
    told = result(tmp_path)
    assert (told["tokens"], told["hidden"], told["vocab"]) == (50, *reversed(w.shape))
    assert "speed" in told["rows"][1]
    assert main([*words, "--tokens", "5000", "--output", str(tmp_path / "none")]) == 2
