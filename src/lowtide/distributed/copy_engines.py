"""FSDP2's exchanges by copy engines, where GPUs of one host reach each other: GEMMs keep all multiprocessors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from lowtide.errors import UnsupportedError, message
from lowtide.head.ranks.exchange import all_gather, peers_for, reduce_scatter
from lowtide.head.ranks.peers import LEAST_BYTES, Peers

SLOT_BYTES = 2**27  # two of these a GPU; small slots would cost the host a call for each
_OPERATIONS = dist.ReduceOp.SUM, dist.ReduceOp.AVG


def exchange_by_copy_engines(model: nn.Module, *, required: bool = False) -> None:
    """Let FSDP2 gather the weights of a model's units and reduce their gradients by the GPUs' copy engines.

    NCCL's kernels hold multiprocessors while they run, so that the layers' GEMMs beside them take longer. Here each
    GPU's copy engine writes into the others' memory, and the only kernels are additions and copies within a GPU. Sums
    are those of NCCL: in the gradients' dtype, W ranks one after another, divided by W where FSDP2 takes the mean.
    A group of GPUs takes 256 MiB of each for them, outside of PyTorch's allocator. Call it after ``fully_shard``:

        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        exchange_by_copy_engines(model)

    The exchanges of a group follow one another. Those of groups whose GPUs cannot reach each other (several hosts,
    ``NCCL_P2P_DISABLE=1``, ``CUDA_DEVICE_MAX_CONNECTIONS=1``, no CUDA) and reductions by a factor of the user's own
    (``set_gradient_divide_factor``) go through torch.distributed.

    Args:
        model: Its units are modules that ``fully_shard`` was called with.
        required: Raise at the first exchange that would go through torch.distributed.

    Raises:
        UnsupportedError: ``required``, and a group cannot; it is raised in the model's forward or backward.
    """
    for module in model.modules():
        if (gather := getattr(module, "set_custom_all_gather", None)) is not None:
            gather(_Gather(required))
            module.set_custom_reduce_scatter(_Reduce(required))  # type: ignore[operator]


class _Exchange:
    """What FSDP2 calls in place of a collective, with its names of arguments."""

    def __init__(self, required: bool) -> None:
        self._required = required

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _peers(self, x: Tensor, group: Any, *, known: bool = True) -> Peers | None:
        peers = peers_for(x, group, SLOT_BYTES) if known else None
        if peers is None and self._required and group.size() > 1 and (x.nbytes >= LEAST_BYTES or not x.is_cuda):
            got = "GPUs of which one cannot, or an operation that is no sum or mean" if x.is_cuda else str(x.device)
            expected, hint = "GPUs of one host that write into each other's memory", "Leave it out: NCCL does the same."
            raise UnsupportedError(message("copy engines", expected, got, hint))
        return peers


class _Gather(_Exchange):
    @_disable_dynamo
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        peers = self._peers(input_tensor, group)
        if peers is None:
            return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        return _ended(peers.begin_gather(input_tensor, output_tensor), async_op)


class _Reduce(_Exchange):
    @_disable_dynamo
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        peers = self._peers(input_tensor, group, known=op in _OPERATIONS)
        if peers is None:
            return reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        mean = op == dist.ReduceOp.AVG
        return _ended(peers.begin_scattered_sum(input_tensor, output_tensor, mean=mean), async_op)


def _ended(completion: Any, async_op: bool) -> Any:
    """Return what an exchange returns: what to wait for, or None once the current stream waits for it."""
    return completion if async_op else completion.wait()
