"""transformers' hooks with lowtide's layers and experts: stock's values and gradients, compiled too."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import is_kernels_available, kernel_config

from lowtide.errors import UnsupportedError
from lowtide.stacks import transformers as ours
from models.conftest import fused
from promises import promise
from support import assert_near

pytestmark = [promise("patched", "compile"), pytest.mark.filterwarnings("ignore")]
SHAPE: dict[str, Any] = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0}
IDS = torch.arange(18).view(2, 9) * 5


def kernelize(model: Any, norm: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a model the layers; without the package `kernels` in its way, by forwards that are replaced."""
    if not is_kernels_available():
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = MethodType(getattr(ours, norm).forward, module)
        code = importlib.import_module(type(model).__module__)
        monkeypatch.setattr(code, "apply_rotary_pos_emb", ours.Rotary().forward)
        return
    variant = folder / "build" / "torch-cpu"
    variant.mkdir(parents=True)
    (variant / "__init__.py").write_text("from lowtide.stacks import transformers as layers\n")
    metadata = {"id": "_lowtide_1", "name": "lowtide", "version": 1, "license": "MIT", "python-depends": []}
    (variant / "metadata.json").write_text(json.dumps(metadata | {"backend": {"type": "cpu"}}))
    monkeypatch.setattr(kernel_config, "KERNELS_SUPPORTED_DEVICE_TYPES", ["cpu"])
    names = {"RMSNorm": f"{folder}:{norm}", "rotary_pos_emb": f"{folder}:Rotary"}
    model.set_use_kernels(True, kernel_config.KernelConfig(names, use_local_kernel=True))


def results(model: nn.Module, run: Any) -> list[Tensor]:
    loss = run(input_ids=IDS, labels=IDS).loss
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


def assert_same(model: nn.Module, expected: list[Tensor], parts: dict[str, int]) -> None:
    got = results(model, model)
    assert_near(got, expected, 1e-5)
    assert fused(got[0]) == parts
    assert_near(results(model, torch.compile(model, backend="aot_eager", fullgraph=True)), expected, 1e-5)


@pytest.mark.parametrize("norm", ["RMSNorm", "RMSNormRoundedLast"])
def test_norms_and_rotary(norm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama = norm == "RMSNorm"
    model: Any = LlamaForCausalLM(LlamaConfig(**SHAPE)) if llama else GptOssForCausalLM(GptOssConfig(**SHAPE))
    expected = results(model, model)
    kernelize(model, norm, tmp_path, monkeypatch)
    assert_same(model, expected, {"norm": 3, "rope": 1})
    last = model.model.norm.bfloat16()
    nn.init.normal_(last.weight)
    x = torch.randn(64, 16, dtype=torch.bfloat16)
    assert torch.equal(last(x), type(last).forward(last, x))  # where it rounds


def test_experts() -> None:
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8))
    expected = results(model, model)
    model.set_experts_implementation("lowtide")
    assert_same(model, expected, {"mlp": 1})
    part: Any = model.model.layers[0].mlp.experts
    del part.act_fn
    part.act_fn = nn.functional.silu  # as LFM2's
    assert_near(results(model, model), expected, 1e-5)


def test_experts_of_another_form() -> None:
    model = GptOssForCausalLM(GptOssConfig(**SHAPE, num_local_experts=4))
    model.set_experts_implementation("lowtide")
    with pytest.raises(UnsupportedError, match=r"got GptOssExperts. Use lowtide.patch\(model\)"):
        model(input_ids=IDS)
