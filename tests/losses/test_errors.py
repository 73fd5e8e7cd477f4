"""Bad arguments of the losses: one error that names the argument, what was expected and what came."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide import losses
from lowtide.errors import ArgumentTypeError, LowtideError
from promises import promise

pytestmark = promise("errors")
ONE, A, X = torch.zeros(2, 3), torch.ones(2), torch.ones(3)
HIDDEN, W, Y = torch.zeros(2, 3, 4, 5), torch.zeros(7, 5), torch.zeros(3, 4, dtype=torch.long)
L, PAIR, MIXED = losses, (X, X, X, X), [HIDDEN[0], HIDDEN[1, :, :, :2]]


@pytest.mark.parametrize(
    ("f", "text"),
    [
        (lambda: L.reduce_tokens(ONE, reduction="sum", num_items=3), "num_items: expected None with reduction='sum'"),
        (lambda: L.reduce_tokens(ONE, num_items=0), "num_items: expected a finite number above 0, got 0"),
        (lambda: L.focal_loss(ONE, gamma=-1), "gamma"),
        (lambda: L.label_smoothed_loss(ONE, ONE, ONE[0]), "lse: expected shape"),
        (lambda: L.z_loss(ONE, coef=math.inf), "coef: expected a finite number, 0 or above"),
        (lambda: L.sampled_distillation_loss(ONE, ONE, kind="k1"), "kind: expected 'k2' or 'k3'"),
        (lambda: L.soft_target_loss(ONE[0], ONE[0]), "logprob: expected shape"),
        (lambda: L.ppo_loss(ONE, ONE[:1], A), r"old_logprob: expected shape \[2, 3\], as logprob has, got"),
        (lambda: L.ppo_loss(ONE, ONE, X), r"advantage: expected shape \[2\], one per sequence, or"),
        (lambda: L.ppo_loss(ONE, ONE, A, level="tokens"), "level: expected 'token', 'sequence'"),
        (lambda: L.ppo_loss(ONE, ONE, A, clip_low=1.5), "clip_low: expected a number from 0 to 1"),
        (lambda: L.ppo_loss(ONE, ONE, A, ratio_max=1.1), "ratio_max: expected a number above 1 \\+ clip_high"),
        (lambda: L.ppo_loss(ONE, ONE, A, beta=0.1), "ref_logprob: expected a tensor, as beta is 0.1, got None"),
        (lambda: L.ppo_loss(ONE, ONE, A, ref_logprob=ONE), "beta: expected a number, as ref_logprob is given"),
        (lambda: L.ppo_loss(ONE, ONE, A, entropy=ONE), "entropy_coef: expected a number, as entropy is given"),
        (lambda: L.ppo_loss(ONE, ONE, A, entropy_coef=1), "entropy: expected a tensor"),
        (lambda: L.dr_grpo_loss(ONE, ONE, A, max_length=0), "max_length"),
        (lambda: L.gspo_loss(ONE, ONE, ONE), "advantage: expected one per sequence"),
        (lambda: L.cispo_loss(ONE, ONE, A, ratio_min=6), "ratio_max: expected a number above ratio_min"),
        (lambda: L.sampler_correction(ONE, ONE, level="geometric_token"), "level: expected 'token', 'sequence' or"),
        (lambda: L.sampler_correction(ONE, ONE, low=2, high=2), "high: expected a number above low"),
        (lambda: L.group_advantages(torch.ones(5), 2), "group_size: expected 2 or more, and a divisor of the 5"),
        (lambda: L.group_advantages(ONE, 2), r"reward: expected shape \[B\]"),
        (lambda: L.dpo_loss(*PAIR, beta=0), "beta: expected a finite number above 0, got 0"),
        (lambda: L.dpo_loss(*PAIR, tau=2), "tau: expected a number above 0, at most 1"),
        (lambda: L.dpo_loss(*PAIR, divergence="js", kind="apo_zero"), "divergence: expected 'reverse_kl' with kind"),
        (lambda: L.dpo_loss(*PAIR, label_smoothing=0.1, kind="hinge"), "label_smoothing: expected 0 with kind"),
        (lambda: L.dpo_loss(*PAIR, label_smoothing=0.5, kind="robust"), "below 1/2"),
        (lambda: L.dpo_loss(*PAIR, kind="exo_pair"), "label_smoothing: expected a number above 0"),
        (lambda: L.dpo_loss(*PAIR, kind="ipo"), "chosen_length: expected tokens of each answer"),
        (lambda: L.dpo_loss(*PAIR, chosen_length=X), "chosen_length: expected None with kind='sigmoid'"),
        (lambda: L.kto_loss(X, X, X.bool(), X), "kl: expected a number or a 0-d tensor"),
        (lambda: L.kto_loss(X, X, X.bool(), 0.1, kind="apo_zero"), "kl: expected 0"),
        (lambda: L.future_labels(Y, 0), "steps: expected an int above 0"),
        (lambda: L.future_labels(Y, 1, first=-1), "first: expected an int of 0 or more"),
        (lambda: L.multi_token_loss(HIDDEN[:, :2], W, Y), r"inputs\[0\]: expected shape \[3, 4, 'D'\]"),
        (lambda: L.multi_token_loss(MIXED, W, Y), r"inputs\[1\]: expected shape \[\.\.\., 5\]"),
        (lambda: L.multi_token_loss(HIDDEN, [W, W], Y, linear_bias=W[:, 0]), "linear_bias: expected 2 of them"),
        (lambda: L.multi_token_loss(HIDDEN, W, Y, weights=[1, 0]), r"weights\[1\]: expected a finite number above 0"),
        (lambda: L.multi_token_loss(HIDDEN, W, Y, num_items=[1.0]), "num_items: expected 2 of them"),
    ],
)
def test_values_and_shapes(f: Callable[[], Tensor], text: str) -> None:
    with pytest.raises(ValueError, match=text) as raised:
        f()
    assert isinstance(raised.value, LowtideError)


@pytest.mark.parametrize(
    ("f", "text"),
    [
        (lambda: L.reduce_tokens(ONE.long()), "values: expected a floating-point tensor"),
        (lambda: L.reduce_tokens(ONE, ONE), "mask: expected a bool or integer tensor"),
        (lambda: L.dpo_loss(*PAIR, kind="ipo", chosen_length=3, rejected_length=3), "chosen_length"),
        (lambda: L.cpo_loss(X, X, 3.0), "chosen_nll: expected a torch.Tensor"),
        (lambda: L.multi_token_loss([], W, Y), "inputs: expected a tensor .* got an empty one"),
        (lambda: L.multi_token_loss([MIXED[0], MIXED[0].half()], W, Y), r"inputs\[1\]: expected dtype torch.float32"),
        (lambda: L.multi_token_loss(HIDDEN, W, Y, ignore_index=None), "ignore_index: expected an int"),
        (lambda: L.multi_token_loss(HIDDEN, W, Y, linear_bias=[W[:, 0]] * 2), "linear_bias: expected one tensor"),
    ],
)
def test_types(f: Callable[[], Any], text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=text):
        f()
