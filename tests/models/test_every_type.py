"""A sample of model types, each built tiny from its default config and compared; all with --slow."""

from __future__ import annotations

import os

import pytest
import torch

import lowtide
from lowtide.measure.allocations import track_allocations
from models import all_types, type_case
from models.type_case import COMPARED, DIFFERENT, FUSED, check
from promises import promise

transformers = pytest.importorskip("transformers")
pytestmark = [
    promise("patched"),
    pytest.mark.filterwarnings("ignore"),  # what models of all ages say when they are built
]

# Chosen for what is different about them and not in conftest.MODELS: tables of complex numbers with experts of one
# weight, a hybrid with state spaces and factors, pictures, encoders, a bias of the model's own; and how many modules
# are fused.
SAMPLE = {
    ("causal", "deepseek_v2"): {"mlp": 4, "norm": 9, "rope": 2},
    ("causal", "granitemoehybrid"): {"mlp": 2, "norm": 5, "rope": 0},
    ("seq2seq", "bart"): {"mlp": 0, "norm": 0, "rope": 0},
    ("seq2seq", "t5gemma"): {"mlp": 4, "norm": 22, "rope": 4},
    ("image-text", "qwen2_vl"): {"mlp": 2, "norm": 5, "rope": 4},
}


@pytest.mark.parametrize(
    ("kind", "model_type"),
    [pytest.param(*one, marks=[pytest.mark.slow] * ("t5gemma" in one), id="-".join(one)) for one in SAMPLE],
)
def test_a_type_never_builds_logits(kind, model_type):
    row = check(kind, model_type)
    assert (row["status"], row["why"]) == (FUSED, "")
    assert len(row["cases"]) >= 4
    assert set(row["cases"].values()) == {"equal"}
    assert {part: row["parts"][part] for part in ("mlp", "norm", "rope")} == SAMPLE[kind, model_type]
    assert max(row["tolerances"]) < 1e-3


@pytest.mark.slow
@promise("pages", "reported")
def test_every_type_is_as_the_page_says(request):
    """Of the versions that wrote it; of others none is different, and as many are fused."""
    file = request.config.rootpath / "docs" / "supported-models.md"
    rows = all_types.checked_types(seconds=600, workers=os.cpu_count() or 1)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    page = all_types.page(rows, versions)
    if request.config.getoption("--supported-models"):
        file.write_text(page)
    assert [row for row in rows if row["status"] == DIFFERENT] == []
    assert sum(row["status"] == FUSED for row in rows if row["kind"] == "causal") >= 120
    assert sum(row["status"] in COMPARED for row in rows) >= 0.8 * len(rows)
    said = file.read_text()
    if all(version in said for version in versions.values()):
        assert page.splitlines() == said.splitlines()


def test_a_model_around_one_with_a_head_names_it():
    make, extra = type_case.maker("image-text", "blip", 0)
    stock, model = make(), make()
    why = lowtide.patch(model).parts["loss"].outcome
    assert "its text_decoder has one: pass that to patch, with scoring=True" in why
    lowtide.unpatch(model)
    report = lowtide.patch(model.text_decoder, scoring=True, options=type_case.OPTIONS)
    ids = {**type_case.batch(0), **extra}
    with track_allocations() as seen:
        got, _ = type_case.run(model, ids)
    assert type_case.rows_of_logits(seen, model) == []
    assert (report.calls_fused, report.calls_materialised) == (1, 0)
    noise = type_case.noise_of(stock, make(), ids)
    assert type_case.difference(got, type_case.run(stock, ids)[0], noise) is None
