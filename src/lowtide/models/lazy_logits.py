"""The tensor that a patched head returns: logits that are built when an operation needs more than a loss of them.

Legend: hidden [..., D], logits [..., V].
"""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from lowtide.distributed.zero import HOOKS
from lowtide.errors import UnsupportedError
from lowtide.graph import pytree, saved_plainly
from lowtide.models.head_call import HeadCall, Rows, RowView, Step, TensorBase, fold, replay

_as_plain = torch._C.DisableTorchFunctionSubclass  # a context in which lazy logits are what their storage says

# These hook and read a module's outputs for the gradients of parameters, and do the same with the loss.
_DISTRIBUTED = ("torch.distributed.", "torch.nn.parallel.", "deepspeed.")

# What needs no logits, by PyTorch's function: filled by `lazy_operations`. Each takes what that function takes, and
# returns NotImplemented where the real logits are needed.
OPERATIONS: dict[Callable[..., Any], Callable[..., Any]] = {}

_RETAIN_OR_UNPATCH = (
    "Where you compute the loss, call logits.retain_grad() first, and they are built. Where the model does, call "
    "lowtide.unpatch(model)."
)


class LazyLogits(Tensor):
    """The logits of one `HeadCall` after some steps: shape, strides, dtype and device, and no storage.

    `OPERATIONS` are recorded as one more step, or computed without logits. Any other runs on the real logits, which are
    built once and kept: values, gradients and in-place changes are those of the stock model. A view stays a view: it is
    built from the real logits that it is a view of.
    """

    call: HeadCall
    steps: tuple[Step, ...]
    rows: Rows | None  # of the head's input; None: the classes stand second, [B, V, T]
    viewed: Self | None  # the logits that these are a view of, by the last step
    grad_mode: bool  # gradients were recorded when these were made
    inference: bool  # they were made in inference mode
    is_cut: bool  # a view, taken without gradients, of logits that have them: requires a gradient and passes none on
    has_children: bool  # others were recorded from these: their graph does not go through these, once built
    statistics: dict[str, Tensor]  # of all rows, as computed for some of them
    _real: Tensor | None = None

    @classmethod
    def of(cls, call: HeadCall) -> Self:
        """Return the logits of ``call``, before any operation."""
        like = torch.empty((*call.hidden.shape[:-1], call.head.weight.shape[0]), dtype=call.dtype, device="meta")
        return cls._make(call, (), (), like, None, grad_mode=torch.is_grad_enabled())

    @classmethod
    def _make(
        cls,
        call: HeadCall,
        steps: tuple[Step, ...],
        rows: Rows | None,
        like: Tensor,
        viewed: Self | None,
        *,
        grad_mode: bool,
    ) -> Self:
        def wrapper() -> Any:
            lazy: Any = Tensor._make_wrapper_subclass(
                cls,
                like.shape,
                strides=like.stride(),
                storage_offset=like.storage_offset(),
                dtype=like.dtype,
                device=call.hidden.device,
            )
            torch._C._set_throw_on_mutable_data_ptr(lazy)  # for C++ that asks neither of LazyLogits' two functions
            return lazy

        with torch.set_grad_enabled(grad_mode), call.as_in_forward():
            lazy: Self = _LogitsNode.apply(wrapper, call, steps, *call.linked)  # type: ignore[no-untyped-call]
        lazy.call, lazy.steps, lazy.rows, lazy.viewed = call, steps, rows, viewed
        lazy.grad_mode, lazy.inference = grad_mode, torch.is_inference_mode_enabled()
        lazy.is_cut, lazy.has_children, lazy.statistics = False, False, {}
        return lazy

    @property
    def whole(self) -> "LazyLogits":
        """The logits whose memory these have."""
        return self if self.viewed is None else self.viewed.whole

    @property
    def detached(self) -> Self | None:
        """The logits that these were detached from, by the last step."""
        return self.viewed if self.viewed is not None and self.steps[-1].kind == "detach" else None

    @property
    def is_real(self) -> bool:
        """Whether the logits, or those that this is a view of, are built, and may have been changed in place since."""
        return self._real is not None or (self.viewed is not None and self.viewed.is_real)

    def meta(self) -> Tensor:
        """Return a meta tensor of the same form, for what an operation gives: of the memory, if that is viewed."""
        with _as_plain():
            memory = torch.empty(self.whole.shape, dtype=self.dtype, device="meta")
            if self.viewed is None:
                return memory
            return memory.as_strided(self.shape, self.stride(), self.storage_offset())

    def then(self, step: Step, like: Tensor, rows: Rows = ()) -> Any:
        """Return new logits after one more step, of the shape and dtype of ``like``, with ``rows`` of these rows.

        NotImplemented where there are no rows, or in another order than in memory.
        """
        if self.rows is None or not like.is_contiguous():
            return NotImplemented
        return self._child(step, like, (*self.rows, *rows), view=False)

    def view_by(self, like: Tensor, *, detaches: bool = False) -> Any:
        """Return a view of these logits, as ``like`` is one of `meta`; NotImplemented if that has no whole rows."""
        form = like.shape, like.stride(), like.storage_offset()
        step = Step(TensorBase.detach, "detach") if detaches else Step(lambda z: z.as_strided(*form))
        selection, rows = RowView.of(like, self.whole.shape[-1]), self.whole.rows
        if selection is None or rows is None:
            swapped = self.meta().transpose(1, 2) if self.dim() == 3 and self.rows is not None else None
            if swapped is None or (like.shape, like.stride()) != (swapped.shape, swapped.stride()):
                return NotImplemented
            return self._child(step, like, None, view=True)
        return self._child(step, like, (*rows, selection), view=True)

    def _child(self, step: Step, like: Tensor, rows: Rows | None, *, view: bool) -> Self:
        detaches = step.kind == "detach"
        grad_mode = self.grad_mode and torch.is_grad_enabled() and not detaches
        parent = None if view or not grad_mode else self
        while parent is not None:  # also of what a view is a view of, from which it is built
            parent.has_children, parent = True, parent.viewed
        steps, viewed = (*self.steps, step), self if view else None
        child = self._make(self.call, steps, rows, like, viewed, grad_mode=grad_mode)
        child.is_cut = view and not grad_mode and self.requires_grad and not detaches
        return child

    def materialise(self, why: str) -> Tensor:
        """Return the logits themselves, built on the first call."""
        if self._passed_on() is not self:
            return self._passed_on().materialise(why)
        if self._real is None:
            modes = {"grad_mode": self.grad_mode, "inference": self.inference}
            with saved_plainly():  # these logits are kept: a checkpoint's recompute does not build them again
                if self.viewed is None:
                    self._real = real = self.call.logits(self.steps, why, **modes)
                    if self.grad_mode and self.call.resharded:  # a gradient gets the error of `HeadCall.vjp`
                        linked = self.call.linked
                        self._real = _LogitsNode.apply(lambda: real, self.call, self.steps, *linked)  # type: ignore[no-untyped-call]
                else:
                    viewed = self.viewed.materialise(why)
                    with self.call.modes(**modes):
                        self._real = replay(viewed, self.steps[-1:])
        return self._real

    def _passed_on(self) -> "LazyLogits":
        """Return the logits that DeepSpeed passed on as these, or these.

        ZeRO-3 puts a node of its own behind whatever a module returns, which detaches it and changes nothing: there it
        gathers the module's weights for backward. Results computed without logits have one too: the head computes them.
        """
        if self.detached is None:
            return self
        with _as_plain():
            function: Any = getattr(type(self.grad_fn), "_forward_cls", None)
        return self.detached if getattr(function, "__module__", "").startswith(HOOKS) else self

    def _has_another_graph(self) -> bool:
        """Whether a custom autograd function (a reentrant checkpoint) made these and put its own node behind them.

        Then autograd has to see this tensor, not the logits themselves, which have no graph.
        """
        with _as_plain():
            return self.requires_grad and not self.grad_mode

    def _look_at_graph(self) -> None:
        """Let a gradient of these logits be read or hooked, if it is complete.

        Raises:
            UnsupportedError: Something was computed whose gradient does not go through them: a loss, a recorded step.
        """
        if self.call.passed or self.has_children:
            raise UnsupportedError(
                "logits: expected their graph to be read or hooked before the loss, got logits that something was "
                "computed from without building them, so that its gradient does not go through them. "
                f"{_RETAIN_OR_UNPATCH}"
            )
        self.call.hooked = True

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        lazies = _lazies_in(args, kwargs)
        if any(lazy.detached is not None for lazy in lazies):  # seldom: the walk takes as long as a view
            args, kwargs = pytree.tree_map_only(LazyLogits, LazyLogits._passed_on, (args, kwargs))
            lazies = _lazies_in(args, kwargs)
        has_no_graph = func is Tensor.tolist or (
            func in OPERATIONS and (func in _DETACH or not torch.is_grad_enabled())
        )
        if not has_no_graph and any(lazy._has_another_graph() for lazy in lazies):
            with _as_plain():
                return func(*_real(args, func, graph=True), **_real(kwargs, func, graph=True))
        distributed = func in _OF_GRAPHS and reader().startswith(_DISTRIBUTED)
        if func in _OF_GRAPHS and not distributed:
            for logits in lazies:
                if logits.requires_grad:
                    logits._look_at_graph()
        lazy = lazies[0] if lazies else None
        if lazy is not None and not lazy.is_real:
            if func == _REQUIRES_GRAD and lazy.is_cut:
                return True
            if func in _METADATA or distributed or (func == _BASE and lazy.viewed is None):
                with _as_plain():
                    return func(*args, **kwargs)
            if func in OPERATIONS and not (lazy.is_cut and torch.is_grad_enabled()):
                with torch.set_grad_enabled(lazy.grad_mode and torch.is_grad_enabled()):
                    result = _operate(func, args, kwargs)
                if result is not NotImplemented:
                    return result
        return func(*_real(args, func), **_real(kwargs, func))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # C++ and custom autograd functions arrive here without __torch_function__. Autograd is above this and goes
        # through `_LogitsNode`, so that values are enough.
        return func(*_real(args, func, detach=True), **_real(kwargs or {}, func, detach=True))


