"""What stands for the logits is the logits to whoever looks: values, gradients, memory, errors."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.models.lazy_logits import LazyLogits
from models.conftest import OwnFunction

LOOKS = {
    "index": lambda z: z[0],
    "slice": lambda z: z[:, :-1],
    "view": lambda z: z.view(-1, z.shape[-1]),
    "add": lambda z: z + 1.0,
    "power": lambda z: z**2,
    "softmax": lambda z: z.softmax(-1),
    "reciprocal": lambda z: 1.0 / (z.square() + 1.0),
    "vector": lambda z: z * torch.arange(97.0),
    "stack": lambda z: torch.stack([z, z]),
    "out of place, nested": lambda z: torch.cat([z[:, :1], z], 1),
    "detach": lambda z: z.detach() + z,
    "clone": lambda z: z.clone(),
    "in place": lambda z: z.mul_(3.0),
    "setitem": lambda z: (z.__setitem__((slice(None), 0), -5.0), z.float())[1],
    "own function": OwnFunction.apply,
    "scaled": lambda z: z * 0.5 / 3.0,
    "capped": lambda z: torch.tanh(z / 3.0) * 3.0,
    "capped twice": lambda z: torch.tanh(torch.tanh(z)),
    "double": lambda z: z.double(),
    "numpy": lambda z: z.sum() + float(z.detach().numpy().sum()),
    "list": lambda z: z * z.tolist()[0][0][0],
}


@pytest.mark.parametrize("look", LOOKS)
def test_looking_gives_values_and_gradients_of_real_logits(look, patched, batch, assert_same_gradients):
    model, stock, report = patched("gemma2", mlp=False)
    outputs, expected = model(**batch), stock(**batch)
    assert isinstance(outputs.logits, LazyLogits)
    seen, wanted = LOOKS[look](outputs.logits), LOOKS[look](expected.logits)
    assert torch.equal(seen, wanted)
    for result in (seen, wanted):
        result.sum().backward()
    assert_same_gradients(model, stock)
    assert (report.calls_fused, report.calls_materialised) == (1, 1)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_metadata_is_known_without_building(name, patched, batch):
    model, stock, report = patched(name, mlp=False)
    lazy, real = model(**batch).logits, stock(**batch).logits
    for about in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "is_cuda", "layout"):
        assert getattr(lazy, about) == getattr(real, about), about
    for about in ("size", "dim", "numel", "stride", "is_contiguous", "is_floating_point", "__len__", "element_size"):
        assert getattr(lazy, about)() == getattr(real, about)(), about
    assert torch.is_tensor(lazy)
    assert (lazy.grad_fn is None) == (real.grad_fn is None)
    assert lazy.contiguous() is lazy
    assert lazy[:, :, :] is lazy[..., :97] is lazy[:, slice(0, None), :] is lazy.float() is lazy
    assert isinstance(lazy.bfloat16(), LazyLogits)
    assert report.calls_materialised == 0


@pytest.mark.parametrize("index", [(slice(1, None),), (Ellipsis, slice(96)), (slice(None, None, 2),), (0,), (None,)])
def test_indexing_that_takes_less_is_not_lazy(index, patched, batch):
    model, stock, _ = patched("llama", mlp=False)
    assert torch.equal(model(**batch).logits[index], stock(**batch).logits[index])


def test_built_once_and_kept(patched, batch):
    model, _, report = patched("llama", mlp=False)
    logits = model(**batch).logits
    logits[:, 0] = 7.0
    assert (logits[:, 0] == 7.0).all()
    assert logits.data_ptr() == logits.data_ptr()
    assert report.calls_materialised == 1
    assert report.why_materialised == {"read by TensorBase.__setitem__": 1}


def test_read_without_grad_keeps_the_grad_of_the_forward(patched, batch):
    model, stock, _ = patched("llama", mlp=False)
    logits = model(**batch).logits
    with torch.no_grad():
        logits.argmax(-1)
    assert (logits + 1.0).requires_grad
    assert type(stock(**batch).logits) is Tensor


def test_what_is_made_of_them_without_grad_has_none(patched, batch):
    model, _, _ = patched("gemma2", mlp=False)
    logits = model(**batch).logits
    with torch.no_grad():
        results = [logits * 2.0, torch.tanh(logits), logits.double()]
    assert not any(result.requires_grad or (result + 1.0).requires_grad for result in results)


def test_read_before_the_weights_change_is_kept(patched, batch):
    model, stock, _ = patched("llama", mlp=False)
    outputs, expected = model(**batch), stock(**batch).logits
    outputs.logits.sum()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert torch.equal(outputs.logits, expected)


def test_hooking_the_gradient_of_unused_logits_is_an_error(patched, batch):
    model, _, _ = patched("llama", mlp=False)
    outputs = model(**batch)
    for hook in (lambda z: z.register_hook(print), lambda z: z.retain_grad()):
        with pytest.raises(lowtide.errors.UnsupportedError, match="unpatch"):
            hook(outputs.logits)


def test_outputs_copy_and_pickle_as_real_logits(patched, batch):
    model, stock, _ = patched("llama", mlp=False)
    with torch.no_grad():
        expected = stock(**batch).logits
        for through in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
            copied = through(model(**batch)["logits"])
            assert type(copied) is Tensor
            assert torch.equal(copied, expected)
        buffer = io.BytesIO()
        torch.save({"logits": model(**batch).logits}, buffer)
        buffer.seek(0)
        assert torch.equal(torch.load(buffer)["logits"], expected)
        assert repr(model(**batch).logits) == repr(expected)


def test_a_custom_autograd_function_stays_in_the_graph(patched, batch, assert_same_training):
    model, stock, report = patched("gemma2", mlp=False)
    assert_same_training(model, stock, lambda m: OwnFunction.apply(m(**batch).logits).logsumexp(-1).mean())
    assert report.calls_materialised == 1


def test_a_learned_scale_gets_its_gradient(patched, batch):
    # A scale that is trained is no scalar operation of linear_cross_entropy: real logits.
    model, stock, report = patched("cohere2", mlp=False)
    for m in (model, stock):
        m.logit_scale = torch.nn.Parameter(torch.tensor(0.3))
        m(**batch).loss.backward()
    torch.testing.assert_close(model.logit_scale.grad, stock.logit_scale.grad)
    assert (report.calls_fused, report.calls_materialised) == (0, 1)


def test_a_scale_that_is_a_tensor(patched, batch, assert_same_gradients):
    model, stock, report = patched("cohere2", mlp=False)
    for m in (model, stock):
        m.logit_scale = torch.tensor(0.3)
        m(**batch).loss.backward()
    assert_same_gradients(model, stock)
    assert (report.calls_fused, report.calls_materialised) == (1, 0)


@pytest.mark.parametrize("scale", [0.0, float("inf"), -2.0, True, 3])
def test_odd_scales_are_what_they_are_in_stock(scale, patched, batch):
    model, stock, _ = patched("cohere2", mlp=False)
    for m in (model, stock):
        m.logit_scale = scale
    torch.testing.assert_close(model(**batch).loss, stock(**batch).loss, equal_nan=True)


@pytest.mark.parametrize("cap", [-2.0, 1e-3, 1e6])
def test_odd_caps_are_what_they_are_in_stock(cap, patched, batch):
    model, stock, report = patched("gemma2", settings={"final_logit_softcapping": cap}, mlp=False)
    losses = [m(**batch).loss for m in (model, stock)]
    torch.testing.assert_close(*losses)
    assert (report.calls_fused, report.calls_materialised) == (1, 0)
