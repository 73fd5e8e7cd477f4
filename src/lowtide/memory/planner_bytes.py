"""What one training step holds in memory, and when: bytes by phase, from a model's shape and what its layers keep.

N tokens of a batch, h hidden size, f intermediate size, e bytes of a parameter and of the residual stream, n bytes of
what the products read and write: the same, but 2 under autocast. Layers are those of a patched model
(`lowtide.patch`: fused norms, rotary embedding and MLP), with attention that builds no scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from lowtide.head.head_plan import HeadPlan
from lowtide.head.options import HeadOptions
from lowtide.head.plan import plan_head
from lowtide.memory.offload import ON_DEVICE
from lowtide.memory.optimizer_blocks import BLOCK_BYTES, layers_to_leave, share_away, share_back
from lowtide.memory.planner_gpus import Gpu
from lowtide.memory.planner_shapes import ModelShape
from lowtide.memory.policy import ActivationPolicy

MIB = 2**20
# What cuBLAS takes in each of the two threads that multiply, forward's and backward's: from Hopper on, and before.
WORKSPACE, OLD_WORKSPACE = 32 * MIB, 8 * MIB + MIB // 8
PAGES = 6 * 4096  # what a layer's buffers in host memory are rounded up by, at most
FLASH_ACCUMULATOR = 4  # bytes of each number of the query gradient's float32 sum


@dataclass(frozen=True)
class Optimizer:
    """Bytes an optimizer takes for each byte, or each number, of the parameters.

    Attributes:
        states: Tensors of the parameters' size and dtype that it keeps.
        bytes_each: Bytes it keeps for each number besides.
        temporary: Tensors of all parameters' size that its step makes.
        traffic: Times that a copy would read or write the parameters' bytes in the time of a step, as measured.
    """

    states: int
    bytes_each: float = 0.0
    temporary: int = 0
    traffic: float = 3.0


OPTIMIZERS = {
    "adamw": Optimizer(2, traffic=8.1),
    "adamw-foreach": Optimizer(2, temporary=1, traffic=21),
    "adamw-8bit": Optimizer(0, bytes_each=2 + 2 * 4 / 256, traffic=6),
    "sgd": Optimizer(0, traffic=3),
    "sgd-momentum": Optimizer(1, traffic=8.2),
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Job:
    """A training step that is planned: what of, how long, and with what.

    Attributes:
        shape: The model.
        seq_len: Tokens of a sequence.
        batch_size: Sequences.
        gpu: Where.
        dtype: Of parameters, activations, gradients and optimizer states.
        optimizer: A name of `OPTIMIZERS`.
        keep_gradients: Whether gradients stay between backward passes, as they do where they are accumulated.
        head: How the loss is to run.
        autocast: Whether the products run in bfloat16 under autocast, with ``dtype`` float32.
        adapters: Numbers of float32 adapters in the layers that are all that is trained (LoRA); None: the model is.
    """

    shape: ModelShape
    seq_len: int
    batch_size: int
    gpu: Gpu
    dtype: torch.dtype
    optimizer: str
    keep_gradients: bool = False
    head: HeadOptions | None = None
    autocast: bool = False
    adapters: int | None = None

    @property
    def tokens(self) -> int:
        """Return the tokens of a step."""
        return self.seq_len * self.batch_size

    @property
    def element(self) -> int:
        """Return the bytes of a parameter, and of a number of the residual stream."""
        return self.dtype.itemsize

    @property
    def operand(self) -> torch.dtype:
        """Return the dtype of what the products read and write."""
        return torch.bfloat16 if self.autocast else self.dtype

    @property
    def narrow(self) -> int:
        """Return the bytes of a number that a product reads or writes."""
        return self.operand.itemsize

    @cached_property
    def head_plan(self) -> HeadPlan:
        """Return what the output layer will do, by its own reckoning."""
        return plan_head(
            self.tokens,
            self.shape.hidden,
            self.shape.vocab,
            self.operand,
            "cuda",
            self.head,
            weight_dtype=self.dtype,
            input_is_copied=self.autocast,
            capability=self.gpu.capability,
            device_bytes=self.gpu.memory_bytes,
        )


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


def kept_by_operation(job: Job, mlp_level: int) -> dict[str, int]:
    """Return the bytes a token that a layer keeps when it keeps all, by what they are; each tensor once.

    The layer's output is the next one's input and not counted; a norm keeps its input and a float32 a row, the rotary
    embedding nothing, attention what it reads and writes and a float32 a head. Under autocast the products to queries,
    keys and values make a copy of their input each, and keep it.
    """
    shape, n = job.shape, job.narrow
    stream, queries, keys = shape.hidden * job.element, shape.query_width * n, shape.kv_width * n
    kept = {
        "layer input": stream,
        "norms' statistics": 4 * shape.layer_norms,
        "attention's input": (3 if job.autocast else 1) * shape.hidden * n,
        "queries, keys, values": queries + 2 * keys,
        "attention's output": queries + 4 * shape.heads,
        "MLP's input": 2 * stream,  # before its norm and behind it
    }
    if shape.head_norms:
        kept["queries and keys before their norms"] = queries + keys + 4 * (shape.heads + shape.kv_heads)
    if shape.heads_first:
        kept["attention's output, tokens first"] = queries
    if shape.layer_norms > 2:
        kept["outputs of attention and MLP before their norms"] = (shape.layer_norms - 2) * shape.hidden * n
    if shape.experts:
        visits = shape.experts_per_token
        kept["experts' inputs and outputs"] = 2 * visits * stream
        kept["router's probabilities and indices"] = 16 * (shape.experts + visits)
        kept["experts' gate, up, activation and product"] = visits * 4 * shape.intermediate * n
    elif mlp_level == 0:
        kept["gate and up"] = 2 * shape.intermediate * n
    return kept


def full_bytes(job: Job, mlp_level: int) -> int:
    """Return the bytes that a layer keeps when it keeps all: under autocast also copies of attention's weights."""
    copies = job.shape.projection_params * job.narrow if job.autocast else 0
    return job.tokens * sum(kept_by_operation(job, mlp_level).values()) + copies


