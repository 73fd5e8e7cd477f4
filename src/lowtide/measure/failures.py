"""Which errors mean that memory ran out."""

import torch

from lowtide.errors import LowtideError

# Errors without their own class: the CPU allocator's, and on a GPU all but PyTorch's allocator's (cudaHostAlloc, a
# kernel that is loaded or launched, cuBLAS's and NCCL's own buffers).
_OF_HOST = ("can't allocate memory", "not enough memory")
_OF_GPU = ("out of memory", "ALLOC_FAILED")
_NEARLY_NONE = 1 << 30  # bytes free on a GPU on which an allocation failed


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, on a GPU or on the host; lowtide's own errors never do."""
    if isinstance(error, LowtideError):
        return False
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in (*_OF_HOST, *_OF_GPU))


def is_the_gpus(error: BaseException) -> bool:
    """Return whether an out-of-memory error is of the GPU's memory, not the host's.

    If its text does not say which, the GPU's free memory decides.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    if not isinstance(error, RuntimeError) or any(words in text for words in _OF_HOST):
        return False
    return torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < _NEARLY_NONE
