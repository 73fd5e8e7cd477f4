"""Every model type with the weights of its experts in one module, beside stock."""

import pytest

import lowtide
from lowtide.models import experts_part
from lowtide.models.instance import part_of
from models import type_case
from models.conftest import types_of
from models.test_joined_types import on_meta

pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # what models of all ages say when they are built

OTHER = "its experts are not down(act(gate(x)) * up(x)) with SiLU or tanh-GELU, weighted and summed"
NOT_ONE = "gate and up of its experts are not one weight, gate_up_proj"
INPUTS = "its forward does not take hidden states, the experts of each token and their weights"
SHAPES = "the shapes of its weights are not those of gate and up together, and down"
BESIDE = "it has weights or buffers beside those of its experts"
# The types whose experts are all fused, and why those of the others are not: all or, for inkling_text, its shared ones.
ALL_FUSED = {
    "causal": """
        afmoe aria_text axk1 axk2 bailing_hybrid beam cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4
        dots1 dots3_note_text ernie4_5_moe exaone_moe flex_olmo glm4_moe glm4_moe_lite glm_moe_dsa gpt_oss
        granitemoe granitemoe_swa granitemoehybrid granitemoeshared hunyuan_v1_moe hy_v3 hy_v4 jamba kimi_linear
        kolibri1 laguna lfm2_moe mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text mixtral olmoe phimoe
        qwen2_moe qwen3_5_moe qwen3_5_moe_text qwen3_moe qwen3_next solar_open zaya
    """,
    "image-text": """
        aria ernie4_5_vl_moe glm4v_moe glm5_next kimi_k25 minimax_m3_vl mistral4 mistral_large4 qwen3_5_moe
        qwen3_omni_moe_thinker qwen3_vl_moe step3p7 unlimited_ocr
    """,
}
NOT_FUSED = {
    ("causal", "inkling2_text"): OTHER,
    ("causal", "inkling_text"): NOT_ONE,
    ("causal", "llama4"): INPUTS,
    ("causal", "llama4_text"): INPUTS,
    ("causal", "longcat_flash"): SHAPES,
    ("causal", "nemotron_h"): NOT_ONE,
    ("image-text", "inkling2"): OTHER,
    ("image-text", "llama4"): INPUTS,
    ("image-text", "muse_spark"): BESIDE,
    ("image-text", "nemotron_h_omni"): NOT_ONE,
}
EVERY = [*((kind, name) for kind, names in ALL_FUSED.items() for name in names.split()), *NOT_FUSED]
# Chosen for what is different about them: layouts, limits, biases, shared experts, routers.
SAMPLE = {
    "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v3", "deepseek_v4", "glm4_moe", "olmoe", "minimax",
    "jamba", "granitemoe", "minimax_m3_vl_text", "aria_text", "llama4_text", "nemotron_h", "inkling_text",
}  # fmt: skip
RUNS = [key for key in EVERY if key[1] != "step3p7"]  # which wants as many images as tokens for them
TYPES = [key if key[1] in SAMPLE else pytest.param(*key, marks=pytest.mark.slow) for key in RUNS]


def experts_of(model):
    return {name: module for name, module in model.named_modules() if experts_part.is_candidate(module)}


def with_levels(model, level):
    for module in experts_of(model).values():
        if part_of(module) == "mlp":
            module.checkpoint_level = level


@pytest.mark.parametrize(("kind", "model_type"), TYPES)
def test_each_type_trains_as_stock(kind, model_type, ran):
    """In float32, at both levels, to 20 times what an ulp in each weight does."""
    why = NOT_FUSED.get((kind, model_type))
    make, extra = type_case._maker(kind, model_type, 0)
    stock, model = make(), make()
    lowtide.patch(model, loss=False, norm=False, rope=False)
    fused = [name for name, module in experts_of(model).items() if part_of(module) == "mlp"]
    assert bool(fused) == (why is None or model_type == "inkling_text")
    reasons = {experts_part.find(m, type(m)) for name, m in experts_of(model).items() if name not in fused}
    assert reasons == ({why} if why else set())
    batch = {**type_case.batch(0), **extra}
    noise = type_case._noise(stock, make(), batch)
    expected = type_case._run(stock, batch)
    for level in (0, 1):
        with_levels(model, level)
        ran.clear()
        assert type_case.difference(type_case._run(model, batch), expected, noise) is None
        assert bool(ran["experts_mlp"]) == bool(fused)  # the experts of pictures (Ernie 4.5) may have no token
    lowtide.unpatch(model)
    assert types_of(model) == types_of(stock)
    assert all("checkpoint_level" not in vars(module) for module in model.modules())


@pytest.mark.slow
def test_no_type_is_missing():
    """Every type is built without weights."""
    every = [(kind, model_type) for kind in type_case.KINDS for model_type in type_case.types(kind)]
    models = {key: on_meta(*key) for key in every}
    assert {key for key, model in models.items() if model is not None and experts_of(model)} == {
        *EVERY, ("seq2seq", "nemo_speechlm")  # not built tiny
    }  # fmt: skip
