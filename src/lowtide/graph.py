"""Functions as registered operators and as nodes of autograd's graph whose gradients are differentiated once."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable, without importing the compiler
from torch.nn import Parameter
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from lowtide.errors import UnsupportedError, message
from lowtide.kernel_launch import on_device

run_in_eager = _disable_dynamo
# Documented, in modules whose names are private.
pytree = _pytree
DispatchMode = TorchDispatchMode
TWICE = (
    "lowtide: expected gradients that are not differentiated again, got a second derivative. For those build the"
    " logits: torch.nn.functional.cross_entropy(torch.nn.functional.linear(input, linear_weight, linear_bias), target)."
)


_SCHEMA_TYPES = {
    Tensor: "Tensor", Tensor | None: "Tensor?", torch.dtype: "ScalarType", str: "str", int: "SymInt",
    float: "float", float | None: "float?", float | Tensor | None: "float?", bool: "bool", int | None: "SymInt?",
    Sequence[Tensor]: "Tensor[]", Sequence[Tensor | None]: "Tensor?[]", Sequence[float]: "float[]",
}  # fmt: skip


def schema_of(call: type, fields: int | None = None) -> str:
    """Return the arguments of an operator that takes the first ``fields`` of ``call``, a NamedTuple; None: all."""
    return ", ".join(f"{_SCHEMA_TYPES[hint]} {name}" for name, hint in list(get_type_hints(call).items())[:fields])


def _in_dispatch_mode() -> bool:
    return torch._C._len_torch_dispatch_stack() > 0  # a mode does not say that it is active


def watched(args: Sequence[Any]) -> bool:
    """Return whether a call has to be an operator: for a compiler, a dispatch mode or a tensor without data."""
    if torch.compiler.is_compiling():
        return True
    if _in_dispatch_mode():
        _tell_counters()
        return True
    for arg in args:
        kind = type(arg)
        if kind is Tensor or kind is Parameter:
            if arg.is_meta:
                return True
        elif kind is list or kind is tuple:
            if watched(arg):
                return True
        elif isinstance(arg, Tensor):
            return True
    return False


_FLOP: dict[Any, Callable[..., int]] = {}


class Operator:
    """A function of tensors and scalars, called as `torch.ops.lowtide.NAME` if a compiler or a mode watches operators.

    It is opaque to torch.compile, its shapes can be inferred, and it has no autograd formula. Its GEMMs are hidden from
    `torch.utils.flop_counter.FlopCounterMode`, on every device: ``flop`` counts them.

    ``schema`` is "(arguments) -> (results)"; ``fake`` the function for fake tensors.
    """

    def __init__(
        self,
        name: str,
        schema: str,
        compute: Callable[..., Any],
        fake: Callable[..., Any],
        flop: Callable[..., int] | None = None,
    ) -> None:
        self.compute = compute
        torch.library.custom_op(f"lowtide::{name}", self._run, mutates_args=(), schema=schema).register_fake(fake)
        self.registered = getattr(torch.ops.lowtide, name).default
        if flop is not None:
            _FLOP[getattr(torch.ops.lowtide, name)] = lambda *args, out_val=None: flop(*args)  # noqa: ARG005

    def __call__(self, *args: Any) -> Any:
        """Run it; as an operator only if that is watched, which costs 0.15 ms."""
        if watched(args):
            return self.registered(*args)
        return self._run(*args)

    def _run(self, *args: Any) -> Any:
        with torch.no_grad():
            return self.compute(*args)


def flop_of(operator: Any) -> Callable[..., int] | None:
    """Return the formula of one of lowtide's operators, called as those of `torch.utils.flop_counter.flop_registry`."""
    return _FLOP.get(operator)


def _tell_counters() -> None:
    """Add our formulas to active FlopCounterModes: they copied PyTorch's table, whose module is slow to import."""
    counting = sys.modules.get("torch.utils.flop_counter")
    if counting is None:
        return
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, counting._FlopCounterMode):
            table, addmm = mode.counter.flop_registry, torch.ops.aten.addmm
            for operator, formula in _FLOP.items():
                table.setdefault(operator, formula)
            if table.get(addmm) is counting.flop_registry[addmm]:
                table[addmm] = _flop_of_addmm


def _flop_of_addmm(_out: Tensor, a: Tensor, b: Tensor, *_args: Any, **_kwargs: Any) -> int:
    """Return the result of PyTorch's formula, which does not accept out_dtype, for GEMMs outside our operators."""
    return 2 * a.numel() * b.shape[1]


def held_elsewhere() -> bool:
    """Return whether a compiler or a dispatch mode may hold an operator's results, which must not be changed then.

    Selective checkpointing saves them; a mode with a true attribute ``holds_no_outputs`` does not.
    """
    if torch.compiler.is_compiling():  # first: it cannot trace what follows
        return True
    return any(not getattr(mode, "holds_no_outputs", False) for mode in _get_current_dispatch_mode_stack())


