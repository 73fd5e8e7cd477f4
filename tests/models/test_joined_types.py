"""Every model type whose MLPs have gate and up in one projection (gate_up_proj), beside stock."""

import contextlib

import pytest
import torch

import lowtide
from lowtide.models import mlp_part
from lowtide.models.instance import part_of
from models import type_case
from models.conftest import types_of
from models.joined import OTHER_FORM, joined_mlps, with_levels
from models.tiny import HEAD_DIMS, tiny_model

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # what models of all ages say when they are built
BESIDE = "it has weights or buffers beside its projections"
# Each type: how many of its MLPs are fused, and why its others are not.
TYPES = {
    ("causal", "glm"): (2, None),
    ("causal", "glm4"): (2, None),
    ("causal", "phi3"): (2, None),
    ("causal", "phi4_multimodal"): (2, BESIDE),  # of audio: a norm inside
    ("image-text", "glm46v"): (2, None),
    ("image-text", "glm4v"): (2, None),
    ("image-text", "glm_ocr"): (2, None),
    ("image-text", "glmga"): (2, None),
    ("causal", "minimax_m3_vl_text"): (0, OTHER_FORM),  # clamps
    ("image-text", "minimax_m3_vl"): (0, OTHER_FORM),
}


@pytest.mark.parametrize(("kind", "model_type"), TYPES, ids=str)
def test_each_type_trains_as_stock(kind, model_type, ran):
    """In float32, at both levels, to 20 times what an ulp in each weight does."""
    count, why = TYPES[kind, model_type]
    make, extra = type_case._maker(kind, model_type, 0)
    stock, model = make(), make()
    lowtide.patch(model, loss=False, norm=False, rope=False)
    fused = [name for name, module in joined_mlps(model).items() if part_of(module) == "mlp"]
    reasons = {mlp_part.find(m, type(m)) for name, m in joined_mlps(model).items() if name not in fused}
    assert (len(fused), reasons) == (count, {why} if why else set())
    batch = {**type_case.batch(0), **extra}
    noise = type_case._noise(stock, make(), batch)
    expected = type_case._run(stock, batch)
    for level in (0, 1):
        with_levels(model, level)
        ran.clear()
        assert type_case.difference(type_case._run(model, batch), expected, noise) is None
        assert ran["adapted_mlp"] == count
    lowtide.unpatch(model)
    assert types_of(model) == types_of(stock)
    assert all("checkpoint_level" not in vars(module) for module in model.modules())


def test_a_type_that_does_not_run_tiny_falls_back():
    model = on_meta("causal", "zamba2")
    lowtide.patch(model)
    assert {mlp_part.find(m, type(m)) for m in joined_mlps(model).values()} == {BESIDE}  # adapters of its own


def on_meta(kind, model_type):
    """Return a tiny model without weights, None where the default config makes none."""
    auto = getattr(transformers, type_case.KINDS[kind][0])
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]
    for head_dim in HEAD_DIMS:
        with torch.device("meta"), contextlib.suppress(Exception):
            return tiny_model(auto, config, head_dim=head_dim, decoder=kind == "causal", seed=0)
    return None


@pytest.mark.slow
def test_no_type_is_missing():
    """Every type is built without weights."""
    every = [(kind, model_type) for kind in type_case.KINDS for model_type in type_case.types(kind)]
    models = {key: on_meta(*key) for key in every}
    found = {key for key, model in models.items() if model is not None and joined_mlps(model)}
    assert found == {*TYPES, ("causal", "zamba2")}
