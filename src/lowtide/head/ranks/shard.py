"""A rank's shard of the vocabulary: V classes, of which this rank holds V_r."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lowtide.arguments import check_tensor, is_dtensor
from lowtide.errors import ArgumentTypeError, ArgumentValueError, message
from lowtide.head.ranks import exchange as exchange


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """Which classes this rank holds of a vocabulary that is sharded over the ranks of a group, in their order.

    Made once by `VocabShard.of`, or from known numbers; ranks may hold different numbers of classes, or none.

    Args:
        group: The ranks that together hold the vocabulary. None: all ranks.
        first: This rank's first class.
        rows: How many it holds: rows of its ``linear_weight``.
        vocab: V, the classes of all ranks.
        largest: Most rows that any rank holds, the same number on every rank: all plan by it, and so all plan alike.
            None: none holds more than ``vocab`` in as many parts of one size has.

    Raises:
        ArgumentValueError: Numbers that do not fit each other, or no process group.
    """

    group: Any
    first: int
    rows: int
    vocab: int
    largest: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "group", group_of(self.group))
        if min(self.first, self.rows) < 0 or self.first + self.rows > self.vocab:
            got = f"first={self.first}, rows={self.rows}, vocab={self.vocab}"
            raise ArgumentValueError(message("VocabShard", "first and rows of 0 or more that end within vocab", got))
        if self.largest is not None and not self.rows <= self.largest <= self.vocab:
            expected = f"largest from {self.rows}, this rank's rows, to {self.vocab}, the vocabulary"
            raise ArgumentValueError(message("VocabShard", expected, str(self.largest)))
        if self.rows > self.most_rows:
            expected = f"at most {self.most_rows} rows, {self.vocab} classes in equal parts, where largest is None"
            hint = "Give every rank largest=, the most rows that any of them holds; VocabShard.of finds it."
            raise ArgumentValueError(message("VocabShard", expected, f"rows={self.rows}", hint))

    @classmethod
    def of(cls, linear_weight: Tensor, group: Any = None) -> "VocabShard":
        """Return the shard that ``linear_weight`` [V_r, D] is. Every rank of the group has to call this.

        The ranks exchange their numbers of rows, and the host waits: do it once, not in each step.

        Args:
            linear_weight: This rank's rows.
            group: A process group. None: all ranks.
        """
        rows = check_tensor("linear_weight", linear_weight).shape[0]
        group = group_of(group)
        sizes = exchange.number_of_all(rows, group, linear_weight.device)
        first = sum(sizes[: group.rank()])
        return cls(group=group, first=first, rows=rows, vocab=sum(sizes), largest=max(sizes))

    @property
    def most_rows(self) -> int:
        """Return the most rows that any rank holds."""
        return -(-self.vocab // self.group.size()) if self.largest is None else self.largest


def group_of(group: Any) -> Any:
    """Return a process group that this rank is in, all ranks for None; raise for what is none."""
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup):
        hint = "Call torch.distributed.init_process_group first, and this on the group's ranks alone."
        raise ArgumentValueError(message("group", "a process group that this rank is in", repr(group), hint))
    return found


def checked_shard(tensors: dict[str, Tensor | None], shard: object) -> VocabShard:
    """Return the user's shard of plain tensors; raise where it does not fit them."""
    if not isinstance(shard, VocabShard):
        raise ArgumentTypeError(message("vocab_shard", "lowtide.VocabShard or None", type(shard).__name__))
    for name, tensor in tensors.items():
        if is_dtensor(tensor):
            hint = "The placements of a DTensor are its shard: leave vocab_shard out."
            raise ArgumentTypeError(message(name, "a plain tensor with vocab_shard", "a DTensor", hint))
    weight = tensors["linear_weight"]
    if weight is not None and weight.dim() and weight.shape[0] != shard.rows:
        expected = f"shape [{shard.rows}, D], as vocab_shard has"
        raise ArgumentValueError(message("linear_weight", expected, str(list(weight.shape))))
    return shard


def shard_of_dtensor(name: str, weight: Any, mesh: Any) -> VocabShard:
    """Return the shard that a DTensor [V, ...] holds here: it must be ``Shard(0)`` on one axis, that of ``mesh``."""
    if weight.device_mesh != mesh or mesh.ndim != 1 or not weight.placements[0].is_shard(0):
        hint = (
            'Place all of them on the axis of the vocabulary alone, such as mesh["tp"]; inside the forward of what'
            " fully_shard wraps its weights are so already. Or redistribute it."
        )
        got = f"{weight.placements} on {weight.device_mesh}"
        expected = "a DTensor with Shard(0) on a mesh of one axis, the one of the other DTensors"
        raise ArgumentValueError(message(name, expected, got, hint))
    vocab, size = weight.shape[0], -(-weight.shape[0] // mesh.size())
    first = min(mesh.get_local_rank() * size, vocab)
    rows = min(size, vocab - first)
    if weight._local_tensor.shape[0] != rows:
        hint = "Pass the local tensors with vocab_shard=VocabShard.of(local_weight, group)."
        raise ArgumentValueError(message(name, f"{rows} rows here", str(weight._local_tensor.shape[0]), hint))
    return VocabShard(group=mesh.get_group(), first=first, rows=rows, vocab=vocab, largest=size)
