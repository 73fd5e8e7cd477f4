"""Functions of PyTorch that a user replaced by assignment run as often as with the stock model, and do the same."""

import functools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.models.lazy_logits import OPERATIONS
from lowtide.models.stock_functions import asking, original
from models.conftest import assert_same_gradients, expect_calls
from models.conftest import called_without_loss as lazy

CALLS: Counter[str] = Counter()


def z_loss(stock, name):
    def wrapper(z, *args, **kwargs):
        CALLS[name] += 1
        return stock(z, *args, **kwargs) + 1e-2 * torch.logsumexp(z.float(), -1).square().mean()

    return wrapper


def temperature(stock, name):
    return lambda z, *args, **kwargs: (CALLS.update([name]), stock(z / 2.0, *args, **kwargs))[1]


def wrapped(stock, name):
    @functools.wraps(stock)
    def wrapper(*args, **kwargs):
        CALLS[name] += 1
        return stock(*args, **kwargs) * 2

    return wrapper


def nested(stock, name):
    return z_loss(wrapped(stock, name), f"{name}, outside")


def another(stock, name):
    def wrapper(z, *args, **kwargs):
        CALLS[name] += 1
        return z.float().log_softmax(-1).square().mean()

    return wrapper


def chosen(logprobs, batch):
    return -logprobs.gather(-1, batch["input_ids"][..., None]).mean()


LOSSES = {
    "the model's": lambda m, b: m(**b).loss,
    "a module": lambda m, b: nn.CrossEntropyLoss()(lazy(m, b).flatten(0, 1), b["labels"].flatten()),
    "F.log_softmax": lambda m, b: chosen(F.log_softmax(lazy(m, b), -1), b),
    "torch.log_softmax": lambda m, b: chosen(torch.log_softmax(lazy(m, b), -1), b),
    "a method": lambda m, b: chosen(lazy(m, b).log_softmax(-1), b),
    "F.softmax": lambda m, b: F.softmax(lazy(m, b), -1).square().mean(),
    "nll_loss": lambda m, b: F.nll_loss(F.log_softmax(lazy(m, b), -1).flatten(0, 1), b["labels"].flatten()),
    "logsumexp": lambda m, b: lazy(m, b).logsumexp(-1).mean(),
    "norm": lambda m, b: lazy(m, b).norm(),
}
REPLACED = [
    (F, "cross_entropy", z_loss, ("the model's", "a module")),
    (F, "cross_entropy", temperature, ("the model's", "a module")),
    (F, "cross_entropy", nested, ("the model's", "a module")),
    (F, "cross_entropy", another, ("the model's", "a module")),
    (F, "nll_loss", wrapped, ("nll_loss",)),
    (F, "log_softmax", nested, ("F.log_softmax", "nll_loss")),
    (F, "softmax", temperature, ("F.softmax",)),
    (torch, "log_softmax", temperature, ("torch.log_softmax",)),
    (Tensor, "log_softmax", nested, ("a method", "F.log_softmax", "nll_loss")),
    (Tensor, "logsumexp", wrapped, ("logsumexp",)),
    (Tensor, "norm", wrapped, ("norm",)),
]


@pytest.mark.parametrize(("owner", "name", "change", "losses"), REPLACED, ids=lambda x: getattr(x, "__name__", None))
def test_a_replaced_function_runs_as_in_stock(owner, name, change, losses, pair, batch, monkeypatch):
    model, stock = pair("llama")
    after = pair("llama")[0]
    lowtide.patch(model, mlp=False, norm=False, rope=False)
    monkeypatch.setattr(owner, name, change(getattr(owner, name), name))
    lowtide.patch(after, mlp=False, norm=False, rope=False)
    for loss in losses:
        expected, *results = [run(LOSSES[loss], m, batch) for m in (stock, model, after)]
        assert expected[1]
        for value, calls in results:
            torch.testing.assert_close(value, expected[0])
            assert calls == expected[1]
        for m in (model, after):
            assert_same_gradients(m, stock)


def run(loss, model, batch):
    CALLS.clear()
    model.zero_grad()
    value = loss(model, batch)
    value.backward()
    return value.detach(), dict(CALLS)


def test_the_loss_stays_fused_behind_a_wrapper(patched, batch, monkeypatch):
    model, _, report = patched("llama", mlp=False)
    monkeypatch.setattr(F, "cross_entropy", wrapped(F.cross_entropy, "loss"))
    model(**batch).loss.backward()
    expect_calls(report, 1)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_lora_on_the_head_runs_no_function_of_the_users(pair, batch, monkeypatch):
    peft = pytest.importorskip("peft")
    model, _ = pair("llama")
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"], r=2))
    lowtide.patch(model, mlp=False)
    monkeypatch.setattr(F, "cross_entropy", wrapped(F.cross_entropy, "loss"))
    CALLS.clear()
    model(**batch).loss.backward()
    assert CALLS["loss"] == 1


def test_a_wrapper_of_autograd_does_not_hide_what_it_is_asked_for(patched, batch, monkeypatch):
    model, _, _ = patched("llama", mlp=False)
    monkeypatch.setattr(torch.autograd, "grad", wrapped(torch.autograd.grad, "grad"))
    outputs = model(**batch)
    with pytest.raises(lowtide.errors.UnsupportedError, match="differentiated by"):
        torch.autograd.grad(outputs.loss, outputs.logits)


def test_functions_that_pytorch_keeps_in_front_are_what_they_are():
    class Seen(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(asking(func))
            return super().__torch_function__(func, types, args, kwargs)

    seen = []
    x = torch.randn(2, 3, 8).as_subclass(Seen)
    F.max_pool1d(x, 2, return_indices=True)
    x.unflatten(0, (1, 2))
    x.split(1)
    torch.functional.einsum("abc->ab", x)
    1 - x
    for function in (
        F.max_pool1d_with_indices,
        Tensor.unflatten,
        Tensor.split,
        torch.functional.einsum,
        Tensor.__rsub__,
    ):
        assert function in seen


@pytest.mark.parametrize(
    ("owner", "name"),
    [(F, "cross_entropy"), (F, "log_softmax"), (torch, "log_softmax"), (Tensor, "argmax"), (Tensor, "unflatten"),
     (torch.autograd, "grad")],
)  # fmt: skip
def test_what_was_replaced_before_lowtide_came_is_found(owner, name, monkeypatch):
    stock = getattr(owner, name)
    assert original(stock) is stock
    for depth in ("first", "second"):
        monkeypatch.setattr(owner, name, wrapped(getattr(owner, name), depth))
        assert original(getattr(owner, name)) == stock
    assert owner is torch.autograd or stock in OPERATIONS
