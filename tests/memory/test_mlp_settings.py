"""A policy's settings of MLPs: levels and tiles are set, given back, and refused where there is no fused MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import lowtide
from lowtide.errors import UnsupportedError
from lowtide.memory import ActivationPolicy, apply_policy, remove_policy
from memory.models import INPUT


def test_a_modules_own_level_and_tile_are_set_and_given_back() -> None:
    mlps = [lowtide.nn.SwiGLU(8, 20, checkpoint_level=level) for level in (0, 0, 0, 1, 0)]
    model = torch.nn.Sequential(*(torch.nn.Sequential(mlp, torch.nn.Linear(8, 8)) for mlp in mlps))
    mlps[3].tile_tokens = 5

    def settings() -> list[tuple[int, int | None]]:
        return [(mlp.checkpoint_level, mlp.tile_tokens) for mlp in mlps]

    own = settings()
    apply_policy(model, ActivationPolicy(mlp_level=1, mlp_tile_tokens=2))
    assert settings() == [(1, 2)] * 5
    apply_policy(model, [ActivationPolicy(mlp_level=level) for level in (0, 1, 0, None, 1)])
    assert settings() == [(0, None), (1, None), (0, None), (1, 5), (1, None)]
    remove_policy(model)
    assert settings() == own == [(0, None)] * 3 + [(1, 5), (0, None)]


@pytest.mark.parametrize("field", ["mlp_level", "mlp_tile_tokens"])
def test_settings_of_an_mlp_that_is_not_fused_are_refused(field: str, llama: Callable[..., Any]) -> None:
    model = llama(hidden_act="relu")
    assert not lowtide.patch(model, loss=False, norm=False, rope=False).parts["mlp"].patched
    said = rf"for {field} to set.* lowtide\.patch\(model, mlp=True\) first; for MLPs .* cannot fuse, omit {field}"
    with pytest.raises(UnsupportedError, match=said):
        apply_policy(model, [*[INPUT] * 4, ActivationPolicy(**{field: 1})])
    assert not any("_lowtide_policy" in vars(m) for m in model.modules()), "nothing has changed"
