"""Plans of layers that are compiled one by one, beside those of the same layers in eager."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import lowtide
from lowtide.errors import ArgumentTypeError
from lowtide.measure.timing import peak_above
from lowtide.memory import ActivationPolicy, apply_policy, plan_memory
from lowtide.memory.planner.gpus import GPUS
from lowtide.memory.planner.job import Job
from lowtide.memory.planner.layer_costs import LayerCost, layer_cost
from lowtide.memory.planner.search import ladder
from lowtide.memory.planner.shapes import read_shape
from lowtide.memory.planner.step_costs import StepCosts
from lowtide.train.shapes import SHAPES

KINDS = {
    **{name: SHAPES[name] for name in ("llama-3.2-1b", "qwen3-0.6b", "gemma-2-2b")},
    "phi3": {**SHAPES["llama-3.2-1b"], "model_type": "phi3", "rope_parameters": {"rope_type": "default"}},
}
MEASURED = {  # seconds of a step on one H100, everything saved: benchmarks/results, 2026-11-26-step-compiled-*
    ("llama-3.2-1b", 32768): 0.9996,
    ("qwen3-0.6b", 16384): 0.3274,
}


def job(kind: str, seq_len: int, **more: Any) -> Job:
    dtype = torch.float32 if more.get("autocast") else torch.bfloat16
    return Job(read_shape(KINDS[kind]), seq_len, 1, GPUS["h100"], dtype, "adamw", **more)


def pair(policy: ActivationPolicy, eager: Job) -> tuple[LayerCost, LayerCost]:
    """A layer's costs in eager, and compiled."""
    return layer_cost(eager, policy), layer_cost(replace(eager, compile_layers=True), policy)


@pytest.mark.parametrize(("model", "seq_len"), MEASURED)
def test_a_step_takes_as_long_as_it_was_measured(model: str, seq_len: int) -> None:
    costs = StepCosts(job(model, seq_len))
    planned = costs.seconds([(ActivationPolicy(mlp_level=0), costs.job.shape.layers)])
    assert planned == pytest.approx(MEASURED[model, seq_len], rel=0.05)


@pytest.mark.parametrize("more", [{}, {"autocast": True}, {"fused_mlp": False}, {"attention_mask": True}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seq_len", [64, 4096, 65536])
def test_a_compiled_layer_is_never_slower_nor_larger(seq_len: int, kind: str, more: dict[str, Any]) -> None:
    step = job(kind, seq_len, **more)
    for policy in ladder(step, offload=False):
        eager, compiled = pair(policy, step)
        assert compiled.forward <= eager.forward
        assert compiled.backward <= eager.backward
        assert compiled.saved <= eager.saved
        assert compiled.whole <= eager.whole
        assert compiled.flop == eager.flop


def test_the_gradients_of_attentions_input_are_added_in_one_pass() -> None:
    """Two additions write the sum and read it again between them: 2 h numbers of 2 bytes per token."""
    policy, step = ActivationPolicy(mlp_level=0), job("llama-3.2-1b", 65536)
    eager, compiled = pair(policy, step)
    passes = 2 * 2 * 65536 * 2048 / step.gpu.bandwidth
    assert eager.forward == compiled.forward
    assert passes <= eager.backward - compiled.backward <= 1.2 * passes
    eager, compiled = pair(policy, job("phi3", 65536))  # one projection
    assert eager.backward == compiled.backward


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::DeprecationWarning")  # of the compiler's own doing
@pytest.mark.parametrize("keep", ["all", "input"])
@pytest.mark.parametrize("level", [0, 1])
def test_what_a_compiled_mlp_holds_in_backward(keep: str, level: int) -> None:
    """At level 0 gradients of gate and up of their own: in eager they overwrite gate and up."""
    T, F = 512, 1024
    small = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64}
    settings = {"model_type": "llama", "intermediate_size": F, "num_hidden_layers": 1, "use_cache": False, **small}
    policy, config = ActivationPolicy(keep=keep, mlp_level=level), AutoConfig.for_model(**settings)  # type: ignore[arg-type]
    peaks = []
    for compiled in (False, True):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        lowtide.patch(model)
        apply_policy(model, policy)
        if compiled:
            torch._dynamo.reset()
            model.model.layers[0].compile(dynamic=False, backend="aot_eager_decomp_partition")
        step = partial(train, model, torch.randint(0, 64, (1, T)))
        step()
        peaks.append(peak_above(step, "cpu"))
    eager, compiled_cost = pair(policy, Job(read_shape(settings), T, 1, GPUS["h100"], torch.bfloat16, "adamw"))
    assert compiled_cost.backward_bytes - eager.backward_bytes == (level == 0) * 2 * T * F * 2
    assert peaks[1] - peaks[0] == pytest.approx((level == 0) * 2 * T * F * 2, abs=0.1 * T * F)


def train(model: Any, ids: torch.Tensor) -> None:
    """Run a step without an optimizer, from no gradients to none."""
    model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad()


def test_a_recompute_is_launched_faster() -> None:
    """Where the host sets the pace: no operator is inspected, and no hooks of a checkpoint run."""
    for policy in ladder(job("qwen3-0.6b", 64), offload=False):
        eager, compiled = pair(policy, job("qwen3-0.6b", 64))
        assert (compiled.backward < 0.99 * eager.backward) == (policy.keep != "all")
        assert (compiled.forward < 0.9 * eager.forward) == (policy.keep == "attention")


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("seq_len", [64, 16384])
def test_a_layer_that_offloads_runs_in_eager(seq_len: int, autocast: bool) -> None:
    step = job("qwen3-0.6b", seq_len, autocast=autocast)
    offloading = [policy for policy in ladder(step, offload=True) if policy.offload]
    assert len(offloading) == 4
    for policy in offloading:
        eager, compiled = pair(policy, step)
        assert eager == compiled


@pytest.mark.parametrize(("host_gib", "budget"), [(0, 10.5), (16, 9.7)])
def test_a_compiled_plan_is_not_slower(host_gib: int, budget: float) -> None:
    eager, compiled = (
        plan_memory(SHAPES["llama-3.2-1b"], 8192, 1, budget, host_gib, "h100", compile_layers=flag)
        for flag in (False, True)
    )
    assert compiled.seconds <= eager.seconds
    assert (eager.to_dict()["compile_layers"], compiled.to_dict()["compile_layers"]) == (False, True)
    assert ("compiled" in eager.title, "layers compiled" in compiled.title) == (False, True)
    assert "compile" not in eager.lines()


def test_the_lines_compile_the_layers_after_their_policies() -> None:
    transformers = pytest.importorskip("transformers")
    few = {**SHAPES["llama-3.2-1b"], "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
    few |= {"vocab_size": 99, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**few))
    found = plan_memory(few, 64, 1, 8, device="h100", compile_layers=True)
    seen = []

    def compiled(self: torch.nn.Module, **settings: Any) -> None:
        seen.append((self, settings))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.nn.Module, "compile", compiled)
        patched.setattr("lowtide.memory.apply_policy", lambda *args: seen.append(apply_policy(*args)))
        exec(found.lines(), {"model": model})
    assert seen[1:] == [(layer, {"dynamic": False}) for layer in model.model.layers]
    assert len(seen[0].policies) == 2


def test_anything_but_a_flag_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match=r"^compile_layers: expected"):
        plan_memory(SHAPES["llama-3.2-1b"], 64, 1, device="h100", compile_layers="yes")  # type: ignore[arg-type]
