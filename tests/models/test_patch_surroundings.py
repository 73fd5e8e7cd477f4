"""What patch must not disturb around the modules that it looks at, and what it must see when that changes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.models.instance import part_of
from models.conftest import DYNAMO, Doubling

pytestmark = DYNAMO


def test_evaluation_stays_evaluation_and_activations_keep_their_state(build):
    class Counting(nn.SiLU):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    model = build("llama").eval()
    dropping, counting = (layer.mlp for layer in model.model.layers)
    dropping.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.5)).eval()
    counting.act_fn = Counting()
    lowtide.patch(model)
    assert not any(module.training for module in model.modules() if module is not counting.act_fn)
    assert counting.act_fn.calls == 0


@pytest.mark.parametrize("surrounding", ["default dtype", "autocast"])
def test_patched_alike_in_other_surroundings(surrounding, build):
    usual, model = lowtide.patch(build("llama")), build("llama")
    before = torch.get_default_dtype()
    try:
        if surrounding == "default dtype":
            torch.set_default_dtype(torch.float64)
        with torch.autocast("cpu", torch.bfloat16, enabled=surrounding == "autocast"):
            report = lowtide.patch(model)
    finally:
        torch.set_default_dtype(before)
    assert str(report) == str(usual)


def test_a_swiglu_of_ours_stays_and_keeps_its_level():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = lowtide.nn.SwiGLU(6, 10)

        def get_output_embeddings(self):
            return None

    model = Model()
    assert "checkpoint_level of its own" in lowtide.patch(model).parts["mlp"].outcome
    lowtide.unpatch(model)
    assert model.mlp(torch.randn(2, 6)).shape == (2, 6)
    assert model.mlp.checkpoint_level == 1


def test_unpatched_beneath_a_forward_put_on_the_instance(patched):
    model, stock, _ = patched("llama")
    mlp, expected, x = model.model.layers[0].mlp, stock.model.layers[0].mlp, torch.randn(3, 16)
    ours = mlp.forward
    mlp.forward = lambda x: ours(x) * 2  # as accelerate's hooks do
    torch.testing.assert_close(mlp(x), expected(x) * 2)
    lowtide.unpatch(model)
    assert torch.equal(mlp(x), expected(x) * 2)


def test_a_function_mode_sees_what_it_would_see_of_stock_code(patched):
    model, stock, _ = patched("llama")
    x = torch.randn(3, 16)
    for name in ("mlp", "input_layernorm"):
        patched, plain = (getattr(m.model.layers[0], name) for m in (model, stock))
        with Doubling(F.linear, torch.rsqrt):
            torch.testing.assert_close(patched(x), plain(x))
        with torch.device("cpu"):
            assert part_of(patched) is not None
            torch.testing.assert_close(patched(x), plain(x))
