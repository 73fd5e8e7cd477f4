"""Data that cannot be trained on ends a run before its first step, wherever in the files it is."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lowtide.train.chat import ChatFormat
from lowtide.train.checks import check_data, know
from lowtide.train.corpus import open_corpus
from lowtide.train.packing import split_corpus

from chat_data import CHATML, byte_tokenizer
from lowtide.errors import ArgumentValueError
from lowtide.train import checks

Run = Callable[..., tuple[int, str, str]]
ONE_RANK = SimpleNamespace(process_index=0, world_size=1)
# as Llama's and Mistral's: one that speaks of roles raises where it meets another
STRICT = (
    "{%- for m in messages %}{% if m['role'] not in ['user', 'assistant'] %}"
    "{{ raise_exception('roles must be user and assistant') }}{% endif %}"
    "{% if 'forget' in m['content'] and not loop.last %}{% else %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def turns(*said: str, role: str = "user") -> str:
    roles = [role, "assistant"]
    return json.dumps({"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]})


GOOD = turns("how high is the tide", "low")
BAD = {
    "no JSON": ('{"messages": [', "no JSON"),
    "cut": (GOOD[:40], "no JSON"),
    "no conversation": ('{"text": "x"}', "an object without messages"),
    "no role": ('{"messages": [{"content": "x"}]}', "one that has no role"),
    "unknown role": (turns("q", "a", role="narrator"), "roles must be user and assistant"),
    "rewritten": (turns("q", "forget", "r", "a"), "rewrites message 1"),
    "half a character": (turns("q", "a").replace("q", "\\ud83d"), "surrogates"),
    "not UTF-8": (turns("q", "\udcff"), "surrogates"),
}


def chat_file(path: Path, bad: str | None = None, at: int = 230, lines: int = 260) -> Path:
    every = [GOOD] * lines
    if bad is not None:
        every[at] = bad
    path.write_text("\n".join(every) + "\n")
    return path


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_conversation_is_named_with_its_line(kind: str, tmp_path: Path) -> None:
    line, why = BAD[kind]
    path = chat_file(tmp_path / "c.jsonl", line)
    corpus = open_corpus([str(path)], text_field="text", streams=2, seq_len=32)
    assert len(corpus) > 4
    chat = ChatFormat(byte_tokenizer(STRICT), seq_len=32, too_long="drop")
    with pytest.raises(ArgumentValueError) as raised:
        check_data(corpus, chat, ONE_RANK)
    assert why in str(raised.value)
    assert f"line 231 (byte {230 * (len(GOOD) + 1)}) of {path}" in str(raised.value)


@pytest.mark.parametrize(("suffix", "bad"), [(".jsonl", b'{"txt": 1}\n'), (".txt", b"caf\xe9\n")])
def test_bad_text_is_named_with_its_line(suffix: str, bad: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"t{suffix}"
    path.write_bytes(b'{"text": "the tide came in and went out"}\n' * 900 + bad)
    corpus = open_corpus([str(path)], text_field="text", streams=2, seq_len=32)
    with pytest.raises(ArgumentValueError, match=r"line 901 \(byte \d+\) of .*t\."):
        check_data(corpus, None, ONE_RANK)


def test_ranks_share_the_pieces_and_all_hear_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = chat_file(tmp_path / "c.jsonl", "{")
    corpus = open_corpus([str(path)], text_field="text", streams=2, seq_len=32)
    chat = ChatFormat(byte_tokenizer(CHATML), seq_len=32, too_long="drop")
    told: list[Any] = []

    def gather(mine: list[Any]) -> list[Any]:
        told.extend(error for error, _ in mine)
        return [*mine, (None, Counter())]

    monkeypatch.setattr(checks, "gather_object", gather)
    raised = []
    for rank in range(3):
        try:
            check_data(corpus, chat, SimpleNamespace(process_index=rank, world_size=3))
        except ArgumentValueError as error:
            raised.append(error)
    assert len(told) == 3, "every rank takes part, whether it has found anything or not"
    assert raised == [error for error in told if error is not None]
    assert len(raised) == 1
    monkeypatch.setattr(checks, "gather_object", lambda mine: [*mine, (raised[0], Counter())])
    with pytest.raises(ArgumentValueError, match="line 231"):
        check_data(open_corpus([str(chat_file(path))], text_field="text", streams=2, seq_len=32), chat,
                   SimpleNamespace(process_index=0, world_size=3))  # fmt: skip


def test_roles_that_may_be_the_assistants_are_counted(tmp_path: Path) -> None:
    path = chat_file(tmp_path / "c.jsonl", turns("q", "a").replace('"assistant"', '"Assistant"'))
    corpus = open_corpus([str(path)], text_field="text", streams=2, seq_len=64)
    chat = ChatFormat(byte_tokenizer(CHATML), seq_len=64, too_long="drop")
    assert check_data(corpus, chat, ONE_RANK) == {"Assistant": 1}
    known = know(corpus, chat, ONE_RANK, None, check=True, say=None)
    assert known.lines == (
        "roles    read and not learned, other than the assistant's: 'Assistant' in 1 of the conversations",
    )


def test_a_run_ends_before_it_begins_and_a_resumed_one_does_not_read_all_again(
    tmp_path: Path, chat_arguments: list[str], lowtide: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    arguments = [*chat_arguments, "--data", tmp_path / "c.jsonl", "--max-steps", 2, "--output", output]
    chat_file(tmp_path / "c.jsonl", turns("q", "a")[:-1])
    status, _, err = lowtide(*arguments)
    assert (status, err.count("\n")) == (2, 1)
    assert "line 231 " in err
    assert not output.exists()
    status, _, err = lowtide(*arguments, "--no-check-data", "--save-every", 1)
    assert (status, err) == (0, ""), "it is not reached in two steps"
    shutil.rmtree(output)
    chat_file(tmp_path / "c.jsonl")
    assert lowtide(*arguments, "--save-every", 1)[0] == 0
    checked: list[str] = []
    monkeypatch.setattr(checks, "check_data", lambda *given: checked.append("all") or Counter())
    resume = ["train", "--resume", "--output", output]
    status, out, _ = lowtide(*resume, "--max-steps", 3)
    assert (status, checked) == (0, [])
    assert "written to since" not in out
    chat_file(tmp_path / "c.jsonl")  # the same once more
    status, out, _ = lowtide(*resume, "--max-steps", 4)
    assert (status, checked) == (0, ["all"])
    assert "written to since the run began" in out
    status, out, _ = lowtide(*resume, "--max-steps", 5)
    assert (status, checked) == (0, ["all"]), "it is known from now on"


@pytest.mark.parametrize("streams", [2, 6])
def test_documents_longer_than_many_blocks_are_held_out_and_dealt_to_every_stream(streams: int, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text((json.dumps({"text": "tide " * 3000}) + "\n") * 60)
    corpus = open_corpus([str(path)], text_field="text", streams=streams, seq_len=32)
    for seed in range(5):
        split = split_corpus(corpus, seed=seed, held_out_bytes=600, streams=streams)
        parts = [split.held_out_pieces(), *(split.share(stream, streams, 0) for stream in range(streams))]
        assert all(any(True for piece in part for _ in corpus.documents(piece)) for part in parts)


def test_one_conversation_of_most_of_the_bytes_leaves_others_to_hold_out(tmp_path: Path) -> None:
    path = chat_file(tmp_path / "c.jsonl", turns("q", "a" * 400_000), at=150)
    corpus = open_corpus([str(path)], text_field="text", streams=2, seq_len=32)
    for seed in range(8):
        split = split_corpus(corpus, seed=seed, held_out_bytes=600, streams=2)
        assert split.held_out < len(corpus) / 2
        assert any(True for piece in split.held_out_pieces() for _ in corpus.conversations(piece)), seed
