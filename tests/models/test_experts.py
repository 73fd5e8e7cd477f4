"""Mixtures' experts in a patched model: what is around them, and what changes after patch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide
from lowtide.models import experts_part
from models.conftest import DYNAMO, PEFT, assert_same_training, fused, lora, set_level, state_of, wrap
from promises import promise
from support import every_pair, relative_error

pytestmark = [*DYNAMO, *PEFT, promise("patched", "reported"), pytest.mark.filterwarnings("ignore::UserWarning")]
ALONE = {"loss": False, "norm": False, "rope": False}
WAYS = ["eager", "grouped_mm", "batched_mm"]


@pytest.fixture
def both(patched):
    """Return a function that makes a patched tiny model, and a stock copy; the loss and the rest stay stock."""

    def both(name="qwen3-moe", way="grouped_mm"):
        return patched(name, settings={"experts_implementation": way, "output_router_logits": False}, **ALONE)[:2]

    return both


def experts_of(model):
    return [module for module in model.modules() if experts_part.is_candidate(module)]


@every_pair(name=["qwen3-moe", "gpt-oss"], way=WAYS, level=[0, 1])
def test_each_implementation(name, way, level, both, batch):
    model, stock = both(name, way)
    set_level(model, level)
    assert fused(assert_same_training(model, stock, batch)) == {"mlp": 2}


@promise("dtypes")
@every_pair(way=WAYS, hidden=[torch.float32, torch.bfloat16])
def test_autocast(way, hidden, both):
    """The GEMMs have the dtype that stock's have: PyTorch's grouped GEMM keeps the weights'."""
    models, errors = both(way=way), [0.0, 0.0]
    for _ in range(8):
        ids, routing = torch.rand(8 * 33, 4).topk(2).indices, torch.rand(8 * 33, 2)
        x = torch.randn(8 * 33, 16).to(hidden)
        true = experts_of(models[1])[0](x.float(), ids, routing)
        for i, m in enumerate(models):
            leaves = (x.clone().requires_grad_(), routing.clone().requires_grad_())
            with torch.autocast("cpu", torch.bfloat16):
                y = experts_of(m)[0](leaves[0], ids, leaves[1])
            assert bool(fused(y)) == (i == 0)
            assert y.dtype == hidden
            gradients = torch.autograd.grad(y.float().square().sum(), (*leaves, *experts_of(m)[0].parameters()))
            assert [g.dtype for g in gradients] == [hidden, torch.float32, torch.float32, torch.float32]
            errors[i] += relative_error(y, true) / 8
    assert errors[0] <= 1.1 * errors[1] + 1e-6
    assert (errors[0] < 1e-5) == (way == "grouped_mm" and hidden == torch.float32)


def test_a_hook_on_the_activation_is_followed(both, batch):
    model, stock = both()
    plain = model(**batch).loss
    for m in (model, stock):
        for experts in experts_of(m):
            experts.act_fn.register_forward_hook(lambda _m, _a, y: y * 3)
    loss = assert_same_training(model, stock, batch)
    assert not fused(loss)
    assert abs(loss - plain) > 1e-4


def int8(weight):
    return nn.Parameter(weight.detach().to(torch.int8), requires_grad=False)


FORMS = {
    "quantised": (lambda m: setattr(m, "down_proj", int8(m.down_proj)), "quantised"),
    "an exact GELU": (lambda m: setattr(m, "act_fn", nn.GELU()), "its experts are not"),
    "a forward of its own": (lambda m: setattr(m, "forward", m.forward), "replaced on the instance"),
}


@pytest.mark.parametrize("form", FORMS)
def test_other_forms_stay_with_their_reason(form, build):
    stock = build("qwen3-moe")
    change, why = FORMS[form]
    for module in experts_of(stock):
        change(module)
    before = state_of(stock)
    report = lowtide.patch(stock, **ALONE)
    assert not report.parts["mlp"].patched
    assert why in str(report)
    assert state_of(stock) == before


@promise("adapters")
@pytest.mark.parametrize("first", ["patch", "peft"])
def test_lora_on_the_weights_of_experts(first, both, batch):
    """Target parameters of peft, whose parametrisation adds the adapter to each expert's weight."""
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model, stock = both()
    if first == "peft":
        lowtide.unpatch(model)
    model, stock = (wrap(m, lora(target_modules=[], target_parameters=names)) for m in (model, stock))
    if first == "peft":
        lowtide.patch(model, **ALONE)
    assert fused(assert_same_training(model, stock, batch)) == {"mlp": 2}
    assert any("lora" in name and p.grad is not None for name, p in model.named_parameters())


@pytest.mark.slow
@promise("compile")
def test_compiled(both, batch):
    model, stock = both("gpt-oss")
    assert_same_training(model, stock, batch, through=torch.compile(model, fullgraph=True, backend="aot_eager"))
