"""The sample of model types on another release of transformers: the folder named by LOWTIDE_TRANSFORMERS."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = os.environ.get("LOWTIDE_TRANSFORMERS", "")
HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER, reason="LOWTIDE_TRANSFORMERS names no folder with another transformers"),
]


def run(*arguments: str) -> str:
    paths = [str(Path(FOLDER).resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    result = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=HERE.parent.parent, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return result.stdout


def test_the_folder_is_what_runs() -> None:
    where = run("-c", "import transformers; print(transformers.__file__)")
    assert Path(where.strip()).is_relative_to(Path(FOLDER).resolve())


@pytest.mark.parametrize("file", ["test_every_type.py", "test_forms.py", "test_parts.py"])
def test_the_sample(file: str) -> None:
    run("-m", "pytest", "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", str(HERE / file))
