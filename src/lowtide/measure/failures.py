"""Which errors mean that memory ran out."""

import torch

from lowtide.errors import LowtideError

# Errors without their own class: the CPU allocator's, and on a GPU all but PyTorch's allocator's (cudaHostAlloc, a
# kernel that is loaded or launched, cuBLAS's and NCCL's own buffers).
_OF_HOST = ("can't allocate memory", "not enough memory")
_OF_GPU = ("out of memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, on a GPU or on the host; lowtide's own errors never do."""
    if isinstance(error, LowtideError):
        return False
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in (*_OF_HOST, *_OF_GPU))
