"""A model's shape, read from its config by the names of the fields: where the planner's arithmetic starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from typing import Any

from lowtide.errors import ArgumentValueError, message
from lowtide.memory.planner.four_bit import BYTES, compute_dtype, four_bit
from lowtide.memory.planner.settings import is_module, read_settings
from lowtide.memory.planner.traced import MEASURE, TracedLayers, trace

# Fields of parts of a layer whose bytes the planner has no formula for: layers of a config that sets one are traced.
_UNPLANNED = (
    "kv_lora_rank", "q_lora_rank", "ssm_state_size", "state_size", "mamba_d_state", "linear_num_value_heads",
    "cross_attention_layers", "n_shared_experts", "shared_expert_intermediate_size", "first_k_dense_replace",
    "mlp_only_layers", "num_nextn_predict_layers", "is_encoder_decoder", "num_kv_shared_layers",
    "hidden_size_per_layer_input", "attn_output_gate", "quantization_config",
)  # fmt: skip
# Activations, as configs name them, that `lowtide.swiglu_mlp` has.
_FUSED = ("silu", "swish", "gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh", "gelu_accurate")
_JOINED = {"gate_up_proj", "down_proj"}
_PROJECTIONS = {"gate_proj", "up_proj", "down_proj"}
_ATTENTIONS = ("full_attention", "sliding_attention")


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """What all models of a type share and no config gives."""

    layer_norms: int = 2  # over the residual stream, in each layer: 4 with norms behind attention and MLP
    head_norms: bool = False  # over each query and key head
    heads_first: bool = False  # those norms see [heads, tokens], so that attention's output is saved in both orders
    stacked: bool = False  # one GEMM for queries, keys and values, and one for gate and up


@dataclass(frozen=True, kw_only=True)
class _Kind(_Layout):
    """A model type: its layout, and the names of its config's fields."""

    qkv_bias: bool | None = None  # None: the config's attention_bias, for the output projection too
    expert_fields: tuple[str, ...] = ()  # names of the number of experts, where the layers are mixtures
    expert_width: str = "intermediate_size"
    activation: str = "hidden_act"


_PLAIN = _Kind()
KINDS = {
    "llama": _PLAIN,
    "mistral": _PLAIN,
    "qwen2": _Kind(qkv_bias=True),
    "qwen3": _Kind(head_norms=True),
    "phi3": _Kind(stacked=True),
    "gemma": _PLAIN,
    "gemma2": _Kind(layer_norms=4, activation="hidden_activation"),
    "gemma3_text": _Kind(layer_norms=4, head_norms=True, heads_first=True, activation="hidden_activation"),
    "mixtral": _Kind(expert_fields=("num_local_experts",)),
    "qwen3_moe": _Kind(
        head_norms=True, expert_fields=("num_local_experts", "num_experts"), expert_width="moe_intermediate_size"
    ),
}


