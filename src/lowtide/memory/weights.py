"""`offload_weights`: frozen weights of decoder layers in host memory, on the GPU while their layer is at work.

While an offloaded layer runs forward or backward, its parameters are on the GPU and the copy of those of the next is
under way. In between they are the host's tensors, so that whatever reads or writes them finds them whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError, message
from lowtide.measure.units import gib as in_gib
from lowtide.memory import copies
from lowtide.memory.hooks import OUT_OF_TURN, Handle, Hook, refuse_capture, remove_hooks
from lowtide.memory.optimizer_blocks import MIN_BYTES
from lowtide.memory.pinned import HostPool, budget_bytes
from lowtide.memory.policy import check_count
from lowtide.memory.stack import find_stack
from lowtide.memory.weight_pieces import Piece, flat_bytes
from lowtide.swap import child_class

ON_GPU = 2  # offloaded layers whose weights are on the GPU at a time: the one at work, and the next
_HANDLE = "_lowtide_weights"
_STAYS = "_lowtide_weights_stay"
_BASE = "_lowtide_weights_base"
_HOST_HINT = "Offload fewer layers (layers), or raise the budget."


def offloaded_layers(layers: int, n: int) -> list[int]:
    """Return which ``n`` of a model's layers are offloaded: evenly spread, so that those between hide the copies."""
    return [i for i in range(layers) if (i + 1) * n // layers > i * n // layers]


def offload_weights(
    model: nn.Module,
    *,
    layers: int | None = None,
    device: torch.device | str | None = None,
    host_gib: float | str | None = None,
) -> WeightOffload:
    """Keep decoder layers' frozen weights in pinned host memory, and copy them to the GPU beside the work of others.

    For LoRA and other adapters on a model whose frozen weights do not fit, or leave too little for long sequences (also
    called block swap). Before an offloaded layer's forward, and again before its backward, a side stream has copied its
    weights while the layer before was at work: `ON_GPU` of these layers are on the GPU at a time. Results are the same
    to the bit. Time is added where a copy takes longer than the layers beside it: at 55 GB/s 18 ms per GB, in forward
    and in backward; more tokens per step hide it.

    Call it last: after adapters, quantisation and `lowtide.patch`. The model may be on the CPU: everything else moves
    to ``device``, a layer at a time, so that the GPU never holds all weights. From then on moves of the model leave
    these weights where they are. Between their layers' turns the parameters are CPU tensors: ``state_dict``
    and ``save_pretrained`` work, and what is written to them holds. Adapters are on the GPU: to merge them, move all to
    one device, by ``remove("cpu")`` and ``model.to("cpu")``. Copies of the model have them on the CPU. Calling again,
    for the model or a part of it, replaces what was set before.

    Supports any decoder layers that `lowtide.memory.apply_policy` finds, policies, transformers' and PyTorch's
    checkpoints, bitsandbytes' 4-bit weights (their scales stay on the GPU), ``torch.compile``, gradient accumulation,
    evaluation and generation. Parameters that train, that several modules share, of up to 64 KiB or of a tensor class
    of their own stay on the GPU.

    Args:
        model: The model; its decoder layers are found as by `lowtide.memory.apply_policy`.
        layers: How many of them are offloaded, evenly spread. None: all.
        device: The CUDA device. None: the one of the model's parameters, or the current one.
        host_gib: The most pinned host memory that this may take, in GiB or as a text such as ``"64GiB"``. None:
            whatever the host has free, or this process's part of that where a launcher has started several on it.

    Returns:
        The `WeightOffload`: ``remove()`` undoes it.

    Raises:
        ArgumentTypeError: An argument of another type.
        ArgumentValueError: No list of layers in the model, more than it has, no frozen weights in the layers, or a
            budget out of range.
        UnsupportedError: No CUDA device; parameters that are sharded, on the meta device or moved by accelerate's
            hooks; host memory that does not suffice. Later: a forward that a CUDA graph captures, a weight that was
            set to train, a cast of the model, a backward with ``create_graph=True``, or whose forward was before
            ``remove()``.

    Example:
        >>> layers = [torch.nn.Sequential(torch.nn.Linear(512, 512)) for _ in range(4)]
        >>> model = torch.nn.Sequential(*layers).requires_grad_(False)  # and adapters, by peft.get_peft_model
        >>> handle = lowtide.memory.offload_weights(model, layers=2)
        >>> handle.remove()
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(message("model", "a torch.nn.Module", type(model).__name__))
    stack = find_stack(model)
    if layers is not None:
        check_count("layers", layers)
        if layers > len(stack.layers):
            hint = "None: all of them."
            raise ArgumentValueError(message("layers", f"at most {len(stack.layers)}", f"{layers}", hint))
    host = None if host_gib is None else budget_bytes("host_gib", host_gib, hint="None: whatever the host has free.")
    to = _device(model, device)
    side = copies.side_for(to)
    for layer in stack.layers.values():
        former = vars(layer).get(_STAYS, Hook()).handle
        if former is not None:
            former.remove("cpu")
    every, shared = list(stack.layers.values()), _shared(model)
    chosen = [every[i] for i in offloaded_layers(len(every), layers or len(every))]
    found = [(layer, params) for layer in chosen if (params := _frozen(layer, shared))]
    if not found:
        hint = "Add adapters (LoRA) first, which freeze the rest, or requires_grad_(False) what is not to be trained."
        raise ArgumentValueError(message("model", "layers with frozen weights", "none", hint))
    _check(model)
    return WeightOffload(model, found, side, to, host)


class WeightOffload(Handle):
    """What `offload_weights` set up; it lives as long as the model.

    Args:
        model: The model.
        found: The layers that are offloaded, each with its weights.
        side: The copies' streams.
        device: Where the layers run.
        host_limit: The most bytes of host memory, None: what is free.
    """

    def __init__(
        self,
        model: nn.Module,
        found: Sequence[tuple[nn.Module, list[nn.Parameter]]],
        side: copies.Side,
        device: torch.device,
        host_limit: int | None,
    ) -> None:
        super().__init__(model)
        self._last = -1  # whose forward ran last
        self._ends = False  # whether the end of backward is to free what is on the GPU
        self._given: dict[int, int] = {}  # the versions of the tensors that the layer at work was given, by id
        self._hooks: list[RemovableHandle] = []
        self._pool: HostPool | None = HostPool(host_limit, side.pin, side.unpin, _HOST_HINT)
        here = sum(p.nbytes for _, params in found for p in params if p.device.type == "cpu")
        needed, what = sum(flat_bytes(params) for _, params in found), f"the weights of {len(found)} layers"
        self._pool.check(needed, what, freed=here)
        self._pieces: list[Piece] = []
        self._layers = [layer for layer, _ in found]
        try:
            self._take(model, self._pool, found, side, device)
        except BaseException:
            self.remove("cpu")
            raise

    def _take(
        self,
        model: nn.Module,
        pool: HostPool,
        found: Sequence[tuple[nn.Module, list[nn.Parameter]]],
        side: copies.Side,
        device: torch.device,
    ) -> None:
        """Move the weights to the host, layer by layer, and all else to the device."""
        for k, (layer, params) in enumerate(found):
            self._pieces.append(Piece(params, pool.take(k, flat_bytes(params)), side, device))
            self._hooks += [
                layer.register_forward_pre_hook(Hook(self._forward, k), prepend=True, with_kwargs=True),
                layer.register_forward_hook(Hook(self._forwarded, k), always_call=True),
            ]
            vars(layer)[_STAYS] = Hook(self._checked, k)
            vars(layer)[OUT_OF_TURN] = Hook(self._out_of_turn, k)
            if not any(_BASE in vars(cls) for cls in type(layer).__mro__):
                layer.__class__ = child_class(type(layer), _overrides, _BASE)
        vars(model)[_HANDLE] = self
        nn.Module.to(model, device)  # not transformers', which refuses quantised models

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the model has none

    @property
    def layers(self) -> int:
        """How many layers are offloaded."""
        return len(self._pieces)

    @property
    def host_bytes(self) -> int:
        """The host memory that is pinned for them."""
        return self._pool.nbytes if self._pool is not None else 0

    @property
    def device_bytes(self) -> int:
        """The most that their weights take on the GPU: two layers' at a time."""
        return sum(sorted(piece.nbytes for piece in self._pieces)[-ON_GPU:])

    def remove(self, device: torch.device | str | None = None) -> None:
        """Undo `offload_weights`; twice does no harm.

        Args:
            device: Where the weights go: None to the GPU, or ``"cpu"``.

        Raises:
            ArgumentValueError: There is no such device.
        """
        to = None if device is None else _named(device)
        with self.lock:
            remove_hooks(self._hooks)
            for piece in self._pieces:
                piece.end(to)
            for layer in self._layers:
                for name in (_STAYS, OUT_OF_TURN):
                    vars(layer).pop(name, None)
                if _BASE in vars(type(layer)):
                    layer.__class__ = vars(type(layer))[_BASE]
            self._pieces, self._layers, self._pool = [], [], None
            model = self.owner()
            if model is not None and vars(model).get(_HANDLE) is self:
                del vars(model)[_HANDLE]

    def __str__(self) -> str:
        host, here = in_gib(self.host_bytes), in_gib(self.device_bytes)
        return f"weights of {self.layers} layers in {host:.2f} GiB of host memory; {here:.2f} GiB on the GPU at a time"

    def _turn(self, k: int, following: int | None) -> None:
        """Give layer ``k`` its weights, begin the copy of those that come next, and free all others."""
        for i, piece in enumerate(self._pieces):
            if i != k:
                piece.leave()
                if i != following:
                    piece.free()
        self._pieces[k].enter()
        if following is not None:
            self._pieces[following].begin()

    def _forward(self, _: nn.Module, k: int, __: nn.Module, *given: Any) -> None:
        refuse_capture("offload_weights", "the weights")
        self._given = {id(x): x._version for x in _graph_tensors(given)}
        if _in_backward():  # a checkpoint recomputes the layer
            self._back(k)
            return
        self._ends = False  # for the next backward
        if k <= self._last:  # another forward: the host's weights may have changed since
            self._free()
        # Behind the last layer comes its own backward, and that of the one before.
        at_end = k + 1 == len(self._pieces)
        following = (k - 1 if torch.is_grad_enabled() and k else None) if at_end else k + 1
        self._turn(k, following)
        self._last = k

    def _forwarded(self, _: nn.Module, k: int, __: nn.Module, ___: Any, outputs: Any) -> None:
        # Not those that are passed through: backward comes to them late in an earlier layer.
        graph = [x for x in _graph_tensors(outputs) if self._given.get(id(x)) != x._version]
        for x in graph:
            x.register_hook(Hook(self._reached, k, gone=_removed))  # type: ignore[no-untyped-call]
        if _in_backward():
            return  # that of the layer follows
        self._pieces[k].leave()
        if not graph and k + 1 == len(self._pieces):
            self._end()

    def _reached(self, _: nn.Module, k: int, *__: Any) -> None:
        """Turn to a layer as backward reaches its outputs.

        Raises:
            UnsupportedError: `remove` was called since its forward, or the graph of gradients is requested.
        """
        if not self._pieces:
            _removed()
        if torch.is_grad_enabled():
            hint = "Call the handle's remove() before you take gradients of gradients."
            raise UnsupportedError(message("create_graph", "False with offloaded weights", "True", hint))
        self._back(k)

    def _back(self, k: int) -> None:
        self._turn(k, k - 1 if k else None)
        if not self._ends:
            self._ends = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(Hook(self._end))

    def _out_of_turn(self, _: nn.Module, k: int, over: bool) -> None:
        """Turn to a layer whose output a later one needs as its input, or back to that later one."""
        if over:
            self._back(k)
        else:
            self._turn(k, k + 1 if k + 1 < len(self._pieces) else None)

    def _end(self, *_: Any) -> None:
        """Free the GPU's memory, and let the host wait for the copies, so that it may write to its tensors."""
        self._ends = False
        self._free()
        for piece in self._pieces:
            piece.finish()

    def _free(self) -> None:
        for piece in self._pieces:
            piece.leave()
            piece.free()

    def _checked(self, _: nn.Module, k: int, fn: Callable[[Tensor], Tensor]) -> set[int]:
        """Return the ids of the weights that a move of the module leaves where they are.

        Raises:
            UnsupportedError: It is a cast.
        """
        params = self._pieces[k].params
        for dtype in {p.dtype for p in params}:
            if fn(torch.empty(0, dtype=dtype)).dtype != dtype:
                hint = "Cast the model before offload_weights, or call the handle's remove() first."
                raise UnsupportedError(message("model", f"{dtype} as before, with offloaded weights", "a cast", hint))
        return set(map(id, params))


def _removed() -> None:
    """Raise in a backward whose forward was before `WeightOffload.remove`, or before the end of the model.

    Raises:
        UnsupportedError: Always.
    """
    hint = "Call remove(), or offload_weights again, after backward, and keep the model until then."
    raise UnsupportedError(message("offload_weights", "a backward before its removal", "one after it", hint))


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _graph_tensors(given: Any) -> list[Tensor]:
    """Return the tensors of a call's arguments or outputs that are in a graph."""
    return [x for x in tree_leaves(given) if isinstance(x, Tensor) and x.requires_grad]


def _overrides(base: type[nn.Module]) -> dict[str, Any]:
    """Return what a layer with offloaded weights does differently from ``base``: moves leave them out."""

    def _apply(self: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
        check = vars(self).get(_STAYS)
        stay = (check(fn) if check is not None else None) or set()
        places = [(m, name, p) for m in self.modules() for name, p in m._parameters.items() if id(p) in stay]
        for module, name, _ in places:
            module._parameters[name] = None
        try:
            return base._apply(self, fn, *args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            for module, name, p in places:
                module._parameters[name] = p

    return {"_apply": _apply}


def _shared(model: nn.Module) -> set[int]:
    """Return the ids of parameters that have several names."""
    seen, shared = set[int](), set[int]()
    for _, p in model.named_parameters(remove_duplicate=False):
        (shared if id(p) in seen else seen).add(id(p))
    return shared


def _frozen(layer: nn.Module, shared: set[int]) -> list[nn.Parameter]:
    """Return a layer's weights that can be on the host: frozen ones of plain memory, or of bitsandbytes' 4 bits."""
    return [
        p
        for p in layer.parameters()
        if not p.requires_grad
        and id(p) not in shared
        and p.nbytes > MIN_BYTES
        and copies.is_dense(p)
        and (type(p) is nn.Parameter or getattr(p, "quant_state", None) is not None)
    ]


def _check(model: nn.Module) -> None:
    """Raise where weights are not whole tensors of this process."""
    for name, p in model.named_parameters():
        sharded = hasattr(p, "device_mesh") or hasattr(p, "ds_id")
        if p.is_meta or sharded:
            hint = "FSDP2 and ZeRO-3 offload parameters by settings of their own." if sharded else "Load the weights."
            got = "a shard" if sharded else "one on the meta device"
            raise UnsupportedError(message(name, "a whole tensor on a CPU or a GPU", got, hint))
    for name, module in model.named_modules():
        if hasattr(module, "_hf_hook") and getattr(module._hf_hook, "execution_device", None) is not None:
            hint = "Load the model without device_map, or call accelerate.hooks.remove_hook_from_submodules(model)."
            raise UnsupportedError(message(name or "model", "a module that nothing else moves", "accelerate's", hint))


def _device(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """Return the CUDA device with its index: the one given, or that of the model's parameters, or the current one."""
    if device is None:
        device = next((p.device for p in model.parameters() if p.is_cuda), torch.device("cuda"))
    whole = str(device) == "cuda" and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if whole else _named(device)


def _named(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        expected = 'a device as PyTorch names it: "cuda", "cuda:1", "cpu"'
        raise ArgumentValueError(message("device", expected, repr(device))) from error
