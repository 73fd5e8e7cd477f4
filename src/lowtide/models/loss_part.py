"""The part ``loss`` of `lowtide.patch`: what a patched model and its output embedding do differently.

`adopt_head` gives the output embedding a class of its own; `model_overrides` and `_head_overrides` have what the two
classes change.
"""

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any

import torch
from torch import nn

from lowtide.distributed.fsdp import Gathered, end_forward_alone
from lowtide.distributed.zero import Kept
from lowtide.models import eligibility
from lowtide.models.adapters import saved_module
from lowtide.models.head_call import HeadCall, HeadWork, LossState, ModelCall, why_not_patch_head
from lowtide.models.instance import (
    give_class,
    is_on_top,
    part_of,
    redecorated,
    take_class_back,
    undecorated,
    with_forward,
)
from lowtide.models.lazy_logits import LazyLogits
from lowtide.models.report import NOT_CALLED, WITHOUT_LABELS

STATE = "_lowtide_patch"
LOSS = "loss"
_FUSED = "the loss that follows is computed without logits; they are built where anything else reads them"

# Why logits are built at every step of a training run, and what to do.
_REPLICA = ("torch.nn.DataParallel called a replica of the model", "Use DistributedDataParallel")
_GIVE_LABELS = (
    "Give it the labels too, or num_items_in_batch if you compute the loss from outputs.logits yourself; for TRL's "
    "trainers call lowtide.patch_trl()"
)


_NOT_TRACED = (
    "the forward of a model after lowtide.patch runs in eager, and what it calls is compiled: use layer.compile() for "
    "layer in model.model.layers, or lowtide.unpatch(model) for one graph or torch.export"
)


# The forward of a patched model that is running: each thread sees its own.
_running: ContextVar[ModelCall | None] = ContextVar("lowtide_running", default=None)


def adopt_head(model: Any, state: LossState) -> None:
    """Give the model's present output embedding lazy logits; one before it, if it was replaced, keeps them."""
    outer = model.get_output_embeddings()
    head: Any = None if outer is None else saved_module(outer)
    known = head is not None and part_of(head) == LOSS  # also a copy, or the head of another patched model
    if known and head is state.head:
        return
    why_not = None
    if not known:
        for module in () if head is None else head.modules():
            if part_of(module) == LOSS and is_on_top(module):  # the head before, which has got adapters
                take_class_back(module)
        why_not = why_not_patch_head(model, head)
        if why_not is None:
            give_class(head, LOSS, _head_overrides)
    state.head, state.why_not = head if why_not is None else None, why_not
    name = "-" if head is None else next((name for name, child in model.named_modules() if child is head), "")
    outcome = _FUSED if why_not is None else f"left as it is: {why_not}"
    state.report.add("loss", name, outcome, patched=why_not is None)


def model_overrides(base: type[nn.Module]) -> dict[str, Any]:
    """Return what a patched model does differently from ``base``."""
    names = list(inspect.signature(base.forward).parameters)
    labels_at = [(name, names.index(name) - 1 if name in names else None) for name in eligibility.LABELS]
    stock, plain = base.forward, undecorated(base.forward)
    # of which torch.compile compiles only what they call; each decorator is left out by itself
    eager = stock if plain is None else redecorated(stock, plain, functools.partial(_not_compiled, recursive=False))

    def is_awaited(args: Any, kwargs: Any) -> bool:
        return any(
            kwargs.get(name) is not None or (at is not None and len(args) > at and args[at] is not None)
            for name, at in labels_at
        )

    begin = _not_compiled(lambda model, args, kwargs: _begin(model, is_awaited(args, kwargs)))
    end = _not_compiled(_end)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # torch.compile would compile any function that is called here without being left out.
        if STATE not in vars(self):  # an instance that somebody made from this class
            return base.forward(self, *args, **kwargs)
        run = eager if base.forward is stock else base.forward
        (running, token), completed = begin(self, args, kwargs), False
        try:
            outputs = run(self, *args, **kwargs)
            completed = True
        finally:
            end(running, token, completed)
        return outputs

    attributes = with_forward(base, forward)
    attributes["forward"] = _not_compiled(forward, recursive=False)
    del attributes["forward"].__wrapped__  # as in `with_forward`
    loss = getattr(base, "loss_function", None)
    if isinstance(loss, property) and loss.fget is not None:
        attributes["loss_function"] = property(_not_compiled(functools.partial(_loss_of, loss.fget)), loss.fset)
    return attributes


