"""Which errors say that there was no memory."""

import torch

from lowtide.errors import LowtideError

# What has no class of its own: the CPU allocator's, and on a GPU all but PyTorch's allocator (cudaHostAlloc, a kernel
# that is loaded or launched, cuBLAS's and NCCL's own buffers).
_OF_HOST = ("can't allocate memory", "not enough memory")
_OF_GPU = ("out of memory", "ALLOC_FAILED")
_NEARLY_NONE = 1 << 30  # bytes free on a GPU where what asked for more failed


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory could not be had, on a GPU or on the host; none of lowtide's own does.

    Args:
        error: Anything that was raised.
    """
    if isinstance(error, LowtideError):
        return False
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in (*_OF_HOST, *_OF_GPU))


def is_the_gpus(error: BaseException) -> bool:
    """Return whether an `is_out_of_memory` is of the GPU's memory, and not of the host's.

    Args:
        error: One that says so. Where its text does not tell which, the GPU's free memory does.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    if not isinstance(error, RuntimeError) or any(words in text for words in _OF_HOST):
        return False
    return torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < _NEARLY_NONE
