"""What is remembered of a weight whose gradients skip tiles: the order of its classes, the threshold, the share kept.

V classes, D hidden size, n tokens. Classes lie in bands of falling mean probability, and in a band by the cluster of
their rows of the weight: a tile then holds classes that are likely at the same tokens, and whose rows are like their
mean. The mean probabilities are running means of a chunk's, taken at some calls; between them nothing is computed.

The host never waits: how many tiles a call kept it heeds AFTER calls later, when the number has arrived long ago. Where
so many stay that skipping does not pay, calls are dense, but for one in PROBE.
"""

from collections import deque
from collections.abc import Callable, MutableMapping
from itertools import count
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lowtide.head.host_numbers import host_memory, sent
from lowtide.head.threshold import Errors, Threshold

BAND, CLUSTERS, ROUNDS = 16384, 64, 3
PAYS = 0.65  # the share of tiles below which a call that skips is faster
PROBE = 31  # calls, of which one skips where that does not pay: odd, for each micro-batch in turn
AFTER, AT_ONCE = 4, 8  # calls; numbers under way
STEADY = (0.9, 1.15)  # changes of the threshold beyond which the next passes are compared too; above `threshold.SLOW`
HIGHER = 1.02  # the threshold over the highest one before, from which on it still grows
COMPARED = 17  # passes that are all compared, the first ones, and of later ones one in so many: each micro-batch's turn
EVERY = 64  # passes after which the order is refreshed, and before at the powers of two
MEMORY = 0.8  # of the running mean


class Asked(NamedTuple):
    """What `HeadOptions` ask for."""

    error: float  # that is accepted
    unbiased: bool
    seed: int


