"""The table of a plan beside real steps (tests/gpu/test_plan.py), and what cannot be checked."""

from __future__ import annotations

import pytest
import torch

from lowtide.bench.models import make_optimizer
from lowtide.bench.plan_check import check_plan, check_text
from lowtide.errors import UnsupportedError
from lowtide.plan import Adapters, plan_memory
from lowtide.plan.arguments import OPTIMIZERS
from lowtide.plan.config import nf4
from lowtide.train.shapes import SHAPES
from promises import promise

pytestmark = promise("plans", "commands")
FEW = {
    **SHAPES["llama-3.2-1b"], "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 99,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


def test_a_check_is_a_table() -> None:
    times = {"predicted_seconds": 0.9, "seconds": 1.0}
    check = {"predicted_gib": 11.0, "peak_gib": 10.0, "reserved_gib": 12.0, "machine": {"gpu": "NVIDIA Q1"}, **times}
    _, peak, seconds, held = check_text(check).splitlines()
    assert peak.split() == ["peak", "GiB", "11.00", "10.00", "+10.0%"]
    assert seconds.split() == ["s", "a", "step", "0.900", "1.000", "-10.0%"]
    assert held == "PyTorch's allocator held 12.00 GiB; NVIDIA Q1"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_what_cannot_be_checked() -> None:
    plan = plan_memory(FEW, 64, 1, device="h100")
    with pytest.raises(UnsupportedError, match=r"^check: expected a CUDA GPU"):
        check_plan(FEW, plan)
    settings = {**FEW, "quantization_config": nf4(nested=False)}
    plan = plan_memory(settings, 64, 1, device="h100", adapters=Adapters(8))
    with pytest.raises(UnsupportedError, match=r"^check: expected weights in 16 or 32 bits, got 4"):
        check_plan(settings, plan)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in ("adamw-8bit", "adamw")])
def test_an_optimizer_keeps_as_many_tensors_as_was_planned(name: str) -> None:
    weight = torch.nn.Parameter(torch.randn(7, 11))
    optimizer = make_optimizer(name, [weight])
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    kept = [x for x in optimizer.state[weight].values() if isinstance(x, torch.Tensor) and x.shape == weight.shape]
    assert len(kept) == OPTIMIZERS[name].states
