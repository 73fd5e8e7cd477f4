"""What is compared to find out whether a function couples rows: its results for a few of them, and its code's key."""

from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from lowtide.head.rows import take_leading
from lowtide.head.user_function.passes import Pass

PULL = 0.75  # of another row's logits, with a slope from 1 down to -1 added: nothing that a model could not give


class Probe:
    """The function on a few rows, as often as need be, each time with logits of its own.

    Args:
        run: The call's pass.
        rows: Which of its n rows.
    """

    def __init__(self, run: Pass, rows: Sequence[int]) -> None:
        self.run, self.rows = run, len(rows)
        chosen = torch.tensor(rows, device=run.device)
        self.index = chosen if run.tensors.index is None else run.tensors.index[chosen]
        x = run.tensors.input.detach()
        x_rD = take_leading(x, x.dim() - 1, self.index, slice(0, len(rows))).to(run.call.dtype)
        self.z = x.new_empty(len(rows), run.tensors.weight_VD.shape[0], dtype=run.call.wide)
        run.write_logits(x_rD, self.z)

    def shift(self, share: float) -> None:
        """Shift the logits, one up, one down, by a share of the largest."""
        largest = self.z.where(self.z.isfinite(), 0).abs().amax()
        self.z += share * largest * (1 - 2 * (torch.arange(self.z.shape[1], device=self.z.device) % 2))

    def __call__(self, rows: Sequence[int], others: Sequence[int] = ()) -> list[Tensor]:
        """Return the results for some of the rows, with ``others`` among them replaced.

        Each of those gets the token arguments of the row after it, and logits made from that one's.
        """
        tokens = [(row + 1) % self.rows if row in others else row for row in rows]
        where = torch.tensor(tokens, device=self.z.device)
        z = self.z[where]
        if others:
            replaced = torch.tensor([row in others for row in rows], device=z.device)[:, None]
            slope = torch.linspace(1, -1, z.shape[1], dtype=z.dtype, device=z.device)
            z = torch.where(replaced, PULL * z + slope, z)
        axes, part = self.run.tensors.input.dim() - 1, slice(0, len(tokens))
        args = [take_leading(a.detach(), axes, self.index[where], part) for a in self.run.tensors.token_args]
        results = self.run.function(z, args, compiled=False)
        leaves = [leaf.detach() for leaf in results.leaves if leaf is not None]
        return [torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf for leaf in leaves]


def key_of(run: Pass) -> Any:
    """Return what tells apart calls whose functions, shapes or dtypes differ."""
    t = run.tensors
    shapes = tuple((a.shape[t.input.dim() - 1 :], a.dtype) for a in t.token_args)
    return (code_of(run.call.function.plain), run.call.function.per_token, t.weight_VD.shape, t.weight_VD.dtype, shapes,
            tuple((p.shape, p.dtype) for p in t.params))  # fmt: skip


def code_of(fn: Callable[..., Any]) -> Any:
    """Return what tells functions apart that do different things: code, and the words that it closes over.

    Not the function itself: one that is made anew for each step is the same to us, and must not be kept alive.
    """
    if isinstance(fn, partial):
        return code_of(fn.func), tuple(map(_word, fn.args)), tuple((k, _word(v)) for k, v in fn.keywords.items())
    if isinstance(fn, MethodType):
        return code_of(fn.__func__), type(fn.__self__)
    if isinstance(fn, FunctionType):
        cells = []
        for cell in fn.__closure__ or ():
            try:
                cells.append(_word(cell.cell_contents))
            except ValueError:  # not filled yet
                cells.append(None)
        return fn.__code__, tuple(map(_word, fn.__defaults__ or ())), tuple(cells)
    return type(fn)


def _word(value: object) -> Any:
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, FunctionType):
        return value.__code__  # no deeper: a function may close over itself
    return type(value)
