"""One step of a long sequence, in a process of its own: the model, what its layers save, and a watch on the host.

Full training: parameters, gradients and optimizer states in host memory by FSDP2 (``fully_shard`` with
``CPUOffloadPolicy``) in a world of one, AdamW on the host. LoRA: frozen parameters on the GPU, adapters of rank 16 on
the projections to queries and values.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from lowtide.bench.harness import reason_of
from lowtide.bench.step import steps
from lowtide.bench.train_config import OFFLOADED, LongestBenchConfig
from lowtide.bench.way import LIGER, LOWTIDE
from lowtide.bench.ways import apply_liger, config_of, enable_checkpointing, make_optimizer, with_lora
from lowtide.errors import UnsupportedError
from lowtide.measure.failures import is_out_of_memory, is_the_gpus
from lowtide.measure.resident import available_bytes
from lowtide.measure.units import gib
from lowtide.memory import PolicyReport, apply_policy
from lowtide.memory.planner.adapters import Adapters
from lowtide.memory.policy import parse_policies
from lowtide.memory.stack import find_stack
from lowtide.models import patch

OUT_OF_HOST, OUT_OF_TIME = 75, 76  # statuses of a process that the watch has ended
ON_GPU, ON_HOST = "GPU memory", "host memory"
LEAST_FREE = 2**30  # bytes of the host's memory: an attempt is ended before less is left
EVERY = 0.1  # seconds between looks at the host
INIT_STD = 0.02
LORA = Adapters(16, ("q_proj", "v_proj"))  # what is trained where the model is not


class Watch:
    """Ends this process before the system has to: when the host has fewer bytes ``free`` than must stay so, or after so
    many seconds; ``end`` gets the exit status.
    """

    def __init__(
        self,
        least_bytes: int,
        seconds: float,
        end: Callable[[int], object] = os._exit,
        free: Callable[[], int] = available_bytes,
    ) -> None:
        self._least, self._until, self._end, self._free = least_bytes, time.monotonic() + seconds, end, free
        self._first = self._lowest = free()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def taken(self) -> int:
        """The most host memory that was taken at once, by what was free before."""
        return max(self._first - self._lowest, 0)

    def _look(self) -> None:
        while not self._over.wait(EVERY):
            free = self._free()
            self._lowest = min(self._lowest, free)
            if 0 < free < self._least:
                self._end(OUT_OF_HOST)
            if time.monotonic() > self._until:
                self._end(OUT_OF_TIME)


def measure(
    way: str,
    settings: dict[str, Any],
    tokens: int,
    policies: str,
    host_gib: float,
    rounds: Sequence[int],
    seconds: float,
    least_bytes: int = LEAST_FREE,
) -> dict[str, Any]:
    """Return a row: time and memory of a step, or what ran out, or why it failed; `run_child` calls it.

    Args:
        settings: of a `LongestBenchConfig`, device and dtype chosen.
        policies: of lowtide's layers, as `parse_policies` reads it; empty for peers.
        host_gib: host memory for what they save.
        rounds: steps that do not count, and steps that do.
        seconds: that the process may take.
        least_bytes: of the host's memory, that must stay free.
    """
    (warm, reps), begun, config = rounds, time.monotonic(), LongestBenchConfig.read(settings)
    with Watch(least_bytes, seconds) as watch, _world(torch.device(config.device), needed=config.train == "full"):
        try:
            built = build(way, config)
            report = _apply(built, policies, host_gib, config.disk) if way == LOWTIDE else None
            keeping = _keep(way)
            trained = [p for p in built.parameters() if p.requires_grad]
            optimizer = make_optimizer("adamw", trained)
            build_s = time.monotonic() - begun
            with keeping:
                row = steps(built, optimizer, config, tokens, 1, warm=warm, reps=reps)
            row["disk_gib"] = gib(report.disk_bytes if report is not None else 0)
        except Exception as error:
            return {"failed": reason_of(error), "out_of": out_of(error), "host_gib": gib(watch.taken)}
        return {**row, "build_s": build_s, "host_gib": gib(watch.taken)}


def out_of(error: Exception) -> str | None:
    """Return which memory ran out by an error, None for other errors."""
    if is_out_of_memory(error):
        return ON_GPU if is_the_gpus(error) else ON_HOST
    refused = isinstance(error, UnsupportedError) and str(error).startswith(("host_gib", "offload"))
    return ON_HOST if refused else None


def build(way: str, settings: LongestBenchConfig) -> Any:
    """Return the model of a way, with random weights, where training is to have them."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    device, lora = torch.device(settings.device), settings.train == "lora"
    config = config_of(settings.model, settings.layers)
    config.use_cache = False
    if way.startswith(LIGER):
        apply_liger(config)
    torch.manual_seed(settings.seed)
    with device if lora else init_empty_weights(include_buffers=False):
        dtype = getattr(torch, settings.dtype)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").train()
    if not lora:
        model.tie_weights()  # which the empty ones are not
        _shard(model, device)
    if way == LOWTIDE:
        patch(model)
    else:
        enable_checkpointing(model, {"use_reentrant": False})
    return with_lora(model, LORA.rank, LORA.targets) if lora else model


def _apply(model: Any, policies: str, host_gib: float, disk: str | None) -> PolicyReport:
    """Apply the policies of lowtide's layers."""
    where: dict[str, Any] = {"host_gib": host_gib, "disk": disk} if "offload" in policies else {}
    return apply_policy(model, parse_policies(policies, len(find_stack(model).layers)), **where)


def _keep(way: str) -> AbstractContextManager[Any]:
    """Return the context that a peer's step runs in."""
    if way.endswith(OFFLOADED):  # what transformers' users do: all that is saved outside the layers goes too
        return torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())
    return contextlib.nullcontext()


@contextlib.contextmanager
def _world(device: torch.device, *, needed: bool) -> Iterator[None]:
    """Open a process group of one rank, where FSDP2 needs one."""
    if not needed:
        yield
        return
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _shard(model: Any, device: torch.device) -> None:
    """Fill the layers with random weights one by one, and let FSDP2 take each to the host."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    mesh = init_device_mesh(device.type, (1,))
    settings: dict[str, Any] = {"mesh": mesh, "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda")}
    filled: dict[nn.Parameter, nn.Parameter] = {}
    for layer in find_stack(model).layers.values():
        _fill(layer, device, filled)
        fully_shard(layer, **settings)
    _fill(model, device, filled)
    fully_shard(model, **settings)


def _fill(module: nn.Module, device: torch.device, filled: dict[nn.Parameter, nn.Parameter]) -> None:
    """Give a module's empty parameters random values, as a model begins with: ones in norms, zeros in biases.

    ``filled`` has what the empty ones became, so that tied ones stay tied.
    """
    for part in module.modules():
        for name, empty in list(part._parameters.items()):
            if empty is None or not empty.is_meta:
                continue
            if empty not in filled:
                value = torch.full(empty.shape, float(name != "bias"), dtype=empty.dtype, device=device)
                if empty.dim() > 1:
                    value.normal_(0.0, INIT_STD)
                filled[empty] = nn.Parameter(value, requires_grad=empty.requires_grad)
            part._parameters[name] = filled[empty]
