"""Models to measure: built with random weights, and made to train as a variant says. For all that measure models."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lowtide.bench.variant import COMPILE, LIGER, OURS, Variant
from lowtide.errors import ArgumentValueError, UnsupportedError, message
from lowtide.memory import ActivationPolicy, apply_policy
from lowtide.memory.policy import parse_policies
from lowtide.memory.stack import find_stack
from lowtide.models import patch
from lowtide.plan.settings import with_layers
from lowtide.train.shapes import model_config

SDPA = "sdpa"
LEARNING_RATE = 1e-5
VOCABULARY = 1000  # of the model that has none of its own


def language_part(config: Any) -> Any:
    """Return the config of transformers' causal language model: of a multimodal model, that of the one inside.

    Raises:
        ArgumentValueError: there is no causal language model in it, or several, or a sequence-to-sequence model or an
            encoder whose config does not set ``is_decoder``.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    expected, got = "a causal language model", f"a {config.model_type}"
    try:
        text = config.get_text_config()
    except ValueError as error:  # it has several
        raise ArgumentValueError(message("model", expected, f"{got} with several parts for text")) from error
    if getattr(config, "is_encoder_decoder", False) or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ArgumentValueError(message("model", expected, got, "Other models are not measured."))
    encodes = type(text) in MODEL_FOR_MASKED_LM_MAPPING or text.model_type == "bert-generation"
    if encodes and not getattr(text, "is_decoder", False):  # causal only with is_decoder
        hint = f"With is_decoder set to true in its config {text.model_type} is measured as one."
        raise ArgumentValueError(message("model", expected, f"{got}, whose tokens see those after them", hint))
    return text


def config_of(name: str, layers: int | None = None, vocab_size: int = VOCABULARY) -> Any:
    """Return the config of a ``--model``, with ``layers`` layers unless that is None."""
    config = model_config(name, vocab_size=vocab_size)
    if layers is not None:
        text = config.get_text_config()
        changed = with_layers(text.to_dict(), layers)
        text.update({field: changed[field] for field in ("num_hidden_layers", "layer_types") if field in changed})
    return config


def build_model(
    variant: Variant, config: Any, dtype: torch.dtype, device: torch.device, *, seed: int, lora: int = 0
) -> Any:
    """Return the model of a variant, with random weights, ready to train.

    ``config`` is transformers'. ``lora`` is the rank of adapters on every linear layer but the output layer, in the
    layers' dtype, all else frozen; 0: full training.

    Raises:
        UnsupportedError: Liger is not installed.
        ArgumentValueError: there is no causal language model in the config.
        ImportError: peft is not installed.
    """
    config = language_part(config)
    variant.check_installed()
    if variant.impl == LIGER:  # it changes the classes that the model is made of
        importlib.import_module("liger_kernel.transformers")._apply_liger_kernel(config.model_type)
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with device:
        model = trained = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
        model.config.use_cache = False
        if lora:
            from peft import LoraConfig, get_peft_model

            adapters = LoraConfig(r=lora, lora_alpha=2 * lora, target_modules="all-linear", task_type="CAUSAL_LM")
            trained = get_peft_model(model, adapters, autocast_adapter_dtype=False)
    _prepare(model, variant)
    return trained


def attention_of(model: Any) -> str:
    """Return transformers' name for a model's attention: `SDPA`, PyTorch's fused one, wherever the model has that."""
    return str(model.config.get_text_config()._attn_implementation or "eager")


def make_optimizer(name: str, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer by its name among the planner's; `UnsupportedError` where its library is not installed."""
    if name in ("adamw", "adamw-foreach"):
        fused = name == "adamw"
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=fused, foreach=not fused)
    if name != "adamw-8bit":
        momentum = 0.9 if name == "sgd-momentum" else 0.0
        return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=momentum, foreach=True)
    try:
        optimizer: Any = importlib.import_module("bitsandbytes.optim").AdamW8bit
    except ImportError as error:
        hint = "pip install bitsandbytes, or take another."
        raise UnsupportedError(message("optimizer", "bitsandbytes to be installed", str(error), hint)) from error
    return optimizer(parameters, lr=LEARNING_RATE)  # type: ignore[no-any-return]


def train_step(loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer, *, keep_gradients: bool = False) -> Tensor:
    """Return ``loss()`` of a training step: forward, backward and the optimizer; gradients are freed, or set to 0."""
    value = loss()
    value.backward()  # type: ignore[no-untyped-call]
    value = value.detach()
    optimizer.step()
    optimizer.zero_grad(set_to_none=not keep_gradients)
    return value


def _prepare(model: Any, variant: Variant) -> None:
    """Patch the model as the variant's implementation needs it, and apply its policy."""
    layers = find_stack(model).layers.values()
    if variant.impl in OURS:
        patch(model)
        apply_policy(model, parse_policies(variant.policy, model.config.num_hidden_layers))
        if variant.compiles_layers:
            compile_layers(model)
        return
    policy = parse_policies(variant.policy)
    assert isinstance(policy, ActivationPolicy)
    if variant.impl == COMPILE:
        model.loss_function = torch.compile(model.loss_function, dynamic=False)  # from the logits on
    for layer in layers:
        if variant.impl == COMPILE:
            layer.forward = torch.compile(layer.forward, dynamic=False)
        if policy.keep != "all":
            layer.forward = Checkpointed(layer.forward, policy)


def compile_layers(model: Any) -> None:
    """Compile each decoder layer by itself, after its policy was applied."""
    for layer in find_stack(model).layers.values():
        layer.compile(dynamic=False)


class Checkpointed:
    """A layer's forward, ``function``, under PyTorch's checkpoint, which saves by a peer's policy."""

    def __init__(self, function: Callable[..., Any], policy: ActivationPolicy) -> None:
        self.function, self._offload = function, policy.offload
        self._more: dict[str, Any] = {"context_fn": _saving_attention} if policy.keep == "attention" else {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it; what the checkpoint saves lies in host memory if the policy offloads."""
        # save_on_cpu moves what checkpoint itself saves: inside of it other hooks take the rest
        with save_on_cpu(pin_memory=torch.cuda.is_available()) if self._offload else nullcontext():
            return checkpoint(self.function, *args, use_reentrant=False, **self._more, **kwargs)


def _saving_attention() -> Any:
    def decide(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        attention = "scaled_dot_product" in str(op)
        return CheckpointPolicy.MUST_SAVE if attention else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)  # type: ignore[no-untyped-call]
