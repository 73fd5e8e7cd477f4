"""The same losses in TRL, on random batches: its trainers' own methods, called on trainers without a model.

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

pytest.importorskip("trl", reason="TRL comes with the test extra")
pytestmark = pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental':UserWarning")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(2))


class Accelerator:
    """One process: what is gathered or reduced is what was given."""

    device = torch.device("cpu")
    num_processes = 1
    sync_gradients = True
    parallelism_config = None

    def gather(self, x: Tensor) -> Tensor:
        return x

    gather_for_metrics = gather

    def reduce(self, x: Tensor, reduction: str) -> Tensor:
        return x


def bare(kind: type, **attributes: Any) -> Any:
    """Return a trainer that was never set up, with the attributes that the method under test reads."""
    trainer = object.__new__(kind)
    common = {
        "accelerator": Accelerator(),
        "model": SimpleNamespace(training=True),
        "aux_loss_enabled": False,
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "current_gradient_accumulation_steps": 1,
    }
    for name, value in {**common, **attributes}.items():
        setattr(trainer, name, value)
    return trainer


def answers(seed: int, dtype: torch.dtype = torch.float64) -> tuple[Batch, Tensor, Tensor]:
    """Return a batch of 8 answers, its log-probabilities as a leaf, 0 where masked, and the reference's."""
    b = batch(seed, 8, 6, empty=False, dtype=dtype, spread=1.0)
    return b, b.logprob.where(b.mask, 0).requires_grad_(), b.ref.where(b.mask, 0)


def outputs(logprob: Tensor, b: Batch) -> SimpleNamespace:
    zeros = torch.zeros_like(logprob)
    return SimpleNamespace(
        log_probs=logprob.where(b.mask, 0), entropy=zeros, mean_logits=zeros, is_top1=b.mask, label_mask=b.mask,
        log_sum_sq_probs=b.sum_sq_prob.where(b.mask, 1).log(),
    )  # fmt: skip


def shifted(mask: Tensor) -> dict[str, Tensor]:
    """Return a trainer's inputs for completions: their first position is the prompt's, which nothing predicts."""
    whole = F.pad(mask.long(), (1, 0))
    return {"input_ids": torch.zeros_like(whole), "attention_mask": torch.ones_like(whole), "completion_mask": whole}


def agree(ours: Tensor, theirs: Tensor, leaf: Tensor) -> None:
    """Compare values and gradients with respect to the log-probabilities."""
    tight = {"rtol": 1e-10, "atol": 1e-12} if leaf.dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(ours, theirs, **tight)
    mine, other = (torch.autograd.grad(loss, leaf, retain_graph=True)[0] for loss in (ours, theirs))
    assert mine.abs().sum() > 0
    torch.testing.assert_close(mine, other, **tight)