@dataclass(frozen=True, kw_only=True)
class ModelShape(_Layout):
    """The sizes of a decoder-only language model that memory and time follow from.

    All its layers are alike, and the planner has formulas for them; or they are ``traced``.
    """

    model_type: str  # as in the config
    layers: int
    hidden: int  # width of the residual stream
    heads: int  # of queries, in each layer
    kv_heads: int
    head_dim: int
    intermediate: int  # width of the MLP, or of one expert
    vocab: int  # rows of the output layer
    tied: bool  # embedding and output layer are one tensor
    qkv_bias: bool = False
    output_bias: bool = False  # of attention's output projection
    mlp_bias: bool = False
    experts: int = 0  # of a layer; 0: a plain MLP
    experts_per_token: int = 0
    windows: tuple[int, ...] = ()  # tokens that each layer's attention looks back on; 0: all
    capped_scores: bool = False  # attention has a soft cap
    positions: int = 0  # max_position_embeddings; 0: the config has none
    activation: str = ""  # of the MLP; empty: not where the planner looks for it, and a fused one is assumed
    stock_mlp: str = ""  # why `lowtide.patch` does not fuse the MLPs; empty: it does
    four_bit: str = ""  # how the layers' linear layers are in 4 bits; empty: they are not
    compute_dtype: str = ""  # that these layers compute in; empty: the model's
    part_of: str = ""  # the type of the larger model, with vision or audio, whose text part this is
    traced: TracedLayers | None = None  # what formulas lack is read from layers of the model itself

    @property
    def kind_of(self) -> tuple[int, ...]:
        """Return the kind of each layer; without ``traced`` there is one."""
        return (0,) * self.layers if self.traced is None else self.traced.kind_of

    @property
    def params_of_layers(self) -> tuple[int, ...]:
        """Return the parameters of each layer."""
        return (self.layer_params,) * self.layers if self.traced is None else self.traced.layer_params

    @property
    def has_levels(self) -> bool:
        """Return whether `lowtide.patch` fuses an MLP in every layer, whose level a policy can set."""
        return not self.stock_mlp if self.traced is None else self.traced.levels

    @property
    def widest_window(self) -> int:
        """Return the tokens that the layer which looks back the furthest sees; 0: all."""
        return 0 if 0 in self.windows else max(self.windows, default=0)

    @property
    def query_width(self) -> int:
        """Return the size of a token's queries, and of attention's output."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Return the size of a token's keys, and of its values."""
        return self.kv_heads * self.head_dim

    @property
    def projection_params(self) -> int:
        """Return the parameters of attention's four projections."""
        wide = self.query_width + 2 * self.kv_width
        biases = wide * self.qkv_bias + self.hidden * self.output_bias
        return self.hidden * (wide + self.query_width) + biases

    @property
    def mlp_params(self) -> int:
        """Return the parameters of a layer's MLP, or of its router and experts; 0 for those of ``traced`` layers."""
        if self.traced is not None:
            return 0
        one = 3 * self.hidden * self.intermediate + (2 * self.intermediate + self.hidden) * self.mlp_bias
        return self.experts * (one + self.hidden) if self.experts else one

    @property
    def layer_params(self) -> int:
        """Return the parameters of one layer, of ``traced`` ones the mean."""
        if self.traced is not None:
            return sum(self.traced.layer_params) // self.layers
        norms = self.layer_norms * self.hidden + 2 * self.head_dim * self.head_norms
        return self.projection_params + norms + self.mlp_params

    @property
    def packed_params(self) -> int:
        """Return the parameters that are in 4 bits: those of all linear layers but the output layer, and no experts."""
        if not self.four_bit or self.traced is not None:
            return self.traced.linear_params if self.four_bit and self.traced is not None else 0
        biases = (self.query_width + 2 * self.kv_width) * self.qkv_bias + self.hidden * self.output_bias
        one = self.projection_params - biases + 3 * self.hidden * self.intermediate * (not self.experts)
        return self.layers * one

    @property
    def packed_bytes(self) -> int:
        """Return the bytes of these, with their scales."""
        return int(self.packed_params * BYTES[self.four_bit])

    @property
    def vocab_params(self) -> int:
        """Return the parameters of the output layer, and of the embedding."""
        return self.vocab * self.hidden

    @property
    def params(self) -> int:
        """Return all parameters."""
        if self.traced is not None:
            return self.traced.params
        return self.layers * self.layer_params + self.vocab_params * (1 if self.tied else 2) + self.hidden

    @property
    def token_mlp_width(self) -> int:
        """Return the MLP width that one token passes through."""
        return self.intermediate * max(1, self.experts_per_token)


def read_shape(model_or_config: Any) -> ModelShape:
    """Return the shape of a model, from its config.

    Args:
        model_or_config: As for `plan_memory`, or the path of the folder of a config.json.

    Raises:
        ArgumentTypeError: It is something else.
        ArgumentValueError: The config lacks a field, or has one that cannot be planned; the error names it.
    """
    if isinstance(model_or_config, ModelShape):
        return model_or_config
    model = model_or_config if is_module(model_or_config) else None
    settings = read_settings(model_or_config)
    try:
        return _by_formulas(settings, model)
    except _NoFormulaError as error:
        lacking: ArgumentValueError = error
    except ArgumentValueError as error:
        if settings["model_type"] in KINDS:
            raise
        lacking = error
    if find_spec("transformers") is None:
        raise lacking
    shape = _by_layers(settings)
    if model is not None:
        _compare(shape, model)
    return shape


