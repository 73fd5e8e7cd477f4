"""QLoRA on a CUDA device: fused MLPs over bitsandbytes' 4-bit weights, beside stock ones; and a plan beside a step."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lowtide
from four_bit import four_bit_layer, in_four_bits
from gpu.conftest import ON_GPU, no_waits
from lowtide.measure.timing import peak_above
from lowtide.memory import ActivationPolicy, apply_policy
from lowtide.mlp.call import Adapter, Projection
from lowtide.mlp.packed import Packed
from lowtide.mlp.swiglu import adapted_mlp
from lowtide.plan import Adapters
from lowtide.plan.four_bit import config_of
from lowtide.plan.gpus import GPUS
from lowtide.plan.job import Job
from lowtide.plan.shapes import read_shape
from lowtide.plan.step_costs import StepCosts
from support import every_pair, relative_error

bnb = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = [
    *ON_GPU,
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),  # between peft and transformers
    pytest.mark.filterwarnings("ignore:inner dimension:UserWarning"),  # bitsandbytes' own, of an odd size
]
D, FF = 256, 688
CONFIG = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "tie_word_embeddings": False,
    "pad_token_id": 0, "use_cache": False,
}  # fmt: skip
TOKENS, RANK = 8192, 16


def projections(dtype: torch.dtype, *, nested: bool, lora: bool) -> tuple[list[Any], list[Projection]]:
    """Layers of bitsandbytes, and the same as the fused MLP takes them."""
    layers, found = [], []
    for rows, columns in ((FF, D), (FF, D), (D, FF)):
        plain = torch.nn.Linear(columns, rows, bias=False, device="cuda")
        layers.append(four_bit_layer(plain, dtype, compress_statistics=nested))
        a, b = torch.randn(8, columns, device="cuda") * columns**-0.5, torch.randn(rows, 8, device="cuda")
        adapter = Adapter(a.requires_grad_(), b.requires_grad_(), 0.5, 0.0) if lora else None
        packed = Packed.of(layers[-1].weight, layers[-1].weight.quant_state, dtype)
        found.append(Projection(packed, None, adapter))
    return layers, found


def stock(x: Tensor, layers: list[Any], found: list[Projection], *, true: bool = False) -> Tensor:
    def project(i: int, z: Tensor) -> Tensor:
        layer, adapter = layers[i], found[i].adapter
        if true:
            y = F.linear(z, bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).double())
        else:
            y = layer(z)
        if adapter is not None:
            a, b = (side.to(torch.float64 if true else torch.float32) for side in (adapter.a, adapter.b))
            y = y + adapter.scale * (z.to(a.dtype) @ a.T @ b.T).to(y.dtype)
        return y

    return project(2, F.silu(project(0, x)) * project(1, x))


@every_pair(dtype=[torch.bfloat16, torch.float16], nested=[False, True], lora=[False, True], level=[0, 1])
def test_no_further_from_float64_than_bitsandbytes(dtype: torch.dtype, nested: bool, lora: bool, level: int) -> None:
    torch.manual_seed(0)
    layers, found = projections(dtype, nested=nested, lora=lora)
    x = torch.randn(3, 413, D, device="cuda", dtype=dtype, requires_grad=True)
    upstream = torch.randn(3, 413, D, device="cuda")
    trained = [x, *(side for one in found if one.adapter for side in one.adapter[:2])]

    def run() -> Tensor:
        return adapted_mlp(x, *found, activation="silu", checkpoint_level=level)

    def graded(y: Tensor) -> list[Tensor]:
        return [y, *torch.autograd.grad(y, trained, upstream.to(y.dtype))]

    graded(run())  # compiles the kernels
    with no_waits():
        got = graded(run())
    plain, true = graded(stock(x, layers, found)), graded(stock(x.double(), layers, found, true=True))
    for g, p, t in zip(got, plain, true, strict=True):
        assert relative_error(g, t) <= 1.3 * relative_error(p, t) + 1e-4
    assert all(torch.equal(a, b) for a, b in zip(got, graded(run()), strict=True)), "not the same from run to run"


@pytest.mark.parametrize(
    ("nested", "rows"), [(False, slice(256, 512)), (True, slice(0, 256)), (True, slice(0, 512, 2))]
)
def test_rows_of_one_projection(nested: bool, rows: slice) -> None:
    linear = four_bit_layer(torch.nn.Linear(64, 512, device="cuda"), torch.float32, compress_statistics=nested)
    whole = Packed.of(linear.weight, linear.weight.quant_state, torch.float32)
    expected = bnb.functional.dequantize_4bit(linear.weight.data, linear.weight.quant_state)[rows]
    torch.testing.assert_close(whole[rows].dense(), expected, rtol=1e-6, atol=0)


def model_of(level: int | None, *, nested: bool) -> Any:
    """Four of Llama-3-8B's layers in NF4 with LoRA on all of them, patched with its MLPs at a level; None: stock."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**CONFIG)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model = in_four_bits(model.train(), torch.bfloat16, compress_statistics=nested)
    with warnings.catch_warnings(action="ignore"):
        lora = peft.LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, lora)
    torch.cuda.empty_cache()
    if level is not None:
        report = lowtide.patch(model)
        assert "NF4 weights dequantised" in report.parts["mlp"].outcome
        apply_policy(model, ActivationPolicy(mlp_level=level))
    return model


