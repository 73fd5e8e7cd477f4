"""Conversations: which tokens are trained on, whatever form the data and the template have."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lowtide.train.chat import ChatFormat, use_template
from lowtide.train.conversations import Completion, Conversation, Malformed, read_conversation
from lowtide.train.corpus import Corpus, open_corpus
from lowtide.train.packing import text_documents
from lowtide.train.streams import IGNORED
from lowtide.train.tokenizer import tokenize_with
from tokenizers import processors

from chat_data import CHATML, byte_tokenizer
from lowtide.errors import ArgumentValueError

Run = Callable[..., tuple[int, str, str]]

MARKED = (
    "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
# as Qwen3's and DeepSeek's: what was thought in a turn is gone once there is a later one
FORGETFUL = (
    "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chat_format(template: str | None = CHATML, seq_len: int = 10_000, too_long: str = "truncate") -> ChatFormat:
    return ChatFormat(byte_tokenizer(template), seq_len=seq_len, too_long=too_long)


def trained(chat: ChatFormat, line: dict[str, Any]) -> list[str]:
    """The stretches of a line's text that are trained on."""
    document = chat.document(read_conversation(line, "here"))
    assert document.labels is not None
    assert all(label in (IGNORED, token) for label, token in zip(document.labels, document.ids, strict=True))
    runs: list[list[int]] = [[]]
    for label in document.labels:
        if label != IGNORED:
            runs[-1].append(label)
        elif runs[-1]:
            runs.append([])
    return [chat.tokenizer.decode(run) for run in runs if run]


def messages(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


TWO_TURNS = messages(
    ("system", "be brief"), ("user", "héllo 🌊"), ("assistant", "hi 漢 "), ("user", "more"), ("assistant", "no\n more")
)


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefixes", "marked"])
def test_every_turn_of_the_assistant_and_its_end_is_trained(template: str) -> None:
    assert trained(chat_format(template), TWO_TURNS) == ["hi 漢 <|im_end|>", "no\n more<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefixes", "marked"])
def test_the_tokens_are_those_of_the_rendered_text(template: str) -> None:
    chat = chat_format(template)
    ids = chat.document(read_conversation(TWO_TURNS, "here")).ids
    expected = chat.tokenizer.apply_chat_template(TWO_TURNS["messages"], tokenize=True, return_dict=False)
    assert list(ids) == list(expected)


def test_random_conversations_are_masked_as_a_parser_of_the_text_would() -> None:
    rng = random.Random(3)
    chat = chat_format()
    for _ in range(40):
        turns = [(rng.choice(["user", "assistant"]), rng.choice(["a b", "é", "<x>", "\n", "🌊 "])) for _ in range(6)]
        expected = [content + "<|im_end|>" for role, content in turns if role == "assistant"]
        assert trained(chat, messages(("user", "q"), *turns)) == expected


SHAREGPT = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (SHAREGPT, ["a<|im_end|>"]),
        ({"conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, ["a<|im_end|>"]),
        ({"prompt": "what ", "completion": "that"}, ["that<|endoftext|>"]),
        ({"prompt": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "old"}, {"role": "user",
          "content": "r"}], "completion": [{"role": "assistant", "content": "new"}]}, ["new<|im_end|>"]),
        ({**messages(("user", "q"), ("assistant", "a")), "tools": [{"type": "function"}]}, ["a<|im_end|>"]),
        ({**messages(("user", "q"), ("assistant", "a")), "tools": '[{"type": "function"}]'}, ["a<|im_end|>"]),
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": []},
                       {"role": "tool", "content": "4"}, {"role": "assistant", "content": "four"}]},
         ["<|im_end|>", "four<|im_end|>"]),
    ],
    ids=["sharegpt", "roles", "completion", "prompt messages", "tools", "tools as text", "tool calls"],
)  # fmt: skip
def test_other_forms(line: dict[str, Any], expected: list[str]) -> None:
    assert trained(chat_format(), line) == expected


def test_tools_and_sharegpts_system_reach_the_template() -> None:
    chat = chat_format()
    with_tools = {**messages(("user", "q"), ("assistant", "a")), "tools": [{"name": "sum"}]}
    for line, words in ((with_tools, '<|im_start|>tools\n[{"name": "sum"}]'), (SHAREGPT, "<|im_start|>system\ns")):
        conversation = read_conversation(line, "here")
        assert isinstance(conversation, Conversation)
        text, _ = chat.render(conversation)
        assert text.startswith(words)


