"""A causal language model without weights, and what one layer of each kind of it saves, allocates and computes.

The model is built from its config on the meta device and patched by `lowtide.patch`. Its own forward calls its layers,
so that they get the arguments that they get in training; layers like one that has run return what that one returned.
"""

from __future__ import annotations

import json
import pkgutil
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext
from functools import cache, lru_cache, partial
from operator import mul, sub
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.errors import ArgumentValueError, message
from lowtide.graph import pytree
from lowtide.memory.saved import tensors_in
from lowtide.memory.stack import find_stack
from lowtide.plan.arguments import Adapters
from lowtide.plan.meter import Meter, Work, autocast, stand_ins

MEASURE = "Measure its step instead, with `lowtide profile`."
# Tokens of the short sequences by which a loop over tokens is read: chunks of linear attention and state spaces divide
# them.
POINTS = (256, 512, 768)
_LETTERS = 180  # of what a model raised
_HINTS = {  # by words of that
    "ArgumentValueError": "Policies are for the layers of one list. ",
    "NotImplementedError": "Its layers read values that are there only with data. ",
    "Unrecognized": "transformers has no AutoModelForCausalLM for it: pass the config of a part that has one. ",
    "scalar type": "Plan it in float32: --dtype float32, in Python dtype='float32'. ",  # operands differ
    "": "If its config lacks a field or allows fewer tokens, change that. ",
}
_INDICES = {"layer_idx", "layer_id", "layer_number", "layer_index"}  # attributes in which equal layers differ
_WINDOWS = ("sliding_window", "attention_chunk_size")
_NO_WINDOW = 2**30  # tokens: longer than any sequence
_LORA = "lora_"  # what the names of peft's parameters have
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_VISITED = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts")


class Run(NamedTuple):
    """How layers run."""

    batch_size: int
    seq_len: int
    level: int = 0  # of the fused MLPs
    frozen: bool = False  # weights have no gradients
    keep_gradients: bool = False  # gradients are there when backward begins
    autocast: bool = False  # GEMMs and attention run in bfloat16
    masked: bool = False  # attention takes a [T, T] mask for each sequence


class Reading(NamedTuple):
    """What one layer took at one size: bytes, and the work of forward, of its recompute and of backward."""

    input: float  # its hidden states
    saved: float  # for backward, its input among them where an operator of its saves that
    with_input: float  # the same, always with its input, which a checkpoint saves
    attended: float  # the outputs of fused attention; 0: it ran none
    forward_peak: float  # the most that lives within its forward beyond what it saves
    checkpointed_peak: float  # the same where it saves nothing but its input
    backward_peak: float  # the most that lives within its backward beyond what it saved, its weights' gradients too
    forward: Work
    recompute: Work  # up to the last tensor that is saved
    backward: Work


