"""A vocabulary in parts, one a rank: every function and option beside the whole in float64, computed on each rank."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import lowtide
from distributed.launch import main, named
from lowtide.head import reference
from support import head, oracle, stats_oracle

V, D, LEADING = 50, 6, (2, 7)
WAYS = ("replicated", "sequence", "local")
LOSS_OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum", "bias": True},
    {"reduction": "none", "softcap": 2.0, "bias": True},
    {"reduction": "none", "shift": True, "token_weight": True},
    {"weight": True, "bias": True},
    {"weight": "part", "label_smoothing": 0.1, "z_loss": 0.01, "logit_scale": 0.7, "bias": True},
    {"label_smoothing": 0.2, "softcap": 1.5, "reduction": "sum"},
    {"label_smoothing": 0.3, "weight": True, "softcap": 3.0, "shift": True, "token_weight": True, "bias": True},
    {"num_items": 5.5, "shift": True, "z_loss": 0.1},
    {"num_items": torch.tensor(3.0), "logit_scale": "trained", "bias": True},
    {"logit_scale": torch.tensor(1.3), "token_weight": True, "ignore_index": 7},
]


@functools.cache
def mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


@functools.cache
def sizes(total: int) -> list[int]:
    """Return parts of a vocabulary as a user may cut it: of any sizes, one of them empty where there are three."""
    return {2: [total - 3, 3], 3: [total - 20, 0, 20]}[dist.get_world_size()]


def part_of(tensor: Tensor) -> Tensor:
    """Return this rank's rows, cut by `sizes`, as a leaf."""
    held = tensor.detach().split(sizes(tensor.shape[0]))[dist.get_rank()].clone()
    return held.requires_grad_(tensor.requires_grad)


def spread(way: str, x: Tensor | None, *, of_vocab: bool) -> Any:
    """Return a tensor as a user of this ``way`` has it."""
    if x is None:
        return None
    if way == "local":
        return part_of(x) if of_vocab else x.detach().clone().requires_grad_(x.requires_grad)
    sequence = [Shard(max(0, x.dim() - 2))] if way == "sequence" else [Replicate()]
    return distribute_tensor(x.detach(), mesh(), [Shard(0)] if of_vocab else sequence).requires_grad_(x.requires_grad)


def shard_of(way: str, w: Any) -> dict[str, Any]:
    return {"vocab_shard": lowtide.VocabShard.of(w)} if way == "local" else {}


def whole(way: str, grad: Any, *, of_vocab: bool) -> Tensor:
    """Return a gradient that is held in parts."""
    if way != "local":
        assert isinstance(grad, DTensor)
        assert grad.placements[0] == (Shard(0) if of_vocab else grad.placements[0])
        assert not grad.placements[0].is_partial()
        return grad.full_tensor()
    if not of_vocab:
        return grad
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, grad)
    return torch.cat(parts)


