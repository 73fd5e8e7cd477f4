"""All of the data is read once before the first step: what cannot be trained on ends a run then, not hours into it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object

from lowtide.errors import ArgumentValueError, message
from lowtide.measure.units import gib
from lowtide.train.chat import ChatFormat
from lowtide.train.conversations import Conversation
from lowtide.train.corpus import Corpus

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_LONG_BYTES = 2**28  # of data, from which on reading it takes a while
_CHANGED = (
    "data     written to since the run began: only where the files hold the same does it go on as if it had not stopped"
)


@dataclass(frozen=True)
class Known:
    """What is known of a run's data, kept beside its checkpoints.

    Attributes:
        fingerprint: of the files' names and sizes.
        stamp: of these and of when they were written to.
        in_order: they were all read and found to be in order, as they were then.
        lines: what there is to say of them, for a person to read.
    """

    fingerprint: str
    stamp: str
    in_order: bool
    lines: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return what `know` wants to be told on resume."""
        return {"data": self.fingerprint, "stamp": self.stamp, "in_order": self.in_order}


def know(
    corpus: Corpus,
    chat: ChatFormat | None,
    args: Any,
    before: Mapping[str, Any] | None,
    *,
    check: bool,
    say: Callable[[str], object] | None,
) -> Known:
    """Compare the data with that which a run began with, and check it where that was not done or it was written to.

    Args:
        corpus: the data.
        chat: what conversations become; None for text.
        args: Trainer's arguments.
        before: what `Known.to_json` told when the run began; None at the start.
        check: whether to check it at all.
        say: what is called with a line before something that takes a while.

    Raises:
        ArgumentValueError: the files are others, or a line cannot be trained on.
    """
    known = Known(corpus.fingerprint(), corpus.stamp(), check)
    if before is None:
        before, changed = {}, False
    elif before["data"] != known.fingerprint:
        hint = "Restore the files as they were, or begin a new run."
        raise ArgumentValueError(message("data", "the files the run began with", "other names or sizes", hint))
    else:
        changed = before.get("stamp") != known.stamp
    fresh = before.get("in_order") and not changed
    if args.world_size > 1:  # a copy of the files on another machine has other times, and all must check or none
        fresh, changed = broadcast_object_list([fresh, changed])
    if fresh:
        return Known(known.fingerprint, known.stamp, True)
    lines = [_CHANGED] if changed else []
    if check:
        if say is not None and corpus.bytes >= _LONG_BYTES:
            what = f"all {gib(corpus.bytes):.1f} GiB are read once, for what cannot be trained on"
            say(f"data     {what}; --no-check-data leaves that out")
        lines = [*lines, *_strangers(check_data(corpus, chat, args))]
    return Known(known.fingerprint, known.stamp, check, tuple(lines))


def check_data(corpus: Corpus, chat: ChatFormat | None, args: Any) -> Counter[str]:
    """Read every document and write every conversation with its template, as training will; tokens alone are not made.

    The ranks share the pieces, and all end with the error of the first that has one.

    Args:
        corpus: the data.
        chat: what conversations become; None for text.
        args: Trainer's arguments.

    Returns:
        The roles of conversations that are none of `ROLES`, and in how many each of them speaks.

    Raises:
        ArgumentValueError: a line is no text or conversation, or the template does not take it; it names the line.
    """
    found: ArgumentValueError | None = None
    strangers = Counter[str]()
    try:
        for piece in range(args.process_index, len(corpus), args.world_size):
            if chat is None:
                deque(corpus.documents(piece), maxlen=0)
            else:
                strangers.update(_roles(chat, corpus, piece))
    except ArgumentValueError as error:
        found = error
    every = gather_object([(found, strangers)]) if args.world_size > 1 else [(found, strangers)]
    if errors := [error for error, _ in every if error is not None]:
        raise errors[0]
    return sum((roles for _, roles in every), Counter[str]())


def _roles(chat: ChatFormat, corpus: Corpus, piece: int) -> Iterator[str]:
    """Check the conversations of a piece, and yield the unusual roles of each, once a conversation."""
    for one in corpus.conversations(piece):
        chat.check(one)
        if isinstance(one, Conversation):
            yield from {message["role"] for message in one.messages} - ROLES


def _strangers(roles: Counter[str]) -> list[str]:
    """Return what to say of unusual roles: one of them may be the assistant by another name, which is not learned."""
    named = ", ".join(f"{role!r} in {count:,}" for role, count in roles.most_common(5))
    return [f"roles    read and not learned, other than the assistant's: {named} of the conversations"] if roles else []