class MetaModel:
    """A causal language model without weights, of whose layers one of each kind is left.

    Raises:
        ArgumentValueError: peft is not installed, no layer has such projections, or the output layer is something else
            than one linear layer.
    """

    def __init__(
        self, config: str, dtype: torch.dtype, *, fused_mlp: bool = True, adapters: Adapters | None = None
    ) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        settings = json.loads(config)
        made = AutoConfig.for_model(**settings)
        text = made.get_text_config()
        for part in (made, text):
            part.use_cache = False
            for name in _WINDOWS:
                if type(getattr(part, name, None)) is int:
                    setattr(part, name, _NO_WINDOW)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(made, dtype=dtype)
        self._model = model.to("meta").train()  # also what was made on the CPU nevertheless
        self.name, self._readings = type(model).__name__, cache(self._read_all)
        self.experts, self._visits = (  # of a layer, and of those a token's; 0: a plain MLP
            next((n for n in (getattr(text, name, None) for name in names) if type(n) is int), 0)
            for names in (_EXPERTS, _VISITED)
        )
        weight = getattr(model.get_output_embeddings(), "weight", None)
        if weight is None or weight.dim() != 2:
            expected = "a model with an output layer that is one linear layer"
            raise ArgumentValueError(message("model_type", expected, f"{settings['model_type']!r} without", MEASURE))
        self.vocab, self.hidden = map(int, weight.shape)
        self.vocab_params = int(weight.numel())  # of the output layer, and of the embedding
        self.tied: bool = model.get_input_embeddings().weight is weight
        heads = getattr(text, "num_attention_heads", None)  # in some n_head
        # Of attention; 0: unknown.
        self.head_dim = int(settings.get("head_dim") or (self.hidden // heads if type(heads) is int else 0))
        numbers = {name: int(p.numel()) for name, p in model.named_parameters()}  # a shared one is there once
        self.params = sum(numbers.values())  # without adapters
        layers = find_stack(model).layers
        self.windows = _windows(settings, len(layers))
        # Sizes of the weights that transformers can put into 4 bits.
        linear = (m for layer in layers.values() for m in layer.modules() if type(m) is nn.Linear)
        self.linears = tuple(m.weight.numel() for m in dict.fromkeys(linear))
        # Without those that a layer shares with an earlier one.
        self.layer_params = tuple(sum(n for name, n in numbers.items() if name.startswith(f"{one}.")) for one in layers)
        self.adapter_params = 0 if adapters is None else _adapt(model, adapters)
        keys = [_kind(layer) for layer in layers.values()]
        kinds = list(dict.fromkeys(keys))
        self.kind_of = tuple(map(kinds.index, keys))  # of each layer: those of one kind cost the same
        self._layers: dict[int, Any] = {}
        for (name, layer), kind in zip(layers.items(), self.kind_of, strict=True):
            model.set_submodule(name, self._layers.setdefault(kind, layer))
        # The room of models is above this one: `lowtide.patch` is looked up when it is needed.
        patch: Callable[..., Any] = pkgutil.resolve_name("lowtide:patch")
        patch(model, loss=False, mlp=fused_mlp)
        # Whether every kind has an MLP that the patch fuses, whose level a policy can set.
        self.levels = all(any(_fused_mlps(layer)) for layer in self._layers.values())

    def readings(self, run: Run) -> tuple[Reading, ...]:
        """Return what a layer of each kind takes.

        A layer with a loop over tokens, where more of them take more operators, would take minutes at a long sequence.
        Its figures are a + b N + c N T, with N tokens in sequences of T: the coefficients follow from three short ones.

        Raises:
            RuntimeError: The forward did not call one of them.
        """

        def short(points: tuple[int, ...], **changes: Any) -> Iterator[tuple[Reading, ...]]:
            return (self._readings(run._replace(batch_size=1, seq_len=n, **changes)) for n in points)

        def through(points: tuple[int, ...], **changes: Any) -> Any:
            """Return the readings at the run's size by a polynomial through short ones, none below 0."""
            powers = run.batch_size * np.power(float(run.seq_len), range(len(points)))
            powers[0] = 1
            shares: list[float] = np.linalg.solve(np.vander(points, increasing=True).T, powers).tolist()
            return pytree.tree_map(lambda *values: max(0.0, sum(map(mul, values, shares))), *short(points, **changes))

        operators = (sum(one.forward.operators for one in kinds) for kinds in short(POINTS[:2], level=0))
        if run.seq_len <= POINTS[-1] or next(operators) == next(operators):
            return self._readings(run)
        # A peak is the largest of several sums: a line through the longer two extrapolates it. In short sequences the
        # gradients of weights are the peak of backward; in long ones those of activations, so that it is at least what
        # it would be with frozen weights, which save less.
        curves, lines, bare = through(POINTS), through(POINTS[1:]), through(POINTS[1:], frozen=True)
        return tuple(
            curve._replace(
                forward_peak=line.forward_peak,
                checkpointed_peak=line.checkpointed_peak,
                backward_peak=max(line.backward_peak, frozen.backward_peak + frozen.saved - line.saved),
            )
            for curve, line, frozen in zip(curves, lines, bare, strict=True)
        )

    def _read_all(self, run: Run) -> tuple[Reading, ...]:
        """Return the readings of layers that have run at the whole size."""
        found: dict[int, tuple[torch.dtype, Reading, Any]] = {}  # with the input's dtype, and what the layer returned

        def answer(kind: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            """Return what a layer of a kind returns, with its reading taken where it has not been for such an input.

            Layers may widen the residual stream: all but the first then have the wide input, and theirs is the reading.
            """
            hidden = _first(x for x in tensors_in((args, kwargs)) if x.is_floating_point())
            if kind not in found or found[kind][0] != hidden.dtype:
                with torch.enable_grad(), _disable_current_modes():
                    found[kind] = hidden.dtype, *self._read(run, self._layers[kind], forward, hidden, args, kwargs)
            return found[kind][2]

        B, T = run.batch_size, run.seq_len
        for name, p in self._model.named_parameters():
            p.requires_grad_(p.is_floating_point() and (not run.frozen or _LORA in name))
        for layer in self._layers.values():
            for module in _fused_mlps(layer):
                module.checkpoint_level = run.level
        given = {"input_ids": torch.ones(B, T, dtype=torch.long, device="meta")}
        if run.masked:
            given["attention_mask"] = torch.ones(B, 1, T, T, dtype=torch.bool, device="meta")
        try:
            for kind, layer in self._layers.items():
                vars(layer)["forward"] = partial(answer, kind, layer.forward)
            with torch.no_grad(), Meter(self.experts), stand_ins(B * T * self._visits, masked=run.masked):
                self._model(**given)
        finally:
            for layer in self._layers.values():
                vars(layer).pop("forward", None)
        if len(found) < len(self._layers):
            raise RuntimeError(
                f"a forward with tokens alone ran {len(found)} of its {len(self._layers)} kinds of layers"
            )
        return tuple(found[kind][1] for kind in self._layers)

    def _read(
        self, run: Run, layer: nn.Module, forward: Callable[..., Any], hidden: Tensor, args: Any, kwargs: Any
    ) -> tuple[Reading, Any]:
        """Return a layer's reading, and its outputs without their graph."""
        leaf = hidden.detach().requires_grad_()
        precision: Any = autocast if run.autocast else nullcontext
        args, kwargs = pytree.tree_map(lambda x: leaf if x is hidden else x, (args, kwargs))
        forget: Any = [lambda _: None] * 2  # instead of saving
        with Meter(self.experts) as meter, saved_tensors_hooks(*forget), precision():
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
            output = _first(x for x in tensors_in(outputs) if x.requires_grad)
            result = pytree.tree_map_only(Tensor, Tensor.detach, outputs)
            size, done, peak, live = output.nbytes, meter.work, meter.peak, meter.live
            del outputs
            meter.peak = live
            torch.autograd.backward(output, torch.empty_like(output))
            backward = Work(*map(sub, meter.work, done))
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


def _first(found: Iterable[Tensor]) -> Tensor:
    """Return the first of the tensors among which a layer's hidden states are."""
    for tensor in found:
        return tensor
    raise RuntimeError("its layers take no hidden states, or return none with a gradient")


def _cut_graphs(given: Any) -> None:
    """Detach what a layer has left in a dictionary among its arguments, such as keys that later layers read."""
    for value in given if isinstance(given, tuple | list) else given.values():
        if isinstance(value, MutableMapping):
            value.update(pytree.tree_map_only(Tensor, Tensor.detach, {**value}))
        if isinstance(value, tuple | list | MutableMapping):
            _cut_graphs(value)


def _fused_mlps(layer: nn.Module) -> list[Any]:
    """Return a layer's fused MLPs."""
    return [module for module in layer.modules() if hasattr(module, "checkpoint_level")]


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


def _adapt(model: Any, adapters: Adapters) -> int:
    """Add adapters to a model; return how many parameters they have."""
    from peft import LoraConfig, get_peft_model

    refusal = ArgumentValueError(message("targets", "names of the layers' projections", f"{adapters}"))
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of peft, on what is not trained here
            get_peft_model(model, LoraConfig(r=adapters.rank, target_modules=adapters.target_modules))
    except ValueError as error:
        raise refusal from error
    if any(_LORA in name for name, _ in model.get_output_embeddings().named_parameters()):
        raise refusal
    return sum(p.numel() for name, p in model.named_parameters() if _LORA in name)


def _windows(settings: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the window of each layer, 0 where its type is none that has one."""
    window, types = settings.get("sliding_window"), settings.get("layer_types") or ["sliding_attention"] * layers
    if type(window) is not int or settings.get("use_sliding_window") is False or len(types) != layers:
        return (0,) * layers
    return tuple(window * (name == "sliding_attention") for name in types)


@contextmanager
def refused(model_type: str) -> Iterator[None]:
    """Turn what a model raises that is built and run without weights into an error that names its type.

    Raises:
        ArgumentValueError: Something was raised inside.
    """
    try:
        yield
    except Exception as error:  # of a config's checks, of transformers' code: without a common base
        if isinstance(error, ModuleNotFoundError) or (
            isinstance(error, ArgumentValueError) and not str(error).startswith("model: ")  # of `find_stack`
        ):
            raise
        why = " ".join(str(error).split()) or type(error).__name__
        hint = next((hint for words, hint in _HINTS.items() if words in f"{type(error).__name__}: {why}"), _HINTS[""])
        got = f"{model_type!r} ({textwrap.shorten(why, _LETTERS, placeholder=' ...')})"
        expected = "a causal language model that transformers builds and runs without weights"
        raise ArgumentValueError(message("model_type", expected, got, hint + MEASURE)) from error


meta_model = lru_cache(maxsize=8)(MetaModel)
