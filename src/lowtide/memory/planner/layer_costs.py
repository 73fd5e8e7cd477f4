"""What one layer stores and how long it takes, by policy: bytes, floating-point operations, seconds.

N tokens of a batch, h hidden size, f intermediate size, e bytes of a parameter and of the residual stream, n bytes of
what GEMMs read and write: the same, but 2 under autocast. Layers are those of a patched model (`lowtide.patch`: fused
norms, rotary embedding and MLP), with attention that stores no scores. A GEMM's operations are 2 per multiplication;
causal attention's are counted without the half that is masked.

lowtide's operators, GEMMs and attention are the same in a compiled layer; the time that compiling saves is in
`_thin_bytes` and `_host_seconds`. A layer that offloads runs in eager even so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lowtide.memory.planner.adapters import ATTENTION, PROJECTIONS, Adapters, projection_widths
from lowtide.memory.planner.gpus import FLASH_ACCUMULATOR, HALF_RATE, attention_reaches
from lowtide.memory.planner.job import Job
from lowtide.memory.policy import ActivationPolicy

PAGES = 6 * 4096  # what a layer's buffers in host memory are rounded up by, at most
BACKWARD_ATTENTION = 2.5  # GEMMs of attention's backward for each of its forward's
THIN = 0.9  # share of the copy's bandwidth that norms, rotary embedding and additions reach
THIN_AGAIN = 0.6  # of what forward's other operations read and write: not the MLP's product, nor the last addition
# What the host takes to launch a layer's forward, backward and recompute, in seconds: below this no GPU is faster.
# Fitted to short sequences on two hosts (benchmarks/results, 2026-11-21-plan-h100-short; the recompute to
# 2026-11-28-step-256-h200): others differ by tens of percent. A layer that saves attention looks at every operator;
# norms on the heads add kernels, either way.
HOST_FORWARD, HOST_BACKWARD, HOST_RECOMPUTE = 1.4e-3, 2.4e-3, 1.5e-3
HOST_ATTENTION, HOST_HEAD_NORMS = 1.2e-3, (0.8e-3, 1.2e-3)
# What it takes besides for a unit of layers that several GPUs shard, in forward and backward: fitted to one step on two
# (benchmarks/results, 2026-11-28-scaling-ranks-2-again-h200, the smaller model, on the host of the recompute above).
HOST_UNIT = (1.9e-3, 5e-3)
HIDDEN = 0.01  # share of the quicker of GPU and host that counts: where the host sets the pace, another may not


@dataclass(frozen=True)
class LayerCost:
    """What one layer with a policy takes."""

    policy: ActivationPolicy
    saved: int  # bytes for backward, wherever they are; with ``every`` only the first layer of a group has them
    whole: int  # bytes that it has for backward once it is recomputed
    forward_bytes: int  # the most that lives within its forward alone
    backward_bytes: int  # the same of its backward, without the weights' gradients
    forward: float  # seconds
    backward: float  # seconds, with the recompute
    transfer: (
        float  # seconds of the way to the host, and as many of the way back; 0: not offloaded; the mean of a group
    )
    flop: float  # operations of the recompute

    def places(self, *, moves: bool) -> tuple[int, int]:
        """Return the bytes that it saves on the GPU and on the host, where what it saves ``moves`` there or not."""
        return (0, self.saved + PAGES) if moves else (self.saved, 0)


def saved_by_operation(job: Job, mlp_level: int) -> dict[str, int]:
    """Return the bytes per token that a layer with ``keep="all"`` saves, by what they are; each tensor once.

    The layer's output is the next one's input and not counted; a norm saves its input and a float32 per row, the rotary
    embedding nothing, attention what it reads and writes and a float32 per head. Each GEMM that needs a weight gradient
    saves its input: those that read the same input share one copy, but in eager under autocast, and with adapters in 16
    bits, each has its own. Of gate, up, activation and product of a stock MLP or of stock experts the compiler
    recomputes one. A mask is saved by each layer, in the GEMMs' dtype
    (`torch.nn.functional.scaled_dot_product_attention` makes numbers of one of bools), and beside one transformers
    repeats keys and values for each query head.
    """
    shape, n, visits = job.shape, job.narrow, job.shape.experts_per_token
    stream, queries, keys = shape.hidden * job.element, shape.query_width * n, shape.kv_width * n
    wide, inner, plain = shape.hidden * n, shape.intermediate * n, not (job.fused_mlp or shape.experts)
    adapters = job.adapters if isinstance(job.adapters, Adapters) else None

    def copies(*readers: str) -> int:
        saving = len(readers) if adapters is None else sum(name in adapters.targets for name in readers)
        apart = n < 4 if adapters is not None else job.autocast and not shape.stacked
        return saving if apart and not job.compile_layers else min(saving, 1)

    # Values of a stacked projection are a view of its output, which holds all three before the rotary embedding.
    attended = queries + 2 * keys + (queries + keys) * shape.stacked
    if job.attention_mask:
        attended = 2 * queries + (queries + 2 * keys if shape.stacked and shape.heads == shape.kv_heads else queries)
    mlp_input, recomputed = copies("gate_proj", "up_proj"), int(job.compile_layers)
    saved = {
        "layer input": stream,
        "norms' statistics": 4 * shape.layer_norms,
        "attention's input": copies("q_proj", "k_proj", "v_proj") * wide,
        "queries, keys, values": attended,
        "queries and keys before their norms": (queries + keys + 4 * (shape.heads + shape.kv_heads)) * shape.head_norms,
        "attention's mask": job.seq_len * n * job.attention_mask,
        "attention's output": queries + 4 * shape.heads,
        "attention's output, copied": queries * copies("o_proj") * (shape.heads_first or (bool(adapters) and n < 4)),
        "outputs of attention and MLP before their norms": (shape.layer_norms - 2) * wide,
        # before its norm, and behind it
        "MLP's input": stream + (mlp_input * wide if plain else stream * (mlp_input > 0 or mlp_level == 1)),
    }
    if shape.experts:  # beside fused ones all in 32 bits but the indices, and the order of the rows
        fused = 4 * (shape.experts + 5 * visits + 1)
        saved["router's probabilities and indices"] = fused if job.fused_mlp else 16 * (shape.experts + visits)
    if shape.experts and not job.fused_mlp:
        saved["experts' inputs and outputs"] = 2 * visits * stream
        saved["experts' gate, up, activation and product"] = visits * (4 - recomputed) * inner
    elif plain:
        saved["gate, up, activation and product"] = (3 + copies("down_proj") - recomputed) * inner
    elif mlp_level == 0:
        saved["gate and up"] = 2 * max(1, visits) * inner
    if adapters is not None:
        saved["adapters' inner outputs"] = adapters.rank * n * len(_adapters_apart(job, adapters))
    return saved


def _adapters_apart(job: Job, adapters: Adapters) -> list[int]:
    """Return the parameters of each of a layer's adapters that runs by itself: not those of a fused MLP."""
    apart = ATTENTION if job.fused_mlp else PROJECTIONS
    return [size for name, size in adapters.sizes(job.shape).items() if name in apart]


