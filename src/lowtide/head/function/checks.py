"""Check that a function treats each row of logits by itself: a few rows must give the same next to other rows."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor

from lowtide.code import code_and_words
from lowtide.errors import ArgumentValueError, message
from lowtide.head.call import NAMES
from lowtide.head.engine import Chunks, Terms
from lowtide.head.function.chunk import FunctionTerms, has_numbers
from lowtide.head.function.function import RandomState, evaluate, random_state, same_state, set_random_state
from lowtide.head.options import Gradient

# Which of the rows go into the second part, and which are replaced: for any number of rows from the start, one of the
# two tears neighbours, pairs, halves and mirror images apart.
SPLIT, REPLACED = "0111010101010000", "0110011101010000"
ROWS = len(SPLIT)  # of one comparison, spread over all rows
ROUNDING = 1e-5  # of a result's largest value: within this nobody asks why
AUTOCAST_ROUNDING = 2e-2  # where fn multiplies in bfloat16, or returns it
PULL = 0.75  # of another row's logits, with a slope from 1 down to -1 added: nothing that a model could not give
NOISE = 2.0**-20  # of the largest logit: what the logits are shifted by, to see how far rounding may carry a result
NOISE_MARGIN = 16
AGAIN = 2.0**-9  # likewise, for the second comparison of two that must both differ
DRAWS = 32  # of random results, for all rows and for two parts of them
MOST_RANK = 0.66  # rank correlation, 4.5 standard deviations: by chance once in 1.5e5 comparisons, and twice in a row
REMEMBERED = 256
NOT_THE_SAME_TWICE = message(
    "fn",
    "the same results from the same logits and the same state of PyTorch's default generators",
    "others the second time",
    "Backward may run it once more. Draw random numbers from the default generators alone, and keep no state.",
)

Pair = tuple[Tensor, Tensor]  # what should be the same
_passed: OrderedDict[Any, None] = OrderedDict()


def check_rows_are_independent(terms: FunctionTerms) -> None:
    """Refuse a function whose result for some rows depends on which other rows it gets along with them.

    Without random numbers, rows must give the same in two parts as at once, and with out="token" the same next to
    other rows. With random numbers the parts would draw others; so only next to other rows must they give
    the same, from the same numbers, and at once and in parts that they must give results of one distribution.

    On a GPU comparing makes the host wait, so that it is done once for a function's code and the shapes of what it
    gets; so are, on any device, the draws that show a distribution. Ranks that share a vocabulary get the same rows.
    """
    ranks, device, key = terms.head.ranks, terms.device, _key_of(terms)
    # ranks must not differ in what they exchange, or in whether they compare
    known = ranks.compare(_to_be_alike(terms), known=key in _passed)
    if terms.plan.rows < 2 or not has_numbers(terms.head.input):
        return
    if known:
        _passed.move_to_end(key)
        if device.type == "cuda":
            return
    before = random_state(device)
    comparison = Comparison(terms, before)
    try:
        difference = comparison.difference(draw=not known)
        if difference is not None:
            # once more with logits somewhat off: a rounding that carries one across a threshold does not do so twice
            comparison.shift(AGAIN)
            difference = comparison.difference(draw=True)
    finally:
        set_random_state(before, device)
    ranks.compare({"whether fn couples tokens": difference is not None})  # of other random numbers, perhaps
    if difference is not None:
        raise ArgumentValueError(difference)
    _passed[key] = None
    if len(_passed) > REMEMBERED:
        _passed.popitem(last=False)


def _to_be_alike(terms: FunctionTerms) -> dict[str, int]:
    """Return what decides which exchanges ranks make, and how large they are: a rank that waits for others hangs."""
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


class Comparison:
    """Of a call's function with itself, on a few of its rows; what is compared by number begins at one random state."""

    def __init__(self, terms: FunctionTerms, state: RandomState) -> None:
        self.terms, self.state, self.per_token = terms, state, terms.function.per_token
        n, ranks = terms.plan.rows, terms.head.ranks
        count = min(n, ROWS, max(2, terms.plan.piece_rows))
        if ranks.spread:  # the first rows of each rank's tokens
            count = min(n, ROWS // ranks.groups * ranks.groups or ranks.groups)
        plan = replace(terms.plan, rows=count, chunks=1, chunk_rows=count, bias_column=False)
        rows, chosen = terms.rows_of(plan), torch.arange(count, device=terms.device)
        if not ranks.spread:
            chosen = chosen * (n - 1) // (count - 1)
        self.index = chosen if rows.index is None else rows.index[chosen]
        kept = None if rows.kept is None else rows.kept[chosen]
        chunks = Chunks(terms.head, replace(rows, index=self.index, kept=kept), plan, Terms())
        self.z = chunks.logits(chunks.hidden(slice(0, count)))
        if not ranks.alone:
            self.z = ranks.whole_rows(self.z[:, : ranks.rows].repeat(ranks.size, 1))
        if kept is not None:
            self.z, self.index = self.z[kept], self.index[kept]
        self.rows = min(len(self.z), ROWS)
        self.all = range(self.rows)
        self.parts = [[i for i in self.all if SPLIT[i] == part] for part in "01"]
        self.replaced = [[i for i in self.all if REPLACED[i] == part] for part in "10"]

    def shift(self, share: float) -> None:
        """Shift the logits, one up, one down, by a share of the largest."""
        signs = 1 - 2 * (torch.arange(self.z.shape[1], device=self.z.device) % 2)
        self.z += share * self.z.nan_to_num(0, 0, 0).abs().amax() * signs

    def results(self, rows: Sequence[int], others: Sequence[int] = (), *, again: bool = True) -> list[Tensor]:
        """Return the function's results for some of the rows, with ``others`` among them replaced.

        Each of those gets the token arguments of the row after it, and logits made from that one's. With ``again`` the
        same random numbers are drawn as each time.
        """
        terms, device = self.terms, self.z.device
        if again:
            set_random_state(self.state, terms.device)
        where = torch.tensor([(row + 1) % self.rows if row in others else row for row in rows], device=device)
        z = self.z[where]
        if others:
            replaced = torch.tensor([row in others for row in rows], device=device)[:, None]
            slope = torch.linspace(1, -1, z.shape[1], dtype=z.dtype, device=device)
            z = torch.where(replaced, PULL * z + slope, z)
        args = terms.args_of(self.index[where], slice(0, len(where)))
        leaves, *_ = evaluate(terms.function, z, args, terms.params, terms.anchor, compiled=False)
        found = [leaf.detach() for leaf in leaves if leaf is not None]
        return [torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf for leaf in found]

    def difference(self, *, draw: bool) -> str | None:
        """Return in words how results differ that should not, with ``draw`` in their distributions too; or None."""
        whole = self.results(self.all) if self.rows > 1 else []
        if not whole:
            return None
        if same_state(self.state, random_state(self.terms.device)):
            return self._in_parts(whole) or (self._beside_others(whole) if self.per_token else None)
        return self._beside_others(whole) or (self._in_draws(whole) if draw else None)

    def _in_parts(self, whole: list[Tensor]) -> str | None:
        order = [*self.parts[0], *self.parts[1]]

        def pair(w: Tensor, one: Tensor, two: Tensor) -> Pair:
            return (w[order], torch.cat((one, two))) if self.per_token else (w, one + two)

        runs = [self.results(rows) for rows in self.parts]
        return self._first_difference(whole, runs, pair, "when rows come in two parts")

    def _beside_others(self, whole: list[Tensor]) -> str | None:
        """Compare results of rows next to others; of sums, the effect of some rows must not depend on the others."""
        after = random_state(self.terms.device)
        runs = []
        for others in self.replaced if self.per_token else (*self.replaced, self.all):
            runs.append(self.results(self.all, others))
            if not same_state(after, random_state(self.terms.device)):
                return None  # how many numbers are drawn depends on the logits: none can be assigned to a row
        second, first = self.replaced

        def pair(w: Tensor, one: Tensor, two: Tensor, *both: Tensor) -> Pair:
            if self.per_token:
                return w[first + second], torch.cat((one[first], two[second]))
            return w + both[0], one + two

        return self._first_difference(whole, runs, pair, "beside other tokens")

    def _first_difference(
        self, whole: list[Tensor], runs: list[list[Tensor]], pair: Callable[..., Pair], when: str
    ) -> str | None:
        """Return in words which results differ by more than rounding explains, as `pair` sets them side by side."""
        if (form := _forms(whole, *runs)) is not None:
            return form
        pairs = [pair(*results) for results in zip(whole, *runs, strict=True)]
        allowed = [self._rounding(values[0].dtype, _largest(*values)) for values in zip(whole, *runs, strict=True)]
        if all(_agree(*both, most) for both, most in zip(pairs, allowed, strict=True)):
            return None
        for same, again, most in zip(whole, self.results(self.all), allowed, strict=True):
            if not _agree(same, again, most):
                return NOT_THE_SAME_TWICE
        for i, ((one, two), most, noise) in enumerate(zip(pairs, allowed, self._noise(whole), strict=True)):
            if not _agree(one, two, most + noise):
                if not self.per_token:
                    return self._refusal(i, f"sums {one.tolist()} and {two.tolist()} that should be one {when}")
                changed = "" if one.shape != two.shape else (one != two).reshape(len(one), -1).any(1).sum().item()
                return self._refusal(i, f"differs {f'in {changed} of {len(one)} rows ' * (changed != '')}{when}")
        return None

    def _refusal(self, i: int, how: str) -> str:
        if self.per_token:
            hint = "It sees one chunk of the tokens at a time: reduce over the vocabulary only, and over tokens"
            hint, got = f"{hint} afterwards, on what linear_apply returns.", f"result {i}, which {how}"
            return message("fn", "results for a token that do not depend on the other tokens", got, hint)
        hint = "A mean does not add up, nor does a constant: return the sum and divide by the number of all tokens"
        hint = f'{hint} afterwards, or take out="token". What one token gets must not depend on the others.'
        return message("fn", 'scalars that add up over tokens with out="sum"', f"result {i}: {how}", hint)

    def _in_draws(self, whole: list[Tensor]) -> str | None:
        """Compare totals over all rows and over two parts, drawn anew each time: they must rank alike."""
        most = [
            self._rounding(leaf.dtype, leaf.double().abs().nan_to_num(0, 0, 0).sum()) + noise * leaf.numel()
            for leaf, noise in zip(whole, self._noise(whole), strict=True)
        ]
        sums: list[Tensor] = []  # of results, which may be as wide as the logits: not kept
        for rows in (self.all, *self.parts) * DRAWS:
            drawn = self.results(rows, again=False)
            if (form := _forms(whole, drawn)) is not None:
                return form
            sums.append(torch.stack([leaf.double().nan_to_num(0, 0, 0).sum() for leaf in drawn]))
        at_once, one, two = torch.stack(sums).view(DRAWS, 3, -1).unbind(1)
        split = one + two
        for i, allowed in enumerate(most):
            above = at_once[:, i, None] - split[:, i]
            rank = (above > allowed).double().mean() - (above < -allowed).double().mean()  # 0 on average; 1: all above
            if abs(rank.item()) > MOST_RANK:
                when = f"{at_once[:, i].median():.6g} for all rows and {split[:, i].median():.6g} for two parts of them"
                when = f"medians of {DRAWS} draws, {when}"
                return self._refusal(i, f"differs with the number of rows: {when}" if self.per_token else when)
        return None

    def _noise(self, whole: list[Tensor]) -> list[float]:
        """Return how far rounding may carry each result, from what it does where the logits are a little off."""
        kept = self.z.clone()
        self.shift(NOISE)
        shifted = self.results(self.all)
        self.z = kept
        pairs = zip(whole, shifted, strict=True)
        return [NOISE_MARGIN * _largest(near.double() - w.double()).item() for w, near in pairs]

    def _rounding(self, dtype: torch.dtype, largest: Tensor) -> float:
        """Return by how much results of a dtype may differ for rounding: a share of the largest of them."""
        if not dtype.is_floating_point:
            return 0.0
        narrow = dtype.itemsize < 4 or any(enabled for _, enabled, _ in self.terms.function.autocast)
        return largest.item() * (AUTOCAST_ROUNDING if narrow else ROUNDING)


def _largest(*values: Tensor) -> Tensor:
    """Return the largest finite magnitude, 0 where there is none."""
    every = torch.cat([x.double().reshape(-1) for x in (*values, values[0].new_zeros(1))])
    return every.abs().nan_to_num(0, 0, 0).amax()


def _forms(*results: Sequence[Tensor]) -> str | None:
    """Return in words that results differ in number or shape; None if they do not."""
    forms = [[list(leaf.shape[1:]) for leaf in leaves] for leaves in results]
    if all(form == forms[0] for form in forms):
        return None
    return message("fn", "results of the same number and shapes for any rows", " and ".join(map(str, forms)))


def _agree(one: Tensor, two: Tensor, allowed: float) -> bool:
    same = one.shape == two.shape
    return same and torch.allclose(one.double(), two.double(), rtol=0, atol=allowed, equal_nan=True)


def _key_of(terms: FunctionTerms) -> Any:
    """Return a key that differs between calls with other functions, shapes or dtypes."""
    function, weight_VD = terms.function, terms.head.weight_VD
    shapes = tuple((a.shape[len(function.leading) :], a.dtype) for a in terms.args)
    params = tuple((p.shape, p.dtype) for p in terms.params)
    return code_and_words(function.plain), function.per_token, weight_VD.shape, weight_VD.dtype, shapes, params
