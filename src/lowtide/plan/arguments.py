"""What is planned: `PlanArguments`, shared by all that ask for a plan. Their names alone need no torch."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from typing import Any

from lowtide.errors import ArgumentTypeError, ArgumentValueError, message
from lowtide.head.options import HeadOptions, check_options
from lowtide.measure.units import budget_bytes
from lowtide.memory.policy import check_count
from lowtide.plan.gpus import GPUS

DTYPES = ("bfloat16", "float16", "float32")  # as torch has them
DDP, FSDP2, ZERO3 = "ddp", "fsdp2", "zero3"  # as lowtide train has them
PARALLEL = (DDP, FSDP2, ZERO3)


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer takes for the parameters that it trains."""

    states: int  # tensors of the parameters' size and dtype
    bytes_each: float = 0.0  # bytes per parameter besides, which do not follow shards of the parameters
    temporary: int = 0  # tensors of all parameters' size that its step makes
    traffic: float = 3.0  # times that a copy would read or write the parameters' bytes in its step's time, as measured


OPTIMIZERS = {
    "adamw": Optimizer(2, traffic=8.1),
    "adamw-foreach": Optimizer(2, temporary=1, traffic=21),
    "adamw-8bit": Optimizer(0, bytes_each=2 + 2 * 4 / 256, traffic=6),
    "sgd": Optimizer(0, traffic=3),
    "sgd-momentum": Optimizer(1, traffic=8.2),
}


def _option(help: str, metavar: str | None = None, flag: str | None = None, *, default: Any = MISSING) -> Any:
    """Return a field that is an option of ``lowtide plan`` as well."""
    return field(default=default, metadata={"help": help, "metavar": metavar, "flag": flag})


@dataclass(frozen=True)
class Adapters:
    """Adapters by peft, float32 and without dropout, on projections of each layer; all else is frozen.

    Attributes:
        rank: r.
        targets: Names of the projections, as peft's ``target_modules``; none: all linear layers, ``"all-linear"``;
            None: those that peft adapts in a model of its type.

    Raises:
        ArgumentTypeError: A rank that is no whole number, or targets that are no tuple.
        ArgumentValueError: A rank below 1.
    """

    rank: int = _option("train adapters of this rank and freeze the model", flag="--lora-rank")
    targets: tuple[str, ...] | None = _option(
        "what is adapted (default: all linear layers)", "NAME", "--lora-targets", default=()
    )

    def __post_init__(self) -> None:
        check_count("rank", self.rank)
        if not isinstance(self.targets, tuple | None):
            raise ArgumentTypeError(message("targets", "a tuple of projections' names, or None", f"{self.targets!r}"))

    def __str__(self) -> str:
        names = "peft's own projections" if self.targets is None else " ".join(self.targets)
        return f"rank {self.rank} on {names or 'all linear layers'}"

    @property
    def target_modules(self) -> str | list[str] | None:
        """Return the targets as peft takes them."""
        return None if self.targets is None else list(self.targets) or "all-linear"


