"""The models that programs are about: tiny ones of transformers, and one written by hand as users write theirs."""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from models.conftest import GPT2, SHAPE

V = 101  # odd, and large enough that a few logits of a row are computed without the others
_SHAPE = {**SHAPE, "vocab_size": V, "num_hidden_layers": 1}
_GPT2 = {**GPT2, "vocab_size": V, "n_layer": 1}
_OPT = {
    **{k: v for k, v in _SHAPE.items() if k not in ("head_dim", "num_key_value_heads", "intermediate_size")},
    "ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0,
}  # fmt: skip

# name -> (class, settings): two that differ in how logits are made, or in what is around them.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _SHAPE),
    "llama-tied": ("LlamaForCausalLM", {**_SHAPE, "tie_word_embeddings": True}),
    "llama-2-layers": ("LlamaForCausalLM", {**_SHAPE, "num_hidden_layers": 2}),
    "qwen3": ("Qwen3ForCausalLM", _SHAPE),
    "qwen3-tied": ("Qwen3ForCausalLM", {**_SHAPE, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2ForCausalLM", {**_SHAPE, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 5.0}),
    "gpt2": ("GPT2LMHeadModel", _GPT2),
    "opt": ("OPTForCausalLM", _OPT),
    "cohere": ("CohereForCausalLM", {**_SHAPE, "logit_scale": 0.25}),
    "granite": ("GraniteForCausalLM", {**_SHAPE, "logits_scaling": 3.0}),
    "phi": ("PhiForCausalLM", _SHAPE),  # a head with a bias
}
OWN = ("own", "own-bias", "own-z-loss")  # see `Own`
NAMES = (*FAMILIES, *OWN)


class Block(nn.Module):
    """A gated MLP behind a norm, as Llama's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.gate_proj = nn.Linear(width, 2 * width, bias=False)
        self.up_proj = nn.Linear(width, 2 * width, bias=False)
        self.down_proj = nn.Linear(2 * width, width, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        n = self.norm(h)
        return h + self.down_proj(F.silu(self.gate_proj(n)) * self.up_proj(n))


class Own(nn.Module):
    """A model as somebody writes one, with a loss in its forward."""

    def __init__(self, kind: str, width: int = 12) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(V, width)
        self.layers = nn.ModuleList([Block(width), Block(width)])
        self.lm_head = nn.Linear(width, V, bias=kind == "own-bias")

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor | None = None, labels: Tensor | None = None, inputs_embeds: Any = None) -> Any:
        h = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            h = layer(h)
        logits, loss = self.lm_head(h), None
        if self.kind == "own-z-loss":
            logits = 3 * torch.tanh(logits / 3)
        if labels is not None:
            rows, y = logits[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1)
            loss = F.cross_entropy(rows.float(), y)
            if self.kind == "own-z-loss":
                loss = loss + 1e-2 * rows.float().logsumexp(-1).square().mean()
        return SimpleNamespace(loss=loss, logits=logits)


@functools.cache
def _made(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name in OWN:
            model: Any = Own(name)
        else:
            cls, settings = FAMILIES[name]
            made = getattr(transformers, cls)
            model = made(made.config_class(**settings))
        with torch.no_grad():  # large enough for losses to differ from log(V)
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.train()


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a fresh model by its name in `NAMES`."""
    return copy.deepcopy(_made(name)).to(dtype)


def batch(seed: int, rows: int = 2, length: int = 7) -> tuple[Tensor, Tensor]:
    """Return ids [rows, length] and labels, of which a third is -100."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, V, (rows, length), generator=g)
    return ids, ids.where(torch.rand(ids.shape, generator=g) > 0.33, -100)
