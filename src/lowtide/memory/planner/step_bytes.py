"""What one training step holds in memory, and when: bytes by phase. Symbols as in `layer_bytes`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lowtide.memory.offload import ON_DEVICE
from lowtide.memory.optimizer_blocks import BLOCK_BYTES, layers_to_leave, share_away, share_back
from lowtide.memory.planner.job import Job
from lowtide.memory.planner.layer_bytes import PAGES, LayerBytes, masks_bytes
from lowtide.memory.planner.optimizers import OPTIMIZERS
from lowtide.memory.policy import ActivationPolicy

MIB = 2**20
# What cuBLAS takes in each of the two threads that multiply, forward's and backward's: from Hopper on, and before.
WORKSPACE, OLD_WORKSPACE = 32 * MIB, 8 * MIB + MIB // 8

Groups = Sequence[tuple[ActivationPolicy, int]]  # runs of equal layers, from the first layer on


@dataclass(frozen=True)
class Phase:
    """A moment of a step: its name, what it holds by kind, and the layer that is at work, where one is.

    Attributes:
        name: "forward", "head", "backward", "embedding" or "optimizer".
        layer: Index of the layer, -1 where it is none's.
        weights: Bytes of the parameters.
        optimizer: Bytes of the optimizer's states.
        gradients: Bytes of gradients that exist by then.
        activations: Bytes that layers keep for backward, and what of one was recomputed.
        head: Bytes of the output layer's scratch, and of the gradients that it holds.
        transients: Bytes that live within the phase alone.
        other: Workspaces, position embeddings, token ids.
        away: Share of the offloaded optimizer states that is on the host then.
        away_late: The same where they come back only behind backward.
    """

    name: str
    layer: int
    weights: int
    optimizer: int
    gradients: int
    activations: int
    head: int
    transients: int
    other: int
    away: float = 0.0
    away_late: float = 0.0

    @property
    def bytes(self) -> int:
        """Return the sum."""
        held = self.weights + self.optimizer + self.gradients + self.activations
        return held + self.head + self.transients + self.other

    def parts(self) -> dict[str, int]:
        """Return the bytes by kind."""
        names = ("weights", "optimizer", "gradients", "activations", "head", "transients", "other")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        return self.name if self.layer < 0 else f"{self.name} of layer {self.layer}"


def placed(groups: Groups) -> list[tuple[ActivationPolicy, int, bool]]:
    """Return the runs with whether what they keep goes to the host: not that of the last offloaded layers."""
    to_move = max(0, sum(n for policy, n in groups if policy.offload) - ON_DEVICE)
    found = []
    for policy, n in groups:
        moved = min(n, to_move) if policy.offload else 0
        to_move -= moved
        found += [(policy, m, moves) for m, moves in ((moved, True), (n - moved, False)) if m]
    return found


class Memory:
    """The bytes of one job, whichever policies its layers have."""

    def __init__(self, job: Job) -> None:
        self.job = job
        shape, e, N = job.shape, job.element, job.tokens
        self.kind = OPTIMIZERS[job.optimizer]
        self.weights = shape.params * e
        self.states = int(shape.params * (self.kind.states * e + self.kind.bytes_each))
        self.layer_gradients = shape.layer_params * e
        self.vocab_gradients = shape.vocab_params * e
        self.all_gradients = shape.params * e
        if (numbers := job.trained_adapters) is not None:  # float32, whatever the frozen weights are
            self.weights += 4 * numbers
            self.states = int(numbers * (4 * self.kind.states + self.kind.bytes_each))
            self.all_gradients = 4 * numbers
            self.layer_gradients, self.vocab_gradients = self.all_gradients // shape.layers, 0
        ids = 2 * 8 * N  # and labels
        positions = job.seq_len * (8 + 2 * shape.head_dim * e)  # with their cosines and sines, for all layers
        workspace = WORKSPACE if job.gpu.capability >= (9, 0) else OLD_WORKSPACE
        self.other = 2 * workspace + ids + positions + masks_bytes(job)
        # Where it is tied, the weight's gradient from the head waits for the embedding's, beside one that was there.
        self.waiting = self.vocab_gradients if shape.tied and job.keep_gradients else 0
        self.stream = N * shape.hidden * e
        # Beside the MLP's product stands the gradient of the weight behind it. When that of gate's weight comes, the
        # product is gone, and when that of up's comes, gate is too: with few tokens those later moments hold more.
        mlp, product = shape.mlp_params * e, N * shape.token_mlp_width() * job.narrow
        if job.adapters is not None:
            mlp = 0
        self.mlp_gradients = mlp if shape.experts else mlp // 3 + 2 * max(0, mlp // 3 - product)
        self._of: dict[tuple[ActivationPolicy, bool], LayerBytes] = {}

    def peak(self, groups: Groups, states: int = 0, *, late: bool = False) -> Phase:
        """Return the phase that holds the most."""
        return max(self.phases(groups, states, late=late), key=lambda phase: phase.bytes)

    def peaks(self, groups: Groups, amounts: Sequence[int]) -> dict[bool, list[int]]:
        """Return the bytes of that phase for several amounts of offloaded states: by whether they come back late."""
        found = [(phase.bytes, phase.away, phase.away_late) for phase in self._phases(groups)]
        early = [max(held - int(amount * away) for held, away, _ in found) for amount in amounts]
        return {False: early, True: [max(held - int(n * late) for held, _, late in found) for n in amounts]}

    def of(self, policy: ActivationPolicy, *, moves: bool = False) -> LayerBytes:
        """Return the bytes of one layer, whose checkpoint goes to the host where it ``moves``."""
        found = self._of.get((policy, moves))
        if found is None:
            found = self._of[policy, moves] = LayerBytes(self.job, policy, moves=moves)
        return found

    def kept(self, groups: Groups) -> int:
        """Return the bytes that all layers keep on the GPU between forward and backward."""
        return sum(n * self.of(policy, moves=moves).on_gpu for policy, n, moves in placed(groups))

    def host(self, groups: Groups) -> int:
        """Return the bytes that layers keep in host memory."""
        return sum(n * self.of(policy, moves=moves).on_host for policy, n, moves in placed(groups))

    def states_on_host(self, states: int) -> int:
        """Return the host memory that so many bytes of optimizer states take."""
        return states + (states // BLOCK_BYTES + 2) * PAGES

    def phases(self, groups: Groups, states: int = 0, *, late: bool = False) -> list[Phase]:
        """Return the phases that can hold the most: in a run of equal layers that is its first or its last.

        With ``states`` bytes of optimizer states offloaded, also the layers from which on they leave, and by which they
        are back; in between the bytes are a linear function of the layer. ``late`` ones come back behind backward.
        """
        found = self._phases(groups)
        if not states:  # which the search asks for of every mixture
            return found
        away = [int(states * (phase.away_late if late else phase.away)) for phase in found]
        return [replace(phase, optimizer=phase.optimizer - n) for phase, n in zip(found, away, strict=True)]

    def _phases(self, groups: Groups) -> list[Phase]:
        head = self.job.head_plan
        kept = self.kept(groups) + 2 * self.stream  # and the final norm's input and output
        held = self.stream + self.vocab_gradients  # gradients that the head holds until its backward
        new = self.job.shape.tied or self.job.keep_gradients  # the embedding's gradient is not the first there
        found = self._layers(groups)
        if self.job.adapters is not None:  # a frozen weight has no gradient to add up
            held += head.scratch_bytes
        elif head.accumulator_bytes:  # the gradient itself is made from it when the scratch is gone
            held += head.accumulator_bytes + max(0, head.scratch_bytes - self.vocab_gradients)
        else:
            held += head.scratch_bytes
        held += head.cast_bytes
        found.append(self._phase("head", -1, 0, kept, held, away=1.0, away_late=1.0))
        # its kernel adds up the rows of each token in float32 first
        beside = self.stream + 4 * self.job.tokens * self.job.shape.hidden + self.waiting
        beside += self.vocab_gradients if new else 0
        found.append(self._phase("embedding", -1, self.all_gradients, 0, 0, beside, away_late=1.0))
        temporary = self.kind.temporary * self.all_gradients
        found.append(self._phase("optimizer", -1, self.all_gradients, 0, 0, temporary))
        return found

    def _layers(self, groups: Groups) -> list[Phase]:
        layers = self.job.shape.layers
        turns = (1, layers_to_leave(layers) - 1)
        found, first, upto, leaving = [], 0, 0, 0
        for policy, n, moves in placed(groups):
            one = self.of(policy, moves=moves)
            last = first + n - 1
            for layer in sorted({first, last, *(min(max(first, at), last) for at in turns)}):
                kept = upto + (layer + 1 - first) * one.on_gpu
                # On their way: the checkpoint of the layer before, fetched ahead; in forward its own as well.
                before = leaving if layer == first else one.on_host
                away = one.on_host + before
                left = share_away(layer, layers)
                found.append(self._phase("forward", layer, 0, kept + away, 0, one.forward, left, left))
                done = (layers - 1 - layer) * self.layer_gradients + self.vocab_gradients + self.mlp_gradients
                new = self.mlp_gradients + self.waiting if self.job.keep_gradients else 0
                left = 1 - share_back(layers - 1 - layer, layers)
                held = kept + one.again + before
                found.append(self._phase("backward", layer, done, held, 0, one.backward + new, left, 1.0))
            leaving = one.on_host
            upto += n * one.on_gpu
            first += n
        return found

    def _phase(
        self,
        name: str,
        layer: int,
        gradients: int,
        activations: int,
        head: int = 0,
        transients: int = 0,
        away: float = 0.0,
        away_late: float = 0.0,
    ) -> Phase:
        if self.job.keep_gradients:
            gradients = self.all_gradients
        return Phase(
            name=name,
            layer=layer,
            weights=self.weights,
            optimizer=self.states,
            gradients=gradients,
            activations=activations,
            head=head,
            transients=transients,
            other=self.other,
            away=away,
            away_late=away_late,
        )
