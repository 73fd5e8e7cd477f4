"""`patch` and `unpatch`: a model's loss without its logits, and its MLPs, norms and rotary embeddings fused.

Every module that changes, the model and its output embedding among them, gets a class of its own: see `instance`.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from lowtide.arguments import check_flag
from lowtide.distributed.fsdp import Gathered, end_forward_alone
from lowtide.distributed.zero import Kept
from lowtide.errors import ArgumentTypeError, message
from lowtide.head.options import HeadOptions, check_options
from lowtide.models import eligibility, parallel_style
from lowtide.models.adapters import saved_layers, saved_module
from lowtide.models.head_call import HeadWork, running_forward
from lowtide.models.head_kinds import head_call, why_not_linear, with_what
from lowtide.models.instance import check_nothing_on_top, give_class, is_on_top, part_of, take_class_back, with_forward
from lowtide.models.lazy_logits import LazyLogits
from lowtide.models.parts import PARTS, fuse, patched_modules, restore
from lowtide.models.report import FUSED, NOT_CALLED, WITHOUT_LABELS, Counter, PatchReport
from lowtide.models.traced_calls import call_of_head, call_of_model

_STATE = "_lowtide_patch"
_LOSS = "loss"
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


class _PatchState(Counter):
    """The state of a patched model: one attribute of the instance."""

    def __init__(self, report: PatchReport, options: HeadOptions | None) -> None:
        super().__init__()
        self.report, self.options, self.warned = report, options, False
        self.head: nn.Module | None = None
        self.heads: list[nn.Module] = []  # it, and others of modules_to_save that have a class of ours
        self.head_calls = 0
        self.why_not: str | None = None
        self.gathered: Gathered | Kept | None = None  # between the head's lazy logits and the loss

    def adopt(self, model: nn.Module) -> None:
        """Give the output embedding that ``model`` has now lazy logits."""
        _adopt_head(model, self)

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
_owners: WeakKeyDictionary[nn.Module, ref[_PatchState]] = WeakKeyDictionary()

# The state of the model whose forward is running with labels; each thread sees its own.
_awaiting_loss: ContextVar[_PatchState | None] = ContextVar("lowtide_awaiting_loss", default=None)


def patch(
    model: nn.Module,
    *,
    loss: bool = True,
    mlp: bool = True,
    norm: bool = True,
    rope: bool = True,
    options: HeadOptions | None = None,
) -> PatchReport:
    """Make a Hugging Face model compute its loss without its logits, its MLPs, norms and rotations by fused operations.

    This instance alone is changed, and nothing about its weights, their names or what ``save_pretrained`` writes.

    The loss: called with ``labels``, ``shift_labels`` or ``num_items_in_batch``, the model's output embedding returns
    lazy logits, which record scales, soft caps, biases, slices and views. A cross entropy of rows and class indices,
    wherever it is computed, is then `lowtide.linear_cross_entropy` of the hidden states; gathered log-probabilities,
    logsumexp and argmax need no logits either. Anything else that reads the logits (``outputs.logits`` later, another
    loss, a metric) gets real ones, built on first use and counted in the report. The loss uses float32 logits, even if
    the model would have rounded its own to its dtype first. The output embedding is a ``torch.nn.Linear``, plain, with
    peft's LoRA or in its modules_to_save; others (other adapters, quantised weights) stay unmodified, and the report
    says why. A plain one may be sharded over ranks by classes, as PyTorch's ``ColwiseParallel`` or transformers'
    ``tp_plan`` does; then either all ranks read the logits or none does. ``torch.compile`` of the
    model has a graph without logits for the same losses.

    The other parts: lowtide runs each candidate module's own code on a few random rows beside its own operation. Where
    they disagree the module stays unmodified, with the reason in the report. In training and in evaluation a patched
    module computes the same as before to rounding, saves less for backward and takes less time on a GPU. A call with
    hooks on a projection, DTensors or ``torch.func``, or after a change of the module's code or settings, runs the
    stock code.

    Patching again applies the new arguments, ``options`` included, and returns the same report.

    Args:
        model: A model with ``get_output_embeddings`` and a forward that takes labels, as those of transformers; also
            one wrapped by peft. Not one wrapped by DDP, FSDP1 or ``torch.compile``: patch first, wrap then.
        loss: Whether to patch the loss.
        mlp: Whether gated MLPs (gate_proj, up_proj, down_proj, or gate_up_proj, down_proj; SiLU or tanh-GELU) run as
            `lowtide.swiglu_mlp`, also with LoRA; those of three projections also cut by columns and rows for tensor
            parallelism. They get an attribute ``checkpoint_level``, 0 at first, as `lowtide.swiglu_mlp` takes it.
        norm: Whether RMS norms run as `lowtide.layers.rms_norm`.
        rope: Whether attention that calls ``apply_rotary_pos_emb`` rotates by `lowtide.layers.rotary`.
        options: How `lowtide.linear_cross_entropy` is to run.

    Returns:
        A `PatchReport`: print it for a table. Its counts are live.

    Raises:
        ArgumentTypeError: ``model`` is no module with ``get_output_embeddings``, or ``options`` no HeadOptions.
        UnsupportedError: A part is to be undone, and something else changed a patched module's class since.

    Example:
        >>> model = AutoModelForCausalLM.from_pretrained("path/to/model")
        >>> report = lowtide.patch(model)
        >>> model(input_ids=ids, labels=ids).loss.backward()
        >>> print(report)
        >>> lowtide.unpatch(model)
    """
    target = _unwrapped(model)
    check_options(options)
    flags = {"loss": loss, "mlp": mlp, "norm": norm, "rope": rope}
    for name, flag in flags.items():
        check_flag(name, flag)
    state: _PatchState = vars(target).get(_STATE) or _PatchState(PatchReport(), options)
    state.options = options
    parallel_style.forget(target)
    if loss:
        _patch_loss(target, state, model)
    else:
        _unpatch_loss(target, state)
        state.report.add("loss", "-", "left as it is: loss=False", patched=False)
    for part in PARTS:
        if flags[part]:
            fuse(target, part, state.report)
        else:
            restore(target, part)
            state.report.add(part, "-", f"left as it is: {part}=False", patched=False)
    if part_of(target) is not None or any(row.patched for row in state.report.parts.values()):
        vars(target)[_STATE] = state
    else:
        vars(target).pop(_STATE, None)
    return state.report


def unpatch(model: nn.Module) -> None:
    """Undo `patch`: the model and its modules get back the classes and attributes they had.

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
    for part in PARTS:
        for module in patched_modules(target, part):
            check_nothing_on_top(module)
    _unpatch_loss(target, state)
    for part in PARTS:
        restore(target, part)
    del vars(target)[_STATE]


