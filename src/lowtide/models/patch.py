"""`patch` and `unpatch`: a model's loss without its logits, one instance at a time.

Both the model and its output embedding get a class made for the purpose: a child of their own, of the same name, that
overrides what has to change and nothing else. A class, and not a replaced ``forward`` on the instance, because it goes
wherever the module goes: copies, pickles, replicas, adapters, engines that call ``model.forward``.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from lowtide.errors import ArgumentTypeError, UnsupportedError, message
from lowtide.head.arguments import check_options
from lowtide.head.options import HeadOptions
from lowtide.models.eligibility import (
    BASE,
    is_causal_lm_loss,
    is_under_compile,
    module_name,
    why_not_fuse_loss,
    why_not_lazy,
    why_not_patch_head,
    why_not_patch_model,
)
from lowtide.models.head_call import HeadCall, InsideHead
from lowtide.models.lazy_logits import LazyLogits
from lowtide.models.report import PatchReport

_STATE = "_lowtide_patch"
_FUSED = "the loss that follows is computed without logits; they are built where anything else reads them"


class _Patch:
    """What a patched model carries: one attribute of the instance."""

    def __init__(self, report: PatchReport, options: HeadOptions | None) -> None:
        self.report = report
        self.options = options
        self.head: nn.Module | None = None
        self.why_not: str | None = None


# The patch of the model whose forward is running with labels; each thread sees its own.
_awaiting_loss: ContextVar[_Patch | None] = ContextVar("lowtide_awaiting_loss", default=None)


def patch(
    model: nn.Module,
    *,
    loss: bool = True,
    mlp: bool = True,
    norm: bool = True,
    rope: bool = True,
    options: HeadOptions | None = None,
) -> PatchReport:
    """Make a Hugging Face model compute its loss without its logits; change this instance only.

    Called with labels, the model's output embedding returns an object that stands for the logits, and the model's loss
    function computes the loss from the hidden states through `lowtide.linear_cross_entropy`. Scales and soft caps that
    the model applies in between are followed. Whatever else reads the logits (``outputs.logits`` later, another loss, a
    metric) gets them, built when asked for and counted in the report. Without labels the model runs as before, to the
    bit. The logits that the loss sees are float32, also where the model would have rounded its own to its dtype first.

    Left as it is, with the reason in the report: a loss that is not transformers' ``ForCausalLMLoss``, and an output
    embedding that is not a plain ``torch.nn.Linear`` of the model's own (adapters, quantised weights, BERT-like
    prediction heads). Inside a region compiled by ``torch.compile`` the model runs unpatched, uncounted.

    Patching again returns the same report, with the new ``options`` in force; with ``loss=False`` it undoes the first.
    Weights, their names and what ``save_pretrained`` writes do not change.

    Args:
        model: A model with ``get_output_embeddings`` and a ``loss_function``, as those of transformers; also one
            wrapped by peft. Not one wrapped by DDP, FSDP1 or ``torch.compile``: patch first, wrap then.
        loss: Whether to patch the loss.
        mlp: Reserved: this version leaves the MLPs as they are, and the report says so.
        norm: Reserved, likewise.
        rope: Reserved, likewise.
        options: How `lowtide.linear_cross_entropy` is to run.

    Returns:
        A `PatchReport`: print it for a table. Its counts are live.

    Raises:
        ArgumentTypeError: ``model`` is no module with ``get_output_embeddings``, or ``options`` no HeadOptions.

    Example:
        >>> model = AutoModelForCausalLM.from_pretrained("path/to/model")
        >>> report = lowtide.patch(model)
        >>> model(input_ids=ids, labels=ids).loss.backward()
        >>> print(report)
        >>> lowtide.unpatch(model)
    """
    target = _unwrapped(model)
    check_options(options)
    for name, flag in (("loss", loss), ("mlp", mlp), ("norm", norm), ("rope", rope)):
        if not isinstance(flag, bool):
            raise ArgumentTypeError(message(name, "True or False", f"{flag!r}"))
    if not loss:
        unpatch(target)
    state = vars(target).get(_STATE)
    if state is not None:
        state.options = options
        return state.report  # type: ignore[no-any-return]
    state = _Patch(PatchReport(), options)
    why_not = why_not_patch_model(target)
    if not loss:
        state.report.add("loss", "-", "left as it is: loss=False", patched=False)
    elif why_not is not None:
        state.report.add("loss", "-", f"left as it is: {why_not}", patched=False)
    else:
        vars(target)[_STATE] = state
        target.__class__ = _patched_class(target.__class__, _model_overrides)
        _adopt_head(target, state)
    for part, asked in (("mlp", mlp), ("norm", norm), ("rope", rope)):
        why = "this version patches the loss only" if asked else f"{part}=False"
        state.report.add(part, "-", f"left as it is: {why}", patched=False)
    return state.report


def unpatch(model: nn.Module) -> None:
    """Undo `patch`: the model and its output embedding get back the classes and attributes they had.

    A model that is not patched is left as it is, so that cleaning up twice does no harm.

    Args:
        model: What `patch` was given.

    Raises:
        ArgumentTypeError: ``model`` is no module with output embeddings.
        UnsupportedError: Something else changed a patched module's class since (``fully_shard``, a parametrization).

    Example:
        >>> lowtide.patch(model)
        >>> lowtide.unpatch(model)
    """
    target = _unwrapped(model)
    state = vars(target).get(_STATE)
    if state is None:
        return
    patched = [module for module in (target, state.head) if module is not None and type(module) is not nn.Linear]
    for module in patched:
        if BASE not in vars(type(module)):
            raise UnsupportedError(
                message(
                    "model",
                    f"{type(module).__name__} to have the class that patch gave it",
                    f"one changed since, {type(module).__mro__}",
                    "Undo what came after lowtide.patch first.",
                )
            )
    for module in patched:
        module.__class__ = vars(type(module))[BASE]
    del vars(target)[_STATE]


def _unwrapped(model: Any) -> Any:
    """Return the model itself: peft's wrapper hands it out, and calls its forward."""
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(message("model", "a torch.nn.Module", type(model).__name__))
    if hasattr(model, "_orig_mod"):
        hint = "Pass the model itself: patch first, compile then."
        raise ArgumentTypeError(message("model", "a Hugging Face model", "one wrapped by torch.compile", hint))
    unwrap: Any = getattr(model, "get_base_model", None)
    if callable(unwrap):
        model = unwrap()
    if not callable(getattr(model, "get_output_embeddings", None)):
        hint = "Pass the Hugging Face model itself, before DDP, FSDP or torch.compile wraps it."
        raise ArgumentTypeError(message("model", "a model with get_output_embeddings()", type(model).__name__, hint))
    return model


