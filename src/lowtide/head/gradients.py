"""The gradients of a head as chunks add them up, and where a chunk's rows go."""

from dataclasses import dataclass

from torch import Tensor

from lowtide.head.scaling import lift_of_rows


@dataclass(kw_only=True)
class Gradients:
    """The gradients that a pass sums, each None if it is not needed."""

    input_ND: Tensor | None = None
    lift_N: Tensor | None = None  # [N] wide: what each row of ``input_ND`` was multiplied with; None: nothing
    weight_VD: Tensor | None = None
    bias_V: Tensor | None = None

    def put_input(self, rows: slice | Tensor, wide_CD: Tensor) -> None:
        """Write rows of the input's gradient, scaled up if requested: then ``wide_CD`` is changed in place."""
        assert self.input_ND is not None
        if self.lift_N is not None:
            lift_C = lift_of_rows(wide_CD)
            self.lift_N[rows] = lift_C
            wide_CD.mul_(lift_C[:, None])
        if isinstance(rows, slice):
            self.input_ND[rows].copy_(wide_CD)
        else:
            self.input_ND.index_copy_(0, rows, wide_CD.to(self.input_ND.dtype))
