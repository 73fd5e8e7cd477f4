"""Optimizers, dtypes, and ways to shard a step among GPUs that can be planned, by name."""

from dataclasses import dataclass

DTYPES = ("bfloat16", "float16", "float32")  # as torch has them
FSDP2, ZERO3 = "fsdp2", "zero3"  # as lowtide train has them
PARALLEL = (FSDP2, ZERO3)


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer takes for the parameters that it trains."""

    states: int  # tensors of the parameters' size and dtype
    bytes_each: float = 0.0  # bytes per parameter besides
    temporary: int = 0  # tensors of all parameters' size that its step makes
    shards: bool = True  # for several GPUs: its states follow shards of the parameters
    traffic: float = 3.0  # times that a copy would read or write the parameters' bytes in its step's time, as measured


OPTIMIZERS = {
    "adamw": Optimizer(2, traffic=8.1),
    "adamw-foreach": Optimizer(2, temporary=1, traffic=21),
    "adamw-8bit": Optimizer(0, bytes_each=2 + 2 * 4 / 256, shards=False, traffic=6),
    "sgd": Optimizer(0, traffic=3),
    "sgd-momentum": Optimizer(1, traffic=8.2),
}
