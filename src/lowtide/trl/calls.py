"""One call of each of TRL's two autograd functions: its arguments, why lowtide cannot compute it, and how it does.

TRL casts the weight to autocast's dtype where autocast is on, elsewhere to that of the hidden states.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from lowtide.arguments import is_autocast_on
from lowtide.distributed.zero import shape_of
from lowtide.head.divergence import linear_divergence
from lowtide.head.options import HeadOptions
from lowtide.head.token_stats import Want, linear_token_stats

# Hidden states, weight [V, D], bias [V] or None.
Head = tuple[Tensor, Tensor, Tensor | None]
_NARROW = (torch.float16, torch.bfloat16)
# TRL's names of what it returns after the log-probabilities, in its order, and the fields of TokenStats.
_FIELDS: dict[str, Want] = {
    "entropy": "entropy", "log_sum_sq_probs": "sum_sq_prob", "mean_logits": "mean_logit", "is_top1": "is_top1"
}  # fmt: skip
_ALWAYS = "log_probs"


class LogProbCall(NamedTuple):
    """A call of ``ChunkedLogProbFunction``, which SFT, DPO, KTO, GRPO and RLOO use: TRL's names, order and defaults."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    targets: Tensor  # [N]
    temperature: float
    chunk_size: int  # of TRL's own tiles; HeadOptions limits lowtide's memory
    final_logit_softcapping: float | None = None
    logit_scale: float = 1.0
    outputs: tuple[str, ...] = tuple(_FIELDS)

    def why_not(self) -> str | None:
        """Return why TRL's own function must compute this call."""
        for name in self.outputs:
            if name not in _FIELDS and name != _ALWAYS:
                return f"outputs names {name!r}, which lowtide does not know"
        return (
            _why_not_tensors("", self[:3])
            or _why_not_numbers(self, "temperature", "final_logit_softcapping")
            or _why_not_numbers(self, "logit_scale", least=-math.inf)
        )

    def run(self, options: HeadOptions | None) -> tuple[Tensor | None, ...]:
        """Return TRL's result: log-probabilities, then what ``outputs`` names, None for the rest; float32.

        TRL divides by the temperature after the cap, so the cap is divided by it as well:
        ``cap tanh(z / cap) / T = (cap / T) tanh((z / T) / (cap / T))``.
        """
        fields = [field for name, field in _FIELDS.items() if name in self.outputs]
        with _as_trl_casts(self[:3]):
            stats = linear_token_stats(
                self.hidden,
                self.weight,
                self.targets,
                # lse keeps a call for log-probabilities alone on the same path as one for entropies too: a policy that
                # is its own reference must give bitwise equal values, or a ratio of 1 becomes noise around 1
                want=("logprob", "lse", *fields),
                linear_bias=self.bias,
                softcap=_divided(self.final_logit_softcapping, self.temperature),
                logit_scale=self.logit_scale / self.temperature,
                options=options,
            )
        entropy, sum_sq, mean = stats.entropy, stats.sum_sq_prob, stats.mean_logit
        return (
            stats.logprob.float(),
            None if entropy is None else entropy.float(),
            None if sum_sq is None else sum_sq.log().float(),
            None if mean is None else mean.detach().float(),  # TRL's has no gradient
            stats.is_top1,
        )

    @classmethod
    def probe(cls) -> Self:
        """Return a small call with every option on, to compare TRL's result with lowtide's."""
        hidden, weight = _small_head()
        targets = torch.tensor([0, 6, 3], device="cpu")
        return cls(hidden, weight, weight.sum(1), targets, 0.7, 3, 1.5, 0.8)


