"""A model's shape: what its config says, and what the model shows when it is built without weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lowtide.errors import ArgumentValueError, message
from lowtide.plan.four_bit import BYTES, compute_dtype, four_bit
from lowtide.plan.settings import is_module, read_settings

MEASURE = "Measure its step instead, with `lowtide profile`."
_OTHER_DTYPE = "scalar type"  # in the error of an operator whose operands differ
_DEQUANTISED = ("mxfp4", "fp8")  # of gpt-oss, and of DeepSeek-V3 and others
_LETTERS = 180  # of what a model raised


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a causal language model that memory and time follow from; `meta_model` reads its layers' costs."""

    model_type: str  # as in the config
    config: str  # its fields, as JSON
    model_class: str
    attention: str  # transformers' implementation
    layers: int
    hidden: int  # width of the output layer's input
    heads: int  # of queries; 0: not in the config
    head_dim: int
    vocab: int  # rows of the output layer
    tied: bool  # embedding and output layer are one tensor
    params: int
    layer_params: tuple[int, ...]  # of each layer, without those that it shares with an earlier one
    kind_of: tuple[int, ...]  # of each layer: layers of one kind cost the same
    attends: bool  # every kind runs fused attention
    levels: bool  # every kind has an MLP that `lowtide.patch` fuses, whose level a policy can set
    linear_params: int  # the weights of the layers' linear layers
    largest_linear: int  # parameters of the largest of these
    experts: int = 0  # of a layer; 0: a plain MLP
    windows: tuple[int, ...] = ()  # tokens that each layer's attention looks back on; 0: all
    capped_scores: bool = False  # attention has a soft cap
    positions: int = 0  # max_position_embeddings; 0: the config has none
    four_bit: str = ""  # how the layers' linear layers are in 4 bits; empty: they are not
    compute_dtype: str = ""  # that these layers compute in; empty: the model's
    quantised: str = ""  # how the checkpoint has its weights, which are planned as loaded in the job's dtype
    part_of: str = ""  # the type of the larger model, with vision or audio, whose text part this is

    @property
    def widest_window(self) -> int:
        """Return the tokens that the layer which looks back the furthest sees; 0: all."""
        return 0 if 0 in self.windows else max(self.windows, default=0)

    @property
    def packed_params(self) -> int:
        """Return the parameters that are in 4 bits: those of all linear layers of the layers, and no experts."""
        return self.linear_params if self.four_bit else 0

    @property
    def packed_bytes(self) -> int:
        """Return the bytes of these, with their scales."""
        return int(self.packed_params * BYTES[self.four_bit])

    @property
    def vocab_params(self) -> int:
        """Return the parameters of the output layer, and of the embedding."""
        return self.vocab * self.hidden


def read_shape(model_or_config: Any) -> ModelShape:
    """Return the shape of a model, which is built on the meta device, where one layer of each kind runs.

    Args:
        model_or_config: As for `plan_memory`, or the path of the folder of a config.json.

    Raises:
        ArgumentTypeError: It is something else.
        ArgumentValueError: transformers is not installed, the config lacks a field or has one that cannot be planned,
            or the model cannot be built or run so; the error says what the user can do.
    """
    if isinstance(model_or_config, ModelShape):
        return model_or_config
    shape = _read(read_settings(model_or_config))
    if is_module(model_or_config):
        _compare(shape, model_or_config)
    return shape


