"""Everything a run needs, made and checked before anything is written."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list

import lowtide
from lowtide.errors import ArgumentValueError, message
from lowtide.models import PatchReport
from lowtide.train.activations import Chosen, choose_and_apply
from lowtide.train.chat import ChatFormat, use_template
from lowtide.train.checkpoints import read_run_file
from lowtide.train.checks import Known, know
from lowtide.train.config import TrainConfig
from lowtide.train.corpus import Corpus, open_corpus
from lowtide.train.first_rank import read_by_first
from lowtide.train.lora import add_adapters
from lowtide.train.model import (
    build_model,
    check_model,
    check_separate,
    check_vocabulary,
    choose_attention,
    has_weights,
    model_config,
)
from lowtide.train.offloading import check_states
from lowtide.train.packing import (
    Layout,
    Split,
    chat_documents,
    held_out_blocks,
    split_corpus,
    text_documents,
)
from lowtide.train.parallel import uses_deepspeed, uses_fsdp
from lowtide.train.planned import attention_of
from lowtide.train.positions import shares_of
from lowtide.train.streams import Block
from lowtide.train.tokenizer import load_tokenizer, tokenize_with, train_tokenizer

_BYTES_PER_TOKEN = 6  # a generous guess, to hold out enough text for the blocks asked for
_LOOKED_AT = 64  # conversations, for one that is not left out
_ANYWHERE = "sdpa works everywhere."
_FLASH, _FLEX = "flash_attention_2", "flex_attention"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a run trains, on what, and how.

    Attributes:
        config: the run's settings.
        corpus: where the text is.
        split: what of it is held out.
        layout: how it becomes blocks.
        tokenizer: of `transformers`.
        model: the same, patched, adapters and activation policy applied.
        patched: what `lowtide.patch` did; None where it was not asked to.
        chosen: the activation policy; None where each layer keeps all.
        held_out: blocks never trained on.
        lines: what is worth knowing of chat, adapters and attention, for a person to read.
        bounds: attention wants the documents' bounds.
        known: what a resumed run is told of the data.
    """

    config: TrainConfig
    corpus: Corpus
    split: Split
    layout: Layout
    tokenizer: Any
    model: Any
    patched: PatchReport | None
    chosen: Chosen | None
    held_out: list[Block]
    lines: tuple[str, ...]
    bounds: bool
    known: Known


class ModelBox:
    """Holds the model once there is one: what an error in between can tell about it."""

    model: Any = None
    chosen: Chosen | None = None
    packing = "joined"


def prepare(
    config: TrainConfig,
    args: Any,
    resume_from: Path | None,
    box: ModelBox | None = None,
    say: Callable[[str], object] | None = None,
) -> Prepared:
    """Find the data, make tokenizer and model, patch it, and take the held-out blocks; nothing is written.

    Args:
        config: the run's settings.
        args: Trainer's arguments.
        resume_from: the checkpoint to go on from; None at the start.
        box: what is told of model and policy to whoever catches an error.
        say: what is called with a line before something that takes a while.

    Raises:
        ArgumentValueError: any of them cannot be used.
    """
    box = box or ModelBox()
    check_states(config, args)
    streams = shares_of(config, resume_from)[0].streams
    corpus = open_corpus(config.data, text_field=config.text_field, streams=streams, seq_len=config.seq_len)
    box.packing = packing = _packing(config, corpus)
    model_config(config.model, vocab_size=config.vocab_size)  # a wrong name is told before a tokenizer is trained
    split = split_corpus(
        corpus,
        seed=config.seed,
        held_out_bytes=config.eval_blocks * config.seq_len * _BYTES_PER_TOKEN,
        streams=streams,
    )
    tokenizer = _tokenizer(config, corpus, split, resume_from)
    shape = run_shape(config, tokenizer)
    check_vocabulary(shape, len(tokenizer))
    chat = ChatFormat(tokenizer, seq_len=config.seq_len, too_long=config.too_long) if corpus.chat else None
    if chat is None and config.chat_template is not None:
        raise ArgumentValueError(message("chat_template", "conversations in --data", "text"))
    before = None if resume_from is None else read_run_file(resume_from.parent)
    known = know(corpus, chat, args, before, check=config.check_data, say=say)
    layout = _layout(config, corpus, chat, tokenizer, packing)
    blocks = held_out_blocks(split, layout, limit=config.eval_blocks)
    lines = [*_stay(config, before), *known.lines, *_chat_lines(corpus, split, chat)]
    attention = _attention(config, args, packing)
    box.model = model = _model(config, args, tokenizer, packing, attention)
    patched = None
    if config.patch:
        patched = lowtide.patch(model, options=lowtide.HeadOptions(workspace_mib=config.workspace_mib))
    box.chosen = choose_and_apply(model, config, args, packing)
    return Prepared(
        config=config,
        corpus=corpus,
        split=split,
        layout=layout,
        tokenizer=tokenizer,
        model=model,
        patched=patched,
        chosen=box.chosen,
        held_out=blocks,
        lines=(*lines, *_model_lines(config, model, packing, attention)),
        known=known,
        bounds=packing == "separate" and attention is not None and attention.startswith("flash"),
    )


