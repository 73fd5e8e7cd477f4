"""Patched models on a CUDA device, LoRA on them too: no further from the truth than stock ones, fused, compiled."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from gpu.conftest import ON_GPU, no_waits, requested_bytes
from promises import promise

transformers = pytest.importorskip("transformers")
pytestmark = [
    *ON_GPU,
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]

V, V_ADAPTED = 1003, 5003
SIZES = {
    "hidden_size": 256, "intermediate_size": 488, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "use_cache": False,
}  # fmt: skip
FUSED = {"Qwen3": 3, "Gemma2": 3, "Phi3": 3, "Cohere2": 2}  # parts
MLP = ("gate_proj", "up_proj", "down_proj")


def build(family: str, dtype: torch.dtype, adapted: tuple[str, ...] = (), dropout: float = 0.0) -> Any:
    """Return a small model; with LoRA where ``adapted`` names layers."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")
    own = {"max_position_embeddings": 512, "tie_word_embeddings": False}
    model = getattr(transformers, f"{family}ForCausalLM")(
        config(vocab_size=V_ADAPTED if adapted else V, **own, **SIZES)
    )
    with torch.no_grad():  # the losses of fresh weights hardly differ from log(V)
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model = model.to("cuda", dtype)
    if adapted:
        peft = pytest.importorskip("peft")
        lora = peft.LoraConfig(r=8, target_modules=list(adapted), lora_dropout=dropout, init_lora_weights=False)
        model = peft.get_peft_model(model, lora)
    return model.train()


def layers_of(model: Any) -> Any:
    return (model.get_base_model() if hasattr(model, "peft_config") else model).model.layers


def batch(model: Any, T: int = 131) -> dict[str, Tensor]:
    """Return two sequences of tokens, a fifth of whose labels are ignored."""
    ids = torch.randint(3, model.config.vocab_size, (2, T), generator=torch.Generator().manual_seed(1)).cuda()
    return {"input_ids": ids, "labels": ids.masked_fill(ids % 5 == 0, -100)}


def gradients(model: Any, *, autocast: bool = False) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradient of every parameter that got one, in float64."""
    model.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        loss = model(**batch(model)).loss
    loss.backward()
    return loss.item(), {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def distance(got: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    """Return the squared norm of what gradients differ by, relative to the true ones'."""
    assert got.keys() == true.keys()
    return float(sum((got[n] - true[n]).square().sum() for n in true) / sum(t.square().sum() for t in true.values()))


LORA = ("Llama", ("q_proj", "up_proj"))


@promise("patched", "adapters")
@pytest.mark.parametrize(
    ("family", "adapted", "precision"),
    [*((family, (), "bfloat16") for family in FUSED), ("Llama", MLP, "bfloat16"), (*LORA, "bfloat16"),
     ("Gemma2", (), "float32"), (*LORA, "autocast")],
)  # fmt: skip
def test_loss_and_gradients(family: str, adapted: tuple[str, ...], precision: str) -> None:
    stock = build(family, torch.bfloat16 if precision == "bfloat16" else torch.float32, adapted)
    model, exact = copy.deepcopy(stock), copy.deepcopy(stock).double()
    report = lowtide.patch(model)
    true_loss, true = gradients(exact)
    (loss, ours), (_, theirs) = (gradients(m, autocast=precision == "autocast") for m in (model, stock))
    if precision == "float32":
        assert abs(loss - true_loss) < 1e-5
        assert distance(ours, true) < 1e-10
    else:
        assert abs(loss - true_loss) < 3e-2
        assert distance(ours, true) < 1.3 * distance(theirs, true)
    if adapted:
        assert (report.calls_fused, report.calls_materialised) == (1, 0), str(report)
        assert report.parts["mlp"].patched
    else:
        assert sum(report.parts[part].patched for part in ("mlp", "norm", "rope")) == FUSED[family], str(report)


@promise("compile", "memory")
@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
@pytest.mark.parametrize("whole", [False, True])
def test_compiled_models_build_no_logits_and_save_no_more(whole: bool) -> None:
    """Than the stock model compiled in the same way: each layer, or the whole, for which transformers makes a mask."""
    stock, kept = build("Llama", torch.bfloat16), []
    _, true = gradients(stock)
    for patched in (False, True):
        model = copy.deepcopy(stock)
        report = lowtide.patch(model) if patched else None
        for module in [model] * whole + [*layers_of(model)] * (not whole):
            module.compile(dynamic=False)
        assert distance(gradients(model)[1], true) < 1e-3
        inputs = batch(model, 1024)
        model(**inputs).loss.backward()
        gc.collect()
        before = requested_bytes()
        loss = model(**inputs).loss
        kept.append(requested_bytes() - before)
        del loss
        assert report is None or (report.calls_fused, report.calls_materialised) == (3, 0), str(report)
    assert kept[1] <= kept[0]


@promise("host")
@pytest.mark.filterwarnings("ignore")  # of peft's and cuBLAS's own
@pytest.mark.parametrize(("adapted", "dropout", "dtype"), [((), 0.0, torch.bfloat16), (MLP, 0.1, torch.float32)])
def test_a_module_never_waits_for_the_device(adapted: tuple[str, ...], dropout: float, dtype: torch.dtype) -> None:
    model = build("Llama" if adapted else "Qwen3", dtype, adapted, dropout)
    lowtide.patch(model)
    layer = layers_of(model)[0]
    if not adapted:
        layer.mlp.checkpoint_level = 1
    for module in (layer.mlp, *([] if adapted else [model.model.norm])):
        hidden = torch.ones(1, 131, 256, dtype=dtype, device="cuda", requires_grad=True)
        for waits in (nullcontext, no_waits):  # the first time compiles
            with waits():
                module(hidden).backward(torch.ones_like(hidden))


@pytest.mark.parametrize(("family", "adapted"), [("Gemma2", ()), ("Llama", MLP)])
def test_a_model_that_was_trained_leaves_nothing_on_the_gpu(family: str, adapted: tuple[str, ...]) -> None:
    """Nor does another that is of the same shapes, or reads another length."""

    def in_use() -> int:
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        return requested_bytes()

    before = in_use()
    for lengths in ((131, 131, 131), (131, 97), (67, 97, 131)):
        model = build(family, torch.bfloat16, adapted)
        lowtide.patch(model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, fused=True)
        for T in lengths:
            model(**batch(model, T)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        del model, optimizer, trained
        assert in_use() - before < 2**18, lengths