def _patch_loss(target: Any, state: _PatchState, outer: nn.Module) -> None:
    if part_of(target) is None:
        why_not = eligibility.why_not_patch_model(target, outer)
        if why_not is not None:
            state.report.add("loss", "-", f"left as it is: {why_not}", patched=False)
            return
        give_class(target, _LOSS, _model_overrides)
    if is_on_top(target):
        _adopt_head(target, state)  # it may have got adapters since, or lost them


def _unpatch_loss(target: Any, state: _PatchState) -> None:
    outer = target.get_output_embeddings()
    heads = {module: None for module in (*state.heads, outer, *saved_layers(outer)) if _is_free(module, state)}
    patched = [module for module in (target, *heads) if part_of(module) is not None]
    for module in patched:
        check_nothing_on_top(module)
    for module in patched:
        take_class_back(module)
    state.heads, state.head, state.why_not = [], None, None


def _is_free(head: nn.Module | None, state: _PatchState) -> bool:
    """Whether a head has a class of ours and no other patched model owns it."""
    owner = None if head is None or part_of(head) != _LOSS else _owners.get(head, lambda: None)
    return owner is not None and owner() in (None, state)


def _unwrapped(model: Any) -> Any:
    """Return the model inside peft's wrapper, which calls its forward; any other model itself."""
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


