"""A sample of model types, each built tiny from its default config as `lowtide bench models` does; all with --slow."""

import pkgutil
import warnings

import pytest
import torch
import torch.nn.functional as F

import lowtide
from lowtide.bench import models_case
from lowtide.bench.models_case import COMPARED, DIFFERENT, FELL_BACK, FUSED, NOT_BUILT, check, types
from lowtide.measure.allocations import track_allocations

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
    row = check(kind, model_type)
    assert (row["status"], row["why"]) == (FUSED, "")
    assert len(row["cases"]) >= 4
    assert set(row["cases"].values()) == {"equal"}
    assert row["tolerances"]["loss"] < 1e-3
    assert row["tolerances"]["gradients_median"] < 1e-3


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
    row = check("image-text", "pix2struct")
    assert row["status"] == NOT_BUILT
    assert "flattened_patches" in row["why"]


@pytest.mark.parametrize(("model_type", "inner"), [("blip", "text_decoder"), ("nemotron_h_omni", "language_model")])
def test_a_model_around_one_with_a_head_names_it(model_type, inner):
    make, extra = models_case._maker("image-text", model_type, 0)
    stock, model = make(), make()
    why = lowtide.patch(model).parts["loss"].outcome
    assert f"its {inner} has one: pass that to patch, with scoring=True" in why
    lowtide.unpatch(model)
    report = lowtide.patch(model.get_submodule(inner), scoring=True, options=models_case.OPTIONS)
    ids = {**models_case.batch(0), **extra}
    with track_allocations() as seen:
        got = models_case._run(model, ids)
    assert models_case.rows_of_logits(seen, model) == []
    assert (report.calls_fused, report.calls_materialised) == (1, 0)
    noise = models_case._noise(stock, make(), ids)
    assert models_case.difference(got, models_case._run(stock, ids), noise) is None


def wrong_loss(loss):
    return lambda *args, **kwargs: loss(*args, **kwargs) * 1.001


def wrong_gradient(loss):
    return lambda hidden, *args, **kwargs: loss(hidden * 0.999 + hidden.detach() * 0.001, *args, **kwargs)


def no_gradient(loss):
    return lambda hidden, weight, *args, **kwargs: loss(hidden, weight.detach(), *args, **kwargs)


def with_logits(_):
    def loss(hidden, head, target, *, reduction, ignore_index, **_):
        return F.cross_entropy(F.linear(hidden, head), target, reduction=reduction, ignore_index=ignore_index)

    return loss


def broken(_):
    def loss(*_, **__):
        raise RuntimeError("none of it")

    return loss


def wrong_logits(logits):
    return lambda *args, **kwargs: logits(*args, **kwargs) + 0.01


LOSS, LOGITS = "lowtide.models.lazy_results.linear_cross_entropy", "lowtide.models.head_call.HeadCall.logits"
MISTAKES = [
    *((LOSS, wrong, "opt", DIFFERENT, "labels: different: ") for wrong in (wrong_loss, wrong_gradient, no_gradient)),
    (LOSS, with_logits, "gpt2", FELL_BACK, "logits were built, and the report does not count them"),
    (LOSS, broken, "gpt2", DIFFERENT, "none of it"),
    (LOGITS, wrong_logits, "gpt2", DIFFERENT, "logits read after the loss differ"),
]


@pytest.mark.parametrize(("what", "mistake", "model_type", "status", "why"), MISTAKES)
def test_a_mistake_in_the_patch_is_found(what, mistake, model_type, status, why, monkeypatch):
    monkeypatch.setattr(what, mistake(pkgutil.resolve_name(what)))
    row = check("causal", model_type)
    assert row["status"] == status
    assert why in row["why"]


def test_what_is_random_is_drawn_alike():
    """Two models of one seed are the same, or the comparison would be of two models."""
    first, second = (models_case._maker("causal", "gpt2", 0)[0]() for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True))
