"""Patched models on a CUDA device: no further from the truth than stock ones, fused, compiled, without waiting."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import lowtide
from gpu.conftest import no_waits
from gpu.patched_runs import SIZES, batch, distance, gradients, no_further_than_stock, with_larger_weights

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

V = 1003
FUSED = {"Llama": 3, "Qwen3": 3, "Gemma2": 3, "Gemma3": 3, "Olmo2": 3, "Phi3": 2, "Phi": 1, "Cohere2": 1}


def build(family: str, dtype: torch.dtype) -> Any:
    name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    torch.manual_seed(0)
    config = getattr(transformers, name)(vocab_size=V, max_position_embeddings=512, tie_word_embeddings=False, **SIZES)
    model = with_larger_weights(getattr(transformers, f"{family}ForCausalLM")(config))
    return model.to("cuda", dtype).train()


@pytest.mark.parametrize("family", FUSED)
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_loss_and_gradients(family: str, precision: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    stock = build(family, torch.bfloat16 if precision == "bfloat16" else torch.float32)
    report = no_further_than_stock(stock, precision, batch(V))
    assert sum(report.parts[part].patched for part in ("mlp", "norm", "rope")) == FUSED[family], str(report)


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own, and that the debug mode is a prototype
def test_levels_and_compiled_layers_and_no_synchronisation() -> None:
    stock = build("Qwen3", torch.bfloat16)
    _, true = gradients(stock, batch(V))
    for compiled in (False, True):
        model = copy.deepcopy(stock)
        lowtide.patch(model)
        for layer in model.model.layers:
            layer.mlp.checkpoint_level = 1
            if compiled:
                layer.compile()
        _, grads = gradients(model, batch(V))
        assert distance(grads, true) < 1e-3
        with no_waits():
            for module in (model.model.layers[0].mlp, model.model.norm):
                hidden = torch.ones(1, 131, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
                module(hidden).backward(torch.ones_like(hidden))


def test_generation() -> None:
    for family in ("Llama", "Gemma3"):
        stock = build(family, torch.float32).eval()
        model = copy.deepcopy(stock)
        lowtide.patch(model)
        prompt = {"input_ids": batch(V)["input_ids"][:, :9], "attention_mask": torch.ones(2, 9, device="cuda").long()}
        tokens = [m.generate(**prompt, max_new_tokens=8, do_sample=False, use_cache=True) for m in (model, stock)]
        assert torch.equal(*tokens)


def test_few_tokens_without_gradients_run_the_models_own_code() -> None:
    """To the bit, as in bfloat16 kernels of ours are not; more of them run ours."""
    stock = build("Llama", torch.bfloat16).eval()
    model = copy.deepcopy(stock)
    lowtide.patch(model)
    with torch.no_grad():
        ids = batch(V)["input_ids"]
        assert torch.equal(model(input_ids=ids).logits, stock(input_ids=ids).logits)
        hidden = torch.randn(1, 1 + 2**23 // 256, 256, dtype=torch.bfloat16, device="cuda")
        mlps = [m.model.layers[0].mlp for m in (model, stock)]
        many, true = (mlp(hidden) for mlp in mlps)
        assert torch.equal(mlps[0](hidden[:, :-1]), mlps[1](hidden[:, :-1]))
        assert not torch.equal(many, true)
        assert (many - true).norm() <= 2**-7 * true.norm()


def test_a_change_past_versions_is_found_and_training_does_not_wait() -> None:
    model = build("Llama", torch.bfloat16)
    lowtide.patch(model)
    inputs = batch(V)
    for waits in (nullcontext, no_waits):  # the first time compiles
        logits = model(**inputs).logits
        with waits():
            logits.log_softmax(-1).gather(-1, inputs["labels"].clamp(min=0)[..., None]).sum().backward()
    logits.argmax(-1)
    model.lm_head.weight.data[[7, 900]] = model.lm_head.weight.data[[900, 7]]
    with pytest.raises(lowtide.errors.UnsupportedError, match="changed since"):
        logits.argmax(-1)


def test_a_loss_after_a_change_ends_in_an_assertion_of_the_device() -> None:
    """In a process of its own, for it ends the CUDA context."""
    code = """
import torch, lowtide
from gpu.test_patch import V, batch, build
model = build("Llama", torch.bfloat16)
lowtide.patch(model)
inputs = batch(V)
logits = model(**inputs).logits
model.lm_head.weight.data[3, 5] += 1
torch.nn.functional.cross_entropy(logits.view(-1, V), inputs["labels"].view(-1))
torch.cuda.synchronize()
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert ran.returncode != 0
    assert "changed between the forward pass and a loss" in ran.stderr, ran.stderr[-2000:]
    assert "device-side assert" in ran.stderr
