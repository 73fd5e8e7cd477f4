"""Built-in model shapes, as their public configs have them: enough to build the model with random weights."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from lowtide.errors import ArgumentValueError, did_you_mean, message
from lowtide.train.files import hub_snapshot

_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

DEFAULT = "lowtide-small"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")

SHAPES: dict[str, dict[str, Any]] = {
    # The vocabulary is the tokenizer's. So small that two CPU cores take it through enough text to learn more than
    # the frequencies of words within the two minutes it is meant for; the logits are its largest tensor by far.
    DEFAULT: {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _LLAMA_3_ROPE,
        "tie_word_embeddings": True,
    },
    "llama-3.2-3b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _LLAMA_3_ROPE,
        "tie_word_embeddings": True,
    },
    "llama-3-8b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "tie_word_embeddings": False,
    },
    "llama-3-70b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": False,
    },
    "gemma-2-2b": {
        "model_type": "gemma2",
        "vocab_size": 256_000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
}


def config_file(name: str) -> Path:
    """Return the config.json of a ``--model`` that is no built-in name.

    Raises:
        ArgumentValueError: there is none.
    """
    path = Path(os.path.expanduser(name))  # noqa: PTH111 (an unknown home stays as it is)
    folder = model_folder(name) if name else None
    file = path if folder is None else folder / "config.json"
    if name and file.is_file():
        return file
    got = f"{name}, a folder without one" if folder is not None else repr(name)
    expected = f"a folder with a config.json, a config as a .json file, or one of {', '.join(SHAPES)}"
    hint = "Models are not downloaded: name a folder."
    if folder is None and _HUB_NAME.fullmatch(name):
        hint = f"It is not in the Hub's local cache: hf download {name}"
    raise ArgumentValueError(message("model", expected, got, f"{did_you_mean(name, SHAPES)} {hint}".lstrip()))


def model_folder(name: str) -> Path | None:
    """Return the folder of a ``--model``: a path, or a Hub model's snapshot in the local cache; None for others."""
    path = Path(os.path.expanduser(name))  # noqa: PTH111 (an unknown home stays as it is)
    if name in SHAPES or path.is_file():
        return None
    return path if path.is_dir() else hub_snapshot(name, "models")