class _NoFormulaError(ArgumentValueError):
    """A config sets a field of a part that the planner has no formula for."""


def _by_formulas(settings: Mapping[str, Any], model: Any) -> ModelShape:
    """Return the shape of a model whose layers the formulas describe, compared with the model if its type is new."""
    shape = _from_settings(settings)
    if model is None and shape.model_type not in KINDS:
        model = _on_meta(settings, shape.model_type)
    if model is None:
        return shape
    _compare(shape, model)
    children = [{name for name, _ in module.named_children()} for module in model.modules()]
    named = sum(names >= _PROJECTIONS or names >= _JOINED for names in children)
    if named < shape.layers and not shape.stock_mlp and not shape.experts:
        return replace(shape, stock_mlp=f"they have no {', '.join(sorted(_PROJECTIONS))}")
    return shape


def _by_layers(settings: Mapping[str, Any]) -> ModelShape:
    """Return the shape of a model whose layers are traced; sizes that its config lacks are 0."""
    traced = trace(settings)
    from transformers import AutoConfig

    own_names = AutoConfig.for_model(**settings).get_text_config().attribute_map  # n_head for num_attention_heads, say

    def size(name: str, default: int = 0) -> int:
        value = settings.get(name, settings.get(own_names.get(name, name)))
        return value if type(value) is int and value > 0 else default

    heads, layers = size("num_attention_heads"), len(traced.kind_of)
    return ModelShape(
        model_type=str(settings["model_type"]),
        layers=layers,
        hidden=traced.hidden,
        heads=heads,
        kv_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", traced.hidden // heads if heads else 0),
        intermediate=size("intermediate_size"),
        vocab=traced.vocab,
        tied=traced.tied,
        windows=_windows_of(settings, layers),
        capped_scores=bool(settings.get("attn_logit_softcapping")),
        positions=size("max_position_embeddings"),
        four_bit=four_bit(settings),
        compute_dtype=compute_dtype(settings),
        part_of=str(settings.get("part_of", "")),
        traced=traced,
    )


