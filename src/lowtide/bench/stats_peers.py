"""Who computes log-probabilities, entropies and more of tokens from hidden states.

N tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowtide.bench.harness import CannotError, Peer
from lowtide.bench.peers import LOWTIDE, PEERS
from lowtide.bench.problem import blocks
from lowtide.bench.stats import ENTROPY, LOGPROB, TOPK, StatsTask, values_of
from lowtide.bench.tokens import Function, Values, by_name
from lowtide.head.options import HeadOptions
from lowtide.head.planner import MIB
from lowtide.head.token_stats import linear_logprobs, linear_token_stats

TRL_TILE = (4096, 32768)  # tokens and classes of the logits that TRL 1.16 holds at a time
VERL_ROWS = 512  # tokens whose logits verl's fused_linear_for_ppo holds at a time


def _lowtide(task: StatsTask, options: HeadOptions | None = None) -> Function:
    x, w, y, topk = task.head.x, task.head.w, task.y, task.topk or None
    if task.names == (LOGPROB,):
        return lambda: {LOGPROB: linear_logprobs(x, w, y, options=options)}

    def run() -> Values:
        stats = linear_token_stats(x, w, y, want=task.names, topk=topk, options=options)
        values = {name: getattr(stats, name) for name in task.names}
        return values if stats.topk is None else values | {TOPK: stats.topk.values}

    return run


def _lowtide_at_trls(task: StatsTask) -> Function:
    tile = min(task.head.shape.N, TRL_TILE[0]) * TRL_TILE[1] * task.head.dtype.itemsize
    return _lowtide(task, HeadOptions(workspace_mib=tile / MIB, accumulate="float32"))


def _naive(x: Tensor, w: Tensor, y: Tensor, names: tuple[str, ...], topk: int) -> Values:
    return values_of((x @ w.T).float(), y, names, topk)


def _in_full(function: Callable[..., Values], task: StatsTask) -> Function:
    head = task.head
    return lambda: function(head.x, head.w, task.y, task.names, task.topk)


def _compiled(task: StatsTask) -> Function:
    if task.backward_alone:
        raise CannotError("gives its buffers away in backward, which runs once")
    torch.compiler.reset()  # else the second task is compiled for any shape, which is slower
    return _in_full(torch.compile(_naive, dynamic=False), task)


def _trl(task: StatsTask, *, whole: bool = False) -> Function:
    _one_target(task)
    utils: Any = importlib.import_module("trl.trainer.utils")
    columns = task.head.shape.V if whole else utils._CHUNKED_LOGPROB_CHUNK_SIZE
    x, w, y = task.head.x, task.head.w, task.head.y
    outputs = tuple(name for name in task.names if name != LOGPROB)

    def run() -> Values:
        found = utils._ChunkedLogProbFunction.apply(x, w, None, y, 1.0, columns, None, 1.0, outputs)
        return dict(zip((LOGPROB, ENTROPY)[: len(task.names)], found, strict=False))

    return run


class _Rebuilt(torch.autograd.Function):
    """verl's plain PyTorch way: float32 softmax of 512 tokens' logits at a time, all of it once more in backward.

    The weight's gradient is summed in its own dtype. Of the entropy nothing is computed where it is not wanted.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, y: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
        names = (LOGPROB, ENTROPY) if entropy else (LOGPROB,)
        found = [values_of((x[rows] @ w.T).float(), y[rows], names) for rows in _rows(x)]
        ctx.save_for_backward(x, w, y)
        logprob = torch.cat([values[LOGPROB] for values in found])
        return logprob, torch.cat([values[ENTROPY] for values in found]) if entropy else None

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, Tensor, None, None]:
        x, w, y = ctx.saved_tensors
        by_logprob, by_entropy = gradients
        assert by_logprob is not None
        dx, dw = torch.empty_like(x), torch.zeros_like(w)
        for rows in _rows(x):
            logprobs = (x[rows] @ w.T).float().log_softmax(-1)
            p = logprobs.exp()
            dz = p * -by_logprob[rows, None]
            dz.scatter_add_(1, y[rows, None], by_logprob[rows, None])
            if by_entropy is not None:
                entropy = -(p * logprobs).sum(-1, keepdim=True)
                dz -= by_entropy[rows, None] * p * (logprobs + entropy)
            dz = dz.to(x.dtype)
            torch.mm(dz, w, out=dx[rows])
            dw += dz.T @ x[rows]
        return dx, dw, None, None


def _rows(x: Tensor) -> list[slice]:
    return list(blocks(len(x), VERL_ROWS))


def _verl_style(task: StatsTask) -> Function:
    _one_target(task)
    head, entropy = task.head, ENTROPY in task.names

    def run() -> Values:
        found = _Rebuilt.apply(head.x, head.w, head.y, entropy)  # type: ignore[no-untyped-call]
        return dict(zip((LOGPROB, ENTROPY)[: len(task.names)], found, strict=False))

    return run


def _liger(task: StatsTask) -> Function:
    _logprobs_alone(task)
    module: Any = importlib.import_module("liger_kernel.chunked_loss.fused_linear_ppo")
    x, w, y = task.head.x, task.head.w, task.head.y
    return lambda: {LOGPROB: module.LigerFusedLinearPPOBase.chunk_forward(x[None], w, y[None])[0]}


def _cross_entropy(name: str, task: StatsTask) -> Function:
    _logprobs_alone(task)
    loss = PEERS[name].build(task.head)
    head = task.head
    return lambda: {LOGPROB: -loss(head.x, head.w, head.y, "none")}


def _one_target(task: StatsTask) -> None:
    if not {LOGPROB, ENTROPY}.issuperset(task.names) or task.y.dim() > 1:
        raise CannotError("computes log-probabilities of one target a token, and entropies")


def _logprobs_alone(task: StatsTask) -> None:
    _one_target(task)
    if task.names != (LOGPROB,):
        raise CannotError("computes log-probabilities and no entropy")


STATS_PEERS = by_name(
    Peer(LOWTIDE, "as it comes", _lowtide),
    Peer(f"{LOWTIDE}-trl-memory", "with the scratch of TRL's tile, dW summed in float32", _lowtide_at_trls),
    Peer("naive", "log_softmax of float32 logits", partial(_in_full, _naive)),
    Peer("compile", "torch.compile of naive", _compiled),
    Peer("trl", "TRL's chunked log-probabilities, its chunk of 32768 classes", _trl, "trl"),
    Peer("trl-vocabulary", "the same, all classes in a chunk", partial(_trl, whole=True), "trl"),
    Peer("verl-style", "512 tokens at a time, rebuilt in backward, as verl does it", _verl_style),
    Peer("liger-grpo", "the log-probabilities in Liger's GRPO loss", _liger, "liger-kernel"),
    Peer("cce-exact", "cut cross entropy, all gradients", partial(_cross_entropy, "cce-exact"), "cut-cross-entropy"),
)