class Report(NamedTuple):
    """What the last call that skipped did.

    Attributes:
        share: Of the tiles of 128 tokens by 256 classes, those that were computed, from 0 to 1.
        dropped_mass: The mean over tokens, by their factors, of the probability in tiles that were not, with a soft cap
            times its slope. Without bias a tile that stands for others counts as less than nothing, and the mean is
            near 0.
        logit_error: ``||G' - G|| / ||G||`` of this call, G the gradient with respect to the logits and G' what stands
            for it; no number where G is 0. See docs/skipping.md.
        input_error: ``||dX - dX'|| / ||dX'||``, with dX' from all tiles, as the last comparison found it.
        weight_error: The same of dW.
        threshold: The most that the next call's ``logit_error`` may be; without bias, in the mean.
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


class VocabularyOrder:
    """The order of one weight's classes, and what the calls before have found."""

    def __init__(self, asked: Asked, number: int) -> None:
        self.asked, self.number = asked, number
        self.calls = self.dense = 0
        self.ended = 0  # passes that skipped; the others are dense
        self._compared = 0  # the last pass that was
        self.order: Tensor | None = None  # int32 [1 + V]: V, and the classes in order
        self.inverse: Tensor | None = None  # int32 [V]: each class's place
        self.mean: Tensor | None = None  # float32 [V]
        self.threshold: Threshold | None = None
        self.total: Tensor | None = None  # int32 [2]: tiles kept, and all, of the last call
        self.sums: Tensor | None = None  # float32 [3, .]: of the last call, see `kept_tiles.Choice`
        self.tokens: Tensor | None = None  # float32: the sum of these rows' g
        self._numbers: Tensor | None = None
        self._signs: Tensor | None = None
        self._seen: Tensor | None = None
        self._arriving: deque[tuple[int, Callable[[], None], Tensor]] = deque()
        self._shares: deque[float] = deque(maxlen=4)
        self._change = 1.0  # of the threshold, the last one that is heeded
        self._highest = 0.0  # threshold that is heeded
        self._grown = False  # whether it is higher since the last pass that was compared

    def ask(self, asked: Asked) -> None:
        """Take what a call asks for: where a smaller error is, the threshold falls with it."""
        (error, unbiased, _), before = asked, self.asked
        if self.threshold is not None and (error, unbiased) != before[:2]:
            if unbiased == before.unbiased:
                self.threshold = self.threshold.scaled(min(1.0, error / before.error))
            else:
                self.threshold = Threshold.first(error, self.threshold.value.device)
                self._highest = 0.0
        self.asked = asked

    def adapt(self, errors: Errors) -> None:
        """Change the threshold by the errors of dX and dW."""
        assert self.threshold is not None
        self.threshold = self.threshold.adapted(errors, self.lost(), self.asked.error)
        self._compared, self._grown, self._change = self.passes, False, 1.0

    def lost(self) -> Tensor:
        """Return what the last call that skipped lost of the logits' gradient, relative."""
        assert self.sums is not None
        sums = self.sums.sum(1)
        return torch.sqrt(sums[1] / sums[2])

    def signs(self, like: Tensor) -> Tensor:
        """Return random signs [D, 16], always the same."""
        if self._signs is None:
            random = torch.Generator(like.device).manual_seed(0)
            self._signs = torch.randint(0, 2, (like.shape[1], 16), generator=random, device=like.device) * 2 - 1
        return self._signs.to(like.dtype)

    @property
    def seed(self) -> int | None:
        """Return the seed of the present pass's random numbers, None where there are none."""
        return (self.asked.seed * 1000003 + self.ended) % 2**31 if self.asked.unbiased else None

    @property
    def passes(self) -> int:
        """Return how many passes have computed gradients: several calls may come before the backward pass of each."""
        return self.ended + self.dense

    @property
    def refreshes(self) -> bool:
        """Whether the present pass takes the mean probabilities, from which the order follows."""
        n = self.passes
        return n & (n - 1) == 0 or n % EVERY == 0

    @property
    def compares(self) -> bool:
        """Whether the present pass finds its errors, as each does that skips where that does not pay."""
        n = self.passes
        turn = n < COMPARED or n // COMPARED > self._compared // COMPARED
        return turn or self._grown or not STEADY[0] <= self._change <= STEADY[1]

    def begin(self) -> bool:
        """Begin a call; return whether it skips tiles: also where the threshold is still far from what it will be."""
        n = self.calls
        self.calls += 1
        while self._arriving and self._arriving[0][0] <= n - AFTER:
            _, wait, number = self._arriving.popleft()
            wait()
            kept, tiles, self._change, value = number.tolist()
            higher = value > HIGHER * self._highest  # and not as before, after it fell: that may go on for ever
            self._highest, self._grown = max(self._highest, value), self._grown or higher
            self._shares.append(0 if higher or self._change > STEADY[1] else kept / max(1, tiles))
        pays = not self._shares or min(self._shares) < PAYS
        return self.order is not None and (pays or n % PROBE == 0)

    def end(self) -> None:
        """End a pass that skipped: its numbers begin to arrive, in the place of an earlier one's not yet heeded."""
        assert self.total is not None
        assert self.threshold is not None
        if self._numbers is None:
            self._numbers = host_memory(AT_ONCE, 4)
        number = self._numbers[self.ended % AT_ONCE]
        self.ended += 1
        while len(self._arriving) >= AT_ONCE:
            self._arriving.popleft()
        wait = sent(torch.cat((self.total.float(), self.threshold.change, self.threshold.value)), number)
        self._arriving.append((self.calls - 1, wait, number))

    def see(self, total_V: Tensor) -> None:
        """Take the sums of some tokens' probabilities, in the classes' own order."""
        self._seen = total_V if self._seen is None else self._seen + total_V

    def refresh(self, w_VD: Tensor) -> None:
        """Order the classes anew, if probabilities have been seen."""
        if self._seen is None:
            return
        mean, V = self._seen / self._seen.sum().clamp(min=1e-30), len(w_VD)
        self.mean = mean if self.mean is None else self.mean * MEMORY + mean * (1 - MEMORY)
        self._seen = None
        by_mean = self.mean.argsort(descending=True, stable=True)
        band = torch.arange(V, device=w_VD.device) // BAND
        cluster = _clusters(w_VD, by_mean)[by_mean]
        classes = by_mean[(band * CLUSTERS + cluster).argsort(stable=True)]
        self.order = torch.cat((classes.new_full((1,), V), classes)).int()
        self.inverse = inverse_of(self.order)
        if self.threshold is None:
            self.threshold = Threshold.first(self.asked.error, w_VD.device)
            self.total = torch.zeros(2, dtype=torch.int32, device=w_VD.device)

    def report(self) -> Report | None:
        """Return what the last call that skipped did, None before it; the host waits for the device."""
        if self.threshold is None or self.total is None or self.sums is None or self.tokens is None:
            return None
        kept, tiles = self.total.tolist()
        mass, of_logits = float(self.sums[0].sum() / self.tokens), float(self.lost())
        (of_input, of_weight), value = self.threshold.errors.tolist(), float(self.threshold.value)
        share = kept / max(1, tiles)
        return Report(share, mass, of_logits, of_input, of_weight, value, self.calls, self.dense)


