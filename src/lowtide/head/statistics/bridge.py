"""Token statistics by exponentials, from the records of the engine to those of this path."""

from typing import Any

import torch
from torch import Tensor

from lowtide.head.call import TokenStatsArgs
from lowtide.head.gradients import Gradients
from lowtide.head.head_plan import HeadPlan
from lowtide.head.statistics.of_logits import Known, Upstream
from lowtide.head.statistics.rows import StatsJob


def _job(head: Any, args: TokenStatsArgs) -> StatsJob:
    return StatsJob(
        input=head.input, weight_VD=head.weight_VD, target_NK=args.target, bias_V=head.bias_V, logit_scale=head.scale,
        softcap=head.softcap, want=args.wanted, topk=args.topk, ignore_index=args.ignore_index, dtype=head.dtype,
        wide=head.wide, classes=head.ranks.vocab,
    )  # fmt: skip


def numbers_by_exponentials(head: Any, args: TokenStatsArgs, plan: HeadPlan) -> dict[str, Tensor]:
    """Return the numbers of all tokens."""
    from lowtide.head.statistics.exp import ExpStats

    return ExpStats(_job(head, args), plan).forward()


def gradients_by_exponentials(
    head: Any, args: TokenStatsArgs, plan: HeadPlan, y_NK: Tensor, known: dict[str, Tensor], g: Any, into: Gradients
) -> None:
    """Add the gradients."""
    from lowtide.head.statistics.exp import ExpStats

    top, top_logprob = known["top"][:, None], known["top_logprob"][:, None]
    of_rows = Known(
        lse=known["lse"], entropy=known.get("entropy"), ids=torch.cat((top, y_NK), 1),
        logprobs=torch.cat((top_logprob, known["logprob"]), 1),
    )  # fmt: skip
    upstream = Upstream(logprob=g.logprob, entropy=g.entropy, lse=g.lse, mean_logit=g.mean)
    ExpStats(_job(head, args), plan).backward(of_rows, upstream, into)
