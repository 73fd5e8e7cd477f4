"""Objectives as functions of log-probabilities: supervised, preference, policy gradient and distillation.

Each takes per-token values [..., T] and a mask, or one value per sequence, as `lowtide.linear_logprobs`,
`lowtide.linear_token_stats` and `lowtide.linear_divergence` give them; none of them sees a logit, and none makes
the host wait for a GPU. Every denominator is named: see `reduce_tokens`. `multi_token_loss`, for several predictions
per position, takes hidden states and output embeddings instead.
"""

from lowtide.losses.multi_token import StepLosses, future_labels, multi_token_loss
from lowtide.losses.policy_gradient import (
    bnpo_loss,
    cispo_loss,
    dapo_loss,
    dr_grpo_loss,
    grpo_loss,
    gspo_loss,
    ppo_loss,
    reinforce_loss,
    sapo_loss,
)
from lowtide.losses.policy_terms import (
    clipped_surrogate,
    group_advantages,
    importance_ratio,
    kl_estimate,
    leave_one_out_advantages,
    policy_loss,
    sampler_correction,
)
from lowtide.losses.preference import (
    DPO_KINDS,
    cpo_loss,
    dpo_loss,
    kto_loss,
    kto_reference,
    orpo_loss,
    simpo_loss,
)
from lowtide.losses.reduction import reduce_tokens, sequence_logprobs, wpo_weights
from lowtide.losses.supervised import (
    dft_loss,
    focal_loss,
    gkd_loss,
    label_smoothed_loss,
    sampled_distillation_loss,
    sft_loss,
    soft_target_loss,
    z_loss,
)

__all__ = [
    "DPO_KINDS",
    "StepLosses",
    "bnpo_loss",
    "cispo_loss",
    "clipped_surrogate",
    "cpo_loss",
    "dapo_loss",
    "dft_loss",
    "dpo_loss",
    "dr_grpo_loss",
    "focal_loss",
    "future_labels",
    "gkd_loss",
    "group_advantages",
    "grpo_loss",
    "gspo_loss",
    "importance_ratio",
    "kl_estimate",
    "kto_loss",
    "kto_reference",
    "label_smoothed_loss",
    "leave_one_out_advantages",
    "multi_token_loss",
    "orpo_loss",
    "policy_loss",
    "ppo_loss",
    "reduce_tokens",
    "reinforce_loss",
    "sampled_distillation_loss",
    "sampler_correction",
    "sapo_loss",
    "sequence_logprobs",
    "sft_loss",
    "simpo_loss",
    "soft_target_loss",
    "wpo_weights",
    "z_loss",
]
