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


def test_a_modules_own_level_and_tile_are_used_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int | None]] = []

    def spying(*args: Any, checkpoint_level: int, tile_tokens: int | None, **kwargs: Any) -> None:
        seen.append((checkpoint_level, tile_tokens))

    monkeypatch.setattr(lowtide.nn, "swiglu_mlp", spying)
    mlps = [lowtide.nn.SwiGLU(8, 20, checkpoint_level=level) for level in (0, 0, 0, 1, 0)]
    model = torch.nn.Sequential(*(torch.nn.Sequential(mlp, torch.nn.Linear(8, 8)) for mlp in mlps))
    mlps[3].tile_tokens = 5

    def settings() -> list[tuple[int, int | None]]:
        seen.clear()
        for mlp in mlps:
            mlp(torch.zeros(3, 8))
        return list(seen)

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
