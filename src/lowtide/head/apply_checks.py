"""Whether a function treats each row of logits by itself: a few rows at once must give what they give in parts."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from lowtide.errors import ArgumentValueError, message
from lowtide.head.apply_passes import Pass, has_numbers
from lowtide.head.apply_random import random_state, same_state, set_random_state
from lowtide.head.schedules import take_leading

ROWS = 16  # of one comparison, spread over all rows
ROUNDING = 1e-5  # of a result's largest value: within this nobody asks why
AUTOCAST_ROUNDING = 2e-2  # where fn multiplies in bfloat16, or returns it
NOISE = 2.0**-20  # of the largest logit: what the logits are shifted by, to see how far rounding may carry a result
NOISE_MARGIN = 16
AGAIN = 2.0**-9  # likewise, for the second comparison of two that must both differ
REMEMBERED = 256

_passed: OrderedDict[Any, None] = OrderedDict()


def check_rows_are_independent(run: Pass) -> None:
    """Refuse a function whose result for some rows depends on which other rows it gets along with them.

    On a GPU the comparison would make the host wait, so that it is made once for a function's code and the shapes of
    what it gets. A function that draws random numbers is not compared: other rows get other numbers.

    Raises:
        ArgumentValueError: It couples rows, or with out="sum" its result does not add up.
    """
    n, device = run.tensors.rows, run.device
    if n < 2 or not has_numbers(run.tensors.input):
        return
    known = _key(run) if device.type == "cuda" else None
    if known is not None and known in _passed:
        _passed.move_to_end(known)
        return
    before = random_state(device)
    count = min(n, ROWS, max(2, run.call.plan.piece_rows))
    probe = _Probe(run, [i * (n - 1) // (count - 1) for i in range(count)])
    try:
        difference = _difference(run, probe)
        if difference is not None:
            # once more with logits somewhat off: a rounding that carries one across a threshold does not do so twice
            probe.shift(AGAIN)
            difference = _difference(run, probe)
    finally:
        set_random_state(before, device)
    if difference is not None:
        raise ArgumentValueError(difference)
    if known is not None:
        _passed[known] = None
        if len(_passed) > REMEMBERED:
            _passed.popitem(last=False)


def _difference(run: Pass, probe: "_Probe") -> str | None:
    """Return in words how a result for some rows differs from that for two parts of them; None if it does not."""
    rows = len(probe.z)
    before = random_state(run.device)
    whole = probe(0, rows)
    if not same_state(before, random_state(run.device)):
        return None
    half = rows // 2
    parts = [probe(0, half), probe(half, rows)]
    per_token = run.call.function.per_token
    forms = [[leaf.shape[1:] for leaf in leaves] for leaves in (whole, *parts)]
    if forms[1:] != forms[:1] * 2:
        expected = "results of the same number and shapes for any rows"
        return message("fn", expected, " and ".join(str([list(shape) for shape in form]) for form in forms))
    split = [torch.cat(pair) if per_token else pair[0] + pair[1] for pair in zip(*parts, strict=True)]
    if all(_agree(w, s, _allowed(run, w, p)) for w, s, *p in zip(whole, split, *parts, strict=True)):
        return None
    probe.shift(NOISE)
    shifted = probe(0, rows)
    for i, (w, s, near, *p) in enumerate(zip(whole, split, shifted, *parts, strict=True)):
        noise = (near.double() - w.double()).abs().nan_to_num(0, 0, 0).flatten()
        allowed = _allowed(run, w, p) + NOISE_MARGIN * torch.cat((noise, noise.new_zeros(1))).amax().item()
        if not _agree(w, s, allowed):
            return _reason(i, w, s, per_token)
    return None


class _Probe:
    """The function on a few rows, as often as need be, each time with logits of its own."""

    def __init__(self, run: Pass, rows: Sequence[int]) -> None:
        self.run = run
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

    def __call__(self, start: int, stop: int) -> list[Tensor]:
        """Return the results for some of the rows."""
        run, part = self.run, slice(start, stop)
        axes = run.tensors.input.dim() - 1
        args = [take_leading(a.detach(), axes, self.index, part) for a in run.tensors.token_args]
        results = run.function(self.z[part].clone(), args, compiled=False)
        return [leaf.detach() for leaf in results.leaves if leaf is not None]


def _allowed(run: Pass, whole: Tensor, parts: Sequence[Tensor]) -> float:
    """Return by how much results may differ for rounding: a share of the largest of them all."""
    if not whole.is_floating_point():
        return 0.0
    values = torch.cat([t.double().reshape(-1).abs() for t in (whole, *parts, whole.new_zeros(1))])
    largest = values.where(values.isfinite(), 0).amax().item()
    narrow = whole.dtype.itemsize < 4 or any(enabled for _, enabled, _ in run.call.function.autocast)
    return largest * (AUTOCAST_ROUNDING if narrow else ROUNDING)


def _agree(whole: Tensor, split: Tensor, allowed: float) -> bool:
    if whole.shape != split.shape:
        return False
    return torch.allclose(whole.double(), split.double(), rtol=0, atol=allowed, equal_nan=True)


def _reason(i: int, whole: Tensor, split: Tensor, per_token: bool) -> str:
    if not per_token:
        return message(
            "fn",
            'scalars that add up over tokens with out="sum"',
            f"result {i}, {whole.item():.6g} for a few rows and {split.item():.6g} as the sum of two parts of them",
            "A mean does not add up, nor does a constant: return the sum and divide by the number of all tokens"
            ' afterwards, or take out="token". What one token gets must not depend on the others.',
        )
    changed = "" if whole.shape != split.shape else _changed_rows(whole, split)
    return message(
        "fn",
        "results for a token that do not depend on the other tokens",
        f"result {i}, which differs{changed} when rows come in two parts",
        "It sees one chunk of the tokens at a time: reduce over the vocabulary only, and over tokens afterwards, on"
        " what linear_apply returns.",
    )


def _changed_rows(whole: Tensor, split: Tensor) -> str:
    rows = (whole != split).reshape(len(whole), -1).any(1).sum().item()
    return f" in {rows} of {len(whole)} rows"


def _key(run: Pass) -> Any:
    t = run.tensors
    shapes = tuple((a.shape[t.input.dim() - 1 :], a.dtype) for a in t.token_args)
    return (_code(run.call.function.plain), run.call.function.per_token, t.weight_VD.shape, t.weight_VD.dtype, shapes,
            tuple((p.shape, p.dtype) for p in t.params))  # fmt: skip


def _code(fn: Callable[..., Any]) -> Any:
    """Return what tells functions apart that do different things: code, and the words that it closes over.

    Not the function itself: one that is made anew for each step is the same to us, and must not be kept alive.
    """
    if isinstance(fn, partial):
        return _code(fn.func), tuple(map(_word, fn.args)), tuple((k, _word(v)) for k, v in fn.keywords.items())
    if isinstance(fn, MethodType):
        return _code(fn.__func__), type(fn.__self__)
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
