"""What a layer saves is what is planned: bytes by the allocator beside the planner's, for tiny models on the CPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model

import lowtide
from four_bit import in_four_bits
from lowtide.measure.allocations import track_allocations
from lowtide.memory import ActivationPolicy, apply_policy
from lowtide.memory.policy import parse_policies
from lowtide.mlp import elementwise
from lowtide.plan import Adapters
from lowtide.plan import model as model_file
from lowtide.plan.config import nf4, read_settings, with_layers
from lowtide.plan.step_costs import StepCosts, layer_costs
from models.tiny import HEAD_DIMS, tiny_config
from planner.jobs import ATTENTION, PROJECTIONS, cost_of, groups_of, job_of
from promises import promise

transformers = pytest.importorskip("transformers")
pytestmark = [promise("plans", "memory"), pytest.mark.filterwarnings("ignore")]  # what models of all ages say

B, T = 2, 96
SIZES = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 8, "head_dim": 8,
    "num_key_value_heads": 2, "tie_word_embeddings": True, "use_cache": False, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 176}
BF16, FP32, AUTOCAST = "bfloat16", "float32", "autocast"


@pytest.fixture(autouse=True)
def few_objects() -> Iterator[None]:
    """What was imported is not looked through whenever garbage is collected."""
    gc.freeze()
    yield
    gc.unfreeze()


class Case(NamedTuple):
    """A layer, and how it runs."""

    model_type: str
    policy: str
    precision: str = BF16
    adapters: Adapters | None = None
    packed: bool = False  # documents, apart by a mask
    fused_mlp: bool = True
    sizes: dict[str, Any] | None = None
    four_bit: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == BF16 else torch.float32

    def settings(self, layers: int) -> dict[str, Any]:
        return {**SIZES, **(self.sizes or {}), "num_hidden_layers": layers}

    def live_after_forward(self, layers: int) -> int:
        """Return the bytes that a second forward leaves behind, everything that is made once made in the first."""
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(self.model_type, **self.settings(layers))
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        model = model.to(self.dtype).train()
        if self.sizes is EXPERTS:
            model.set_experts_implementation("grouped_mm")
        model = in_four_bits(model, self.dtype) if self.four_bit else model
        if self.adapters is not None:
            lora = LoraConfig(r=self.adapters.rank, target_modules=self.adapters.target_modules, task_type="CAUSAL_LM")
            model = get_peft_model(model, lora)
        lowtide.patch(model, mlp=self.fused_mlp)
        apply_policy(model, parse_policies(self.policy))
        places = {"position_ids": torch.arange(T // 2).repeat(2).expand(B, T)} if self.packed else {}
        # 16-bit weights with adapters imply autocast
        autocast = self.precision == AUTOCAST or (self.adapters is not None and self.precision == BF16)
        return left_by(model, B, T, autocast=autocast, **places)

    def measured(self) -> int:
        """Return the bytes by which one layer more makes a forward leave more."""
        least = 2 if self.adapters else 1  # whose first layer has an input that needs no gradient
        few, more = (self.live_after_forward(least + one) for one in (0, 1))
        random_state = torch.get_rng_state().numel()  # torch's checkpoint keeps the CPU's
        every = self.policy.startswith("all")
        states = (16 if self.packed else 24) * every  # those of its dropout, which a GPU's attention saves besides
        return more - few + states - (0 if every else random_state)

    def planned(self) -> int:
        settings = {**transformers.AutoConfig.for_model(self.model_type, **self.settings(2)).to_dict()}
        if self.four_bit:
            settings["quantization_config"] = nf4(nested=False)
        given: dict[str, Any] = {"attention_mask": self.packed, "fused_mlp": self.fused_mlp, "adapters": self.adapters}
        dtype = FP32 if self.precision == AUTOCAST else self.precision
        job = job_of(settings, T, batch_size=B, dtype=dtype, autocast=self.precision == AUTOCAST, **given)
        policy: Any = parse_policies(self.policy)
        return cost_of(job, policy).saved


def left_by(model: Any, rows: int, tokens: int, *, autocast: bool = False, **given: Any) -> int:
    ids = torch.randint(3, 160, (rows, tokens))

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(input_ids=ids, labels=ids, **given).loss

    forward().backward()
    model.zero_grad()
    gc.collect()
    with track_allocations() as seen:
        loss = forward()
    assert loss.requires_grad
    return seen.events[-1].total_bytes


FEW_TARGETS = Adapters(3, ("k_proj", "o_proj", "up_proj"))
CASES = [
    *(Case("llama", policy) for policy in ("all/0", "all/1", "attention/1", "input/0")),
    *(Case("llama", policy, AUTOCAST) for policy in ("all/0", "all/1", "attention/0")),
    Case("llama", "all/0", AUTOCAST, packed=True),  # beside a mask keys are repeated
    Case("llama", "attention/0", FP32, packed=True),
    Case("qwen3", "attention/0"),
    Case("gemma3_text", "all/1", AUTOCAST),
    # Phi3's values are a view of all that its product puts out; one copy of each input serves the whole stack.
    Case("phi3", "all/1", AUTOCAST),
    Case("phi3", "all", AUTOCAST, packed=True, fused_mlp=False, sizes={"num_key_value_heads": 8}),
    Case("llama", "all/0", BF16, Adapters(3)),
    Case("llama", "all/1", AUTOCAST, Adapters(3)),
    Case("llama", "attention/0", FP32, FEW_TARGETS),
    Case("llama", "all", AUTOCAST, Adapters(3, ("up_proj",)), fused_mlp=False),
    Case("llama", "all/0", BF16, Adapters(3), four_bit=True),
    Case("qwen3", "all/1", FP32, Adapters(3), four_bit=True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.model_type}-{case.policy}-{case.precision}")
def test_a_layer_saves_what_is_planned_to_the_byte(case: Case) -> None:
    if case.four_bit:
        pytest.importorskip("bitsandbytes")
    planned = case.planned()
    if case.adapters is not None:  # on the host: what each product is multiplied with; and an empty place for an input
        names = case.adapters.targets or PROJECTIONS
        planned += 8 * sum(name in (ATTENTION if case.fused_mlp else PROJECTIONS) for name in names)
    assert case.measured() == pytest.approx(planned, abs=4 if case.adapters and not case.four_bit else 0)


@pytest.mark.parametrize(
    "case", [Case("mixtral", "all/0", sizes=EXPERTS), Case("qwen3_moe", "all/1", AUTOCAST, sizes=EXPERTS),
             Case("mixtral", "all", fused_mlp=False, sizes=EXPERTS)],
    ids=lambda case: f"{case.model_type}-{case.policy}",
)  # fmt: skip
def test_experts_save_about_what_is_planned(case: Case) -> None:
    assert case.measured() == pytest.approx(case.planned(), rel=0.02)


def settings_of(model_type: str, layers: int) -> dict[str, Any]:
    """A tiny model's config."""
    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]
    return with_layers(read_settings(tiny_config(kind, head_dim=HEAD_DIMS[0], decoder=True)), layers)


