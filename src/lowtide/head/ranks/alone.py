"""A group of one rank, which holds the whole vocabulary: it answers every exchange at once, with its own numbers."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lowtide.head.gradients import Gradients
from lowtide.head.rows import take_rows

Maybe = TypeVar("Maybe", Tensor, Tensor | None)


class Answered(NamedTuple):
    """An exchange's result that is there already."""

    value: Tensor

    def get(self) -> Tensor:
        """Return it."""
        return self.value


class Alone:
    """Stands where `Ranks` does; its methods are documented there.

    Args:
        V: The vocabulary.
    """

    alone, spread, first, groups, size = True, False, 0, 1, 1

    def __init__(self, V: int) -> None:
        self.rows = self.vocab = self.most_rows = V

    def chunks(self, plan: Any) -> Iterator[slice]:
        """Yield each chunk's rows."""
        return plan.slices()  # type: ignore[no-any-return]

    def order(self, plan: Any) -> None:
        """Return the order of the tokens in the chunks: their own."""

    def reordered(self, plan: Any, rows: int) -> None:
        """Return the order of chunks of other rows: the same."""

    def here(self, y: Tensor) -> tuple[Tensor, None]:
        """Return each class's row of the weight, and no mask: all are here."""
        return y, None

    def gather(self, x: Tensor) -> Tensor:
        """Return every rank's ``x`` [1, ...]."""
        return x[None]

    def begin_sum_of(self, x: Tensor) -> Callable[[], Tensor]:
        """Return what returns the sum of all ranks' ``x``."""
        return lambda: x

    def sum_of(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' ``x``."""
        return x

    logsumexp_of = highest_of = sum_of

    def begin_rows(self, input: Tensor, index: Tensor | None, part: slice, dtype: torch.dtype) -> Answered:
        """Return a chunk's hidden states [C, D]."""
        return Answered(take_rows(input, index, part, dtype))

    def begin_sum(self, product_CD: Tensor, part: slice, index: Tensor | None = None) -> Callable[[Gradients], None]:
        """Return what writes a chunk's gradient of the hidden states where it belongs."""
        return lambda into: into.put_input(part if index is None else index[part], product_CD)

    def compare(self, numbers: dict[str, int], *, known: bool = False) -> bool:  # noqa: ARG002
        """Check numbers that must be the same on every rank: there are no others. Return ``known``."""
        return known

    def share_of(self, part: slice) -> slice:
        """Return the rows of a chunk that are this rank's share: all."""
        return part

    def whole_rows(self, z_CV: Tensor) -> Tensor:
        """Return logits of this rank's share of a chunk's rows and of all classes: those that there are."""
        return z_CV

    def own_classes(self, g_cV: Tensor, C: int) -> Tensor:  # noqa: ARG002
        """Undo `whole_rows` for a gradient."""
        return g_cV

    def add_up_(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' ``x``, in its memory."""
        return x

    put_together_ = add_up_

    def local(self, tensor: Maybe) -> Maybe:
        """Return what this rank holds of a tensor: all of it."""
        return tensor

    whole = result = mine = class_weight = local

    def factors(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return a trained scale as the factor of the hidden states and of the bias."""
        return scale, scale

    def keep(self) -> None:
        """Keep what was gathered for a second pass: nothing is."""

    let_go = keep
