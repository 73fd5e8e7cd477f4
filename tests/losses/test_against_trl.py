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
        metafunc.parametrize("seed", range(5))


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


def test_dpo_and_sft_together(seed: int) -> None:
    b, logprob, ref = answers(seed)
    theirs = trl_dpo(b, logprob, ref, loss_types=["apo_zero", "sft"], loss_weights=[0.7, 0.2])
    ours = 0.7 * losses.dpo_loss(*four(b, logprob, ref), kind="apo_zero", beta=0.3)
    agree(ours + 0.2 * losses.sft_loss(logprob[:4], b.mask[:4]), theirs, logprob)


def test_wpo(seed: int) -> None:
    b, logprob, ref = answers(seed)
    weights = losses.wpo_weights(logprob, b.sum_sq_prob, b.mask)
    pairs = losses.dpo_loss(*four(b, logprob, ref), beta=0.3, reduction="none")
    agree((pairs * weights[:4] * weights[4:]).mean(), trl_dpo(b, logprob, ref, use_weighting=True), logprob)


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


@pytest.mark.parametrize("smoothing", [0.0, 0.15])
@pytest.mark.parametrize("kind", ["sigmoid", "simpo"])
def test_cpo_and_simpo(kind: str, smoothing: float, seed: int) -> None:
    from trl.experimental.cpo.cpo_trainer import CPOTrainer

    b, logprob, _ = answers(seed)
    chosen, rejected = losses.sequence_logprobs(logprob, b.mask, average=kind == "simpo").chunk(2)
    nll = losses.sft_loss(logprob[:4], b.mask[:4])
    zeros = torch.zeros(4)
    trainer = bare(
        CPOTrainer, loss_type=kind, alpha=0.0, cpo_alpha=0.6, beta=1.7, simpo_gamma=0.4, label_smoothing=smoothing,
        concatenated_forward=lambda *_: (chosen, rejected, zeros, zeros, nll),
    )  # fmt: skip
    true, _ = trainer.get_batch_loss_metrics(None, {})
    if kind == "simpo":
        got = losses.simpo_loss(chosen, rejected, beta=1.7, gamma=0.4, label_smoothing=smoothing) + 0.6 * nll
    else:
        got = losses.cpo_loss(chosen, rejected, 0.6 * nll, beta=1.7, label_smoothing=smoothing)
    agree(got, true, logprob)


def test_orpo(seed: int) -> None:
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    b, logprob, _ = answers(seed, torch.float32)
    chosen, rejected = losses.sequence_logprobs(logprob, b.mask, average=True).chunk(2)
    nll = losses.sft_loss(logprob[:4], b.mask[:4])
    zeros = torch.zeros(4)
    trainer = bare(ORPOTrainer, beta=0.25, concatenated_forward=lambda *_: (chosen, rejected, zeros, zeros, nll))
    true, _ = trainer.get_batch_loss_metrics(None, {})
    got = losses.orpo_loss(chosen, rejected, nll, beta=0.25)
    agree(got, true, logprob)


@pytest.mark.parametrize("count", [None, 41])
@pytest.mark.parametrize(("kind", "ours"), [("nll", losses.sft_loss), ("dft", losses.dft_loss)])
def test_sft(kind: str, ours: Any, count: int | None, seed: int) -> None:
    from trl.trainer.sft_trainer import SFTTrainer

    b, logprob, _ = answers(seed)
    trainer = bare(
        SFTTrainer, compute_loss_func=None, label_smoother=None,
        args=SimpleNamespace(loss_type=kind, average_tokens_across_devices=False),
    )  # fmt: skip
    inputs = {**shifted(b.mask), "labels": b.mask.long()}
    true = trainer.compute_loss(lambda **_: outputs(logprob, b), inputs, num_items_in_batch=count)
    agree(ours(logprob, b.mask, num_items=count), true, logprob)


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


def test_entropy_bonus(seed: int) -> None:
    b, logprob, ref = answers(seed)
    theirs = trl_grpo(b, logprob, ref, loss_type="bnpo", _entropy_bonus_enabled=True, entropy_coef=0.2)
    got = losses.bnpo_loss(logprob, b.old, b.advantage, b.mask, entropy=b.entropy, entropy_coef=0.2)
    agree(got, theirs, logprob)


def test_the_unbiased_kl_is_a_product_of_two_parts(seed: int) -> None:
    b, logprob, ref = answers(seed)
    theirs = trl_grpo(b, logprob, ref, beta=0.1, use_bias_correction_kl=True)
    ratio = losses.importance_ratio(logprob, b.old, b.mask)
    kl = ratio * losses.kl_estimate(logprob, ref, b.mask)
    got = losses.grpo_loss(logprob, b.old, b.advantage, b.mask)
    agree(got + 0.1 * losses.reduce_tokens(kl, b.mask, reduction="sequence"), theirs, logprob)


