"""Models to measure: built with random weights, and made to train as a variant says. For all that measure models."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lowtide.bench.harness import release
from lowtide.bench.variant import LIGER, OURS, Variant, check_installed
from lowtide.errors import ArgumentValueError, message
from lowtide.measure.child import allocator_setting
from lowtide.measure.resident import peak_resident_bytes, reset_cuda_peak
from lowtide.measure.timing import time_side_by_side
from lowtide.measure.units import gib
from lowtide.memory import ActivationPolicy, apply_policy, offload_optimizer
from lowtide.memory.policy import parse_policies
from lowtide.memory.stack import find_stack
from lowtide.models import patch

LEARNING_RATE = 1e-5


def language_part(config: Any) -> Any:
    """Return the config of transformers' causal language model: of a multimodal model, that of the one inside.

    Raises:
        ArgumentValueError: there is no causal language model in it, or several.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        text = config.get_text_config()
    except ValueError:  # it has several
        text = None
    if getattr(config, "is_encoder_decoder", False) or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ArgumentValueError(message("model", "a causal language model", f"a {config.model_type}"))
    return text


def random_model(config: Any, dtype: torch.dtype, device: torch.device, *, seed: int = 0) -> Any:
    """Return transformers' causal language model of a config with random weights, ready to train."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    model.config.use_cache = False
    return model


def build_model(
    variant: Variant, config: Any, dtype: torch.dtype, device: torch.device, *, seed: int = 0, lora: int = 0
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
    model = trained = random_model(config, dtype, device, seed=seed)
    if lora:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=lora, lora_alpha=2 * lora, target_modules="all-linear", task_type="CAUSAL_LM")
        trained = get_peft_model(model, adapters, autocast_adapter_dtype=False)
    layers = find_stack(model).layers.values()
    policy: Any = parse_policies(variant.policy, len(layers))
    if variant.impl in OURS:
        patch(model)
        apply_policy(model, policy)
        if variant.compiles_layers:
            for layer in layers:
                layer.compile(dynamic=False)
        return trained
    if variant.compiles_layers:
        model.loss_function = torch.compile(model.loss_function, dynamic=False)  # from the logits on
    for layer in layers:
        if variant.compiles_layers:
            layer.forward = torch.compile(layer.forward, dynamic=False)
        if policy.keep != "all":
            layer.forward = checkpointed(layer.forward, policy)
    return trained


def make_optimizer(name: str, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer by its name among the planner's; `UnsupportedError` where its library is not installed."""
    if name.startswith("sgd"):
        momentum = 0.9 if name == "sgd-momentum" else 0.0
        return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=momentum, foreach=True)
    if name != "adamw-8bit":
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=name == "adamw", foreach=name != "adamw")
    check_installed("optimizer", "bitsandbytes")
    optimizers: Any = importlib.import_module("bitsandbytes.optim")
    return optimizers.AdamW8bit(parameters, lr=LEARNING_RATE)  # type: ignore[no-any-return]


def measure_steps(
    model: Any, optimizer: str, states: Mapping[str, Any] | None, sizes: tuple[int, int], *, warm: int, reps: int,
    wide: bool = False, keep_gradients: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return what training steps on random tokens take, so many sequences of so many, after ``warm`` that do not count.

    That is the ``seconds`` of the median of ``reps``, its ``spread``, ``tokens_per_s``, the ``losses`` of all, and
    ``peak_gib``: of the tensors on a GPU, else of the process. On a GPU also ``reserved_gib``, what PyTorch's allocator
    held for them, and ``allocator``, its settings. ``states`` are arguments of `offload_optimizer`; None: they stay.
    ``wide``: under autocast to bfloat16; ``keep_gradients``: they are set to 0, else freed.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    stepper, device = make_optimizer(optimizer, trained), trained[0].device
    if states is not None:
        offload_optimizer(stepper, model, **states)
    vocab, generator = model.config.get_text_config().vocab_size, torch.Generator().manual_seed(0)
    ids = torch.randint(vocab, sizes, generator=generator).to(device)
    release(device)
    losses: list[Tensor] = []

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=wide):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.detach())
        stepper.step()
        stepper.zero_grad(set_to_none=not keep_gradients)

    for _ in range(warm):
        step()
    reset_cuda_peak()
    timing = time_side_by_side({"step": step}, device, warm=0, reps=reps)["step"]
    seconds = timing.median_ms / 1e3
    row: dict[str, Any] = {"seconds": seconds, "spread": timing.spread, "tokens_per_s": ids.numel() / seconds}
    row |= {"losses": [loss.item() for loss in losses], "peak_gib": gib(peak_resident_bytes())}
    if device.type == "cuda":
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        row |= {"peak_gib": gib(peak), "reserved_gib": gib(reserved), "allocator": allocator_setting()}
    return row


def checkpointed(function: Callable[..., Any], policy: ActivationPolicy) -> Callable[..., Any]:
    """Return a layer's forward under PyTorch's checkpoint, which saves by a peer's policy, in host memory if that
    offloads.
    """
    more: dict[str, Any] = {"context_fn": _saving_attention} if policy.keep == "attention" else {}

    def forward(*args: Any, **kwargs: Any) -> Any:
        # save_on_cpu moves what checkpoint itself saves: inside of it other hooks take the rest
        with save_on_cpu(pin_memory=torch.cuda.is_available()) if policy.offload else nullcontext():
            return checkpoint(function, *args, use_reentrant=False, **more, **kwargs)

    return forward


def _saving_attention() -> Any:
    def decide(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        attention = "scaled_dot_product" in str(op)
        return CheckpointPolicy.MUST_SAVE if attention else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)  # type: ignore[no-untyped-call]
