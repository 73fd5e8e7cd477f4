"""What a layer that runs in tiles takes: from what it takes at once, and what one of its tiles takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from lowtide.memory.planner.job import Job
from lowtide.memory.planner.layer_costs import LayerCost
from lowtide.memory.planner.optimizers import FSDP2
from lowtide.memory.policy import ActivationPolicy, Keep

EVERY = (2, 4)  # layers of which one saves its input: the numbers that are tried
# Tokens of a planned tile: an eighth of the sequence, between these. Smaller ones sum weights' gradients more often.
LEAST, MOST = 1024, 16384
SLOWER = 1.03  # times a layer's passes at once, in tiles of MOST tokens: measured were 1.02 and 1.04
WIDE = 4  # bytes of a number in which gradients of weights, keys and values are summed

Costs = Callable[[Job, ActivationPolicy], Sequence[LayerCost]]


def tile_policies(job: Job, *, offload: bool) -> list[ActivationPolicy]:
    """Return the policies of layers in tiles; none where the layers are known to refuse them, or are read."""
    shape, level = job.shape, 1 if job.fused_mlp and job.shape.has_levels else None
    refused = shape.traced is not None or job.attention_mask or any(shape.windows) or job.compile_layers
    refused |= job.gpus > 1 and (job.parallel != FSDP2 or job.group_size > 1)
    tile = min(MOST, job.seq_len // 8 // LEAST * LEAST)
    if refused or job.narrow != 2 or shape.head_dim % 8 or not tile:
        return []
    kinds: list[tuple[Keep, int]] = [("attention", 1), ("input", 1)]
    kinds += [("input", k) for k in EVERY if k <= shape.layers and job.gpus == 1]  # FSDP2 gathers a layer at a time
    return [
        ActivationPolicy(keep=keep, mlp_level=level, tile_tokens=tile, every=k, offload=place)
        for place in (False, True)[: 1 + offload]
        for keep, k in kinds
    ]


def tiled(job: Job, policy: ActivationPolicy, costs: Costs) -> tuple[LayerCost, ...]:
    """Return the cost of a layer of each kind, by a policy with ``tile_tokens``.

    Args:
        job: The step.
        policy: The policy.
        costs: Returns the cost of a layer of each kind that runs at once.
    """
    assert policy.tile_tokens is not None
    count = math.ceil(job.seq_len / policy.tile_tokens)
    plain = replace(policy, tile_tokens=None)
    part = replace(job, seq_len=math.ceil(job.seq_len / count))
    pairs = zip(costs(job, plain), costs(part, plain), strict=True)
    return tuple(_of_tiles(job, policy, count, at_once, tile) for at_once, tile in pairs)


def _of_tiles(job: Job, policy: ActivationPolicy, count: int, at_once: LayerCost, tile: LayerCost) -> LayerCost:
    """Return the cost of a layer in ``count`` tiles.

    Of all tokens there are the output in forward, the gradients of output and input in backward, the keys and values,
    and the gradients of these; the keys and values are computed once more.
    """
    shape, stream = job.shape, job.shape.hidden * job.element
    keys = 2 * shape.kv_width * job.narrow
    trained = shape.layer_params if job.adapters is None else 0
    again = 2 * job.tokens * shape.hidden * 2 * shape.kv_width
    sums = count * trained * (job.element + 2 * WIDE) / job.gpu.bandwidth
    return replace(
        at_once,
        policy=policy,
        whole=tile.whole + at_once.saved,
        forward_bytes=tile.forward_bytes + job.tokens * (stream + keys),
        backward_bytes=tile.backward_bytes
        + job.tokens * (2 * stream + keys + 2 * shape.kv_width * WIDE)
        + trained * (WIDE + job.element),
        forward=SLOWER * max(at_once.forward, count * tile.forward),
        backward=SLOWER * max(at_once.backward, count * tile.backward) + again / job.gemm_rate + sums,
        flop=at_once.flop + again,
    )
