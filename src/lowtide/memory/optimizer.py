"""`offload_optimizer`: an optimizer's states in host memory while nothing reads them.

They are idle from one step to the next, also at the end of forward, where a step's memory has its peak. They leave the
GPU during forward, a part with each layer, and come back during backward, as the layers' activations go; the step
finds them where they were. All of it runs in hooks: the optimizer keeps its class, its arithmetic and its
checkpoints, and where a hook does not run the states stay on the GPU for longer.

A few hundred MiB of states are one flat tensor, a block: a copy is one transfer, and the memory that a block leaves
behind is in one piece. `share_out` and `share_back` are the schedule, by which the planner counts too.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

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
from lowtide.memory.copies import Buffer, HostPool, Moved, Side
from lowtide.memory.offload import IN_FLIGHT
from lowtide.memory.policy import check_count
from lowtide.memory.stack import find_stack

States = Mapping[Any, Any]  # an optimizer's ``state``: a dictionary for each parameter

_HANDLE = "_lowtide_offload"
MIN_BYTES = 64 * 2**10  # of a state that is worth a copy: step counters, and the states of norms, stay
BLOCK_BYTES = 256 * 2**20
ALIGNED = 512  # bytes: where PyTorch's allocator would begin a tensor
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
            (`lowtide.plan.plan_memory` computes it). None: all.
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
            the end of the first step: the host memory does not suffice, or there are none that are plain tensors. At a
            forward or a step that a CUDA graph captures.

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
        optimizer: Whose states are offloaded.
        layers: The model's decoder layers, in order.
        side: What copies beside the computation.
        limit: The most bytes of states that are offloaded.
        host_limit: The most bytes of host memory; None: what is free.
        backwards: Backward passes of a step, in the last of which states come back; 0: after all of them.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        layers: Sequence[nn.Module],
        side: Side,
        limit: float,
        host_limit: int | None,
        backwards: int,
    ) -> None:
        self.owner = weakref.ref(optimizer)
        self._layers, self._side = layers, side
        self._backwards = backwards  # per step, in the last of which states come back; 0: after all of them
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
        layers, lag = len(self._layers), layers_to_leave(len(self._layers))
        due = self.offloaded_bytes * share_out(layer, layers) if layer < layers else 0
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
        due, back = self.offloaded_bytes * share_back(layers - 1 - layer, layers), 0
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
        if not self._signature and any(p.grad is not None and p.nbytes > MIN_BYTES for p in parameters):
            expected = f"plain tensors as states, of more than {MIN_BYTES // 1024} KiB on the GPU after a step"
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
            self._lay_out(in_blocks(slots, self._limit))
            self._signature = signature
        for block in self._blocks:
            block.take(optimizer.state)

    def _slots(self, optimizer: Optimizer) -> list[Slot]:
        """Return the states that may leave: plain tensors that parameters do not share."""
        found: list[tuple[Slot, int]] = []
        for param in (p for group in optimizer.param_groups for p in group["params"]):
            for key, value in optimizer.state.get(param, {}).items():
                if type(value) is not Tensor or value.layout != torch.strided or value.device != param.device:
                    continue
                if value.nbytes > MIN_BYTES and copies.is_dense(value):
                    found.append((Slot(param, key, value), value.data_ptr()))
        seen = Counter(place for _, place in found)
        return [slot for slot, place in found if seen[place] == 1]

    def _lay_out(self, groups: list[list[Slot]]) -> None:
        """Make blocks of groups of states, each with host memory of its own.

        Raises:
            UnsupportedError: There is not enough of it.
        """
        self._blocks, self._signature, self._pool = [], [], None
        if not groups:
            return
        pool = HostPool(self._host_limit, self._side, _HOST_HINT)
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

    Copies and pickles of what a hook is registered on have one without a method, which calls nothing.
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


def _side_of(optimizer: Optimizer) -> Side:
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


def share_out(layer: int, layers: int) -> float:
    """Return the share of the bytes whose copies have begun when layer ``layer`` begins its forward.

    All have when the last layer but one begins, so that `IN_FLIGHT` layers remain for the last copy.
    """
    return min(1.0, (layer + 1) / max(1, layers - IN_FLIGHT + 1))


def layers_to_leave(layers: int) -> int:
    """Return the number of layers for which a block may be on its way out.

    The state of an embedding is one block, and takes several layers' time where sequences are short.
    """
    return max(IN_FLIGHT, min(2 * IN_FLIGHT, layers // 4))


def share_away(layer: int, layers: int) -> float:
    """Return the share that has left the GPU at the end of a layer's forward; behind the last layer all has."""
    return max(0.0, share_out(layer - layers_to_leave(layers), layers))


def share_back(done: int, layers: int) -> float:
    """Return the share that is on its way back, or there, when backward has done so many layers.

    With one layer left all is: the last copy has that layer's backward, and the embedding's.
    """
    return min(1.0, done / max(1, layers - 2)) if layers > 1 else 1.0