def without_logits(logits: Tensor, function: Callable[..., Tensor]) -> Tensor:
    """Return the tensor that ``function`` computes of the hidden states and the head behind a patched model's logits.

    For a loss that is no function of PyTorch, in the model's loss function or after its forward. ``function`` runs in
    the head's forward, where FSDP2 and ZeRO-3 have the weight gathered, and is called with hidden [..., D], weight
    [V, D], ``linear_bias``, ``logit_scale``, ``softcap`` and ``options``.

    Raises:
        UnsupportedError: The logits are built, or normalised.
    """
    if isinstance(logits, LazyLogits):
        lazy = logits._passed_on()
        folded = None if lazy.is_real else fold(lazy.steps)
        if folded is not None and not folded.normalised:
            return lazy.call.without_logits(lazy.rows, folded, function, per_row=False)  # type: ignore[no-any-return]
    raise UnsupportedError(
        "logits: expected those of a patched model's plain linear output embedding, scaled, capped or biased, and not "
        "built yet, got others. print(report) says why lowtide.patch left the loss as it is."
    )


class _LogitsNode(torch.autograd.Function):
    """The graph's node of lazy logits: passes on a gradient that reaches them as the real logits would."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], Tensor], call: HeadCall, steps: tuple[Step, ...], *_: Tensor) -> Tensor:
        ctx.call, ctx.steps = call, steps
        ctx.set_materialize_grads(False)
        return make()

    @staticmethod
    def backward(ctx: Any, grad_logits: Tensor | None) -> Any:
        if grad_logits is None:  # a custom function passed the logits on, and nothing read them
            return None, None, None, *(None for _ in ctx.call.linked)
        if ctx.call.hooked:
            raise UnsupportedError(
                "logits: expected operations of PyTorch on logits that have a hook, got a custom autograd function, "
                f"whose gradient does not go through what was hooked. {_RETAIN_OR_UNPATCH}"
            )
        return None, None, None, *ctx.call.vjp(ctx.steps, grad_logits)


_BENEATH = ("lowtide.models.", "torch._dynamo", "torch._tensor", "torch.overrides")


def reader() -> str:
    """Return the module whose code is running, beneath this room's and what calls it for PyTorch."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith(_BENEATH) and frame.f_back:
        frame = frame.f_back
    name: str = frame.f_globals.get("__name__", "")
    return name


