"""Small models for the cases of ranks, and what ranks compare of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

import lowtide
from distributed.launch import DEVICE, SEED
from four_bit import in_four_bits
from support import relative_error

VOCAB, T = 97, 11  # neither a multiple of 2 or 3
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 4, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "gemma2": ("Gemma2", {"final_logit_softcapping": 2.0, "tie_word_embeddings": False}),
    "phi": ("Phi", {}),  # a head with a bias
    "phi3": ("Phi3", {"pad_token_id": 0}),  # gate and up in one projection
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
}


def model_of(family: str = "llama", *, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    torch.manual_seed(1 + SEED)
    name, own = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**SHAPE, **own, **settings})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model.to(DEVICE, dtype).train()


def qlora() -> Any:
    """A model in 4 bits but for its head, stored as float32, which FSDP2 and ZeRO-3 can shard, with LoRA on MLPs.

    None where bitsandbytes or peft is not installed.
    """
    if find_spec("bitsandbytes") is None or find_spec("peft") is None:
        return None
    from peft import LoraConfig, get_peft_model

    model = in_four_bits(model_of(), torch.float32, quant_storage=torch.float32)
    lora = LoraConfig(r=2, target_modules=["gate_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(model, lora).train()


def batch_of(stream: int = 0) -> dict[str, Tensor]:
    """Two sequences, a third of their labels ignored: as many in each stream, for the mean of the ranks' means."""
    ids = torch.randint(3, VOCAB - 1, (2, T), generator=torch.Generator().manual_seed(stream + SEED))
    labels = ids.clone()
    labels[0, :4] = labels[1, 5:8] = -100
    return {"input_ids": ids.to(DEVICE), "labels": labels.to(DEVICE)}


class Functional(nn.Module):
    """A body and a head, and the loss by a call of the function; ``way``: how it comes by the head's weight."""

    def __init__(self, model: Any, way: str, options: lowtide.HeadOptions | None = None) -> None:
        super().__init__()
        self.model, self.lm_head, self.way, self.options = model.model, model.lm_head, way, options
        if way == "inside":
            self.lm_head = HeadWithLoss(model.lm_head.weight, options)

    def forward(self, input_ids: Tensor, labels: Tensor, items: Any = None) -> Any:
        hidden = self.model(input_ids=input_ids).last_hidden_state[: len(labels)]
        if self.way == "stock":
            loss = nn.functional.cross_entropy(
                self.lm_head(hidden)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
            )
            loss = loss / ((labels[:, 1:] != -100).sum() if items is None else items)
        elif self.way == "inside":
            loss = self.lm_head(hidden, labels, items)
        else:
            if self.way == "unshard":
                self.lm_head.unshard()
            loss = lowtide.linear_cross_entropy(hidden, self.lm_head.weight, labels, shift=True, options=self.options)
        return Output(loss)


class Output(NamedTuple):
    """What DDP looks for tensors in."""

    loss: Tensor


class HeadWithLoss(nn.Module):
    """The output layer with its loss inside; of a weight on several axes of ranks, its classes are on one of them."""

    def __init__(self, weight: nn.Parameter, options: lowtide.HeadOptions | None) -> None:
        super().__init__()
        self.weight, self.options = weight, options

    def forward(self, hidden: Any, labels: Tensor, items: Any) -> Tensor:
        if isinstance(self.weight, DTensor):
            hidden = DTensor.from_local(hidden, self.weight.device_mesh, [Replicate()], run_check=False)
        loss = lowtide.linear_cross_entropy(
            hidden, self.weight, labels, shift=True, num_items=items, options=self.options
        )
        return whole(loss)


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients, whole, and let go of them."""
    found = {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {name.removeprefix("module."): gradient for name, gradient in found.items()}  # DDP's


def step(model: Any, batch: dict[str, Tensor], loss_of: Callable[..., Any] | None = None) -> dict[str, Tensor]:
    """Return the loss and the gradients of one step, whole."""
    loss = model(**batch).loss if loss_of is None else loss_of(model, batch)
    loss.backward()
    return {"loss": whole(loss).detach(), **gradients(model)}


def same(
    got: dict[str, Tensor], want: dict[str, Tensor], what: object = "", rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    """Compare what `step` or `gradients` returned with the same of another model."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{what} {n}: {m}")


def same_mean(loss: Tensor, want: Tensor, group: Any = None) -> None:
    """Compare the mean of the ranks' losses with one process's."""
    mean = loss.detach().clone()
    dist.all_reduce(mean, group=group)
    close = 1e-12 if mean.dtype == torch.float64 else 1e-6
    torch.testing.assert_close(mean / dist.get_world_size(group), want.detach(), rtol=close, atol=close)


def near(
    got: dict[str, Tensor], stock: dict[str, Tensor], true: dict[str, Tensor], where: object, close: float = 5e-7
) -> None:
    """Hold losses and gradients against the truth: they may err three times what stock's do, and ``close`` more."""
    assert got.keys() == stock.keys() == true.keys(), where
    for name, value in true.items():
        error, stock_error = relative_error(got[name], value), relative_error(stock[name], value)
        assert stock_error < 100 * close, (where, name, stock_error)
        assert error <= 3 * stock_error + close, (where, name, error, stock_error)


def fused(report: lowtide.PatchReport, calls: int, built: int = 0, what: object = "") -> None:
    assert (report.calls_fused, report.calls_materialised) == (calls, built), f"{what}\n{report}"


@contextmanager
def counted(module: Any, name: str) -> Iterator[list[int]]:
    """Count the calls of a module's function."""
    count, stock = [0], getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return stock(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, name, call)
        yield count
