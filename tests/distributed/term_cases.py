"""The term of docs/add-a-term.md with the vocabulary sharded: the class as it stands on the page, on several ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import lowtide
from distributed.launch import main
from lowtide.head.call import Head, Wanted
from lowtide.head.engine import gradient_buffers, run
from lowtide.head.plan import plan_head
from lowtide.head.ranks.parallel import Ranks
from lowtide.head.rows import Rows
from pages.blocks import ROOT, blocks_of

PAGE = "docs/add-a-term.md"
N, D, V = 50, 16, 97


def the_term_of_the_page() -> None:
    """Values and gradients in several chunks, a rank without classes among the ranks."""
    names: dict[str, Any] = {}
    exec(blocks_of((ROOT / PAGE).read_text(), PAGE)[0].code, names)
    x, w, b, token_weight = (torch.randn(size, dtype=torch.float64) for size in ((N, D), (V, D), (V,), (N,)))
    y, scale, softcap = torch.randint(V, (N,)), torch.tensor(0.7, dtype=torch.float64), 3.0
    parts = [(0, 40), (40, V), (V, V)]
    first, stop = parts[dist.get_rank()]
    shard = lowtide.VocabShard(group=dist.group.WORLD, first=first, rows=stop - first, vocab=V, largest=V - 40)
    head = Head(
        input=x,
        weight_VD=w[first:stop],
        bias_V=b[first:stop],
        scale=scale,
        softcap=softcap,
        dtype=x.dtype,
        workspace_mib=0.05,
        accumulate="auto",
        backend="torch",
        ignored_tokens="auto",
        skip=0.0,
        order=0,
        ranks=Ranks(shard, (N,), x.device, None, None, trained=True),
    )
    rows, plan = Rows(tokens=N), plan_head(N, D, shard.most_rows, x.dtype, x.device, head.options)
    assert plan.chunks > 1
    into = gradient_buffers(head, rows, plan, Wanted(input=True, weight=True, bias=True))
    term = names["Brier"](head, y)
    numbers = run(head, rows, plan, term, into, upstream=lambda _, part: token_weight[part])

    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    z = softcap * torch.tanh((leaves[0] @ leaves[1].T + leaves[2]) * scale / softcap)
    loss = (z.softmax(1) - torch.nn.functional.one_hot(y, V)).square().sum(1)
    dx, dw, db = torch.autograd.grad((token_weight * loss).sum(), leaves)
    for got, exact in (
        (numbers["loss"], loss.detach()),
        (into.input_ND, dx),
        (into.weight_VD, dw[first:stop]),
        (into.bias_V, db[first:stop]),
    ):
        torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)


if __name__ == "__main__":
    main(vars())
