"""What the tests of kernels share: where they run, and rows with poison around them.

Without a GPU Triton's interpreter runs them, whose bfloat16 products are wrong: operands are float32 there.
"""

from __future__ import annotations

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
UNIT = 16 // DTYPE.itemsize  # rows start at multiples of 16 bytes
NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
POISON = -7.0
INF, NAN = torch.inf, torch.nan


def apart(values: Tensor) -> Tensor:
    """Return operands in rows that have NaN between them."""
    room = torch.full((len(values), -(-values.shape[1] // UNIT) * UNIT + UNIT), NAN, dtype=DTYPE, device=DEVICE)
    room[:, : values.shape[1]] = values
    return room[:, : values.shape[1]]


def padded(z_CV: Tensor, stride: int | None = None) -> Tensor:
    """Return a room of rows ``stride`` long, NaN after the logits and in one row before them and one after."""
    C, V = z_CV.shape
    room = torch.full((C + 2, stride or -(-V // 8) * 8), NAN, device=DEVICE)
    room[1:-1, :V] = z_CV
    return room
