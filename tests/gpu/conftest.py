"""What every test on a GPU leaves behind: nothing that another process would lack."""

import gc
from collections.abc import Iterator

import pytest
import torch

ON_GPU = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.usefixtures("full_float32"),
]


@pytest.fixture
def full_float32() -> None:
    """Products as exact as their operands, for comparisons with float64."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


@pytest.fixture(autouse=True)
def _memory_given_back() -> Iterator[None]:
    """PyTorch keeps what a test allocated; several processes share the GPU."""
    yield
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # one for each stream that a test multiplied on
        torch.cuda.empty_cache()
