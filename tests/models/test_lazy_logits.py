"""What stands for the logits is the logits to whoever looks: values, gradients, memory, errors."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowtide.models.lazy_logits import LazyLogits
from models.conftest import assert_same_training, expect_calls


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


def test_read_before_the_weights_change_is_kept(patched, batch):
    model, stock, _ = patched("llama", mlp=False)
    outputs, expected = model(**batch), stock(**batch).logits
    outputs.logits.sum()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert torch.equal(outputs.logits, expected)


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


@pytest.mark.parametrize("learned", [True, False])
def test_a_scale_that_is_a_tensor(learned, patched, batch):
    # A scale that is trained is no scalar operation of linear_cross_entropy: real logits.
    model, stock, report = patched("cohere2", mlp=False)
    for m in (model, stock):
        m.logit_scale = torch.nn.Parameter(torch.tensor(0.3)) if learned else torch.tensor(0.3)
    assert_same_training(model, stock, batch)
    expect_calls(report, int(not learned), int(learned))


@pytest.mark.parametrize("scale", [0.0, float("inf"), -2.0, True, 3])
def test_odd_scales_are_what_they_are_in_stock(scale, patched, batch):
    model, stock, _ = patched("cohere2", mlp=False)
    for m in (model, stock):
        m.logit_scale = scale
    torch.testing.assert_close(model(**batch).loss, stock(**batch).loss, equal_nan=True)


@pytest.mark.parametrize("cap", [-2.0, 1e-3, 1e6])
def test_odd_caps_are_what_they_are_in_stock(cap, patched, batch):
    model, stock, report = patched("gemma2", settings={"final_logit_softcapping": cap}, mlp=False)
    torch.testing.assert_close(*(m(**batch).loss for m in (model, stock)))
    expect_calls(report, 1)


@pytest.mark.parametrize(
    "read",
    [
        lambda z, _: z.square().mean(),
        lambda z, _: (2 * z).float().softmax(-1).square().sum(),
        lambda z, y: torch.nn.functional.cross_entropy(z[:, :-1].flatten(0, 1), y[:, 1:].flatten()),
        lambda z, y: z[:, 1:].log_softmax(-1).gather(-1, y[:, 1:, None]).mean(),
    ],
)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_loss_of_yours_under_a_checkpoint(use_reentrant, read, patched, batch):
    """The logits are built once, so its recompute has fewer tensors to save than the first run would have saved."""
    model, stock, _ = patched("llama", mlp=False)

    def loss(m):
        return checkpoint(read, m(**batch).logits, batch["input_ids"], use_reentrant=use_reentrant)

    assert_same_training(model, stock, loss)
