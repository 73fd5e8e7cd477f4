"""TRL's ``cast_lm_head_to_fp32``: the head is float32, and the hidden states are a cast of bfloat16 ones."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import lowtide
from support import relative_error
from trl_patch.conftest import build_model


@pytest.mark.parametrize("compact", [True, False], ids=["valid", "all"])
@pytest.mark.parametrize("grad", [True, False])
def test_a_float32_head(compact: bool, grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As TRL's own function in float32, with gradients and without."""
    utils: Any = importlib.import_module("trl.trainer.utils")
    monkeypatch.setattr(utils, "_use_triton", lambda device: compact)
    model = build_model().to(torch.bfloat16)
    model.lm_head.float()
    utils.add_fused_lm_head(model, temperature=0.7, cast_lm_head_to_fp32=True, outputs=("log_probs", "entropy"))
    ids = torch.randint(3, 23, (3, 9), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, 4:] = -100

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        with torch.set_grad_enabled(grad):
            found = model(input_ids=ids, labels=labels, fused_lm_head=True)
        if grad:
            (found.log_probs.sum() + 0.1 * found.entropy.sum()).backward()
        return [found.log_probs, found.entropy, *([model.lm_head.weight.grad] if grad else [])]

    expected = run()
    report = lowtide.patch_trl()
    for got, theirs in zip(run(), expected, strict=True):
        assert relative_error(got, theirs) < 1e-5
    assert report.calls_lowtide == {"ChunkedLogProbFunction": 1}
