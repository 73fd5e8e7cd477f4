"""One call of the output embedding, remembered: the logits it would have given can be built later, or never.

Legend: hidden [..., D], logits [..., V].
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowtide.arguments import is_autocast_on, is_dtensor, operand_dtype
from lowtide.distributed.fsdp import Gathered, gathered, unit_of, versions
from lowtide.distributed.zero import Kept, is_partitioned, keep_for_backward
from lowtide.errors import UnsupportedError
from lowtide.head.options import HeadOptions
from lowtide.models.eligibility import why_not_call
from lowtide.models.instance import part_of
from lowtide.models.report import PatchReport
from lowtide.models.steps import LogitArguments, Rows, Step, replay, rows_of

# The stock forward of a head, and work that needs it, done with the head and its input.
Forward = Callable[[Tensor], Tensor]
Work = Callable[[nn.Linear, Forward, Tensor], Any]


class LossState:
    """The state of a patched model: one attribute of the instance."""

    scoring = False  # calls without labels have lazy logits too

    def __init__(self, report: PatchReport, options: HeadOptions | None) -> None:
        self.report, self.options, self.warned = report, options, False
        self.head: nn.Module | None = None
        self.head_calls = 0
        self.why_not: str | None = None
        self.gathered: Gathered | Kept | None = None  # between the head's lazy logits and the loss

    def count_built(self, why: str, hint: str) -> None:
        """Count a call whose logits were built by a way of training that builds them at every step, and warn once."""
        if self.head is None:  # the report has the reason
            return
        self.report.count_materialised(why)
        if not self.warned:
            self.warned = True
            text = f"lowtide.patch: the logits are built at every step, because {why}. {hint}."
            warnings.warn(f"{text} (Warned of once for each model.)", stacklevel=2)


class Running(NamedTuple):
    """A forward of a patched model."""

    model: nn.Module
    state: LossState
    lazy: bool  # the head is to return lazy logits
    scores: bool  # without labels: rows may be read a few at a time
    head_calls: int  # of the state, before it


class HeadWork:
    """Work to be done inside the head module's forward, which a patched head runs when this is its input.

    Hooks that gather, move or free the weight (FSDP2, ZeRO-3, offloading) then run around the work, as around any other
    call. This is no pytree and holds no tensor that hooks could find. ZeRO-3 releases what it gathered for a backward
    when that reaches the module's inputs: there the hidden states are a second input.
    """

    def __init__(self, work: Callable[..., Any]) -> None:
        self.work = work


class HeadCall:
    """One call of the head: its input [..., D] and all that is needed to build the same logits later, or never.

    Made inside the head's forward. Elsewhere ZeRO-3 would gather the weight for each access.
    """

    only_loss = False  # cross entropy alone can be computed without logits
    sharded = False  # each rank has a shard of the classes

    def __init__(self, head: nn.Linear, hidden: Tensor, running: Running) -> None:
        self.head = head
        self.hidden = hidden
        self.model, self.scores = running.model, running.scores
        self.report, self.options = running.state.report, running.state.options
        self.fused = False
        self.built = False
        self.passed = False  # something with a graph was computed past the logits
        self.hooked = False  # a gradient hook is on logits that are built
        self.dtype = operand_dtype(hidden)  # of the logits
        self.classes, self.weight_dtype = head.weight.shape[0], head.weight.dtype
        tensors = self.tensors
        self.partitioned = any(map(is_partitioned, tensors))  # by ZeRO-3
        self._gathered_tensors = tensors if self.partitioned else None
        self._unit = unit_of(head, self.model)
        self._state = self._present_state()
        # What stock's graph has: flags that are set later count for the calls that follow.
        self._required = tuple(x is not None and x.requires_grad for x in tensors)
        self._inference = torch.is_inference_mode_enabled()
        kind = hidden.device.type
        self._autocast_dtype = torch.get_autocast_dtype(kind) if is_autocast_on(kind) else None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return what the logits are computed from, in the order in which `vjp` returns gradients."""
        return self.hidden, self.head.weight, self.head.bias

    @property
    def linked(self) -> tuple[Tensor | None, ...]:
        """Return `tensors` for autograd's graph; where ZeRO-3 shares them out, without asking a module, who gathers."""
        return self.tensors if self._gathered_tensors is None else self._gathered_tensors

    @property
    def resharded(self) -> bool:
        """Whether the root of FSDP2, in whose unit the head is, has let go of the weight since."""
        return self._unit is self.model and not self.sharded and is_dtensor(self.head.weight)

    def logits(self, steps: tuple[Step, ...], why: str, *, grad_mode: bool, inference: bool) -> Tensor:
        """Build the logits [..., V] after ``steps`` as the model would have: same operations, same modes and autocast.

        ``why`` is for the report; ``inference`` is whether the last step was done in inference mode.
        """
        if not self.built:
            self.built = True
            self.report.count_materialised(why)
        with self.modes(grad_mode=grad_mode and not self.resharded, inference=self._inference):
            logits = self._run(lambda _, forward, hidden: self._logits(forward, (hidden, *self.tensors[1:])))
            with torch.inference_mode(inference):
                return replay(logits, steps)

    def vjp(self, steps: tuple[Step, ...], grad_logits: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `tensors` for a gradient that reached the logits."""

        def work(_: nn.Linear, forward: Forward, __: Tensor) -> tuple[Tensor | None, ...]:
            # parameters as they are, for the head's own code reads them
            inputs = tuple(
                x if x is None or isinstance(x, nn.Parameter) else x.detach().requires_grad_(x.requires_grad)
                for x in self.tensors
            )
            trained = [x for x in inputs if x is not None and x.requires_grad]
            logits = replay(self._logits(forward, inputs), steps)
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

        ``per_row`` is whether that is a value of each. It is called with (hidden, weight), ``linear_bias``,
        ``logit_scale``, ``softcap``, ``options`` and the keyword arguments of `operands`.
        """

        def work(_: nn.Linear, __: Forward, hidden: Tensor) -> Any:
            assert rows is not None
            options = self.options
            if options is not None and per_row:  # only a loss that is one number can have its gradients in forward
                options = replace(options, gradient="auto")
            hidden, weight, bias, more = self.operands(hidden, rows)
            for offset in folded.offsets:
                bias = offset if bias is None else bias + offset
            cap_and_scale = {"softcap": folded.softcap, "logit_scale": folded.logit_scale}
            result = function(hidden, weight, linear_bias=bias, options=options, **cap_and_scale, **more)
            # FSDP2 puts a hook on what its modules return, and warns of views: changes in place would go past it.
            return result.clone() if result._is_view() else result

        resharded = self.resharded
        with self._autocast():
            result = self._run(work)
        if resharded and result.requires_grad:
            raise _changed(_RESHARDED)
        self.passed |= result.requires_grad
        if not self.fused:
            self.fused = True
            self.report.calls_fused += 1
        return result

    def operands(self, hidden: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
        """Return what a function of the logits takes: hidden states, weight, bias and further keyword arguments.

        ``hidden`` is the input that the work is given; ``rows`` are those of it whose logits are asked for.
        """
        return rows_of(hidden, rows), self.head.weight, self.head.bias, {}

    def _logits(self, forward: Forward, tensors: tuple[Tensor | None, ...]) -> Tensor:
        """Return the logits from `tensors`, or from others in their place."""
        hidden = tensors[0]
        assert hidden is not None
        return forward(hidden)

    def why_not_again(self) -> str | None:
        """Return why the head may do more now than it did then."""
        return why_not_call(self.head)

    def _run(self, work: Work, *, link: bool = True) -> Any:
        """Do ``work`` inside the head's forward, if nothing has changed since the call: asked here alone."""

        def checked(head: nn.Linear, forward: Forward, hidden: Tensor = self.hidden) -> Any:
            # accelerate's offloading gives the head new Parameters, of the same values, at each call.
            if self._present_state() != self._state and not hasattr(head, "_hf_hook"):
                raise _changed(_VALUES)
            with self.as_in_forward():
                return work(head, forward, hidden)

        why_not = self.why_not_again()
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