def test_an_output_embedding_in_4_bits() -> None:
    """Its loss without logits, beside stock's and beside a float64 one of the dequantised weight."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.AutoConfig.for_model(**{**CONFIG, **sizes, "num_key_value_heads": 2})
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    models = [in_four_bits(model.train(), torch.bfloat16, skip=())]
    models.append(copy.deepcopy(models[0]))
    ids = torch.randint(1, 32000, (1, 4096), device="cuda")
    report = lowtide.patch(models[0], mlp=False, norm=False, rope=False)
    assert "NF4 weight dequantised for it" in report.parts["loss"].outcome
    losses, gradients, peaks = [], [], []
    for m in models:
        norm = m.model.norm.weight.requires_grad_()

        def step(m: Any = m, norm: Tensor = norm) -> tuple[Tensor, Tensor]:
            loss = m(input_ids=ids, labels=ids).loss
            return loss.detach(), torch.autograd.grad(loss, norm)[0]

        loss, gradient = step()
        losses.append(loss)
        gradients.append(gradient)
        peaks.append(peak_above(step, "cuda"))
    hidden = models[1].model(input_ids=ids).last_hidden_state.detach().double()
    head = models[1].lm_head.weight
    dense = bnb.functional.dequantize_4bit(head.data, head.quant_state).double()
    true = F.cross_entropy((hidden @ dense.T)[0, :-1], ids[0, 1:])
    assert relative_error(losses[0], true) <= 1.3 * relative_error(losses[1], true) + 1e-4
    assert relative_error(*gradients) <= 2e-2
    assert peaks[0] < peaks[1] / 2
    assert (report.calls_fused, report.calls_materialised) == (2, 0)


def test_a_step_beside_stock_and_beside_its_plan() -> None:
    ids = torch.randint(1, 32000, (1, TOKENS), device="cuda")
    peaks, losses = {}, {}
    before = torch.cuda.memory_allocated()
    for name, level in {"stock": None, "level 0": 0, "level 1": 1}.items():
        model = model_of(level, nested=True)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

        def step(model: Any = model, optimizer: Any = optimizer) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                loss: Tensor = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        losses[name] = step().item()
        held = torch.cuda.memory_allocated() - before
        peaks[name] = (held + peak_above(step, "cuda")) / 2**30
        del model, trained, optimizer, step
        torch.cuda.empty_cache()
    shape = read_shape({**CONFIG, "quantization_config": config_of(nested=True)})
    costs = StepCosts(Job(shape, TOKENS, 1, GPUS["h100"], torch.bfloat16, "adamw", adapters=Adapters(RANK)))
    for level in (0, 1):
        planned = costs.peak(((ActivationPolicy(mlp_level=level), shape.layers),)).bytes / 2**30
        assert losses[f"level {level}"] == pytest.approx(losses["stock"], rel=1e-3)
        assert peaks[f"level {level}"] == pytest.approx(planned, rel=0.15)
    assert peaks["level 1"] < peaks["level 0"] < peaks["stock"]
