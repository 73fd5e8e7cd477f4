"""What takes the place of one of TRL's autograd functions."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from lowtide.head.options import HeadOptions
from lowtide.trl.report import TrlReport


class StandIn:
    """An object with the ``apply`` of one of TRL's functions, that computes it or hands it on; else it is that class.

    Args:
        stock: TRL's autograd function.
        kind: `lowtide.trl.logprob` or `lowtide.trl.divergence`: when lowtide can compute it, and how.
        call: The tuple of its arguments.
        report: Where to count.
        options: How the heads are to run.
    """

    def __init__(
        self, stock: Any, kind: ModuleType, call: Callable[..., Any], report: TrlReport, options: HeadOptions | None
    ) -> None:
        self.__name__ = stock.__name__
        self.stock = stock
        self.kind = kind
        self.call = call
        self.report = report
        self.options = options
        self.active = True  # not after unpatch_trl, where somebody kept this object

    def apply(self, *args: Any) -> Any:
        """Do what TRL's function does."""
        call = self.call(*args)
        if not self.active:
            return self.stock.apply(*args)
        why_not = self.kind.why_not(call)
        if not torch.compiler.is_compiling():  # a count in the graph would compile it anew each time
            self.report.count(self.stock.__name__, why_not)
        return self.stock.apply(*args) if why_not is not None else self.kind.run(call, self.options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling ask for some before there is a stock
            raise AttributeError(name)
        return getattr(self.stock, name)
