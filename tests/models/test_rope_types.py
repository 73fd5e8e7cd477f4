"""Model types whose rotary embedding pairs other values than a head's halves, or has other tables, beside stock."""

import pytest

import lowtide
from lowtide.bench import models_case
from lowtide.models import rope_part
from models.test_joined_types import on_meta

pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # what models of all ages say when they are built

PAIRS = {
    "interleaved": [
        ("causal", "blt"), ("causal", "cohere"), ("causal", "cohere2"), ("causal", "cohere2_moe"),
        ("image-text", "aya_vision"), ("image-text", "cohere2_vision"), ("image-text", "ernie4_5_vl_moe"),
        ("image-text", "glm46v"), ("image-text", "glm4v"), ("image-text", "glm_ocr"), ("image-text", "glmga"),
    ],
    "repeated": [
        ("causal", "ernie4_5"), ("causal", "ernie4_5_moe"), ("causal", "glm"), ("causal", "glm4"), ("causal", "helium"),
    ],
    "short": [("causal", "gpt_oss")],
}  # fmt: skip
SAMPLE = {"cohere", "glm4", "glm4v", "ernie4_5", "gpt_oss", "qwen2_vl"}
# Positions of images and text (M-RoPE) are in the tables: attention rotates halves.
SECTIONS = [("image-text", "qwen2_vl"), ("image-text", "qwen2_5_vl"), ("image-text", "qwen3_vl")]
EVERY = [(*key, pairs) for pairs, keys in {**PAIRS, "halves": SECTIONS}.items() for key in keys]


def rotations(model):
    found = (rope_part.find(m, type(m)) for m in model.modules() if rope_part.is_candidate(m))
    return {one if isinstance(one, str) else one[1][1] for one in found}


@pytest.mark.parametrize(("kind", "model_type", "pairs"), EVERY)
def test_which_pairs_a_type_rotates(kind, model_type, pairs):
    assert rotations(on_meta(kind, model_type)) == {pairs}


@pytest.mark.parametrize(
    ("kind", "model_type"),
    [
        key if key[1] in SAMPLE else pytest.param(*key, marks=pytest.mark.slow)
        for *key, _ in EVERY
        if key[1] != "blt"  # it runs on bytes
    ],
)
def test_each_type_trains_as_stock(kind, model_type, ran):
    make, extra = models_case._maker(kind, model_type, 0)
    stock, model = make(), make()
    report = lowtide.patch(model, loss=False, mlp=False, norm=False)
    line, ids = report.parts["rope"], {**models_case.batch(0), **extra}
    ran.clear()
    noise = models_case._noise(stock, make(), ids)
    assert models_case.difference(models_case._run(model, ids), models_case._run(stock, ids), noise) is None
    assert 0 < ran["rotary"] <= line.count  # Cohere 2 rotates in layers with a window alone
