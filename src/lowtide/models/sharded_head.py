"""The output embedding with its classes in parts over the ranks: what remembers a call of it.

A DTensor with ``Shard(0)`` on a mesh of one axis, the tensor-parallel one. All ranks of the mesh make the same calls on
the same tokens, and what becomes of the logits is decided by what is alike on all: kinds, shapes, placements, options.
Numbers are looked at only together, since a rank that stopped alone would leave the others waiting.

Legend: hidden [..., D], logits [..., V] of which a rank has V_r.
"""

from typing import Any

from torch import Tensor

from lowtide.arguments import is_dtensor
from lowtide.head.options import HeadOptions
from lowtide.head.ranks import exchange
from lowtide.head.ranks.shard import shard_of_dtensor
from lowtide.models.agreement import why_not_agreed
from lowtide.models.eligibility import why_not_now
from lowtide.models.head_call import HeadCall
from lowtide.models.parallel_style import Style, style_aside
from lowtide.models.report import PatchReport
from lowtide.models.steps import Step, rows_of


def sharded_call(head: Any, hidden: Any, report: PatchReport, options: HeadOptions | None) -> HeadCall | str:
    """Return what remembers a call of a head whose weight is a DTensor, or why it must return real logits."""
    from torch.distributed.tensor import Shard

    weight, style = head.weight, style_aside(head)
    mesh = weight.device_mesh
    if style is not None and style.mesh != mesh:
        return "the output embedding's weight is not on the mesh of what wraps it"
    for name, parameter in (("weight", weight), ("bias", head.bias)):
        if parameter is None:
            continue
        if not is_dtensor(parameter) or parameter.device_mesh != mesh:
            return f"the output embedding's {name} is not on the mesh of its weight"
        if mesh.ndim != 1 or type(parameter.placements[0]) is not Shard or parameter.placements[0].dim != 0:
            return f"the output embedding's {name} has placements {parameter.placements}, not Shard(0) on one axis"
    if is_dtensor(hidden):
        if hidden.device_mesh != mesh:
            return "the hidden states are not on the mesh of the output embedding"
        why_not = _why_not_placed(hidden.placements[0], hidden.dim())
        if why_not is not None:
            return why_not
    elif type(hidden) is not Tensor:
        return f"the hidden states are a {type(hidden).__name__} of {getattr(hidden, 'dtype', 'no dtype')}"
    elif style is None:
        return "the output embedding's weight is a DTensor, and the hidden states are not"
    elif not style.input_placement.is_replicate():
        why_not = _why_not_placed(style.input_placement, hidden.dim())
        if why_not is not None:
            return why_not
        hidden = _placed(hidden, mesh, style.input_placement)
    why_not = why_not_now(head, hidden)
    if style is None:  # with one, the ranks have told each other before
        why_not = why_not_agreed(head, mesh, hidden.device, why_not)
    if why_not is not None:
        return why_not
    return ShardedHeadCall(head, hidden, style, report, options)


def _why_not_placed(placement: Any, dim: int) -> str | None:
    """Return why hidden states of ``dim`` axes that lie so are not those of all tokens, or of a part of the tokens."""
    from torch.distributed.tensor import Shard

    if placement.is_replicate() or (type(placement) is Shard and 0 <= placement.dim < dim - 1):
        return None
    return f"the hidden states have placement {placement}, not Replicate() or Shard of an axis of tokens"


class ShardedHeadCall(HeadCall):
    """One call of an output embedding whose classes are in parts.

    Args:
        head: The patched output embedding.
        hidden: Its input [..., D], whole on each rank or a DTensor.
        style: What is wrapped around the head; None where nothing is.
        report: Where to count what becomes of the logits.
        options: For `linear_cross_entropy`.
    """

    def __init__(
        self, head: Any, hidden: Tensor, style: Style | None, report: PatchReport, options: HeadOptions | None
    ) -> None:
        self._mesh: Any = head.weight.device_mesh
        self._gives_local = style is not None and style.gives_local
        super().__init__(head, hidden, report, options)

    @property
    def only_loss(self) -> bool:
        """Whether the cross entropy alone can do without logits: where tokens are in parts, or logits are DTensors."""
        return is_dtensor(self.hidden) or not self._gives_local

    @property
    def in_parts(self) -> bool:
        """They are."""
        return True

    @property
    def gives_dtensor(self) -> bool:
        """Whether the logits are a DTensor."""
        return not self._gives_local

    def operands(
        self, head: Any, hidden: Any, steps: tuple[Step, ...]
    ) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
        """Return plain tensors and which classes these are; of tokens in parts DTensors, if each has its part of them.

        Where rows of tokens in parts are chosen, all of them are gathered: a row's rank is not told by its number then.
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
        """Return of a vector [V] what goes with ``weight``: this rank's numbers, or a DTensor."""
        from torch.distributed.tensor import Shard

        whole = _placed(vector, self._mesh, _replicate())
        part = whole.redistribute(placements=[Shard(0)])
        held: Tensor = part if is_dtensor(weight) else part.to_local()
        return held

    def as_given(self, result: Any) -> Tensor:
        """Return a result as the logits would have given it: a plain tensor of theirs, a DTensor of a DTensor."""
        if is_dtensor(result) != self.gives_dtensor:
            result = _placed(result, self._mesh, _replicate()) if self.gives_dtensor else result.to_local()
        given: Tensor = result
        return given

    def _differs(self, tensors: tuple[Tensor | None, ...]) -> Tensor:
        """Return the same of all ranks: an error on one of them alone would leave the others waiting."""
        differing = super()._differs(tensors).long()
        exchange.begin_sum(differing, self._mesh.get_group()).work.wait()
        return differing > 0


def _placed(tensor: Tensor, mesh: Any, placement: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(tensor, mesh, [placement], run_check=False)


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()