@functools.cache
def keep_from_compiling() -> None:
    """Have torch.compile run what is done with lazy logits between two graphs. Loads the compiler."""
    why = "lazy logits of lowtide.patch: pass logits.clone() for a graph without breaks"
    for name in ("__torch_function__", "__torch_dispatch__"):
        function = torch.compiler.disable(vars(LazyLogits)[name].__func__, reason=why)  # type: ignore[no-untyped-call]
        setattr(LazyLogits, name, classmethod(function))


def _lazies_in(*trees: Any) -> list[LazyLogits]:
    return [leaf for leaf in pytree.tree_leaves(trees) if isinstance(leaf, LazyLogits)]


def _real(tree: Any, func: Callable[..., Any], *, detach: bool = False, graph: bool = False) -> Any:
    """Return ``tree`` with real logits, detached if ``detach``; if ``graph``, except those with another graph."""

    def build(lazy: LazyLogits) -> Tensor:
        if graph and lazy._has_another_graph():
            return lazy
        descriptor = getattr(func, "__self__", None)  # of an attribute: its getter or setter
        name = getattr(descriptor, "__name__", None) or getattr(func, "__qualname__", None) or str(func)
        logits = lazy.materialise(f"read by {name}")
        return logits.detach() if detach else logits

    return pytree.tree_map_only(LazyLogits, build, tree)