def checkpoint_bytes(job: Job, policy: ActivationPolicy) -> int:
    """Return the bytes that a layer keeps for backward by a policy, wherever they lie."""
    if policy.keep == "all":
        return full_bytes(job, level_of(policy))
    kept = kept_by_operation(job, 0)
    names = ["layer input", "attention's output"] if policy.keep == "attention" else ["layer input"]
    return job.tokens * sum(kept[name] for name in names)


def level_of(policy: ActivationPolicy) -> int:
    """Return the level of the layer's MLP: 0 where the policy leaves it as it is."""
    return policy.mlp_level or 0


def forward_transients(job: Job, policy: ActivationPolicy) -> int:
    """Return the most that a layer's forward holds beyond what it keeps, in its MLP: the product and the output.

    Level 1 has gate and up besides, and the product in gate's place; a layer that is to be recomputed has all three,
    and what the MLP reads and is added to.
    """
    shape, level = job.shape, level_of(policy)
    whole = policy.keep == "all"
    wide = (1 if whole else 3) if level == 0 else 2
    streams = 0 if whole else 2 * shape.hidden * job.element
    mlp = wide * shape.token_mlp_width() * job.narrow * _at_a_time(job, policy)
    return mlp + job.tokens * (shape.hidden * job.narrow + streams) + _mlp_copies(job, 1)


def backward_transients(job: Job, policy: ActivationPolicy) -> int:
    """Return the most that a layer's backward holds beyond its activations and its weights' gradients.

    In the MLP: the gradients of its output and input, and that of the product, in whose place the product comes; level
    1 builds gate and up besides. In attention, when the MLP's activations are gone: the gradients of the stream, of its
    output, of queries (summed in float32 beside), keys and values.
    """
    shape, level, n = job.shape, level_of(policy), job.narrow
    width = shape.token_mlp_width()
    mlp = _at_a_time(job, policy) * width * (1 if level == 0 else 3) * n + job.tokens * 2 * shape.hidden * job.element
    if _at_a_time(job, policy) < job.tokens:  # the weights' gradients are summed in float32, and rounded one by one
        mlp += 4 * shape.mlp_params
    # gradients of keys and values for each query head, before those that share one are added
    each_query = 2 * shape.query_width if shape.kv_heads < shape.heads else 0
    sums = shape.query_width * FLASH_ACCUMULATOR + 4 * shape.heads
    freed = (2 * width if level == 0 else 0) * n + 2 * shape.hidden * job.element
    attention = (
        (2 * shape.query_width + 2 * shape.kv_width + each_query) * n + shape.hidden * job.element + sums - freed
    )
    return max(mlp + _mlp_copies(job, 2), job.tokens * attention)


