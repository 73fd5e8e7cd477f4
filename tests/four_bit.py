"""bitsandbytes' 4-bit layers as several tests make them: by hand, without a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def four_bit_layer(linear: nn.Linear, dtype: torch.dtype, **settings: Any) -> Any:
    """Return a Linear4bit of the weight and bias of ``linear``, on its device, that computes in ``dtype``.

    ``settings`` are those of bitsandbytes' Linear4bit, and ``blocksize``.
    """
    import bitsandbytes as bnb

    settings = {"quant_type": "nf4", "compress_statistics": False, **settings}
    block = settings.pop("blocksize", 64)
    rows, columns = linear.weight.shape
    made = bnb.nn.Linear4bit(columns, rows, bias=False, compute_dtype=dtype, device="meta", **settings)
    weight = bnb.nn.Params4bit(linear.weight.detach(), blocksize=block, module=made, **settings)
    made.weight, made.bias = weight.to(linear.weight.device), linear.bias
    return made


def in_four_bits(model: nn.Module, dtype: torch.dtype, *, skip: tuple[str, ...] = ("lm_head",), **settings: Any) -> Any:
    """Put every linear layer of a model into 4 bits but those with these last names, as transformers does."""
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name.rpartition(".")[2] not in skip:
            model.set_submodule(name, four_bit_layer(module, dtype, **settings))
    made: Any = model
    made.is_loaded_in_4bit = True  # for peft, which has LoRA layers of its own for these
    return made
