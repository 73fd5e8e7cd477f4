"""A sample of model types, each built tiny from its default config and compared; all with --slow."""

import os
import pkgutil

import pytest
import torch
import torch.nn.functional as F

import lowtide
from lowtide.measure.allocations import track_allocations
from models import all_types, type_case
from models.type_case import COMPARED, DIFFERENT, FELL_BACK, FUSED, check

transformers = pytest.importorskip("transformers")
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
def test_no_type_is_silently_different(request):
    rows = all_types.checked_types(seconds=300, workers=os.cpu_count() or 1)
    if request.config.getoption("--supported-models"):
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        (request.config.rootpath / "docs" / "supported-models.md").write_text(all_types.page(rows, versions))
    assert [row for row in rows if row["status"] == DIFFERENT] == []
    assert sum(row["status"] == FUSED for row in rows if row["kind"] == "causal") >= 120
    assert sum(row["status"] in COMPARED for row in rows) >= 0.8 * len(rows)


@pytest.mark.parametrize(("model_type", "inner"), [("blip", "text_decoder"), ("nemotron_h_omni", "language_model")])
def test_a_model_around_one_with_a_head_names_it(model_type, inner):
    make, extra = type_case._maker("image-text", model_type, 0)
    stock, model = make(), make()
    why = lowtide.patch(model).parts["loss"].outcome
    assert f"its {inner} has one: pass that to patch, with scoring=True" in why
    lowtide.unpatch(model)
    report = lowtide.patch(model.get_submodule(inner), scoring=True, options=type_case.OPTIONS)
    ids = {**type_case.batch(0), **extra}
    with track_allocations() as seen:
        got = type_case._run(model, ids)
    assert type_case.rows_of_logits(seen, model) == []
    assert (report.calls_fused, report.calls_materialised) == (1, 0)
    noise = type_case._noise(stock, make(), ids)
    assert type_case.difference(got, type_case._run(stock, ids), noise) is None


def wrong_loss(loss):
    return lambda *args, **kwargs: loss(*args, **kwargs) * 1.001


def wrong_gradient(loss):
    return lambda hidden, *args, **kwargs: loss(hidden * 0.999 + hidden.detach() * 0.001, *args, **kwargs)


def with_logits(_):
    def loss(hidden, head, target, *, reduction, ignore_index, **_):
        return F.cross_entropy(F.linear(hidden, head), target, reduction=reduction, ignore_index=ignore_index)

    return loss


LOSS = "lowtide.models.lazy_results.linear_cross_entropy"
MISTAKES = [
    (wrong_loss, DIFFERENT, "labels: different: "),
    (wrong_gradient, DIFFERENT, "labels: different: "),
    (with_logits, FELL_BACK, "logits were built, and the report does not count them"),
]


@pytest.mark.parametrize(("mistake", "status", "why"), MISTAKES)
def test_a_mistake_in_the_patch_is_found(mistake, status, why, monkeypatch):
    monkeypatch.setattr(LOSS, mistake(pkgutil.resolve_name(LOSS)))
    row = check("causal", "gpt2")
    assert row["status"] == status
    assert why in row["why"]
