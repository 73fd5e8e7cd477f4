"""A sample of model types, each built tiny from its default config as `lowtide bench models` does; all with --slow."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from lowtide.bench import models_case
from lowtide.bench.models_case import COMPARED, DIFFERENT, FELL_BACK, FUSED, NOT_BUILT, check, types

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # what models of all ages say when they are built

# Chosen for what is different about them and not in conftest.MODELS: positions, biases, experts, scales, prediction
# heads, a loss inside forward, encoders, pictures.
SAMPLE = [
    ("causal", "opt"), ("causal", "bloom"), ("causal", "falcon"), ("causal", "mixtral"), ("causal", "cohere"),
    ("causal", "mamba"), ("causal", "granitemoehybrid"), ("causal", "prophetnet"), ("causal", "rembert"),
    ("seq2seq", "m2m_100"), ("seq2seq", "t5gemma"), ("image-text", "qwen2_vl"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "model_type"), SAMPLE, ids=lambda x: x)
def test_a_type_never_builds_logits(kind, model_type):
    told = check(kind, model_type)
    assert (told["status"], told["why"]) == (FUSED, "")
    assert len(told["cases"]) >= 4
    assert set(told["cases"].values()) == {"equal"}
    assert told["tolerances"]["loss"] < 1e-3
    assert told["tolerances"]["gradients_median"] < 1e-3


@pytest.mark.slow
def test_no_type_is_silently_different(tmp_path):
    from lowtide.bench.models import MODELS
    from lowtide.bench.train_config import ModelsBenchConfig

    rows = MODELS.run(ModelsBenchConfig(output=str(tmp_path), timeout=300), print).rows
    assert [row for row in rows if row["status"] == DIFFERENT] == []
    assert sum(row["status"] == FUSED for row in rows if row["kind"] == "causal") >= 120
    assert sum(row["status"] in COMPARED for row in rows) >= 0.8 * len(rows)


def test_the_kinds_have_their_types():
    assert {"llama", "gpt2", "bert"} <= set(types("causal"))
    assert {"t5", "bart"} <= set(types("seq2seq"))
    assert "llava" in types("image-text")


def test_a_type_that_cannot_be_built_says_why():
    told = check("image-text", "pix2struct")
    assert told["status"] == NOT_BUILT
    assert "flattened_patches" in told["why"]


def wrong_loss(loss):
    return lambda *args, **kwargs: loss(*args, **kwargs) * 1.001


def wrong_gradient(loss):
    def half(hidden, *args, **kwargs):
        return loss(hidden * 0.999 + hidden.detach() * 0.001, *args, **kwargs)

    return half


def no_gradient(loss):
    return lambda hidden, weight, *args, **kwargs: loss(hidden, weight.detach(), *args, **kwargs)


@pytest.mark.parametrize("wrong", [wrong_loss, wrong_gradient, no_gradient], ids=lambda f: f.__name__)
def test_a_patch_that_is_wrong_is_found(wrong, monkeypatch):
    from lowtide.models import lazy_results

    monkeypatch.setattr(lazy_results, "linear_cross_entropy", wrong(lazy_results.linear_cross_entropy))
    told = check("causal", "opt")
    assert told["status"] == DIFFERENT
    assert told["why"].startswith("labels: different: ")


def test_logits_that_nobody_reports_are_found(monkeypatch):
    from lowtide.models import lazy_results

    def with_logits(hidden, head, target, *, reduction, ignore_index, **_):
        return F.cross_entropy(F.linear(hidden, head), target, reduction=reduction, ignore_index=ignore_index)

    monkeypatch.setattr(lazy_results, "linear_cross_entropy", with_logits)
    told = check("causal", "gpt2")
    assert (told["status"], told["why"]) == (FELL_BACK, "logits were built, and the report does not count them")


def test_an_error_of_a_patched_model_is_a_difference(monkeypatch):
    from lowtide.models import lazy_results

    def broken(*_, **__):
        raise RuntimeError("none of it")

    monkeypatch.setattr(lazy_results, "linear_cross_entropy", broken)
    told = check("causal", "gpt2")
    assert told["status"] == DIFFERENT
    assert "none of it" in told["why"]


def test_logits_read_after_the_loss_are_compared(monkeypatch):
    from lowtide.models.head_call import HeadCall

    stock = HeadCall.logits
    monkeypatch.setattr(HeadCall, "logits", lambda self, *args, **kwargs: stock(self, *args, **kwargs) + 0.01)
    told = check("causal", "gpt2")
    assert told["status"] == DIFFERENT
    assert "logits read after the loss differ" in told["why"]


def test_what_is_random_is_drawn_alike():
    """Two models of one seed are the same, or the comparison would be of two models."""
    first, second = (models_case._maker("causal", "gpt2", 0)[0]() for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True))
