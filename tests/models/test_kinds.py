"""Pictures, sequence to sequence, auxiliary losses and hidden states: patched models are stock ones without logits."""

import copy

import pytest
import torch

import lowtide
from models.conftest import assert_same_training, expect_calls

transformers = pytest.importorskip("transformers")

V = 97
PICTURE = 90


def randomised(model):
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.train()
    return model, copy.deepcopy(model)


def llava():
    text = transformers.LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4,
        projection_dim=16,
    )  # fmt: skip
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=PICTURE)
    return transformers.LlavaForConditionalGeneration(config)


@pytest.fixture
def pictures():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 80, (2, 13), generator=generator)
    ids[:, 2:6] = PICTURE
    labels = ids.where(ids != PICTURE, -100)
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    labels[0, -3:] = -100
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": labels,
        "pixel_values": torch.rand(2, 3, 8, 8, generator=generator),
    }


@pytest.mark.parametrize("kind", ["padding", "num_items_in_batch", "labels on pictures"])
def test_pictures_and_text(kind, pictures):
    model, stock = randomised(llava())
    if kind == "num_items_in_batch":
        pictures["num_items_in_batch"] = torch.tensor(5)
    if kind == "labels on pictures":  # they count, as in the stock model
        pictures["labels"] = pictures["input_ids"]
    report = lowtide.patch(model)
    outputs = {m: m(**pictures) for m in (model, stock)}
    assert_same_training(model, stock, lambda m: outputs[m].loss, gradients=2e-5)
    assert any(p.grad is not None and p.grad.any() for name, p in model.named_parameters() if "vision" in name)
    expect_calls(report, 1)
    torch.testing.assert_close(outputs[model].logits, outputs[stock].logits)


def t5(**settings):
    shape = {
        "vocab_size": V,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 2,
        "num_heads": 2,
        "dropout_rate": 0.0,
    }
    config = transformers.T5Config(**shape, decoder_start_token_id=0, pad_token_id=0, **settings)
    return transformers.T5ForConditionalGeneration(config)


def bart():
    config = transformers.BartConfig(
        vocab_size=V, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, dropout=0.0, max_position_embeddings=32,
        pad_token_id=1, decoder_start_token_id=2,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config)
    model.final_logits_bias += torch.linspace(-1, 1, V)
    return model


SEQ2SEQ = {"t5": t5, "t5 tied": lambda: t5(tie_word_embeddings=True, scale_decoder_outputs=True), "bart": bart}


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_sequence_to_sequence(name):
    model, stock = randomised(SEQ2SEQ[name]())
    report = lowtide.patch(model)
    ids, labels = torch.randint(3, V, (2, 9)), torch.randint(3, V, (2, 7))
    labels[1, 4:] = -100
    outputs = {m: m(input_ids=ids, labels=labels) for m in (model, stock)}
    assert_same_training(model, stock, lambda m: outputs[m].loss)
    expect_calls(report, 1)
    torch.testing.assert_close(outputs[model].logits, outputs[stock].logits)
    tokens = [m.eval().generate(input_ids=ids, max_new_tokens=5, do_sample=False) for m in (model, stock)]
    assert torch.equal(*tokens)


def test_the_auxiliary_loss_of_experts_is_added_once(patched, batch):
    model, stock, report = patched("qwen3-moe", settings={"router_aux_loss_coef": 0.5})
    outputs = {m: m(**batch) for m in (model, stock)}
    assert_same_training(model, stock, lambda m: outputs[m].loss)
    torch.testing.assert_close(outputs[model].aux_loss, outputs[stock].aux_loss)
    assert outputs[stock].aux_loss > 0.1
    expect_calls(report, 1)


def test_hidden_states_are_those_of_stock_and_carry_gradients(patched, batch):
    model, stock, report = patched("llama")

    def loss(m):
        outputs = m(**batch, output_hidden_states=True)
        return outputs.loss + sum(h.square().mean() for h in outputs.hidden_states)

    assert_same_training(model, stock, loss)
    expect_calls(report, 1)


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "top_k": 20}, {"num_beams": 3}], ids=str)
def test_generation_is_bitwise_the_same(settings, patched, batch):
    model, stock, _ = patched("llama")
    scores = []
    for m in (model, stock):
        torch.manual_seed(0)
        generated = m.eval().generate(
            batch["input_ids"], max_new_tokens=6, output_logits=True, return_dict_in_generate=True, **settings
        )
        scores.append((generated.sequences, *generated.logits))
    for ours, expected in zip(*scores, strict=True):
        assert torch.equal(ours, expected)
