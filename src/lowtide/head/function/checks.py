"""Whether a function treats each row of logits by itself: a few rows at once must give what they give in two halves."""

import inspect
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from lowtide.errors import ArgumentValueError, message
from lowtide.graph import watched
from lowtide.head.call import NAMES
from lowtide.head.function.chunk import FunctionTerms, has_numbers
from lowtide.head.function.function import evaluate, random_state, same_state, set_random_state
from lowtide.head.options import Gradient

ROWS = 15  # of a comparison, spread over a chunk: an odd number, whose halves tear pairs apart
ROUNDING, NARROW_ROUNDING = 1e-5, 2e-2  # of a result's largest value; where fn multiplies in bfloat16, or returns it
NOISE, NOISE_MARGIN = 2.0**-20, 16  # of the largest logit: a shift that shows how far rounding may carry a result
REMEMBERED = 256
NOT_THE_SAME_TWICE = message(
    "fn",
    "the same results from the same logits and the same state of PyTorch's default generators",
    "others the second time",
    "Backward may run it once more. Draw random numbers from the default generators alone, and keep no state.",
)

_compared: OrderedDict[Any, None] = OrderedDict()  # keys of calls whose function was compared


def plan_comparison(terms: FunctionTerms) -> None:
    """Have the first chunk of a pass compared, the first time that a function's code gets arguments of these shapes.

    On a GPU the host waits for the comparison; a CUDA graph's capture, a call inside a dispatch mode, and tensors
    without numbers have none. Ranks
    that share a vocabulary compare what decides how much they exchange: one that waits for others hangs.
    """
    key, capturing = _key_of(terms), terms.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    followed = watched(())  # a selective checkpoint counts the operators, which a second run has to repeat
    known = capturing or followed or not has_numbers(terms.head.input) or terms.plan.rows < 2
    if terms.head.ranks.compare(_to_be_alike(terms), known=known or key in _compared):
        return

    def compare(z_cV: Tensor, tokens: Tensor) -> None:
        difference = _difference(terms, z_cV, tokens)
        terms.head.ranks.compare({"whether fn couples tokens": difference is not None})
        if difference is not None:
            raise ArgumentValueError(difference)
        if len(z_cV) > 1:
            _compared[key] = None
        if len(_compared) > REMEMBERED:
            _compared.popitem(last=False)

    terms.compare = compare


def _to_be_alike(terms: FunctionTerms) -> dict[str, int]:
    """Return what decides which exchanges ranks make, and how large they are."""
    function, plan = terms.function, terms.plan
    trained = [leaf.requires_grad for leaf in (*terms.args, *terms.params)]
    return {
        "number of tokens": plan.rows,
        "rows of a chunk": plan.chunk_rows,
        "hidden size": terms.head.input.shape[-1],
        "out": function.per_token,
        "gradient": get_args(Gradient).index(function.gradient),
        **{f"requires_grad of {name}": wanted for name, wanted in zip(NAMES, terms.wanted, strict=True)},
        "number of token_args": len(terms.args),
        "requires_grad of token_args and params": sum(need << i for i, need in enumerate(trained)) % 2**62,
    }