def full_bytes(job: Job, mlp_level: int) -> int:
    """Return the bytes that a layer with ``keep="all"`` saves: under autocast also copies of weights."""
    weights = job.shape.projection_params + (0 if job.fused_mlp else job.shape.mlp_params)
    copies = weights if job.autocast else 0
    if isinstance(job.adapters, Adapters) and job.narrow < 4:
        copies += sum(_adapters_apart(job, job.adapters))
    return job.tokens * sum(saved_by_operation(job, mlp_level).values()) + copies * job.narrow


def checkpoint_bytes(job: Job, policy: ActivationPolicy) -> int:
    """Return the bytes that a layer saves for backward by a policy, wherever they are."""
    if policy.keep == "all":
        return full_bytes(job, _level(policy))
    saved = saved_by_operation(job, 0)
    return job.tokens * (saved["layer input"] + (saved["attention's output"] if policy.keep == "attention" else 0))


def _level(policy: ActivationPolicy) -> int:
    """Return the level of the layer's MLP: 0 where the policy does not set it."""
    return policy.mlp_level or 0


def forward_transients(job: Job, policy: ActivationPolicy) -> int:
    """Return the most bytes that a layer's forward holds beyond what it saves, in its MLP: the product and the output.

    Level 1 has gate and up besides, and the product in gate's place; a layer that is to be recomputed has all three,
    and what the MLP reads and is added to; one in 4 bits a weight that is dense. Where a layer that is to be recomputed
    has a mask in attention, that can be the most: the mask in numbers beside its negation, keys and values repeated.
    """
    shape, n, whole = job.shape, job.narrow, policy.keep == "all"
    wide = ((1 if job.fused_mlp else 0) if whole else 3) if _level(policy) == 0 else 2
    streams = 0 if whole else 2 * shape.hidden * job.element
    mlp = wide * shape.token_mlp_width * n * _at_a_time(job, policy) + _rows_of_experts(job)
    most = mlp + job.tokens * (shape.hidden * n + streams) + _mlp_copies(job, 1) + job.dequantised_bytes
    if whole or not job.attention_mask:
        return most
    return max(most, job.tokens * ((n + 1) * job.seq_len + 4 * shape.query_width * n + shape.hidden * job.element))


