"""lowtide: train large-vocabulary, long-context language models without the memory peaks.

The final linear layer and its loss in one call, value and gradients, without the logits ever existing
(`linear_cross_entropy`), the same for any function of the logits (`linear_apply`), one call that puts the loss into a
Hugging Face model (`patch`), and one that puts log-probabilities, entropies and divergences of that kind into TRL's
trainers (`patch_trl`).
"""

from lowtide import distributed, errors, layers, losses, memory, nn
from lowtide.head.apply import linear_apply
from lowtide.head.cross_entropy import linear_cross_entropy
from lowtide.head.divergence import TeacherTopK, linear_divergence
from lowtide.head.head_plan import HeadPlan
from lowtide.head.options import HeadOptions
from lowtide.head.pair_plan import plan_divergence
from lowtide.head.plan import plan_head
from lowtide.head.token_stats import TokenStats, linear_logprobs, linear_token_stats
from lowtide.head.vocab_parallel import VocabShard
from lowtide.mlp.swiglu import swiglu_mlp
from lowtide.models import PatchReport, patch, unpatch
from lowtide.trl import TrlReport, patch_trl, unpatch_trl

__version__ = "0.1.0"

__all__ = [
    "HeadOptions",
    "HeadPlan",
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
    "linear_cross_entropy",
    "linear_divergence",
    "linear_logprobs",
    "linear_token_stats",
    "losses",
    "memory",
    "nn",
    "patch",
    "patch_trl",
    "plan_divergence",
    "plan_head",
    "swiglu_mlp",
    "unpatch",
    "unpatch_trl",
]
