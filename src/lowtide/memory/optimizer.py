"""`offload_optimizer`: an optimizer's states in host memory while nothing reads them.

They are idle from one step to the next, also at the end of forward, where a step's memory has its peak. They leave the
GPU during forward, a part with each layer, and come back during backward, as the layers' activations go; the step
finds them where they were. All of it runs in hooks: the optimizer keeps its class, its arithmetic and its
checkpoints, and where a hook does not run the states stay on the GPU for longer.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lowtide.arguments import check_flag
from lowtide.errors import ArgumentTypeError, UnsupportedError, message
from lowtide.graph import run_in_eager
from lowtide.measure.units import budget_bytes
from lowtide.measure.units import gib as in_gib
from lowtide.memory import copies
from lowtide.memory import optimizer_blocks as blocks
from lowtide.memory.optimizer_blocks import Block, Slot, flat_bytes
from lowtide.memory.pinned import HostPool
from lowtide.memory.policy import check_count
from lowtide.memory.stack import find_stack

_HANDLE = "_lowtide_offload"
_HOST_HINT = "Offload less of the states (gib), or raise the budget."


def offload_optimizer(
    optimizer: Optimizer,
    model: nn.Module,
    *,
    gib: float | str | None = None,
    host_gib: float | str | None = None,
    backwards_per_step: int = 1,
    late: bool = False,
) -> OptimizerOffload:
    """Offload an optimizer's states to pinned host memory from the first layers' forward until those layers' backward.

    With each decoder layer's forward a part of the states is copied to the host on a side stream; a few layers later
    the GPU's memory is free. In backward a part is fetched with each layer that is done. The step itself runs on the
    GPU, on tensors of the same values: results are the same to the bit. It costs host memory, and time only where the
    copies take longer than the layers beside them: at 55 GB/s 20 ms per GiB, in each direction.

    Supports any optimizer of PyTorch's class whose states are tensors, with ``foreach``, ``fused`` or ``capturable``,
    several of them, closures (while a step runs states stay; after one that raised, until the next one is done),
    gradient scalers that skip steps. States of up to 64 KiB stay on the GPU. ``state_dict()`` waits for copies under
    way and may be called at any time; it has host tensors for what is on the host. Before you read or change
    ``optimizer.state`` itself, or copy or pickle the optimizer, call the handle's ``bring_back``. Calling again
    replaces what was set before.

    Args:
        optimizer: The optimizer.
        model: The model that it trains; its decoder layers are found as by `lowtide.memory.apply_policy`.
        gib: The most that leaves the GPU, in GiB: what the layers' forward has time for
            (`lowtide.memory.plan_memory` computes it). None: all.
        host_gib: The most pinned host memory that this may take, in GiB. None: whatever the host has free,
            or this process's part of that where a launcher has started several on it.
        backwards_per_step: Backward passes per step: the states come back in the last one.
        late: Whether they come back only after backward, so that the step waits for the copies: for sequences so long
            that a layer's backward leaves no room beside it.

    Returns:
        The `OptimizerOffload`: ``remove()`` undoes it.

    Raises:
        ArgumentTypeError: An argument of another type.
        ArgumentValueError: No list of layers in the model, or a number out of range.
        UnsupportedError: The parameters are not all on one CUDA device, or one is a DTensor. When there are states, at
            the end of the first step: the host memory does not suffice, one is of a class of its own, or there are
            none. At a forward or a step that a CUDA graph captures.

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        >>> handle = lowtide.memory.offload_optimizer(optimizer, model, gib=4)
        >>> handle.remove()
    """
    inner = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper has no hooks of its own
    if not isinstance(inner, Optimizer):
        raise ArgumentTypeError(message("optimizer", "a torch.optim.Optimizer", type(optimizer).__name__))
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(message("model", "a torch.nn.Module", type(model).__name__))
    check_count("backwards_per_step", backwards_per_step)
    check_flag("late", late)
    side = _side_of(inner)
    layers = list(find_stack(model).layers.values())
    former: OptimizerOffload | None = vars(inner).get(_HANDLE)
    if former is not None:
        former.remove()
    limit = math.inf if gib is None else budget_bytes("gib", gib, above_0=True, hint="None: all of them.")
    host = None if host_gib is None else budget_bytes("host_gib", host_gib, hint="None: whatever the host has free.")
    return OptimizerOffload(inner, layers, side, limit, host, 0 if late else backwards_per_step)


class OptimizerOffload:
    """What `offload_optimizer` set up. It lives as long as the optimizer, and its host memory as long as it.

    Args:
        optimizer: The optimizer.
        layers: The layers, in the order of forward.
        side: What copies the states.
        limit: The most bytes that leave.
        host_limit: The most bytes of host memory, None: what is free.
        backwards: Backward passes per step, in the last of which states come back; 0: after all of them.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        layers: Sequence[nn.Module],
        side: copies.Side,
        limit: float,
        host_limit: int | None,
        backwards: int,
    ) -> None:
        self.owner = weakref.ref(optimizer)
        self._layers, self._side, self._backwards = layers, side, backwards
        self._limit, self._host_limit = limit, host_limit
        self._blocks: list[Block] = []
        self._signature: list[Any] = []
        self._count = 0  # of all that the optimizer has as states
        self._pool: HostPool | None = None
        self._counts: Counter[int] = Counter()  # backward passes since the last step, by parameter
        self._stepping = False  # also while its closure runs
        self._hooks: list[RemovableHandle] = []
        self._gradient_hooks: list[RemovableHandle] = []
        for hooks in (self._hooks, self._gradient_hooks):
            weakref.finalize(self, _remove, hooks).atexit = False
        self._look(optimizer)
        for k, layer in enumerate(layers):
            self._hooks.append(layer.register_forward_pre_hook(_Hook(self._forward, k), prepend=True))
        self._hooks += [
            layers[-1].register_forward_hook(_Hook(self._forward, len(layers))),
            optimizer.register_step_pre_hook(_Hook(self._before_step)),
            optimizer.register_step_post_hook(_Hook(self._after_step)),
            optimizer.register_state_dict_pre_hook(_Hook(self._finish)),
            optimizer.register_load_state_dict_post_hook(_Hook(self._loaded)),
        ]
        vars(optimizer)[_HANDLE] = self

    @property
    def offloaded_bytes(self) -> int:
        """The bytes of states that leave the GPU in each step; 0 until the first step has made them."""
        return sum(block.nbytes for block in self._blocks)

    @property
    def host_bytes(self) -> int:
        """The host memory that is pinned for them."""
        return self._pool.nbytes if self._pool is not None else 0

    def bring_back(self) -> None:
        """Give the optimizer all its states on the GPU, until the next forward."""
        optimizer = self.owner()
        if optimizer is not None:
            for block in self._blocks:
                block.end_back(optimizer.state)

    def remove(self) -> None:
        """Undo `offload_optimizer`: states on the GPU, the host memory freed; twice does no harm."""
        self.bring_back()
        self._blocks, self._signature, self._pool = [], [], None
        for hooks in (self._hooks, self._gradient_hooks):
            _remove(hooks)
        optimizer = self.owner()
        if optimizer is not None and vars(optimizer).get(_HANDLE) is self:
            del vars(optimizer)[_HANDLE]

    def __str__(self) -> str:
        bytes_, host = in_gib(self.offloaded_bytes), in_gib(self.host_bytes)
        return f"{bytes_:.2f} GiB of optimizer states in {len(self._blocks)} blocks, {host:.2f} GiB of host memory"

    def _forward(self, optimizer: Optimizer, layer: int, *_: Any) -> None:
        """End and begin the copies that are due, when a layer begins or the last one has ended."""
        if not self._blocks or self._stepping or torch._C._current_graph_task_id() != -1:  # -1: no backward runs
            return  # a closure's forward, or one that backward repeats
        _refuse_capture()
        layers, lag = len(self._layers), blocks.layers_to_leave(len(self._layers))
        due = self.offloaded_bytes * blocks.share_out(layer, layers) if layer < layers else 0
        gone = 0
        for block in self._blocks:
            if block.where == "coming":
                block.drop()
            elif block.where == "leaving" and (layer == layers or layer >= block.point + lag):
                block.end_out(optimizer.state)
            elif block.where == "device" and gone < due:
                block.begin_out(layer)
            gone += block.nbytes

    def _accumulated(self, _: Optimizer, param: int, layer: int, layers: int, *__: Any) -> None:
        """Fetch what is due when backward has reached a layer, the ``layer``-th of those that train."""
        self._counts[param] += 1
        if self._counts[param] % self._backwards:
            return
        due, back = self.offloaded_bytes * blocks.share_back(layers - 1 - layer, layers), 0
        for block in self._blocks:
            back += block.nbytes
            if back > due:
                break
            if block.where == "host":
                block.begin_back()

    def _before_step(self, *_: Any) -> None:
        _refuse_capture()
        self.bring_back()
        self._counts.clear()
        self._stepping = True

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepping = False
        self._look(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not self._signature and any(p.grad is not None and _nbytes(p) > blocks.MIN_BYTES for p in parameters):
            expected = f"states of more than {blocks.MIN_BYTES // 1024} KiB on the GPU after a step"
            hint = "SGD without momentum has none: there is nothing to offload."
            raise UnsupportedError(message("optimizer", expected, "none", hint))

    def _finish(self, *_: Any) -> None:
        for block in self._blocks:
            block.finish()

    def _loaded(self, optimizer: Optimizer, *_: Any) -> None:
        """Other states were loaded: they are on the GPU, in tensors of their own."""
        for block in self._blocks:
            block.drop()
        self._look(optimizer)

    def _look(self, optimizer: Optimizer) -> None:
        """Have all states in blocks, which are laid out anew where the states are not those of before."""
        count, own = sum(map(len, optimizer.state.values())), self._blocks
        if own and count == self._count and all(block.take(optimizer.state) for block in own):
            return  # as after nearly every step
        self._count = count
        slots = self._slots(optimizer)
        signature = [slot.signature for slot in slots]
        if signature != self._signature:
            self._lay_out(blocks.in_blocks(slots, self._limit))
            self._signature = signature
        for block in self._blocks:
            block.take(optimizer.state)

    def _slots(self, optimizer: Optimizer) -> list[Slot]:
        """Return the states that may leave.

        Raises:
            UnsupportedError: One is of a class of its own.
        """
        found: list[Slot] = []
        seen: Counter[int] = Counter()
        for param in (p for group in optimizer.param_groups for p in group["params"]):
            for key, value in optimizer.state.get(param, {}).items():
                if not isinstance(value, Tensor) or _nbytes(value) <= blocks.MIN_BYTES:
                    continue
                if value.device != param.device:
                    continue
                if type(value) is not Tensor or value.layout != torch.strided:
                    got = f"{key!r} as a {type(value).__name__} ({value.layout})"
                    raise UnsupportedError(message("optimizer", "plain dense tensors as states", got))
                if copies.is_dense(value):
                    found.append(Slot(param, key, value))
                    seen[value.data_ptr()] += 1
        return [slot for slot in found if seen[optimizer.state[slot.param][slot.key].data_ptr()] == 1]

    def _lay_out(self, groups: list[list[Slot]]) -> None:
        """Make blocks of groups of states, each with host memory of its own.

        Raises:
            UnsupportedError: There is not enough of it.
        """
        self._blocks, self._signature, self._pool = [], [], None
        if not groups:
            return
        pool = HostPool(self._host_limit, self._side.pin, self._side.unpin, _HOST_HINT)
        pool.check(sum(map(flat_bytes, groups)), "the optimizer's states")
        self._blocks = [Block(group, pool.take(i, flat_bytes(group)), self._side) for i, group in enumerate(groups)]
        self._pool = pool
        _remove(self._gradient_hooks)
        if not self._backwards:
            return
        trained = [[p for p in layer.parameters() if p.requires_grad and p.is_leaf] for layer in self._layers]
        trained = list(filter(None, trained))
        for i, parameters in enumerate(trained):
            for param in parameters:
                hook = _Hook(self._accumulated, id(param), i, len(trained))
                self._gradient_hooks.append(param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]


class _Hook:
    """Calls a method of an `OptimizerOffload` with its optimizer, for as long as both live.

    Copies and pickles of what a hook is registered on have one that calls nothing.

    Args:
        method: The method; None: it calls nothing.
        args: What the method is called with behind the optimizer.
    """

    def __init__(self, method: Callable[..., Any] | None = None, *args: int) -> None:
        self._method = weakref.WeakMethod(method) if method is not None else None
        self._args = args

    @run_in_eager
    def __call__(self, *called_with: Any) -> Any:
        method: Any = self._method() if self._method is not None else None
        optimizer = None if method is None else method.__self__.owner()
        return None if optimizer is None else method(optimizer, *self._args, *called_with)

    def __reduce__(self) -> Any:
        return _Hook, ()


def _remove(hooks: list[RemovableHandle]) -> None:
    """Remove hooks, and forget them."""
    while hooks:
        hooks.pop().remove()


def _refuse_capture() -> None:
    """Raise inside the capture of a CUDA graph, whose replays would not find the states."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        hint = "Call remove() before the capture, or leave CUDA graphs out."
        got = "a capture, whose replays would not find the states"
        raise UnsupportedError(message("offload_optimizer", "a training step outside of CUDA graphs", got, hint))


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()  # Tensor.nbytes raises for sparse ones


def _side_of(optimizer: Optimizer) -> copies.Side:
    """Return what copies from the parameters' device; raise unless they are whole, and all on one."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(cls.__name__ == "DTensor" for p in parameters for cls in type(p).__mro__):
        hint = "FSDP2 offloads states by itself: fully_shard(..., offload_policy=CPUOffloadPolicy())."
        raise UnsupportedError(message("optimizer", "parameters that are whole on this GPU", "DTensors", hint))
    devices = {p.device for p in parameters}
    if len(devices) != 1:
        got = f"some on {' and '.join(sorted(map(str, devices)))}" if devices else "no parameter"
        raise UnsupportedError(message("optimizer", "parameters on one CUDA device", got))
    return copies.side_for(*devices)