def test_a_prompt_and_its_completion_know_no_template() -> None:
    chat = chat_format(None)
    document = chat.document(read_conversation({"prompt": "ab", "completion": "c"}, "here"))
    assert chat.tokenizer.decode(document.ids) == "abc<|endoftext|>"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"prompt": "2 + 2 = ", "completion": "4"}, [" 4<|endoftext|>"]),
        ({"prompt": "2 + 2 =", "completion": " 4"}, [" 4<|endoftext|>"]),
        ({"prompt": "1 4", "completion": " 4"}, [" 4<|endoftext|>"]),
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "4"}]}, [" 4<|im_end|>"]),
    ],
    ids=["space before", "space behind", "another before", "header"],
)
def test_a_first_token_with_the_space_before_it_is_trained(line: dict[str, Any], expected: list[str]) -> None:
    """The space is the prompt's, or the header's, and one token with the answer's first letter."""
    template = CHATML.replace("assistant\n", "assistant ").replace("['role'] + '\n'", "['role'] + ' '")
    chat = ChatFormat(byte_tokenizer(template, (("Ġ", "4"),)), seq_len=99, too_long="drop")
    assert trained(chat, line) == expected


def test_an_answer_to_nothing_is_read_and_not_learned() -> None:
    """ShareGPT's conversations may begin with one; many templates cannot render what is before it."""
    refusing = "{%- if not messages %}{{ raise_exception('empty') }}{% endif %}" + CHATML
    line = messages(("assistant", "hello"), ("user", "q"), ("assistant", "a"))
    assert trained(chat_format(refusing), line) == ["a<|im_end|>"]
    assert not chat_format(refusing).document(read_conversation(messages(("assistant", "a")), "here")).ids


@pytest.mark.parametrize("too_long", ["truncate", "drop"])
def test_a_long_conversation_is_cut_or_left_out(too_long: str) -> None:
    line = messages(("user", "q"), ("assistant", "a" * 50))
    whole = len(chat_format().document(read_conversation(line, "here")).ids)
    for seq_len in (whole, whole - 1, 24):
        document = chat_format(seq_len=seq_len, too_long=too_long).document(read_conversation(line, "here"))
        assert document.cut == (seq_len < whole)
        assert len(document.ids) == (0 if document.cut and too_long == "drop" else seq_len)


def test_what_has_nothing_to_train_on_is_left_out() -> None:
    line = messages(("user", "a long question"), ("assistant", "a"))
    assert len(chat_format(seq_len=12).document(read_conversation(line, "here")).ids) == 0
    assert len(chat_format().document(read_conversation(messages(("user", "q")), "here")).ids) == 0


def test_a_template_that_rewrites_history_is_refused_and_one_turn_is_not() -> None:
    with pytest.raises(ArgumentValueError, match=r"rewrites message 2 of here.*generation"):
        trained(chat_format(FORGETFUL), TWO_TURNS)
    one = messages(("user", "q"), ("assistant", "a"))
    assert trained(chat_format(FORGETFUL), one) == ["<think></think>a<|im_end|>"]


def test_a_template_that_raises_names_the_line() -> None:
    strict = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ArgumentValueError, match="here: roles must alternate"):
        trained(chat_format(strict), TWO_TURNS)


def test_no_template_says_where_one_comes_from() -> None:
    with pytest.raises(ArgumentValueError, match="--chat-template"):
        trained(chat_format(None), TWO_TURNS)


@pytest.mark.parametrize("text", [None, "{% for m in %}"], ids=["no file", "no template"])
def test_a_template_file_that_cannot_be_used(text: str | None, tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ArgumentValueError, match=r"chat_template.*t\.jinja"):
        use_template(byte_tokenizer(), str(file))


@pytest.mark.parametrize(
    "line",
    [
        {"messages": []},
        {"messages": "hello"},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"conversations": [{"from": "human"}]},
        {"conversations": [{"from": "the dog", "value": "woof"}]},
        {"prompt": [{"role": "user", "content": "q"}], "completion": "text"},
        {**TWO_TURNS, "tools": "no json"},
        {**TWO_TURNS, "tools": ["name"]},
        {**TWO_TURNS, "chat_template_kwargs": 3},
        {"question": "q", "answer": "a"},
        3,
    ],
    ids=str,
)
def test_a_line_that_is_no_conversation(line: Any) -> None:
    with pytest.raises(Malformed):
        read_conversation(line, "here")