def trl_dpo(b: Batch, logprob: Tensor, ref: Tensor, **options: Any) -> Tensor:
    from trl.trainer.dpo_trainer import DPOTrainer

    defaults = {
        "loss_types": ["sigmoid"], "loss_weights": [1.0], "beta": 0.3, "ld_alpha": None, "precompute_ref_logps": True,
        "f_divergence_type": "reverse_kl", "f_alpha_divergence_coef": 0.5, "label_smoothing": 0.0,
        "use_weighting": False, "args": SimpleNamespace(discopop_tau=0.05),
    }  # fmt: skip
    trainer = bare(DPOTrainer, **{**defaults, **options})
    chosen, rejected = ref.sum(1).chunk(2)
    inputs = {**shifted(b.mask), "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    return trainer._compute_loss(lambda **_: outputs(logprob, b), inputs, return_outputs=False)


def four(b: Batch, logprob: Tensor, ref: Tensor) -> tuple[Tensor, ...]:
    sums = (losses.sequence_logprobs(x, b.mask).chunk(2) for x in (logprob, ref))
    return tuple(part for pair in sums for part in pair)


def of_kind(kind: str, b: Batch) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": kind, "beta": 0.3}
    if kind in ("robust", "exo_pair", "aot", "aot_unpaired"):
        found["label_smoothing"] = 0.1
    if kind in ("ipo", "sigmoid_norm"):
        found["chosen_length"], found["rejected_length"] = b.mask.sum(1).chunk(2)
    return found


@pytest.mark.parametrize("kind", losses.DPO_KINDS)
def test_dpo(kind: str, seed: int) -> None:
    b, logprob, ref = answers(seed)
    o = of_kind(kind, b)
    dtype = torch.float64
    if kind == "exo_pair":  # TRL makes its label smoothing a float32 tensor
        b, logprob, ref = answers(seed, dtype := torch.float32)
    theirs = trl_dpo(b, logprob, ref, loss_types=[kind], label_smoothing=o.get("label_smoothing", 0.0))
    ours = losses.dpo_loss(*four(b, logprob, ref), **o)
    assert ours.dtype == dtype
    agree(ours, theirs, logprob)


@pytest.mark.parametrize("kind", ["sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "discopop"])
@pytest.mark.parametrize(
    ("ours", "theirs"), [("forward_kl", "forward_kl"), ("js", "js_divergence"), ("alpha", "alpha_divergence")]
)
def test_f_dpo(kind: str, ours: str, theirs: str, seed: int) -> None:
    b, logprob, ref = answers(seed, torch.float32)  # TRL's alpha divergence knows no float64
    o = of_kind(kind, b)
    smoothing = o.get("label_smoothing", 0.0)
    true = trl_dpo(b, logprob, ref, loss_types=[kind], f_divergence_type=theirs, label_smoothing=smoothing)
    got = losses.dpo_loss(*four(b, logprob, ref), divergence=ours, alpha=0.5, **o)
    agree(got, true, logprob)


@pytest.mark.parametrize(("kind", "theirs"), [("kto", "kto"), ("apo_zero", "apo_zero_unpaired")])
def test_kto(kind: str, theirs: str, seed: int) -> None:
    from trl.trainer.kto_trainer import KTOTrainer

    b, logprob, ref = answers(seed)
    mismatched, ref_mismatched = b.sampler.where(b.mask, 0).sum(1), b.old.where(b.mask, 0).sum(1)
    label = torch.tensor([True, False, True, True, False, True, False, False]).roll(seed)
    trainer = bare(
        KTOTrainer, loss_type=theirs, beta=0.3, desirable_weight=1.2, undesirable_weight=0.7,
        calculate_KL=kind == "kto", precompute_ref_logps=True, _compute_kl_logps=lambda *_: mismatched,
    )  # fmt: skip
    inputs = {**shifted(b.mask), "label": label, "ref_logps": ref.sum(1), "ref_KL_logps": ref_mismatched}
    true = trainer._compute_loss(lambda **_: outputs(logprob, b), inputs, return_outputs=False)
    kl = losses.kto_reference(mismatched, ref_mismatched) if kind == "kto" else 0.0
    sums = losses.sequence_logprobs(logprob, b.mask)
    got = losses.kto_loss(
        sums, ref.sum(1), label, kl, kind=kind, beta=0.3, desirable_weight=1.2, undesirable_weight=0.7
    )
    agree(got, true, logprob)


def trl_grpo(b: Batch, logprob: Tensor, ref: Tensor, **options: Any) -> Tensor:
    from trl.trainer.grpo_trainer import GRPOTrainer

    args = {
        "delta": None, "use_bias_correction_kl": False, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
        "steps_per_generation": 1,
    }  # fmt: skip
    defaults = {
        "loss_type": "grpo", "importance_sampling_level": "token", "beta": 0.0, "epsilon_low": 0.2,
        "epsilon_high": 0.2, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "use_vllm": False,
        "vllm_importance_sampling_correction": False, "max_completion_length": 11, "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False, "entropy_coef": 0.0,
    }  # fmt: skip
    trainer = bare(GRPOTrainer, **{**defaults, **{k: v for k, v in options.items() if k not in ("inputs", *args)}})
    trainer.args = SimpleNamespace(**{**args, **{k: v for k, v in options.items() if k in args}})
    entropy = b.entropy.where(b.mask, 0)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprob, entropy, None)
    ids = torch.zeros(b.mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": b.mask.long(),
        "advantages": b.advantage, "old_per_token_logps": b.old.where(b.mask, 0), "ref_per_token_logps": ref,
        "num_items_in_batch": torch.tensor(57), **options.get("inputs", {}),
    }  # fmt: skip
    return trainer._compute_loss(None, inputs)


GRPO = {
    "grpo": (losses.grpo_loss, {}, {}),
    "grpo, delta": (losses.grpo_loss, {"ratio_max": 1.4}, {"delta": 1.4}),
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


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("name", GRPO)
def test_policy_gradients(name: str, beta: float, seed: int) -> None:
    ours, arguments, options = GRPO[name]
    b, logprob, ref = answers(seed)
    correction = losses.sampler_correction(b.old, b.sampler, b.mask)
    theirs = trl_grpo(
        b, logprob, ref, loss_type=name.split(",")[0], beta=beta, use_vllm=True,
        vllm_importance_sampling_correction=True, inputs={"importance_sampling_ratio": correction}, **options,
    )  # fmt: skip
    got = ours(logprob, b.old, b.advantage, b.mask, ref_logprob=ref, beta=beta, correction=correction, **arguments)
    agree(got, theirs, logprob)
