"""A group of one rank, which has the whole vocabulary: each exchange returns its own numbers at once."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import Tensor

from lowtide.head.gradients import Gradients
from lowtide.head.ranks.exchange import Exchange
from lowtide.head.rows import take_rows

Given = TypeVar("Given")


class Alone:
    """Stands where `Ranks` does, for V classes; its methods are documented there."""

    alone, spread, first, groups, size = True, False, 0, 1, 1

    def __init__(self, V: int) -> None:
        self.rows = self.vocab = self.most_rows = V

    def itself(self, x: Given, *_: object) -> Given:
        """Return what is given: the sum over all ranks, what this one holds of it, and so on."""
        return x

    sum_of = logsumexp_of = highest_of = add_up_ = put_together_ = whole_rows = own_classes = share_of = itself
    local = whole = result = mine = class_weight = itself

    def nothing(self, *_: object, **__: object) -> None:
        """Return that tokens are in order, and that nothing was gathered."""

    order = reordered = keep = nothing

    def chunks(self, plan: Any) -> Iterator[slice]:
        """Yield each chunk's rows."""
        return plan.slices()  # type: ignore[no-any-return]

    def here(self, y: Tensor) -> tuple[Tensor, None]:
        """Return each class's row of the weight, and no mask: all are here."""
        return y, None

    def gather(self, x: Tensor) -> Tensor:
        """Return every rank's ``x`` [1, ...]."""
        return x[None]

    def begin_sum_of(self, x: Tensor) -> Callable[[], Tensor]:
        """Return what returns the sum of all ranks' ``x``."""
        return lambda: x

    def begin_rows(self, input: Tensor, index: Tensor | None, part: slice, dtype: Any) -> Exchange:
        """Return a chunk's hidden states [C, D]."""
        return Exchange(take_rows(input, index, part, dtype))

    def begin_sum(self, product_CD: Tensor, part: slice, index: Tensor | None = None) -> Callable[[Gradients], None]:
        """Return what writes a chunk's gradient of the hidden states where it belongs."""
        return lambda into: into.put_input(part if index is None else index[part], product_CD)

    def compare(self, numbers: dict[str, int], *, known: bool = False) -> bool:  # noqa: ARG002
        """Return ``known``: there are no others to compare with."""
        return known
