"""What a tokenizer puts around a text by itself: Llama's a beginning of text, GPT-2's nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Frame:
    """The special tokens around a text.

    Attributes:
        before: token ids in front of it.
        after: behind it.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]

    def opening(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return what belongs in front of a text's tokens: nothing where the text begins with it, written out."""
        return () if tuple(ids[: len(self.before)]) == self.before else self.before

    def closing(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return what belongs behind a text's tokens: nothing where the text ends in it, written out."""
        return () if tuple(ids[len(ids) - len(self.after) :]) == self.after else self.after


def frame_of(tokenizer: Any) -> Frame:
    """Return what a tokenizer puts around a text when it is asked for one with special tokens, as it is by default."""
    encoded = tokenizer("a", return_special_tokens_mask=True, return_attention_mask=False)
    ids, own = encoded["input_ids"], encoded["special_tokens_mask"]
    if 0 not in own:  # a vocabulary without the letter
        return Frame((), ())
    return Frame(tuple(ids[: own.index(0)]), tuple(ids[len(own) - own[::-1].index(0) :]))
