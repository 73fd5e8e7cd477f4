"""The bytes that layers save by the planner, beside the allocator's, for tiny models on the CPU."""

from __future__ import annotations

import dataclasses
import gc
import warnings
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import lowtide
from four_bit import in_four_bits
from lowtide.measure.allocations import track_allocations
from lowtide.memory import ActivationPolicy, apply_policy
from lowtide.memory.policy import word_of
from lowtide.mlp import elementwise
from lowtide.plan import Adapters
from lowtide.plan.arguments import ATTENTION, PROJECTIONS
from lowtide.plan.four_bit import config_of
from lowtide.plan.gpus import GPUS
from lowtide.plan.job import Job
from lowtide.plan.layer_costs import LayerCosts
from lowtide.plan.search import ladder
from lowtide.plan.shapes import read_shape
from lowtide.plan.step_costs import StepCosts

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


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer, and how it runs."""

    model_type: str
    policy: ActivationPolicy
    dtype: torch.dtype = torch.bfloat16
    autocast: bool = False
    adapters: Adapters | None = None
    packed: bool = False  # documents, apart by a mask
    fused_mlp: bool = True
    sizes: tuple[tuple[str, int], ...] = ()
    four_bit: bool = False

    def __str__(self) -> str:
        autocast, packed = "-autocast" * self.autocast, "-packed" * self.packed
        groups = "".join(f"-{size}" for _, size in self.sizes)
        return f"{self.model_type}-{word_of(self.policy)}-{self.dtype}{autocast}{packed}{groups}"

    def config(self, layers: int) -> Any:
        settings: dict[str, Any] = {**SIZES, **dict(self.sizes), "num_hidden_layers": layers}
        return transformers.AutoConfig.for_model(self.model_type, **settings)

    def live_after_forward(self, layers: int) -> int:
        """Return the bytes that a second forward leaves behind, everything that is made once made in the first."""
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(self.config(layers), attn_implementation="sdpa")
        model = model.to(self.dtype).train()
        if "num_local_experts" in dict(self.sizes):
            model.set_experts_implementation("grouped_mm")
        if self.four_bit:
            model = in_four_bits(model, self.dtype)
        if self.adapters is not None:
            targets = list(self.adapters.targets)
            lora = LoraConfig(r=self.adapters.rank, target_modules=targets, task_type="CAUSAL_LM")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # between peft and transformers
                model = get_peft_model(model, lora)
        lowtide.patch(model, mlp=self.fused_mlp)
        apply_policy(model, self.policy)
        ids = torch.randint(1, 160, (B, T))
        places = {"position_ids": torch.arange(T // 2).repeat(2).expand(B, T)} if self.packed else {}
        # 16-bit weights with adapters imply autocast
        autocast = self.autocast or (self.adapters is not None and self.dtype == torch.bfloat16)

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

    def measured(self) -> int:
        """Return the bytes by which one layer more makes a forward leave more."""
        least = 2 if self.adapters else 1  # whose first layer has an input that needs no gradient
        few, more = (self.live_after_forward(least + one) for one in (0, 1))
        random_state = torch.get_rng_state().numel()  # torch's checkpoint keeps the CPU's
        return more - few - (0 if self.policy.keep == "all" else random_state)

    def dropout_states(self) -> int:
        """Return the bytes that a GPU's kernel of attention saves besides, the states of its dropout."""
        return (16 if self.packed else 24) * (self.policy.keep == "all")

    def planned(self) -> int:
        """Return the bytes by the planner."""
        more: dict[str, Any] = {"autocast": self.autocast, "adapters": self.adapters, "fused_mlp": self.fused_mlp}
        settings = self.config(2).to_dict()
        if self.four_bit:
            settings["quantization_config"] = config_of(nested=False)
        shape = read_shape(settings)
        job = Job(shape, T, B, GPUS["h100"], self.dtype, "sgd", attention_mask=self.packed, **more)
        return LayerCosts(job)[self.policy].saved


WIDE, EVERY = torch.float32, ("all/0", "all/1", "attention/0", "input/0")
CASES = [Case("llama", policy) for policy in POLICIES.values()]
CASES += [
    Case("llama", POLICIES["all/1"], WIDE),
    Case("qwen2", POLICIES["all/0"]),
    Case("qwen3", POLICIES["attention/0"]),
]
CASES += [Case("gemma3_text", POLICIES["all/0"]), Case("gemma3_text", POLICIES["all/1"], WIDE, autocast=True)]
CASES += [Case("llama", POLICIES[name], WIDE, autocast=True) for name in EVERY]
CASES += [Case("llama", ActivationPolicy(), WIDE, autocast, fused_mlp=False) for autocast in (False, True)]
for name, autocast in (("all/0", True), ("all/1", False), ("attention/0", True)):  # beside a mask keys are repeated
    CASES.append(Case("llama", POLICIES[name], WIDE, autocast, packed=True))
