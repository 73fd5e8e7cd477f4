"""The wheel and the source distribution: what they hold, their metadata, and an install into an empty environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement

import lowtide
from promises import promise

pytestmark = promise("package")
ROOT = Path(__file__).parents[2]
BUILDS = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "SECURITY.md", "src")
BUILD = "import sys; from setuptools import build_meta; build_meta.{}(sys.argv[1])"


def build(what: str, source: Path, into: Path) -> Path:
    """Build one distribution by setuptools itself: no network, and nothing written to the repository."""
    into.mkdir()
    command = [sys.executable, "-W", "ignore", "-c", BUILD.format(what), str(into)]
    ended = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    (found,) = into.iterdir()
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the source distribution, and the wheel that is built from it alone."""
    folder = tmp_path_factory.mktemp("dist")
    tree = folder / "tree"
    tree.mkdir()
    for name in (*BUILDS, "constraints.txt"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(source, tree / name)
    sdist = build("build_sdist", tree, folder / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return sdist, build("build_wheel", unpacked, folder / "wheel")


def test_the_wheel_has_each_file_of_the_package_and_the_source_what_a_build_needs(built: tuple[Path, Path]) -> None:
    ours = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "lowtide").rglob("*") if path.is_file()}
    with zipfile.ZipFile(built[1]) as wheel:
        found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == {name for name in ours if "__pycache__" not in name}
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= set(BUILDS)
    assert not any(name.startswith(("tests", "docs", "benchmarks")) for name in names)


def test_the_metadata_is_valid_and_says_what_the_package_says(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        text = wheel.read(name).decode()
    about = Metadata.from_email(text, validate=True)
    assert about.name == "lowtide"
    assert str(about.version) == lowtide.__version__
    assert about.license_expression == "Apache-2.0"
    assert about.description == (ROOT / "README.md").read_text()
    assert Parser().parsestr(text)["Description-Content-Type"] == "text/markdown"
    needed = [one for one in about.requires_dist or [] if one.marker is None]
    assert needed == [Requirement("torch>=2.11")]


def test_the_version_stands_in_one_place() -> None:
    holding = [
        name
        for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
        if Path(name).suffix in (".py", ".toml", ".cff", ".yml", ".in") and not name.startswith("tests/")
        if f'"{lowtide.__version__}"' in (ROOT / name).read_text()
    ]
    assert holding == ["src/lowtide/__init__.py"]


TRY = """
import torch, lowtide
assert lowtide.__file__.startswith({where!r}), lowtide.__file__
x, w = torch.randn(5, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
y = torch.randint(11, (5,))
lowtide.linear_cross_entropy(x, w, y).backward()
torch.testing.assert_close(x.grad, torch.autograd.grad(torch.nn.functional.cross_entropy(x @ w.T, y), x)[0])
"""


@pytest.mark.slow
def test_it_runs_in_an_empty_environment(built: tuple[Path, Path], tmp_path: Path) -> None:
    """With torch, and what that needs, from here: an install of it takes minutes."""
    place = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    python = place / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", "--no-deps", built[1]]
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # where pip would find it
    subprocess.run(pip, check=True, capture_output=True, env=alone)
    paths = sysconfig.get_paths(vars={"base": str(place), "platbase": str(place)})
    (Path(paths["purelib"]) / "torch.pth").write_text(sysconfig.get_paths()["purelib"])
    for arguments in (["-c", TRY.format(where=str(place))], ["-m", "lowtide", "plan", "--help"]):
        ended = subprocess.run([python, "-I", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr[-2000:]
    command = [python.with_name("lowtide"), "--help"]
    assert "train" in subprocess.check_output(command, cwd=tmp_path, text=True, env=alone)
