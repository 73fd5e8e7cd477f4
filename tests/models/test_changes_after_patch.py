"""What happens to a model between patch, forward and the reading of its logits: right, or an error, never silence."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import ArgumentTypeError, UnsupportedError
from models.conftest import Doubling, OwnFunction, assert_same_training, called_without_loss, expect_calls


def test_a_function_mode_around_the_head_is_followed(patched, batch):
    model, stock, report = patched("llama", mlp=False)

    def loss(m):
        with Doubling(nn.functional.linear):
            return m(**batch).loss

    assert_same_training(model, stock, loss)
    expect_calls(report, 0, 1)


MADE_OF_THEM = {
    "a scale": lambda z: (z * 2).softmax(-1),
    "a scale of a view": lambda z: (z[:, 1:] * 2).softmax(-1),
    "a cast, read before": lambda z: z.double().softmax(-1),
    "log-probabilities": lambda z: z.log_softmax(-1).gather(-1, torch.zeros(2, 11, 1, dtype=torch.long)),
    "a loss": lambda z: torch.nn.functional.cross_entropy(z.flatten(0, 1), torch.ones(22, dtype=torch.long)),
}


@pytest.mark.parametrize("hook", ["register_hook", "retain_grad", "autograd.grad", "backward"])
@pytest.mark.parametrize("made", MADE_OF_THEM)
def test_what_went_past_the_logits_is_not_hooked_in_silence(made, hook, patched, batch):
    if hook == "backward" and "handle_torch_function" not in torch.autograd.backward.__code__.co_names:
        pytest.skip("this torch does not ask what its inputs are")
    model, _, _ = patched("llama", mlp=False)
    logits = called_without_loss(model, batch)
    result = MADE_OF_THEM[made](logits).square().mean()
    ask = {
        "register_hook": lambda: logits.register_hook(print),
        "retain_grad": logits.retain_grad,
        "autograd.grad": lambda: torch.autograd.grad(result, [model.lm_head.weight, logits], allow_unused=True),
        "backward": lambda: result.backward(inputs=[logits]),
    }
    with pytest.raises(UnsupportedError, match=r"call logits\.retain_grad\(\) first"):
        ask[hook]()


@pytest.mark.parametrize("made", MADE_OF_THEM)
@pytest.mark.parametrize("copied", [True, False])
def test_hooked_before_anything_is_made_of_them(copied, made, patched, batch):
    model, stock, _ = patched("llama", mlp=False)
    seen = []

    def loss(m):
        logits = called_without_loss(m, batch)
        if copied:
            logits = logits.clone()
        logits.retain_grad()  # the way out that the error names
        handle = logits.register_hook(lambda grad: grad * 3)
        result = MADE_OF_THEM[made](logits).square().mean()
        seen.append((logits, torch.autograd.grad(result, logits, retain_graph=True)[0]))
        handle.remove()
        return result

    assert_same_training(model, stock, loss)
    (ours, grad), (theirs, expected) = seen
    torch.testing.assert_close((grad, ours.grad), (expected, theirs.grad))
    assert expected.any()
    assert theirs.grad.any()


def test_the_gradient_of_a_fused_loss_by_its_logits_is_an_error(patched, batch):
    model, _, _ = patched("llama", mlp=False)
    outputs = model(**batch)
    for loss in (outputs.loss, outputs.loss + outputs.logits.square().mean()):
        with pytest.raises(UnsupportedError, match="differentiated by"):
            torch.autograd.grad(loss, outputs.logits, allow_unused=True)
    assert torch.autograd.grad(outputs.loss, model.lm_head.weight)[0].any()


def test_an_instance_of_the_patched_class_is_a_stock_model(patched, batch):
    model, _, report = patched("llama", mlp=False)
    other = type(model)(model.config)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(**batch).loss, model(**batch).loss)
    assert report.calls_fused == 1


@pytest.mark.parametrize(
    "read",
    [
        lambda z: torch.div(z, 2, rounding_mode="floor"),
        lambda z: z.div(2, rounding_mode="trunc"),
        lambda z: torch.mul(z, 2, out=torch.empty(0)),
        lambda z: z.half(memory_format=torch.preserve_format),
        lambda z: z.contiguous(memory_format=torch.contiguous_format),
        lambda z: z.view(dtype=torch.int32),
    ],
)
def test_arguments_that_lazy_logits_do_not_know(read, patched, batch):
    model, stock, _ = patched("llama", mlp=False)
    with torch.no_grad():
        assert torch.equal(read(model(**batch).logits), read(stock(**batch).logits))


def test_a_teacher_inside_a_student_is_its_own_affair(build, batch):
    teacher, student = build("llama"), build("llama")
    of_teacher = lowtide.patch(teacher)

    class Student(type(student)):
        def forward(self, *args, **kwargs):
            with torch.no_grad():
                self.seen = type(teacher(input_ids=kwargs["input_ids"]).logits)
            return super().forward(*args, **kwargs)

    student.__class__ = Student
    report = lowtide.patch(student)
    student(**batch).loss.backward()
    assert student.seen is torch.Tensor
    expect_calls(report, 1)
    assert (of_teacher.calls_fused, of_teacher.calls_materialised) == (0, 0)


def test_bad_arguments(build):
    model = build("llama")
    with pytest.raises(ArgumentTypeError, match="loss: expected True or False, got 'no'"):
        lowtide.patch(model, loss="no")
    for function in (lowtide.patch, lowtide.unpatch):
        for none in (3, nn.Linear(2, 2)):
            with pytest.raises(ArgumentTypeError, match="model: expected"):
                function(none)
        with pytest.raises(ArgumentTypeError, match="patch first, compile then"):
            function(torch.compile(model, backend="eager"))


def test_two_models_that_share_a_head(build, batch):
    one, two = build("llama", tie_word_embeddings=False), build("llama", tie_word_embeddings=False)
    two.lm_head = one.lm_head
    lowtide.patch(one)
    assert "another patched model" in str(lowtide.patch(two))
    assert two(**batch).loss.isfinite()
    lowtide.unpatch(two)
    report = lowtide.patch(one)
    one(**batch)
    expect_calls(report, 1)
    del one, report
    gc.collect()
    assert lowtide.patch(two).parts["loss"].patched  # nobody else's any more


def test_a_hooked_weight_and_a_custom_function_raise(patched, batch):
    """The gradient of the weight would go through its hook inside of the logits', and on its way out again."""
    model, _, _ = patched("llama", mlp=False)
    handle = model.lm_head.weight.register_hook(lambda grad: grad * 0.5)
    with pytest.raises(UnsupportedError, match="gradient hook"):
        OwnFunction.apply(called_without_loss(model, batch)).sum().backward()
    handle.remove()
    OwnFunction.apply(called_without_loss(model, batch)).sum().backward()
