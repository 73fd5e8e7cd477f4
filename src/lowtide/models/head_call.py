"""One call of the output embedding, remembered: the logits it would have given can be built later, or never.

Legend: hidden [..., D], logits [..., V].
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import TensorBase

from lowtide.distributed.zero import is_partitioned, keep_for_backward
from lowtide.errors import UnsupportedError
from lowtide.head.arguments import is_dtensor
from lowtide.head.options import HeadOptions
from lowtide.memory.versions import steps_taken
from lowtide.models.eligibility import is_autocast_on, why_not_call
from lowtide.models.instance import part_of
from lowtide.models.report import PatchReport


@dataclass(frozen=True)
class Step:
    """Something that was done to the logits since the head, to be done again as it was: ``function(logits, *args)``.

    Args:
        function: What was done.
        args: Its arguments after the logits.
        of_hidden: Where it rearranged or chose rows and left the V columns as they were: what does the same to hidden
            states. None for what works on each logit by itself.
        keeps_rows: Whether the rows are the same ones in the same order, whatever shape they stand in.
    """

    function: Callable[..., Tensor]
    args: tuple[Any, ...] = ()
    of_hidden: Callable[[Tensor], Tensor] | None = None
    keeps_rows: bool = False


@dataclass(frozen=True)
class Folded:
    """Steps as the arguments of lowtide's functions.

    Args:
        logit_scale: As theirs, applied after ``offsets``.
        softcap: As theirs.
        offsets: Vectors [V] that count as bias.
        normalised: Whether the log-softmax was taken at the end.
        sign: What that was multiplied by, 1 or -1.
    """

    logit_scale: float | Tensor
    softcap: float | None
    offsets: tuple[Tensor, ...]
    normalised: bool
    sign: int


_KEEPS_VALUES = (
    TensorBase.to,
    TensorBase.contiguous,
    TensorBase.clone,
    TensorBase.detach,
)  # detach: what follows has no graph

# The stock forward of a head, and work that needs it, done with the head and its input.
Forward = Callable[[Tensor], Tensor]
Work = Callable[[nn.Linear, Forward, Tensor], Any]


class InsideHead:
    """Work to be done inside the head module's forward.

    Called with it as the input, the patched head runs it there, so that whatever hooks gather, move or free the weight
    (FSDP2, ZeRO-3, offloading) do so around it, as around any other call. It is no pytree and holds no tensor that
    hooks could find. What ZeRO-3 gathers for a backward it lets go of when that reaches the module's inputs: there the
    hidden states are a second input.
    """

    def __init__(self, work: Callable[..., Any]) -> None:
        self.work = work


class HeadCall:
    """One call of the head: its input and all that is needed to build the same logits later, or never.

    Args:
        head: The patched output embedding.
        hidden: Its input [..., D].
        report: Where to count what becomes of the logits.
        options: For `linear_cross_entropy`.

    Made inside the head's forward. Elsewhere ZeRO-3 would gather the weight for whoever asks the head for it.
    """

    def __init__(self, head: nn.Linear, hidden: Tensor, report: PatchReport, options: HeadOptions | None) -> None:
        self.head = head
        self.hidden = hidden
        self.report = report
        self.options = options
        self.fused = False
        self.built = False
        self.passed = False  # something with a graph was computed past the logits
        self.hooked = False  # a gradient hook is on logits that are built
        self.weight_dtype = head.weight.dtype
        self.partitioned = any(map(is_partitioned, self.tensors))  # by ZeRO-3
        self._found = self.tensors if self.partitioned else None
        self._state = _state(self.tensors)
        self._steps_taken = steps_taken()
        self._sample = _sample(self.tensors)
        self._inference = torch.is_inference_mode_enabled()
        self._autocast_dtype: torch.dtype | None = None
        device_type = hidden.device.type
        if is_autocast_on(device_type):
            self._autocast_dtype = torch.get_autocast_dtype(device_type)

    @property
    def adapted(self) -> bool:
        """Whether there is more to the logits than a linear layer."""
        return False

    @property
    def only_loss(self) -> bool:
        """Whether the cross entropy alone can do without logits."""
        return self.adapted

    @property
    def in_parts(self) -> bool:
        """Whether each rank has a part of the classes."""
        return False

    @property
    def gives_dtensor(self) -> bool:
        """Whether the logits are a DTensor."""
        return False

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return what the logits are computed from, in the order in which `vjp` returns gradients."""
        return self.hidden, self.head.weight, self.head.bias

    @property
    def linked(self) -> tuple[Tensor | None, ...]:
        """Return `tensors` for autograd's graph; where ZeRO-3 shares them out, without asking a module, who gathers."""
        return self.tensors if self._found is None else self._found

    def dtype(self) -> torch.dtype:
        """Return the dtype that the head gives its logits."""
        if self._autocast_dtype is None or self.hidden.dtype == torch.float64:  # autocast leaves float64 alone
            return self.hidden.dtype
        return self._autocast_dtype

    def logits(self, steps: tuple[Step, ...], why: str, *, grad_mode: bool) -> Tensor:
        """Build the logits [..., V], as the model would have: same operations, same autocast."""

        def work(_: nn.Linear, forward: Forward, hidden: Tensor) -> Tensor:
            return self._logits(forward, (hidden, *self.tensors[1:]))

        if not self.built:
            self.built = True
            self.report.count_materialised(why)
        with ExitStack() as modes:
            self._enter_modes(modes, grad_mode=grad_mode)
            return replay(self._run(work, later=True), steps)

    def view(self, base: Tensor, step: Step, *, grad_mode: bool) -> Tensor:
        """Return a view of real logits, as the model would have taken it."""
        with ExitStack() as modes:
            self._enter_modes(modes, grad_mode=grad_mode)
            return replay(base, (step,))

    def vjp(self, steps: tuple[Step, ...], grad_logits: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `tensors` for a gradient that reached the logits."""

        def work(_: nn.Linear, forward: Forward, __: Tensor) -> tuple[Tensor | None, ...]:
            # parameters as they are, for the head's own code reads them
            inputs = tuple(
                x if x is None or isinstance(x, nn.Parameter) else x.detach().requires_grad_(x.requires_grad)
                for x in self.tensors
            )
            logits = replay(self._logits(forward, inputs), steps)
            wanted = [x for x in inputs if x is not None and x.requires_grad]
            found = iter(torch.autograd.grad(logits, wanted, grad_logits))
            return tuple(next(found) if x is not None and x.requires_grad else None for x in inputs)

        if any(isinstance(x, nn.Parameter) and x._backward_hooks for x in self.tensors):
            raise UnsupportedError(
                "logits: expected operations of PyTorch, for the output embedding's weight has a gradient hook, got a "
                "custom autograd function, behind which that hook would run twice. Call lowtide.unpatch(model)."
            )
        with ExitStack() as modes:
            modes.enter_context(torch.inference_mode(False))
            modes.enter_context(torch.enable_grad())
            self._enter_autocast(modes)
            if self.partitioned:
                keep_for_backward(self.linked)
            return self._run(work, later=True, link=False)  # type: ignore[no-any-return]  # gradients are what it gives

    def operands(
        self, head: nn.Linear, hidden: Tensor, steps: tuple[Step, ...]
    ) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
        """Return what a function of the logits takes: hidden states, weight, bias, and what else it needs, by name.

        Args:
            head: The output embedding, inside its forward.
            hidden: Its input, as the work is given it.
            steps: Those that rearranged or chose rows.
        """
        return rows_of(hidden, steps), head.weight, head.bias, {}

    def of_classes(self, vector: Tensor, weight: Tensor) -> Tensor:  # noqa: ARG002
        """Return of a vector [V] what goes with ``weight``, one of `operands`."""
        return vector

    def as_given(self, result: Tensor) -> Tensor:
        """Return a result as the kind of tensor that the logits would have made it."""
        return result

    def _logits(self, forward: Forward, tensors: tuple[Tensor | None, ...]) -> Tensor:
        """Return the logits from `tensors`, or from others in their place."""
        hidden = tensors[0]
        assert hidden is not None
        return forward(hidden)

    def without_logits(self, steps: tuple[Step, ...], folded: Folded, function: Callable[..., Tensor]) -> Any:
        """Return what ``function`` makes of the logits after ``steps``, without building them.

        Args:
            steps: What was done to the logits.
            folded: The same as `fold` returns it.
            function: Called with (hidden, weight) and ``linear_bias``, ``logit_scale``, ``softcap``, ``options`` and
                what else `operands` returns.
        """

        def work(head: nn.Linear, _: Forward, hidden: Tensor) -> Any:
            rows = tuple(step for step in steps if step.of_hidden is not None)
            hidden, weight, bias, more = self.operands(head, hidden, rows)
            for offset in folded.offsets:
                part = self.of_classes(offset, weight)
                bias = part if bias is None else bias + part
            result = function(
                hidden,
                weight,
                linear_bias=bias,
                softcap=folded.softcap,
                logit_scale=folded.logit_scale,
                options=self.options,
                **more,
            )
            result = self.as_given(result)
            # FSDP2 puts a hook on what its modules return, and warns of views: changes in place would go past it.
            return result.clone() if result._is_view() else result

        with ExitStack() as modes:
            self._enter_autocast(modes)
            result = self._run(work, later=self._steps_taken != steps_taken())
        self.passed |= result.requires_grad
        if not self.fused:
            self.fused = True
            self.report.count_fused()
        return result

    def _run(self, work: Work, *, later: bool = False, link: bool = True) -> Any:
        def checked(head: nn.Linear, forward: Forward, hidden: Tensor = self.hidden) -> Any:
            self._check_unchanged(head, later=later)
            return work(head, forward, hidden)

        why_not = why_not_call(self.head)
        if part_of(self.head) is None:
            why_not = "the model was unpatched"
        if why_not is not None:
            raise UnsupportedError(
                f"logits: expected the output embedding as the forward pass left it, got a change since: {why_not}. "
                "The logits were not kept: read outputs.logits before that, or call the model again."
            )
        return self.head(InsideHead(checked), *([self.hidden] if self.partitioned and link else []))

    def _enter_modes(self, modes: ExitStack, *, grad_mode: bool) -> None:
        modes.enter_context(torch.inference_mode(self._inference))
        modes.enter_context(torch.set_grad_enabled(grad_mode))
        self._enter_autocast(modes)

    def _enter_autocast(self, modes: ExitStack) -> None:
        device_type = self.hidden.device.type
        if self._autocast_dtype is not None:
            modes.enter_context(torch.autocast(device_type, dtype=self._autocast_dtype))
        elif is_autocast_on(device_type):
            modes.enter_context(torch.autocast(device_type, enabled=False))

    def _check_unchanged(self, head: nn.Linear, *, later: bool) -> None:
        # accelerate's offloading gives the head new Parameters, of the same values, at each call.
        changed = _state(self.tensors) != self._state and not hasattr(head, "_hf_hook")
        # Fused optimizers and writes to .data leave versions alone. Comparing waits for the device, so only where
        # logits are built, which costs far more, or an optimizer has stepped since.
        if changed or (later and self._differs()):
            raise UnsupportedError(
                "logits: expected the hidden states and the output embedding as the forward pass left them, got ones "
                "changed since (by an optimizer step, or a load). The logits were not kept: read outputs.logits before "
                "the change, or call the model again."
            )

    def _differs(self) -> bool:
        return not torch.equal(_sample(self.tensors), self._sample)


def fold(steps: tuple[Step, ...]) -> Folded | None:
    """Return steps as arguments of lowtide's functions, None where they are not of that form.

    Any ``tanh(z * a / b) * c`` is a cap at c of ``z * (a * c / b)``. Changes of dtype and shape are no part of it.
    """
    above: float | Tensor = 1.0
    below: float | Tensor = 1.0
    cap: Any = None
    offsets: list[Tensor] = []
    normalised, sign, untouched = False, 1, True
    for step in steps:
        function, args = step.function, step.args
        if step.of_hidden is not None or function in _KEEPS_VALUES:
            continue
        if function is TensorBase.neg and normalised:
            sign = -sign
        elif normalised:
            return None
        elif function is TensorBase.add and untouched:
            offsets.append(args[0].flatten())
            continue
        elif function is TensorBase.log_softmax:
            normalised = True
        elif function is TensorBase.mul or function is TensorBase.neg:
            factor = args[0] if args else -1.0
            above, cap = (above * factor, None) if cap is None else (above, cap * factor)
        elif function is TensorBase.div:
            below, cap = (below * args[0], None) if cap is None else (below, cap / args[0])
        elif function is TensorBase.tanh and cap is None:
            cap = 1.0
        else:
            return None
        untouched = False
    if not _is_usable(above) or not _is_usable(below):
        return None
    scale = above / below
    if cap is not None:
        if isinstance(cap, Tensor) or not 0 < abs(cap) < math.inf:
            return None
        scale, cap = above * cap / below, abs(cap)  # tanh is odd
    return Folded(scale, cap, tuple(offsets), normalised, sign)


def _is_usable(factor: float | Tensor) -> bool:
    return isinstance(factor, Tensor) or (factor != 0 and math.isfinite(factor))


def rows_of(tensor: Tensor, steps: tuple[Step, ...]) -> Tensor:
    """Return the rows of a tensor [..., *] as ``steps`` rearranged and chose those of the logits."""
    for step in steps:
        assert step.of_hidden is not None
        tensor = step.of_hidden(tensor)
    return tensor


def replay(logits: Tensor, steps: tuple[Step, ...]) -> Tensor:
    """Return ``logits`` after the steps."""
    for step in steps:
        logits = step.function(logits, *step.args)
    return logits


def _state(tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    # The Parameters live as long as the head does, so an id is enough to tell them apart.
    return tuple(
        None
        if tensor is None
        else (id(tensor), None if tensor.is_inference() else tensor._version, tensor.dtype, tensor.device)
        for tensor in tensors
    )


def _sample(tensors: tuple[Tensor | None, ...]) -> Tensor:
    """Return sums of a few rows of each tensor, as bits, which a NaN cannot make unequal to themselves."""
    held: list[Any] = [x for x in tensors if x is not None]
    with torch.no_grad():  # where a DTensor hands out what it has; to detach one is an error in inference mode
        here: list[Tensor] = [x.to_local() if is_dtensor(x) else x.detach() for x in held]
    rows = [x.flatten(0, -2) if x.dim() > 1 else x[None] for x in here]
    some = [x[:: max(1, x.shape[0] // 16)] for x in rows]
    return torch.cat([x.sum(-1, dtype=torch.float32) for x in some]).view(torch.int32)
