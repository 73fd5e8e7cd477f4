"""torchtitan's and NeMo Automodel's losses: values and gradients beside theirs or plain PyTorch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lowtide.errors import ArgumentTypeError, UnsupportedError
from promises import promise
from support import assert_near

pytestmark = [promise("values", "errors"), pytest.mark.filterwarnings("ignore")]
LABELS = torch.arange(32).view(2, 16) * 3
LABELS[0, :5] = -100
ABSENT = "it has other requirements than the rest of the tests: see docs/stacks.md"


def test_automodel() -> None:
    loader = pytest.importorskip("nemo_automodel.components.config.loader", reason=ABSENT)
    loss = loader.ConfigNode({"_target_": "lowtide.stacks.automodel.AutomodelLoss"}).instantiate()
    hidden, head, weights = torch.randn(2, 16, 8, requires_grad=True), nn.Linear(8, 97, bias=False), torch.rand(2, 16)
    expected = (cross_entropy(head(hidden).movedim(-1, 1), LABELS, reduction="none") * weights).sum() / 27
    got = loss(hidden, LABELS, head.weight, num_label_tokens=27, loss_weights=weights)
    leaves = (hidden, head.weight)
    assert_near([got, *torch.autograd.grad(got, leaves)], [expected, *torch.autograd.grad(expected, leaves)], 1e-5)
    assert loss(hidden, torch.full_like(LABELS, -100), head.weight, num_label_tokens=0) == 0
    rounded = hidden.bfloat16()  # of FSDP2's mixed precision: the weight is gathered as it is stored, in float32
    assert torch.equal(loss(rounded, LABELS, head.weight), loss(rounded, LABELS, head.weight.bfloat16()))


def test_torchtitan() -> None:
    titan = pytest.importorskip("torchtitan.components.loss", reason=ABSENT)
    from torchtitan.models.common.linear import Linear

    from lowtide.stacks.torchtitan import without_logits

    config = titan.ChunkedLossWrapper.Config(loss_fn=titan.CrossEntropyLoss.Config(global_vocab_size=97))
    head, results = Linear.Config(in_features=8, out_features=97).build(), []
    hidden = torch.randn(2, 16, 8)
    for each in (config, without_logits(config, workspace_mib=4)):
        loss, x = each.build(), hidden.clone().requires_grad_()
        loss.set_lm_head(head)
        head.zero_grad()
        value, _ = loss(x, LABELS, torch.tensor(27.0))
        value.backward()
        results.append([value, x.grad, head.weight.grad, head(hidden)])
    assert_near(*results, 1e-5)
    loss.set_lm_head(Linear.Config(in_features=8, out_features=48).build())
    with pytest.raises(UnsupportedError, match="a shard of 48"):
        loss(hidden, LABELS)
    with pytest.raises(ArgumentTypeError, match="got MSELoss"):
        without_logits(titan.ChunkedLossWrapper.Config(loss_fn=titan.MSELoss.Config()))
