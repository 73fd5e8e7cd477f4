"""Finding data and models: what a name stands for, what a folder holds, and the errors, without heavy imports."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from lowtide.errors import ArgumentValueError
from lowtide.train.files import Source, Sources, find_data, load_json, read_lines, read_text

PNG = bytes(range(256))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    (path / "sub").mkdir(parents=True)
    (path / "b.txt").write_text("text\n")
    (path / "sub" / "a.md").write_text("more text\n")
    return path


def names(sources: Sources) -> list[tuple[str, str]]:
    return [(file.path.name, file.kind) for file in sources.files]


def error_of(*paths: str) -> str:
    with pytest.raises(ArgumentValueError) as raised:
        find_data(paths)
    return str(raised.value)


def test_a_format_is_found_by_the_suffix(tmp_path: Path) -> None:
    files = dict.fromkeys(("a.txt", "a.py", "noend"), "text") | dict.fromkeys(("a.JSONL", "a.ndjson"), "jsonl")
    files |= {"a.json": "json", "a.csv": "csv", "a.tsv": "csv", "a.parquet": "parquet"}
    for name in files:
        (tmp_path / name).write_text("PAR1")
    sources = find_data([str(tmp_path / name) for name in files])
    assert names(sources) == list(files.items())
    assert sources.bytes == 4 * len(files)
    assert not sources.is_text
    assert find_data([str(tmp_path / "a.txt")]).is_text


def test_a_folder_is_searched_and_what_holds_no_data_is_counted(folder: Path) -> None:
    (folder / "picture.png").write_bytes(PNG)
    (folder / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    (folder / "empty.txt").write_text("")
    (folder / ".hidden.txt").write_text("hidden")
    (folder / ".git").mkdir()
    (folder / ".git" / "x.txt").write_text("hidden")
    (folder / "LICENSE").write_text("without a suffix")
    run = folder / "run"
    run.mkdir()
    (run / "run.json").write_text('{"lowtide": "0.1"}')
    (run / "log.jsonl").write_text("{}\n")
    sources = find_data([str(folder)])
    assert (names(sources), sources.skipped) == ([("b.txt", "text"), ("a.md", "text")], 3)


@pytest.mark.parametrize(
    ("text", "kind"),
    [('[{"text": "x"}]', "json"), ('\ufeff [\n {"a": 1}]', "json"), ('{"a": 1}', "text"), ("[1, 2]", "text")],
)
def test_a_json_in_a_folder_is_rows_only_if_it_is_a_list_of_objects(folder: Path, text: str, kind: str) -> None:
    (folder / "x.json").write_text(text)
    assert ("x.json", kind) in names(find_data([str(folder)]))


def test_a_file_with_two_names_is_taken_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what is held out under one name is trained on under the other."""
    monkeypatch.chdir(folder)
    (folder.parent / "link.txt").symlink_to(folder / "b.txt")
    sources = find_data(["b.txt", str(folder), "../link.txt", "../data/sub/a.md"])
    assert [file.path for file in sources.files] == [Path("b.txt"), folder / "sub" / "a.md"]


def test_saved_datasets_are_found_by_their_files(folder: Path) -> None:
    for name, files in {"one": ("dataset_info.json", "state.json"), "many": ("dataset_dict.json",)}.items():
        (folder / name).mkdir()
        for file in (*files, "data.arrow"):
            (folder / name / file).write_text("{}")
    assert names(find_data([str(folder / "one")])) == [("one", "saved")]
    assert names(find_data([str(folder)])) == [("many", "saved"), ("one", "saved"), ("b.txt", "text"), ("a.md", "text")]
    assert find_data([str(folder / "one")]).bytes == 6


