"""What happens to a model between patch, forward and the reading of its logits: right, or an error, never silence."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.errors import ArgumentTypeError, UnsupportedError
from models.conftest import OwnFunction, called_without_loss


@pytest.mark.parametrize("how", ["fused", "foreach", "plain", "sgd", "data.mul_", "data ="])
def test_logits_are_not_read_after_the_weights_changed(how, patched, batch):
    model, _, _ = patched("llama", mlp=False)
    outputs = model(**batch)
    outputs.loss.backward()
    if how == "data.mul_":
        model.lm_head.weight.data.mul_(2)
    elif how == "data =":
        model.lm_head.weight.data = model.lm_head.weight.data * 2
    elif how == "sgd":
        torch.optim.SGD(model.parameters(), lr=0.1, fused=True).step()
    else:
        kwargs = {} if how == "plain" else {how: True}
        torch.optim.AdamW(model.parameters(), lr=0.1, **kwargs).step()
    with pytest.raises(UnsupportedError, match=r"read outputs\.logits before"):
        outputs.logits.sum()


@pytest.mark.parametrize("change", ["nn.Linear.forward", "function mode"])
def test_what_the_head_does_besides_is_followed(change, patched, batch, assert_same_gradients, monkeypatch):
    model, stock, report = patched("llama", mlp=False)
    if change == "nn.Linear.forward":
        old = nn.Linear.forward
        monkeypatch.setattr(nn.Linear, "forward", lambda self, x: old(self, x) * 2)

    class Doubling(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            return result * 2 if func is torch.nn.functional.linear else result

    losses = []
    for m in (model, stock):
        if change == "function mode":
            with Doubling():
                losses.append(m(**batch).loss)
        else:
            losses.append(m(**batch).loss)
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    assert_same_gradients(model, stock)
    assert (report.calls_fused, report.calls_materialised) == (0, 1), str(report)


@pytest.mark.parametrize("change", ["unpatch", "double"])
def test_reading_after_the_model_changed_is_one_clear_error(change, patched, batch):
    model, _, _ = patched("llama", mlp=False)
    outputs = model(**batch)
    if change == "unpatch":
        lowtide.unpatch(model)
    else:
        model.double()
    with pytest.raises(UnsupportedError, match=r"read outputs\.logits before"):
        outputs.logits.sum()


OPERANDS = {
    "alone": lambda z, _: z,
    "stacked": lambda z, _: torch.stack([z, 2 * z]),
    "concatenated": lambda z, plain: torch.cat([plain, z, plain], 1),
    "second of two": lambda z, plain: torch.add(plain, z),
    "in a nested list": lambda z, _: torch.block_diag(*z),
    "by name": lambda z, plain: torch.mul(input=plain, other=z),
}


@pytest.mark.parametrize("use", OPERANDS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_logits_out_of_a_checkpoint_beside_others(reentrant, use, patched, batch, assert_same_gradients):
    """Each operand has its own graph: one behind the checkpoint's node, another call's in front of it."""
    model, stock, _ = patched("llama", mlp=False)
    for m in (model, stock):
        embedded = m.get_input_embeddings()(batch["input_ids"])

        def run(e, m=m):
            outputs = m(inputs_embeds=e, labels=batch["labels"])
            return outputs.loss, outputs.logits

        loss, logits = checkpoint(run, embedded, use_reentrant=reentrant)
        plain = m(**batch).logits  # lazy too, and in no checkpoint
        (loss + OPERANDS[use](logits, plain).pow(2).mean()).backward()
    assert_same_gradients(model, stock)


def test_a_metric_under_inference_mode_leaves_the_graph_alone(patched, batch, assert_same_gradients):
    model, stock, _ = patched("llama", mlp=False)
    for m in (model, stock):
        outputs = m(**batch)
        with torch.inference_mode():
            outputs.logits.argmax(-1)
        (outputs.loss + outputs.logits.pow(2).mean()).backward()
    assert_same_gradients(model, stock)


def test_hooking_read_logits_that_the_loss_went_past_is_an_error(patched, batch):
    model, _, _ = patched("llama", mlp=False)
    outputs = model(**batch)
    outputs.logits.argmax(-1)
    for attempt in (lambda: outputs.logits.register_hook(print), outputs.logits.retain_grad):
        with pytest.raises(UnsupportedError, match="hooked before the loss"):
            attempt()


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
def test_hooked_before_anything_is_made_of_them(copied, made, patched, batch, assert_same_gradients):
    model, stock, _ = patched("llama", mlp=False)
    seen = []
    for m in (model, stock):
        logits = called_without_loss(m, batch)
        if copied:
            logits = logits.clone()
        logits.retain_grad()  # the way out that the error names
        handle = logits.register_hook(lambda grad: grad * 3)
        result = MADE_OF_THEM[made](logits).square().mean()
        (grad,) = torch.autograd.grad(result, logits, retain_graph=True)
        handle.remove()
        result.backward()
        seen.append((grad, logits.grad))
    for ours, theirs in zip(*seen, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert theirs.any()
    assert_same_gradients(model, stock)


def test_the_gradient_of_a_fused_loss_by_its_logits_is_an_error(patched, batch):
    model, _, _ = patched("llama", mlp=False)
    outputs = model(**batch)
    for loss in (outputs.loss, outputs.loss + outputs.logits.square().mean()):
        with pytest.raises(UnsupportedError, match="differentiated by"):
            torch.autograd.grad(loss, outputs.logits, allow_unused=True)
    assert torch.autograd.grad(outputs.loss, model.lm_head.weight)[0].any()


def test_a_custom_function_of_hooked_logits_is_an_error(patched, batch):
    model, _, _ = patched("llama", mlp=False)
    logits = called_without_loss(model, batch)
    logits.register_hook(lambda grad: grad * 3)
    with pytest.raises(UnsupportedError, match="got a custom autograd function"):
        OwnFunction.apply(logits).sum().backward()


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
    told = lowtide.patch(teacher)

    class Student(type(student)):
        def forward(self, *args, **kwargs):
            with torch.no_grad():
                self.seen = type(teacher(input_ids=kwargs["input_ids"]).logits)
            return super().forward(*args, **kwargs)

    student.__class__ = Student
    report = lowtide.patch(student)
    student(**batch).loss.backward()
    assert student.seen is torch.Tensor
    assert (report.calls_fused, report.calls_materialised) == (1, 0)
    assert (told.calls_fused, told.calls_materialised) == (0, 0)


def test_bad_arguments(build):
    model = build("llama")
    with pytest.raises(ArgumentTypeError, match="loss: expected True or False, got 'no'"):
        lowtide.patch(model, loss="no")
    for function in (lowtide.patch, lowtide.unpatch):
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
    assert (report.calls_fused, report.calls_materialised) == (1, 0)
    del one, report
    gc.collect()
    assert lowtide.patch(two).parts["loss"].patched  # nobody else's any more


def test_a_hooked_weight_and_a_custom_function_raise(patched, batch):
    """The gradient of the weight would go through its hook inside of the logits', and on its way out again."""

    class Squares(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.square().sum()

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad * ctx.saved_tensors[0]

    model, _, _ = patched("llama", mlp=False)
    handle = model.lm_head.weight.register_hook(lambda grad: grad * 0.5)
    with pytest.raises(UnsupportedError, match="gradient hook"):
        Squares.apply(called_without_loss(model, batch)).backward()
    handle.remove()
    Squares.apply(called_without_loss(model, batch)).backward()