class Slot:
    """One state of one parameter: what it is in the optimizer, and its views of the block that has it."""

    host: Tensor
    here: Tensor | None = None  # on the device, while the block is there

    def __init__(self, param: Tensor, key: Any, tensor: Tensor) -> None:
        self.param, self.key = param, key
        self.shape, self.stride, self.dtype, self.device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        self.nbytes = -(-tensor.nbytes // ALIGNED) * ALIGNED  # in its block

    @property
    def signature(self) -> Any:
        """What must not change, or the blocks are laid out anew."""
        return id(self.param), self.key, self.shape, self.stride, self.dtype, self.device

    def current(self, states: States) -> Any:
        """Return what the optimizer has; None where it has nothing."""
        return states.get(self.param, {}).get(self.key)


class Block:
    """Some states of one dtype, and their host memory.

    `where` they are: on the ``"device"``; ``"leaving"``: there, and being copied; on the ``"host"``, as at first;
    ``"coming"``: there, and being copied to the device. The optimizer has the device's tensors in the first two and the
    host's in the others, so that what it has is whole whenever it is read in the order of the device's work, and on the
    host after `finish`. Tensors that others have put in their place stay until `take`.
    """

    def __init__(self, slots: list[Slot], buffer: Buffer, side: Side) -> None:
        self.slots, self.nbytes, self.buffer = slots, flat_bytes(slots), buffer
        self.where: Literal["device", "leaving", "host", "coming"] = "host"
        self.point = 0  # the layer at which it began to leave
        self._flat = Moved(buffer.memory[: self.nbytes].view(slots[0].dtype), slots[0].device, side)
        for slot, view in zip(slots, self._views(self._flat.host), strict=True):
            slot.host = view

    def __del__(self) -> None:
        self._flat.let_go()

    def _views(self, flat: Tensor) -> list[Tensor]:
        views, start = [], flat.storage_offset()
        for slot in self.slots:
            views.append(flat.as_strided(slot.shape, slot.stride, start))
            start += slot.nbytes // flat.element_size()
        return views

    def take(self, states: States) -> bool:
        """Copy tensors that are not the block's into it, and give the optimizer the block's; False where one lacks."""
        for slot in self.slots:
            own, found = slot.host if slot.here is None else slot.here, slot.current(states)
            if not isinstance(found, Tensor) or (found.shape, found.dtype) != (own.shape, own.dtype):
                return False
            if found is not own:
                own.copy_(found)
                states[slot.param][slot.key] = own
        return True

    def begin_out(self, point: int) -> None:
        """Begin to copy to the host."""
        assert self._flat.tensor is not None
        self._flat.out(self._flat.tensor)
        self.where, self.point = "leaving", point

    def end_out(self, states: States) -> None:
        """Give the optimizer the host's tensors, and the device's memory free in the order of the device's work."""
        for slot in self.slots:
            if slot.here is not None and slot.current(states) is slot.here:
                states[slot.param][slot.key] = slot.host
        self.drop()

    def begin_back(self) -> None:
        """Begin to copy to the device."""
        self._flat.back()
        self.where = "coming"

    def end_back(self, states: States) -> None:
        """Give the optimizer the device's tensors, wherever they are."""
        flat = self._flat.get()  # waits for what is being copied, to which the optimizer is about to write
        if self.where in ("host", "coming"):
            for slot, view in zip(self.slots, self._views(flat), strict=True):
                slot.here = view
                if slot.current(states) is slot.host:
                    states[slot.param][slot.key] = view
        self.where = "device"

    def drop(self) -> None:
        """Leave the device: what is on the host is as good."""
        for slot in self.slots:
            slot.here = None
        self._flat.let_go()
        self.where = "host"

    def finish(self) -> None:
        """Let the caller wait until what is on the host is whole."""
        if self.where != "device":
            self._flat.finish()


def flat_bytes(slots: list[Slot]) -> int:
    """Return the bytes of a block of these states."""
    return sum(slot.nbytes for slot in slots)


def in_blocks(slots: list[Slot], limit: float) -> list[list[Slot]]:
    """Return states of at most ``limit`` bytes in groups for a block each.

    A group is of one dtype, and has `BLOCK_BYTES` or one larger state. The largest states and groups come
    first: copies that come last are short.
    """
    groups: list[list[Slot]] = []
    filled: dict[Any, tuple[list[Slot], int]] = {}  # the last group of a dtype, with its bytes
    for slot in sorted(slots, key=lambda slot: -slot.nbytes):
        if slot.nbytes > limit:
            continue
        limit -= slot.nbytes
        group, size = filled.get(slot.dtype, ([], BLOCK_BYTES))
        if size + slot.nbytes > BLOCK_BYTES:
            group, size = [], 0
            groups.append(group)
        group.append(slot)
        filled[slot.dtype] = group, size + slot.nbytes
    return sorted(groups, key=flat_bytes, reverse=True)
