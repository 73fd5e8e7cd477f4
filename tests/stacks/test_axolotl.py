"""axolotl's plugin manager with lowtide's plugin: arguments, the patched model, the report."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from promises import promise

pytest.importorskip("axolotl", reason="axolotl has other transformers than the rest of the tests: see docs/stacks.md")
pytestmark = [promise("patched"), pytest.mark.filterwarnings("ignore")]


def test_the_plugin_patches_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    from axolotl.integrations.base import PluginManager
    from axolotl.utils.dict import DictDefault
    from pydantic import ValidationError
    from transformers import LlamaConfig, LlamaForCausalLM

    from lowtide.stacks.axolotl import LowtideArgs

    with pytest.raises(ValidationError, match="lowtide_workspace_mib"):
        LowtideArgs(lowtide_workspace_mib=0)
    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    stock = LlamaForCausalLM(LlamaConfig(vocab_size=97, num_hidden_layers=1, num_key_value_heads=2, **shape))
    model = copy.deepcopy(stock)
    manager = PluginManager.get_instance()
    manager.register("lowtide.stacks.axolotl.LowtidePlugin")
    cfg = DictDefault({"lowtide_workspace_mib": 16, "lowtide_rope": False})
    manager.post_model_load(cfg, model)
    ids = torch.randint(97, (2, 9))
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, stock(input_ids=ids, labels=ids).loss)
    manager.post_train(cfg, model)
    printed = capsys.readouterr().out
    assert "fused" in printed
    assert "rope" in printed