def _adopt_head(model: Any, state: _PatchState) -> None:
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
    state.heads = [module for module in saved if _is_free(module, state)]
    known = head in state.heads
    if not known and _is_free(head, state) and is_on_top(head):  # a copy whose wrapper was taken off
        take_class_back(head)
    state.head = None
    state.why_not = None if known else eligibility.why_not_patch_head(head, why_not_linear(head))
    name = "-" if head is None else next((name for name, child in model.named_modules() if child is head), "")
    if state.why_not is None:
        state.head = head
        if not known:
            state.heads.append(head)
            give_class(head, _LOSS, _head_overrides)
        _owners[head] = ref(state)
    outcome = f"{_FUSED}{with_what(head)}" if state.why_not is None else f"left as it is: {state.why_not}"
    state.report.add("loss", name, outcome, patched=state.why_not is None)


@contextmanager
def _loss_awaited(model: nn.Module) -> Iterator[None]:
    """Let the head return lazy logits inside, unless the report has a reason against it."""
    state: _PatchState = vars(model)[_STATE]
    _adopt_head(model, state)
    why_not = state.why_not
    if why_not is not None:
        state.report.count_materialised(why_not)
    token = _awaiting_loss.set(state if why_not is None else None)
    running = running_forward.set(object())
    calls = state.head_calls
    try:
        yield
    finally:
        _awaiting_loss.reset(token)
        running_forward.reset(running)
        if state.gathered is not None:  # there was no loss
            state.gathered.let_go()
            state.gathered = None
    if why_not is None and state.head_calls == calls:
        state.report.count_materialised(NOT_CALLED)


def _model_overrides(base: type[nn.Module]) -> dict[str, Any]:
    """Return what a patched model does differently from ``base``."""
    names = list(inspect.signature(base.forward).parameters)
    labels_at = [(name, names.index(name) - 1 if name in names else None) for name in eligibility.LABELS]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        awaited = any(
            kwargs.get(name) is not None or (at is not None and len(args) > at and args[at] is not None)
            for name, at in labels_at
        )
        if _STATE not in vars(self):  # an instance that somebody made from this class
            return base.forward(self, *args, **kwargs)
        if torch.compiler.is_dynamo_compiling() and not eligibility.is_exporting():
            state: _PatchState = vars(self)[_STATE]
            return call_of_model(self, state, lambda model: base.forward(model, *args, **kwargs), awaited=awaited)
        if eligibility.is_under_compile() or not awaited or getattr(self, "_is_replica", False):
            return _without_loss(self, functools.partial(base.forward, self), args, kwargs)
        with _loss_awaited(self):
            return base.forward(self, *args, **kwargs)

    return with_forward(base, forward)


def _without_loss(model: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return the stock ``forward``'s outputs; count a training step that builds logits, as each such step would."""
    if not model.training or not torch.is_grad_enabled() or eligibility.is_exporting():
        return forward(*args, **kwargs)
    state: _PatchState = vars(model)[_STATE]
    if not eligibility.is_under_compile():
        _adopt_head(model, state)
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
        call = head_call(self, (input, *args), kwargs, state.report, state.options)
        if isinstance(call, str):
            state.report.count_materialised(call)
            return parallel_style.run_stock(self, base.forward, input, *args, **kwargs)
        if state.gathered is None:
            state.gathered = Kept(call.tensors) if call.partitioned else Gathered(self)
        return LazyLogits.of(call)

    return {"__call__": call, "forward": forward}


def _awaited_by(head: nn.Module) -> _PatchState | None:
    """Return the state of the model that calls its own ``head`` and awaits a loss, None for any other call."""
    state = None if eligibility.is_under_compile() else _awaiting_loss.get()
    return state if state is not None and state.head is head else None
