"""Conversations to tokens: the template writes the text, and the assistant's turns in it are what is trained on."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lowtide.errors import ArgumentValueError, message
from lowtide.train.conversations import Completion, Conversation
from lowtide.train.frame import frame_of
from lowtide.train.streams import IGNORED, Document

Spans = list[tuple[int, int]]
# How transformers itself finds out whether a template marks what the assistant says.
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatFormat:
    """Renders conversations and says which of their tokens are trained on.

    A template with ``{% generation %}`` marks them itself. Any other is asked for the conversation up to each turn of
    the assistant, its header included, and for the same with that turn: what the second has more than the first is
    trained on, which holds where both are prefixes of the whole; a template that writes earlier turns otherwise once
    there are later ones is refused. A token is trained on where it begins inside such a stretch of the text, or
    reaches into it from white space before it. White space that follows the turn's last special token is left out:
    whoever generates has stopped there.

    Args:
        tokenizer: a fast tokenizer; its ``chat_template`` is used.
        seq_len: the most tokens of a conversation.
        too_long: what happens to a longer one: "truncate" keeps its beginning, "drop" leaves it out.

    Raises:
        ArgumentValueError: the tokenizer cannot tell where in the text its tokens are.
    """

    def __init__(self, tokenizer: Any, *, seq_len: int, too_long: str) -> None:
        if not tokenizer.is_fast:
            expected = "a fast tokenizer (with a tokenizer.json), which tells where in the text each token is"
            raise ArgumentValueError(message("tokenizer", expected, type(tokenizer).__name__))
        self.tokenizer, self.seq_len, self.too_long = tokenizer, seq_len, too_long
        self._frame = frame_of(tokenizer)
        self._special = tuple(token for token in {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()} if token)

    def document(self, given: Conversation | Completion) -> Document:
        """Return the tokens of a conversation and their labels; none where it is left out.

        Raises:
            ArgumentValueError: there is no template, or it cannot render the conversation, or rewrites its history.
        """
        text, spans = self.check(given)
        try:
            encoded = self.tokenizer(
                text, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False
            )
        except (TypeError, ValueError) as error:
            raise _unrendered(given.where, error) from error
        ids, labels = array("q", encoded["input_ids"]), array("q")
        for token, (start, stop) in zip(ids, encoded["offset_mapping"], strict=True):
            labels.append(token if any(_is_of(text, start, stop, span) for span in spans) else IGNORED)
        if isinstance(given, Completion):
            self._enclose(ids, labels)
        cut = len(ids) > self.seq_len
        if cut:
            ids, labels = ids[: self.seq_len], labels[: self.seq_len]
        # the first token of a document has nothing to be predicted from
        if (cut and self.too_long == "drop") or all(label == IGNORED for label in labels[1:]):
            ids, labels = array("q"), array("q")
        return Document(ids, labels, cut=cut)

    def check(self, given: Conversation | Completion) -> tuple[str, Spans]:
        """Return the text of a conversation and what of it is trained on, in characters; all but its tokens.

        Raises:
            ArgumentValueError: as `document` does.
        """
        if isinstance(given, Completion):
            text, spans = given.text, [(len(given.prompt), len(given.text))]
        else:
            text, spans = self.render(given)
        try:
            text.encode()  # JSON can name halves of characters, which are no text
        except UnicodeEncodeError as error:
            raise _unrendered(given.where, error) from error
        return text, spans

    def _enclose(self, ids: array[int], labels: array[int]) -> None:
        """Put around a prompt and its completion what the tokenizer puts around a text, and one end that is learned.

        Nothing but the end tells the model to stop; a completion that is written with it has it already.
        """
        opening, end = array("q", self._frame.opening(ids)), self.tokenizer.eos_token_id
        ids[:0], labels[:0] = opening, array("q", [IGNORED] * len(opening))
        closing = array("q", self._frame.closing(labels))
        if (closing or labels)[-1:] != array("q", [end]):
            closing.append(end)
        ids.extend(closing)
        labels.extend(closing)

    def render(self, given: Conversation) -> tuple[str, Spans]:
        """Return the text of a conversation, and where in it the assistant speaks, in characters."""
        template = self._template(given)
        if _MARKED.search(template) and given.trained_from == 0:
            return self._render_marked(given, template)
        text = self._render(given, len(given.messages))
        spans = []
        for index, one in enumerate(given.messages):
            # an answer to nothing is read and not learned: templates have no header for one
            if one["role"] != "assistant" or index < max(given.trained_from, 1):
                continue
            before = self._render(given, index, ask=True)
            after = self._render(given, index + 1)
            if not after.startswith(before) or not text.startswith(after):
                raise _rewritten(given, index)
            spans.append((len(before), len(before) + self._end(after[len(before) :])))
        return text, spans

    def describe(self, given: Iterable[Conversation | Completion]) -> str:
        """Return in a line how much of the first conversation not left out is trained on, and how a turn ends."""
        document = next((d for d in map(self.document, given) if d.ids), None)
        if document is None:
            return "nothing of the first conversations"
        trained = [label for label in document.labels or () if label != IGNORED]
        last = self.tokenizer.decode(trained[-1:])
        where = ", where it is cut" if document.cut else ""
        return f"{len(trained)} of the {len(document.ids)} tokens of one conversation, the last {last!r}{where}"

    def _template(self, given: Conversation) -> str:
        try:
            template: str = self.tokenizer.get_chat_template(None, given.tools)
        except ValueError as error:
            raise no_template(self.tokenizer) from error
        return template

    def _render(self, given: Conversation, upto: int, *, ask: bool = False) -> str:
        """Return the text of the first messages; ``ask``: with the header of a turn of the assistant behind them."""
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(given.messages[:upto]),
                tools=given.tools,
                add_generation_prompt=ask,
                tokenize=False,
                **given.options,
            )
        except Exception as error:  # whatever a template raises, or its language does
            raise _unrendered(given.where, error) from error
        return text

    def _render_marked(self, given: Conversation, template: str) -> tuple[str, Spans]:
        # transformers' own mask of tokens marks all that follows where a turn ends in a character that no token has
        from transformers.utils.chat_template_utils import render_jinja_template

        variables = {**self.tokenizer.special_tokens_map, **given.options}
        try:
            texts, spans = render_jinja_template(
                conversations=[list(given.messages)],
                tools=given.tools,
                chat_template=template,
                return_assistant_tokens_mask=True,
                **variables,
            )
        except Exception as error:  # as above
            raise _unrendered(given.where, error) from error
        return texts[0], list(spans[0])

    def _end(self, turn: str) -> int:
        """Return the length of a turn without the white space that follows its last special token."""
        bare = turn.rstrip()
        return len(bare) if bare.endswith(self._special) else len(turn)


def _is_of(text: str, start: int, stop: int, span: tuple[int, int]) -> bool:
    """Return whether a token is of a stretch of the text; its first one may have taken in the white space before."""
    begin, end = span
    return begin <= start < end or (start < begin < stop and text[start:begin].isspace())


def use_template(tokenizer: Any, file: str) -> None:
    """Give a tokenizer the chat template in a file.

    Raises:
        ArgumentValueError: the file cannot be read, or holds no template.
    """
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ArgumentValueError(message("chat_template", "a file with a Jinja template", f"{file} ({why})")) from error
    try:
        render_jinja_template(conversations=[], chat_template=text)  # compiles it
    except TemplateError as error:
        why = " ".join(str(error).split())
        raise ArgumentValueError(message("chat_template", "a file with a Jinja template", f"{file} ({why})")) from error
    tokenizer.chat_template = text


def no_template(tokenizer: Any) -> ArgumentValueError:
    """Return the error for a tokenizer without a chat template."""
    source = getattr(tokenizer, "name_or_path", "") or "the tokenizer trained here"
    hint = "Name a file with one with --chat-template, such as the chat_template.jinja of the model's chat version."
    return ArgumentValueError(message("chat_template", "a chat template, for chat data", f"none in {source}", hint))


def _unrendered(where: object, error: Exception) -> ArgumentValueError:
    why = " ".join(str(error).split())[:200] or type(error).__name__
    hint = "Mend the line, or name another template with --chat-template."
    return ArgumentValueError(
        message("data", "conversations that the chat template takes", f"one that it does not, {where}: {why}", hint)
    )


def _rewritten(given: Conversation, index: int) -> ArgumentValueError:
    expected = (
        "a chat template that writes each turn of the assistant behind its own generation prompt and never otherwise "
        "later, so that it shows which tokens are the assistant's"
    )
    got = f"one that rewrites message {index} of {given.where} or what is before it"
    hint = (
        "Name a template that marks the assistant's words with {% generation %} with --chat-template, or give each "
        "turn as a conversation of its own."
    )
    return ArgumentValueError(message("chat_template", expected, got, hint))
