"""What `skipping.py` trains: text of the packages on this machine, and a small Llama with its head beside it."""

from __future__ import annotations

import hashlib
import random
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from lowtide import HeadOptions, linear_cross_entropy

HELD_OUT = 25  # one file in so many
LENGTH, BATCH = 1024, 16


def texts(megabytes: int) -> list[tuple[str, str]]:
    """Return (suffix, text) of installed packages' sources and documents, no text twice, in a fixed order."""
    roots = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sysconfig.get_path("stdlib")}
    files = sorted(
        {
            file
            for root in roots
            for suffix in (".py", ".pyi", ".md", ".rst", ".txt")
            for file in Path(root).rglob(f"*{suffix}")
        }
    )
    random.Random(0).shuffle(files)
    seen, found, size = set[bytes](), list[tuple[str, str]](), 0
    for file in files:
        if not file.is_file() or not 500 < file.stat().st_size < 300_000:
            continue
        text = file.read_text(errors="replace")
        key = hashlib.sha256(text.encode(errors="replace")).digest()
        if key in seen:
            continue
        seen.add(key)
        found.append((file.suffix, text))
        size += len(text)
        if size > megabytes * 1e6:
            break
    return found


def tokenized(found: list[tuple[str, str]], vocab: int) -> dict[str, Tensor]:
    """Return token ids of "train" and "held_out", by a BPE of the text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([text for _, text in found], trainer)
    held = len(found) // HELD_OUT

    def ids(part: list[tuple[str, str]]) -> Tensor:
        return torch.tensor([i for one in tokenizer.encode_batch([text for _, text in part]) for i in one.ids])

    return {"train": ids(found[held:]), "held_out": ids(found[:held])}


class Model(nn.Module):
    """A Llama's layers, and its head beside them."""

    def __init__(self, vocab: int, hidden: int, layers: int) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=vocab, hidden_size=hidden, intermediate_size=-(-hidden * 11 // 4 // 128) * 128,
            num_hidden_layers=layers, num_attention_heads=hidden // 64, use_cache=False, max_position_embeddings=LENGTH,
            attn_implementation="sdpa",
        )  # fmt: skip
        self.layers = LlamaModel(config)
        self.head = nn.Linear(hidden, vocab, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.layers(input_ids=ids).last_hidden_state
        return hidden


def batches(ids: Tensor, seed: int) -> Iterator[Tensor]:
    """Yield random windows [BATCH, LENGTH + 1] for ever."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(ids) - LENGTH - 1, (BATCH,), generator=generator)
        yield torch.stack([ids[i : i + LENGTH + 1] for i in starts.tolist()]).cuda(non_blocking=True)


def loss_of(model: Model, layers: Callable[[Tensor], Tensor], ids: Tensor, options: HeadOptions | None) -> Tensor:
    """Return the mean loss of windows."""
    with torch.autocast("cuda", torch.bfloat16):
        hidden = layers(ids[:, :-1])
        return linear_cross_entropy(hidden, model.head.weight, ids[:, 1:], options=options)


@torch.no_grad()
def evaluated(model: Model, layers: Callable[[Tensor], Tensor], ids: Tensor) -> float:
    """Return the mean loss of held-out windows, the same ones each time."""
    stream = batches(ids, 12345)
    return sum(loss_of(model, layers, next(stream), None).item() for _ in range(12)) / 12
