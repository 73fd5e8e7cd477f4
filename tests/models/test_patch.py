"""Patched models train and evaluate as stock ones do, and do so without logits."""

import inspect

import pytest
import torch
import torch.nn.functional as F

from models.conftest import assert_same_gradients, assert_same_training, expect_calls


def test_loss_and_every_gradient_equal_stock(any_model, patched, batch):
    model, stock, report = patched(any_model)
    for _ in range(2):
        assert_same_training(model, stock, lambda m: 3.0 * m(**batch).loss, rtol=1e-6, atol=3e-6)
    expect_calls(report, 2)


def test_gradients_in_float64_equal_to_the_last_digits(any_model, patched, batch):
    model, stock, report = patched(any_model, torch.float64)
    model.eval(), stock.eval()
    model(**batch).loss.backward()
    expect_calls(report, 1)

    # The stock loss itself rounds logits to float32, so the reference keeps its logits and takes its own loss of them.
    aux_weight = getattr(stock.config, "router_aux_loss_coef", 0.0)
    labels = batch.pop("labels")
    outputs = stock(**batch)
    loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    if aux_weight:
        loss = loss + aux_weight * stock(**batch, labels=labels).aux_loss
    loss.backward()
    in_float32 = any_model == "gemma3" or aux_weight  # its head norms, whatever comes in
    assert_same_gradients(model, stock, rtol=1e-6 if in_float32 else 1e-11)


def test_num_items_in_batch(any_model, patched, batch):
    model, stock, report = patched(any_model)
    every_kind = (7, torch.tensor(7), torch.tensor(7.5))
    kinds = every_kind if any_model in ("llama", "gemma2") else every_kind[1:2]
    for num_items in kinds:
        assert_same_training(model, stock, {**batch, "num_items_in_batch": num_items})
    expect_calls(report, len(kinds))


def test_shift_labels(any_model, patched, batch):
    model, stock, report = patched(any_model)
    batch["shift_labels"] = batch["labels"].roll(-2, 1)
    assert_same_training(model, stock, batch)
    expect_calls(report, 1)


def test_without_labels_bitwise_the_same_logits_and_nothing_counted(any_model, patched, batch):
    model, stock, report = patched(any_model, mlp=False)
    model.eval(), stock.eval()  # norms and rotations on a CPU round as stock ones do
    del batch["labels"]
    logits = model(**batch).logits
    assert type(logits) is torch.Tensor
    assert torch.equal(logits, stock(**batch).logits)
    expect_calls(report, 0)


def test_generate_gives_the_same_tokens(any_model, patched, batch):
    model, stock, report = patched(any_model)
    model.eval(), stock.eval()
    prompt = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    tokens = [m.generate(**prompt, max_new_tokens=5, do_sample=False) for m in (stock, model)]
    assert torch.equal(*tokens)
    expect_calls(report, 0)


def test_logits_read_after_the_loss(any_model, patched, batch):
    model, stock, report = patched(any_model, mlp=False)
    outputs, expected = model(**batch), stock(**batch)
    assert outputs.logits.shape == expected.logits.shape
    assert outputs.logits.dtype == expected.logits.dtype
    assert report.calls_materialised == 0
    assert torch.equal(outputs.logits[0], expected.logits[0])
    assert torch.equal(outputs.logits, expected.logits)
    assert report.calls_materialised == 1
    # In training, as an auxiliary loss would: both ways into the hidden states carry their gradient.
    outs = {model: outputs, stock: expected}
    assert_same_training(model, stock, lambda m: outs[m].loss + outs[m].logits.square().mean())


def test_evaluation_with_labels(any_model, patched, batch):
    model, stock, report = patched(any_model)
    model.eval(), stock.eval()
    with torch.no_grad():
        outputs, expected = model(**batch), stock(**batch)
    torch.testing.assert_close(outputs.loss, expected.loss)
    assert not outputs.loss.requires_grad
    expect_calls(report, 1)
    assert torch.equal(outputs.logits.argmax(-1), expected.logits.argmax(-1))
    assert not outputs.logits.requires_grad


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gemma2", "phi"])
def test_autocast(name, patched, batch):
    model, stock, report = patched(name, mlp=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs, expected = model(**batch), stock(**batch)
    expect_calls(report, 1)
    assert outputs.logits.dtype == expected.logits.dtype == torch.bfloat16
    assert torch.equal(outputs.logits, expected.logits)  # read outside the autocast region, built as inside
    torch.testing.assert_close(outputs.loss, expected.loss, rtol=4e-3, atol=4e-3)
    for out in (outputs, expected):
        out.loss.backward()
    for (key, p), q in zip(model.named_parameters(), stock.parameters(), strict=True):
        assert p.grad.dtype == torch.float32
        assert (p.grad - q.grad).norm() <= 0.03 * q.grad.norm() + 1e-4, key


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3-moe"])
def test_gradient_checkpointing(name, patched, batch):
    model, stock, report = patched(name)
    for m in (model, stock):
        enable = getattr(m, "activation_checkpointing_enable", None) or m.gradient_checkpointing_enable  # by version
        enable()
    assert_same_training(model, stock, {**batch, "use_cache": False})
    expect_calls(report, 1)


@pytest.mark.parametrize("frozen", ["head", "body"])
def test_frozen_parts(frozen, patched, batch):
    model, stock, report = patched("llama")
    for m in (model, stock):
        (m.lm_head if frozen == "head" else m.model).requires_grad_(False)
    assert_same_training(model, stock, batch)
    expect_calls(report, 1)


def test_positional_labels_and_tuple_outputs(patched, batch):
    model, stock, report = patched("llama", mlp=False)
    names = list(inspect.signature(model.forward).parameters)
    args = [batch.get(name) for name in names[: names.index("labels") + 1]]
    outputs, expected = (m(*args, return_dict=False, use_cache=False) for m in (model, stock))
    assert len(outputs) == len(expected) == 2
    torch.testing.assert_close(outputs[0], expected[0])
    expect_calls(report, 1)
    assert torch.equal(outputs[1], expected[1])


@pytest.mark.parametrize("keep", [0, 4, torch.arange(2, 9)], ids=["all", "last", "index"])
def test_logits_to_keep(keep, patched, batch):
    model, stock, report = patched("llama")
    batch["shift_labels"] = batch["labels"] = batch["labels"].roll(-1, 1)
    if torch.is_tensor(keep) or keep:
        batch["shift_labels"] = batch["labels"][:, keep if torch.is_tensor(keep) else slice(-keep, None)].contiguous()
    assert_same_training(model, stock, {**batch, "logits_to_keep": keep})
    expect_calls(report, 1)


def test_the_loss_may_be_taken_outside_the_forward(patched, batch):
    # As sequence parallelism does: the model is given shift_labels alone, the loop calls its loss_function.
    model, stock, report = patched("gemma2")
    shifted = batch.pop("labels").roll(-1, 1)

    def loss(m):
        logits = m(**batch, shift_labels=shifted).logits
        return m.loss_function(logits=logits, labels=None, shift_labels=shifted, vocab_size=97)

    assert_same_training(model, stock, loss)
    expect_calls(report, 1)
