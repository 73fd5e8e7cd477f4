"""Random weights on text files: the text, a tokenizer trained on it, blocks of tokens, and the model.

Text is cut into pieces, which are shuffled by the seed; the first blocks are held out, the next ones trained on.
No more of the text is tokenised than the run's steps take. Neither TRL nor datasets is imported.
"""

from __future__ import annotations

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
_PIECE = 2**13  # characters
_PIECES_AT_ONCE = 32
_PROBE = 8192  # bytes read to recognise a text
# Its tests hold text in broken encodings on purpose; the others are no part of the standard library, or not text.
_SKIPPED = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests"})


def text_files(name: str | None) -> list[Path]:
    """Return the text files of ``--dataset_name``: itself, or those in a folder; None: Python's standard library.

    Raises:
        ArgumentValueError: there is none.
    """
    root = Path(sysconfig.get_path("stdlib")) if name is None else Path(name).expanduser()
    files = [root] if root.is_file() else sorted(p for p in root.rglob("*.*" if name else "*.py") if p.is_file())
    if name is None:
        files = [path for path in files if not _SKIPPED & {*path.relative_to(root).parts}]
    if root.suffix != ".jsonl" and (found := [path for path in files if _is_text(path)]):
        return found
    hint = "To train random weights on a dataset, save its text; a pretrained model takes every dataset."
    raise ArgumentValueError(message("--dataset_name", "UTF-8 text files", f"none in {root}", hint))


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        probe = file.read(_PROBE)
    return bool(probe) and b"\0" not in probe


def pieces(files: list[Path], seed: int) -> list[str]:
    """Return the files' text in pieces, cut at line ends, in an order that depends on the seed alone.

    Raises:
        ArgumentValueError: a file is not UTF-8.
    """
    found: list[str] = []
    for path in files:
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentValueError(message("--dataset_name", "UTF-8 text", f"{path} ({error})")) from error
        begin = 0
        while begin < len(text):
            cut = text.find("\n", begin + _PIECE)
            end = len(text) if cut < 0 else cut + 1
            found.append(text[begin:end])
            begin = end
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
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def sample() -> Iterator[str]:
        left = _TRAINING_CHARACTERS
        for piece in reversed(text):  # whose beginning is held out
            if left <= 0:
                return
            left -= len(piece)
            yield piece

    tokenizer.train_from_iterator(sample(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)


def make_blocks(text: list[str], tokenizer: Any, length: int, *, held_out: int, most: int | None) -> Any:
    """Return the sequences of ``length`` tokens to train on, at most ``most``, and those held out: the first ones.

    Raises:
        ArgumentValueError: the text is too short for one of each.
    """
    wanted = None if most is None else (held_out + most) * length
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
    blocks = [{"input_ids": row, "labels": row} for row in rows]
    return blocks[held_out:], blocks[:held_out]


def random_model(found: Arguments, config: Any, tokenizer: Any) -> Any:
    """Return the causal language model of a config with random weights, which the seed determines in each dtype.

    Raises:
        ArgumentValueError: the config describes no causal language model, or one of fewer positions.
    """
    args, model_args = found.training, found.model
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    config.pad_token_id = None if pad == tokenizer.eos_token_id else pad  # some models' embeddings do not train its row
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or model_args.max_length
    if positions < model_args.max_length:
        expected = f"at most the config's max_position_embeddings, {positions}"
        raise ArgumentValueError(message("--max_length", expected, str(model_args.max_length)))
    attention = {"attn_implementation": model_args.attn_implementation} if model_args.attn_implementation else {}
    set_seed(args.seed)
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **attention)
    except (ValueError, TypeError, ImportError, AttributeError, KeyError) as error:
        got = f"{model_args.model_name_or_path} ({' '.join(str(error).split())[:300]})"
        raise ArgumentValueError(message("--model_name_or_path", "a causal language model", got)) from error
    dtype = getattr(torch, model_args.dtype)
    for parameter in model.parameters():  # buffers stay as they are
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    model.config.pad_token_id = pad
    return model
