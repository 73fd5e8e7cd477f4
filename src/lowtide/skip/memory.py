"""What is remembered of a weight between calls: the threshold, the order of its classes, and whether skipping pays.

V classes. The threshold T is what a call's tiles may lose of the gradient of the logits, relative. It is
steered by the errors of dX and dW, which some calls measure. All of it is on the device; the host never waits: how many
tiles a call kept it reads AFTER calls later, when the number has arrived long ago.
"""

import math
from collections.abc import Callable, MutableMapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lowtide.head.rows import sent

FIRST = 0.012  # the first threshold, over the error that is accepted
NEAR = 0.9  # of what is accepted, what is aimed at
SHARED = (0.8e-3, 1.4e-3)  # errors of bfloat16 in dX and dW that a comparison does not see
LEAST, MOST = 1e-4, 2.0  # the threshold over the error that is accepted
FALLS, GROWS_AT_FIRST = 0.5, 2.0  # of the threshold, from one comparison to the next, at most
NEARLY, GROWS = 1.2, 1.1  # the growth below which it is nearly found, and what it grows by at most from then on
NEW = 0.125  # weight of a comparison in the running mean of squares from then on: 16 signs estimate an error to 15%
CAREFUL = 0.6  # the power of what it would grow by, were errors in proportion to it: they may grow faster
BELOW = 1.03  # the threshold over what calls of many tiles lose: all of a bin stay, or none
SMALL = 5.0  # the threshold over the first one, up to which it grows where a call loses nothing, which says little
COMPARED = 17  # the first passes, which are all compared, and of later ones one in so many: each micro-batch's turn
PAYS = 0.65  # the share of tiles below which a call that skips is faster
PROBE = 31  # calls, of which one skips where that does not pay: odd, for each micro-batch in turn
AFTER = 4  # calls
EVERY = 64  # passes after which the order is made anew, and before at the powers of two
MEMORY = 0.8  # of the running mean of probabilities


class Report(NamedTuple):
    """What the last call that skipped did.

    Attributes:
        share: Of the tiles of 128 tokens by 256 classes, those that were computed, from 0 to 1.
        dropped_mass: The mean over tokens, by their factors, of the probability in tiles that were not, with a soft cap
            times its slope.
        logit_error: ``||G' - G|| / ||G||`` of this call, G the gradient with respect to the logits and G' what stands
            for it; no number where G is 0. See docs/skipping.md.
        input_error: ``||dX - dX'|| / ||dX'||``, with dX' from all tiles: ``logit_error`` times the two errors' ratio
            in the last comparisons.
        weight_error: The same of dW.
        threshold: The most that the next call's ``logit_error`` may be.
        calls: With this weight and ``skip``, so far.
        dense: Those of them that skipped nothing.
    """

    share: float
    dropped_mass: float
    logit_error: float
    input_error: float
    weight_error: float
    threshold: float
    calls: int
    dense: int


