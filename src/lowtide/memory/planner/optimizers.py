"""Optimizers that are planned for, and dtypes, by name."""

from dataclasses import dataclass

DTYPES = ("bfloat16", "float16", "float32")  # as torch has them


@dataclass(frozen=True)
class Optimizer:
    """Bytes an optimizer takes for each byte, or each number, of the parameters.

    Attributes:
        states: Tensors of the parameters' size and dtype that it keeps.
        bytes_each: Bytes it keeps for each number besides.
        temporary: Tensors of all parameters' size that its step makes.
        traffic: Times that a copy would read or write the parameters' bytes in the time of a step, as measured.
    """

    states: int
    bytes_each: float = 0.0
    temporary: int = 0
    traffic: float = 3.0


OPTIMIZERS = {
    "adamw": Optimizer(2, traffic=8.1),
    "adamw-foreach": Optimizer(2, temporary=1, traffic=21),
    "adamw-8bit": Optimizer(0, bytes_each=2 + 2 * 4 / 256, traffic=6),
    "sgd": Optimizer(0, traffic=3),
    "sgd-momentum": Optimizer(1, traffic=8.2),
}
