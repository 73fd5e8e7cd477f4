"""Weights in 4 bits (bitsandbytes), as a config's ``quantization_config`` has them: which, and their bytes.

transformers puts the linear layers of all decoder layers into 4 bits; embedding, norms, biases, a mixture's experts and
the output layer stay in the model's dtype. The weights are frozen, and each GEMM dequantises the one it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowtide.errors import ArgumentValueError, message

BLOCK, OUTER_BLOCK = 64, 256  # weights that share a scale, and scales that share one: transformers sets neither
SINGLE, NESTED = "4 bits", "4 bits, double quantisation"
# Bytes of a weight: half a one and its part of a float32 scale; or of a scale of one byte, and of that one's scale.
BYTES = {"": 0.0, SINGLE: 1 / 2 + 4 / BLOCK, NESTED: 1 / 2 + 1 / BLOCK + 4 / (BLOCK * OUTER_BLOCK)}
SCALES = 4 / BLOCK  # bytes of a weight's part of the float32 scales, which double quantisation builds for each GEMM
_HEADS = ("lm_head", "embed_out", "output")  # names of output layers, with which llm_int8_skip_modules ends
_INSIDE = ("layers", "self_attn", "mlp")  # parts of names of modules inside the layers


def config_of(*, nested: bool) -> dict[str, Any]:
    """Return the ``quantization_config`` of a model loaded in NF4."""
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": nested,
    }


def four_bit(settings: Mapping[str, Any]) -> str:
    """Return how a config's layers are in 4 bits: `SINGLE` or `NESTED`; "": they are not.

    Raises:
        ArgumentValueError: Only some of the layers' linear layers are, or the output layer is too.
    """
    config = settings.get("quantization_config")
    if not isinstance(config, Mapping) or not config.get("load_in_4bit"):
        return ""
    skipped = config.get("llm_int8_skip_modules")
    names = [str(name) for name in skipped or ()]
    inside = [name for name in names if any(one in _INSIDE or one.endswith("_proj") for one in name.split("."))]
    if inside:
        hint = "Plan its config without quantization_config: an upper bound."
        expected = "no linear layer inside the layers among llm_int8_skip_modules"
        raise ArgumentValueError(message("quantization_config", expected, inside[0], hint))
    if skipped is not None and not any(name.rpartition(".")[2] in _HEADS for name in names):
        hint = "An output layer in 4 bits is not planned: add 'lm_head', or leave llm_int8_skip_modules out."
        expected = "the output layer among llm_int8_skip_modules"
        raise ArgumentValueError(message("quantization_config", expected, f"{names}", hint))
    return NESTED if config.get("bnb_4bit_use_double_quant") else SINGLE


def compute_dtype(settings: Mapping[str, Any]) -> str:
    """Return the dtype that a config's layers in 4 bits compute in; "": the model's, or they are not in 4 bits."""
    config = settings.get("quantization_config")
    found = config.get("bnb_4bit_compute_dtype") if isinstance(config, Mapping) and config.get("load_in_4bit") else None
    return str(found or "").removeprefix("torch.")
