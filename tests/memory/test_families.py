"""Policies on models of many families: layers found by structure, values unchanged, attention saved where it can be."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.errors import ArgumentValueError, UnsupportedError
from lowtide.memory import apply_policy, remove_policy
from memory.models import ALL, ATTENTION, INPUT, SHAPE, VOCAB, assert_same, counted_step, step

transformers = pytest.importorskip("transformers")

_SMALL = {**SHAPE, "num_hidden_layers": 3}
_NO_GROUPS = {k: v for k, v in _SMALL.items() if k not in ("num_key_value_heads", "head_dim")}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT2 = {
    "vocab_size": VOCAB, "n_embd": 24, "n_layer": 3, "n_head": 3, "n_positions": 64, "bos_token_id": 1,
    "eos_token_id": 2, "loss_type": "ForCausalLM",
}  # fmt: skip
_GEMMA3N = {
    **_SMALL, "intermediate_size": [40] * 3, "activation_sparsity_pattern": [0.0] * 3, "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"], "num_kv_shared_layers": 1,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "laurel_rank": 4, "altup_num_inputs": 2,
}  # fmt: skip
_QWEN3_NEXT = {
    **_SMALL, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
# model type -> (its own settings, calls of fused attention in a forward)
FAMILIES: dict[str, tuple[dict[str, Any], int]] = {
    "llama": ({**_SMALL, "tie_word_embeddings": True}, 3),
    "qwen3": (_SMALL, 3),
    "qwen3_moe": ({**_SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}, 3),
    "gemma2": (_SMALL, 0),  # a soft cap inside attention, which SDPA does not know
    "gemma3_text": ({**_SMALL, "sliding_window": 4}, 3),
    "gemma3n_text": (_GEMMA3N, 3),  # its last layer reads the keys of another one
    "gpt2": ({**_GPT2, "attn_pdrop": 0.0}, 3),
    "gpt2-dropout": (_GPT2, 0),  # in attention: the CPU's kernel has none
    "bert": ({**_NO_GROUPS, **_NO_DROPOUT, "is_decoder": True}, 3),
}


def build(name: str, settings: dict[str, Any]) -> Any:
    """A tiny random model with dropout everywhere that its config knows one."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name.partition("-")[0], **settings)
    implementation = "eager" if name == "gemma2" else "sdpa"
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).train()


def assert_near(got: tuple[Tensor, dict[str, Tensor]], want: tuple[Tensor, dict[str, Tensor]]) -> None:
    """To rounding: attention in matmuls of odd sizes depends on where its operands lie in memory."""
    torch.testing.assert_close(got[0], want[0])
    assert got[1].keys() == want[1].keys()
    for name, gradient in got[1].items():
        assert (gradient - want[1][name]).norm() <= 1e-6 * want[1][name].norm() + 1e-9, name


@pytest.mark.parametrize(
    ("name", "padded"), [*((name, False) for name in FAMILIES), ("llama", True), ("gemma3_text", True), ("bert", True)]
)
def test_family(name: str, padded: bool, ids: Tensor) -> None:
    settings, expected = FAMILIES[name]
    model = build(name, settings)
    stock = copy.deepcopy(model)
    mask = torch.ones_like(ids)
    mask[0, -4:] = 0
    more = {"attention_mask": mask} if padded else {}
    kept, want = counted_step(stock, ids, **more)
    assert kept == expected
    report = apply_policy(model, INPUT)
    assert len(report.policies) == 3
    calls, got = counted_step(model, ids, **more)
    assert calls == 2 * kept
    (assert_same if kept else assert_near)(got, want)
    apply_policy(model, ATTENTION)
    if kept < 3:  # dropout or a mask that the CPU's kernel does not know: nothing is recomputed in silence
        with pytest.raises(UnsupportedError, match=r"\.0: expected a fused attention operator .* keep='input'"):
            step(model, ids, **more)
    else:
        calls, got = counted_step(model, ids, **more)
        assert calls == kept
        assert_same(got, want)
    remove_policy(model)
    assert all(type(a) is type(b) for a, b in zip(model.modules(), stock.modules(), strict=True))


def test_layers_of_linear_attention_and_their_cache(ids: Tensor) -> None:
    """transformers makes them a cache in training too, of layers that have no length."""
    model = build("qwen3_next", _QWEN3_NEXT)
    stock = copy.deepcopy(model)
    want = step(stock, ids, use_cache=True)
    apply_policy(model, [INPUT, ATTENTION, INPUT])
    calls, got = counted_step(model, ids, use_cache=True)
    assert calls == 1
    assert_near(got, want)
    for policies in ([INPUT, ALL, ALL], [ALL, INPUT, ALL]):
        apply_policy(model, policies)
        filled = stock(input_ids=ids, use_cache=True).past_key_values
        with pytest.raises(UnsupportedError, match="a cache that holds keys"):
            model(input_ids=ids, past_key_values=filled)
        assert_near(step(model, ids, use_cache=True), want)


def test_an_encoder_and_a_decoder(ids: Tensor) -> None:
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=24, d_kv=8, d_ff=40, num_layers=3, num_heads=3, decoder_start_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).train()
    want = step(model, ids, labels=ids.flip(1))
    with pytest.raises(ArgumentValueError, match=r"'encoder\.block' and 'decoder\.block' of 3 each"):
        apply_policy(model, INPUT)
    runs = {"encoder": 0, "decoder": 0}
    for part in runs:
        apply_policy(getattr(model, part), INPUT)
        getattr(model, part).block[1].layer[0].register_forward_hook(
            lambda *_, part=part: runs.update({part: runs[part] + 1})
        )
    assert_near(step(model, ids, labels=ids.flip(1)), want)
    assert runs == {"encoder": 2, "decoder": 2}
    remove_policy(model)
    assert_near(step(model, ids, labels=ids.flip(1)), want)
    assert runs == {"encoder": 3, "decoder": 3}
