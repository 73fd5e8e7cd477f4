"""The part ``loss`` of `lowtide.patch`: what a patched model and its output embedding do differently.

`adopt_head` gives the output embedding a class of its own, `model_overrides` and `_head_overrides` have what the two
classes change, and `LossState` is the patched model's state.
"""

import functools
import inspect
import warnings
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from lowtide.distributed.fsdp import Gathered, end_forward_alone
from lowtide.distributed.zero import Kept
from lowtide.head.options import HeadOptions
from lowtide.models import eligibility, parallel_style
from lowtide.models.adapters import saved_layers, saved_module
from lowtide.models.head_call import HeadCall, HeadWork
from lowtide.models.head_kinds import head_call, why_not_linear, with_what
from lowtide.models.instance import (
    PROBED,
    StockForward,
    give_class,
    is_on_top,
    part_of,
    redecorated,
    take_class_back,
    undecorated,
    with_forward,
)
from lowtide.models.lazy_logits import LazyLogits
from lowtide.models.report import NOT_CALLED, ONE_TOKEN, WITHOUT_LABELS, PatchReport

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


class LossState:
    """The state of a patched model: one attribute of the instance."""

    scoring = False  # as `patch` was given it
    scoring_blocks = 0  # of `scoring`, that are open

    def __init__(self, report: PatchReport, options: HeadOptions | None) -> None:
        self.report, self.options, self.warned = report, options, False
        self.head: nn.Module | None = None
        self.heads: list[nn.Module] = []  # it, and others of modules_to_save that have a class of ours
        self.head_calls = 0
        self.why_not: str | None = None
        self.gathered: Gathered | Kept | None = None  # between the head's lazy logits and the loss

    @property
    def scores(self) -> bool:
        """Whether calls without labels have lazy logits too."""
        return self.scoring or self.scoring_blocks > 0

    def count_built(self, why: str, hint: str) -> None:
        """Count a call whose logits were built by a way of training that builds them at every step, and warn once."""
        if self.head is None:  # the report has the reason
            return
        self.report.count_materialised(why)
        if not self.warned:
            self.warned = True
            text = f"lowtide.patch: the logits are built at every step, because {why}. {hint}."
            warnings.warn(f"{text} (Warned of once for each model.)", stacklevel=2)


# The patched model that owns each head with a class of ours. A copied head has no owner until the copied model is
# called.
_owners: WeakKeyDictionary[nn.Module, ref[LossState]] = WeakKeyDictionary()


class _Awaited(NamedTuple):
    """A forward that is running, whose head is to return lazy logits."""

    state: LossState
    scores: bool  # without labels


# Each thread sees its own.
_awaiting: ContextVar[_Awaited | None] = ContextVar("lowtide_awaiting", default=None)


def _awaited_by(head: nn.Module) -> _Awaited | None:
    """Return the forward that calls its own ``head`` for lazy logits, None for any other call."""
    awaited = _awaiting.get()
    return awaited if awaited is not None and awaited.state.head is head else None


def is_free(head: nn.Module | None, state: LossState) -> bool:
    """Whether a head has a class of ours and no other patched model owns it."""
    owner = None if head is None or part_of(head) != LOSS else _owners.get(head, lambda: None)
    return owner is not None and owner() in (None, state)


def adopt_head(model: Any, state: LossState) -> None:
    """Give the model's present output embedding lazy logits, and give up the one before, if it was replaced."""
    outer: Any = model.get_output_embeddings()
    found = None if outer is None else saved_module(outer)
    head: Any = outer if isinstance(found, str) else found
    if state.head is not None and head is state.head and part_of(state.head) is not None:
        _owners.setdefault(head, ref(state))  # a copied model's head has had no owner so far
        return
    # Heads that a layer of modules_to_save may call keep their class: logits of their calls may be read later.
    saved = saved_layers(outer)
    for module in state.heads:
        if is_on_top(module) and module not in saved:
            take_class_back(module)
    state.heads = [module for module in saved if is_free(module, state)]
    known = head in state.heads
    if not known and is_free(head, state) and is_on_top(head):  # a copy whose wrapper was taken off
        take_class_back(head)
    state.head = None
    state.why_not = None if known else eligibility.why_not_patch_head(model, head, why_not_linear(head))
    name = "-" if head is None else next((name for name, child in model.named_modules() if child is head), "")
    if state.why_not is None:
        state.head = head
        if not known:
            state.heads.append(head)
            give_class(head, LOSS, _head_overrides)
        _owners[head] = ref(state)
    outcome = f"{_FUSED}{with_what(head)}" if state.why_not is None else f"left as it is: {state.why_not}"
    state.report.add("loss", name, outcome, patched=state.why_not is None)


class _Running(NamedTuple):
    """A forward of a patched model, from `_begin` to `_end`."""

    state: LossState
    token: Token[_Awaited | None] | None  # of `_awaiting`; None: the head returns real logits
    head_calls: int  # before it
    is_replica: bool


class _EagerForward(StockForward):
    """The forward of a model's class, and the same one of which torch.compile compiles only what it calls."""

    def record(self) -> None:
        """Make the eager forward: its decorators are functions of their own, each left out by itself."""
        if self.is_replaced():
            super().record()
            self.eager = self.forward if undecorated(self.forward) is None else _eager(self.forward)


