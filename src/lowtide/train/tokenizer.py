"""The tokenizer of a run: a given one, or a byte-level BPE trained on the spot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lowtide.errors import ArgumentValueError, message
from lowtide.train.corpus import Corpus
from lowtide.train.frame import frame_of
from lowtide.train.packing import Tokenize

END_OF_TEXT = "<|endoftext|>"
TRAINING_BYTES = 4 * 2**20  # merges stop getting better long before; on two cores this takes a few seconds


def load_tokenizer(path: str | Path) -> Any:
    """Return the tokenizer in a folder.

    Raises:
        ArgumentValueError: there is none, or it has no end-of-text token to put between documents.
    """
    from transformers import AutoTokenizer

    expected = "a folder with a tokenizer in the Hugging Face format"
    if not Path(path).expanduser().is_dir():
        raise ArgumentValueError(message("tokenizer", expected, f"{path}, which is no folder"))
    try:
        tokenizer = AutoTokenizer.from_pretrained(Path(path).expanduser(), local_files_only=True)
    except Exception as error:  # its own errors have no common base
        raise ArgumentValueError(message("tokenizer", expected, f"{path} ({_first_line(error)})")) from error
    if tokenizer.eos_token_id is None:
        hint = "It goes between documents: set eos_token in its tokenizer_config.json."
        raise ArgumentValueError(message("tokenizer", "an end-of-text token", f"none in {path}", hint))
    return tokenizer


def train_tokenizer(corpus: Corpus, pieces: Sequence[int], *, vocab_size: int, seq_len: int) -> Any:
    """Train a byte-level BPE on the first of the given pieces and return it as a Hugging Face tokenizer.

    Args:
        corpus: where the text is.
        pieces: what to read, in order, up to `TRAINING_BYTES`.
        vocab_size: tokens, the end of text included; fewer where the text has too few different pairs.
        seq_len: the longest sequence that the model will have seen, which the tokenizer keeps as its limit.
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
    tokenizer.train_from_iterator(_up_to(TRAINING_BYTES, (t for p in pieces for t in corpus.documents(p))), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, model_max_length=seq_len)


def tokenize_with(tokenizer: Any) -> Tokenize:
    """Return the function from text to token ids that packing wants, what the tokenizer puts around a text included."""
    frame = frame_of(tokenizer)

    def tokenize(text: str) -> list[int]:
        # verbose=False: a document longer than the model's limit is no mistake here, it is cut into blocks.
        encoded = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)
        ids: list[int] = encoded["input_ids"]
        return [*frame.opening(ids), *ids, *frame.closing(ids)]

    return tokenize


def _up_to(limit: int, texts: Iterable[str]) -> Iterator[str]:
    """Yield texts until they have so many characters together."""
    for text in texts:
        if limit <= 0:
            return
        limit -= len(text)
        yield text


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
