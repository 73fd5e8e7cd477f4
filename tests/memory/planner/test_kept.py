"""What the planner says that layers keep, beside what the allocator says, for tiny models on the CPU."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import lowtide
from lowtide.measure.allocations import track_allocations
from lowtide.memory import ActivationPolicy, Adapters, apply_policy
from lowtide.memory.planner.adapters import ATTENTION, PROJECTIONS
from lowtide.memory.planner.gpus import GPUS
from lowtide.memory.planner.job import Job
from lowtide.memory.planner.layer_costs import checkpoint_bytes
from lowtide.memory.planner.search import ladder
from lowtide.memory.planner.shapes import read_shape
from lowtide.memory.planner.step_bytes import Memory

transformers = pytest.importorskip("transformers")

B, T = 2, 96
SIZES = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 8, "head_dim": 8,
    "num_key_value_heads": 2, "tie_word_embeddings": True, "use_cache": False, "pad_token_id": 0,
}  # fmt: skip
CONFIG = {"model_type": "llama", **SIZES, "num_hidden_layers": 2}
POLICIES = {
    "all/0": ActivationPolicy(mlp_level=0),
    "all/1": ActivationPolicy(mlp_level=1),
    "attention/0": ActivationPolicy(keep="attention", mlp_level=0),
    "attention/1": ActivationPolicy(keep="attention", mlp_level=1),
    "input/0": ActivationPolicy(keep="input", mlp_level=0),
}


def live_after_forward(
    model_type: str,
    layers: int,
    dtype: torch.dtype,
    policy: ActivationPolicy,
    *,
    autocast: bool = False,
    adapters: Adapters | None = None,
    packed: bool = False,
    fused_mlp: bool = True,
    **sizes: int,
) -> int:
    """Return the bytes that a second forward leaves behind, everything that is made once made in the first."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **sizes, "num_hidden_layers": layers})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype).train()
    if "num_local_experts" in sizes:
        model.set_experts_implementation("grouped_mm")
    if adapters is not None:
        lora = LoraConfig(r=adapters.rank, target_modules=list(adapters.targets), task_type="CAUSAL_LM")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # between peft and transformers
            model = get_peft_model(model, lora)
    lowtide.patch(model, mlp=fused_mlp)
    apply_policy(model, policy)
    ids = torch.randint(1, 160, (B, T))
    places = {"position_ids": torch.arange(T // 2).repeat(2).expand(B, T)} if packed else {}

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(input_ids=ids, labels=ids, **places).loss

    forward().backward()
    model.zero_grad()
    gc.collect()
    with track_allocations() as seen:
        loss = forward()
    assert loss.requires_grad
    return seen.events[-1].total_bytes


def kept_by_a_layer(model_type: str, dtype: torch.dtype, policy: ActivationPolicy, **kwargs: Any) -> int:
    """Return the bytes by which one layer more makes a forward leave more."""
    least = 2 if kwargs.get("adapters") else 1  # whose first layer has an input that needs no gradient
    few, more = (live_after_forward(model_type, least + one, dtype, policy, **kwargs) for one in (0, 1))
    random_state = 0 if policy.keep == "all" else torch.get_rng_state().numel()  # torch's checkpoint keeps the CPU's
    return more - few - random_state


def planned(
    model_type: str,
    dtype: torch.dtype,
    policy: ActivationPolicy,
    *,
    autocast: bool = False,
    adapters: Adapters | None = None,
    packed: bool = False,
    fused_mlp: bool = True,
    **sizes: int,
) -> int:
    """Return the bytes by the planner."""
    config: Any = transformers.AutoConfig.for_model(model_type, **{**SIZES, **sizes, "num_hidden_layers": 2})
    more: dict[str, Any] = {"autocast": autocast, "adapters": adapters, "attention_mask": packed}
    more["fused_mlp"] = fused_mlp
    return checkpoint_bytes(Job(read_shape(config), T, B, GPUS["h100"], dtype, "sgd", **more), policy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", POLICIES)
def test_a_llama_layer_keeps_what_is_planned_to_the_byte(name: str, dtype: torch.dtype) -> None:
    assert kept_by_a_layer("llama", dtype, POLICIES[name]) == planned("llama", dtype, POLICIES[name])


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3", "gemma", "gemma3_text"])
@pytest.mark.parametrize("name", ["all/0", "all/1", "attention/0"])
def test_layers_of_other_kinds_too(model_type: str, name: str) -> None:
    policy = POLICIES[name]
    assert kept_by_a_layer(model_type, torch.bfloat16, policy) == planned(model_type, torch.bfloat16, policy)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("name", ["all/0", "all/1", "attention/0", "input/0"])
def test_layers_under_autocast_too(model_type: str, name: str) -> None:
    policy = POLICIES[name]
    measured = kept_by_a_layer(model_type, torch.float32, policy, autocast=True)
    assert measured == planned(model_type, torch.float32, policy, autocast=True)


# weights, whether the products run under autocast, and what is planned with: 16-bit weights imply it with adapters
PRECISIONS = {
    "bfloat16": (torch.bfloat16, True, False),
    "autocast": (torch.float32, True, True),
    "float32": (torch.float32, False, False),
}


@pytest.mark.parametrize(
    ("model_type", "targets", "name", "precision"),
    [
        ("llama", PROJECTIONS, "all/0", "bfloat16"),
        ("llama", PROJECTIONS, "all/1", "autocast"),
        ("llama", PROJECTIONS, "attention/0", "float32"),
        ("llama", ("q_proj", "v_proj"), "all/0", "bfloat16"),
        ("llama", ("o_proj", "down_proj"), "all/1", "autocast"),
        ("llama", ("k_proj", "o_proj", "up_proj"), "all/0", "float32"),
        ("qwen3", PROJECTIONS, "all/1", "bfloat16"),
        ("gemma3_text", PROJECTIONS, "all/0", "float32"),
        ("gemma3_text", ("o_proj",), "all/0", "bfloat16"),
    ],
)
def test_a_layer_with_adapters_keeps_what_is_planned(
    model_type: str, targets: tuple[str, ...], name: str, precision: str
) -> None:
    dtype, autocast, said = PRECISIONS[precision]
    adapters = Adapters(3, targets)
    measured = kept_by_a_layer(model_type, dtype, POLICIES[name], autocast=autocast, adapters=adapters)
    # on the host: what each product is multiplied with; and an empty place for an input that is not kept
    scalings = 8 * sum(target in ATTENTION for target in targets)
    expected = planned(model_type, dtype, POLICIES[name], autocast=said, adapters=adapters)
    assert measured == pytest.approx(expected + scalings, abs=4)


@pytest.mark.parametrize(("name", "autocast"), [("all/0", True), ("all/1", False), ("attention/0", True)])
def test_layers_whose_attention_has_a_mask_keep_it_and_repeated_keys(name: str, autocast: bool) -> None:
    measured = kept_by_a_layer("llama", torch.float32, POLICIES[name], autocast=autocast, packed=True)
    assert measured == planned("llama", torch.float32, POLICIES[name], autocast=autocast, packed=True)
    plain = planned("llama", torch.float32, POLICIES[name], autocast=autocast)
    assert (measured > plain + B * T * T) == name.startswith("all")


@pytest.mark.parametrize(
    ("targets", "precision"), [((), "float32"), ((), "autocast"), (PROJECTIONS, "bfloat16"), (("up_proj",), "autocast")]
)
def test_an_mlp_that_is_not_fused_keeps_four_tensors(targets: tuple[str, ...], precision: str) -> None:
    policy, (dtype, autocast, said) = ActivationPolicy(), PRECISIONS[precision]
    settings: dict[str, Any] = {"adapters": Adapters(3, targets) if targets else None, "fused_mlp": False}
    measured = kept_by_a_layer("llama", dtype, policy, autocast=autocast, **settings)
    assert measured == planned("llama", dtype, policy, autocast=said, **settings) + 8 * len(targets)
    job = Job(read_shape(CONFIG), T, B, GPUS["h100"], torch.bfloat16, "sgd", fused_mlp=False)
    assert {one.mlp_level for one in ladder(job, offload=True)} == {None}


@pytest.mark.parametrize("groups", [2, 8])
@pytest.mark.parametrize(
    ("keep", "autocast", "packed"), [("all", False, False), ("all", True, True), ("attention", True, False)]
)
def test_layers_of_stacked_projections_keep_what_is_planned(
    keep: Any, autocast: bool, packed: bool, groups: int
) -> None:
    """Phi3's values are a view of all that their product puts out; one copy of each input serves the whole stack."""
    policy = ActivationPolicy(keep=keep)
    settings: dict[str, Any] = {
        "autocast": autocast,
        "packed": packed,
        "fused_mlp": False,
        "num_key_value_heads": groups,
    }
    measured = kept_by_a_layer("phi3", torch.float32, policy, **settings)
    assert measured == planned("phi3", torch.float32, policy, **settings)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_experts_keep_about_what_is_planned(model_type: str) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 176}
    policy = ActivationPolicy()
    measured = kept_by_a_layer(model_type, torch.bfloat16, policy, **experts)
    assert measured == pytest.approx(planned(model_type, torch.bfloat16, policy, **experts), rel=0.02)


@pytest.mark.parametrize("keep_gradients", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_a_large_vocabulary_meet_as_planned(tied: bool, keep_gradients: bool) -> None:
    """The head's waits for the embedding's where both are of one tensor, beside what was accumulated before."""
    B, T = 1, 32
    sizes = {**SIZES, "vocab_size": 20000, "num_hidden_layers": 2, "tie_word_embeddings": tied}
    config = transformers.AutoConfig.for_model("llama", **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    lowtide.patch(model)
    ids = torch.randint(1, 160, (B, T))
    model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad(set_to_none=not keep_gradients)
    gc.collect()
    with track_allocations() as forward:
        loss = model(input_ids=ids, labels=ids).loss
    with track_allocations() as backward:
        loss.backward()
    memory = Memory(Job(read_shape(config), T, B, GPUS["h100"], torch.float32, "sgd", keep_gradients))
    there = memory.weights + memory.other + (memory.all_gradients if keep_gradients else 0)
    phases = memory.phases([(ActivationPolicy(mlp_level=0), 2)])
    planned = max(phase.bytes for phase in phases if phase.name in ("backward", "embedding")) - there
    # the tiny layers' activations, when backward begins, are 4% of it
    assert forward.events[-1].total_bytes + backward.peak_bytes == pytest.approx(planned, rel=0.05)


def test_a_layer_that_keeps_attention_overwrites_gate_and_up_in_backward_like_any_other() -> None:
    """Its recompute runs under a dispatch mode, which might hold what operators return; this one says it does not."""
    peaks = {}
    B, T, h, f, V = 1, 512, 32, 1024, 16
    sizes = {**SIZES, "hidden_size": h, "intermediate_size": f, "vocab_size": V, "num_hidden_layers": 3}
    for name in ("attention/0", "input/0"):
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model("llama", **sizes)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
        lowtide.patch(model)
        apply_policy(model, POLICIES[name])
        ids = torch.randint(1, V, (B, T))
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
        gc.collect()
        with track_allocations() as seen:
            model(input_ids=ids, labels=ids).loss.backward()
        peaks[name] = seen.peak_bytes
    attention = 3 * T * (8 * 8 * 4 + 8 * 4)  # of three layers, and a float32 a head
    assert peaks["attention/0"] <= peaks["input/0"] + attention + 0.1 * T * 2 * f * 4