def run_shape(config: TrainConfig, tokenizer: Any) -> Any:
    """Return the config of the run's model; a fresh one's special tokens are the tokenizer's."""
    shape = model_config(config.model, vocab_size=config.vocab_size)
    if not has_weights(config.model):
        shape.bos_token_id, shape.pad_token_id = tokenizer.bos_token_id, tokenizer.pad_token_id
        shape.eos_token_id = tokenizer.eos_token_id
    return shape


def base_model(config: TrainConfig, tokenizer: Any, *, whole: bool = False) -> Any:
    """Return the run's model without adapters, in the dtype of its weights.

    Args:
        config: the run's settings.
        tokenizer: its tokenizer.
        whole: pretrained weights in float32 whatever the run keeps them in, to merge adapters into. Random ones are
            nowhere but in the run.
    """
    dtype = torch.float32 if whole and has_weights(config.model) else getattr(torch, config.weights)
    return build_model(config.model, run_shape(config, tokenizer), seed=config.seed, dtype=dtype)


def _model(config: TrainConfig, args: Any, tokenizer: Any, packing: str, attention: str | None) -> Any:
    """Return the model, checked, its adapters on it."""
    late = attention is not None and attention.startswith(("flash", _FLEX))  # which train on a GPU alone

    def read() -> Any:
        model = base_model(config, tokenizer)
        check_model(model, seq_len=config.seq_len)
        if attention is not None and not late:
            choose_attention(model, attention)
        if packing == "separate":
            model.config.get_text_config().use_cache = False  # with a cache, transformers makes no mask of documents
            check_separate(model, seq_len=config.seq_len)
        return model

    model = read_by_first(read)
    if attention is not None and late:
        choose_attention(model, attention)
        if packing == "separate" and not uses_fsdp() and not uses_deepspeed():
            model.to(args.device)
            dtype = torch.float16 if args.fp16 else torch.bfloat16
            with torch.autocast(args.device.type, dtype, enabled=args.bf16 or args.fp16):
                check_separate(model, seq_len=config.seq_len)
    return add_adapters(model, config) if config.lora_rank else model


def _packing(config: TrainConfig, corpus: Corpus) -> str:
    """Return how documents share a block, "auto" resolved."""
    if config.packing == "auto":
        return "separate" if corpus.chat else "joined"
    if config.packing == "joined" and corpus.chat:
        expected = "separate or none for conversations, which are not to see each other"
        raise ArgumentValueError(message("packing", expected, "joined"))
    return config.packing


def _layout(config: TrainConfig, corpus: Corpus, chat: ChatFormat | None, tokenizer: Any, packing: str) -> Layout:
    if chat is not None:
        read = chat_documents(corpus, chat)
    else:
        read = text_documents(corpus, tokenize_with(tokenizer), eos=tokenizer.eos_token_id)
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return Layout(read=read, seq_len=config.seq_len, packing=packing, whole=corpus.chat, pad=pad)


