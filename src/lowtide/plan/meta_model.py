"""One layer of each kind of a model, run on the meta device: what it saves, allocates and computes.

The model is built from its config without weights and patched by `lowtide.patch`. Its own forward calls its layers, so
that they get the arguments that they get in training; layers like one that has run return what that one returned.
"""

from __future__ import annotations

import json
import pkgutil
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from lowtide.errors import ArgumentValueError, message
from lowtide.memory.stack import find_stack
from lowtide.plan.arguments import Adapters
from lowtide.plan.meter import Meter, autocast, stand_ins
from lowtide.plan.readings import LayerRun, Reading, Work

_INDICES = {"layer_idx", "layer_id", "layer_number", "layer_index"}  # attributes in which equal layers differ
_WINDOWS = ("sliding_window", "attention_chunk_size")
_NO_WINDOW = 2**30  # tokens: longer than any sequence
_LORA = "lora_"  # what the names of peft's parameters have
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_VISITED = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts")


class MetaModel:
    """A causal language model without weights, of whose layers one of each kind is left.

    Args:
        settings: Its config's fields, ``model_type`` among them.
        dtype: Of its parameters.
        fused_mlp: Whether `lowtide.patch` fuses its MLPs.
        adapters: Of its layers' projections.

    Raises:
        ArgumentValueError: peft is not installed, or no layer has such projections.
    """

    def __init__(
        self, settings: dict[str, Any], dtype: torch.dtype, *, fused_mlp: bool = True, adapters: Adapters | None = None
    ) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(**settings)
        text = config.get_text_config()
        for part in (config, text):
            part.use_cache = False
            for name in _WINDOWS:
                if type(getattr(part, name, None)) is int:
                    setattr(part, name, _NO_WINDOW)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        self.model = model.to("meta").train()  # also what was made on the CPU nevertheless
        self.name = type(model).__name__
        self.attention = str(getattr(text, "_attn_implementation", "") or "")
        self.experts, self.experts_per_token = (
            next((n for n in (getattr(text, name, None) for name in names) if type(n) is int), 0)
            for names in (_EXPERTS, _VISITED)
        )
        self.params = sum(p.numel() for p in model.parameters())
        layers = find_stack(model).layers
        linear = (m for layer in layers.values() for m in layer.modules() if type(m) is nn.Linear)
        self.linears = tuple(m.weight.numel() for m in dict.fromkeys(linear))  # those that transformers can quantise
        self.layer_params = _own_params(list(layers.values()))
        self.adapter_params = 0 if adapters is None else _adapt(model, layers, adapters)
        keys = [_kind(layer) for layer in layers.values()]
        kinds = list(dict.fromkeys(keys))
        self.kind_of = tuple(map(kinds.index, keys))
        self._layers: dict[int, Any] = {}
        self._found: dict[int, tuple[torch.dtype, Reading, Any]] = {}  # with the input's dtype, and what it returned
        self._run = LayerRun("", dtype)
        for (name, layer), kind in zip(layers.items(), self.kind_of, strict=True):
            if kind in self._layers:
                self._replace(name, self._double(layer, kind))
            else:
                self._layers[kind] = layer
        # The room of models is above this one: `lowtide.patch` is looked up when it is needed.
        patch: Callable[..., Any] = pkgutil.resolve_name("lowtide:patch")
        patch(model, loss=False, mlp=fused_mlp)
        self.has_levels = all(any(_levels(layer)) for layer in self._layers.values())

    def readings(self, run: LayerRun) -> tuple[Reading, ...]:
        """Return what a layer of each kind takes.

        Raises:
            RuntimeError: The forward did not call one of them.
        """
        self._found.clear()
        self._run, B, T = run, run.batch_size, run.seq_len
        for name, p in self.model.named_parameters():
            p.requires_grad_(p.is_floating_point() and (not run.frozen or _LORA in name))
        for layer in self._layers.values():
            for module in _levels(layer):
                module.checkpoint_level, module.tile_tokens = run.level or 0, run.tile_tokens
        given = {"input_ids": torch.ones(B, T, dtype=torch.long, device="meta")}
        if run.masked:
            given["attention_mask"] = torch.ones(B, 1, T, T, dtype=torch.bool, device="meta")
        visits = B * T * self.experts_per_token
        with self._watched(), torch.no_grad(), Meter(self.experts), stand_ins(visits, masked=run.masked):
            self.model(**given)
        found, kinds = {kind: reading for kind, (_, reading, _) in self._found.items()}, len(self._layers)
        self._found.clear()
        if len(found) < kinds:
            raise RuntimeError(f"a forward with tokens alone ran {len(found)} of its {kinds} kinds of layers")
        return tuple(found[kind] for kind in range(kinds))

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Have the forward of each layer take its reading."""
        self._forwards = {kind: layer.forward for kind, layer in self._layers.items()}
        try:
            for kind, layer in self._layers.items():
                vars(layer)["forward"] = partial(self._answer, kind)
            yield
        finally:
            for layer in self._layers.values():
                vars(layer).pop("forward", None)

    def _answer(self, kind: int, *args: Any, **kwargs: Any) -> Any:
        """Return what a layer of a kind returns, with its reading taken where it has not been for such an input.

        Layers may widen the residual stream: all but the first then have the wide input, and theirs is the reading.
        """
        hidden = _hidden(args, kwargs)
        if kind not in self._found or self._found[kind][0] != hidden.dtype:
            with torch.enable_grad(), _disable_current_modes():
                reading, outputs = self._read(self._layers[kind], self._forwards[kind], args, kwargs)
            self._found[kind] = hidden.dtype, reading, outputs
        return self._found[kind][2]

    def _read(self, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Reading, Any]:
        """Return a layer's reading, and its outputs without their graph."""
        hidden, run = _hidden(args, kwargs), self._run
        leaf = hidden.detach().requires_grad_()
        precision: Any = autocast if run.autocast else nullcontext
        args, kwargs = tree_map(lambda x: leaf if x is hidden else x, (args, kwargs))
        with Meter(self.experts) as meter, saved_tensors_hooks(_forgotten, _forgotten), precision():
            forward(*args, **kwargs)
        _cut_graphs((args, kwargs))
        checkpointed = meter.peak
        for p in layer.parameters():
            p.grad = torch.empty_like(p) if run.keep_gradients and p.requires_grad else None
        with Meter(self.experts) as meter:
            until, saved_input = [Work()], [False]

            def save(tensor: Tensor) -> Tensor:
                until[0] = meter.work
                saved_input[0] |= tensor.untyped_storage()._cdata == leaf.untyped_storage()._cdata
                return tensor

            with saved_tensors_hooks(save, lambda x: x), precision():
                outputs = forward(*args, **kwargs)
            output = next((x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad), None)
            if output is None:
                raise RuntimeError("its layers return no hidden states with a gradient")
            result = tree_map(_detached, outputs)
            size, done, peak, live = output.nbytes, meter.work, meter.peak, meter.live
            del outputs
            meter.forget_peak()
            torch.autograd.backward(output, torch.empty_like(output))
            backward = meter.work.plus(done, -1)
        _cut_graphs((args, kwargs))
        for p in layer.parameters():
            p.grad = None
        # Cohere's norm saves its input in float32 alone: the input itself then lives as long as forward.
        with_input = live - size + hidden.nbytes
        saved = with_input if saved_input[0] else live - size
        return Reading(
            input=hidden.nbytes,
            saved=saved,
            with_input=with_input,
            attended=meter.attended,
            forward_peak=peak + hidden.nbytes - saved,
            checkpointed_peak=checkpointed,
            backward_peak=meter.peak - live,
            forward=done,
            recompute=until[0],
            backward=backward,
        ), result

    def _double(self, layer: nn.Module, kind: int) -> nn.Module:
        """Return a layer without modules and parameters, which returns what the one of its kind has returned."""
        double: Any = object.__new__(type(layer))
        vars(double).update(vars(layer), _modules={}, _parameters={}, _buffers={})
        vars(double)["forward"] = partial(self._answer, kind)
        return double  # type: ignore[no-any-return]

    def _replace(self, name: str, layer: nn.Module) -> None:
        parent, _, last = name.rpartition(".")
        self.model.get_submodule(parent)._modules[last] = layer


