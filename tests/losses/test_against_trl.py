"""The same losses in TRL, on a random batch: its trainers' own methods, called on trainers without a model.

What a trainer would compute from a model (log-probabilities, entropies) is drawn at random and handed to both.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from losses.loops import Batch, batch
from lowtide import losses
from promises import promise

pytest.importorskip("trl", reason="TRL comes with the test extra")
pytestmark = [
    promise("trainers"),
    pytest.mark.slow,  # it changes with TRL alone, whose import takes longer than all losses
    pytest.mark.filterwarnings("ignore:You are importing from 'trl.exp:UserWarning"),
]


class Accelerator:
    """One process: what is gathered or reduced is what was given."""

    device = torch.device("cpu")
    num_processes = 1
    sync_gradients = True
    parallelism_config = None

    def gather(self, x: Tensor, **_: Any) -> Tensor:
        return x

    gather_for_metrics = reduce = gather


def bare(kind: type, **attributes: Any) -> Any:
    """Return a trainer that was never set up, with the attributes that the method under test reads."""
    trainer = object.__new__(kind)
    common = {
        "accelerator": Accelerator(), "model": SimpleNamespace(training=True), "aux_loss_enabled": False,
        "_metrics": {"train": defaultdict(list)}, "_total_train_tokens": 0, "_tp_size": 1,
        "current_gradient_accumulation_steps": 1, "precompute_ref_logps": True,
    }  # fmt: skip
    for name, value in {**common, **attributes}.items():
        setattr(trainer, name, value)
    return trainer


def answers(dtype: torch.dtype = torch.float64) -> tuple[Batch, Tensor, Tensor]:
    """Return a batch of 8 answers, its log-probabilities as a leaf, 0 where masked, and the reference's."""
    b = batch(0, 8, 6, empty=False, dtype=dtype, spread=1.0)
    return b, b.logprob.where(b.mask, 0).requires_grad_(), b.ref.where(b.mask, 0)


def inputs_of(logprob: Tensor, b: Batch, **more: Any) -> tuple[Any, dict[str, Any]]:
    """Return what computes a model's outputs, and a trainer's inputs: nothing predicts their first position."""
    zeros, whole = torch.zeros_like(logprob), F.pad(b.mask.long(), (1, 0))
    outputs = SimpleNamespace(
        log_probs=logprob.where(b.mask, 0), entropy=zeros, mean_logits=zeros, is_top1=b.mask, label_mask=b.mask,
        log_sum_sq_probs=b.sum_sq_prob.where(b.mask, 1).log(),
    )  # fmt: skip
    ids = {"input_ids": torch.zeros_like(whole), "attention_mask": torch.ones_like(whole), "completion_mask": whole}
    return lambda **_: outputs, {**ids, **more}


def agree(ours: Tensor, theirs: Tensor, leaf: Tensor) -> None:
    """Compare values and gradients with respect to the log-probabilities."""
    tight = {"rtol": 1e-10, "atol": 1e-12} if leaf.dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(ours, theirs, **tight)
    torch.testing.assert_close(*(torch.autograd.grad(loss, leaf)[0] for loss in (ours, theirs)), **tight)


DIVERGENCES = [
    ("robust", "forward_kl", "forward_kl"),
    ("ipo", "js", "js_divergence"),
    ("hinge", "alpha", "alpha_divergence"),
]


@pytest.mark.parametrize(
    ("kind", "divergence", "theirs"), [*((kind, "reverse_kl", "reverse_kl") for kind in losses.DPO_KINDS), *DIVERGENCES]
)
def test_dpo(kind: str, divergence: str, theirs: str) -> None:
    from trl.trainer.dpo_trainer import DPOTrainer

    # TRL makes the label smoothing of one a float32 tensor, and its divergences know no float64
    narrow = kind == "exo_pair" or divergence != "reverse_kl"
    b, logprob, ref = answers(torch.float32 if narrow else torch.float64)
    smoothing = 0.1 if kind in ("robust", "exo_pair", "aot", "aot_unpaired") else 0.0
    trainer = bare(
        DPOTrainer, loss_types=[kind], loss_weights=[1.0], beta=0.3, ld_alpha=None, f_divergence_type=theirs,
        f_alpha_divergence_coef=0.5, label_smoothing=smoothing, use_weighting=False,
        args=SimpleNamespace(discopop_tau=0.05),
    )  # fmt: skip
    chosen, rejected = ref.sum(1).chunk(2)
    model, inputs = inputs_of(logprob, b, ref_chosen_logps=chosen, ref_rejected_logps=rejected)
    true = trainer._compute_loss(model, inputs, return_outputs=False)
    lengths = {}
    if kind in ("ipo", "sigmoid_norm"):
        lengths = dict(zip(("chosen_length", "rejected_length"), b.mask.sum(1).chunk(2), strict=True))
    sums = (half for x in (logprob, ref) for half in losses.sequence_logprobs(x, b.mask).chunk(2))
    got = losses.dpo_loss(*sums, kind=kind, beta=0.3, label_smoothing=smoothing, divergence=divergence, **lengths)
    agree(got, true, logprob)