def undisturbed(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without autocast in which kernels run on ``device``."""
    if _in_dispatch_mode() and not torch.compiler.is_compiling():
        _tell_counters()
    # Autocast is disabled only if it is on: that costs as much host time as a launch.
    autocast = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return _without_autocast(device) if autocast else on_device(device)


@contextmanager
def saved_plainly() -> Iterator[None]:
    """Keep hooks on saved tensors, such as those of torch.utils.checkpoint, from the graphs that are made inside."""
    hooks: Any = torch._C._autograd  # hooks on top that change nothing would lose the check of versions
    outer = []
    while (top := hooks._top_saved_tensors_default_hooks(True)) is not None:
        outer.append(top)
        hooks._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(outer):
            hooks._push_saved_tensors_default_hooks(pack, unpack)


@contextmanager
def _without_autocast(device: torch.device) -> Iterator[None]:
    with torch.autocast(device_type=device.type, enabled=False), on_device(device):
        yield


def node(
    name: str, public: str, forward: Callable[..., Any], backward: Callable[..., Any], error: str = TWICE
) -> type[torch.autograd.Function]:
    """Return a node of autograd's graph whose gradients cannot be differentiated again.

    ``forward(ctx, *args)`` returns the results, and saves on ``ctx`` what backward needs. ``backward(ctx, *upstream)``
    returns the gradients of the first of ``args``, and what they depend on besides ``upstream``: see
    `differentiable_once`. ``public`` is the function's name, for errors, and ``error`` that of a second derivative.
    """

    def run_forward(ctx: Any, *args: Any) -> Any:
        ctx.count = len(args)
        ctx.set_materialize_grads(False)  # no memory for zeros either, if there is no upstream gradient
        return forward(ctx, *args)

    def run_backward(ctx: Any, *upstream: Tensor | None) -> Any:
        nothing = (None,) * ctx.count
        if all(g is None for g in upstream):  # a later function has no gradient: return none, as PyTorch does
            return nothing
        refuse_batched(public, *upstream)
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            grads, sources = backward(ctx, *upstream)
        grads = differentiable_once(grads, sources if sources is None else (*sources, *upstream), error)
        return *grads, *nothing[len(grads) :]

    both = {"forward": staticmethod(run_forward), "backward": staticmethod(run_backward)}
    return type(name, (torch.autograd.Function,), both)


def differentiable_once(
    grads: Sequence[Tensor | None], sources: Sequence[Tensor | None] | None, error: str
) -> list[Tensor | None]:
    """Return gradients whose own derivative, where create_graph=True asks for one, is an `UnsupportedError`.

    ``sources`` are what they depend on: without these in the graph, a derivative by one of them alone would silently be
    0. None: some of them were not saved, and create_graph=True is an error.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return list(grads)
    if sources is None:
        raise UnsupportedError(error)
    leaves = [g if g is None else g.detach().requires_grad_() for g in grads]
    return list(_DifferentiatedOnce.apply(error, len(leaves), *leaves, *sources))  # type: ignore[no-untyped-call]


def refuse_batched(function: str, *upstream: Tensor | None) -> None:
    """Raise for a batch of upstream gradients, by ``is_grads_batched=True`` or ``vectorize=True``."""
    if torch.compiler.is_compiling() or not any(map(_is_batch, upstream)):
        return
    hint = "Call torch.autograd.grad once for each, without is_grads_batched or vectorize."
    raise UnsupportedError(message(function, "one gradient of its output at a time", "a batch of them", hint))


def _is_batch(tensor: Tensor | None) -> bool:
    functorch: Any = torch._C._functorch  # a batch of gradients is no type of its own in Python
    if tensor is None:
        return False
    return functorch.is_legacy_batchedtensor(tensor) or functorch.is_batchedtensor(tensor)  # type: ignore[no-any-return]


def is_last_backward() -> bool:
    """Return whether this backward is the last use of what forward stored."""
    # retain_graph, which a node is not told
    return not torch.compiler.is_compiling() and not torch._C._autograd._get_current_graph_task_keep_graph()


def keep_stored(ctx: Any, stored: Sequence[Any], sources: Sequence[Tensor | None]) -> None:
    """Store gradients, and what they depend on, on a node of autograd's graph for `take_stored`.

    As attributes, not by save_for_backward, with which torch.utils.checkpoint would drop them and recompute everything.
    """
    compiling = torch.compiler.is_compiling()
    # so that second derivatives are an error; in memory until backward, as the gradients are
    trained = () if compiling else [x for x in sources if x is not None and x.requires_grad]
    ctx.stored, ctx.sources = tuple(stored), trained
    # a dispatch mode, such as that of selective checkpointing, may hold the results of forward
    ctx.shared = held_elsewhere()


def take_stored(ctx: Any, public: str) -> tuple[tuple[Any, ...], Sequence[Tensor | None], bool]:
    """Return what `keep_stored` stored, and whether it may be overwritten: in its last use, after which more raise."""
    if ctx.stored is None:
        expected, got = "one backward through this graph", "a second after its gradients were freed"
        hint = "Pass retain_graph=True to the first one."
        raise UnsupportedError(message(f"lowtide.{public}", expected, got, hint))
    stored, sources, last = ctx.stored, ctx.sources, is_last_backward()
    if last:
        ctx.stored, ctx.sources = None, ()
    return stored, sources, last and not ctx.shared


class _DifferentiatedOnce(torch.autograd.Function):
    """A node after gradients, so that a second derivative is an error, not silently 0."""

    @staticmethod
    def forward(ctx: Any, error: str, count: int, *tensors: Tensor | None) -> Any:
        ctx.error = error
        # a sparse tensor has no views
        return tuple(g if g is None else g.detach() if g.is_sparse else g.view_as(g) for g in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:  # noqa: ARG004
        raise UnsupportedError(ctx.error)