def _difference(terms: FunctionTerms, z_cV: Tensor, tokens: Tensor) -> str | None:
    """Return in words how results for some rows differ from those for their two halves; None: only by rounding.

    ``tokens`` are the rows' places among all. Halves of rows draw other random numbers: a function that draws any is
    not compared.
    """
    count = min(len(z_cV), ROWS, max(2, terms.plan.piece_rows))  # within the workspace
    if count < 2:
        return None
    count -= count > 2 and count % 2 == 0
    chosen = torch.arange(count, device=z_cV.device) * (len(z_cV) - 1) // (count - 1)
    z_cV, tokens, device, per_token = z_cV[chosen], tokens[chosen], terms.device, terms.function.per_token

    def results(rows: slice, z: Tensor = z_cV) -> list[Tensor]:
        args = terms.args_of(tokens, rows)
        leaves, *_ = evaluate(terms.function, z[rows].clone(), args, terms.params, terms.anchor, compiled=False)
        found = [leaf.detach() for leaf in leaves if leaf is not None]
        return [torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf for leaf in found]

    before, every = random_state(device), slice(0, count)
    whole = results(every)
    if not same_state(before, random_state(device)):
        set_random_state(before, device)
        return None
    first, second = results(slice(0, count // 2)), results(slice(count // 2, count))
    forms = [[list(leaf.shape[1:]) for leaf in leaves] for leaves in (whole, first, second)]
    if forms[0] != forms[1] or forms[0] != forms[2]:
        return message("fn", "results of the same number and shapes for any rows", " and ".join(map(str, forms)))
    join: Callable[[Tensor, Tensor], Tensor] = (lambda a, b: torch.cat((a, b))) if per_token else torch.add
    halves = [join(a, b) for a, b in zip(first, second, strict=True)]
    allowed = [_rounding(terms, leaf) for leaf in whole]
    if all(map(_agree, whole, halves, allowed)):
        return None
    if not all(map(_agree, whole, results(every), allowed)):
        return NOT_THE_SAME_TWICE
    signs = 1 - 2 * (torch.arange(z_cV.shape[1], device=z_cV.device) % 2)
    shifted = results(every, z_cV + NOISE * _largest(z_cV) * signs)
    for i, (one, two, most, near) in enumerate(zip(whole, halves, allowed, shifted, strict=True)):
        if not _agree(one, two, most + NOISE_MARGIN * _largest(near.double() - one.double()).item()):
            return _refusal(i, one, two, per_token=per_token)
    return None


def _refusal(i: int, whole: Tensor, halves: Tensor, *, per_token: bool) -> str:
    if per_token:
        hint = "It sees one chunk of the tokens at a time: reduce over the vocabulary only, and over tokens"
        hint = f"{hint} afterwards, on what linear_apply returns."
        got = f"result {i}, which differs when rows come in two parts"
        return message("fn", "results for a token that do not depend on the other tokens", got, hint)
    hint = "A mean does not add up, nor does a constant: return the sum and divide by the number of all tokens"
    hint = f'{hint} afterwards, or take out="token". What one token gets must not depend on the others.'
    got = f"result {i}: sums {whole.tolist()} and {halves.tolist()} that should be one when rows come in two parts"
    return message("fn", 'scalars that add up over tokens with out="sum"', got, hint)


def _rounding(terms: FunctionTerms, leaf: Tensor) -> float:
    """Return by how much a result may differ for rounding: a share of its largest value."""
    if not leaf.dtype.is_floating_point:
        return 0.0
    narrow = leaf.dtype.itemsize < 4 or any(enabled for _, enabled, _ in terms.function.autocast)
    return _largest(leaf).item() * (NARROW_ROUNDING if narrow else ROUNDING)


def _largest(x: Tensor) -> Tensor:
    """Return the largest finite magnitude, 0 where there is none."""
    return x.double().abs().nan_to_num(0, 0, 0).max() if x.numel() else x.new_zeros((), dtype=torch.double)


def _agree(one: Tensor, two: Tensor, allowed: float) -> bool:
    return torch.allclose(one.double(), two.double(), rtol=0, atol=allowed, equal_nan=True)


def _key_of(terms: FunctionTerms) -> Any:
    """Return a key that differs between calls with other code, shapes or dtypes."""
    function, weight_VD = terms.function, terms.head.weight_VD
    shapes = tuple((a.shape[len(function.leading) :], a.dtype) for a in terms.args)
    params = tuple((p.shape, p.dtype) for p in terms.params)
    return _code_of(function.plain), function.per_token, weight_VD.shape, weight_VD.dtype, shapes, params


def _code_of(fn: Any) -> object:
    """Return a function's code, and of another callable its class."""
    while isinstance(fn, partial):
        fn = fn.func
    fn = inspect.unwrap(fn)
    return getattr(fn, "__code__", type(fn))
