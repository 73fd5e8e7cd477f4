"""A tiny random model of any transformers type: its default config, shrunk by what its settings are called.

The rules are about words that configs share (layers, heads, experts, ranks), not about types. A width is 32, 2 heads have
16 each, and settings that must agree with these do; a config whose settings agree in some other way is not built.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

# A prime, so that an allocation of so many columns is seen for what it is.
VOCAB = 1009
WIDTH = 32
HEADS = 2
HEAD_DIM = WIDTH // HEADS
MAX_LAYERS = 4

# The first pattern that a setting's whole name matches says what becomes of it; None: it stays.
_RULES: tuple[tuple[str, int | Callable[[int], int] | None], ...] = (
    (r".*(dropout|drop_rate|pdrop|layerdrop|drop_path).*", None),
    (r"(type|task_type)_vocab_size|.*(patch_size|image_size|num_channels|in_channels)|.*positions?(_embeddings)?", None),
    (r".*vocab_size.*|num_embeddings", lambda v: min(v, VOCAB)),
    (r".*(experts_per_tok(en)?|experts_per_token|num_selected_experts|moe_top_?k|top_k_experts|expert_top_k)", lambda v: min(v, 2)),
    (r".*(n_group|n_groups|topk_group|num_expert_groups?|ngroups)", lambda v: min(v, 1)),
    (r".*shared_experts?(_num)?|zero_expert_num", lambda v: min(v, 1)),
    (r".*(num_experts|local_experts|routed_experts|moe_num_experts|ffn_num_experts|n_experts|num_routed_experts)", lambda v: min(v, 4)),
    (r"first_k_dense_replace|num_dense_layers|.*num_nextn_predict_layers|num_kv_shared_layers", lambda v: min(v, 1)),
    (r"(linear|mamba|swa|sliding|cross|index|indexer|num|n|encoder|decoder|conf)?_?(num|n)?_?(kv|key_value|query)_?(groups|heads)", lambda v: v),
    (r"(mamba|ssm)_(n|num)_heads", 2 * HEADS),
    (r".*heads?|attention_heads", lambda v: min(v, HEADS)),
    (r"qk_(nope|rope)_head_dim|rotary_dim|indexer?_rope_dim|qk_rope_dim", HEAD_DIM // 2),
    (r".*(head_dim|d_head|dim_head|headdim|head_size|d_kv|kv_channels|query_pre_attn_scalar)", HEAD_DIM),
    (r".*(lora_rank|_rank)", HEAD_DIM),
    (r".*(state_size|d_state)", HEAD_DIM),
    (r"mamba_d_ssm", 2 * WIDTH),
    (r".*(intermediate|ffn|feed_forward|mlp_dim|d_ff|n_inner|d_inner|shared_expert_dim|ffn_dim).*(size|dim|hidden|d_ff|n_inner|d_inner)?", 2 * WIDTH),
    (r".*(hidden_size|d_model|n_embd|embed_dim|embedding_size|embedding_dim|emb_dim|hidden_dim|model_dim|lru_width|hidden_size_per_layer_input|proj_dim|projection_dim|attention_dim)", WIDTH),
    (r".*(output_dim|input_dim|projection_hidden_dim|num_pos_feats|token_embed_dim|word_embed_proj_dim)", WIDTH),
    (r".*(query_length|num_query_tokens|num_latents)", lambda v: min(v, 4)),
)  # fmt: skip
_LAYERS = re.compile(
    r".*(num_hidden_layers|n_layers?|num_layers|(encoder|decoder)_layers|depth|num_block(s|_layers)|num_layers_per_stack)"
)
_TOKEN = re.compile(r".*(token_id|token_index|token_ids|_id|_index)")
_ORDINARY = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 2}
# Settings that the whole model needs and a default leaves to a checkpoint's config.
_MISSING = {"head_dim": HEAD_DIM, "num_key_value_heads": HEADS, "num_experts_per_tok": 2, "n_routed_experts": 4}
_DROPOUT = re.compile(r".*(dropout|drop_rate|pdrop|layerdrop|drop_path|jitter).*")


def tiny_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a config, as `to_dict` gives them, those of a tiny model."""
    kept = _kept_layers(values)
    layers = len(kept) if kept else 2
    counts = {v for name, v in values.items() if _LAYERS.fullmatch(name) and type(v) is int}
    heads = next(
        (v for name, v in values.items() if re.fullmatch(r"n_heads?|num_(attention_)?heads", name) and type(v) is int),
        None,
    )
    tokens = iter(range(VOCAB - 1, 0, -1))

    def one(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            if any(not isinstance(key, str) for key in value) or name == "per_layer_config":
                return per_layer(value) if name == "per_layer_config" else value
            return _rope(value) if "rope" in name else tiny_values(value)
        if type(value) is float:
            return 0.0 if _DROPOUT.fullmatch(name) else value
        if isinstance(value, list | tuple):
            return several(name, list(value))
        if value is None:
            return _MISSING.get(name)
        if type(value) is not int:
            return value
        if name == "head_dim" and value == values.get("qk_rope_head_dim"):
            return HEAD_DIM // 2
        if name == "num_heads" and "expand" in values:
            return 2 * HEADS
        if name in _ORDINARY:
            return _ORDINARY[name]
        if _TOKEN.fullmatch(name) and value > 2:
            return next(tokens)
        if _LAYERS.fullmatch(name):
            return min(value, layers)
        return _ruled(name, value, heads)

    def per_layer(value: Mapping[Any, Any]) -> dict[Any, Any]:
        own = {int(at): settings for at, settings in value.items()}
        return {at: tiny_values(own[old]) for at, old in enumerate(kept or range(layers)) if old in own}

    def several(name: str, value: list[Any]) -> Any:
        if kept and len(value) in counts and len(value) > layers:
            return [one(name, value[i]) if type(value[i]) is int and not _is_indices(name) else value[i] for i in kept]
        if value and all(type(v) is int for v in value):
            if _is_indices(name):
                return sorted({min(v, layers - 1) for v in value})
            if "token_id" in name:
                return [2] if name in _ORDINARY else [next(tokens) for _ in value]
        return value

    return {name: one(name, value) for name, value in values.items()}


def _is_indices(name: str) -> bool:
    return re.fullmatch(r".*(index(es)?|indices|layers|layer_ids|idxs?|_layer)", name) is not None


def _ruled(name: str, value: int, heads: int | None) -> int:
    if re.fullmatch(r".*(kv|key_value)_(heads|groups)|.*kv_heads|num_query_groups", name):
        return HEADS if value == heads or value == 0 else 1
    for pattern, rule in _RULES:
        if re.fullmatch(pattern, name):
            if rule is None:
                return value
            return rule(value) if callable(rule) else (min(value, rule) if value <= 0 else rule)
    return value


def _kept_layers(values: Mapping[str, Any]) -> list[int]:
    """Return which layers stay: the first of each kind that the lists with an entry a layer tell apart, at least two."""
    count = next(
        (v for name, v in values.items() if re.fullmatch(r"num_hidden_layers|n_layers?|num_layers", name)), None
    )
    if type(count) is not int or count <= 2:
        return []
    lists = [v for v in values.values() if isinstance(v, list | tuple) and len(v) == count]
    kept, seen = [], set()
    for i in range(count):
        kinds = {(at, str(entries[i])) for at, entries in enumerate(lists)}
        if kinds - seen and len(kept) < MAX_LAYERS:
            kept.append(i)
            seen |= kinds
    return kept if len(kept) >= 2 else sorted({*kept, 0, count - 1})[:2]


def _rope(values: Mapping[str, Any]) -> dict[str, Any]:
    def one(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return _rope(value)
        if name.endswith("section") and isinstance(value, list | tuple):  # they share half a head
            shares = [max(1, HEAD_DIM // 2 * v // sum(value)) for v in value]
            return [HEAD_DIM // 2 - sum(shares[1:]), *shares[1:]]
        if name.endswith("_factor") and isinstance(value, list | tuple):
            return [float(v) for v in value][: HEAD_DIM // 2]
        return value

    return {name: one(name, value) for name, value in values.items()}


def tiny_config(config_class: Any) -> Any:
    """Return the config of a tiny model of that class."""
    values = {
        k: v
        for k, v in tiny_values(config_class().to_dict()).items()
        if k not in ("transformers_version", "dtype", "architectures")
    }
    config = config_class(**values)
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        if part is not None:
            part.use_cache = False
    return config


def tiny_model(model_class: Any, config_class: Any, *, seed: int) -> Any:
    """Return a tiny model in float32 whose random weights are large enough for losses to differ from log(V)."""
    torch.manual_seed(seed)
    model = model_class.from_config(tiny_config(config_class))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.nan_to_num_().add_(torch.randn_like(parameter) * 0.1)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.float().train()