@pytest.mark.parametrize(
    ("model_type", "policy"),
    [  # latent attention; a loop over tokens; a state space, which widens the residual stream; no gate behind attention
        ("deepseek_v3", "all/0"), ("qwen3_next", "all/0"), ("mamba2", "input"), ("olmo2", "attention/1"),
        ("cohere2", "all/0"),  # a norm that saves its input in float32 alone
        *(pytest.param(name, policy, marks=pytest.mark.slow) for policy in ("all", "input")
          for name in ("gpt_oss", "glm4_moe", "falcon_h1", "nemotron_h", "gpt2", "falcon", "bamba")),
    ],
)  # fmt: skip
def test_layers_of_other_types_save_what_is_planned(model_type: str, policy: str) -> None:
    """By the bytes of the layers that a model twice as deep has besides."""
    few, more = (settings_of(model_type, layers) for layers in (2, 4))
    found = []
    for settings in (few, more):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**settings))
        model = model.to(torch.bfloat16).train()
        model.config.use_cache = False
        lowtide.patch(model)
        apply_policy(model, parse_policies(policy))
        found.append(left_by(model, B, T))
    job = job_of(more, T, batch_size=B)
    each = layer_costs(job, parse_policies(policy))  # type: ignore[arg-type]
    planned = sum(each[kind].saved for kind in job.model.kind_of[2:])
    states = 0 if policy.startswith("all") else 2 * torch.get_rng_state().numel()
    assert planned == pytest.approx(found[1] - found[0] - states, rel=0.03)


