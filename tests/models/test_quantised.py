"""bitsandbytes' layers, loaded as transformers loads them: left as they came, and everything else fused."""

import copy

import pytest
import torch

import lowtide
from models.conftest import DYNAMO, assert_same_training, expect_calls

transformers = pytest.importorskip("transformers")
bnb = pytest.importorskip("bitsandbytes")
pytest.importorskip("accelerate")

pytestmark = [
    *DYNAMO,
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),  # peft's calls
    pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast:UserWarning"),
    pytest.mark.filterwarnings("ignore:Merge lora module to .-bit linear:UserWarning"),
]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}  # blocks of 64 numbers share a scale
BITS = {"4bit": "Linear4bit", "8bit": "Linear8bitLt"}


@pytest.fixture
def quantised(build, tmp_path):
    """A model as from_pretrained makes it with a quantization_config: all layers but those named."""

    def load(bits, skip=("lm_head",), dtype=torch.float32, **settings):
        if not (tmp_path / "plain").exists():
            build("llama", **SIZES).save_pretrained(tmp_path / "plain")
        own = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype, **settings} if bits == "4bit" else {}
        config = transformers.BitsAndBytesConfig(**{f"load_in_{bits}": True}, llm_int8_skip_modules=list(skip), **own)
        return transformers.LlamaForCausalLM.from_pretrained(
            tmp_path / "plain", quantization_config=config, dtype=dtype, device_map="cpu"
        )

    return load


def compare(model, stock, batch, rtol=1e-5):
    assert_same_training(model, stock, batch, seed=5, gradients=rtol, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("skip", [(), ("lm_head",), ("gate_proj", "up_proj", "down_proj", "lm_head")], ids=len)
def test_loss_and_gradients_equal_stock(bits, skip, quantised, batch, ran):
    model, stock = quantised(bits, skip), quantised(bits, skip)
    report = lowtide.patch(model)
    compare(model, stock, batch)
    kind = BITS[bits]
    head_is_plain, mlp_is_plain = "lm_head" in skip, "up_proj" in skip
    assert type(stock.lm_head) is (torch.nn.Linear if head_is_plain else getattr(bnb.nn, kind))
    assert type(stock.model.layers[0].mlp.up_proj) is (torch.nn.Linear if mlp_is_plain else getattr(bnb.nn, kind))
    expect_calls(report, int(head_is_plain), int(not head_is_plain))
    assert ran["swiglu_mlp"] == 2 * mlp_is_plain
    if not head_is_plain:
        reason = f"left as it is: the output embedding is a {kind}, not a plain torch.nn.Linear"
        assert report.parts["loss"].outcome == reason
    if not mlp_is_plain:
        assert report.parts["mlp"].outcome == f"left as it is: gate_proj is a {kind}, not a plain torch.nn.Linear"
    assert report.parts["norm"].patched
    assert report.parts["rope"].patched


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("order", ["peft first", "patch first"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_qlora(bits, order, dtype, quantised, batch, ran):
    """prepare_model_for_kbit_training, LoRA on every layer, on the head too, with checkpointing."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj", "lm_head"], init_lora_weights=False
    )

    def prepare(model):
        model = peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
        torch.manual_seed(2)
        return peft.get_peft_model(model, config).train()

    model, stock = quantised(bits, dtype=dtype), quantised(bits, dtype=dtype)
    if order == "patch first":
        report = lowtide.patch(model)
    model, stock = prepare(model), prepare(stock)
    if order == "peft first":
        report = lowtide.patch(model)
    compare(model, stock, batch, rtol=1e-5 if dtype == torch.float32 else 5e-2)
    expect_calls(report, 1)
    assert ran["swiglu_mlp"] == ran["adapted_mlp"] == 0
    lowtide.patch(model)
    assert "LoRA with it" in report.parts["loss"].outcome
    reason = f"left as it is: gate_proj is LoRA on a {BITS[bits]}, not on a plain torch.nn.Linear"
    assert report.parts["mlp"].outcome == reason


@pytest.mark.parametrize("bits", BITS)
def test_lora_on_a_quantised_head(bits, quantised, batch):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
    pair = []
    for model in [quantised(bits, skip=()) for _ in range(2)]:
        torch.manual_seed(2)
        pair.append(peft.get_peft_model(model, config).train())
    report = lowtide.patch(pair[0])
    compare(*pair, batch)
    expect_calls(report, 0, 1)
    assert f"the output embedding is LoRA on a {BITS[bits]}, not on a plain" in str(report)


def test_a_quantised_model_is_saved_and_copied_as_stock(quantised, batch, tmp_path):
    model, stock = quantised("4bit"), quantised("4bit")
    lowtide.patch(model)
    other = copy.deepcopy(model)
    torch.testing.assert_close(other(**batch).loss, stock(**batch).loss)
    for name, m in (("ours", model), ("theirs", stock)):
        m.save_pretrained(tmp_path / name)
    for file in (tmp_path / "theirs").iterdir():
        assert file.read_bytes() == (tmp_path / "ours" / file.name).read_bytes(), file.name
    lowtide.unpatch(model)
    assert {n: type(m) for n, m in model.named_modules()} == {n: type(m) for n, m in stock.named_modules()}
