"""What the tests of patched models on a GPU share: small models, a batch, and gradients compared as one vector."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

import lowtide

SIZES = {
    "hidden_size": 256, "intermediate_size": 488, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "use_cache": False,
}  # fmt: skip


def with_larger_weights(model: Any) -> Any:
    """Return ``model`` with noise added to its weights: the losses of fresh ones hardly differ from log(V)."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def batch(V: int, T: int = 131) -> dict[str, Tensor]:
    """Return two sequences of tokens, a fifth of whose labels are ignored."""
    ids = torch.randint(3, V, (2, T), generator=torch.Generator().manual_seed(1)).cuda()
    return {"input_ids": ids, "labels": ids.masked_fill(ids % 5 == 0, -100)}


def gradients(model: Any, inputs: dict[str, Tensor], *, autocast: bool = False) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradient of every parameter that got one, in float64."""
    model.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        loss = model(**inputs).loss
    loss.backward()
    return loss.item(), {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def distance(got: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    """Return the squared norm of what gradients differ by, relative to the true ones'."""
    assert got.keys() == true.keys()
    return float(sum((got[n] - true[n]).square().sum() for n in true) / sum(t.square().sum() for t in true.values()))


def no_further_than_stock(stock: Any, precision: str, inputs: dict[str, Tensor]) -> Any:
    """Compare a patched model's loss and gradients with float64 and with the stock model's; return the report."""
    model, exact = copy.deepcopy(stock), copy.deepcopy(stock).double()
    report = lowtide.patch(model)
    true_loss, true = gradients(exact, inputs)
    (loss, ours), (_, theirs) = (gradients(m, inputs, autocast=precision == "autocast") for m in (model, stock))
    if precision == "float32":
        assert abs(loss - true_loss) < 1e-5
        assert distance(ours, true) < 1e-10
    else:
        assert abs(loss - true_loss) < 3e-2
        assert distance(ours, true) < 1.3 * distance(theirs, true)
    return report