@pytest.mark.slow
def test_a_loop_over_tokens_is_read_in_short_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """What three short ones give for a longer sequence and a larger batch is what that takes itself."""
    job = job_of(settings_of("qwen3_next", 2), 1280, batch_size=3)
    policy = ActivationPolicy(keep="all", mlp_level=0)
    short = layer_costs(job, policy)
    monkeypatch.setattr(model_file, "POINTS", (1280,))
    itself = layer_costs(job, policy)
    assert [one.saved for one in short] == pytest.approx([one.saved for one in itself], rel=0.001)
    assert [one.forward for one in short] == pytest.approx([one.forward for one in itself], rel=0.02)
    assert [one.backward_bytes for one in short] == pytest.approx([one.backward_bytes for one in itself], rel=0.05)


def both_of(config: Any, text: str, tokens: int, *, keep_gradients: bool = False) -> list[tuple[int, int]]:
    """What a step of float32 holds after forward and at most in backward, by the allocator and by the planner."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    lowtide.patch(model)
    apply_policy(model, parse_policies(text))
    ids = torch.randint(1, config.vocab_size, (1, tokens))
    model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad(set_to_none=not keep_gradients)
    gc.collect()
    with track_allocations() as forward:
        loss = model(input_ids=ids, labels=ids).loss
    with track_allocations() as backward:
        loss.backward()
    left = forward.events[-1].total_bytes
    job = job_of(config.to_dict(), tokens, dtype=FP32, autocast=False, keep_gradients=keep_gradients)
    costs = StepCosts(job)
    there = costs.weights + costs.other + costs.all_gradients * keep_gradients
    phases = costs.phases(groups_of(text))
    most = max(phase.bytes for phase in phases if phase.name in ("backward", "embedding"))
    head = next(phase.bytes for phase in phases if phase.name == "head")
    return [(left, left + backward.peak_bytes), (head - there, most - there)]


@pytest.mark.parametrize(("tied", "keep_gradients"), [(True, True), (True, False), (False, True)])
def test_gradients_of_a_large_vocabulary_meet_as_planned(tied: bool, keep_gradients: bool) -> None:
    """The head's waits for the embedding's where both are of one tensor, beside what was accumulated before."""
    sizes = {**SIZES, "vocab_size": 20000, "num_hidden_layers": 2, "tie_word_embeddings": tied}
    config = transformers.AutoConfig.for_model("llama", **sizes)
    (_, measured), (_, planned) = both_of(config, "2 x all/0", 32, keep_gradients=keep_gradients)
    assert measured == pytest.approx(planned, rel=0.05)  # the tiny layers' activations are 4% of it


@pytest.mark.parametrize(("model_type", "level"), [("llama", 0), ("phi3", 1)])
def test_gradients_of_an_mlp_of_few_tokens_meet_as_planned(
    model_type: str, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of gate and up one after the other, that of a stacked projection whole with gate's."""
    monkeypatch.setattr(elementwise, "PIECE", 1)
    wide = {"hidden_size": 256, "head_dim": 32, "intermediate_size": 1024, "tie_word_embeddings": False}
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **wide, "num_hidden_layers": 2})
    (_, measured), (_, planned) = both_of(config, f"2 x all/{level}", 64, keep_gradients=True)
    one = 4 * 1024 * 256  # a weight's gradient
    assert measured == pytest.approx(planned, abs=0.6 * one)


def test_one_input_for_several_layers_saves_what_is_planned() -> None:
    """To the byte what forward saves less than with every layer's input, but for a random state of each layer."""
    text = "3 x input/1 every 2, 1 x input/1"
    sizes = {**SIZES, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 4, "tie_word_embeddings": False}
    config = transformers.AutoConfig.for_model("llama", **sizes)
    every, plain = (both_of(config, each, 512) for each in (text, "4 x input/1"))
    states = sum(n for policy, n in groups_of(text) if policy.every > 1) * torch.get_rng_state().numel()
    saved, most = [(a - b) - (c - d) for a, b, c, d in zip(*every, *plain, strict=True)]
    assert saved == states
    assert 0 <= most <= states
