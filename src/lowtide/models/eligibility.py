"""Checks before fused code runs: whether logits may be lazy, and whether a call of a module is an ordinary one.

Pure functions. Those named ``why_not_`` return the reason against it, or None.
"""

import functools
import inspect
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook  # these hooks see the calls of every module

from lowtide.arguments import hooks_of, is_autocast_on, is_transformed
from lowtide.distributed.zero import HOOKS
from lowtide.models.instance import BASE

# Hooks of these packages move and gather weights, or count modules, and pass outputs through; any other may read or
# change the logits.
_HOOKS_THAT_DO_NOT_READ = ("torch.distributed.", "torch.nn.parallel.", "torch.utils.", *HOOKS)
# The arguments of a forward with which it computes a loss.
LABELS = ("labels", "shift_labels", "num_items_in_batch")
REPLACED = "the output embedding's forward was replaced on the instance"


def why_not_patch_model(model: nn.Module) -> str | None:
    """Return why the class of ``model`` cannot be given lazy logits."""
    if "forward" in vars(model):
        return "the model's forward was replaced on the instance"
    parameters = inspect.signature(type(model).forward).parameters.values()
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    if not takes_any and not any(parameter.name in LABELS for parameter in parameters):
        return f"the model's forward takes none of {', '.join(LABELS)}, and so computes no loss"
    return None


def why_not_lazy(head: nn.Linear, args: tuple[Any, ...], kwargs: dict[str, Any], *, scores: bool) -> str | None:
    """Return why this call of the head must return real logits; ``scores``: of a model without labels."""
    if len(args) != 1 or kwargs:
        return "the output embedding was called with more than hidden states"
    (hidden,) = args
    # of each sequence [..., T, D]
    if scores and isinstance(hidden, Tensor) and hidden.dim() > 1 and hidden.shape[-2] == 1:
        return "one token of each sequence, as in generation"
    why_not = why_not_call(head)  # before the weight is read: a parametrization computes it anew each time
    if why_not is not None:
        return why_not
    if type(hidden) is not Tensor or not hidden.is_floating_point():
        return f"the hidden states are a {type(hidden).__name__} of {getattr(hidden, 'dtype', 'no dtype')}"
    if hidden.dtype != head.weight.dtype and not is_autocast_on(hidden.device.type):
        return "hidden states and output embedding differ in dtype"
    if is_transformed():
        return "a torch.func transform or forward-mode differentiation is active"
    if is_traced():
        return "the model is being traced"
    # Exact types: DTensor, quantised and fake tensors, and torch.func's wrapped parameters all have rules of their own.
    foreign = (type(p).__name__ for p in (head.weight, head.bias) if p is not None and type(p) is not nn.Parameter)
    return next((f"a weight of the output embedding is a {kind}, not a plain Parameter" for kind in foreign), None)


def why_not_call(head: nn.Module) -> str | None:
    """Return why a call of ``head`` may do more than a linear layer, which a loss without logits would miss."""
    if "forward" in vars(head):
        return REPLACED
    if not any(BASE in vars(kind) for kind in (type(head), plain_class(head))):  # FSDP2 may come before patch or after
        return f"the output embedding was given another class, {type(head).__name__}"
    if is_function_mode_active():
        return "a TorchFunctionMode is active"
    if _has_any_global_hook():  # type: ignore[no-untyped-call]
        return "all modules have a hook"
    for hook in (hook for hooks in hooks_of(head) for hook in hooks.values()):
        module = defining_module(hook)
        if not module.startswith(_HOOKS_THAT_DO_NOT_READ):
            return f"the output embedding has a hook from {module or 'an unknown module'}"
    return None


def defining_module(function: Any) -> str:
    """Return the name of the module that a function is from, "" if it has none."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", None) or ""


def is_traced() -> bool:
    """Whether torch.jit.trace runs this."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined,no-untyped-call]


def is_function_mode_active() -> bool:
    """Whether a ``TorchFunctionMode`` reads, or changes, what functions do; ``with device:`` does not."""
    modes: Any = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(type(mode).__name__ != "DeviceContext" for mode in modes)


def has_hooks(module: nn.Module) -> bool:
    """Whether a hook of the module itself, forward or backward, reads its calls; ZeRO-3's only gather weights."""
    kinds = hooks_of(module)
    return any(kinds) and not all(defining_module(hook).startswith(HOOKS) for kind in kinds for hook in kind.values())


def plain_class(module: nn.Module) -> type:
    """Return the class of ``module`` beneath FSDP2's, which adds hooks and leaves the forward alone."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(module, fsdp.FSDPModule):
        return type(module).__bases__[-1]
    return type(module)


FEW = 2**23  # values: 2048 tokens of 4096


def is_ordinary(tensors: tuple[object, ...], parameters: Sequence[object]) -> bool:
    """Whether these are plain tensors and Parameters, and no transform, mode, trace or export is active.

    Exact types: DTensor, quantised tensors and other subclasses have rules of their own.
    """
    for x in tensors:
        if type(x) is not Tensor and type(x) is not nn.Parameter:
            return False
    for p in parameters:
        if type(p) is not nn.Parameter:
            return False
    return torch.compiler.is_compiling() or (not is_function_mode_active() and not is_transformed() and not is_traced())


def has_nothing_to_save(x: object) -> bool:
    """Whether a call with ``x`` runs the model's own code because it saves nothing for backward, as in generation.

    On a CPU all calls without gradients: our operators only reduce what is saved there. On a GPU those of few values:
    launching ours would take the host longer, and so generation token by token. Compiled ones everywhere: the compiler
    fuses that code itself, and reading a size would guard it, which fails for sizes that depend on data.
    """
    if torch.is_grad_enabled():
        return False
    # No tensor: an error of the model's own. A trace would record the reading of a size.
    if not isinstance(x, Tensor) or torch.compiler.is_compiling() or is_traced():
        return True
    return x.numel() <= FEW or x.is_cpu


def runs_stock(x: object) -> bool:
    """Whether a call of a norm or a rotation with ``x`` runs the model's own code: compiled, or with nothing to save.

    A compiler fuses that code with what is around it; an operator stands in its way.
    """
    return torch.compiler.is_compiling() or has_nothing_to_save(x)


def are_untouched(modules: Iterable[nn.Module]) -> bool:
    """Whether no hook reads the calls of these modules, and none has a forward on the instance."""
    for module in modules:
        if "forward" in vars(module) or has_hooks(module):
            return False
    return torch.compiler.is_compiling() or not _has_any_global_hook()  # type: ignore[no-untyped-call]
