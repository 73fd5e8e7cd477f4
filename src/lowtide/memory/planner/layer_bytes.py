"""What one layer holds: what it keeps for backward by a policy, and what lives within its forward or backward alone.

N tokens of a batch, h hidden size, f intermediate size, e bytes of a parameter and of the residual stream, n bytes of
what the products read and write: the same, but 2 under autocast. Layers are those of a patched model
(`lowtide.patch`: fused norms, rotary embedding and MLP), with attention that builds no scores.
"""

from __future__ import annotations

from lowtide.memory.planner.adapters import Adapters
from lowtide.memory.planner.job import Job
from lowtide.memory.policy import ActivationPolicy

PAGES = 6 * 4096  # what a layer's buffers in host memory are rounded up by, at most
FLASH_ACCUMULATOR = 4  # bytes of each number of the query gradient's float32 sum


def kept_by_operation(job: Job, mlp_level: int) -> dict[str, int]:
    """Return the bytes a token that a layer keeps when it keeps all, by what they are; each tensor once.

    The layer's output is the next one's input and not counted; a norm keeps its input and a float32 a row, the rotary
    embedding nothing, attention what it reads and writes and a float32 a head. Under autocast the products to queries,
    keys and values make a copy of their input each, and keep it. A mask is kept by each layer, in the products' dtype
    (`torch.nn.functional.scaled_dot_product_attention` makes numbers of one of bools), and beside one transformers
    repeats keys and values for each query head.
    """
    shape, n = job.shape, job.narrow
    stream, queries, keys = shape.hidden * job.element, shape.query_width * n, shape.kv_width * n
    kept = {
        "layer input": stream,
        "norms' statistics": 4 * shape.layer_norms,
        "attention's input": (3 if job.autocast and not shape.stacked else 1) * shape.hidden * n,
        "queries, keys, values": queries + 2 * keys,
        "attention's output": queries + 4 * shape.heads,
        "MLP's input": 2 * stream,  # before its norm and behind it
    }
    if shape.stacked:  # values are a part of what holds all three before queries and keys are turned
        kept["queries, keys, values"] += queries + keys
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
    elif not job.fused_mlp:
        kept["gate, up, activation and product"] = 4 * shape.intermediate * n
        copies = 2 if job.autocast and not shape.stacked else 1  # autocast's, one for each product
        kept["MLP's input"] = stream + copies * shape.hidden * n
    elif mlp_level == 0:
        kept["gate and up"] = 2 * shape.intermediate * n
    if job.attention_mask:
        kept["attention's mask"] = job.seq_len * n
        whole = queries + 2 * keys if shape.stacked and shape.heads == shape.kv_heads else queries
        kept["queries, keys, values"] = 2 * queries + whole
    if isinstance(job.adapters, Adapters):
        kept |= job.adapters.kept(shape, stream=stream, narrow=n, mlp_level=mlp_level, fused_mlp=job.fused_mlp)
    return kept


def masks_bytes(job: Job) -> int:
    """Return the bytes of the masks that all layers share: one of bools, and another for those with a window."""
    kinds = max(1, len(set(map(bool, job.shape.windows))))
    return kinds * job.batch_size * job.seq_len**2 if job.attention_mask else 0


def full_bytes(job: Job, mlp_level: int) -> int:
    """Return the bytes that a layer keeps when it keeps all: under autocast also copies of weights."""
    weights = job.shape.projection_params + (0 if job.fused_mlp else job.shape.mlp_params)
    copies = weights * job.narrow if job.autocast else 0
    if isinstance(job.adapters, Adapters):
        copies += job.adapters.copies(job.shape, job.narrow, fused_mlp=job.fused_mlp)
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
    and what the MLP reads and is added to. Where such a layer's attention has a mask, it can be the most: the mask in
    numbers beside its negation, keys and values repeated.
    """
    shape, level = job.shape, level_of(policy)
    whole = policy.keep == "all"
    wide = ((1 if job.fused_mlp else 0) if whole else 3) if level == 0 else 2
    streams = 0 if whole else 2 * shape.hidden * job.element
    mlp = wide * shape.token_mlp_width() * job.narrow * _at_a_time(job, policy)
    most = mlp + job.tokens * (shape.hidden * job.narrow + streams) + _mlp_copies(job, 1)
    if whole or not job.attention_mask:
        return most
    masked = (job.narrow + 1) * job.seq_len + 4 * shape.query_width * job.narrow + shape.hidden * job.element
    return max(most, job.tokens * masked)


def backward_transients(job: Job, policy: ActivationPolicy) -> int:
    """Return the most that a layer's backward holds beyond its activations and its weights' gradients.

    In the MLP: the gradients of its output and input, and that of the product, in whose place the product comes; level
    1 builds gate and up besides. In attention, when the MLP's activations are gone: the gradients of the stream, of its
    output, of queries (summed in float32 beside), keys and values.
    """
    shape, level, n = job.shape, level_of(policy), job.narrow
    width = shape.token_mlp_width()
    wide = 1 if level == 0 and job.fused_mlp else 3
    mlp = _at_a_time(job, policy) * width * wide * n + job.tokens * 2 * shape.hidden * job.element
    if _at_a_time(job, policy) < job.tokens and job.adapters is None:
        mlp += 4 * shape.mlp_params  # the weights' gradients are summed in float32, and rounded one by one
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


class LayerBytes:
    """The bytes of a layer with one policy: kept on the GPU and on the host, recomputed, and within its phases."""

    def __init__(self, job: Job, policy: ActivationPolicy, *, moves: bool) -> None:
        kept = checkpoint_bytes(job, policy)
        self.on_gpu, self.on_host = (0, kept + PAGES) if moves else (kept, 0)
        self.again = 0 if policy.keep == "all" else full_bytes(job, level_of(policy)) - self.on_gpu
        self.forward = forward_transients(job, policy)
        self.backward = backward_transients(job, policy)