class DivergenceCall(NamedTuple):
    """A call of ``ChunkedDivergenceFunction``, which distillation uses: TRL's names, order and defaults."""

    student_hidden: Tensor  # [N, D]
    student_weight: Tensor  # [V, D]
    student_bias: Tensor | None  # [V]
    teacher_hidden: Tensor  # [N, D']
    teacher_weight: Tensor  # [V, D']
    teacher_bias: Tensor | None  # [V]
    beta: float
    temperature: float = 1.0
    student_logit_scale: float = 1.0
    student_final_logit_softcapping: float | None = None
    teacher_logit_scale: float = 1.0
    teacher_final_logit_softcapping: float | None = None

    def why_not(self) -> str | None:
        """Return why TRL's own function must compute this call."""
        student, teacher = self[:3], self[3:6]
        why = (
            _why_not_tensors("student_", student)
            or _why_not_tensors("teacher_", teacher)
            or _why_not_numbers(self, "beta", least=-math.inf)
            or _why_not_numbers(self, "temperature", "student_logit_scale", "teacher_logit_scale")
            or _why_not_numbers(self, "student_final_logit_softcapping", "teacher_final_logit_softcapping")
        )
        if why is not None:
            return why
        if not 0 <= self.beta <= 1:
            return "beta is not from 0 to 1"
        if self.student_logit_scale != self.teacher_logit_scale:
            return "student and teacher scale their logits differently, which linear_divergence does not"
        if shape_of(self.student_weight)[0] > shape_of(self.teacher_weight)[0]:
            return "the teacher has fewer classes than the student"
        return _why_not_together(student, teacher)

    def run(self, options: HeadOptions | None) -> tuple[Tensor, Tensor]:
        """Return TRL's result: the divergence [N] and the student's entropy [N], which has no gradient.

        TRL scales the logits by m, caps them and divides by the temperature. lowtide does not scale before the cap;
        instead cap and temperature are divided by m: ``cap tanh(m z / cap) / T`` is ``cap' tanh(z / cap') / T'``. Of a
        teacher with more classes both take the first ones.
        """
        scale = self.student_logit_scale  # the teacher's as well
        temperature, cap = self.temperature / scale, self.student_final_logit_softcapping
        V = self.student_weight.shape[0]
        with _as_trl_casts(self[:3]), _as_trl_casts(self[3:6]):
            divergence = linear_divergence(
                self.student_hidden,
                self.student_weight,
                self.teacher_hidden,
                self.teacher_weight[:V],
                kind="jsd",  # beta 0 and 1 are the two KLs in TRL as well
                beta=self.beta,
                temperature=temperature,
                linear_bias=self.student_bias,
                teacher_bias=None if self.teacher_bias is None else self.teacher_bias[:V],
                softcap=_divided(cap, scale),
                teacher_softcap=_divided(self.teacher_final_logit_softcapping, scale),
                options=options,
            )
            with torch.no_grad():
                entropy = linear_token_stats(
                    self.student_hidden,
                    self.student_weight,
                    want=("entropy",),
                    linear_bias=self.student_bias,
                    softcap=_divided(cap, self.temperature),
                    logit_scale=1 / temperature,
                    options=options,
                ).entropy
        return divergence.float(), entropy.float()

    @classmethod
    def probe(cls) -> Self:
        """Return a small call with every option on, to compare TRL's result with lowtide's."""
        hidden, weight = _small_head()
        teacher, teacher_weight, bias = hidden.tan()[:, :3], weight.cos()[:, :3], weight.sum(1)
        return cls(hidden, weight, bias, teacher, teacher_weight, -bias, 0.3, 0.7, 0.8, 1.5, 0.8, 2.5)


def _small_head() -> tuple[Tensor, Tensor]:
    hidden = torch.linspace(-2, 2, 12, device="cpu", dtype=torch.float32).view(3, 4).cos()
    return hidden, torch.linspace(0, 9, 28, device="cpu", dtype=torch.float32).view(7, 4).sin()


def _divided(cap: float | None, by: float) -> float | None:
    return None if cap is None else cap / by


def _why_not_numbers(call: object, *names: str, least: float = 0) -> str | None:
    """Return why lowtide cannot take these numbers: a tensor, not finite, or not above ``least``; None is no cap."""
    for name in names:
        value = getattr(call, name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"{name} is a {type(value).__name__}, not a number"
        if not math.isfinite(value) or value <= least:
            return f"{name} is {'not above 0' if math.isfinite(value) else 'not finite'}"
    return None


def _why_not_tensors(side: str, head: Head) -> str | None:
    """Return why lowtide cannot take a head as TRL does; ``side`` goes before the arguments' names."""
    for name, tensor in zip(("hidden", "weight", "bias"), head, strict=True):
        if tensor is None:
            continue
        if type(tensor) not in (Tensor, nn.Parameter):
            return f"{side}{name} is a {type(tensor).__name__}"
    hidden, dtypes = head[0], _dtypes(head)
    if is_autocast_on(hidden.device.type):
        return f"{side}hidden, weight or bias is float64 under autocast" if torch.float64 in dtypes else None
    if len(dtypes) > 1 and not (hidden.dtype in _NARROW and dtypes <= {hidden.dtype, torch.float32}):
        return f"{side}hidden is {hidden.dtype}, and weight or bias is not"
    return None


def _why_not_together(student: Head, teacher: Head) -> str | None:
    """Return why two heads that lowtide can take one by one cannot run in one call."""
    if is_autocast_on(student[0].device.type):
        return None
    dtypes = _dtypes(student), _dtypes(teacher)
    if (torch.float64 in dtypes[0]) != (torch.float64 in dtypes[1]):
        return "one of student and teacher is float64"
    if max(map(len, dtypes)) > 1 and student[0].dtype != teacher[0].dtype:  # the autocast of one would cast the other
        return "student's and teacher's hidden states differ in dtype, and a weight or bias from them"
    return None


def _as_trl_casts(head: Head) -> AbstractContextManager[object]:
    """Return the context in which a head casts as TRL does: autocast for a float32 weight and narrower hidden states.

    Backward then returns the weight's gradient in float32, as TRL's does, and not rounded to the hidden states' dtype.
    """
    hidden = head[0]
    if is_autocast_on(hidden.device.type) or len(_dtypes(head)) == 1:
        return nullcontext()
    return torch.autocast(hidden.device.type, dtype=hidden.dtype)


def _dtypes(head: Head) -> set[torch.dtype]:
    return {tensor.dtype for tensor in head if tensor is not None}
