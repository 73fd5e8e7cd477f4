"""LoRA on a CUDA device: heads and MLPs no further from the truth than stock, what they keep, no host waits."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from gpu.conftest import ON_GPU, no_waits
from gpu.patched_runs import SIZES, batch, distance, gradients, no_further_than_stock, with_larger_weights
from lowtide.measure.timing import peak_above
from lowtide.mlp.call import Adapter, Projection
from lowtide.mlp.swiglu import adapted_mlp
from support import mlp

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = [
    *ON_GPU,
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]
V = 5003


def build(dtype: torch.dtype, layers: tuple[str, ...], dropout: float = 0.0, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = with_larger_weights(transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=V, **SIZES)))
    lora = peft.LoraConfig(r=8, target_modules=list(layers), lora_dropout=dropout, init_lora_weights=False, **settings)
    return peft.get_peft_model(model.to("cuda", dtype), lora).train()


@pytest.mark.parametrize(
    "layers", [("lm_head",), ("gate_proj", "up_proj", "down_proj"), ("q_proj", "lm_head", "up_proj")]
)
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_loss_and_gradients(layers: tuple[str, ...], precision: str) -> None:
    stock = build(torch.bfloat16 if precision == "bfloat16" else torch.float32, layers)
    report = no_further_than_stock(stock, precision, batch(V))
    assert (report.calls_fused, report.calls_materialised) == (1, 0), str(report)
    assert report.parts["mlp"].patched


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
@pytest.mark.parametrize("compiled", [False, True])
def test_compiled_layers(compiled: bool) -> None:
    stock = build(torch.bfloat16, ("gate_proj", "up_proj", "down_proj", "lm_head"))
    _, true = gradients(stock, batch(V))
    model = copy.deepcopy(stock)
    report = lowtide.patch(model)
    for layer in model.get_base_model().model.layers:
        layer.mlp.checkpoint_level = 1
        if compiled:
            layer.compile()
    _, grads = gradients(model, batch(V))
    assert distance(grads, true) < 1e-3
    assert report.calls_fused == 1


@pytest.mark.filterwarnings("ignore")  # of peft's and cuBLAS's own
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_mlp_never_waits_for_the_device(dropout: float, dtype: torch.dtype) -> None:
    model = build(dtype, ("gate_proj", "up_proj", "down_proj"), dropout)
    lowtide.patch(model)
    module = model.get_base_model().model.layers[0].mlp
    hidden = torch.ones(1, 131, 256, dtype=dtype, device="cuda", requires_grad=True)
    module(hidden).backward(torch.ones_like(hidden))
    with no_waits():
        module(hidden).backward(torch.ones_like(hidden))


def test_dropout_is_the_same_in_both_passes() -> None:
    """The gradient of a function that is linear in x, as dropout and its adapter are, tells what forward dropped."""
    leaves = [None if t is None else t.detach().cuda() for t in mlp(67, 32, 48, bias=False)]
    a, b = torch.randn(4, 48, device="cuda"), torch.randn(32, 4, device="cuda", requires_grad=True)
    x, gate, up, down, *_ = leaves
    for level in (0, 1):
        torch.manual_seed(3)
        y = adapted_mlp(
            x, Projection(gate, None), Projection(up, None), Projection(down, None, Adapter(a, b, 2.0, 0.3)),
            activation="silu", checkpoint_level=level,
        )  # fmt: skip
        base = adapted_mlp(
            x, *(Projection(w, None) for w in (gate, up, down)), activation="silu", checkpoint_level=level
        )
        upstream = torch.randn_like(y)
        (db,) = torch.autograd.grad(y, b, upstream)
        # y is linear in b: <upstream, y - base> = <db, b>
        torch.testing.assert_close((upstream * (y - base)).sum(), (db * b).sum(), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("adapter_dtype", [torch.bfloat16, torch.float32])
def test_kept_bytes(level: int, adapter_dtype: torch.dtype) -> None:
    N, D, F = 4096, 512, 1376
    x, gate, up, down, *_ = [None if t is None else t.detach().cuda().bfloat16() for t in mlp(N, D, F, bias=False)]
    pairs = [(torch.randn(8, i), torch.randn(o, 8)) for i, o in ((D, F), (D, F), (F, D))]
    adapters = [
        Adapter(a.cuda().to(adapter_dtype).requires_grad_(), b.cuda().to(adapter_dtype).requires_grad_(), 2.0, 0.0)
        for a, b in pairs
    ]

    def forward() -> Tensor:
        projections = [Projection(w, None, adapter) for w, adapter in zip((gate, up, down), adapters, strict=True)]
        return adapted_mlp(x.clone(), *projections, activation="silu", checkpoint_level=level)

    forward()
    gc.collect()
    before = torch.cuda.memory_allocated()
    y = forward()
    kept = torch.cuda.memory_allocated() - before - y.nbytes
    assert abs(kept - 2 * N * (D + 2 * F * (level == 0))) < 2**16


def test_a_heads_peak() -> None:
    """LoRA on a frozen head: no logits."""
    stock = build(torch.bfloat16, ("lm_head",))
    model = copy.deepcopy(stock)
    report = lowtide.patch(model, mlp=False, norm=False, rope=False, options=lowtide.HeadOptions(workspace_mib=16))
    inputs = batch(V, 2049)

    def peak(m: Any) -> int:
        def step() -> None:
            m(**inputs).loss.backward()

        step()
        m.zero_grad()
        return peak_above(step, "cuda")

    assert peak(model) < peak(stock) - 2 * 2049 * V * 4
    assert report.calls_materialised == 0
