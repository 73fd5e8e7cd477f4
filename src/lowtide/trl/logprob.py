"""TRL's ``ChunkedLogProbFunction`` on `lowtide.linear_token_stats`: SFT, DPO, KTO, GRPO and RLOO go through it."""

from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.head.options import HeadOptions
from lowtide.head.token_stats import linear_token_stats
from lowtide.trl.dtypes import as_trl_casts, why_not_tensors
from lowtide.trl.numbers import why_not_cap, why_not_number

# TRL's names of what it can return after the log-probabilities, in the order in which it does, and TokenStats' fields
_FIELDS = {
    "entropy": "entropy",
    "log_sum_sq_probs": "sum_sq_prob",
    "mean_logits": "mean_logit",
    "is_top1": "is_top1",
}
_ALWAYS = "log_probs"


class LogProbCall(NamedTuple):
    """The arguments as TRL passes them: its names, its order, its defaults."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    targets: Tensor  # [N]
    temperature: float
    chunk_size: int  # of TRL's own tiles; here HeadOptions says how much memory to take
    final_logit_softcapping: float | None = None
    logit_scale: float = 1.0
    outputs: tuple[str, ...] = tuple(_FIELDS)


def why_not(call: LogProbCall) -> str | None:
    """Return why this call must go to TRL's own function."""
    for name in call.outputs:
        if name not in _FIELDS and name != _ALWAYS:
            return f"outputs names {name!r}, which lowtide does not know"
    return (
        why_not_tensors("", (call.hidden, call.weight, call.bias))
        or why_not_number("temperature", call.temperature, positive=True)
        or why_not_number("logit_scale", call.logit_scale, positive=False)
        or why_not_cap("final_logit_softcapping", call.final_logit_softcapping)
    )


def run(call: LogProbCall, options: HeadOptions | None) -> tuple[Tensor | None, ...]:
    """Return what TRL's function would: log-probabilities, then what ``outputs`` names, None for the rest; float32.

    TRL divides by the temperature after the cap, so the cap is divided by it as well:
    ``cap tanh(z / cap) / T = (cap / T) tanh((z / T) / (cap / T))``.
    """
    cap = call.final_logit_softcapping
    wanted = [field for name, field in _FIELDS.items() if name in call.outputs]
    with as_trl_casts((call.hidden, call.weight, call.bias)):
        stats = linear_token_stats(
            call.hidden,
            call.weight,
            call.targets,
            # lse keeps a call for log-probabilities alone on the same path as one for entropies too: a policy that is
            # its own reference must find the very same numbers, or a ratio of 1 becomes noise around 1
            want=("logprob", "lse", *wanted),
            linear_bias=call.bias,
            softcap=None if cap is None else cap / call.temperature,
            logit_scale=call.logit_scale / call.temperature,
            options=options,
        )
    assert stats.logprob is not None
    entropy, sum_sq, mean = stats.entropy, stats.sum_sq_prob, stats.mean_logit
    return (
        stats.logprob.float(),
        None if entropy is None else entropy.float(),
        None if sum_sq is None else sum_sq.log().float(),
        None if mean is None else mean.detach().float(),  # TRL's has no gradient
        stats.is_top1,
    )


def probe() -> LogProbCall:
    """Return a small call with every option on, to compare TRL's answer with lowtide's."""
    hidden = torch.linspace(-2, 2, 12, device="cpu", dtype=torch.float32).view(3, 4).cos()
    weight = torch.linspace(0, 9, 28, device="cpu", dtype=torch.float32).view(7, 4).sin()
    targets = torch.tensor([0, 6, 3], device="cpu")
    return LogProbCall(hidden, weight, weight.sum(1), targets, 0.7, 3, 1.5, 0.8)