def test_without_names_it_is_the_standard_library() -> None:
    first, second = find_data(()), find_data(())
    assert first == second
    assert first.is_text
    assert first.bytes > 2**20
    assert not [file for file in first.files if {"site-packages", "test", "tests"} & {*file.path.parts}]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("{0}/data/c.txt", "data/c.txt (No such file or directory). Did you mean b.txt?"),
        ("./gone", "./gone (No such file or directory)."),
        ("~nobody/x", "~nobody/x (No such file or directory)."),
        ("gone.jsonl", "gone.jsonl (No such file or directory)."),
        ("squad", "a dataset of the Hub as org/name, got squad (No such file or directory)."),
        ("{0}/empty.txt", "empty.txt, which is empty."),
        ("{0}/binary.bin", "binary.bin, which is binary. Give UTF-8 text"),
        ("{0}/latin.txt", "latin.txt, which is not UTF-8 text."),
        ("{0}/nothing", "nothing, which has none. Files without a suffix"),
        ("/dev/null", "/dev/null, which is not a regular file."),
        ("{0}/broken.txt", "broken.txt (No such file or directory)."),
    ],
)
def test_a_name_that_is_no_data_is_one_clear_error(name: str, expected: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.bin").write_bytes(b"\0text")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    (tmp_path / "nothing").mkdir()
    (tmp_path / "broken.txt").symlink_to(tmp_path / "gone")
    assert expected.format(tmp_path) in error_of(name.format(tmp_path))


def test_a_name_that_is_no_path_is_a_dataset_of_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("org/name", "org/OpenHermes-2.5"):
        assert find_data([name]).files == (Source(Path(name), "hub"),)
    assert find_data(["org/name:big"]).files == (Source(Path("org/name"), "hub", "big"),)
    monkeypatch.chdir(folder.parent)
    assert names(find_data(["data/sub"])) == [("a.md", "text")], "a path wins"


@pytest.mark.parametrize("seed", range(8))
def test_ranges_of_a_text_are_the_text(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    alphabet = "ab\n" if seed % 2 else "aé漢🌊\n" if seed % 4 else "é漢🌊"  # the last has no line end to cut at
    text = "".join(rng.choices(alphabet, k=rng.randint(1, 5000)))
    path = tmp_path / "a.txt"
    path.write_text(text, newline="")
    size = path.stat().st_size
    step = rng.randint(max(8, size // 50), size + 10)
    parts = [read_text(path, at, at + step) for at in range(0, size, step)]
    assert "".join(parts) == text
    if "\n" in alphabet:
        assert all(part.endswith("\n") for part in parts[:-1] if part)


@pytest.mark.parametrize(
    ("line", "got"),
    [
        (b"{", "no valid JSON (Expecting property name"),
        (b"[1]", "another JSON value"),
        (b'{"a": "\xff"}', "no valid JSON ('utf-8' codec can't decode"),
        (b'{"a": "\\ud83d"}', "surrogates not allowed"),
        (b'{"\\udcff": 1}', "surrogates not allowed"),
        (b"[" * 100_000, "no valid JSON (maximum recursion depth"),
    ],
)
def test_a_bad_line_is_named(line: bytes, got: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": "\\ud83c\\udf0a"}\n\n' + line + b"\n")
    rows = read_lines(path)
    assert next(rows)[0] == {"a": "🌊"}
    with pytest.raises(ArgumentValueError) as raised:
        next(rows)
    assert got in str(raised.value)
    assert f"line 3 of {path}. Fix the line." in str(raised.value)


def test_numbers_that_no_table_holds() -> None:
    assert load_json(b"[NaN, -Infinity, 9007199254740993, -1e400, 18446744073709551616]")[:3] == [None, None, 2**53 + 1]
    assert load_json(b"18446744073709551616") == 2.0**64


def test_text_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"fine\n" * 10 + b"caf\xe9\n")
    with pytest.raises(ArgumentValueError, match=r"byte 53 of .*a\.txt on\. Fix the file"):
        read_text(path, 0, 100)
    path.unlink()
    for read in (lambda: read_text(path, 0, 9), lambda: list(read_lines(path)), lambda: find_data([str(path)])):
        with pytest.raises(ArgumentValueError, match=r"a\.txt \(No such file or directory\)"):
            read()
