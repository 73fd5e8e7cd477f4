"""What patch must not disturb around the modules that it looks at, and what it must see when that changes."""

import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.errors import UnsupportedError
from lowtide.layers import rms_norm, rotary
from lowtide.models import rope_part
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


def test_an_mlp_made_from_a_patched_ones_class_runs(patched):
    model, _, _ = patched("llama")
    mlp = model.model.layers[0].mlp
    fresh = type(mlp)(model.config)
    fresh.load_state_dict(mlp.state_dict())
    x = torch.randn(3, 16)
    torch.testing.assert_close(fresh(x), mlp(x))


def test_unpatched_beneath_a_forward_put_on_the_instance(patched):
    model, stock, _ = patched("llama")
    mlp, expected, x = model.model.layers[0].mlp, stock.model.layers[0].mlp, torch.randn(3, 16)
    ours = mlp.forward
    mlp.forward = lambda x: ours(x) * 2  # as accelerate's hooks do
    torch.testing.assert_close(mlp(x), expected(x) * 2)
    lowtide.unpatch(model)
    assert torch.equal(mlp(x), expected(x) * 2)


def test_attention_patched_later_has_the_globals_of_then(build, batch, monkeypatch):
    first, second = build("llama"), build("llama")
    for m in (first, second):
        m.set_attn_implementation("eager")
    lowtide.patch(first)
    scope = type(second.model.layers[0].self_attn).forward.__globals__
    calls = []
    for name in ("eager_attention_forward", "apply_rotary_pos_emb"):
        stock = scope[name]
        monkeypatch.setitem(
            scope, name, lambda *args, stock=stock, name=name, **kw: (calls.append(name), stock(*args, **kw))[1]
        )
    lowtide.patch(second)
    assert part_of(second.model.layers[0].self_attn) == "rope"
    calls.clear()
    second(**batch)
    assert calls == ["eager_attention_forward"] * 2
    attention = type(second.model.layers[0].self_attn)
    q, tables = torch.randn(2, 3, 5, 8), torch.randn(2, 5, 8)
    stock = attention.__mro__[1]
    _, found = rope_part.find(second.model.layers[0].self_attn, stock)
    turn = rope_part._rotating(stock.forward, *found).__globals__["apply_rotary_pos_emb"]
    calls.clear()
    turn(q=q, k=q, cos=tables, sin=tables)  # by name: stock code
    assert calls[-1] == "apply_rotary_pos_emb"


def test_attention_behind_a_decorator_of_its_own_module_stays():
    scope = {"apply_rotary_pos_emb": lambda q, k, cos, sin, unsqueeze_dim=1: (q, k), "nn": nn}
    exec(
        "import functools\n"
        "def wrapped(function):\n"
        "    @functools.wraps(function)\n"
        "    def wrapper(*args):\n"
        "        return function(*args)\n"
        "    return wrapper\n"
        "class Attention(nn.Module):\n"
        "    @wrapped\n"
        "    def forward(self, q, k, cos, sin):\n"
        "        return apply_rotary_pos_emb(q, k, cos, sin)\n",
        scope,
    )
    module = scope["Attention"]()
    assert rope_part.is_candidate(module)
    assert rope_part.find(module, type(module)) == "its forward is wrapped in another function"
    assert isinstance(type(module).forward, types.FunctionType)


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


@pytest.mark.parametrize("function", ["swiglu_mlp", "rms_norm", "rotary"])
def test_a_batch_of_gradients_is_one_clear_error(function):
    x, weight = torch.randn(1, 2, 3, 4, requires_grad=True), torch.randn(6, 4)
    table = torch.randn(1, 3, 4)
    y = {
        "swiglu_mlp": lambda: lowtide.swiglu_mlp(x, weight, weight, weight.T),
        "rms_norm": lambda: rms_norm(x, weight[0], 1e-5),
        "rotary": lambda: rotary(x, x, table, table)[0],
    }[function]()
    with pytest.raises(UnsupportedError, match=f"{function}: expected one gradient of its output at a time"):
        torch.autograd.grad(y, x, torch.randn(5, *y.shape), is_grads_batched=True)
