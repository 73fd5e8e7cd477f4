"""The generator finds what it is for: a defect put in on purpose is found and shown small; nothing global leaks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.models import lazy_results
from programs.grammar import Program, make
from programs.run import _PLAIN, as_script, run, shrunk, verdict

_LOSS = (
    "model = build('llama', torch.float32)",
    "x, y = batch(3)",
    "see(x.float().mean())",
    "patch(model)",
    "see(model.training)",
    "out = model(input_ids=x, labels=y)",
    "loss = out.loss",
    "see(loss)",
    "loss.backward()",
    "model.zero_grad(set_to_none=False)",
    "model(input_ids=x, labels=y).loss.backward()",
)


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 + 1e-3)


@pytest.fixture
def a_gradient_off_by_a_thousandth(monkeypatch):
    stock = lazy_results.linear_cross_entropy
    monkeypatch.setattr(
        lazy_results,
        "linear_cross_entropy",
        lambda hidden, *args, **kwargs: stock(_WrongGradient.apply(hidden), *args, **kwargs),
    )


def test_a_gradient_off_by_a_thousandth_is_found_and_shown_small(a_gradient_off_by_a_thousandth):
    found = verdict(Program(0, _LOSS))
    assert found.kind == "different"
    assert ".grad: off by" in found.why
    small = shrunk(Program(0, _LOSS))
    assert len(small.statements) <= 5
    assert verdict(small).kind == "different"


def test_random_programs_that_train_find_it(a_gradient_off_by_a_thousandth):
    programs = [p for p in map(make, range(300)) if all(map(_PLAIN.match, p.statements)) and "float32" in p.text]
    training = [p for p in programs if "loss = out.loss" in p.text and p.statements[-1] == "loss.backward()"]
    assert any(verdict(p).kind == "different" for p in training[:10])


def test_a_read_of_other_bits_is_found(monkeypatch):
    stock = lazy_results._stat

    def stat(input, name, dim, keepdim):
        values = stock(input, name, dim, keepdim)
        return (values + 1) % input.shape[-1] if name == "argmax" and values is not NotImplemented else values

    monkeypatch.setattr(lazy_results, "_stat", stat)
    program = Program(0, (*_LOSS[:6], "see(out.logits.argmax(-1))"))
    assert verdict(program).kind == "different"


def test_a_hook_that_runs_twice_is_found(monkeypatch):
    stock = lowtide.patch

    def patch(model, **kwargs):
        for hook in list(model.lm_head._forward_hooks.values()):
            model.lm_head.register_forward_hook(hook)
        return stock(model, **kwargs)

    program = Program(0, (*_LOSS[:2], "model.lm_head.register_forward_hook(lambda m, a, r: log.append(1))", *_LOSS[3:]))
    assert verdict(program).kind == "equal"
    monkeypatch.setattr(lowtide, "patch", patch)
    assert "ran 4 times, in stock 2" in verdict(program).why
    assert len(shrunk(program).statements) <= 5


def test_a_failure_prints_code_that_runs(a_gradient_off_by_a_thousandth, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["script", "stock"])
    text = as_script(Program(0, _LOSS), "why")
    exec(compile(text, "script", "exec"), {})
    assert "lm_head.weight" in capsys.readouterr().out


def test_nothing_global_leaks():
    state = torch.get_rng_state()
    before = (dict(vars(F)), dict(vars(nn.Linear)), dict(vars(torch.Tensor)), torch.get_default_dtype())
    program = Program(
        0,
        (
            *_LOSS[:4],
            "replace(F, 'cross_entropy', None)",
            "replace(nn.Linear, 'forward', None)",
            "replace(torch.Tensor, 'log_softmax', None)",
            "torch.nn.modules.module.register_module_forward_hook(lambda m, a, r: r * 2)",
            "torch.set_default_dtype(torch.float64)",
            "raise ValueError",
        ),
    )
    for how in ("stock", "patched"):
        assert isinstance(run(program, how).error[1], ValueError)
    after = (dict(vars(F)), dict(vars(nn.Linear)), dict(vars(torch.Tensor)), torch.get_default_dtype())
    assert after == before
    assert not torch.nn.modules.module._global_forward_hooks
    assert torch.equal(torch.get_rng_state(), state)


def test_programs_are_the_same_for_a_seed():
    assert [make(seed).text for seed in range(20)] == [make(seed).text for seed in range(20)]
    assert len({make(seed).text for seed in range(500)}) == 500
