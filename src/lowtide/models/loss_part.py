"""The part ``loss`` of `lowtide.patch`: what a patched model and its output embedding do differently.

`adopt_head` gives the output embedding a class of its own, `model_overrides` and `_head_overrides` have what the two
classes change, and `LossState` is the patched model's state.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from lowtide.distributed.fsdp import Gathered, end_forward_alone
from lowtide.distributed.zero import Kept
from lowtide.head.options import HeadOptions
from lowtide.models import eligibility, parallel_style
from lowtide.models.adapters import saved_layers, saved_module
from lowtide.models.head_call import HeadCall, HeadWork
from lowtide.models.head_kinds import head_call, why_not_linear, with_what
from lowtide.models.instance import give_class, is_on_top, part_of, take_class_back, with_forward
from lowtide.models.lazy_logits import LazyLogits
from lowtide.models.report import FUSED, NOT_CALLED, ONE_TOKEN, WITHOUT_LABELS, Counter, PatchReport
from lowtide.models.traced_calls import call_of_head, call_of_model, is_one_token

STATE = "_lowtide_patch"
LOSS = "loss"
_FUSED = "the loss that follows is computed without logits; they are built where anything else reads them"

# Why logits are built at every step of a training run, and what to do.
_COMPILED = (
    "torch.compile left the model's own forward to Python, between graphs",
    "Compile its layers instead: for layer in model.model.layers: layer.compile()",
)
_REPLICA = ("torch.nn.DataParallel called a replica of the model", "Use DistributedDataParallel")
_GIVE_LABELS = (
    "Give it the labels too, or num_items_in_batch if you compute the loss from outputs.logits yourself; for TRL's "
    "trainers call lowtide.patch_trl()"
)


class LossState(Counter):
    """The state of a patched model: one attribute of the instance."""

    scoring = False  # as `patch` was given it
    scoring_blocks = 0  # of `scoring`, that are open
    scores = False  # calls without labels have lazy logits too; torch.compile would recompile for each number of blocks

    def __init__(self, report: PatchReport, options: HeadOptions | None) -> None:
        super().__init__()
        self.report, self.options, self.warned = report, options, False
        self.head: nn.Module | None = None
        self.heads: list[nn.Module] = []  # it, and others of modules_to_save that have a class of ours
        self.head_calls = 0
        self.why_not: str | None = None
        self.gathered: Gathered | Kept | None = None  # between the head's lazy logits and the loss

    def set_scoring(self, *, patched: bool, blocks: int) -> None:
        """Set what `patch` was given as ``scoring`` and how many blocks of `scoring` are open."""
        self.scoring, self.scoring_blocks = patched, blocks
        self.scores = patched or blocks > 0

    def adopt(self, model: nn.Module) -> None:
        """Give the output embedding that ``model`` has now lazy logits."""
        adopt_head(model, self)

    def count_traced(self, why: str) -> None:
        """Count a call in a compiled graph, by the reason for building its logits."""
        if why == FUSED:
            self.report.count_fused()
        elif why == WITHOUT_LABELS:
            self.count_built(WITHOUT_LABELS, _GIVE_LABELS)
        else:
            self.report.count_materialised(why)

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


@contextmanager
def _logits_awaited(model: nn.Module, *, scores: bool) -> Iterator[None]:
    """Let the head return lazy logits inside, unless the report has a reason against it; ``scores``: without labels."""
    state: LossState = vars(model)[STATE]
    adopt_head(model, state)
    why_not = state.why_not
    if why_not is not None:
        state.report.count_materialised(why_not)
    token = _awaiting.set(_Awaited(state, scores) if why_not is None else None)
    calls = state.head_calls
    try:
        yield
    finally:
        _awaiting.reset(token)
        if state.gathered is not None:  # there was no loss
            state.gathered.let_go()
            state.gathered = None
    if why_not is None and state.head_calls == calls:
        state.report.count_materialised(NOT_CALLED)


def model_overrides(base: type[nn.Module]) -> dict[str, Any]:
    """Return what a patched model does differently from ``base``."""
    names = list(inspect.signature(base.forward).parameters)
    labels_at = [(name, names.index(name) - 1 if name in names else None) for name in eligibility.LABELS]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        awaited = any(
            kwargs.get(name) is not None or (at is not None and len(args) > at and args[at] is not None)
            for name, at in labels_at
        )
        if STATE not in vars(self):  # an instance that somebody made from this class
            return base.forward(self, *args, **kwargs)
        if torch.compiler.is_dynamo_compiling() and not eligibility.is_exporting():
            state: LossState = vars(self)[STATE]
            return call_of_model(
                self,
                state,
                lambda model: base.forward(model, *args, **kwargs),
                awaited=awaited or state.scores,
                scores=not awaited and state.scores,
            )
        lazy = awaited or vars(self)[STATE].scores
        if eligibility.is_under_compile() or not lazy or getattr(self, "_is_replica", False):
            return _without_loss(self, functools.partial(base.forward, self), args, kwargs)
        with _logits_awaited(self, scores=not awaited):
            return base.forward(self, *args, **kwargs)

    return with_forward(base, forward)


def _without_loss(model: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return the stock ``forward``'s outputs; count a training step that builds logits, as each such step would."""
    if not model.training or not torch.is_grad_enabled() or eligibility.is_exporting():
        return forward(*args, **kwargs)
    state: LossState = vars(model)[STATE]
    if not eligibility.is_under_compile():
        adopt_head(model, state)
    calls = state.head_calls
    outputs = forward(*args, **kwargs)
    if eligibility.is_under_compile():  # between two graphs, where the head is in one
        state.count_built(*_COMPILED)
    elif getattr(model, "_is_replica", False):  # it returns outputs by C++, which cannot read lazy tensors
        state.count_built(*_REPLICA)
    elif state.head_calls != calls:
        state.count_built(WITHOUT_LABELS, _GIVE_LABELS)
    return outputs


