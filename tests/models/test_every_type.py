"""A sample of model types, each built tiny from its default config and compared; all with --slow."""

from __future__ import annotations

import inspect
import os

import pytest
import torch
from torch import nn

import lowtide
from lowtide.measure.allocations import track_allocations
from models import all_types, type_case
from models.conftest import fused
from models.type_case import COMPARED, DIFFERENT, FUSED, check
from promises import promise
from support import relative_error

transformers = pytest.importorskip("transformers")
pytestmark = [
    promise("patched"),
    pytest.mark.filterwarnings("ignore"),  # what models of all ages say when they are built
]

# Chosen for what is different about them and not in conftest.MODELS: tables of complex numbers with experts of one
# weight, a hybrid with state spaces and factors, no attention, pictures, an encoder; and how many modules are fused.
SAMPLE = {
    ("causal", "deepseek_v2"): {"mlp": 4, "norm": 9, "rope": 2},
    ("causal", "granitemoehybrid"): {"mlp": 2, "norm": 5, "rope": 0},
    ("causal", "mamba"): {"mlp": 0, "norm": 3, "rope": 0},
    ("causal", "opt"): {"mlp": 0, "norm": 0, "rope": 0},
    ("seq2seq", "t5gemma"): {"mlp": 4, "norm": 22, "rope": 4},
    ("image-text", "qwen2_vl"): {"mlp": 2, "norm": 5, "rope": 4},
}


@pytest.mark.parametrize(("kind", "model_type"), SAMPLE, ids=lambda x: x)
def test_a_type_never_builds_logits(kind, model_type):
    row = check(kind, model_type)
    assert (row["status"], row["why"]) == (FUSED, "")
    assert len(row["cases"]) >= 4
    assert set(row["cases"].values()) == {"equal"}
    assert {part: row["parts"][part] for part in ("mlp", "norm", "rope")} == SAMPLE[kind, model_type]
    assert row["tolerances"]["loss"] < 1e-3
    assert row["tolerances"]["gradients_median"] < 1e-3


@pytest.mark.slow
@promise("pages", "reported")
def test_every_type_is_as_the_page_says(request):
    """Of the versions that wrote it; of others none is different, and as many are fused."""
    file = request.config.rootpath / "docs" / "supported-models.md"
    rows = all_types.checked_types(seconds=300, workers=os.cpu_count() or 1)
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
        got = type_case.run(model, ids)
    assert type_case.rows_of_logits(seen, model) == []
    assert (report.calls_fused, report.calls_materialised) == (1, 0)
    noise = type_case.noise_of(stock, make(), ids)
    assert type_case.difference(got, type_case.run(stock, ids), noise) is None


def attention_of_images(model):
    """Return the name of a module that rotates [T, H, d] or [1, T, H, d] by tables [T, d], None if there is none."""
    for name, module in model.named_modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is not None and "apply_rotary_pos_emb_vision" in code.co_names:
            return name
    return None


@pytest.mark.parametrize(
    "model_types",
    [["qwen2_vl", "kimi_k25"], pytest.param(None, marks=pytest.mark.slow)],
    ids=["two", "all"],
)
def test_attention_of_images_is_stock(model_types):
    """Types of images and text run on text alone above."""
    found = 0
    for model_type in model_types or type_case.types("image-text"):
        stock = type_case.on_meta("image-text", model_type)
        name = None if stock is None else attention_of_images(stock)
        if name is None:
            continue
        model = type_case.on_meta("image-text", model_type)
        lowtide.patch(model, loss=False, mlp=False, norm=False)
        stock, model = (m.get_submodule(name).to_empty(device="cpu") for m in (stock, model))
        for p in stock.parameters():
            nn.init.normal_(p, std=0.3)
        model.load_state_dict(stock.state_dict())
        windows = "cu_seqlens" in inspect.signature(type(stock).forward).parameters
        hidden = torch.randn(*([23] if windows else [1, 23]), next(stock.parameters()).shape[-1])
        tables = tuple(torch.randn(23, stock.head_dim) for _ in range(2))
        results = []
        for attention in (stock, model):
            x = hidden.clone().requires_grad_()
            more = {"cu_seqlens": torch.tensor([0, 9, 23])} if windows else {}
            out = attention(x, position_embeddings=tables, **more)
            out = out[0] if isinstance(out, tuple) else out
            assert fused(out)["rope"] == (attention is model), model_type
            out.square().sum().backward()
            results.append([out, x.grad, *(p.grad for p in attention.parameters())])
        for got, expected in zip(results[1], results[0], strict=True):
            assert relative_error(got, expected) < type_case.FACTOR * type_case.ULP, model_type
        found += 1
    assert found >= (2 if model_types else 20)
