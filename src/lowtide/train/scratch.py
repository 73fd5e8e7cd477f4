"""Random weights on text files: the text, a tokenizer trained on it, blocks of tokens, and the model.

Text is cut into pieces, which are shuffled by the seed; the first blocks are held out. The next ones are shuffled too,
some at a time: a step sees many pieces, a longer run goes on as a shorter one ended, and little more of the text is
tokenised than the run's steps take. Neither TRL nor datasets is imported.
"""

from __future__ import annotations

import re
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, set_seed

from lowtide.errors import ArgumentValueError, message
from lowtide.train.arguments import Arguments
from lowtide.train.shapes import VOCAB_SIZE

HELD_OUT = 64  # sequences, if no number is given
END_OF_TEXT = "<|endoftext|>"
_TRAINING_CHARACTERS = 4 * 2**20  # merges stop getting better long before; on two cores this takes a few seconds
_PIECE = re.compile(rf"(?s).{{1,{2**13}}}[^\n]*\n?")  # so many characters, and the rest of the line
_PIECES_AT_ONCE = 32
_MIXED = 2**18  # tokens whose blocks are shuffled among each other
_PROBE = 8192  # bytes; a text has no NUL among them
# Its tests hold text in broken encodings on purpose; the others are no part of the standard library, or not text.
_SKIPPED = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests"})


def pieces(name: str | None, seed: int) -> list[str]:
    """Return the text of a file, or of those in a folder, in pieces cut at line ends, in an order that the seed sets.

    Args:
        name: ``--dataset_name``; None: the sources of Python's standard library.
        seed: of the order, which depends on nothing else.

    Raises:
        ArgumentValueError: there is no text, or a file is not UTF-8.
    """
    root, found = Path(name or sysconfig.get_path("stdlib")).expanduser(), list[str]()
    for path in [root] if root.is_file() else sorted(root.rglob("*.*" if name else "*.py")):
        if not path.is_file() or (name is None and _SKIPPED & {*path.relative_to(root).parts}):
            continue
        try:
            with path.open("rb") as file:
                begin = file.read(_PROBE)
                if b"\0" not in begin and root.suffix != ".jsonl":
                    found += _PIECE.findall((begin + file.read()).decode("utf-8-sig"))
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentValueError(message("--dataset_name", "UTF-8 text", f"{path} ({error})")) from error
    if not found:
        hint = "To train random weights on a dataset, save its text; a pretrained model takes every dataset."
        raise ArgumentValueError(message("--dataset_name", "UTF-8 text files", f"none in {root}", hint))
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed))
    return [found[i] for i in order.tolist()]


def make_tokenizer(name: str | None, text: list[str], config: Any) -> Any:
    """Return the tokenizer in a folder, or a byte-level BPE of `VOCAB_SIZE` tokens trained on the end of the text.

    It is of the class that transformers loads for the model's type, whatever class the folder names.

    Raises:
        ArgumentValueError: there is none, or it has ids that the model has no row for.
    """
    if name is None:
        rows = config.get_text_config().vocab_size
        tokenizer = _train_tokenizer(text, min(VOCAB_SIZE, rows))
        with tempfile.TemporaryDirectory(prefix="lowtide-tokenizer-") as folder:
            tokenizer.save_pretrained(folder)
            config.save_pretrained(folder)
            tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.name_or_path = ""
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(Path(name).expanduser())
        except Exception as error:  # its own errors have no common base
            got = f"{name} ({' '.join(str(error).split())[:300]})"
            raise ArgumentValueError(message("--tokenizer_name", "a folder with a tokenizer", got)) from error
    if tokenizer.eos_token_id is None:
        hint = "Set eos_token in its tokenizer_config.json."
        raise ArgumentValueError(message("--tokenizer_name", "an end-of-text token", f"none in {name}", hint))
    if len(tokenizer) > (rows := config.get_text_config().vocab_size):
        expected = f"a vocabulary of at least the tokenizer's {len(tokenizer)} tokens"
        hint = "Give the model's own with --tokenizer_name, or raise vocab_size in the config."
        raise ArgumentValueError(message("--model_name_or_path", expected, f"{rows}", hint))
    return tokenizer


def _train_tokenizer(text: list[str], size: int) -> Any:
    from tokenizers import ByteLevelBPETokenizer, Tokenizer

    def sample() -> Iterator[str]:
        left = _TRAINING_CHARACTERS
        for piece in reversed(text):  # whose beginning is held out
            if left <= 0:
                return
            left -= len(piece)
            yield piece

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(sample(), size, min_frequency=0, show_progress=False, special_tokens=[END_OF_TEXT])
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(trained.to_str()), eos_token=END_OF_TEXT)


def make_blocks(text: list[str], tokenizer: Any, length: int, *, held_out: int, most: int | None, seed: int) -> Any:
    """Return the sequences of ``length`` tokens to train on, at most ``most``, and those held out: the first ones.

    The ``seed`` sets the order, of which fewer are the beginning.

    Raises:
        ArgumentValueError: the text is too short for one of each.
    """
    mixed = max(1, _MIXED // length)
    wanted = None if most is None else (held_out + -(-most // mixed) * mixed) * length
    ids: list[int] = []
    for begin in range(0, len(text), _PIECES_AT_ONCE):
        if wanted is not None and len(ids) >= wanted:
            break
        # verbose=False: a piece longer than the model's limit is no mistake here
        for encoded in tokenizer(text[begin : begin + _PIECES_AT_ONCE], verbose=False)["input_ids"]:
            ids += encoded if encoded[-1:] == [tokenizer.eos_token_id] else [*encoded, tokenizer.eos_token_id]
    rows = torch.tensor(ids[: min(wanted or len(ids), len(ids) // length * length)]).view(-1, length)
    if len(rows) <= held_out:
        expected = f"text of more than {held_out} sequences of {length} tokens, which are held out"
        hint = "Give more text, or lower --held-out or --max_length."
        raise ArgumentValueError(message("--dataset_name", expected, f"{len(rows)} sequences", hint))
    draw = torch.Generator().manual_seed(seed)
    train = [part[torch.randperm(len(part), generator=draw)] for part in torch.split(rows[held_out:], mixed)]
    kept = torch.cat(train)[:most], rows[:held_out]
    return tuple([{"input_ids": row, "labels": row} for row in some] for some in kept)


def random_model(found: Arguments, config: Any, tokenizer: Any) -> Any:
    """Return the causal language model of a config with random weights, which the seed determines.

    Raises:
        ArgumentValueError: the config describes no causal language model, or one of fewer positions.
    """
    args, model_args = found.training, found.model
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    config.pad_token_id = None if pad == tokenizer.eos_token_id else pad  # some models' embeddings do not train its row
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or args.max_length
    if positions < args.max_length:
        expected = f"at most the config's max_position_embeddings, {positions}"
        raise ArgumentValueError(message("--max_length", expected, str(args.max_length)))
    attention = {"attn_implementation": model_args.attn_implementation} if model_args.attn_implementation else {}
    set_seed(args.seed)
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, model_args.dtype), **attention)
    except (ValueError, TypeError, ImportError, AttributeError, KeyError) as error:
        got = f"{model_args.model_name_or_path} ({' '.join(str(error).split())[:300]})"
        raise ArgumentValueError(message("--model_name_or_path", "a causal language model", got)) from error
    model.config.pad_token_id = pad
    return model