def _loss_of(stock: Callable[[Any], Any], model: Any) -> Any:
    """Return the model's loss function, and in a forward with a loss one that torch.compile leaves out."""
    running = _running.get()
    return stock(model) if running is None or not running.lazy else _not_compiled(stock(model))


def _not_compiled(function: Callable[..., Any], *, recursive: bool = True) -> Any:
    """Return a function that torch.compile leaves out; if not ``recursive``, it compiles what the function calls."""
    return torch.compiler.disable(function, recursive=recursive, reason=_NOT_TRACED)  # type: ignore[no-untyped-call]


def _is_replica(model: nn.Module) -> bool:
    """Whether torch.nn.DataParallel made it."""
    return getattr(model, "_is_replica", False)


def _begin(model: nn.Module, awaited: bool) -> tuple[ModelCall, Token[ModelCall | None]]:
    """Let the head return lazy logits until `_end`, where a loss is awaited or the model scores."""
    state: LossState = vars(model)[STATE]
    is_replica, trains = _is_replica(model), model.training and torch.is_grad_enabled()
    if is_replica:  # it returns outputs by C++, which cannot read lazy tensors
        if trains:
            state.count_built(*_REPLICA)
    elif awaited or state.scoring or trains:
        adopt_head(model, state)
    lazy = (awaited or state.scoring) and not is_replica
    if lazy and state.why_not is not None:
        state.report.count_materialised(state.why_not)
    running = ModelCall(model, state, lazy, scores=not awaited)
    return running, _running.set(running)


def _end(running: ModelCall, token: Token[ModelCall | None], completed: bool) -> None:
    """Count a call that did not call the head, or a training step without labels, which builds the logits."""
    _running.reset(token)
    state, called = running.state, running.called
    if state.gathered is not None and running.lazy:  # there was no loss
        state.gathered.let_go()
        state.gathered = None
    if completed and running.lazy and not called and state.why_not is None:
        state.report.count_materialised(NOT_CALLED)
    elif completed and called and not running.lazy and not _is_replica(running.model):
        state.count_built(WITHOUT_LABELS, _GIVE_LABELS)


def _head_overrides(base: type[nn.Linear]) -> dict[str, Any]:
    """Return what a patched output embedding does differently from ``base``."""

    def forward(self: nn.Linear, input: Any, *args: Any, **kwargs: Any) -> Any:
        running = _running.get()
        running = running if running is not None and running.state.head is self else None
        if type(input) is HeadWork:
            end_forward_alone(self)
            if running is not None and running.state.gathered is not None:
                running.state.gathered.release()
                running.state.gathered = None
            return input.work(functools.partial(base.forward, self), *args)
        if running is None or not running.lazy:
            logits = base.forward(self, input, *args, **kwargs)
            if running is not None and self.training and logits.requires_grad:
                running.called = True
            return logits
        running.called, state = True, running.state
        why_not = eligibility.why_not_lazy(self, (input, *args), kwargs, scores=running.scores)
        if why_not is not None:
            state.report.count_materialised(why_not)
            return base.forward(self, input, *args, **kwargs)
        call = HeadCall(self, input, running)
        if state.gathered is None:
            state.gathered = Kept(call.tensors) if call.partitioned else Gathered(self)
        return LazyLogits.of(call)

    return {"forward": _not_compiled(forward)}