def test_rloo(seed: int) -> None:
    from trl.trainer.rloo_trainer import RLOOTrainer

    b, logprob, _ = answers(seed)
    trainer = bare(RLOOTrainer, epsilon_low=0.2, epsilon_high=0.3)
    trainer._get_per_token_logps_and_entropies = lambda *_, x=logprob, **__: (x, torch.zeros_like(x), None)
    ids = torch.zeros(b.mask.shape, dtype=torch.long)
    advantage = losses.leave_one_out_advantages(b.advantage, 4)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids,
        "completion_mask": b.mask.long(), "old_logps": b.old.where(b.mask, 0).sum(1), "advantages": advantage,
    }  # fmt: skip
    theirs = trainer._compute_loss(None, inputs)
    got = losses.ppo_loss(logprob, b.old, advantage, b.mask, level="sequence", clip_high=0.3, reduction="sequence")
    agree(got, theirs, logprob)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("count", [None, 19])
def test_gkd(beta: float, count: int | None, seed: int) -> None:
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    g = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, 3, 5, 11, generator=g, dtype=torch.float64)
    mask = torch.rand(3, 5, generator=g) < 0.6
    student.requires_grad_()
    labels = torch.where(mask, 1, -100)
    theirs = GKDTrainer.generalized_jsd_loss(
        student, teacher, labels, beta=beta, temperature=2.0, num_items_in_batch=count
    )
    s, t = (z.div(2).log_softmax(-1) for z in (student, teacher))
    if beta == 0:
        divergence = (t.exp() * (t - s)).sum(-1)
    elif beta == 1:
        divergence = (s.exp() * (s - t)).sum(-1)
    else:
        m = (beta * t.exp() + (1 - beta) * s.exp()).log()
        divergence = beta * (t.exp() * (t - m)).sum(-1) + (1 - beta) * (s.exp() * (s - m)).sum(-1)
    agree(losses.gkd_loss(divergence, mask, num_items=count), theirs, student)
    torch.testing.assert_close(losses.gkd_loss(divergence, mask, temperature=2, num_items=count), 4 * theirs)


def trl_rollout(reward: Tensor, old: Tensor, sampler: Tensor, lengths: list[int], **options: Any) -> dict[str, Tensor]:
    """Return what TRL makes of answers before the first step: advantages and importance-sampling weights."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    B, rows = len(lengths), [list(range(n)) for n in lengths]
    scored = [sampler[i, :n].tolist() for i, n in enumerate(lengths)]
    defaults = {
        "environment_factories": None,
        "environments": None, "tools": None, "pad_to_multiple_of": None, "mask_truncated_completions": False,
        "num_iterations": 1, "use_vllm": True, "vllm_importance_sampling_correction": True, "beta": 0.0,
        "num_generations": 4, "multi_objective_aggregation": "sum_then_normalize", "scale_rewards": "group",
        "reward_weights": torch.ones(1), "reward_func_names": ["r"], "_pending_extra_logs": {}, "_pending_metrics": {},
        "_logs": defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)), "_tokenizer": SimpleNamespace(
            pad_token_id=0), "args": SimpleNamespace(per_device_train_batch_size=B, gradient_checkpointing_kwargs=None,
            steps_per_generation=1, gradient_accumulation_steps=1), "log_multimodal": False,
        "_generate": lambda _: ([[0]] * B, rows, None, [""] * B, scored, {}, None, []),
        "_calculate_rewards": lambda *_: reward[:, None],
        "_get_per_token_logps_and_entropies": lambda *_, **__: (old, None, None),
        "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_min": None,
        "vllm_importance_sampling_clip_max": 2.0,
    }  # fmt: skip
    trainer = bare(GRPOTrainer, **{**defaults, **options})
    trainer.model = SimpleNamespace(training=True, is_gradient_checkpointing=False)
    trainer.accelerator.process_index = 0
    return trainer._generate_and_score_completions([{"prompt": ""}] * B)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize(("low", "high"), [(None, 2.0), (0.8, 1.2)])
def test_sampler_correction(mode: str, low: float | None, high: float, seed: int) -> None:
    b = batch(seed, 8, 6, dtype=torch.float32)
    lengths = [6, 3, 1, 5, 2, 6, 4, 4]
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    old, sampler = (torch.nan_to_num(x, -1.0, -1.0, -1.0) for x in (b.old, b.sampler))
    sampler[0, 1] = torch.nan
    theirs = trl_rollout(
        b.advantage, old, sampler, lengths, vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low, vllm_importance_sampling_clip_max=high,
    )["importance_sampling_ratio"]  # fmt: skip
    level, kind = mode.split("_")
    got = losses.sampler_correction(old, sampler, mask, level=level, kind=kind, low=low or 0.0, high=high)
    torch.testing.assert_close(got, theirs.expand(8, 6).where(mask, 0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_advantages(scale: str, seed: int) -> None:
    b = batch(seed, 8, 6, empty=False)
    old = b.old.where(b.mask, 0)
    theirs = trl_rollout(b.advantage.clone(), old, old, [6] * 8, scale_rewards=scale)["advantages"]
    got = losses.group_advantages(b.advantage, 4, scale=scale)
    torch.testing.assert_close(got, theirs, rtol=1e-7, atol=1e-12)  # TRL's n / (n - 1) is float32
