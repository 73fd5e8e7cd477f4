"""A model's layers by kind, as its own code builds them from a config: for types that have no formula in `shapes`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lowtide.errors import ArgumentValueError, message
from lowtide.memory.planner.four_bit import four_bit

MEASURE = "Measure its step instead, with `lowtide profile`."
_TRIED = 64  # tokens of the sequence with which the layers are tried
_OTHER_DTYPE = "scalar type"  # in the error of an operator whose operands differ
_DEQUANTISED = ("mxfp4", "fp8")  # of gpt-oss, and of DeepSeek-V3 and others
_LETTERS = 180  # of what a model raised


@dataclass(frozen=True, kw_only=True)
class TracedLayers:
    """What a model without weights shows of its layers; `meta_model` reads their costs."""

    config: str  # the fields, as JSON
    model_class: str
    attention: str  # transformers' implementation
    vocab: int  # rows of the output layer
    hidden: int  # its columns
    tied: bool
    params: int
    layer_params: tuple[int, ...]  # of each layer, without those that it shares with an earlier one
    kind_of: tuple[int, ...]  # of each layer: layers of one kind cost the same
    attends: bool  # every kind runs fused attention
    levels: bool  # every kind has an MLP that `lowtide.patch` fuses
    linear_params: int  # the weights of the layers' linear layers
    largest_linear: int  # parameters of the largest of these
    quantised: str = ""  # how the checkpoint has its weights, which are planned as loaded in the job's dtype

    @property
    def kinds(self) -> int:
        """Return how many kinds there are."""
        return max(self.kind_of) + 1


def trace(settings: Mapping[str, Any]) -> TracedLayers:
    """Return a model's layers, with the model built on the meta device and one layer of each kind tried there.

    Raises:
        ArgumentValueError: transformers is not installed, or the model cannot be built or run so; the error says what
            the user can do.
    """
    model_type = str(settings["model_type"])
    quantised = _quantised(settings)
    settings = {name: value for name, value in settings.items() if name != "quantization_config"}
    try:
        import torch
        import transformers  # noqa: F401

        from lowtide.memory.planner.meta_model import meta_model, readings_of
        from lowtide.memory.planner.readings import Way
    except ImportError as error:
        expected = "a type that the planner has formulas for, or transformers to build it"
        hint = "pip install 'lowtide[hf]'"
        raise ArgumentValueError(message("model_type", expected, f"{model_type!r} ({error})", hint)) from error
    config = json.dumps(settings, default=str, sort_keys=True)
    with refused(model_type):
        try:
            tried = readings_of(config, torch.bfloat16, True, 1, _TRIED, Way())
            dtype = torch.bfloat16
        except RuntimeError as error:
            if _OTHER_DTYPE not in str(error):
                raise
            tried = readings_of(config, torch.float32, True, 1, _TRIED, Way())
            dtype = torch.float32
    model = meta_model(config, dtype)
    head: Any = model.model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if weight is None or weight.dim() != 2:
        expected = "a model with an output layer that is one linear layer"
        raise ArgumentValueError(message("model_type", expected, f"{model_type!r} without", MEASURE))
    return TracedLayers(
        config=config,
        model_class=model.name,
        attention=model.attention,
        vocab=weight.shape[0],
        hidden=weight.shape[1],
        tied=model.model.get_input_embeddings().weight is weight,
        params=model.params,
        layer_params=model.layer_params,
        kind_of=model.kind_of,
        attends=all(one.attended > 0 for one in tried),
        levels=model.has_levels,
        linear_params=sum(model.linears),
        largest_linear=max(model.linears, default=0),
        quantised=quantised,
    )


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
