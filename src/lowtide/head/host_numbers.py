"""Numbers that the host reads calls after the device has computed them, without a wait."""

from collections.abc import Callable

import torch
from torch import Tensor


def host_memory(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return memory on the host that a device writes to, whatever mode the first call runs in."""
    with torch.inference_mode(mode=False):  # training cannot write to an inference tensor
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=torch.cuda.is_available())


def sent(x: Tensor, to: Tensor) -> Callable[[], None]:
    """Begin to copy numbers to the host; return what waits until they are there."""
    to.copy_(x, non_blocking=True)
    if not x.is_cuda:
        return lambda: None
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record(torch.cuda.current_stream(x.device))
    return arrived.synchronize
