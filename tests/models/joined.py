"""What tests of MLPs with gate and up in one projection share."""

import torch
from torch import nn

from lowtide.models.instance import part_of

OTHER_FORM = "it is not down(act(gate(x)) * up(x)) with SiLU or tanh-GELU"


def joined_mlps(model):
    """Return the model's modules that have this form, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if {"gate_up_proj", "down_proj"} <= {child for child, _ in module.named_children()}
    }


def with_levels(model, level, tile=None):
    for module in joined_mlps(model).values():
        if part_of(module) == "mlp":
            module.checkpoint_level, module.tile_tokens = level, tile


def assert_same_mlp(ours, stock, rtol):
    torch.manual_seed(2)
    x = torch.randn(2, 5, ours.down_proj.out_features, dtype=torch.float64)
    upstream, leaves = torch.randn_like(x), []
    for mlp in (ours, stock):
        mlp.zero_grad()
        leaf = x.clone().requires_grad_()
        y = mlp(leaf)
        y.backward(upstream)
        leaves.append((y, leaf.grad, *(p.grad for p in mlp.parameters())))
    for got, want in zip(*leaves, strict=True):
        torch.testing.assert_close(got, want, rtol=rtol, atol=rtol * want.abs().max().item())


class Holder(nn.Module):
    """A model that has nothing but an MLP."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def get_output_embeddings(self):
        return None
