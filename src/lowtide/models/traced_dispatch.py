"""Where dynamo decides by a variable's class alone, and would take lazy logits for an object that is no tensor.

This module imports torch's compiler, and is imported while it traces.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from lowtide.models.traced_operations import Variable, constant, variables

Stock = Callable[..., Any]


def intercept(lazy: type, built: Callable[[Any, Any, str], Any]) -> None:
    """Have dynamo treat variables of class ``lazy`` as a tensor's in these places, in versions that have them.

    ``built(tx, variable, why)`` gives the real logits' variable in the place of a lazy one, or in a list with one.
    """
    for kind, name, around in (
        (variables.UserDefinedClassVariable, "_call_cross_entropy_loss", _loss_modules),
        (variables.AutogradFunctionVariable, "call_apply", _with_tensors),
        (variables.TorchHigherOrderOperatorVariable, "call_function", _with_tensors),
        (variables.BuiltinVariable, "_handle_insert_op_in_graph", _operators),
    ):
        if hasattr(kind, name):
            setattr(kind, name, around(getattr(kind, name), lazy, built))
    handlers: dict[Any, Any] = getattr(variables.TorchInGraphFunctionVariable, "_get_handlers", dict)()
    if torch.is_tensor in handlers:
        handlers[torch.is_tensor] = _is_tensor(handlers[torch.is_tensor], lazy)


def _loss_modules(stock: Stock, lazy: type, built: Any) -> Stock:  # noqa: ARG001
    """Return how ``torch.nn.CrossEntropyLoss(...)`` that traced code makes is called, for lazy logits as well.

    ``stock``, dynamo's own, makes a node of the graph of whatever the loss is called with.
    """

    def make(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        loss = stock(self, tx, args, kwargs)

        def call(input: Any, target: Any) -> Any:
            if not isinstance(input, lazy):
                return loss.call_function(tx, [input, target], {})
            function: Any = Variable.build(tx, F.cross_entropy)
            return input.call_torch_function(tx, function, None, [input, target, *args], kwargs)  # type: ignore[attr-defined]

        return variables.LambdaVariable(call)

    return make


def _with_tensors(stock: Stock, lazy: type, built: Any) -> Stock:  # noqa: ARG001
    """Return how custom autograd functions, and operators that take functions, are called: on real logits.

    They pass gradients on to what is a tensor.
    """

    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        why = getattr(self, "fn_cls", getattr(self, "value", self)).__name__
        given = {name: built(tx, value, why) for name, value in kwargs.items()}
        return stock(self, tx, [built(tx, arg, why) for arg in args], given)

    return call


def _operators(stock: Stock, lazy: type, built: Any) -> Stock:
    """Return how operators with a tensor are traced: ``z @ w`` and ``z += w`` are swapped where z is none."""

    def insert(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if args and isinstance(args[0], lazy) and any(arg.is_tensor() for arg in args[1:]):
            args = [built(tx, arg, self.fn.__name__) for arg in args]
        return stock(self, tx, args, kwargs)

    return insert


def _is_tensor(stock: Stock, lazy: type) -> Stock:
    def is_tensor(self: Any, tx: Any, arg: Any) -> Any:
        return constant(tx, True) if isinstance(arg, lazy) else stock(self, tx, arg)

    return is_tensor