def inverse_of(order: Tensor) -> Tensor:
    """Return each class's place in an order of V and the classes."""
    places = torch.arange(len(order) - 1, dtype=order.dtype, device=order.device)
    return torch.empty_like(places).index_copy_(0, order[1:].long(), places)


def _clusters(w_VD: Tensor, by_mean: Tensor) -> Tensor:
    """Return each class's cluster, by the directions of the rows from their mean: spherical k-means."""
    V = len(w_VD)
    w = w_VD if w_VD.dtype == torch.bfloat16 else w_VD.bfloat16()
    center = torch.ones(1, V, dtype=w.dtype, device=w.device).mm(w).float() / V
    length = torch.linalg.vector_norm(w, dim=1, dtype=torch.float32).square()
    length = (length - 2 * w.mv(center[0].to(w.dtype)).float() + center.square().sum()).clamp(min=1e-20).sqrt()
    likely = by_mean[: min(V, BAND)]
    centroids = w[likely[:: max(1, len(likely) // CLUSTERS)][:CLUSTERS]].float() - center
    number = len(centroids)
    nearest = by_mean
    for _ in range(ROUNDS):
        centroids = torch.nn.functional.normalize(centroids, dim=1)
        nearest = (w.mm(centroids.T.to(w.dtype)).float() - center.mm(centroids.T)).argmax(1)
        members = torch.zeros(number, V, dtype=w.dtype, device=w.device)
        members[nearest, torch.arange(V, device=w.device)] = (1 / length).to(w.dtype)
        centroids = members.mm(w).float() - members.float().sum(1, keepdim=True) * center
    return nearest


# of each leaf: an order by the place of a weight in it
_orders: MutableMapping[Tensor, dict[tuple[object, ...], VocabularyOrder]] = WeakTensorKeyDictionary()
_by_number: WeakValueDictionary[int, VocabularyOrder] = WeakValueDictionary()
_numbers = count(1)


def order_of(weight: Tensor, asked: Asked) -> VocabularyOrder:
    """Return what is remembered of a weight, made at the first call."""
    known = known_order(weight)
    if known is None:
        known = VocabularyOrder(asked, next(_numbers))
        _orders.setdefault(leaf_of(weight), {})[_place(weight)] = _by_number[known.number] = known
    known.ask(asked)
    return known


def known_order(weight: Tensor) -> VocabularyOrder | None:
    """Return what is remembered of a weight, None before the first call that may skip tiles."""
    found: VocabularyOrder | None = _orders.get(leaf_of(weight), {}).get(_place(weight))
    return found


def last_report() -> Report | None:
    """Return what the last call that skipped did, of the weight that was last to get an order."""
    reports = (known.report() for _, known in sorted(_by_number.items(), reverse=True))
    return next((report for report in reports if report is not None), None)


def leaf_of(weight: Tensor) -> Tensor:
    """Return the tensor that outlives a call: views may be made in each."""
    return weight if weight._base is None else weight._base


def _place(weight: Tensor) -> tuple[object, ...]:
    return weight.device, weight.shape, weight.stride(), weight.storage_offset()


def numbered(number: int) -> VocabularyOrder:
    """Return the one of this number: operators take no objects."""
    return _by_number[number]