def backward_transients(job: Job, policy: ActivationPolicy) -> int:
    """Return the most bytes that a layer's backward holds beyond its activations and its weights' gradients.

    In the MLP: the gradients of its output and input, and that of the product, in whose place the product comes; level
    1 builds gate and up besides, and a compiled layer at level 0 their gradients, which eager ones write over them. In
    attention, when the MLP's activations are gone: the gradients of the stream, of its output, of queries (summed in
    float32 beside), keys and values.
    """
    shape, n, width, at_a_time = job.shape, job.narrow, job.shape.token_mlp_width, _at_a_time(job, policy)
    saves_gate = _level(policy) == 0
    in_place = saves_gate and job.fused_mlp and not job.compile_layers
    mlp = at_a_time * width * (1 if in_place else 3) * n + job.tokens * 2 * shape.hidden * job.element
    mlp += _rows_of_experts(job) * (1 if in_place else 2)
    if at_a_time < job.tokens and job.adapters is None:
        mlp += 4 * shape.mlp_params  # the weights' gradients are summed in float32, and rounded one by one
    # gradients of keys and values for each query head, before those that share one are added
    each_query = 2 * shape.query_width if shape.kv_heads < shape.heads else 0
    sums = shape.query_width * FLASH_ACCUMULATOR + 4 * shape.heads
    freed = 2 * width * saves_gate * n + shape.hidden * job.element
    attention = (2 * shape.query_width + 2 * shape.kv_width + each_query) * n + sums - freed
    return max(mlp + _mlp_copies(job, 2) + job.dequantised_bytes, job.tokens * attention)


def _at_a_time(job: Job, policy: ActivationPolicy) -> int:
    """Return the tokens of one of the MLP's tiles; level 0 saves gate and up of all."""
    return min(job.tokens, policy.mlp_tile_tokens or job.tokens) if _level(policy) == 1 else job.tokens


def _rows_of_experts(job: Job) -> int:
    """Return the bytes of a row of the stream's width for each expert of each token."""
    return job.tokens * job.shape.experts_per_token * job.shape.hidden * job.narrow


def _mlp_copies(job: Job, rows: int) -> int:
    """Return the bytes of what autocast's MLP copies: its weights, and so many tensors of the stream's size."""
    if not job.autocast:
        return 0
    return (3 * job.shape.hidden * job.shape.intermediate + rows * job.tokens * job.shape.hidden) * job.narrow


def gemm_sizes(job: Job) -> tuple[list[int], list[int]]:
    """Return the weight's size of each of a layer's GEMMs: attention's projections; the MLP's, or those of the router
    and of the experts that a token visits. Each takes 2 N times as many operations in forward.
    """
    shape = job.shape
    projections = [shape.hidden * width for width in (shape.query_width, shape.kv_width, shape.kv_width)]
    mlp = [shape.hidden * shape.intermediate] * (3 * max(1, shape.experts_per_token))
    return [*projections, projections[0]], mlp + ([shape.hidden * shape.experts] if shape.experts else [])


def attention_flop(job: Job) -> float:
    """Return the operations of one layer's attention in forward: the mean over layers, whose windows may differ."""
    shape, T = job.shape, job.seq_len
    pairs = 0.0
    for window in shape.windows or (0,):
        w = min(window or T, T)
        pairs += w * T - w * (w - 1) / 2 if w < T else T * T / 2
    return 4 * job.batch_size * shape.query_width * pairs / len(shape.windows or (0,))


def _thin_bytes(job: Job) -> tuple[float, float]:
    """Return the bytes that a layer's operations between GEMMs read and write, in forward and backward.

    A compiled layer casts attention's input once, not for each projection, and adds the projections' gradients of it in
    one pass: that saves a write and a read.
    """
    shape, width, e, n = job.shape, job.shape.token_mlp_width, job.element, job.narrow
    rope = 2 * (shape.query_width + shape.kv_width) * n
    norms = 2 * shape.hidden * shape.layer_norms * e + rope * shape.head_norms
    adds = 2 * 3 * shape.hidden * e
    adds_back = adds - 2 * shape.hidden * n * (job.compile_layers and not shape.stacked)
    inputs = 2 if job.compile_layers else 4
    casts = inputs * shape.hidden * (e + n) if job.autocast else 0  # the inputs of GEMMs, and their gradients
    of_adapters, of_adapters_back = _adapter_bytes(job)
    forward = job.tokens * (norms + rope + adds + casts + 3 * width * n + of_adapters)
    backward = job.tokens * (1.5 * norms + rope + adds_back + casts + 6 * width * n + of_adapters_back)
    weights = shape.layer_params * (e + n) if job.autocast else 0
    return forward + weights, backward + weights


