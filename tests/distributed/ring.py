"""Ring attention on CPUs: PyTorch's ring around the CPU's flash attention, which its dispatcher leaves out."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_SEQUENCE = 2  # the axis of queries [batch, heads, T, D]


def ring_on_cpus() -> None:
    """Let ``context_parallel`` run the ring on CPUs, from now on in this process."""
    ring.custom_ops.update({_FORWARD: _forward, _BACKWARD: _backward})


def _by_name(operator: Any, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """Return the mesh, and the arguments by their names, with local tensors."""
    names = [argument.name for argument in operator._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    assert given.pop("attn_mask", None) is None
    local = {name: x.to_local() if isinstance(x, DTensor) else x for name, x in given.items()}
    return given["query"].device_mesh, local


def _forward(operator: Any, args: Any, kwargs: Any) -> tuple[DTensor, ...]:
    mesh, given = _by_name(operator, args, kwargs)
    return _placed(mesh, ring._templated_ring_attention(mesh.get_group(), _SEQUENCE, operator, **given))


def _backward(operator: Any, args: Any, kwargs: Any) -> tuple[DTensor, ...]:
    mesh, given = _by_name(operator, args, kwargs)

    def block(**tensors: Any) -> Any:
        positional = [tensors.pop(argument.name) for argument in operator._schema.arguments[:8]]
        return operator(*positional, **tensors)

    group = mesh.get_group()
    return _placed(
        mesh, ring._templated_ring_attention_backward(group, _SEQUENCE, block, grad_out_name="grad_out", **given)
    )


def _placed(mesh: Any, tensors: tuple[torch.Tensor, ...]) -> tuple[DTensor, ...]:
    return tuple(DTensor.from_local(x, mesh, [Shard(_SEQUENCE)], run_check=False) for x in tensors)
