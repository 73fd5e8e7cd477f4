"""axolotl's plugin manager with lowtide's plugin: arguments, the patched model, the report."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from promises import promise

pytest.importorskip("axolotl", reason="axolotl has other transformers than the rest of the tests: see docs/stacks.md")
pytestmark = [promise("patched"), pytest.mark.filterwarnings("ignore")]

NAME = "lowtide.stacks.axolotl.LowtidePlugin"


def test_the_plugin_patches_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    from axolotl.integrations.base import PluginManager
    from axolotl.utils.dict import DictDefault
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    stock = LlamaForCausalLM(LlamaConfig(vocab_size=97, num_hidden_layers=1, num_key_value_heads=2, **shape))
    model = copy.deepcopy(stock)
    manager = PluginManager.get_instance()
    manager.register(NAME)
    assert manager.get_input_args() == ["lowtide.stacks.axolotl.LowtideArgs"]
    cfg = DictDefault({"lowtide_workspace_mib": 16, "lowtide_rope": False})
    manager.post_model_load(cfg, model)
    ids = torch.randint(97, (2, 9))
    losses = [one(input_ids=ids, labels=ids).loss for one in (stock, model)]
    torch.testing.assert_close(losses[1], losses[0])
    manager.post_train(cfg, model)
    printed = capsys.readouterr().out
    assert "fused" in printed
    assert "rope" in printed


def test_bad_arguments_are_refused() -> None:
    from pydantic import ValidationError

    from lowtide.stacks.axolotl import LowtideArgs

    assert LowtideArgs().lowtide_mlp
    with pytest.raises(ValidationError, match="lowtide_workspace_mib"):
        LowtideArgs(lowtide_workspace_mib=0)
