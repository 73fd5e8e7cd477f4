"""A gated MLP with sharded projections, as tensor parallelism cuts it: this rank's shard runs fused.

W ranks; gate and up [F, D] are cut along F (``ColwiseParallel``), down [D, F] as well (``RowwiseParallel``). Each rank
runs the MLP of its F_r, and the outputs are summed over the ranks. In backward so are the gradients of the input, those
through gate and through up together: one sum, where two wrapped layers make two.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lowtide.arguments import is_dtensor
from lowtide.mlp.swiglu import swiglu_mlp
from lowtide.models.adapters import AdaptedLinear
from lowtide.models.eligibility import own_hooks
from lowtide.models.parallel_style import Style, is_sharded_along, linear_style

_CUT = (0, 0, 1)  # the axis along which each projection is cut


def mesh_of_mlp(layers: Sequence[AdaptedLinear]) -> Any:
    """Return the mesh over which gate, up and down are cut so, None if nothing wraps them, or a text: why not."""
    styles: list[Any] = [linear_style(layer.base) for layer in layers]
    if not any(styles):
        return None
    if len(layers) == 2:
        return "gate and up are one projection (gate_up_proj), and sharded"
    if any(layer.adapters or layer.around for layer in layers):
        return "adapters are on sharded projections"
    kinds = ("ColwiseParallel", "ColwiseParallel", "RowwiseParallel")
    for style, kind in zip(styles, kinds, strict=True):
        if not isinstance(style, Style) or style.kind != kind or not _has_these_layouts(style):
            return "its projections are sharded in another way than by columns, then by rows"
        if style.mesh != styles[0].mesh or style.mesh.ndim != 1:
            return "its projections are on several meshes"
    return styles[0].mesh


def is_hooked(layers: Sequence[AdaptedLinear]) -> bool:
    """Whether anything but its style is around a projection."""
    for layer in layers:
        style: Any = linear_style(layer.base)
        if any(hook not in (style.before, style.after) for hook in own_hooks(layer.base)):
            return True
        if vars(layer.base).get("forward") is not style.forward:
            return True
    return False


def is_cut_over(layers: Sequence[AdaptedLinear], mesh: Any) -> bool:
    """Whether the weights are now DTensors on ``mesh``, cut so that each rank has a shard."""
    F, W = layers[0].base.weight.shape[0], mesh.size()
    if -(-F // W) * (W - 1) >= F:  # the last has none
        return False
    return all(
        _is_placed(layer.base.weight, mesh, axis) and _is_placed(layer.base.bias, mesh, None if axis == 1 else axis)
        for layer, axis in zip(layers, _CUT, strict=True)
    )


def run_sharded(
    x: Tensor, layers: Sequence[AdaptedLinear], mesh: Any, activation: str, level: int, tile: int | None
) -> Tensor:
    """Return the MLP of ``x`` [..., D], which is the same on every rank, as is its gradient."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    gate, up, down = (layer.base for layer in layers)
    # forward: nothing; backward: each rank has a part of the sum, and DTensor sums it
    mine = DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
    part = swiglu_mlp(
        mine,
        _local(gate.weight),
        _local(up.weight),
        _local(down.weight),
        gate_bias=_local(gate.bias),
        up_bias=_local(up.bias),
        activation=activation,
        checkpoint_level=level,
        tile_tokens=tile,
    )
    summed = DTensor.from_local(part, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
    y: Tensor = summed.to_local()
    if down.bias is not None:
        y = y + _local(down.bias).to(y.dtype)
    return y


def _has_these_layouts(style: Style) -> bool:
    cut, whole = style.output_placement, style.input_placement
    if style.kind == "RowwiseParallel":
        cut, whole = whole, cut
    return style.gives_local and bool(whole.is_replicate()) and is_sharded_along(cut, -1)


def _is_placed(parameter: Any, mesh: Any, axis: int | None) -> bool:
    """Whether a parameter, if there is one, is on ``mesh``, cut along ``axis``, or whole if that is None."""
    if parameter is None:
        return True
    if not is_dtensor(parameter) or parameter.device_mesh != mesh:
        return False
    (placement,) = parameter.placements
    return bool(placement.is_replicate()) if axis is None else is_sharded_along(placement, axis)


def _local(parameter: Any) -> Any:
    return None if parameter is None else parameter.to_local()