def _operate(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of the lazy version of ``func``, NotImplemented if it needs the real logits."""
    operation = OPERATIONS[func]
    try:
        bound = inspect.signature(operation).bind(*args, **kwargs)
    except TypeError:
        return NotImplemented
    if not isinstance(next(iter(bound.arguments.values())), LazyLogits):
        return NotImplemented
    return operation(*bound.args, **bound.kwargs)


_ATTRIBUTES = """
    shape dtype device ndim layout requires_grad is_leaf is_cuda is_cpu is_meta is_sparse is_quantized is_nested
    itemsize
"""
_METHODS = """
    size dim ndimension numel nelement element_size stride is_contiguous is_floating_point is_complex get_device
    __hash__ __len__
"""
_METADATA: frozenset[Any] = frozenset(
    [
        *(getattr(TensorBase, name).__get__ for name in _ATTRIBUTES.split()),
        *(getattr(Tensor, name) for name in _METHODS.split()),
        *(torch.numel, torch.is_floating_point, torch.is_complex),
    ]
)

_BASE: Any = vars(TensorBase)["_base"].__get__  # Any: torch's stub has it as a tensor
_REQUIRES_GRAD: Any = vars(TensorBase)["requires_grad"].__get__
_DETACH: frozenset[Any] = frozenset([Tensor.detach, torch.detach])
# What looks at a graph, or hooks it.
_OF_GRAPHS: frozenset[Any] = frozenset(
    [
        vars(TensorBase)["grad_fn"].__get__, Tensor.register_hook, Tensor.retain_grad,
        torch.autograd.grad, torch.autograd.backward,
    ]
)  # fmt: skip
