"""Whether a call is one that operators of ours may take over: pure functions, asked at each call."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as nn_module

from lowtide.models.eligibility import LINEAR, has_hooks, is_function_mode_active, plain_class

FEW = 2**23  # values: 2048 tokens of 4096


def is_ordinary(tensors: tuple[object, ...], parameters: Sequence[object]) -> bool:
    """Whether these are plain tensors and Parameters, and no transform, mode, trace or export is at work on them.

    Exact types: DTensor, quantised tensors and other subclasses have rules of their own.
    """
    for x in tensors:
        if type(x) is not Tensor and type(x) is not nn.Parameter:
            return False
    for p in parameters:
        if type(p) is not nn.Parameter:
            return False
    if torch.compiler.is_compiling():
        return not torch.compiler.is_exporting()
    return (
        not is_function_mode_active()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and torch._C._get_tracing_state() is None
    )


def has_nothing_to_save(x: object) -> bool:
    """Whether a call with ``x`` is one without gradients that runs the model's own code: what generation consists of.

    On a CPU all of them, where our operators only save what is kept for backward. On a GPU those of few values: such a
    call takes as long as the host takes to launch it, and generating token by token would be slower. Compiled ones
    everywhere: the compiler fuses that code itself, and asking for a size would be a guard on it, which an exported
    program keeps and a size that only the data tell does not have.
    """
    if torch.is_grad_enabled():
        return False
    # No tensor: an error of the model's own. A trace would record the question for a size.
    if not isinstance(x, Tensor) or torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return True
    return x.numel() <= FEW or x.is_cpu


def are_plain_linears(linears: tuple[nn.Module, ...], others: tuple[nn.Module, ...] = ()) -> bool:
    """Whether these are nothing but ``torch.nn.Linear``, and no hook looks at any call. Their weights may be anything.

    Args:
        linears: The linear layers.
        others: Modules between them, whose hooks, and forwards put on the instance, count as well.
    """
    for linear in linears:
        if plain_class(linear) is not nn.Linear:
            return False
    for module in (*linears, *others):
        if "forward" in vars(module) or has_hooks(module):
            return False
    if LINEAR.exchanged() is not None:
        return False
    return torch.compiler.is_compiling() or not nn_module._has_any_global_hook()  # type: ignore[no-untyped-call]
