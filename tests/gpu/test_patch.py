"""Patched models on a CUDA device: no further from the truth than stock ones, fused, compiled, without waiting."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

SHAPE = {
    "vocab_size": 1003, "hidden_size": 256, "intermediate_size": 488, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False, "use_cache": False,
}  # fmt: skip
FUSED = {"Llama": 3, "Qwen3": 3, "Gemma2": 3, "Gemma3": 3, "Olmo2": 3, "Phi3": 2, "Phi": 1, "Cohere2": 1}


def build(family: str, dtype: torch.dtype) -> Any:
    name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, name)(**SHAPE))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.to("cuda", dtype).train()


def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, 1003, (2, 131), generator=torch.Generator().manual_seed(1)).cuda()
    return {"input_ids": ids, "labels": ids.masked_fill(ids % 5 == 0, -100)}


def gradients(model: Any, autocast: bool = False) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        loss = model(**batch()).loss
    loss.backward()
    return loss.item(), {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def distance(got: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    assert got.keys() == true.keys()
    return float(sum((got[n] - true[n]).square().sum() for n in true) / sum(t.square().sum() for t in true.values()))


@pytest.mark.parametrize("family", FUSED)
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_loss_and_gradients(family: str, precision: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    stock = build(family, torch.bfloat16 if precision == "bfloat16" else torch.float32)
    model, exact = copy.deepcopy(stock), copy.deepcopy(stock).double()
    report = lowtide.patch(model)
    assert sum(report.parts[part].patched for part in ("mlp", "norm", "rope")) == FUSED[family], str(report)
    true_loss, true = gradients(exact)
    losses, errors = zip(
        *((abs(loss - true_loss), distance(grads, true)) for loss, grads in (
            gradients(m, precision == "autocast") for m in (model, stock)
        )),
        strict=True,
    )  # fmt: skip
    if precision == "float32":
        assert losses[0] < 1e-5
        assert errors[0] < 1e-10
    else:
        assert losses[0] < 3e-2
        assert errors[0] < 1.3 * errors[1], errors


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own, and that the debug mode is a prototype
def test_levels_and_compiled_layers_and_no_synchronisation() -> None:
    stock = build("Qwen3", torch.bfloat16)
    _, true = gradients(stock)
    for compiled in (False, True):
        model = copy.deepcopy(stock)
        lowtide.patch(model)
        for layer in model.model.layers:
            layer.mlp.checkpoint_level = 1
            if compiled:
                layer.compile()
        _, grads = gradients(model)
        assert distance(grads, true) < 1e-3
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for module in (model.model.layers[0].mlp, model.model.norm):
                hidden = torch.ones(1, 131, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
                module(hidden).backward(torch.ones_like(hidden))
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_generation() -> None:
    for family in ("Llama", "Gemma3"):
        stock = build(family, torch.float32).eval()
        model = copy.deepcopy(stock)
        lowtide.patch(model)
        prompt = {"input_ids": batch()["input_ids"][:, :9], "attention_mask": torch.ones(2, 9, device="cuda").long()}
        tokens = [m.generate(**prompt, max_new_tokens=8, do_sample=False, use_cache=True) for m in (model, stock)]
        assert torch.equal(*tokens)