def _from_settings(settings: Mapping[str, Any]) -> ModelShape:
    model_type = str(settings["model_type"])
    kind = KINDS.get(model_type, _PLAIN)
    experts = next((_size(settings, name) for name in kind.expert_fields if settings.get(name) is not None), 0)
    packed = four_bit(settings)
    for name in _UNPLANNED:
        if settings.get(name) and not (packed and name == "quantization_config"):
            hint = f"The planner has no formula for this part of {model_type}. {MEASURE}"
            raise _NoFormulaError(message(name, "unset", f"{settings[name]!r}", hint))
    if settings.get("decoder_sparse_step", 1) != 1:
        raise _NoFormulaError(message("decoder_sparse_step", "1: all layers alike", settings["decoder_sparse_step"]))
    heads, hidden = _size(settings, "num_attention_heads"), _size(settings, "hidden_size")
    layers = _size(settings, "num_hidden_layers")
    if kind.expert_fields and not experts:
        raise ArgumentValueError(message(kind.expert_fields[0], "the number of experts in the config", "none"))
    kv_heads = _size(settings, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ArgumentValueError(message("num_key_value_heads", f"a divisor of the {heads} heads", str(kv_heads)))
    experts_per_token = _size(settings, "num_experts_per_tok") if experts else 0
    if experts_per_token > experts:
        expected = f"at most the {experts} experts of a layer"
        raise ArgumentValueError(message("num_experts_per_tok", expected, str(experts_per_token)))
    biased = bool(settings.get("attention_bias", False))
    activation = str(settings.get(kind.activation) or (_FUSED[0] if model_type in KINDS else ""))
    stock_mlp = f"their activation is {activation}" if activation and activation not in _FUSED else ""
    return ModelShape(
        **{field.name: getattr(kind, field.name) for field in fields(_Layout)},
        model_type=model_type,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_size(settings, "head_dim", None if hidden % heads else hidden // heads),
        intermediate=_size(settings, kind.expert_width),
        vocab=_size(settings, "vocab_size"),
        tied=_tied(settings),
        qkv_bias=biased if kind.qkv_bias is None else kind.qkv_bias,
        output_bias=biased and kind.qkv_bias is None,
        mlp_bias=bool(settings.get("mlp_bias", False)),
        experts=experts,
        experts_per_token=experts_per_token,
        windows=_windows(settings, layers),
        capped_scores=bool(settings.get("attn_logit_softcapping")),
        positions=int(settings.get("max_position_embeddings") or 0),
        activation=activation,
        stock_mlp=stock_mlp,
        four_bit=packed,
        compute_dtype=compute_dtype(settings),
        part_of=str(settings.get("part_of", "")),
    )


def _windows(settings: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    types = settings.get("layer_types")
    windowed = settings.get("sliding_window") and settings.get("use_sliding_window") is not False
    if types and windowed and (len(types) != layers or set(types) - set(_ATTENTIONS)):
        expected = f"{layers} times one of {', '.join(_ATTENTIONS)}"
        raise ArgumentValueError(message("layer_types", expected, f"{types}"))
    return _windows_of(settings, layers)


def _windows_of(settings: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the window of each layer, 0 where its type is none that has one."""
    window = settings.get("sliding_window")
    if type(window) is not int or window < 1 or settings.get("use_sliding_window") is False:
        return (0,) * layers
    types = settings.get("layer_types") or ["sliding_attention"] * layers
    return tuple(window * (name == "sliding_attention") for name in types) if len(types) == layers else (0,) * layers


def _size(settings: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = default if settings.get(name) is None else settings[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        hint = f"The planner is for decoders like Llama; {settings['model_type']!r} may be another. {MEASURE}"
        expected = "a whole number of at least 1 in the config"
        raise ArgumentValueError(message(name, expected, f"{value!r}", hint if value is None else ""))
    return value


def _tied(settings: Mapping[str, Any]) -> bool:
    value = settings.get("tie_word_embeddings")
    if not isinstance(value, bool):
        hint = "Write it into the config, or install transformers, which has the default."
        raise ArgumentValueError(message("tie_word_embeddings", "true or false in the config", f"{value!r}", hint))
    return value


def _on_meta(settings: Mapping[str, Any], model_type: str) -> Any:
    """Return the model without weights: its parameters are counted, since its type is not among `KINDS`.

    Raises:
        ArgumentValueError: transformers is not installed, or cannot build it.
    """
    import torch

    try:
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    except Exception as error:  # an unknown type, or checks without a common base
        expected = f"one of {', '.join(KINDS)}, or one that transformers can build"
        why = " ".join(str(error).split())[:120]
        raise ArgumentValueError(message("model_type", expected, f"{model_type!r} ({why})")) from error


def _compare(shape: ModelShape, model: Any) -> None:
    """Raise where a model's parameters are frozen, or others than its config says."""
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    if frozen:
        hint = "For a model with adapters pass its config, and adapters=lowtide.memory.Adapters(rank)."
        raise ArgumentValueError(message("model_or_config", "all parameters trained", f"{frozen[0]} frozen", hint))
    found = sum(parameter.numel() for parameter in model.parameters())
    if found != shape.params:
        expected = f"layers of attention, norms and a gated MLP, {shape.params:,} parameters by its config"
        hint = f"The planner has no formula for some part of its layers. {MEASURE}"
        if shape.traced is not None:
            expected, hint = f"the {shape.params:,} parameters of its config's model", f"It has other parts. {MEASURE}"
        raise ArgumentValueError(message("model_type", expected, f"{shape.model_type!r} with {found:,}", hint))