class Remembered:
    """What is remembered of one weight."""

    reported: Tensor  # float32 [3] of the last pass: see `choice.choose`

    def __init__(self, accepted: float, V: int, device: torch.device) -> None:
        self.order = torch.arange(-1, V, dtype=torch.int32, device=device)  # V, and the classes in order
        self.order[0] = V
        self.probabilities: Tensor | None = None  # float32 [V]: the mean of tokens'
        self.accepted = accepted
        self.calls = self.skipped = 0  # calls, and those that skipped
        self.passes = 0  # that skipped: several calls may come before the backward pass of each
        self.threshold = torch.full((1,), FIRST * accepted, dtype=torch.float32, device=device)
        self.grows = torch.full_like(self.threshold, GROWS_AT_FIRST)
        self.rates = torch.zeros(2, dtype=torch.float32, device=device)  # errors of dX and dW, over what a pass lost
        self.total = torch.zeros(2, dtype=torch.int32, device=device)  # tiles kept, and all, of the last pass
        self._pays = True
        self._arriving: tuple[int, Callable[[], list[int]]] | None = None  # a call, and a wait for its `total`

    def accept(self, error: float) -> None:
        """Take the error that a call accepts: where it is smaller, the threshold falls with it."""
        if error != self.accepted:
            self.threshold = self.threshold * min(1.0, error / self.accepted)
            self.accepted = error

    def begin(self) -> bool:
        """Begin a call; return whether it skips tiles: also where the threshold is still far from what it will be."""
        n = self.calls
        self.calls += 1
        if self._arriving is not None and n >= self._arriving[0] + AFTER:
            kept, tiles = self._arriving[1]()
            self._pays, self._arriving = kept < PAYS * tiles, None
        return self._pays or self.passes < COMPARED or n % PROBE == 0

    @property
    def sees(self) -> bool:
        """Whether the present pass sums its tokens' probabilities, from which the order is made anew."""
        return self.passes & (self.passes - 1) == 0 or self.passes % EVERY == 0

    def see(self, total_V: Tensor) -> None:
        """Take what tokens' probabilities sum to: the classes are in the order of their running mean."""
        mean = total_V / total_V.sum().clamp(min=1e-30)
        self.probabilities = mean if self.probabilities is None else self.probabilities.lerp(mean, 1 - MEMORY)
        classes = self.probabilities.argsort(descending=True, stable=True)
        self.order = torch.cat((self.order[:1], classes.int()))

    @property
    def compares(self) -> bool:
        """Whether the present pass measures its errors, as each does that skips where that does not pay."""
        return self.passes < COMPARED or self.passes % COMPARED == 0 or not self._pays

    def end(self, reported: Tensor, errors: Tensor | None) -> None:
        """End a pass that skipped, with the errors that it measured."""
        self.reported = reported
        if errors is not None:
            lost = self.lost()
            of_pass = (errors / lost).where(lost > 0, self.rates)
            rates = self.rates.square().lerp(of_pass.square(), (self.grows > GROWS).float().clamp(min=NEW)).sqrt()
            found = torch.cat((*adapted(self.threshold, self.grows, rates * lost, lost, self.accepted), rates))
            before = torch.cat((self.threshold, self.grows, self.rates))
            known = found.isfinite().all()
            self.threshold, self.grows, self.rates = torch.split(found.where(known, before), [1, 1, 2])
        self.passes += 1
        if self._arriving is None:
            self._arriving = self.calls - 1, sent(self.total)

    def lost(self) -> Tensor:
        """Return what the last pass lost of the gradient of the logits, relative [1]."""
        return torch.sqrt(self.reported[1:2] / self.reported[2])

    def report(self) -> Report | None:
        """Return what the last call that skipped did, None before it; the host waits for the device."""
        if not self.passes:
            return None
        kept, tiles = self.total.tolist()
        lost = self.lost()
        measured = torch.cat((self.reported[:1], lost, self.rates * lost, self.threshold)).tolist()
        return Report._make((kept / max(1, tiles), *measured, self.calls, self.calls - self.skipped))


def adapted(threshold: Tensor, grows: Tensor, errors: Tensor, lost: Tensor, accepted: float) -> tuple[Tensor, Tensor]:
    """Return the threshold changed by the errors of dX and dW [2], so that neither is above what is accepted.

    And what it may grow by next time: little, once it is nearly found, for other calls may be unlike the one that is
    compared. Where a call lost less than it might have, as its tiles are few, it is aimed at from what was lost; where
    nothing was lost it grows only while it is small.
    """
    least = (LEAST * accepted) ** 2
    allowed = [math.sqrt(max((NEAR * accepted) ** 2 - shared**2, least)) for shared in SHARED]
    aimed = torch.minimum(allowed[0] / errors[0], allowed[1] / errors[1])
    small = threshold < SMALL * FIRST * accepted
    aimed = torch.where(small | (lost == 0), aimed, aimed * BELOW * lost / threshold)
    change = aimed.where(aimed < 1, aimed**CAREFUL)
    value = threshold * torch.minimum(change, torch.where(small | (lost > 0), grows, 1)).clamp(min=FALLS)
    return value.clamp(LEAST * accepted, MOST * accepted), torch.where(~small & (change < NEARLY), GROWS, grows)


# of each leaf: what is remembered by the place of a weight in it
_remembered: MutableMapping[Tensor, dict[tuple[object, ...], Remembered]] = WeakTensorKeyDictionary()


def remembered_of(weight: Tensor, accepted: float) -> Remembered:
    """Return what is remembered of a weight, made at the first call."""
    known = known_of(weight)
    if known is None:
        known = Remembered(accepted, len(weight), weight.device)
        _remembered.setdefault(leaf_of(weight), {})[_place(weight)] = known
    known.accept(accepted)
    return known


def known_of(weight: Tensor) -> Remembered | None:
    """Return what is remembered of a weight, None before the first call that may skip tiles."""
    found: Remembered | None = _remembered.get(leaf_of(weight), {}).get(_place(weight))
    return found


def leaf_of(weight: Tensor) -> Tensor:
    """Return the tensor that outlives a call: views may be made in each."""
    return weight if weight._base is None else weight._base


def _place(weight: Tensor) -> tuple[object, ...]:
    return weight.device, weight.shape, weight.stride(), weight.storage_offset()
