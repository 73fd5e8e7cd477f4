"""lowtide: train large-vocabulary, long-context language models without the memory peaks.

The final linear layer and its loss in one call, value and gradients, without the logits ever existing
(`linear_cross_entropy`), the same for any function of the logits (`linear_apply`), one call that puts the loss into a
Hugging Face model (`patch`), one that puts log-probabilities, entropies and divergences of that kind into TRL's
trainers (`patch_trl`), and a callback that does both in a Trainer (`PatchCallback`).
"""

from typing import TYPE_CHECKING

from lowtide import errors
from lowtide.lazy import on_first_use

__version__ = "0.1.0"

__all__ = [
    "HeadOptions",
    "HeadPlan",
    "PatchCallback",
    "PatchReport",
    "TeacherTopK",
    "TokenStats",
    "TrlReport",
    "VocabShard",
    "__version__",
    "distributed",
    "errors",
    "layers",
    "linear_apply",
    "linear_contrastive",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_logprobs",
    "linear_token_stats",
    "losses",
    "memory",
    "nn",
    "patch",
    "patch_trl",
    "plan",
    "plan_divergence",
    "plan_head",
    "plan_memory",
    "scoring",
    "skip_report",
    "swiglu_mlp",
    "unpatch",
    "unpatch_trl",
]

if TYPE_CHECKING:
    from lowtide import distributed, layers, losses, memory, nn, plan
    from lowtide.head.apply import linear_apply
    from lowtide.head.contrastive import linear_contrastive
    from lowtide.head.cross_entropy import linear_cross_entropy
    from lowtide.head.divergence import TeacherTopK, linear_divergence
    from lowtide.head.options import HeadOptions
    from lowtide.head.plan import HeadPlan, plan_divergence, plan_head
    from lowtide.head.ranks import VocabShard
    from lowtide.head.token_stats import TokenStats, linear_logprobs, linear_token_stats
    from lowtide.mlp.swiglu import swiglu_mlp
    from lowtide.models import PatchReport, patch, scoring, unpatch
    from lowtide.models.callback import PatchCallback
    from lowtide.plan.planning import plan_memory
    from lowtide.skip.report import skip_report
    from lowtide.trl import TrlReport, patch_trl, unpatch_trl
else:
    __getattr__, __dir__ = on_first_use(
        __name__,
        {
            "lowtide.distributed": (),
            "lowtide.head.apply": ("linear_apply",),
            "lowtide.head.contrastive": ("linear_contrastive",),
            "lowtide.head.cross_entropy": ("linear_cross_entropy",),
            "lowtide.head.divergence": ("TeacherTopK", "linear_divergence"),
            "lowtide.head.options": ("HeadOptions",),
            "lowtide.head.plan": ("HeadPlan", "plan_divergence", "plan_head"),
            "lowtide.head.ranks": ("VocabShard",),
            "lowtide.skip.report": ("skip_report",),
            "lowtide.head.token_stats": ("TokenStats", "linear_logprobs", "linear_token_stats"),
            "lowtide.layers": (),
            "lowtide.losses": (),
            "lowtide.memory": (),
            "lowtide.mlp.swiglu": ("swiglu_mlp",),
            "lowtide.models": ("PatchReport", "patch", "scoring", "unpatch"),
            "lowtide.models.callback": ("PatchCallback",),
            "lowtide.nn": (),
            "lowtide.plan": (),
            "lowtide.plan.planning": ("plan_memory",),
            "lowtide.trl": ("TrlReport", "patch_trl", "unpatch_trl"),
        },
        needs={"PatchCallback": ("transformers", "lowtide[hf]")},
    )
