"""What a figure was taken on."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from lowtide.measure.machine import describe_machine, source_commit

ROOT = Path(__file__).parents[2]


def test_the_machine_is_json_with_versions_of_what_was_asked_for() -> None:
    told = describe_machine(["packaging", "no-such-package"])
    assert told["torch"] == torch.__version__
    assert told["packaging"]
    assert told["no-such-package"] is None
    assert (told["driver"] is None) == (not torch.cuda.is_available())
    json.dumps(told)


def test_the_commit_is_the_sources_own_or_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMMIT", raising=False)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    if head.returncode == 0:
        assert (source_commit() or "").removesuffix("-dirty") == head.stdout.strip()
    monkeypatch.setenv("PATH", "")  # no git
    assert source_commit() is None
    monkeypatch.setenv("COMMIT", "abc")
    assert source_commit() == "abc"
