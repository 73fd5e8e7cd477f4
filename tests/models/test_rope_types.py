"""Model types whose rotary embedding is not a Llama's: other pairs, other tables, another function; beside stock."""

import inspect

import pytest
import torch
from torch import nn

import lowtide
from models import type_case
from models.compiled_losses import Graphs
from models.test_joined_types import on_meta
from support import relative_error

pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # what models of all ages say when they are built

PAIRS = {
    "interleaved": [
        ("causal", "blt"), ("causal", "cohere"), ("causal", "cohere2"), ("causal", "cohere2_moe"),
        ("image-text", "aya_vision"), ("image-text", "cohere2_vision"), ("image-text", "inkling2"),
    ],
    "halves interleaved": [  # of images and of text
        ("image-text", "ernie4_5_vl_moe"), ("image-text", "glm46v"), ("image-text", "glm4v"), ("image-text", "glm_ocr"),
        ("image-text", "glmga"),
    ],
    "repeated": [
        ("causal", "ernie4_5"), ("causal", "ernie4_5_moe"), ("causal", "glm"), ("causal", "glm4"), ("causal", "helium"),
    ],
    "short": [("causal", "gpt_oss")],
    "deinterleaved": [
        ("causal", "axk2"), ("causal", "bailing_hybrid"), ("causal", "deepseek_v32"), ("causal", "dots3_note_text"),
        ("causal", "glm_moe_dsa"), ("causal", "longcat_flash"),
    ],
    "deinterleaved halves": [  # a setting chooses
        ("causal", "axk1"), ("causal", "deepseek_v3"), ("causal", "glm4_moe_lite"), ("causal", "youtu"),
        ("image-text", "kimi_k25"), ("image-text", "mistral4"), ("image-text", "mistral_large4"),
    ],
    "short_interleaved": [
        ("causal", "codegen"), ("causal", "deepseek_v2"), ("causal", "gptj"), ("causal", "llama4"),
        ("causal", "llama4_text"), ("image-text", "llama4"),
    ],
    "trailing": [("causal", "deepseek_v4")],
    "backwards": [("causal", "nanochat")],
    # Positions of images and text (M-RoPE) are in the tables; Gemma rotates one tensor at a time.
    "halves": [
        ("image-text", "qwen2_vl"), ("image-text", "qwen2_5_vl"), ("image-text", "qwen3_vl"), ("causal", "gemma4"),
        ("causal", "gemma4_text"), ("causal", "gemma4_unified"), ("causal", "gemma4_unified_text"),
        ("causal", "gemma3n_text"), ("image-text", "gemma4"),
    ],
}  # fmt: skip
SAMPLE = {
    "cohere", "glm4", "glm4v", "ernie4_5", "gpt_oss", "qwen2_vl", "deepseek_v3", "longcat_flash", "deepseek_v32",
    "deepseek_v2", "gptj", "llama4_text", "deepseek_v4", "nanochat", "gemma4_text", "gemma3n_text",
}  # fmt: skip
EVERY = [key for keys in PAIRS.values() for key in keys]
# Types whose attention of images rotates [T, H, d] or [1, T, H, d] by tables [T, d].
VISION = [
    "cosmos3_omni", "ernie4_5_vl_moe", "exaone4_5", "glm46v", "glm4v", "glm4v_moe", "glm5_next", "glm_ocr", "glmga",
    "hyperclovax_vision_v2", "inkling2", "kimi_k25", "lfm3_vl", "minimax_m3_vl", "muse_glimmer", "muse_spark",
    "paddleocr_vl", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe",
    "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe", "step3p7", "video_llama_3",
]  # fmt: skip
VISION_SAMPLE = ("qwen2_vl", "kimi_k25", "minimax_m3_vl", "inkling2")


@pytest.mark.parametrize(
    ("kind", "model_type"),
    [
        key if key[1] in SAMPLE else pytest.param(*key, marks=pytest.mark.slow)
        for key in EVERY
        if key[1] not in ("blt", "inkling2")  # run on bytes, and rotate images alone
    ],
)
def test_each_type_trains_as_stock(kind, model_type, ran):
    make, extra = type_case._maker(kind, model_type, 0)
    stock, model = make(), make()
    lowtide.patch(model, loss=False, mlp=False, norm=False)
    ids = {**type_case.batch(0), **extra}
    ran.clear()
    expected, got = type_case._run(stock, ids), type_case._run(model, ids)
    assert type_case.difference(got, expected, type_case._noise(stock, make(), ids)) is None
    assert ran["rotary"] > 0


def test_compiled():
    """A table of complex numbers."""
    make, _ = type_case._maker("causal", "deepseek_v2", 0)
    stock, model = make(), make()
    lowtide.patch(model, loss=False, mlp=False, norm=False)
    graphs, ids = Graphs(), type_case.batch(0)
    outputs, gradients = type_case._run(torch.compile(model, backend=graphs), ids)
    got = outputs, {name.removeprefix("_orig_mod."): g for name, g in gradients.items()}
    noise = type_case._noise(stock, make(), ids)
    assert type_case.difference(got, type_case._run(stock, ids), noise) is None
    assert "lowtide.rotary" in graphs.operators


def vision_attentions(model_type):
    """Return an attention of images of a tiny model, stock and patched, with the same random weights."""
    stock, model = (on_meta("image-text", model_type) for _ in range(2))
    lowtide.patch(model, loss=False, mlp=False, norm=False)
    code = {name: getattr(inspect.unwrap(type(m).forward), "__code__", None) for name, m in stock.named_modules()}
    name = next(name for name, c in code.items() if c and "apply_rotary_pos_emb_vision" in c.co_names)
    pair = [m.get_submodule(name).to_empty(device="cpu") for m in (stock, model)]
    for p in pair[0].parameters():
        nn.init.normal_(p, std=0.3)
    pair[1].load_state_dict(pair[0].state_dict())
    return pair


@pytest.mark.parametrize(
    "model_type",
    [name if name in VISION_SAMPLE else pytest.param(name, marks=pytest.mark.slow) for name in VISION],
)
def test_attention_of_images_is_stock(model_type, ran):
    stock, fused = vision_attentions(model_type)
    windows = "cu_seqlens" in inspect.signature(type(stock).forward).parameters
    hidden = torch.randn(*([23] if windows else [1, 23]), next(stock.parameters()).shape[-1])
    tables = tuple(torch.randn(23, stock.head_dim) for _ in range(2))
    results = []
    for attention in (stock, fused):
        x = hidden.clone().requires_grad_()
        more = {"cu_seqlens": torch.tensor([0, 9, 23])} if windows else {}
        out = attention(x, position_embeddings=tables, **more)
        out = out[0] if isinstance(out, tuple) else out
        out.square().sum().backward()
        results.append([out, x.grad, *(p.grad for p in attention.parameters())])
    assert ran["rotary"] == 1
    for got, expected in zip(results[1], results[0], strict=True):
        assert relative_error(got, expected) < type_case.FACTOR * type_case.ULP
