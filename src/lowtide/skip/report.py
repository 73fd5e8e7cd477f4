"""What the last call that skipped did."""

from torch import Tensor

from lowtide.arguments import check_tensor
from lowtide.skip.memory import Report, known_of


def skip_report(linear_weight: Tensor) -> Report | None:
    """Return what the last call with this weight and ``HeadOptions(skip=...)`` did; None before one skipped tiles.

    The host waits for the device. See docs/skipping.md.

    Args:
        linear_weight: The tensor itself that `linear_cross_entropy` or `linear_logprobs` got.

    Returns:
        Report: ``share`` of the tiles that are computed, ``dropped_mass``, ``logit_error``, ``input_error``,
            ``weight_error``, ``threshold``, ``calls``, and ``dense`` of them that skipped nothing.

    Raises:
        ArgumentTypeError: ``linear_weight`` is no tensor.

    Example:
        >>> skip_report(torch.randn(50, 8)) is None
        True
    """
    known = known_of(check_tensor("linear_weight", linear_weight))
    return None if known is None else known.report()