def _hidden(args: Any, kwargs: Any) -> Tensor:
    """Return the hidden states among a layer's arguments: the first floating-point tensor."""
    found = (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_floating_point())
    hidden = next(found, None)
    if hidden is None:
        raise RuntimeError("its layers take no hidden states")
    return hidden


def _forgotten(_: Any) -> Any:
    """Save nothing."""
    return None


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _cut_graphs(given: Any) -> None:
    """Detach what a layer has left in a dictionary among its arguments, such as keys that later layers read."""
    for value in given if isinstance(given, tuple | list) else given.values():
        if isinstance(value, MutableMapping):
            value.update({key: tree_map(_detached, one) for key, one in value.items()})
        if isinstance(value, tuple | list | MutableMapping):
            _cut_graphs(value)


def _levels(layer: nn.Module) -> list[Any]:
    """Return a layer's fused MLPs."""
    return [module for module in layer.modules() if hasattr(module, "checkpoint_level")]


def _own_params(layers: list[nn.Module]) -> tuple[int, ...]:
    """Return the parameters of each layer that no layer before it has."""
    seen, counts = set[int](), []
    for layer in layers:
        own = {id(p): p.numel() for p in layer.parameters() if id(p) not in seen}
        seen |= own.keys()
        counts.append(sum(own.values()))
    return tuple(counts)


