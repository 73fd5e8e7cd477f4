"""bitsandbytes' layers, loaded as transformers loads them: MLPs in 4 bits run fused, other layers as they came."""

from __future__ import annotations

import copy

import pytest
import torch

import lowtide
from models.conftest import DYNAMO, PEFT, assert_same_training, expect_calls, fused, lora, set_level, types_of, wrap
from promises import promise
from support import every_pair

transformers = pytest.importorskip("transformers")
bnb = pytest.importorskip("bitsandbytes")
pytest.importorskip("accelerate")

pytestmark = [
    *DYNAMO,
    *PEFT,
    promise("patched", "reported", "adapters"),
    pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast:UserWarning"),
    pytest.mark.filterwarnings("ignore:(Merge|Unmerge) lora module to .-bit linear:UserWarning"),
]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}  # blocks of 64 numbers share a scale
BITS = {"4bit": "Linear4bit", "8bit": "Linear8bitLt"}
OF_4_BITS = "weights in 4 bits dequantised for one GEMM at a time"
OF_8_BITS = "Linear8bitLt, not {}a plain torch.nn.Linear"
TARGETS = ["q_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj"]


@pytest.fixture
def quantised(build, tmp_path):
    """Two models as from_pretrained makes them with a quantization_config: all layers but those named."""

    def load(bits, skip=("lm_head",), dtype=torch.float32, name="llama", sizes=(), adapters=None, **settings):
        build(name, **{**SIZES, **dict(sizes)}).save_pretrained(tmp_path / "plain")
        own = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype, **settings} if bits == "4bit" else {}
        config = transformers.BitsAndBytesConfig(**{f"load_in_{bits}": True}, llm_int8_skip_modules=list(skip), **own)
        models = []
        for _ in range(2):
            model = transformers.AutoModelForCausalLM.from_pretrained(
                tmp_path / "plain", quantization_config=config, dtype=dtype, device_map="cpu"
            )
            # from_pretrained evaluates, for which bitsandbytes packs weights anew on some CPUs
            models.append(model.train() if adapters is None else wrap(model.train(), lora(target_modules=adapters)))
        return models

    return load


def compare(model, stock, batch, rtol=1e-5):
    return assert_same_training(model, stock, batch, seed=5, gradients=2 * rtol, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("skip", [(), ("lm_head",), ("gate_proj", "up_proj", "down_proj", "lm_head")], ids=len)
def test_loss_and_gradients_equal_stock(bits, skip, quantised, batch):
    model, stock = quantised(bits, skip)
    report = lowtide.patch(model)
    loss = compare(model, stock, batch)
    head_is_plain, mlp_is_plain = "lm_head" in skip, "up_proj" in skip
    assert type(stock.lm_head).__name__ == ("Linear" if head_is_plain else BITS[bits])
    expect_calls(report, int(head_is_plain), int(not head_is_plain))
    assert fused(loss)["mlp"] == 2 * (mlp_is_plain or bits == "4bit")
    if not head_is_plain:
        reason = f"left as it is: the output embedding is a {BITS[bits]}, not a plain torch.nn.Linear (list it in "
        assert report.parts["loss"].outcome == f"{reason}llm_int8_skip_modules to train without logits)"
    if not mlp_is_plain:
        outcomes = {
            "4bit": f"runs as lowtide.swiglu_mlp (silu), which keeps gate and up, {OF_4_BITS}",
            "8bit": f"left as it is: gate_proj is a {OF_8_BITS.format('')}",
        }
        assert report.parts["mlp"].outcome == outcomes[bits]


@every_pair(bits=BITS, order=["peft first", "patch first"], dtype=[torch.float32, torch.bfloat16])
def test_qlora(bits, order, dtype, quantised, batch):
    """prepare_model_for_kbit_training, LoRA on every layer, with checkpointing."""
    peft = pytest.importorskip("peft")

    def prepare(model):
        model = peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
        return wrap(model, lora(target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"]))

    model, stock = quantised(bits, dtype=dtype)
    if order == "patch first":
        report = lowtide.patch(model)
    model, stock = prepare(model), prepare(stock)
    if order == "peft first":
        report = lowtide.patch(model)
    loss = compare(model, stock, batch, rtol=1e-5 if dtype == torch.float32 else 5e-2)
    expect_calls(report, 1)
    assert fused(loss)["mlp"] == 2 * (bits == "4bit")
    lowtide.patch(model)
    where = "LoRA on gate_proj, up_proj, down_proj with it"
    outcomes = {
        "4bit": f"runs as lowtide.swiglu_mlp (silu), which keeps gate and up, {where}, {OF_4_BITS}",
        "8bit": f"left as it is: gate_proj is LoRA on a {OF_8_BITS.format('on ')}",
    }
    assert report.parts["mlp"].outcome == outcomes[bits]


@promise("reversible")
def test_a_quantised_model_is_saved_and_copied_as_stock(quantised, batch, tmp_path):
    model, stock = quantised("4bit")
    lowtide.patch(model)
    torch.testing.assert_close(copy.deepcopy(model)(**batch).loss, stock(**batch).loss)
    for name, m in (("ours", model), ("theirs", stock)):
        m.save_pretrained(tmp_path / name)
    for file in (tmp_path / "theirs").iterdir():
        assert file.read_bytes() == (tmp_path / "ours" / file.name).read_bytes(), file.name
    lowtide.unpatch(model)
    assert types_of(model) == types_of(stock)


@pytest.mark.parametrize(
    ("name", "sizes", "settings"),
    [
        ("llama", {"mlp_bias": True}, {"bnb_4bit_use_double_quant": True}),
        ("phi3", {}, {"bnb_4bit_quant_type": "fp4"}),
        ("gemma2", {}, {"bnb_4bit_quant_storage": torch.bfloat16}),
        ("qwen3", {}, {"bnb_4bit_compute_dtype": None}),
        ("granite", {}, {"skip": ("lm_head", "up_proj")}),
    ],
)
def test_model_types_and_forms(name, sizes, settings, quantised, batch):
    model, stock = quantised("4bit", name=name, sizes=sizes, adapters=TARGETS, **settings)
    lowtide.patch(model)
    for level in (0, 1):
        set_level(model, level)
        assert fused(compare(model, stock, batch))["mlp"] == 2


def test_what_the_fused_mlp_cannot_read_runs_as_it_came(quantised, batch):
    model, stock = quantised("4bit", adapters=["q_proj"])
    # What comes before an MLP in bfloat16 is stock's own: one other bit of it is rounded otherwise there.
    report = lowtide.patch(model, loss=False, norm=False, rope=False)
    for m in (model, stock):
        layers = m.get_base_model().model.layers
        layers[0].mlp.up_proj.compute_dtype = torch.bfloat16
        layers[1].mlp.down_proj.register_forward_hook(lambda *_: None)
    assert fused(compare(model, stock, batch))["mlp"] == 0
    assert report.parts["mlp"].patched
    layers = model.get_base_model().model.layers
    layers[0].mlp.up_proj = bnb.nn.Linear4bit(64, 128, bias=False, quant_type="nf4")
    assert "not quantised yet" in str(lowtide.patch(model))