@dataclass(frozen=True, kw_only=True)
class PlanArguments:
    """A training step that is to be planned, and what it may take: the arguments of `lowtide.plan.plan_memory`.

    What is not said is as ``lowtide train`` and TRL have it: float32 weights and states under bfloat16 autocast.

    Attributes:
        seq_len: Tokens of a sequence.
        batch_size: Sequences per step, of each GPU.
        budget_gib: GPU memory for tensors, in GiB, or as a text with a unit: ``"40GiB"``, ``"40GB"``; at most the GPU's
            memory less 2% and at least 1 GiB, which the allocator needs. None: 93% of its memory, if that is less.
        host_gib: Pinned host memory for offloaded layers and optimizer states, likewise; 0: nothing is offloaded.
            States go there during forward and come back during backward (`lowtide.memory.offload_optimizer`), at most
            what travels without holding the layers up, or where that does not fit, after backward.
        device: The GPU: a name such as ``"h100"`` or ``"rtx4090"``, or a `Gpu`; ``"cuda"``: the one at hand; None: the
            one at hand, without a GPU an H100. A GPU that the table lacks has its own memory and the rates of an H100.
        dtype: Of parameters, gradients and optimizer states: ``"bfloat16"``, ``"float16"``, ``"float32"`` or the
            `torch.dtype`. None: a model's own; of a config float32, but for weights in 4 bits.
        autocast: Whether GEMMs run in bfloat16 over float32 weights (``torch.autocast``). None: where these are
            float32. Over 16-bit weights adapters run under it in any case.
        optimizer: ``"adamw"`` (fused), ``"adamw-foreach"``, ``"adamw-8bit"``, ``"sgd"`` or ``"sgd-momentum"``.
        keep_gradients: Whether gradients outlive a backward pass, as where they are accumulated over several.
        adapters: With LoRA, its `Adapters`: the model is frozen then, and only they have gradients and optimizer
            states. None: no adapters.
        options: How the loss is to run, as for `lowtide.patch`.
        attention_mask: Whether attention takes a [T, T] mask for each sequence, as
            ``torch.nn.functional.scaled_dot_product_attention`` does where documents packed into one do not see each
            other: T^2 numbers of each sequence in each layer with ``keep="all"``, beside keys and values that are
            repeated for each query head.
        fused_mlp: False for ``lowtide.patch(model, mlp=False)``. Stock MLPs save twice as much, and have no levels.
        gpus: How many GPUs share the step. The plan is that of one of them. Offloading is planned for one GPU alone.
        parallel: With several, how: ``"ddp"`` (each has all of the model), ``"fsdp2"`` or ``"zero3"`` (DeepSpeed, in
            16 bits), which shard parameters, gradients and optimizer states.
        link: What a GPU receives from the others per second, in GiB, or a text: ``"50GB"``. None: by NVLink where the
            GPU has it, else by PCIe, all GPUs in one host.

    Raises:
        ArgumentTypeError: An argument of a wrong type.
        ArgumentValueError: A value that is not allowed.
    """

    seq_len: int = _option("tokens per sequence")
    batch_size: int = _option("sequences per step, of each GPU", default=1)
    budget_gib: float | str | None = _option(
        "GPU memory for tensors: 40GiB, 40GB or 40 (GiB) (default: 93% of it)", "SIZE", "--budget", default=None
    )
    host_gib: float | str = _option("pinned host memory for offloading", "SIZE", "--host", default=0)
    device: Any = _option(  # noqa: RUF009
        f"{', '.join(GPUS)}; or cuda: the one at hand (default: the one at hand, or h100)",
        "NAME",
        "--gpu",
        default=None,
    )
    dtype: Any = _option(  # noqa: RUF009
        f"of weights, gradients and states: {', '.join(DTYPES)} (default: float32; bfloat16 in 4 bits)",
        "NAME",
        default=None,
    )
    autocast: bool | None = _option("GEMMs in float32 as well", default=None)
    optimizer: str = _option(", ".join(OPTIMIZERS), "NAME", default="adamw")
    keep_gradients: bool = _option(
        "gradients are accumulated over several backward passes, and outlive one", default=False
    )
    adapters: Adapters | None = None
    options: HeadOptions | None = None
    attention_mask: bool = _option("attention takes a [T, T] mask, for packed documents", default=False)
    fused_mlp: bool = _option("stock MLPs, as where lowtide.patch fuses none", default=True)
    gpus: int = _option("GPUs that share the step", default=1)
    parallel: str = _option(f"with --gpus: {', '.join(PARALLEL)}", "NAME", default=FSDP2)
    link: float | str | None = _option(
        "what a GPU receives from others per second: 50GB (default: NVLink's rate)", "SIZE", default=None
    )

    def __post_init__(self) -> None:
        for name in ("seq_len", "batch_size", "gpus"):
            check_count(name, getattr(self, name))
        for name in ("budget_gib", "host_gib", "link"):
            self.size(name)
        if not isinstance(self.adapters, Adapters | None):
            raise ArgumentTypeError(message("adapters", "lowtide.plan.Adapters or None", f"{self.adapters!r}"))
        check_options(self.options)
        dtype = None if self.dtype is None else str(self.dtype).removeprefix("torch.")
        flags = ("keep_gradients", "attention_mask", "fused_mlp")
        for name, got, allowed in (
            *((name, getattr(self, name), (True, False)) for name in flags),
            ("autocast", self.autocast, (True, False, None)),
            ("dtype", dtype, (*DTYPES, None)),
            ("optimizer", self.optimizer, tuple(OPTIMIZERS)),
            ("parallel", self.parallel, PARALLEL),
        ):
            if got not in allowed:
                raise ArgumentValueError(message(name, f"one of {', '.join(map(str, allowed))}", f"{got!r}"))

    def size(self, name: str) -> int | None:
        """Return one of the sizes in bytes; None: left to the GPU."""
        value = getattr(self, name)
        return None if value is None else budget_bytes(name, value, above_0=name != "host_gib")
