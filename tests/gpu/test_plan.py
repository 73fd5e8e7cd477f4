"""Plans beside real steps on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("transformers")

from lowtide.bench.plan import check_plan
from lowtide.plan import plan_memory
from lowtide.plan.shapes import read_settings
from support import alone

SETTINGS: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 5,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def without_workspaces() -> None:
    """The plan counts cuBLAS's workspaces, which another test of the process may have made."""
    torch._C._cuda_clearCublasWorkspaces()


@pytest.mark.parametrize(("share", "host_gib"), [(0.02, 0), (0.7, 0), (0.3, 4), (1.0, 4)])
def test_a_step_takes_what_is_planned(share: float, host_gib: float) -> None:
    settings = read_settings(SETTINGS)
    front = plan_memory(settings, 8192, 1, host_gib=host_gib).front
    budget = front[0].peak + share * (front[-1].peak - front[0].peak)
    plan = plan_memory(settings, 8192, 1, budget / 2**30, host_gib)
    checked = check_plan(settings, plan, warm=1, steps=1)
    assert checked.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.03)


# The temporaries of autocast were never calibrated on a GPU; what layers save is tested on the CPU, to the byte.
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::DeprecationWarning")  # of the compiler's own doing
@pytest.mark.parametrize(
    ("change", "near"),
    [
        ({"keep_gradients": True}, 0.03),
        ({"optimizer": "sgd"}, 0.03),
        ({"optimizer": "adamw-foreach"}, 0.03),
        ({"autocast": True}, 0.1),
        ({"compile_layers": True}, 0.03),
    ],
)
def test_other_ways_to_train_too(change: dict[str, Any], near: float) -> None:
    settings = read_settings(SETTINGS)
    plan = plan_memory(settings, 8192, 1, **change)
    assert check_plan(settings, plan, warm=1, steps=1).peak_bytes == pytest.approx(plan.peak_bytes, rel=near)


TRACED: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 8, "num_hidden_layers": 3, "vocab_size": 32_000},  # eager attention
    "cohere2": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4, "vocab_size": 64_000},  # tied
    "lfm2": {"num_hidden_layers": 4},
}


@pytest.mark.filterwarnings("ignore:.*token_id")
@pytest.mark.parametrize("model_type", TRACED)
def test_a_step_of_layers_that_were_traced_takes_what_is_planned(model_type: str) -> None:
    settings = read_settings({"model_type": model_type, **TRACED[model_type]})
    plan = plan_memory(settings, 2048, 2)
    assert check_plan(settings, plan, warm=1, steps=1).peak_bytes == pytest.approx(plan.peak_bytes, rel=0.05)


@pytest.mark.parametrize("late", [False, True])
def test_a_step_with_offloaded_states_takes_what_is_planned(late: bool) -> None:
    """At the leanest and at a middling budget, states that come back with the layers or behind them."""
    settings = read_settings(SETTINGS)
    front = plan_memory(settings, 16384, 1, host_gib=24).front
    found = [one for one in front if one.states and one.late == late]
    for one in (found[0], found[len(found) // 2]):
        plan = plan_memory(settings, 16384, 1, one.peak / 2**30, 24)
        assert plan.chosen.states > 0
        checked = check_plan(settings, plan, warm=2, steps=2)
        assert checked.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.03)
        assert not alone() or checked.seconds == pytest.approx(plan.seconds, rel=0.2)
