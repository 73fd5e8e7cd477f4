"""Divergences by kernels with the vocabulary in parts: without a GPU in Triton's interpreter, with a CPU's GEMMs."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import replace
from typing import Any

import torch

import lowtide
from distributed.launch import DEVICE, main
from distributed.vocab_cases import head, plain, shard_of, spread, whole
from head.kernel_plans import input_grad, weight_grad
from lowtide.head.engine import Chunks
from lowtide.head.plan import HeadPlan
from lowtide.head.terms import dense, divergence
from support import divergence_of, relative_error

N, D, V = 10, 24, 61
NEAR = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of gradients
KINDS = [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.2), ("tv", 0.5)]
REAL_PLAN = divergence.plan_both_sides


def small_plans(head: Any, args: Any, n: int, wanted: Any, *, stored: bool) -> tuple[HeadPlan, HeadPlan]:
    """Chunks of 7 rows, a narrow gradient's from products of 3."""
    narrow = head.dtype != torch.float32
    rows = {"chunk_rows": 7, "chunks": -(-n // 7), "product_rows": 3 if narrow and any(wanted) else 7}
    found = REAL_PLAN(head, args, n, wanted, stored=stored)
    if DEVICE != "cpu":
        return tuple(replace(plan, **rows) for plan in found)  # type: ignore[return-value]
    gemms: dict[str, Any] = {
        "logits_gemm": "blocks" if narrow else "same",
        "backward_gemm": "narrow" if narrow else "same",
    }
    student, teacher = (replace(plan, backend="row", block_rows=11, **rows, **gemms) for plan in found)
    return student, teacher


def _with_kernels() -> None:
    """Nothing but the kernels may run."""
    warnings.simplefilter("ignore", RuntimeWarning)  # the interpreter computes in NumPy
    vars(divergence)["plan_both_sides"] = small_plans
    vars(divergence)["Dense"] = None
    vars(dense)["outcomes"] = None
    if DEVICE == "cpu":
        Chunks.input_grad = input_grad
        Chunks.weight_grad = weight_grad


def values_and_gradients() -> None:
    """Each kind and dtype; gradients stored and recomputed, a value for each token and their mean, masked rows."""
    _with_kernels()
    ways = itertools.cycle(("replicated", "sequence", "local"))
    for i, ((kind, beta), dtype, reduction) in enumerate(itertools.product(KINDS, NEAR, ("none", "mean"))):
        way, capped = next(ways), i % 2 == 0
        x, w, b, _ = head((2, N // 2), D, V, dtype=dtype, seed=i)
        tx, tw, tb, _ = head((2, N // 2), D - 8, V, dtype=dtype, seed=100 + i)
        mask = (torch.arange(N).view(2, N // 2) % 4 != 1).to(DEVICE)
        caps = {"softcap": 2.5, "teacher_softcap": 1.5} if capped else {}
        exact = [t.detach().double().requires_grad_() for t in (x, w, b)]
        logps = []
        for (hidden, weight, bias), cap in ((exact, "softcap"), ((tx, tw, tb), "teacher_softcap")):
            z = torch.nn.functional.linear(hidden.double(), weight.double(), bias.double())
            z = caps[cap] * torch.tanh(z / caps[cap]) if capped else z
            logps.append((z / 1.3).log_softmax(-1))
        want = divergence_of(logps[0], logps[1].detach(), kind, beta)
        want = want[mask].mean() if reduction == "mean" else want.where(mask, 0)
        u = torch.rand(want.shape, generator=torch.Generator().manual_seed(i)).to(DEVICE)
        (want * u).sum().backward()
        with torch.no_grad():
            x[~mask], tx[~mask] = torch.nan, torch.inf
        px, pw, pb = (spread(way, t, of_vocab=k > 0) for k, t in enumerate((x, w, b)))
        teacher = [spread(way, t.detach(), of_vocab=k > 0) for k, t in enumerate((tx, tw, tb))]
        value = plain(
            lowtide.linear_divergence(
                px, pw, *teacher[:2], linear_bias=pb, teacher_bias=teacher[2], kind=kind, beta=beta, temperature=1.3,
                mask=mask, reduction=reduction, **caps, **shard_of(way, pw),
                options=lowtide.HeadOptions(gradient="recompute" if i % 4 == 1 else "auto"),
            )
        )  # fmt: skip
        what = (kind, dtype, reduction, way, capped)
        assert relative_error(value, want) < 1e-5, what
        (value * u).sum().backward()
        for k, (part, leaf) in enumerate(zip((px, pw, pb), exact, strict=True)):
            assert relative_error(whole(way, part.grad, of_vocab=k > 0), leaf.grad) < NEAR[dtype], (what, k)


if __name__ == "__main__":
    main(vars())
