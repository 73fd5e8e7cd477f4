"""``lowtide eval --tasks``: lm-evaluation-harness's own table."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from lowtide.cli import main


def test_without_the_harness_it_is_one_line(model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["eval", "--model", str(model_folder), "--tasks", "hellaswag"]) == 2
    err = capsys.readouterr().err
    assert err == "lowtide eval: expected lm_eval to be installed, got none. pip install 'lowtide[train,trl,eval]'\n"


@pytest.mark.filterwarnings("ignore")
def test_tasks_print_the_harness_s_table(
    model_folder: Path, tasks: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    pytest.importorskip("lm_eval")
    file, rows = tmp_path / "figures.json", tmp_path / "rows.jsonl"
    texts = [row["text"] for row in json.loads((tasks["tide_text"].parent / "rows.json").read_text())]
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    names = f"{tasks['tide_choice']},{tasks['tide_text']}"
    arguments = ["--model", model_folder, "--data", rows, "--tasks", names, "--seq-len", 128, "--json", file]
    assert main(["eval", *map(str, arguments)]) == 0
    out = capsys.readouterr().out
    assert "|   Tasks   |Version|Filter|n-shot|" in out
    found = json.loads(file.read_text())
    assert set(found["tasks"]["results"]) == {"tide_choice", "tide_text"}
    assert found["calls"]["built"] == 0
    # of the same texts the harness and --data compute the same
    of_harness = found["tasks"]["results"]["tide_text"]["bits_per_byte,none"]
    assert found["data"]["bits_per_byte"] == pytest.approx(of_harness, rel=1e-6)


MISSING = {
    "name": ("helaswag", "a task of lm-evaluation-harness or a YAML file, got helaswag. Did you mean hellaswag?"),
    "data": ("{task}", "tasks with their data, got {task} ("),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", MISSING)
def test_what_is_not_there_is_one_line(
    what: str, model_folder: Path, tasks: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    pytest.importorskip("lm_eval")
    task = tmp_path / "task.yaml"
    task.write_text(re.sub("test: .*json", "test: /nobody.json", tasks["tide_choice"].read_text()))
    name, says = (text.format(task=task) for text in MISSING[what])
    assert main(["eval", "--model", str(model_folder), "--tasks", name]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"lowtide eval: tasks: expected {says}")
