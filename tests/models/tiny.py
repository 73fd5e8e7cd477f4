"""A tiny random model of any transformers type: its default config, shrunk by what its settings are called.

The rules are about words that configs share (layers, heads, experts, ranks), not about types. There are 2 heads, a
width is what they have together, and settings that must agree with these do. What a config needs beyond that is in
`HINTS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

# A prime, so that an allocation of so many columns is seen for what it is.
VOCAB = 1009
HEADS = 2
# Of each head; some types split a head into parts of fixed sizes, for which only the larger ones have room.
HEAD_DIMS = (16, 64, 128)
MAX_LAYERS = 4

_Rule = Callable[[int, int], int]  # (the default, a head's size) -> the tiny value


def _at_most(most: int) -> _Rule:
    return lambda value, _: min(value, most)


def _heads_together(times: int) -> _Rule:
    return lambda value, head_dim: min(value, 0) or HEADS * head_dim * times  # 0 and below: without it


# A setting is changed by the first pattern that matches its whole name; any other setting stays.
_RULES: tuple[tuple[str, _Rule], ...] = (
    (r"(type|task_type)_vocab_size|chunk_size.*|.*positions?(_embeddings)?", lambda v, _: v),
    (r".*(patch_size|image_size|channels)", lambda v, _: v),
    (r"ffn_expansion|num_filters", _at_most(2)),  # of a width, and what each stage of convolutions doubles
    (r".*vocab_size.*|num_embeddings", _at_most(VOCAB)),
    (r".*(experts_per_tok(en)?|num_selected_experts|moe_top_?k|moe_k|expert_top_k)|top_k_experts", _at_most(2)),
    (r".*(n_group|n_groups|topk_group|num_expert_groups?|ngroups)", _at_most(1)),
    (r".*shared_experts?(_num)?|zero_expert_num", _at_most(1)),
    (r".*(num|local|routed|n|moe_num)_experts", _at_most(4)),
    (r"first_k_dense_replace|num_dense_layers|.*num_nextn_predict_layers|num_kv_shared_layers", _at_most(1)),
    (r"(mamba_)?d_head", lambda _, head_dim: head_dim),
    (r"(mamba|ssm)_(n|num)_heads", lambda *_: 2 * HEADS),
    (r".*heads?", _at_most(HEADS)),
    (r"qk_(nope|rope)_head_dim|rotary_dim|indexer?_rope_dim|qk_rope_dim", lambda v, head_dim: min(v, head_dim // 2)),
    (r".*(head_dim|dim_head|headdim|head_size|d_kv|kv_channels|pre_attn_scalar|rank)", lambda _, head_dim: head_dim),
    (r".*(state_size|d_state)", lambda _, head_dim: head_dim),
    (r"mamba_d_ssm|.*(intermediate|ffn|feed_forward|mlp_dim|d_ff|n_inner|d_inner).*", _heads_together(2)),
    (r".*(hidden_size|d_model|n_embd|embed_dim|embedding_size|embedding_dim|emb_dim|hidden_dim)", _heads_together(1)),
    (r".*(model_dim|lru_width|per_layer_input|proj_dim|projection_dim|attention_dim|output_dim)", _heads_together(1)),
    (r".*(input_dim|num_pos_feats|token_embed_dim|adapter_in_dim)", _heads_together(1)),
    (r".*(query_length|num_query_tokens|num_latents)", _at_most(4)),
)  # fmt: skip
_LAYERS = re.compile(
    r".*(num_hidden_layers|n_layers?|num_layers|(encoder|decoder)_layers|depth|num_blocks|num_layers_per_stack)"
)
_MAIN_LAYERS = re.compile(r"num_hidden_layers|n_layers?|num_layers")
_INDICES = re.compile(r".*(index(es)?|indices|layers|layer_ids|idxs?|_layer)")
_TOKEN = re.compile(r".*(token_id|token_index|token_ids|_id|_index)")
_NOISE = re.compile(r".*(dropout|drop_rate|pdrop|layerdrop|drop_path|jitter).*")
_ORDINARY = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 2}
# What a model cannot do without, where the default leaves it to a checkpoint's config.
_MISSING = {"num_key_value_heads": HEADS, "num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1}

# By type: settings that follow from nothing else.
HINTS: dict[str, dict[str, Any]] = {
    "codegen": {"n_head": 4},  # it splits them among four
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 1, "clip_qkv": 8.0}},
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local", "local"]},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 3},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 3},
    "xmod": {"default_language": "en_XX"},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "encoder-decoder": {"decoder_start_token_id": 1, "pad_token_id": 0},
}


def tiny_values(values: Mapping[str, Any], head_dim: int = HEAD_DIMS[0]) -> dict[str, Any]:
    """Return the settings of a config, as its ``to_dict`` gives them, as those of a tiny model."""
    shrinking = _Shrinking(values, head_dim)
    return {name: shrinking.one(name, value) for name, value in values.items()}


class _Shrinking:
    def __init__(self, values: Mapping[str, Any], head_dim: int) -> None:
        self.values, self.head_dim = values, head_dim
        self.kept = _kept_layers(values)
        self.layers = len(self.kept) or 2
        self.counts = {v for name, v in values.items() if _LAYERS.fullmatch(name) and type(v) is int}
        self.heads = next(
            (values[n] for n in ("n_head", "n_heads", "num_heads", "num_attention_heads") if n in values), None
        )
        self.tokens = iter(range(VOCAB - 1, 0, -1))

    def one(self, name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return self.mapping(name, value)
        if isinstance(value, list | tuple):
            return self.several(name, list(value))
        if value is None:
            return self.head_dim if name == "head_dim" else _MISSING.get(name)
        if isinstance(value, float) and _NOISE.fullmatch(name):
            return 0.0
        return self.number(name, value) if type(value) is int else value

    def number(self, name: str, value: int) -> int:
        if name in _ORDINARY:
            return _ORDINARY[name]
        if _TOKEN.fullmatch(name) and value > 2:
            return next(self.tokens)
        if _LAYERS.fullmatch(name):
            return min(value, self.layers)
        if name == "head_dim" and value == self.values.get("qk_rope_head_dim"):
            return self.head_dim // 2
        if name == "num_heads" and "expand" in self.values:
            return 2 * HEADS
        if re.fullmatch(r".*(kv|key_value)_(heads|groups)|num_query_groups", name):
            return HEADS if value in (0, self.heads) else 1
        return next((rule(value, self.head_dim) for pattern, rule in _RULES if re.fullmatch(pattern, name)), value)

    def several(self, name: str, value: list[Any]) -> Any:
        if self.kept and len(value) in self.counts and len(value) > self.layers:
            chosen = [value[i] for i in self.kept]
            return [self.number(name, v) if type(v) is int and not _INDICES.fullmatch(name) else v for v in chosen]
        if not all(type(v) is int for v in value):
            return value
        if "token_id" in name:
            return [2] if name in _ORDINARY else [next(self.tokens) for _ in value]
        if _INDICES.fullmatch(name):
            return sorted({min(v, self.layers - 1) for v in value})
        return value

    def mapping(self, name: str, value: Mapping[Any, Any]) -> Any:
        if name == "per_layer_config":
            own = {int(at): settings for at, settings in value.items()}
            kept = self.kept or range(self.layers)
            return {at: tiny_values(own[old], self.head_dim) for at, old in enumerate(kept) if old in own}
        if any(not isinstance(key, str) for key in value):  # names of classes, by their number
            return value
        return self.rope(value) if "rope" in name else tiny_values(value, self.head_dim)

    def rope(self, value: Mapping[str, Any]) -> dict[str, Any]:
        half = self.head_dim // 2

        def one(name: str, value: Any) -> Any:
            if isinstance(value, Mapping):
                return self.rope(value)
            if name.endswith("section") and isinstance(value, list | tuple):  # they share half a head
                shares = [max(1, half * v // sum(value)) for v in value]
                return [half - sum(shares[1:]), *shares[1:]]
            return value

        return {name: one(name, value) for name, value in value.items()}


def _kept_layers(values: Mapping[str, Any]) -> list[int]:
    """Return the layers that stay: at least two, the first of each kind by the lists with an entry per layer."""
    count = next((v for name, v in values.items() if _MAIN_LAYERS.fullmatch(name)), None)
    if type(count) is not int or count <= 2:
        return []
    lists = [v for v in values.values() if isinstance(v, list | tuple) and len(v) == count]
    kept: list[int] = []
    seen: set[Any] = set()
    for i in range(count):
        kinds = {(at, str(entries[i])) for at, entries in enumerate(lists)}
        if kinds - seen and len(kept) < MAX_LAYERS:
            kept.append(i)
            seen |= kinds
    return kept if len(kept) >= 2 else sorted({*kept, 0, count - 1})[:2]


def tiny_config(config_class: Any, *, head_dim: int, decoder: bool) -> Any:
    """Return the config of a tiny model; with ``decoder`` a type that can also be an encoder is none."""
    values = tiny_values(config_class().to_dict(), head_dim)
    for name in ("transformers_version", "dtype", "architectures"):
        values.pop(name, None)
    if decoder and "is_decoder" in values:
        values["is_decoder"] = True
    if values.get("is_encoder_decoder"):
        values = {"decoder_start_token_id": 1, "pad_token_id": 0, **values}
    values |= HINTS.get(config_class.model_type, {})
    config = config_class(**values)
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if part is not None:
            part.use_cache = False
    return config


def tiny_model(auto_class: Any, config_class: Any, *, head_dim: int, decoder: bool, seed: int) -> Any:
    """Return a tiny model in float32 whose random weights are large enough for losses to differ from log(V)."""
    torch.manual_seed(seed)
    model = auto_class.from_config(tiny_config(config_class, head_dim=head_dim, decoder=decoder)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.nan_to_num_().clamp_(-10, 10).add_(torch.randn_like(parameter) * 0.1)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.train()
