"""Models to measure: built with random weights, and made to train in some way. For all that measure models."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lowtide.bench.loss_peers import IGNORED, Loss, loss_on
from lowtide.bench.way import COMPILE, HEADS, LIGER, OURS, Way
from lowtide.errors import ArgumentValueError, UnsupportedError, message
from lowtide.memory import ActivationPolicy, apply_policy
from lowtide.memory.policy import parse_policies
from lowtide.memory.stack import find_stack
from lowtide.models import patch
from lowtide.plan.settings import with_layers
from lowtide.train.model import model_config

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


def config_of(name: str, layers: int | None, vocab_size: int = VOCABULARY) -> Any:
    """Return the config of a ``--model``, with ``layers`` layers unless that is None."""
    config = model_config(name, vocab_size=vocab_size)
    if layers is not None:
        text = config.get_text_config()
        changed = with_layers(text.to_dict(), layers)
        text.update({field: changed[field] for field in ("num_hidden_layers", "layer_types") if field in changed})
    return config


def build_way(
    way: Way,
    model: str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    seed: int,
    vocab_size: int = VOCABULARY,
    lora: int = 0,
    layers: int | None = None,
) -> Any:
    """Return the model of a way, with random weights, ready to train.

    ``model`` has the shape, as in ``lowtide train --model``; ``vocab_size`` is of the model that has none of its own.
    ``lora`` is the rank of adapters on every linear layer but the output layer, all else frozen; 0: full training.
    ``layers`` is how many layers it has; None: those of its shape.

    Raises:
        UnsupportedError: peft or the way's package is not installed, or its loss cannot take the place of the model's.
        CannotError: the way's loss does not run here.
        ArgumentValueError: there is no such model, or no causal language model in it.
    """
    config = language_part(config_of(model, layers, vocab_size))
    way.check_installed()
    if way.impl == LIGER:
        apply_liger(config)
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with device:
        built = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
        built.config.use_cache = False
        trained = with_lora(built, lora) if lora else built
    _set_way(built, way)
    return trained


def attention_of(model: Any) -> str:
    """Return transformers' name for a model's attention: `SDPA`, PyTorch's fused one, wherever the model has that."""
    return str(getattr(model.config.get_text_config(), "_attn_implementation", None) or "eager")


def apply_liger(config: Any) -> None:
    """Let Liger change the classes that a model of this config will be made of."""
    importlib.import_module("liger_kernel.transformers")._apply_liger_kernel(config.model_type)


def with_lora(model: Any, rank: int) -> Any:
    """Return the model with LoRA adapters of this rank on every linear layer but the output layer, all else frozen.

    They have the layers' dtype. Without peft: `UnsupportedError`.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        hint = "pip install 'lowtide[peft]'"
        raise UnsupportedError(message("lora", "peft to be installed", str(error), hint)) from error
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def make_optimizer(name: str, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer by its name among the planner's; `UnsupportedError` where its library is not installed."""
    if name in ("adamw", "adamw-foreach"):
        fused = name == "adamw"
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=fused, foreach=not fused)
    if name == "adamw-8bit":
        try:
            from bitsandbytes.optim import AdamW8bit
        except ImportError as error:
            hint = "pip install bitsandbytes, or take another."
            raise UnsupportedError(message("optimizer", "bitsandbytes to be installed", str(error), hint)) from error
        found: torch.optim.Optimizer = AdamW8bit(parameters, lr=LEARNING_RATE)
        return found
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9 if name == "sgd-momentum" else 0.0, foreach=True)


def train_step(loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer, *, keep_gradients: bool = False) -> Tensor:
    """Return ``loss()`` of a training step: forward, backward and the optimizer; gradients are freed, or set to 0."""
    value = loss()
    value.backward()  # type: ignore[no-untyped-call]
    value = value.detach()
    optimizer.step()
    optimizer.zero_grad(set_to_none=not keep_gradients)
    return value


def _set_way(model: Any, way: Way) -> None:
    """Patch the model as the way's implementation needs it, and apply its policy."""
    if way.impl in OURS:
        patch(model)
        apply_policy(model, parse_policies(way.policy, model.config.num_hidden_layers))
        if way.compiles_layers:
            compile_layers(model)
        return
    policy = parse_policies(way.policy)
    assert isinstance(policy, ActivationPolicy)
    if way.impl in HEADS:
        set_loss(model, loss_on(way.impl, model.get_output_embeddings().weight))
    if way.impl == COMPILE:
        model.loss_function = torch.compile(model.loss_function, dynamic=False)  # from the logits on
    for layer in find_stack(model).layers.values():
        if way.compiles_layers:
            layer.forward = torch.compile(layer.forward, dynamic=False)
        if policy.keep != "all":
            layer.forward = Checkpointed(layer.forward, policy)


def compile_layers(model: Any) -> None:
    """Compile each decoder layer by itself, after its policy was applied."""
    for layer in find_stack(model).layers.values():
        layer.compile(dynamic=False)


def set_loss(model: Any, loss: Loss) -> None:
    """Let a model compute its loss from its hidden states by this function, without logits of its own.

    The function runs in the output layer's forward, where FSDP2 and ZeRO-3 have gathered the weight.

    Raises:
        UnsupportedError: the model's loss is not the plain cross entropy of its output layer's logits.
    """
    from transformers.modeling_outputs import CausalLMOutputWithPast

    head = model.get_output_embeddings()

    def hidden_loss(of: Loss, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None, **more: Any) -> Tensor:
        hidden = model.base_model(input_ids=input_ids, **more).last_hidden_state
        targets = F.pad(labels, (0, 1), value=IGNORED)[:, 1:].flatten()  # every row stays: kernels want their multiples
        mean: Tensor = head(hidden.flatten(0, 1), targets, of)
        return mean if num_items_in_batch is None else mean * (targets != IGNORED).sum() / num_items_in_batch

    def plain(x: Tensor, w: Tensor, y: Tensor, _: str) -> Tensor:
        return F.cross_entropy((x @ w.T).float(), y)

    ids = torch.arange(16, device=head.weight.device)[None] % head.weight.shape[0]
    model.eval()
    with torch.no_grad():
        stock = model(input_ids=ids, labels=ids).loss
        head.forward = lambda x, y, of: of(x, head.weight, y, "mean")
        ours = hidden_loss(plain, ids, ids)
    model.train()
    if not torch.allclose(stock, ours, rtol=1e-2):
        del head.forward
        got = f"{ours.item():.4f} for its {stock.item():.4f}"
        hint = "Its logits are scaled, capped or biased; take stock, compile, liger or lowtide."
        raise UnsupportedError(message("model", "a loss that is the cross entropy of x @ w.T", got, hint))
    model.forward = lambda **batch: CausalLMOutputWithPast(loss=hidden_loss(loss, **batch))


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
