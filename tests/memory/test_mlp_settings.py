"""A policy's settings of MLPs: levels and tiles are set, given back, and refused where layers disagree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.errors import ArgumentValueError, UnsupportedError
from lowtide.memory import ActivationPolicy, apply_policy, remove_policy
from memory.models import INPUT, step


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
    report = apply_policy(model, ActivationPolicy(mlp_level=1, mlp_tile_tokens=2))
    assert settings() == [(1, 2)] * 5
    assert str(report).splitlines()[2].split()[-2:] == ["1", "-"]
    apply_policy(model, [ActivationPolicy(mlp_level=level) for level in (0, 1, 0, None, 1)])
    assert settings() == [(0, None), (1, None), (0, None), (1, 5), (1, None)]
    remove_policy(model)
    assert settings() == own == [(0, None)] * 3 + [(1, 5), (0, None)]


@pytest.mark.parametrize("field", ["mlp_level", "mlp_tile_tokens"])
def test_layers_that_share_an_mlp_and_disagree_are_refused(field: str, llama: Callable[..., Any], ids: Tensor) -> None:
    model = llama()
    model.model.layers[3].mlp = model.model.layers[1].mlp
    lowtide.patch(model)
    shared = model.model.layers[1].mlp
    policies = [ActivationPolicy(**{field: 1 if i != 3 else None}) for i in range(5)]
    with pytest.raises(ArgumentValueError) as raised:
        apply_policy(model, policies)
    text = str(raised.value)
    assert "model.layers.1" in text
    assert "model.layers.3" in text
    assert "None for model.layers.3" in text
    assert (shared.checkpoint_level, shared.tile_tokens) == (0, None), "nothing was changed"
    apply_policy(model, ActivationPolicy(**{field: 1}))  # one for all
    assert (shared.checkpoint_level, shared.tile_tokens) == ((1, None) if field == "mlp_level" else (0, 1))
    step(model, ids)
    remove_policy(model)
    assert (shared.checkpoint_level, shared.tile_tokens) == (0, None)
    mixed = [ActivationPolicy(**{field: 1 if i in (1, 3) else None}) for i in range(5)]  # the others may differ
    apply_policy(model, mixed)
    remove_policy(model)


@pytest.mark.parametrize("field", ["mlp_level", "mlp_tile_tokens"])
def test_settings_of_an_mlp_that_is_not_fused_are_refused(field: str, llama: Callable[..., Any]) -> None:
    model = llama(hidden_act="relu")
    assert not lowtide.patch(model, loss=False, norm=False, rope=False).parts["mlp"].patched
    said = rf"for {field} to set.* lowtide\.patch\(model, mlp=True\) first; for MLPs .* cannot fuse, omit {field}"
    with pytest.raises(UnsupportedError, match=said):
        apply_policy(model, [*[INPUT] * 4, ActivationPolicy(**{field: 1})])
    assert not any("_lowtide_policy" in vars(m) for m in model.modules()), "nothing has changed"