def _head_overrides(base: type[nn.Linear]) -> dict[str, Any]:
    """Return what a patched output embedding does differently from ``base``."""

    def call(self: nn.Linear, *args: Any, **kwargs: Any) -> Any:
        # A tensor-parallel style converts inputs and outputs, but no lazy logits and no work.
        inside = len(args) > 0 and type(args[0]) is HeadWork
        state = _awaited_by(self)
        style = parallel_style.style_of(self) if inside or state is not None else None
        if style is None or parallel_style.is_stock_call(self) or self._compiled_call_impl is not None:
            return base.__call__(self, *args, **kwargs)
        if state is not None and not inside:
            why_not = eligibility.why_not_call(self)
            if isinstance(style, parallel_style.Style):
                why_not = parallel_style.why_not_agreed(self, style.mesh, self.weight.device, why_not)
            if why_not is not None:
                state.head_calls += 1
                state.report.count_materialised(why_not)
                with parallel_style.stock_call(self):
                    return base.__call__(self, *args, **kwargs)
        assert isinstance(style, parallel_style.Style)
        with parallel_style.put_aside(self, style):
            return base.__call__(self, *args, **kwargs)

    def forward(self: nn.Linear, input: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return call_of_head(self, functools.partial(base.forward, self), (input, *args), kwargs)
        if type(input) is HeadWork:
            end_forward_alone(self)
            state = _awaited_by(self)
            if state is not None and state.gathered is not None:
                state.gathered.release()
                state.gathered = None
            return input.work(self, functools.partial(parallel_style.run_stock, self, base.forward), *args)
        state = _awaited_by(self)
        if state is None and self.training and torch.is_grad_enabled() and not eligibility.is_under_compile():
            logits = base.forward(self, input, *args, **kwargs)
            owner = _owners.get(self, lambda: None)()
            if owner is not None and owner.head is self and logits.requires_grad:
                owner.head_calls += 1
            return logits
        if state is None or parallel_style.is_stock_call(self):
            return base.forward(self, input, *args, **kwargs)
        state.head_calls += 1
        scores = _scores()
        call: HeadCall | str = ONE_TOKEN
        if not (scores and is_one_token(input)):
            call = head_call(self, (input, *args), kwargs, state.report, state.options)
        if isinstance(call, str):
            state.report.count_materialised(call)
            return parallel_style.run_stock(self, base.forward, input, *args, **kwargs)
        if state.gathered is None:
            state.gathered = Kept(call.tensors) if call.partitioned else Gathered(self)
        call.scores = scores
        return LazyLogits.of(call)

    return {"__call__": call, "forward": forward}


def _awaited_by(head: nn.Module) -> LossState | None:
    """Return the state of the model that calls its own ``head`` for lazy logits, None for any other call."""
    awaited = None if eligibility.is_under_compile() else _awaiting.get()
    return awaited.state if awaited is not None and awaited.state.head is head else None


def _scores() -> bool:
    """Whether the forward that is running has no labels."""
    awaited = _awaiting.get()
    return awaited is not None and awaited.scores
