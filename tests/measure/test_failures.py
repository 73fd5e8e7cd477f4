"""What is taken for a lack of memory."""

from __future__ import annotations

import pytest
import torch

from lowtide.errors import UnsupportedError
from lowtide.measure.failures import is_out_of_memory

ON_EITHER = (  # PyTorch's allocator has a class of its own; these do not
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
)
ON_HOST = (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 12 bytes"))


@pytest.mark.parametrize("error", [*ON_EITHER, *ON_HOST, torch.OutOfMemoryError("CUDA out of memory")], ids=repr)
def test_a_lack_of_memory(error: Exception) -> None:
    assert is_out_of_memory(error)


def test_a_real_lack_of_host_memory() -> None:
    with pytest.raises(RuntimeError) as ended:
        torch.empty(2**61, dtype=torch.uint8)
    assert is_out_of_memory(ended.value)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("shapes cannot be multiplied"), ValueError("out of memory"), UnsupportedError("out of memory")],
)
def test_other_errors(error: Exception) -> None:
    assert not is_out_of_memory(error)
