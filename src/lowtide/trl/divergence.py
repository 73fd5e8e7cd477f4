"""TRL's ``ChunkedDivergenceFunction`` on `lowtide.linear_divergence`: distillation goes through it."""

from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.head.divergence import linear_divergence
from lowtide.head.options import HeadOptions
from lowtide.head.token_stats import linear_token_stats
from lowtide.trl.dtypes import as_trl_casts, why_not_tensors, why_not_together
from lowtide.trl.numbers import why_not_cap, why_not_number


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
        or why_not_cap("student_final_logit_softcapping", call.student_final_logit_softcapping)
        or why_not_cap("teacher_final_logit_softcapping", call.teacher_final_logit_softcapping)
    )
    if why is not None:
        return why
    if call.student_logit_scale != call.teacher_logit_scale:
        return "student and teacher scale their logits differently, which linear_divergence does not"
    if call.student_weight.shape[0] != call.teacher_weight.shape[0]:
        return "student and teacher have different vocabularies, which TRL cuts to the student's"
    return why_not_together(student, teacher)


def run(call: DivergenceCall, options: HeadOptions | None) -> tuple[Tensor, Tensor]:
    """Return what TRL's function would: the divergence [N] and the student's entropy [N], which has no gradient.

    TRL scales the logits by m, caps them and divides by the temperature. Here nothing scales them before the cap, and
    cap and temperature are divided by m instead: ``cap tanh(m z / cap) / T`` is ``cap' tanh(z / cap') / T'``.
    """
    student = (call.student_hidden, call.student_weight, call.student_bias)
    teacher = (call.teacher_hidden, call.teacher_weight, call.teacher_bias)
    scale = call.student_logit_scale  # the same on both sides
    temperature = call.temperature / scale
    cap, teacher_cap = call.student_final_logit_softcapping, call.teacher_final_logit_softcapping
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
            softcap=None if cap is None else cap / scale,
            teacher_softcap=None if teacher_cap is None else teacher_cap / scale,
            options=options,
        )
        with torch.no_grad():
            entropy = linear_token_stats(
                call.student_hidden,
                call.student_weight,
                want=("entropy",),
                linear_bias=call.student_bias,
                softcap=None if cap is None else cap / call.temperature,
                logit_scale=1 / temperature,
                options=options,
            ).entropy
    assert entropy is not None
    return divergence.float(), entropy.float()


def probe() -> DivergenceCall:
    """Return a small call with every option on, to compare TRL's answer with lowtide's."""
    hidden = torch.linspace(-2, 2, 12, device="cpu", dtype=torch.float32).view(3, 4).cos()
    weight = torch.linspace(0, 9, 28, device="cpu", dtype=torch.float32).view(7, 4).sin()
    teacher, teacher_weight = hidden.tan()[:, :3], weight.cos()[:, :3]
    bias = weight.sum(1)
    return DivergenceCall(hidden, weight, bias, teacher, teacher_weight, -bias, 0.3, 0.7, 0.8, 1.5, 0.8, 2.5)