def _at_a_time(job: Job, policy: ActivationPolicy) -> int:
    """Return the tokens that a layer's MLP works on at a time; level 0 keeps gate and up of all."""
    return min(job.tokens, policy.mlp_tile_tokens or job.tokens) if level_of(policy) == 1 else job.tokens


def _mlp_copies(job: Job, rows: int) -> int:
    """Return the bytes of what autocast's MLP copies: its weights, and so many tensors of the stream's size."""
    if not job.autocast:
        return 0
    return (3 * job.shape.hidden * job.shape.intermediate + rows * job.tokens * job.shape.hidden) * job.narrow


Groups = Sequence[tuple[ActivationPolicy, int]]  # runs of equal layers, from the first layer on


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
        if job.adapters is not None:  # float32, whatever the frozen weights are
            self.weights += 4 * job.adapters
            self.states = int(job.adapters * (4 * self.kind.states + self.kind.bytes_each))
            self.all_gradients = 4 * job.adapters
            self.layer_gradients, self.vocab_gradients = self.all_gradients // shape.layers, 0
        ids = 2 * 8 * N  # and labels
        positions = job.seq_len * (8 + 2 * shape.head_dim * e)  # with their cosines and sines, for all layers
        workspace = WORKSPACE if job.gpu.capability >= (9, 0) else OLD_WORKSPACE
        self.other = 2 * workspace + ids + positions
        # Where it is tied, the weight's gradient from the head waits for the embedding's, beside one that was there.
        self.waiting = self.vocab_gradients if shape.tied and job.keep_gradients else 0
        self.stream = N * shape.hidden * e
        # Beside the MLP's product stands the gradient of the weight behind it. When that of gate's weight comes, the
        # product is gone, and when that of up's comes, gate is too: with few tokens those later moments hold more.
        mlp, product = shape.mlp_params * e, N * shape.token_mlp_width() * job.narrow
        if job.adapters is not None:
            mlp = 0
        self.mlp_gradients = mlp if shape.experts else mlp // 3 + 2 * max(0, mlp // 3 - product)
        self._of: dict[tuple[ActivationPolicy, bool], _LayerBytes] = {}

    def peak(self, groups: Groups, states: int = 0, *, late: bool = False) -> Phase:
        """Return the phase that holds the most."""
        return max(self.phases(groups, states, late=late), key=lambda phase: phase.bytes)

    def peaks(self, groups: Groups, amounts: Sequence[int]) -> dict[bool, list[int]]:
        """Return the bytes of that phase for several amounts of offloaded states: by whether they come back late."""
        found = [(phase.bytes, phase.away, phase.away_late) for phase in self._phases(groups)]
        early = [max(held - int(amount * away) for held, away, _ in found) for amount in amounts]
        return {False: early, True: [max(held - int(n * late) for held, _, late in found) for n in amounts]}

    def of(self, policy: ActivationPolicy, *, moves: bool = False) -> _LayerBytes:
        """Return the bytes of one layer, whose checkpoint goes to the host where it ``moves``."""
        found = self._of.get((policy, moves))
        if found is None:
            found = self._of[policy, moves] = _LayerBytes(self.job, policy, moves=moves)
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


class _LayerBytes:
    """The bytes of a layer with one policy: kept on the GPU and on the host, recomputed, and within its phases."""

    def __init__(self, job: Job, policy: ActivationPolicy, *, moves: bool) -> None:
        kept = checkpoint_bytes(job, policy)
        self.on_gpu, self.on_host = (0, kept + PAGES) if moves else (kept, 0)
        self.again = 0 if policy.keep == "all" else full_bytes(job, level_of(policy)) - self.on_gpu
        self.forward = forward_transients(job, policy)
        self.backward = backward_transients(job, policy)
