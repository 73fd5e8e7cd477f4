"""The tokenizer of a run: a given one, or a byte-level BPE trained on the run's text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lowtide.errors import ArgumentValueError, message
from lowtide.train.files import Sources
from lowtide.train.tokens import Pieces

END_OF_TEXT = "<|endoftext|>"
TRAINING_CHARACTERS = 4 * 2**20  # merges stop getting better long before; on two cores this takes a few seconds


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False, end: str | None = None) -> Any:
    """Return the tokenizer in a folder; ``end`` is the end-of-text token that the trainer will set.

    Raises:
        ArgumentValueError: there is none, or it has no end-of-text token to put behind documents and turns.
    """
    from transformers import AutoTokenizer

    expected, folder = "a folder with a tokenizer in the Hugging Face format", Path(path).expanduser()
    if not folder.is_dir():
        raise ArgumentValueError(message("tokenizer", expected, f"{path}, which is no folder"))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # its own errors have no common base
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ArgumentValueError(message("tokenizer", expected, f"{path} ({why})")) from error
    if end is None and tokenizer.eos_token_id is None:
        hint = "It ends texts and turns: set eos_token in its tokenizer_config.json, or to fine-tune give --eos_token."
        raise ArgumentValueError(message("tokenizer", "an end-of-text token", f"none in {path}", hint))
    return tokenizer


def train_tokenizer(sources: Sources, *, vocab_size: int, text_field: str, seq_len: int, seed: int) -> Any:
    """Train a byte-level BPE on a sample of the text and return it as a Hugging Face tokenizer.

    The sample is read from the end of the order of `write_tokens`, whose beginning is held out.

    Args:
        sources: the text.
        vocab_size: tokens, the end of text included; fewer where the text has too few different pairs.
        text_field: the column of rows with the text.
        seq_len: the longest sequence that the model will have seen, which the tokenizer stores as its limit.
        seed: chooses the sample.

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
    pieces = Pieces(sources, text_field=text_field, seq_len=seq_len, seed=seed)
    tokenizer.train_from_iterator(_sample(pieces), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, model_max_length=seq_len)


def _sample(pieces: Pieces) -> Iterator[str]:
    left = TRAINING_CHARACTERS
    for piece in reversed(pieces.order):
        for text in pieces.documents(piece):
            if left <= 0:
                return
            left -= len(text)
            yield text
