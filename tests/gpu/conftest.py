"""What every test on a GPU leaves behind: nothing that another process would lack."""

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _memory_given_back() -> Iterator[None]:
    """PyTorch keeps what a test allocated; several processes share the GPU."""
    yield
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
