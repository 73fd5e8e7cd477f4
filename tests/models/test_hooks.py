"""What is put around the head, and on the graph of its logits, does what it does to a stock model, or is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook, save_on_cpu, saved_tensors_hooks
from torch.nn.modules import module as nn_module
from torch.nn.utils import parametrizations, prune

import lowtide
from lowtide.errors import UnsupportedError
from models.conftest import assert_same_training, called_without_loss, expect_calls

hooks = pytest.importorskip("accelerate.hooks")


class Doubled(hooks.ModelHook):
    def post_forward(self, module, output):
        return output * 2


def accelerate(*classes):
    def change(model):
        for each in classes:
            hooks.add_hook_to_module(model.lm_head, each(), append=True)

    return change


def another_class(model):
    base = type(model.lm_head)
    twice = {"forward": lambda self, *args: base.forward(self, *args) * 2}
    model.lm_head.__class__ = type("Twice", (base,), twice)


def replaced_forward(model):
    stock = model.lm_head.forward
    model.lm_head.forward = lambda *args: stock(*args) * 2


def another_head(model):
    class Head(nn.Linear):
        def forward(self, input):
            return super().forward(input) * 2.0

    head = Head(16, 97, bias=False)
    head.load_state_dict(model.lm_head.state_dict())
    model.lm_head = head


# each with the report's reason, where the change comes after patch
CHANGES = {
    "head": (another_head, "is a Head"),
    "instance": (replaced_forward, "forward was replaced"),
    "pre-hook": (lambda m: m.lm_head.register_forward_pre_hook(lambda m, args: (args[0] / 2,)), "a hook from"),
    "hook": (lambda m: m.lm_head.register_forward_hook(lambda m, args, out: out * 2), "a hook from"),
    "full backward": (
        lambda model: model.lm_head.register_full_backward_hook(lambda m, grads, out: (grads[0] * 2,)),
        "a hook from",
    ),
    "accelerate": (accelerate(Doubled), "Doubled"),
    "accelerate, several": (accelerate(hooks.AlignDevicesHook, Doubled), "Doubled"),
    "forward": (another_class, "another class, Twice"),
    "prune": (lambda model: prune.l1_unstructured(model.lm_head, "weight", 0.3), "weight is a Tensor"),
    "parametrization": (lambda model: parametrizations.spectral_norm(model.lm_head), "another class, Param"),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", CHANGES)
def test_what_is_put_around_the_head_runs_once_and_is_reported(name, when, pair, batch):
    model, stock = pair("llama")
    change, reason = CHANGES[name]
    report = lowtide.patch(model, mlp=False) if when == "after" else None
    for m in (model, stock):
        torch.manual_seed(0)
        change(m)
    report = report or lowtide.patch(model, mlp=False)
    assert_same_training(model, stock, batch)
    expect_calls(report, 0, 1)
    assert (reason if when == "after" else "the output embedding") in str(report)


@pytest.mark.parametrize("classes", [[hooks.AlignDevicesHook], [hooks.AlignDevicesHook, hooks.CpuOffload]])
def test_accelerate_may_move_the_head(classes, patched, batch):
    if hooks.CpuOffload in classes:  # which offloads at once, on a machine that has something else
        classes = [lambda: hooks.AlignDevicesHook(), lambda: hooks.CpuOffload(torch.device("cpu"))]
    model, stock, report = patched("llama", mlp=False)
    accelerate(*classes)(model)
    assert_same_training(model, stock, batch)
    assert report.calls_fused == 1


def own_loss(model):
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.float().logsumexp(-1).mean()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("change", [own_loss, lambda model: setattr(model, "loss_type", "ForMaskedLM")])
def test_another_loss_is_computed_without_logits(change, when, pair, batch):
    model, stock = pair("llama")
    change(stock)
    if when == "before":
        change(model)
    report = lowtide.patch(model)
    if when == "after":
        change(model)
    assert_same_training(model, stock, batch)
    expect_calls(report, 1)
    assert model.loss_function is getattr(model, "_loss_function", stock.loss_function)


def test_a_hook_of_all_modules_runs_once(patched, batch):
    model, stock, report = patched("llama", mlp=False)
    heads = model.lm_head, stock.lm_head
    handle = nn_module.register_module_forward_hook(lambda m, args, out: out * 2 if m in heads else None)
    losses = {m: m(**batch).loss for m in (model, stock)}
    handle.remove()
    assert_same_training(model, stock, lambda m: losses[m])
    expect_calls(report, 0, 1)


def test_a_hook_between_forward_and_loss_is_an_error(patched, batch):
    model, _, _ = patched("llama", mlp=False)
    logits = called_without_loss(model, batch)
    accelerate(Doubled)(model)
    with pytest.raises(UnsupportedError, match=r"got a change since.*Doubled"):
        loss_of(logits, batch)


def loss_of(logits, batch):
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def norms(grads):
    return [torch.linalg.vector_norm(grad).item() for grad in grads if grad is not None]


def edge(logits, weight, batch, seen):
    at = get_gradient_edge(logits)
    loss = loss_of(logits, batch)
    seen += norms(torch.autograd.grad(loss, at, retain_graph=True))
    return loss


def hooked(hook):
    def use(logits, weight, batch, seen):
        hook(logits, weight, seen)
        return loss_of(logits, batch)

    return use


def view_hooked(logits, weight, batch, seen):
    rows = logits[:, :-1]
    rows.grad_fn.register_hook(lambda grads, out: seen.extend(norms(out)))
    return F.cross_entropy(rows.flatten(0, 1), batch["labels"][:, 1:].flatten())


ON_THE_GRAPH = {
    "register_hook": hooked(lambda z, w, seen: z.grad_fn.register_hook(lambda grads, out: seen.extend(norms(out)))),
    "register_prehook": hooked(lambda z, w, seen: z.grad_fn.register_prehook(lambda out: (out[0] * 3,))),
    "of a view": view_hooked,
    "of several": hooked(lambda z, w, seen: register_multi_grad_hook((z, w), lambda grads: seen.extend(norms(grads)))),
    "an edge": edge,
    "of the weight": hooked(
        lambda z, w, seen: w.register_post_accumulate_grad_hook(lambda p: seen.extend(norms([p.grad])))
    ),
}


@pytest.mark.parametrize("name", ON_THE_GRAPH)
def test_hooks_on_the_graph_fire_as_in_stock(name, patched, batch):
    model, stock, _ = patched("llama", mlp=False)
    seen = {model: [], stock: []}
    use = ON_THE_GRAPH[name]
    assert_same_training(model, stock, lambda m: use(called_without_loss(m, batch), m.lm_head.weight, batch, seen[m]))
    assert name == "register_prehook" or seen[stock]
    for ours, theirs in zip(*seen.values(), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("read", [None, torch.sum, lambda z: z.argmax(-1)])
def test_the_graph_of_logits_that_a_loss_went_past_is_refused(read, patched, batch):
    model, _, report = patched("llama", mlp=False)
    logits = model(**batch).logits
    assert logits.grad_fn is not None
    assert report.calls_materialised == 0
    if read is not None:
        read(logits)
    for attempt in (
        lambda: logits.register_hook(print),
        logits.retain_grad,
        lambda: logits.grad_fn.register_hook(print),
        lambda: logits.grad_fn.register_prehook(print),
        lambda: logits.grad_fn.next_functions,
        lambda: logits.grad_fn.metadata,
        lambda: register_multi_grad_hook((logits,), print),
        lambda: get_gradient_edge(logits),
    ):
        with pytest.raises(UnsupportedError, match=r"call logits\.retain_grad\(\) first"):
            attempt()
    assert logits.detach().grad_fn is None


@pytest.mark.parametrize("around", [save_on_cpu, lambda: saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone())])
def test_hooks_on_what_is_saved(around, patched, batch):
    model, stock, _ = patched("llama", mlp=False)

    def loss(m):
        with around():
            outputs = m(**batch)
        return outputs.loss + outputs.logits.square().mean()

    assert_same_training(model, stock, loss)