# Phi3's values are a view of all that their product puts out; one copy of each input serves the whole stack.
CASES += [Case("phi3", POLICIES["all/0"]), Case("phi3", POLICIES["all/1"], WIDE, autocast=True)]
CASES.append(
    Case("phi3", ActivationPolicy(), WIDE, True, packed=True, fused_mlp=False, sizes=(("num_key_value_heads", 8),))
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layer_saves_what_is_planned_to_the_byte(case: Case) -> None:
    measured = case.measured()
    assert measured + case.dropout_states() == case.planned()
    if case.packed:  # attention saves the mask
        without = dataclasses.replace(case, packed=False).planned()
        assert (measured > without + B * T * T) == (case.policy.keep == "all")


# weights, and whether the products run under autocast by the plan
PRECISIONS = {"bfloat16": (torch.bfloat16, False), "autocast": (torch.float32, True), "float32": (torch.float32, False)}


@pytest.mark.parametrize(
    ("model_type", "targets", "name", "precision"),
    [
        ("llama", PROJECTIONS, "all/0", "bfloat16"),
        ("llama", PROJECTIONS, "all/1", "autocast"),
        ("llama", ("k_proj", "o_proj", "up_proj"), "attention/0", "float32"),
        ("gemma3_text", ("o_proj",), "all/0", "bfloat16"),
        ("llama", ("up_proj",), "not fused", "autocast"),
    ],
)
def test_a_layer_with_adapters_saves_what_is_planned(
    model_type: str, targets: tuple[str, ...], name: str, precision: str
) -> None:
    fused, policy = name != "not fused", POLICIES.get(name, ActivationPolicy())
    case = Case(model_type, policy, *PRECISIONS[precision], adapters=Adapters(3, targets), fused_mlp=fused)
    # on the host: what each product is multiplied with; and an empty place for an input that is not kept
    scalings = 8 * sum(target in (ATTENTION if fused else PROJECTIONS) for target in targets)
    measured = case.measured() + case.dropout_states()
    assert measured == pytest.approx(case.planned() + scalings, abs=4 if fused else 0)


@pytest.mark.parametrize(
    ("name", "model_type", "dtype"),
    [("all/0", "llama", torch.bfloat16), ("all/1", "qwen3", WIDE), ("attention/0", "llama", torch.bfloat16)],
)
def test_a_layer_in_4_bits_with_adapters_saves_what_is_planned(model_type: str, name: str, dtype: torch.dtype) -> None:
    pytest.importorskip("bitsandbytes")
    case = Case(model_type, POLICIES[name], dtype, adapters=Adapters(3), four_bit=True)
    assert case.measured() + case.dropout_states() == case.planned() + 8 * len(ATTENTION)


def test_mlps_that_are_not_fused_have_no_levels() -> None:
    job = Job(read_shape(CONFIG), T, B, GPUS["h100"], torch.bfloat16, "sgd", fused_mlp=False)
    assert {one.mlp_level for one in ladder(job, offload=True)} == {None}


@pytest.mark.parametrize(("model_type", "level"), [("mixtral", 0), ("qwen3_moe", 1), ("mixtral", None)])
def test_experts_save_about_what_is_planned(model_type: str, level: int | None) -> None:
    experts = (("num_local_experts", 4), ("num_experts_per_tok", 2), ("moe_intermediate_size", 176))
    case = Case(model_type, ActivationPolicy(mlp_level=level), sizes=experts, fused_mlp=level is not None)
    assert case.measured() == pytest.approx(case.planned(), rel=0.02)


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
    memory = StepCosts(Job(read_shape(config), T, B, GPUS["h100"], torch.float32, "sgd", keep_gradients))
    there = memory.weights + memory.other + (memory.all_gradients if keep_gradients else 0)
    phases = memory.phases([(ActivationPolicy(mlp_level=0), 2)])
    planned = max(phase.bytes for phase in phases if phase.name in ("backward", "embedding")) - there
    # the tiny layers' activations, when backward begins, are 4% of it
    assert forward.events[-1].total_bytes + backward.peak_bytes == pytest.approx(planned, rel=0.05)


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("model_type", ["llama", "phi3"])
def test_gradients_of_an_mlp_of_few_tokens_meet_as_planned(
    model_type: str, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of gate and up one after the other, that of a stacked projection whole with gate's."""
    monkeypatch.setattr(elementwise, "PIECE", 1)
    wide = {"hidden_size": 256, "head_dim": 32, "intermediate_size": 1024, "tie_word_embeddings": False}
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **wide, "num_hidden_layers": 2})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    lowtide.patch(model)
    policy = ActivationPolicy(mlp_level=level)
    apply_policy(model, policy)
    ids = torch.randint(1, 160, (1, 64))
    model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad(set_to_none=False)
    gc.collect()
    with track_allocations() as seen:
        model(input_ids=ids, labels=ids).loss.backward()
    memory = StepCosts(Job(read_shape(config), 64, 1, GPUS["h100"], torch.float32, "sgd", keep_gradients=True))
    there = memory.weights + memory.all_gradients
    planned = max(phase.bytes for phase in memory.phases([(policy, 2)]) if phase.name == "backward") - memory.other
    assert there + seen.peak_bytes == pytest.approx(planned, rel=0.03)
