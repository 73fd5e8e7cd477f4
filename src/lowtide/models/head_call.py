"""One call of the output embedding, remembered: the logits it would have given can be built later, or never.

What is done to them after it are steps: the rows that were taken, and the operations on their values.

Legend: hidden [..., D], logits [..., V].
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from lowtide.arguments import is_autocast_on, is_dtensor, operand_dtype
from lowtide.distributed.fsdp import Gathered, gathered, unit_of, versions
from lowtide.distributed.zero import Kept, is_partitioned, keep_for_backward
from lowtide.errors import UnsupportedError
from lowtide.head.options import HeadOptions
from lowtide.models.adapters import is_lora, why_not_plain
from lowtide.models.eligibility import REPLACED, why_not_call
from lowtide.models.instance import part_of
from lowtide.models.report import PatchReport

# The stock forward of a head.
Forward = Callable[[Tensor], Tensor]
# The class of tensors' methods as PyTorch has them, whatever is assigned to torch.Tensor.
TensorBase: Any = Tensor.__base__


@dataclass(frozen=True)
class Step:
    """An operation on the logits that can be done again.

    Args:
        run: The operation.
        kind: What it does to values: nothing ("rows", "detach"), "cast", "scale", "tanh", "bias" or "log_softmax".
        by: The factor of a scale, or the vector [V] of a bias.
    """

    run: Callable[[Tensor], Tensor]
    kind: str = "rows"
    by: Any = None


def replay(logits: Tensor, steps: Iterable[Step]) -> Tensor:
    """Return ``logits`` after the steps."""
    for step in steps:
        logits = step.run(logits)
    return logits


class RowView(NamedTuple):
    """A view of the rows of a tensor, its strides and offset counted in rows: the same of logits and hidden states."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, view: Tensor, V: int) -> Self | None:
        """Return what ``view``, of the memory of logits [..., V], has of its rows; None if it has no whole rows."""
        if not view.dim() or view.shape[-1] != V or view.stride(-1) != 1:
            return None
        *strides, offset = (*view.stride()[:-1], view.storage_offset())
        if any(number % V for number in (*strides, offset)):
            return None
        return cls(tuple(view.shape[:-1]), tuple(stride // V for stride in strides), offset // V)

    def is_all(self, rows: int) -> bool:
        """Whether these are all the rows, in their order."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return self.offset == 0 and expected == rows


# Rows, one after another: a view, or the numbers of those that a mask has chosen.
Rows = tuple[RowView | Tensor, ...]


def rows_of(tensor: Tensor, rows: Rows) -> Tensor:
    """Return ``rows`` of a tensor [..., *]."""
    for selection in rows:
        width = tensor.shape[-1]
        if isinstance(selection, Tensor):
            tensor = tensor.flatten(0, -2)[selection]
        elif selection.is_all(tensor.shape[:-1].numel()):
            tensor = tensor.reshape(*selection.shape, width)
        else:
            whole = tensor.contiguous()
            strides = (*(stride * width for stride in selection.strides), 1)
            offset = whole.storage_offset() + selection.offset * width
            tensor = whole.as_strided((*selection.shape, width), strides, offset)
    return tensor


@dataclass(frozen=True)
class LogitArguments:
    """Steps as arguments of `linear_cross_entropy` and the other functions of the head."""

    logit_scale: float = 1.0  # applied after `offsets`
    softcap: float | None = None
    offsets: tuple[Tensor, ...] = ()  # vectors [V] that are added like a bias
    normalised: bool = False  # the steps end in a log-softmax
    sign: int = 1  # the factor of that log-softmax, 1 or -1


def fold(steps: Iterable[Step]) -> LogitArguments | None:
    """Return steps as arguments of lowtide's functions, None where they are not of that form.

    Any ``tanh(z * a) * c`` is a cap at c of ``z * (a * c)``. Changes of dtype and shape are left out.
    """
    scale, sign, normalised = 1.0, 1, False
    cap: float | None = None
    offsets: list[Tensor] = []
    for step in steps:
        kind, by = step.kind, step.by
        if kind in ("rows", "detach", "cast"):
            continue
        if normalised and kind == "scale" and by == -1:
            sign = -sign
        elif normalised:
            return None
        elif kind == "log_softmax":
            normalised = True
        elif kind == "bias" and scale == 1 and cap is None:
            offsets.append(by)
        elif kind == "tanh" and cap is None:
            cap = 1.0
        elif kind != "scale":
            return None
        elif cap is None:
            scale *= by
        else:
            cap *= by
    if cap is not None:
        scale, cap = scale * cap, abs(cap)  # tanh is odd
    if any(number == 0 or not math.isfinite(number) for number in (scale, 1 if cap is None else cap)):
        return None
    return LogitArguments(scale, cap, tuple(offsets), normalised, sign)


@dataclass
class LossState:
    """The state of a patched model: one attribute of the instance."""

    report: PatchReport
    options: HeadOptions | None
    scoring: bool = False  # calls without labels have lazy logits too
    warned: bool = False
    head: nn.Module | None = None
    why_not: str | None = None
    gathered: Gathered | Kept | None = None  # between the head's lazy logits and the loss

    def count_built(self, why: str, hint: str) -> None:
        """Count a call whose logits were built by a way of training that builds them at every step, and warn once."""
        if self.head is None:  # the report has the reason
            return
        self.report.count_materialised(why)
        if not self.warned:
            self.warned = True
            text = f"lowtide.patch: the logits are built at every step, because {why}. {hint}."
            warnings.warn(f"{text} (Warned of once for each model.)", stacklevel=2)


@dataclass
class ModelCall:
    """A forward of a patched model."""

    model: nn.Module
    state: LossState
    lazy: bool  # the head is to return lazy logits
    scores: bool  # without labels
    called: bool = False  # the head


class HeadWork:
    """Work to be done inside the head module's forward, which a patched head runs when this is its input.

    Hooks that gather, move or free the weight (FSDP2, ZeRO-3) then run around the work, as around any other call. This
    is no pytree and holds no tensor that hooks could find. ZeRO-3 releases what it gathered for a backward when that
    reaches the module's inputs: there the hidden states are a second input.
    """

    def __init__(self, work: Callable[..., Any]) -> None:
        self.work = work


def why_not_patch_head(model: nn.Module, head: nn.Module | None) -> str | None:
    """Return why ``head``, what a model's output embedding is or calls, cannot return lazy logits."""
    if head is None:
        heads = {name: getattr(m, "get_output_embeddings", lambda: None)() for name, m in model.named_modules()}
        inner = next((name for name, head in heads.items() if head is not None), None)
        hint = "" if inner is None else f"; its {inner} has one: pass that to patch, with scoring=True"
        return f"the model has no output embedding{hint}"
    if "forward" in vars(head):
        return REPLACED
    why_not = why_not_plain(head)
    if why_not is None:
        return None
    hint = " (list it in llm_int8_skip_modules to train without logits)" * type(head).__module__.startswith(
        "bitsandbytes."
    )
    if is_lora(head):
        hint = " (list it in modules_to_save, not in target_modules, to train without logits)"
    return f"the output embedding {why_not}{hint}"


class HeadCall:
    """One call of the head: its input [..., D] and all that is needed to build the same logits later, or never.

    Made inside the head's forward. Elsewhere ZeRO-3 would gather the weight for each access.
    """

    fused = built = False
    passed = False  # something with a graph was computed past the logits
    hooked = False  # a gradient hook is on logits that are built

    def __init__(self, head: nn.Linear, hidden: Tensor, running: ModelCall) -> None:
        self.head, self.hidden = head, hidden
        self.model, self.report, self.options = running.model, running.state.report, running.state.options
        self.dtype = operand_dtype(hidden)  # of the logits
        self.linked = self.tensors  # in autograd's graph
        self.partitioned = any(map(is_partitioned, self.linked))  # by ZeRO-3
        self._unit = unit_of(head, self.model)
        self._state = self._present_state()
        # What stock's graph has: flags that are set later count for the calls that follow.
        self._required = tuple(x is not None and x.requires_grad for x in self.linked)
        kind = hidden.device.type
        self._autocast_dtype = torch.get_autocast_dtype(kind) if is_autocast_on(kind) else None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return what the logits are computed from, in the order in which `vjp` returns gradients."""
        return self.hidden, self.head.weight, self.head.bias

    @property
    def resharded(self) -> bool:
        """Whether the root of FSDP2, in whose unit the head is, has let go of the weight since."""
        return self._unit is self.model and is_dtensor(self.head.weight)

    def logits(self, steps: tuple[Step, ...], why: str, *, grad_mode: bool, inference: bool) -> Tensor:
        """Build the logits [..., V] after ``steps`` as the model would have: same operations, same modes and autocast.

        ``why`` is for the report; ``inference`` is whether the last step was done in inference mode.
        """
        if not self.built:
            self.built = True
            self.report.count_materialised(why)
        with self.modes(grad_mode=grad_mode and not self.resharded, inference=inference):
            return replay(self._run(lambda forward, hidden: forward(hidden)), steps)

    def vjp(self, steps: tuple[Step, ...], grad_logits: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `tensors` for a gradient that reached the logits."""

        def work(forward: Forward, _: Tensor) -> tuple[Tensor | None, ...]:
            # parameters as they are, for the head's own code reads them
            inputs: list[Any] = [
                x if x is None or isinstance(x, nn.Parameter) else x.detach().requires_grad_(x.requires_grad)
                for x in self.tensors
            ]
            trained = [x for x in inputs if x is not None and x.requires_grad]
            logits = replay(forward(inputs[0]), steps)
            gradients = iter(torch.autograd.grad(logits, trained, grad_logits) if trained else ())
            return tuple(next(gradients) if x is not None and x.requires_grad else None for x in inputs)

        if self.resharded:
            raise _changed(_RESHARDED)
        if any(isinstance(x, nn.Parameter) and x._backward_hooks for x in self.tensors):
            raise UnsupportedError(
                "logits: expected operations of PyTorch, for the output embedding's weight has a gradient hook, got a "
                "custom autograd function, behind which that hook would run twice. Call lowtide.unpatch(model)."
            )
        with self.modes(grad_mode=True, inference=False):
            if self.partitioned:
                keep_for_backward(self.linked)
            return self._run(work, link=False)  # type: ignore[no-any-return]  # gradients are what it gives

    def without_logits(
        self, rows: Rows | None, folded: LogitArguments, function: Callable[..., Any], *, per_row: bool = True
    ) -> Any:
        """Return what ``function`` computes of these rows of the logits, after the steps that `fold` gave ``folded``.

        That is one tensor; ``per_row`` is whether it has a value of each row. ``folded`` is empty where the function
        takes the steps itself. It is called with (hidden, weight), ``linear_bias``, ``logit_scale``, ``softcap`` and
        ``options``.
        """
        assert rows is not None

        def work(_: Forward, hidden: Tensor) -> Any:
            options = self.options
            if options is not None and per_row:  # only a loss that is one number can have its gradients in forward
                options = replace(options, gradient="auto")
            bias: Tensor | None = self.head.bias
            for offset in folded.offsets:
                bias = offset if bias is None else bias + offset
            settings: dict[str, Any] = {"softcap": folded.softcap, "logit_scale": folded.logit_scale}
            result = function(rows_of(hidden, rows), self.head.weight, linear_bias=bias, options=options, **settings)
            # FSDP2 puts a hook on what its modules return, and warns of views: changes in place would go past it.
            return result.clone() if result._is_view() else result

        with self._autocast():
            result = self._run(work)
        if self.resharded and result.requires_grad:
            raise _changed(_RESHARDED)
        self.passed |= result.requires_grad
        if not self.fused:
            self.fused = True
            self.report.calls_fused += 1
        return result

    def _run(self, work: Callable[[Forward, Tensor], Any], *, link: bool = True) -> Any:
        """Do ``work`` inside the head's forward, if nothing has changed since the call: asked here alone."""

        def checked(forward: Forward, hidden: Tensor = self.hidden) -> Any:
            if self._present_state() != self._state:
                raise _changed(_VALUES)
            with self.as_in_forward():
                return work(forward, hidden)

        why_not = why_not_call(self.head)
        if part_of(self.head) is None:
            unpatched = part_of(self.model) is None
            why_not = "the model was unpatched" if unpatched else "the output embedding got adapters"
        if why_not is not None:
            raise _changed(why_not)
        with gathered(self.model) if self.resharded else nullcontext():
            return self.head(HeadWork(checked), *([self.hidden] if self.partitioned and link else []))

    def _present_state(self) -> tuple[Any, ...]:
        """Return what differs after a change: identity, form, graph and version counters of tensors."""
        # The Parameters live as long as the head does, so an id is enough to tell them apart.
        return versions(self._unit), *(
            None
            if x is None
            else (id(x), x.shape, x.dtype, x.device, x.is_leaf, None if x.is_inference() else x._version)
            for x in self.tensors
        )

    @contextmanager
    def as_in_forward(self) -> Iterator[None]:
        """Give what the logits are computed from the ``requires_grad`` that it had in the forward pass.

        A node of the graph that is made inside then accumulates gradients for the same tensors as the stock model's.
        """
        pairs = zip(self.linked, self._required, strict=True)
        changed = [(x, required) for x, required in pairs if x is not None and x.requires_grad != required]
        for x, required in changed:
            x.requires_grad_(required)
        try:
            yield
        finally:
            for x, required in changed:
                x.requires_grad_(not required)

    @contextmanager
    def modes(self, *, grad_mode: bool, inference: bool) -> Iterator[None]:
        """Enter these modes, and the autocast of the call."""
        with torch.inference_mode(inference), torch.set_grad_enabled(grad_mode), self._autocast():
            yield

    def _autocast(self) -> AbstractContextManager[object]:
        kind = self.hidden.device.type
        if self._autocast_dtype is not None:
            return torch.autocast(kind, dtype=self._autocast_dtype)
        return torch.autocast(kind, enabled=False) if is_autocast_on(kind) else nullcontext()


_VALUES = (
    "hidden states or weights (by an optimizer step, a load, an average put in, a unit of FSDP2 that let go of them)"
)
_RESHARDED = "FSDP2 has resharded the weight, so that what is computed of it now has no gradient (use torch.no_grad())"


def _changed(what: str) -> UnsupportedError:
    return UnsupportedError(
        "logits: expected the hidden states and the output embedding as the forward pass left them, got a change "
        f"since: {what}. The logits were not kept: read outputs.logits before that, or call the model again."
    )