def test_kinds_of_files_are_told_apart(tmp_path: Path) -> None:
    chat, text, both = (tmp_path / name for name in ("c.jsonl", "t.jsonl", "b.jsonl"))
    chat.write_text((json.dumps(TWO_TURNS) + "\n") * 100)
    text.write_text('{"text": "x"}\n' * 2000)
    both.write_text((json.dumps({**TWO_TURNS, "text": "x"}) + "\n") * 100)
    kinds = [open_corpus([str(f)], text_field="text", streams=1, seq_len=64).chat for f in (chat, text, both)]
    assert kinds == [True, False, False]
    with pytest.raises(ArgumentValueError, match=r"c\.jsonl and .*t\.jsonl"):
        open_corpus([str(chat), str(text)], text_field="text", streams=1, seq_len=64)


def test_pieces_of_conversations_are_the_conversations_once(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    lines = [messages(("user", f"q {i}"), ("assistant", "a" * (i % 97))) for i in range(300)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    corpus = open_corpus([str(path)], text_field="text", streams=2, seq_len=32)
    read = [one for piece in range(len(corpus)) for one in corpus.conversations(piece)]
    assert [list(one.messages) for one in read if isinstance(one, Conversation)] == [x["messages"] for x in lines]
    assert next(corpus.documents(0)) == "q 0\n"


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(TWO_TURNS) + "\n" + '{"messages": ' + "\n")
    broken = Corpus((path,), (path.stat().st_size,), 10_000, "text", 0, True)
    with pytest.raises(ArgumentValueError, match=r"line \d+ \(byte \d+\) of .*c\.jsonl: no JSON"):
        list(broken.conversations(0))


def test_a_completion_is_no_conversation() -> None:
    assert isinstance(read_conversation({"prompt": "a", "completion": "b"}, "here"), Completion)


def framed(before: str = "<s>", after: str = "", template: str | None = CHATML) -> Any:
    """A tokenizer that puts tokens around a text by itself, as Llama's does in front of it and T5's behind it."""
    tokenizer = byte_tokenizer(template)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    marks = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "<|endoftext|>")]
    single = " ".join(part for part in (before, "$A", after) if part)
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=marks)
    return tokenizer


@pytest.mark.parametrize(
    ("before", "after", "text", "expected"),
    [
        ("", "", "ab", "ab<|endoftext|>"),
        ("<s>", "", "ab", "<s>ab<|endoftext|>"),
        ("<s>", "", "<s>ab", "<s>ab<|endoftext|>"),
        ("<s>", "", "ab<|endoftext|>", "<s>ab<|endoftext|>"),
        ("", "<|endoftext|>", "ab", "ab<|endoftext|>"),
        ("<s>", "<|endoftext|>", "<s>ab<|endoftext|>", "<s>ab<|endoftext|>"),
    ],
)
def test_a_text_begins_as_the_tokenizer_has_it_and_ends_once(
    before: str, after: str, text: str, expected: str, tmp_path: Path
) -> None:
    tokenizer = framed(before, after)
    (tmp_path / "a.txt").write_text(text)
    corpus = Corpus((tmp_path / "a.txt",), (len(text),), 1000, "text", 0)
    (document,) = text_documents(corpus, tokenize_with(tokenizer), eos=tokenizer.eos_token_id)(0)
    assert tokenizer.decode(document.ids) == expected
    line = {"prompt": text[:-1], "completion": text[-1]} if text == "ab" else {"prompt": "", "completion": text}
    completion = ChatFormat(tokenizer, seq_len=99, too_long="drop").document(read_conversation(line, "here"))
    assert tokenizer.decode(completion.ids) == expected


def test_of_a_completion_the_end_is_learned_and_the_beginning_of_text_is_not() -> None:
    chat = ChatFormat(framed(), seq_len=99, too_long="truncate")
    assert trained(chat, {"prompt": "ab", "completion": "c"}) == ["c<|endoftext|>"]
    assert trained(chat, {"prompt": "ab", "completion": "c<|endoftext|>"}) == ["c<|endoftext|>"]
    assert trained(chat, {"prompt": "ab<|endoftext|>", "completion": ""}) == ["<|endoftext|>"]
    assert trained(chat, {"prompt": "", "completion": "c"}) == ["c<|endoftext|>"]
    (cut,) = trained(ChatFormat(framed(), seq_len=5, too_long="truncate"), {"prompt": "ab", "completion": "cdef"})
    assert cut == "cd", "what was cut does not end"


def test_a_template_alone_says_how_a_conversation_begins_and_ends() -> None:
    chat = ChatFormat(framed(), seq_len=999, too_long="drop")
    ids = chat.document(read_conversation(TWO_TURNS, "here")).ids
    assert chat.tokenizer.decode(ids) == chat.tokenizer.apply_chat_template(TWO_TURNS["messages"], tokenize=False)