def _kind(layer: nn.Module) -> Any:
    """Return what layers have in common that do the same: classes, sizes and plain settings of all their modules."""
    return tuple(
        (
            name,
            type(module).__qualname__,
            tuple((key, p.shape) for key, p in module._parameters.items() if p is not None),
            tuple((key, v) for key, v in vars(module).items() if type(v) in (bool, int, str) and key not in _INDICES),
        )
        for name, module in layer.named_modules()
    )


def _adapt(model: nn.Module, layers: Mapping[str, nn.Module], adapters: Adapters) -> int:
    """Add adapters to a model's layers; return how many parameters they have."""
    try:
        from peft import LoraConfig, get_peft_model
        from transformers.pytorch_utils import Conv1D
    except ImportError as error:
        raise ArgumentValueError(message("adapters", "peft to be installed", str(error), "pip install peft")) from error
    inside = [f"{at}.{name}" for at, layer in layers.items() for name, m in layer.named_modules()
              if isinstance(m, nn.Linear | Conv1D)]  # fmt: skip
    targets: Any = list(adapters.targets) or "|".join(map(re.escape, inside))  # a text is a regular expression
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of peft, on what is not trained here
            get_peft_model(model, LoraConfig(r=adapters.rank, target_modules=targets))
    except ValueError as error:
        raise ArgumentValueError(message("targets", "names of the layers' projections", f"{adapters}")) from error
    params = sum(p.numel() for name, p in model.named_parameters() if _LORA in name)
    if params > sum(p.numel() for layer in layers.values() for name, p in layer.named_parameters() if _LORA in name):
        raise ArgumentValueError(message("targets", "names of the layers' projections", f"{adapters}"))
    return params


@lru_cache(maxsize=8)
def meta_model(
    config: str, dtype: torch.dtype, *, fused_mlp: bool = True, adapters: Adapters | None = None
) -> MetaModel:
    """Return the model of a config in JSON."""
    return MetaModel(json.loads(config), dtype, fused_mlp=fused_mlp, adapters=adapters)


@lru_cache(maxsize=512)
def readings_of(run: LayerRun) -> tuple[Reading, ...]:
    """Return the readings of a config's layers, one for each kind: see `MetaModel.readings`."""
    return meta_model(run.config, run.dtype, fused_mlp=run.fused_mlp, adapters=run.adapters).readings(run)
