"""TRL's ``ChunkedDivergenceFunction`` on `lowtide.linear_divergence`: distillation goes through it."""

from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.head.divergence import linear_divergence
from lowtide.head.options import HeadOptions
from lowtide.head.token_stats import linear_token_stats
from lowtide.trl.dtypes import as_trl_casts, why_not_tensors, why_not_together
from lowtide.trl.numbers import why_not_number


class DivergenceCall(NamedTuple):
    """The arguments as TRL passes them: its names, its order, its defaults."""

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


def why_not(call: DivergenceCall) -> str | None:
    """Return why this call must go to TRL's own function."""
    student = (call.student_hidden, call.student_weight, call.student_bias)
    teacher = (call.teacher_hidden, call.teacher_weight, call.teacher_bias)
    why = (
        why_not_tensors("student_", student)
        or why_not_tensors("teacher_", teacher)
        or why_not_number("beta", call.beta, positive=False)
        or (None if 0 <= call.beta <= 1 else "beta is not from 0 to 1")
        or why_not_number("temperature", call.temperature, positive=True)
        or why_not_number("student_logit_scale", call.student_logit_scale, positive=True)
        or why_not_number("teacher_logit_scale", call.teacher_logit_scale, positive=True)
    )
    if why is not None:
        return why
    if call.student_final_logit_softcapping is not None or call.teacher_final_logit_softcapping is not None:
        return "a model caps its logits, which linear_divergence does not"
    if call.student_logit_scale != call.teacher_logit_scale:
        return "student and teacher scale their logits differently, which linear_divergence does not"
    if call.student_weight.shape[0] != call.teacher_weight.shape[0]:
        return "student and teacher have different vocabularies, which TRL cuts to the student's"
    return why_not_together(student, teacher)


def run(call: DivergenceCall, options: HeadOptions | None) -> tuple[Tensor, Tensor]:
    """Return what TRL's function would: the divergence [N] and the student's entropy [N], which has no gradient."""
    student = (call.student_hidden, call.student_weight, call.student_bias)
    teacher = (call.teacher_hidden, call.teacher_weight, call.teacher_bias)
    temperature = call.temperature / call.student_logit_scale  # the same scale on both sides
    with as_trl_casts(student), as_trl_casts(teacher):
        divergence = linear_divergence(
            call.student_hidden,
            call.student_weight,
            call.teacher_hidden,
            call.teacher_weight,
            kind="jsd",  # beta 0 and 1 are the two KLs in TRL as well
            beta=call.beta,
            temperature=temperature,
            linear_bias=call.student_bias,
            teacher_bias=call.teacher_bias,
            options=options,
        )
        with torch.no_grad():
            entropy = linear_token_stats(
                call.student_hidden,
                call.student_weight,
                want=("entropy",),
                linear_bias=call.student_bias,
                logit_scale=1 / temperature,
                options=options,
            ).entropy
    assert entropy is not None
    return divergence.float(), entropy.float()


def probe() -> DivergenceCall:
    """Return a small call with every option on that lowtide knows, to compare TRL's answer with lowtide's."""
    hidden = torch.linspace(-2, 2, 12, device="cpu", dtype=torch.float32).view(3, 4).cos()
    weight = torch.linspace(0, 9, 28, device="cpu", dtype=torch.float32).view(7, 4).sin()
    teacher, teacher_weight = hidden.tan()[:, :3], weight.cos()[:, :3]
    bias = weight.sum(1)
    return DivergenceCall(hidden, weight, bias, teacher, teacher_weight, -bias, 0.3, 0.7, 0.8, None, 0.8, None)