def _adapter_bytes(job: Job) -> tuple[float, float]:
    """Return the bytes per token that a layer's adapters read and write in forward and backward.

    Their products are thin: what counts are the inputs and outputs. peft's cast the input to float32, where autocast
    casts it back, and write B's product, scale it and add it; backward does each twice. Those of a fused MLP read the
    input and add to the output; in backward they read both sides twice, and add to the input's gradient.
    """
    if not isinstance(job.adapters, Adapters):
        return 0.0, 0.0
    shape, n, forward, backward = job.shape, job.narrow, 0.0, 0.0
    for name in job.adapters.targets:
        inputs, outputs = projection_widths(shape)[name]
        if job.fused_mlp and name not in ATTENTION:
            forward += (inputs + 2 * outputs) * n
            backward += (3 * inputs + 2 * outputs) * n
        else:
            apart = (2 * (n + 4) if n < 4 else n) * inputs + 6 * n * outputs
            forward, backward = forward + apart, backward + 2 * apart
    return forward, backward


def layer_cost(job: Job, policy: ActivationPolicy) -> LayerCost:
    """Return what one layer with a policy stores and takes."""
    if policy.offload:
        job = replace(job, compile_layers=False)
    shape, gpu, recomputes = job.shape, job.gpu, policy.keep != "all"
    projections, mlp = gemm_sizes(job)

    def seconds(sizes: list[int]) -> float:  # small weights run slower
        dequantised = 0.0 if shape.experts and sizes is mlp else sum(sizes) * job.dequantise_seconds
        return 2 * job.tokens * sum(size + HALF_RATE for size in sizes) / job.gemm_rate + dequantised

    reached = gpu.wide_head if shape.head_dim >= 96 else 1.0
    reached *= 1.0 if job.narrow == 2 else gpu.gemm32 / gpu.gemm
    reached *= attention_reaches(job.seq_len, shape.widest_window)
    attention, forward_rate = attention_flop(job), gpu.attention * reached
    thin_rate = gpu.bandwidth * THIN
    thin, thin_back = (size / thin_rate for size in _thin_bytes(job))
    gemms = seconds(projections) + seconds(mlp)
    forward = gemms + attention / forward_rate + thin
    gradients = 2 if job.adapters is None else 1  # of the inputs, and of the weights unless they are frozen
    backward = gradients * gemms + BACKWARD_ATTENTION * attention / (gpu.attention_backward * reached) + thin_back
    # Gate and up are recomputed, by the checkpoint or by the MLP itself; its last GEMM is not. Stock experts' is.
    share = 1.0 if shape.experts and not job.fused_mlp else 2 / 3
    recompute = flop = 0.0
    if recomputes or _level(policy) == 1:
        recompute, flop = share * seconds(mlp), share * (2 * job.tokens * sum(mlp))
    if recomputes:
        again = attention if policy.keep == "input" else 0.0
        recompute += seconds(projections) + again / forward_rate + THIN_AGAIN * thin
        flop += 2 * job.tokens * sum(projections) + again
    # With ``every`` all layers of a group but the last run once more, to compute the others' inputs.
    more = 1 - 1 / policy.every
    recompute += more * forward
    flop += more * (2 * job.tokens * (sum(projections) + sum(mlp)) + attention)
    host_forward, host_backward = _host_seconds(job, policy)
    saved = checkpoint_bytes(job, policy)
    return LayerCost(
        policy,
        saved=saved,
        whole=full_bytes(job, _level(policy)),
        forward_bytes=forward_transients(job, policy),
        backward_bytes=backward_transients(job, policy),
        forward=slower(forward, host_forward),
        backward=slower(backward + recompute, host_backward + more * host_forward),
        transfer=saved / policy.every / gpu.pcie if policy.offload else 0.0,
        flop=flop,
    )


def _host_seconds(job: Job, policy: ActivationPolicy) -> tuple[float, float]:
    """Return what the host takes to launch a layer's forward, and its backward with the recompute.

    In a compiled layer no operator is inspected, and the recompute launches what forward does, without the checkpoint's
    checks. For the rest it was as quick as in eager where tiny layers were timed on a CPU.
    """
    norms, norms_back = HOST_HEAD_NORMS if job.shape.head_norms else (0.0, 0.0)
    watch, again = (0.0, HOST_FORWARD) if job.compile_layers else (HOST_ATTENTION, HOST_RECOMPUTE)
    unit, unit_back = host_of_a_unit(job)
    forward = HOST_FORWARD + norms + unit + (watch if policy.keep == "attention" else 0.0)
    recompute = again + norms if policy.keep != "all" else 0.0
    return forward, HOST_BACKWARD + norms_back + unit_back + recompute


def host_of_a_unit(job: Job) -> tuple[float, float]:
    """Return what the host takes besides, in forward and backward, for a layer's share of a unit of FSDP2."""
    if job.gpus == 1:
        return 0.0, 0.0
    unit, unit_back = HOST_UNIT
    return unit / job.fsdp_layers, unit_back / job.fsdp_layers


def slower(gpu: float, host: float) -> float:
    """Return the seconds of a layer, from those of the GPU and of the host that launches its work."""
    return max(gpu, host) + HIDDEN * min(gpu, host)