def _eager(forward: Any) -> Any:
    if hasattr(forward, "__wrapped__"):
        forward = redecorated(forward, _eager(forward.__wrapped__))
    return _not_compiled(forward, recursive=False)


def model_overrides(base: type[nn.Module]) -> dict[str, Any]:
    """Return what a patched model does differently from ``base``."""
    names = list(inspect.signature(base.forward).parameters)
    labels_at = [(name, names.index(name) - 1 if name in names else None) for name in eligibility.LABELS]
    probed = _EagerForward(base)

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
        run = probed.eager if base.forward is probed.forward else base.forward
        running, completed = begin(self, args, kwargs), False
        try:
            outputs = run(self, *args, **kwargs)
            completed = True
        finally:
            end(running, completed)
        return outputs

    attributes = with_forward(base, forward, **{PROBED: probed})
    attributes["forward"] = _not_compiled(forward, recursive=False)
    del attributes["forward"].__wrapped__  # as in `with_forward`
    loss = getattr(base, "loss_function", None)
    if isinstance(loss, property) and loss.fget is not None:
        attributes["loss_function"] = property(_not_compiled(functools.partial(_loss_of, loss.fget)), loss.fset)
    return attributes


def _loss_of(stock: Callable[[Any], Any], model: Any) -> Any:
    """Return the model's loss function, and in its forward one that torch.compile leaves out."""
    return stock(model) if _awaiting.get() is None else _not_compiled(stock(model))


def _not_compiled(function: Callable[..., Any], *, recursive: bool = True) -> Any:
    """Return a function that torch.compile leaves out; if not ``recursive``, it compiles what the function calls."""
    return torch.compiler.disable(function, recursive=recursive, reason=_NOT_TRACED)  # type: ignore[no-untyped-call]


def _begin(model: nn.Module, awaited: bool) -> _Running:
    """Let the head return lazy logits until `_end`, where a loss is awaited or the model scores."""
    state: LossState = vars(model)[STATE]
    is_replica = getattr(model, "_is_replica", False)
    lazy = (awaited or state.scores) and not is_replica
    if lazy or (model.training and torch.is_grad_enabled()):
        adopt_head(model, state)
    if not lazy:
        return _Running(state, None, state.head_calls, is_replica)
    if state.why_not is not None:
        state.report.count_materialised(state.why_not)
    awaits = _Awaited(state, scores=not awaited) if state.why_not is None else None
    return _Running(state, _awaiting.set(awaits), state.head_calls, is_replica)


def _end(running: _Running, completed: bool) -> None:
    """Count a call that built the logits, or did not call the head; a training step without labels builds them."""
    state, token, head_calls, is_replica = running
    if token is not None:
        _awaiting.reset(token)
        if state.gathered is not None:  # there was no loss
            state.gathered.let_go()
            state.gathered = None
        if completed and state.why_not is None and state.head_calls == head_calls:
            state.report.count_materialised(NOT_CALLED)
    elif completed and state.head_calls != head_calls:
        # a replica returns outputs by C++, which cannot read lazy tensors
        state.count_built(*(_REPLICA if is_replica else (WITHOUT_LABELS, _GIVE_LABELS)))


def _head_overrides(base: type[nn.Linear]) -> dict[str, Any]:
    """Return what a patched output embedding does differently from ``base``."""

    def call(self: nn.Linear, *args: Any, **kwargs: Any) -> Any:
        # A tensor-parallel style converts inputs and outputs, but no lazy logits and no work.
        inside = len(args) > 0 and type(args[0]) is HeadWork
        awaited = _awaited_by(self)
        style = parallel_style.style_of(self) if inside or awaited is not None else None
        # of a compiled head the style's hooks are in its graph
        if style is None or self._compiled_call_impl is not None:
            return base.__call__(self, *args, **kwargs)
        with parallel_style.put_aside(self, style):
            return base.__call__(self, *args, **kwargs)

    def forward(self: nn.Linear, input: Any, *args: Any, **kwargs: Any) -> Any:
        awaited = _awaited_by(self)
        if type(input) is HeadWork:
            end_forward_alone(self)
            if awaited is not None and awaited.state.gathered is not None:
                awaited.state.gathered.release()
                awaited.state.gathered = None
            return input.work(self, functools.partial(parallel_style.run_stock, self, base.forward), *args)
        if awaited is None or parallel_style.is_stock_call(self):
            logits = base.forward(self, input, *args, **kwargs)
            if awaited is None and self.training and logits.requires_grad:
                owner = _owners.get(self, lambda: None)()
                if owner is not None and owner.head is self:
                    owner.head_calls += 1
            return logits
        state = awaited.state
        state.head_calls += 1
        call: HeadCall | str = ONE_TOKEN
        # of each sequence [..., T, D], as in generation
        if not (awaited.scores and isinstance(input, Tensor) and input.dim() > 1 and input.shape[-2] == 1):
            call = head_call(self, (input, *args), kwargs, state.report, state.options)
        if isinstance(call, str):
            state.report.count_materialised(call)
            return parallel_style.run_stock(self, base.forward, input, *args, **kwargs)
        if state.gathered is None:
            state.gathered = Kept(call.tensors) if call.partitioned else Gathered(self)
        call.scores = awaited.scores
        return LazyLogits.of(call)

    return {"__call__": _not_compiled(call), "forward": _not_compiled(forward)}
