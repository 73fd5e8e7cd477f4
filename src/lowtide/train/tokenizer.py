"""The tokenizer of a run: the model's, a given one, or a byte-level BPE trained on the run's text."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lowtide.errors import ArgumentValueError, message
from lowtide.train.files import why
from lowtide.train.tokens import Pieces, Text

END_OF_TEXT = "<|endoftext|>"
TRAINING_CHARACTERS = 4 * 2**20  # merges stop getting better long before; on two cores this takes a few seconds


def load_tokenizer(name: str | Path, *, trust_remote_code: bool = False, end: str | None = None) -> Any:
    """Return the tokenizer in a folder or of a name on the Hub; ``end`` is the end-of-text token that TRL will give it.

    Raises:
        ArgumentValueError: there is none, or it has no end-of-text token to put behind documents and turns.
    """
    from transformers import AutoTokenizer

    expected = "a folder with a tokenizer in the Hugging Face format"
    try:
        tokenizer = AutoTokenizer.from_pretrained(Path(name).expanduser(), trust_remote_code=trust_remote_code)
    except Exception as error:  # its own errors have no common base
        raise ArgumentValueError(message("tokenizer", expected, f"{name} ({why(error)})")) from error
    if end is None and tokenizer.eos_token_id is None:
        hint = "It ends texts and turns: set eos_token in its tokenizer_config.json, or to fine-tune give --eos_token."
        raise ArgumentValueError(message("tokenizer", "an end-of-text token", f"none in {name}", hint))
    return tokenizer


def as_loaded(tokenizer: Any, shape: Any) -> Any:
    """Return a tokenizer as transformers loads it from a folder with this config.

    For some model types it takes a class of its own, whatever class the files name: other splits, another pad token.
    """
    with tempfile.TemporaryDirectory(prefix="lowtide-tokenizer-") as folder:
        tokenizer.save_pretrained(folder)
        shape.save_pretrained(folder)
        found = load_tokenizer(folder)
    found.name_or_path = tokenizer.name_or_path
    return found


def set_chat_template(tokenizer: Any, template: str) -> None:
    """Set the chat template of ``--chat_template_path``: a .jinja file, or another tokenizer's.

    TRL takes the other tokenizer's end-of-text token and added tokens too, and resizes the embeddings.

    Raises:
        ArgumentValueError: it is neither.
    """
    from transformers import AutoTokenizer

    try:
        if template.endswith((".jinja", ".j2")):
            tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
        else:
            source = AutoTokenizer.from_pretrained(template)
            tokenizer.chat_template = source.get_chat_template()
    except (OSError, ValueError) as error:
        expected, got = "a .jinja file, or a tokenizer with a chat template", f"{template} ({why(error)})"
        raise ArgumentValueError(message("--chat_template_path", expected, got)) from error


def check_template(tokenizer: Any, row: Mapping[str, Any]) -> None:
    """Raise if the chat template refuses a conversation; other rows have no template."""
    messages = row.get("messages")
    if messages is None and isinstance(row.get("prompt"), list):
        messages = [*row["prompt"], *row["completion"]]
    if messages is None:
        return
    if tokenizer.chat_template is None:
        hint = "Give one with --chat_template_path."
        raise ArgumentValueError(message("tokenizer", "a chat template, for conversations", "none", hint))
    tools = row.get("tools")
    kwargs = row.get("chat_template_kwargs") or {}
    tokenizer.apply_chat_template(messages, tools=json.loads(tools) if tools else None, tokenize=False, **kwargs)


def train_tokenizer(text: Text, *, vocab_size: int) -> Any:
    """Train a byte-level BPE on a sample of the text and return it as a Hugging Face tokenizer.

    The sample is read from the end of the order of `write_tokens`, whose beginning is held out. There are fewer than
    ``vocab_size`` tokens, the end of text included, if the text has too few different pairs.

    Raises:
        ArgumentValueError: a file cannot be read, or a row has no text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(Pieces(text)), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, model_max_length=text.seq_len)


def _sample(pieces: Pieces) -> Iterator[str]:
    left = TRAINING_CHARACTERS
    for piece in reversed(pieces.order):
        for text in pieces.documents(piece):
            if left <= 0:
                return
            left -= len(text)
            yield text