def _read(settings: Mapping[str, Any]) -> ModelShape:
    model_type, quantised = str(settings["model_type"]), _quantised(settings)
    packed, computes = four_bit(settings), compute_dtype(settings)
    settings = {name: value for name, value in settings.items() if name != "quantization_config"}
    import torch
    from transformers import AutoConfig

    from lowtide.plan.meta_model import meta_model, readings_of
    from lowtide.plan.readings import LayerRun

    config = json.dumps(settings, default=str, sort_keys=True)
    with refused(model_type):
        dtype = torch.bfloat16
        try:
            tried = readings_of(LayerRun(config, dtype))
        except RuntimeError as error:
            if _OTHER_DTYPE not in str(error):
                raise
            dtype = torch.float32
            tried = readings_of(LayerRun(config, dtype))
        names = AutoConfig.for_model(**settings).get_text_config().attribute_map  # n_head for num_attention_heads, say
    meta = meta_model(config, dtype)
    head: Any = meta.model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if weight is None or weight.dim() != 2:
        expected = "a model with an output layer that is one linear layer"
        raise ArgumentValueError(message("model_type", expected, f"{model_type!r} without", MEASURE))

    def size(name: str, default: int = 0) -> int:
        value = settings.get(name, settings.get(names.get(name, name)))
        return value if type(value) is int and value > 0 else default

    heads, layers = size("num_attention_heads"), len(meta.kind_of)
    return ModelShape(
        model_type=model_type,
        config=config,
        model_class=meta.name,
        attention=meta.attention,
        layers=layers,
        hidden=weight.shape[1],
        heads=heads,
        head_dim=size("head_dim", weight.shape[1] // heads if heads else 0),
        vocab=weight.shape[0],
        tied=meta.model.get_input_embeddings().weight is weight,
        params=meta.params,
        layer_params=meta.layer_params,
        kind_of=meta.kind_of,
        attends=all(reading.attended > 0 for reading in tried),
        levels=meta.has_levels,
        linear_params=sum(meta.linears),
        largest_linear=max(meta.linears, default=0),
        experts=meta.experts,
        windows=_windows(settings, layers),
        capped_scores=bool(settings.get("attn_logit_softcapping")),
        positions=size("max_position_embeddings"),
        four_bit=packed,
        compute_dtype=computes,
        quantised=quantised,
        part_of=str(settings.get("part_of", "")),
    )


def _windows(settings: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the window of each layer, 0 where its type is none that has one."""
    window = settings.get("sliding_window")
    if type(window) is not int or window < 1 or settings.get("use_sliding_window") is False:
        return (0,) * layers
    types = settings.get("layer_types") or ["sliding_attention"] * layers
    return tuple(window * (name == "sliding_attention") for name in types) if len(types) == layers else (0,) * layers


def _quantised(settings: Mapping[str, Any]) -> str:
    """Return how a checkpoint has its weights where they can be trained once loaded in 16 bits, "" for as usual.

    Raises:
        ArgumentValueError: They stay quantised, and not by bitsandbytes in 4 bits.
    """
    config = settings.get("quantization_config")
    if not config or four_bit(settings):
        return ""
    method = config.get("quant_method") if isinstance(config, Mapping) else config
    method = str(getattr(method, "value", method))  # of transformers' enumeration
    if method not in _DEQUANTISED:
        loaded = ", ".join(_DEQUANTISED)
        expected = f"unset, 4 bits by bitsandbytes, or weights that transformers can load in 16 bits ({loaded})"
        hint = "Plan its config without quantization_config: an upper bound."
        bits = " in 8 bits" if isinstance(config, Mapping) and config.get("load_in_8bit") else ""
        raise ArgumentValueError(message("quantization_config", expected, f"{method}{bits}", hint))
    return method


def _compare(shape: ModelShape, model: Any) -> None:
    """Raise where a model's parameters are frozen, or others than its config says."""
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    if frozen:
        hint = "For a model with adapters pass its config, and adapters=lowtide.plan.Adapters(rank)."
        raise ArgumentValueError(message("model_or_config", "all parameters trained", f"{frozen[0]} frozen", hint))
    params = sum(parameter.numel() for parameter in model.parameters())
    if params != shape.params:
        expected = f"the {shape.params:,} parameters of its config's model"
        got, hint = f"{shape.model_type!r} with {params:,}", f"It has other parts. {MEASURE}"
        raise ArgumentValueError(message("model_type", expected, got, hint))


@contextmanager
def refused(model_type: str) -> Iterator[None]:
    """Turn what a model raises that is built and run without weights into an error that names its type.

    Raises:
        ArgumentValueError: Something was raised inside.
    """
    try:
        yield
    except Exception as error:  # of a config's checks, of transformers' code: without a common base
        why = " ".join(str(error).split())
        why = why if len(why) <= _LETTERS else why[:_LETTERS].rpartition(" ")[0] + " ..."
        expected, hint = "a causal language model that transformers builds and runs without weights", ""
        if isinstance(error, ArgumentValueError):  # of `find_stack`
            why = f"not one list of layers: {why}"
            hint = "Policies are for the layers of one list. "
        elif isinstance(error, NotImplementedError):
            why = f"its layers read values that are there only with data: {why}"
        elif "Unrecognized" in why:
            hint = "transformers has no AutoModelForCausalLM for it: pass the config of a part that has one. "
        elif _OTHER_DTYPE in why:
            hint = "Plan it in float32: --dtype float32, in Python dtype='float32'. "
        else:
            hint = "If its config lacks a field or allows fewer tokens, change that. "
        got = f"{model_type!r} ({why or type(error).__name__})"
        raise ArgumentValueError(message("model_type", expected, got, hint + MEASURE)) from error
