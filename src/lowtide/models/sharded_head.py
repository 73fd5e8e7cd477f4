"""The output embedding with its classes sharded over ranks: a record of one call.

The weight is a DTensor with ``Shard(0)`` on a mesh of one axis, the tensor-parallel one. All ranks of the mesh make the
same calls on the same tokens. Only what is equal on all ranks decides what becomes of the logits: types, shapes,
placements, options. Values are compared on all ranks together, since a rank that raised alone would leave others
waiting.

Legend: hidden [..., D], logits [..., V] of which a rank has V_r.
"""

from typing import Any

from torch import Tensor

from lowtide.arguments import is_dtensor
from lowtide.head.options import HeadOptions
from lowtide.head.ranks import exchange
from lowtide.head.ranks.shard import shard_of_dtensor
from lowtide.models.eligibility import why_not_now
from lowtide.models.head_call import HeadCall
from lowtide.models.parallel_style import Style, is_sharded_along, style_aside, why_not_agreed
from lowtide.models.report import PatchReport
from lowtide.models.steps import Step, rows_of


def sharded_call(head: Any, hidden: Any, report: PatchReport, options: HeadOptions | None) -> HeadCall | str:
    """Return a record of a call of a head whose weight is a DTensor, or why it must return real logits."""
    weight, style = head.weight, style_aside(head)
    mesh = weight.device_mesh
    if style is not None and style.mesh != mesh:
        return "the output embedding's weight is not on the mesh of what wraps it"
    for name, parameter in (("weight", weight), ("bias", head.bias)):
        if parameter is None:
            continue
        if not is_dtensor(parameter) or parameter.device_mesh != mesh:
            return f"the output embedding's {name} is not on the mesh of its weight"
        if mesh.ndim != 1 or not is_sharded_along(parameter.placements[0], 0):
            return f"the output embedding's {name} has placements {parameter.placements}, not Shard(0) on one axis"
    if is_dtensor(hidden):
        if hidden.device_mesh != mesh:
            return "the hidden states are not on the mesh of the output embedding"
        placement = hidden.placements[0]
    elif type(hidden) is not Tensor:
        return f"the hidden states are a {type(hidden).__name__} of {getattr(hidden, 'dtype', 'no dtype')}"
    elif style is None:
        return "the output embedding's weight is a DTensor, and the hidden states are not"
    else:
        placement = style.input_placement
    if not placement.is_replicate():
        if not any(is_sharded_along(placement, axis) for axis in range(hidden.dim() - 1)):
            return f"the hidden states have placement {placement}, not Replicate() or Shard of an axis of tokens"
        hidden = hidden if is_dtensor(hidden) else _placed(hidden, mesh, placement)
    why_not = why_not_now(head, hidden)
    if style is None:  # with one, the ranks have agreed before
        why_not = why_not_agreed(head, mesh, hidden.device, why_not)
    if why_not is not None:
        return why_not
    return ShardedHeadCall(head, hidden, style, report, options)


class ShardedHeadCall(HeadCall):
    """One call of an output embedding with sharded classes; ``hidden`` is whole on each rank, or a DTensor."""

    sharded = True

    def __init__(
        self, head: Any, hidden: Tensor, style: Style | None, report: PatchReport, options: HeadOptions | None
    ) -> None:
        self._mesh: Any = head.weight.device_mesh
        self.gives_dtensor = style is None or not style.gives_local
        self.only_loss = is_dtensor(hidden) or self.gives_dtensor
        super().__init__(head, hidden, report, options)

    def operands(
        self, head: Any, hidden: Any, steps: tuple[Step, ...]
    ) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
        """Return plain tensors and the range of their classes; DTensors for sharded tokens of which each rank has rows.

        If ``steps`` choose rows of sharded tokens, these are gathered: a row's number does not tell its rank then.
        """
        weight, bias = head.weight, head.bias
        if is_dtensor(hidden):
            if not hidden.placements[0].is_replicate():
                if all(step.keeps_rows for step in steps):
                    return hidden, weight, bias, {}
                hidden = hidden.redistribute(placements=[_replicate()])
            hidden = hidden.to_local()  # its gradient is the whole one on each rank, as that of Replicate() is
        shard = shard_of_dtensor("linear_weight", weight, self._mesh)
        bias = None if bias is None else bias.to_local()
        return rows_of(hidden, steps), weight.to_local(), bias, {"vocab_shard": shard}

    def of_classes(self, vector: Tensor, weight: Tensor) -> Tensor:
        """Return the part of a vector [V] that goes with ``weight``: this rank's shard, or a DTensor."""
        from torch.distributed.tensor import Shard

        part = _placed(vector, self._mesh, _replicate()).redistribute(placements=[Shard(0)])
        return part if is_dtensor(weight) else part.to_local()  # type: ignore[no-any-return]

    def as_given(self, result: Any) -> Tensor:
        """Return a result as a DTensor if the logits are one, else as a plain tensor."""
        if is_dtensor(result) == self.gives_dtensor:
            return result  # type: ignore[no-any-return]
        return _placed(result, self._mesh, _replicate()) if self.gives_dtensor else result.to_local()  # type: ignore[no-any-return]

    def _differs(self, tensors: tuple[Tensor | None, ...]) -> Tensor:
        """Return the same for all ranks: an error on one of them alone would leave the others waiting."""
        differing = super()._differs(tensors).long()
        exchange.begin_sum(differing, self._mesh.get_group()).work.wait()
        return differing > 0


def _placed(tensor: Tensor, mesh: Any, placement: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(tensor, mesh, [placement], run_check=False)


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()