def _adopt_head(model: Any, state: _Patch) -> None:
    """Give the model's present output embedding lazy logits, and give up the one before, if it was replaced."""
    head: Any = model.get_output_embeddings()
    if head is not None and head is state.head and hasattr(type(head), BASE):
        return
    if state.head is not None and BASE in vars(type(state.head)):
        state.head.__class__ = vars(type(state.head))[BASE]
    state.head = None
    state.why_not = why_not_patch_head(model, head)
    name = "-" if head is None else module_name(model, head)
    if state.why_not is None:
        state.head = head
        head.__class__ = _patched_class(head.__class__, _head_overrides)
    outcome = _FUSED if state.why_not is None else f"left as it is: {state.why_not}"
    state.report.add("loss", name, outcome, patched=state.why_not is None)


@contextmanager
def _loss_awaited(model: nn.Module) -> Iterator[None]:
    """Let the head return lazy logits inside, if the loss that follows is one that can consume them."""
    state: _Patch = vars(model)[_STATE]
    _adopt_head(model, state)
    why_not = state.why_not or why_not_fuse_loss(model)
    if why_not is not None:
        state.report.count_materialised(why_not)
    token = _awaiting_loss.set(state if why_not is None else None)
    try:
        yield
    finally:
        _awaiting_loss.reset(token)


def _model_overrides(base: type[nn.Module]) -> dict[str, Any]:
    """Return what a patched model does differently from ``base``."""
    signature = inspect.signature(base.forward)
    names = list(signature.parameters)
    labels_at = [(name, names.index(name) - 1 if name in names else None) for name in ("labels", "shift_labels")]
    stock: Any = inspect.getattr_static(base, "loss_function")

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        awaited = any(
            kwargs.get(name) is not None or (at is not None and len(args) > at and args[at] is not None)
            for name, at in labels_at
        )
        # A replica of DataParallel returns its outputs by C++ that knows no lazy tensors.
        # An instance that somebody made from this class is not patched.
        if not awaited or _STATE not in vars(self) or is_under_compile() or getattr(self, "_is_replica", False):
            return base.forward(self, *args, **kwargs)
        with _loss_awaited(self):
            return base.forward(self, *args, **kwargs)

    # Not functools.wraps: its __wrapped__ is an invitation to call past this function, and accelerate takes it.
    forward.__signature__ = signature  # type: ignore[attr-defined]
    forward.__doc__ = base.forward.__doc__

    def loss_function(self: Any) -> Any:
        loss = stock.fget(self)
        return functools.partial(_score, loss) if not is_under_compile() and is_causal_lm_loss(loss) else loss

    return {"forward": forward, "loss_function": property(loss_function, stock.fset, stock.fdel, stock.__doc__)}


def _head_overrides(base: type[nn.Linear]) -> dict[str, Any]:
    """Return what a patched output embedding does differently from ``base``."""

    def forward(self: nn.Linear, input: Any) -> Any:
        if type(input) is InsideHead:
            return input.work(self, functools.partial(base.forward, self))
        state = None if is_under_compile() else _awaiting_loss.get()
        if state is None or state.head is not self:  # or another model's head, called by the one that awaits its loss
            return base.forward(self, input)
        why_not = why_not_lazy(self, input)
        if why_not is not None:
            state.report.count_materialised(why_not)
            return base.forward(self, input)
        return LazyLogits.of(HeadCall(self, input, state.report, state.options))

    return {"forward": forward}


def _score(loss: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Call transformers' own loss function on logits that it, and only it, may consume unbuilt.

    The function itself runs, so that its shift, padding, denominator and options are followed and not repeated here.
    """
    args = tuple(arg.scoring() if isinstance(arg, LazyLogits) else arg for arg in args)
    kwargs = {name: arg.scoring() if isinstance(arg, LazyLogits) else arg for name, arg in kwargs.items()}
    return loss(*args, **kwargs)


@functools.cache
def _patched_class(base: Any, overrides: Callable[[Any], dict[str, Any]]) -> Any:
    """Return the child of ``base`` that a patched module gets: the same name, ``overrides``, and how to copy it."""

    def reduce(self: Any, protocol: Any) -> Any:
        # Pickles by the stock class and makes the child again when read.
        rebuild, _, *state = base.__reduce_ex__(self, protocol)
        return (_rebuilt, (base, overrides), *state) if rebuild.__name__ == "__newobj__" else (rebuild, _, *state)

    # The same names: transformers writes them to config.json and keys its registries by them.
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (base,), {**names, "__reduce_ex__": reduce, BASE: base, **overrides(base)})


def _rebuilt(base: Any, overrides: Callable[[Any], dict[str, Any]]) -> Any:
    return object.__new__(_patched_class(base, overrides))
