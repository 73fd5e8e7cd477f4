"""Conversations as .jsonl files hold them: three ways to write one, and one way to have it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Who speaks in ShareGPT's words, and in a chat template's.
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
KINDS = "messages (role, content), conversations (from, value), or prompt and completion"


class Malformed(ValueError):
    """A line of .jsonl that is no conversation, and why."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages for a chat template.

    Attributes:
        messages: as transformers' templates take them: ``role``, ``content`` and whatever else the template reads.
        tools: JSON schemas of functions that may be called; None where there are none.
        options: further variables of the template (``chat_template_kwargs`` of the line).
        trained_from: the index of the first message whose turn, if it is the assistant's, is trained on.
        where: file and line, as text, for errors.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: list[Any] | None
    options: Mapping[str, Any]
    trained_from: int
    where: object

    @property
    def text(self) -> str:
        """What is said, without any template: for a tokenizer to learn from."""
        return "\n".join(str(message.get("content") or "") for message in self.messages)


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A text and the one that follows it, which alone is trained on; no template has a part in it.

    Attributes:
        prompt: the first.
        completion: the second.
        where: file and line, as text, for errors.
    """

    prompt: str
    completion: str
    where: object

    @property
    def text(self) -> str:
        """Both, one after the other."""
        return self.prompt + self.completion


def is_conversation(line: Any) -> bool:
    """Return whether a line of .jsonl is meant as a conversation."""
    return isinstance(line, Mapping) and (
        "messages" in line or "conversations" in line or ("prompt" in line and "completion" in line)
    )


def read_conversation(line: Any, where: object) -> Conversation | Completion:
    """Return the conversation of a .jsonl line.

    Args:
        line: an object with ``messages``, ``conversations`` or ``prompt`` and ``completion``; ``tools`` (a list, or
            one written out as JSON), ``chat_template_kwargs`` and, for ShareGPT, ``system`` may stand beside them.
        where: file and line, as text.

    Raises:
        Malformed: it is none; the text says why.
    """
    if not is_conversation(line):
        raise Malformed(f"an object without {KINDS}")
    tools, options = _tools(line.get("tools")), line.get("chat_template_kwargs") or {}
    if not isinstance(options, Mapping):
        raise Malformed("chat_template_kwargs that are no object")
    trained_from = 0
    if "messages" in line:
        messages = _messages(line["messages"], "messages")
    elif "conversations" in line:
        messages = _from_sharegpt(line["conversations"], line.get("system"))
    elif isinstance(line["prompt"], str) and isinstance(line["completion"], str):
        return Completion(prompt=line["prompt"], completion=line["completion"], where=where)
    else:
        prompt = _messages(line["prompt"], "prompt")
        trained_from = len(prompt)
        messages = prompt + _messages(line["completion"], "completion")
    return Conversation(messages=messages, tools=tools, options=options, trained_from=trained_from, where=where)


def _messages(given: Any, name: str) -> tuple[Mapping[str, Any], ...]:
    """Return messages with a role each and a content, or calls of tools in its place."""
    if not isinstance(given, list) or not given:
        raise Malformed(f"{name} that are no list of messages")
    for one in given:
        if not isinstance(one, Mapping) or not isinstance(one.get("role"), str):
            raise Malformed(f"{name} with one that has no role")
        if not isinstance(one.get("content"), str | list | None):
            raise Malformed(f"{name} with a content that is neither text, a list nor null")
    return tuple(given)


def _from_sharegpt(given: Any, system: Any) -> tuple[Mapping[str, Any], ...]:
    """Return ShareGPT's turns (``from``, ``value``) as messages; ones that are messages already pass."""
    if not isinstance(given, list) or not given:
        raise Malformed("conversations that are no list of turns")
    if all(isinstance(turn, Mapping) and "role" in turn for turn in given):
        messages = list(_messages(given, "conversations"))
    else:
        messages = [_from_turn(turn) for turn in given]
    if isinstance(system, str) and system:
        messages.insert(0, {"role": "system", "content": system})
    return tuple(messages)


def _from_turn(turn: Any) -> Mapping[str, Any]:
    if not isinstance(turn, Mapping) or not isinstance(turn.get("value"), str):
        raise Malformed("conversations with a turn that has no value")
    speaker = turn.get("from")
    if speaker not in _SHAREGPT_ROLES:
        raise Malformed(f"a turn from {speaker!r}, who is none of {', '.join(_SHAREGPT_ROLES)}")
    return {"role": _SHAREGPT_ROLES[speaker], "content": turn["value"]}


def _tools(given: Any) -> list[Any] | None:
    """Return tools given as a list, or as a text that is one in JSON."""
    if given in (None, "", []):
        return None
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise Malformed("tools that are no JSON") from error
    if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
        raise Malformed("tools that are no list of JSON schemas")
    return given