@pytest.mark.parametrize(("kind", "theirs"), [("kto", "kto"), ("apo_zero", "apo_zero_unpaired")])
def test_kto(kind: str, theirs: str) -> None:
    from trl.trainer.kto_trainer import KTOTrainer

    b, logprob, ref = answers()
    mismatched, ref_mismatched = b.sampler.where(b.mask, 0).sum(1), b.old.where(b.mask, 0).sum(1)
    label = torch.tensor([True, False, True, True, False, True, False, False])
    weights = {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.7}
    trainer = bare(
        KTOTrainer, loss_type=theirs, calculate_KL=kind == "kto", _compute_kl_logps=lambda *_: mismatched, **weights
    )
    model, inputs = inputs_of(logprob, b, label=label, ref_logps=ref.sum(1), ref_KL_logps=ref_mismatched)
    true = trainer._compute_loss(model, inputs, return_outputs=False)
    kl = losses.kto_reference(mismatched, ref_mismatched) if kind == "kto" else 0.0
    sums = losses.sequence_logprobs(logprob, b.mask)
    agree(losses.kto_loss(sums, ref.sum(1), label, kl, kind=kind, **weights), true, logprob)


GRPO = {
    "grpo": (losses.grpo_loss, {"ratio_max": 1.4}, {"delta": 1.4}),
    "bnpo": (losses.bnpo_loss, {}, {}),
    "dr_grpo": (losses.dr_grpo_loss, {"max_length": 11}, {}),
    "dapo": (losses.dapo_loss, {"num_items": 57}, {"epsilon_high": 0.28}),
    "cispo": (losses.cispo_loss, {"num_items": torch.tensor(57), "ratio_max": 1.3}, {"epsilon_high": 1.3}),
    "sapo": (losses.sapo_loss, {"tau_negative": 1.125}, {"sapo_temperature_neg": 1.125}),  # TRL rounds it to float32
    "grpo, gspo": (
        losses.gspo_loss, {}, {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    ),
    "luspo": (
        losses.ppo_loss, {"level": "geometric", "reduction": "sequence_sum"}, {"importance_sampling_level": "sequence"},
    ),
}  # fmt: skip
ARGS = {
    "delta": None, "use_bias_correction_kl": False, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
    "steps_per_generation": 1,
}  # fmt: skip
SETTINGS = {
    "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.2, "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None, "use_vllm": True, "vllm_importance_sampling_correction": True,
    "max_completion_length": 11, "_entropy_bonus_enabled": False, "use_adaptive_entropy": False, "entropy_coef": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("name", GRPO)
def test_policy_gradients(name: str) -> None:
    from trl.trainer.grpo_trainer import GRPOTrainer

    ours, arguments, options = GRPO[name]
    b, logprob, ref = answers()
    correction = losses.sampler_correction(b.old, b.sampler, b.mask)
    ids = torch.zeros(b.mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": b.mask.long(),
        "advantages": b.advantage, "old_per_token_logps": b.old.where(b.mask, 0), "ref_per_token_logps": ref,
        "num_items_in_batch": torch.tensor(57), "importance_sampling_ratio": correction,
    }  # fmt: skip
    for beta in (0.0, 0.04):
        settings = {"loss_type": name.split(",")[0], "beta": beta, **SETTINGS, **options}
        args = SimpleNamespace(**{key: settings.pop(key, value) for key, value in ARGS.items()})
        trainer = bare(GRPOTrainer, args=args, **settings)
        entropy = b.entropy.where(b.mask, 0)
        trainer._get_per_token_logps_and_entropies = lambda *_, entropy=entropy, **__: (logprob, entropy, None)
        true = trainer._compute_loss(None, inputs)
        got = ours(logprob, b.old, b.advantage, b.mask, ref_logprob=ref, beta=beta, correction=correction, **arguments)
        agree(got, true, logprob)