def _attention(config: TrainConfig, args: Any, packing: str) -> str | None:
    """Return the implementation of attention to set; None: the model's own choice."""
    on_gpu = args.device.type == "cuda"
    sixteen = args.bf16 or args.fp16 or config.weights == "bfloat16"
    if config.attention == "auto":
        from transformers.utils import is_flash_attn_2_available

        flash = packing == "separate" and on_gpu and sixteen and is_flash_attn_2_available()
        return _FLASH if flash else None
    if config.attention.startswith("flash_attention") and not (on_gpu and sixteen):
        expected = "flash attention on a GPU and in 16-bit products alone"
        got = f"{config.attention} on {'float32 products' if on_gpu else f'the {args.device.type}'}"
        raise ArgumentValueError(message("attention", expected, got, _ANYWHERE))
    if config.attention == _FLEX and not on_gpu:
        got = f"{_FLEX} on the {args.device.type}"
        raise ArgumentValueError(message("attention", "flex attention on a GPU alone, to train with", got, _ANYWHERE))
    return config.attention


def _tokenizer(config: TrainConfig, corpus: Corpus, split: Split, resume_from: Path | None) -> Any:
    """Return the tokenizer: the checkpoint's, the one named, the model's own, or one trained here."""
    if resume_from is not None:
        return load_tokenizer(resume_from)
    if config.tokenizer is not None:
        tokenizer = load_tokenizer(config.tokenizer)
    elif has_weights(config.model):
        tokenizer = load_tokenizer(config.model)
    else:
        pieces = split.share(0, 1, 0)
        trained = [train_tokenizer(corpus, pieces, vocab_size=config.vocab_size, seq_len=config.seq_len)]
        tokenizer = broadcast_object_list(trained)[0]  # every rank the first one's
    if config.chat_template is not None:
        use_template(tokenizer, config.chat_template)
    return tokenizer


def _chat_lines(corpus: Corpus, split: Split, chat: ChatFormat | None) -> Iterable[str]:
    """Return what of the first conversation is trained on: the mistake to see before a long run."""
    if chat is None:
        return []
    pieces = (*split.held_out_pieces(), *range(len(corpus)))
    first = itertools.islice((one for piece in pieces for one in corpus.conversations(piece)), _LOOKED_AT)
    return [f"chat     trained: {chat.describe(first)}"]


def _stay(config: TrainConfig, before: Mapping[str, Any] | None) -> Iterable[str]:
    """Return that a resumed run's optimizer states are offloaded no more."""
    if before is not None and before["config"].get("offload_states") and not config.offload_states:
        yield (
            "states   the optimizer's stay: they cannot be offloaded here, as they were before; where they can, give "
            "--offload-states again"
        )


def _model_lines(config: TrainConfig, model: Any, packing: str, attention: str | None) -> Iterable[str]:
    if packing != "joined":
        how = attention or attention_of(model) or "the model's own"
        each = "apart in each block" if packing == "separate" else "one in each block"
        yield f"packing  {packing}: documents are {each}; attention: {how}"
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or config.seq_len
    if positions < config.seq_len:
        yield f"length   the config is for {positions:,} positions: what is behind them, the model has not seen before"
    if config.offload_states and not config.memory_budget:
        yield "states   the optimizer's are in host memory from forward on, and come back in backward"
    if config.lora_rank:
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        yield (
            f"lora     rank {config.lora_rank}, alpha {config.lora_scale:g}, {' '.join(config.lora_targets)}: "
            f"{trained / 1e6:,.2f} M parameters are trained"
        )
    elif config.weights == "bfloat16":
        yield (
            "weights  bfloat16, and so gradients and optimizer: an update of less than 1/512 of a weight is rounded "
            "away, which small learning rates and long runs suffer from. --weights float32 does not"
        )
