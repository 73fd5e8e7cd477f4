"""Cross entropy by exponentials, from the records of the engine to those of this path, whole and sharded."""

from typing import Any

import torch
from torch import Tensor

from lowtide.head.exponentials.path import ExpHead
from lowtide.head.gradients import Gradients
from lowtide.head.head_plan import HeadPlan
from lowtide.head.schedules import CrossEntropyJob, Rows
from lowtide.head.softmax import LossTerms
from lowtide.head.vocab.exp import ShardedExp
from lowtide.head.vocab.exp_sums import ExpShard


def by_exponentials(head: Any, targets: Any, plan: HeadPlan, settle: Any, known: Any) -> dict[str, Tensor]:
    """Return "loss", "lse" and "miss" [n]; with ``settle`` add the gradients, from ``known`` numbers where given."""
    loss, ranks = targets.loss, head.ranks
    job = CrossEntropyJob(
        input=head.input, weight_VD=head.weight_VD, target_N=targets.y, bias_V=head.bias_V, token_weight_N=None,
        num_items=None, logit_scale=head.scale, softcap=head.softcap,
        terms=LossTerms(class_weight=loss.class_weight, label_smoothing=loss.label_smoothing, z_loss=loss.z_loss),
        ignore_index=0, reduction="", dtype=head.dtype, wide=head.wide,
    )  # fmt: skip
    if ranks.alone:
        rows = Rows(index=None, kept=None, target=targets.y, unit=targets.unit)
        path = ExpHead(job, rows, plan)
        if known is not None:
            factor, into = settle()
            path.rebuild(factor, into, known["lse"], known["miss"])
            return {}
        numbers = torch.empty(3, len(targets.y), device=targets.y.device)
        path.run(numbers[0], settle, numbers[1], numbers[2])
        return dict(zip(("loss", "lse", "miss"), numbers, strict=True))
    tokens = ranks.tokens
    kept_N = targets.rows.kept

    def spread(x: Any, fill: float) -> Any:
        return None if x is None else tokens.arranged(x, fill)

    sharded = ShardedExp(
        ExpShard(job, plan, ranks, spread(targets.y, -1), spread(kept_N, 0), spread(loss.own_n, 0), loss.total)
    )
    if known is not None:
        factor, into = settle()
        sharded.rebuild(spread(factor, 0), spread(known["lse"], 0), spread(known["miss"], 0), into)
        return {}
    into, factor_GL = Gradients(), None
    if settle is not None:
        factor, into = settle()
        factor_GL = spread(factor, 0)
    found = sharded.run(None if factor_GL is None else lambda: factor_GL, into)
    return dict(zip(("loss", "lse", "miss"), (tokens.put_back(x) for x in found), strict=True))