def plain(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def near(got: Any, want: Tensor, what: object) -> None:
    torch.testing.assert_close(plain(got), want, rtol=1e-9, atol=1e-11, equal_nan=True, msg=lambda m: f"{what}: {m}")


def settings(options: dict[str, Any], way: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return arguments for the whole and for the parts."""
    g = torch.Generator().manual_seed(5)
    q, tw = torch.rand(V, generator=g, dtype=torch.float64), torch.rand(*LEADING, generator=g, dtype=torch.float64)
    q[3] = 0
    ours = {name: value for name, value in options.items() if name != "bias"}
    theirs = dict(ours)
    if "weight" in ours:
        theirs["weight"] = q
        in_parts = ours["weight"] == "part" and way == "local"
        ours["weight"] = part_of(q) if in_parts else q
        if options["weight"] == "part" and not in_parts:
            ours["weight"] = spread(way, q, of_vocab=True)
    if "token_weight" in ours:
        theirs["token_weight"] = ours["token_weight"] = tw
    if options.get("logit_scale") == "trained":
        theirs["logit_scale"] = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
        ours["logit_scale"] = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    return ours, theirs


def losses() -> None:
    """Every option in every way: value, and the gradients of hidden states, weight, bias and a trained scale."""
    for i, (options, way) in enumerate(itertools.product(LOSS_OPTIONS, WAYS)):
        gradient = ("forward", "recompute")[i % 2] if options.get("reduction") != "none" else "auto"
        x, w, b, y = head(LEADING, D, V, dtype=torch.float64, seed=i, bias="bias" in options)
        y[0, :3] = options.get("ignore_index", -100)
        ours, theirs = settings(options, way)
        px, pw, pb = (spread(way, t, of_vocab=k > 0) for k, t in enumerate((x, w, b)))
        loss = lowtide.linear_cross_entropy(
            px, pw, y, linear_bias=pb, **ours, **shard_of(way, pw),
            options=lowtide.HeadOptions(workspace_mib=0.001, gradient=gradient),
        )  # fmt: skip
        want = oracle(x, w, y, linear_bias=b, **theirs)
        what = (options, way, gradient)
        near(loss, want, what)
        upstream = torch.rand(want.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        (plain(loss) * upstream).sum().backward()
        (want * upstream).sum().backward()
        for k, (got, true) in enumerate(zip((px, pw, pb), (x, w, b), strict=True)):
            if true is not None:
                near(whole(way, got.grad, of_vocab=k > 0), true.grad, ("xwb"[k], what))
        if options.get("logit_scale") == "trained":
            near(ours["logit_scale"].grad, theirs["logit_scale"].grad, ("scale", what))


STATS_OPTIONS: list[dict[str, Any]] = [
    {"want": ("logprob",), "bias": True},
    {"want": ("logprob",), "several": True},
    {"want": ("entropy", "lse", "mean_logit"), "bias": True, "softcap": 2.0},
    {"want": ("logprob", "entropy", "lse", "mean_logit", "argmax", "sum_sq_prob", "is_top1"), "topk": 5, "bias": True},
    {"want": ("logprob", "entropy"), "several": True, "logit_scale": "trained", "bias": True},
    {"want": ("mean_logit", "lse"), "logit_scale": 0.5},
]


def token_stats() -> None:
    """Each statistic in every way, and gradients of several of them at once."""
    for i, (options, way) in enumerate(itertools.product(STATS_OPTIONS, WAYS)):
        x, w, b, y = head(LEADING, D, V, dtype=torch.float64, seed=40 + i, bias="bias" in options)
        with torch.no_grad():
            x.mul_(4)  # some tokens are sure
        if options.get("several"):
            y = torch.randint(0, V, (*LEADING, 3), generator=torch.Generator().manual_seed(i))
            y[0, 1, 1] = y[0, 1, 0]
        y[0, :2] = -100
        ours = {name: value for name, value in options.items() if name not in ("bias", "several")}
        theirs = {name: value for name, value in ours.items() if name in ("softcap", "logit_scale", "topk")}
        if ours.get("logit_scale") == "trained":
            ours["logit_scale"] = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
            theirs["logit_scale"] = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
        px, pw, pb = (spread(way, t, of_vocab=k > 0) for k, t in enumerate((x, w, b)))
        stats = lowtide.linear_token_stats(
            px, pw, y, linear_bias=pb, **ours, **shard_of(way, pw), options=lowtide.HeadOptions(workspace_mib=0.001)
        )
        want = stats_oracle(x, w, y, linear_bias=b, **theirs)
        got_total, want_total = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for name, value in stats._asdict().items():
            if value is None:
                assert name not in options["want"]
            elif name == "topk":
                near(value.values, want["topk_values"], (name, options, way))
                assert torch.equal(plain(value.ids), want["topk_ids"])
            elif value.dtype != torch.float64:
                assert torch.equal(plain(value), want[name]), (name, options, way)
            else:
                near(value, want[name], (name, options, way))
                if name != "sum_sq_prob":
                    u = torch.rand(want[name].shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
                    got_total, want_total = got_total + (plain(value) * u).sum(), want_total + (want[name] * u).sum()
        got_total.backward()
        want_total.backward()
        for k, (got, true) in enumerate(zip((px, pw, pb), (x, w, b), strict=True)):
            if true is not None:
                near(whole(way, got.grad, of_vocab=k > 0), true.grad, ("xwb"[k], options, way))
        if options.get("logit_scale") == "trained":
            near(ours["logit_scale"].grad, theirs["logit_scale"].grad, ("scale", options, way))


KINDS: list[dict[str, Any]] = [
    {"kind": "forward_kl", "reduction": "mean"},
    {"kind": "reverse_kl", "temperature": 1.7, "bias": True},
    {"kind": "jsd", "beta": 0.3, "mask": True, "softcap": 3.0, "teacher_softcap": 2.0, "reduction": "sum"},
    {"kind": "tv", "mask": True},
    {"kind": "jsd", "beta": 0.6, "num_items": 4.0, "reduction": "mean", "bias": True},
    {"kind": "forward_kl", "tail": "bucket", "mask": True},
    {"kind": "reverse_kl", "tail": "bucket", "reduction": "sum", "softcap": 2.0, "temperature": 0.8},
    {"kind": "jsd", "tail": "renormalise"},
    {"kind": "forward_kl", "tail": "drop", "reduction": "mean"},
]


def divergences() -> None:
    """Each kind, from a teacher's head and from its top k, in every way."""
    for i, (options, way) in enumerate(itertools.product(KINDS, WAYS)):
        x, w, b, _ = head(LEADING, D, V, dtype=torch.float64, seed=70 + i, bias="bias" in options)
        tx, tw, tb, _ = head(LEADING, D + 3, V, dtype=torch.float64, seed=170 + i, bias="bias" in options)
        ours = {name: value for name, value in options.items() if name not in ("bias", "tail")}
        if "mask" in ours:
            ours["mask"] = torch.rand(*LEADING, generator=torch.Generator().manual_seed(i)) > 0.3
        theirs, teacher = dict(ours), {}
        px, pw, pb = (spread(way, t, of_vocab=k > 0) for k, t in enumerate((x, w, b)))
        if "tail" in options:
            logp = (F.linear(tx, tw, tb) / ours.get("temperature", 1.0)).log_softmax(-1).topk(4)
            teacher = {"teacher_topk": (logp.indices, logp.values, options["tail"])}
            args, whole_args = (None, None), (None, None)
            theirs |= teacher
        else:
            args = (spread(way, tx.detach(), of_vocab=False), spread(way, tw.detach(), of_vocab=True))
            whole_args = (tx, tw)
            teacher = {"teacher_bias": spread(way, tb, of_vocab=True)}
            theirs["teacher_bias"] = tb
        value = lowtide.linear_divergence(
            px, pw, *args, linear_bias=pb, **ours, **teacher, **shard_of(way, pw),
            options=lowtide.HeadOptions(workspace_mib=0.001),
        )  # fmt: skip
        want = reference.linear_divergence(x, w, *whole_args, linear_bias=b, **theirs)
        near(value, want, (options, way))
        u = torch.rand(want.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        (plain(value) * u).sum().backward()
        (want * u).sum().backward()
        for k, (got, true) in enumerate(zip((px, pw, pb), (x, w, b), strict=True)):
            if true is not None:
                near(whole(way, got.grad, of_vocab=k > 0), true.grad, ("xwb"[k], options, way))


CASES = named(losses, token_stats, divergences)

if __name__ == "__main__":
    main(CASES)
