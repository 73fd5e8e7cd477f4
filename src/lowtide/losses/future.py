"""What lies some tokens ahead in a sequence, and not beyond the end of its document. T tokens of a sequence."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from lowtide.arguments import check_index, check_tensor
from lowtide.errors import ArgumentTypeError, ArgumentValueError, message
from lowtide.losses.checks import check_place


def future_labels(
    labels: Tensor, steps: int, *, first: int = 1, documents: Tensor | None = None, ignore_index: int = -100
) -> Tensor:
    """Return what each of several predictions is scored against: labels further and further ahead.

        out[k, ..., t] = labels[..., t + first + k]

    and ``ignore_index`` where that lies behind the end of the sequence, or in another document than t.

    Args:
        labels: Class indices [..., T], not shifted: ``labels[t]`` belongs to token t, as in transformers.
        steps: K, how many predictions each position makes.
        first: How far ahead the first one is: 1 for a model's own head, 2 for Medusa's heads and for modules of
            multi-token prediction beside that head.
        documents: Packed sequences: integers [..., T] that change from one document to the next, such as
            ``(position_ids == 0).cumsum(-1)``.
        ignore_index: What marks a label that is not scored.

    Returns:
        Tensor: [K, ..., T], int64.

    Raises:
        ArgumentValueError: A shape, device or number that does not fit; also a `ValueError`.
        ArgumentTypeError: A dtype that does not fit; also a `TypeError`.
    """
    labels = check_integers("labels", labels).long()  # ignore_index may be negative
    steps, first = check_index("steps", steps), check_index("first", first)
    ignore_index = check_index("ignore_index", ignore_index)
    if steps < 1:
        raise ArgumentValueError(message("steps", "an int above 0", f"{steps}"))
    if first < 0:
        raise ArgumentValueError(message("first", "an int of 0 or more", f"{first}"))
    return torch.stack(list(map(ahead_of(labels, documents, "labels", ignore_index), range(first, first + steps))))


def ahead_of(x: Tensor, documents: Tensor | None, like: str, fill: int | bool) -> Callable[[int], Tensor]:
    """Return what moves ``x`` [..., T] a number of steps to the left, ``fill`` where that leaves a document."""
    if x.dim() == 0:
        raise ArgumentValueError(message(like, "shape [..., T]", "no axes"))
    runs = None
    if documents is not None:
        check_integers("documents", check_place("documents", check_tensor("documents", documents), like, x))
        changes = documents[..., 1:] != documents[..., :-1]
        runs = pad(changes.cumsum(-1), (x.shape[-1] - changes.shape[-1], 0))  # numbered: a document's name may return

    def moved(steps: int) -> Tensor:
        end = (0, min(steps, x.shape[-1]))
        out = pad(x[..., steps:], end, value=fill)
        return out if runs is None else out.where(pad(runs[..., steps:], end, value=-1) == runs, fill)

    return moved


def check_integers(name: str, value: object) -> Tensor:
    """Return a tensor of integers, not bool."""
    tensor = check_tensor(name, value)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ArgumentTypeError(message(name, "an integer dtype", str(tensor.dtype)))
    return tensor
