"""Arguments that no function takes, in the place of each good one: a result or lowtide's own error, nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lowtide
from lowtide import layers, losses
from lowtide.errors import LowtideError

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's own, about the tensors made here
N, D, V, FF = 3, 4, 5, 6


def good() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    x, w, b, y = (
        torch.randn(N, D, requires_grad=True),
        torch.randn(V, D, requires_grad=True),
        torch.randn(V),
        torch.randint(0, V, (N,)),
    )
    head: dict[str, Any] = {"input": x, "linear_weight": w, "linear_bias": b, "softcap": 3.0}
    logprob = -torch.rand(2, 3)
    names = ("chosen_logprob", "rejected_logprob", "ref_chosen_logprob", "ref_rejected_logprob")
    pairs = dict(zip(names, -torch.rand(4, 3), strict=True))
    return {
        "linear_cross_entropy": (
            lowtide.linear_cross_entropy,
            {
                **head,
                "target": y,
                "weight": torch.rand(V),
                "token_weight": torch.rand(N),
                "num_items": torch.tensor(3),
                "logit_scale": torch.tensor(0.5),
                "label_smoothing": 0.1,
                "z_loss": 0.1,
                "ignore_index": -100,
                "reduction": "mean",
                "shift": False,
                "options": lowtide.HeadOptions(),
            },
        ),
        "linear_logprobs": (lowtide.linear_logprobs, {**head, "target": y, "logit_scale": 0.5, "ignore_index": -100}),
        "linear_token_stats": (
            lowtide.linear_token_stats,
            {**head, "target": y, "want": ("logprob", "entropy"), "topk": 2, "logit_scale": 0.5},
        ),
        "linear_divergence": (
            lowtide.linear_divergence,
            {
                **head,
                "teacher_input": torch.randn(N, D),
                "teacher_weight": torch.randn(V, D),
                "teacher_bias": torch.randn(V),
                "mask": torch.ones(N, dtype=torch.bool),
                "temperature": torch.tensor(2.0),
                "kind": "jsd",
                "beta": 0.5,
                "reduction": "mean",
                "num_items": 3,
                "teacher_softcap": 3.0,
            },
        ),
        "linear_apply": (
            lowtide.linear_apply,
            {"fn": entropy, **head, "mask": torch.ones(N, dtype=torch.bool), "logit_scale": 0.5, "out": "token"},
        ),
        "swiglu_mlp": (
            lowtide.swiglu_mlp,
            {
                "input": x,
                "gate_weight": torch.randn(FF, D),
                "up_weight": torch.randn(FF, D),
                "down_weight": torch.randn(D, FF),
                "gate_bias": torch.randn(FF),
                "activation": "silu",
                "checkpoint_level": 1,
                "tile_tokens": 2,
            },
        ),
        "rms_norm": (
            layers.rms_norm,
            {"input": x, "weight": torch.randn(D), "eps": 1e-6, "offset": 1.0, "rounding": "after_weight"},
        ),
        "add_rms_norm": (
            layers.add_rms_norm,
            {"input": x, "residual": torch.randn(N, D), "weight": torch.randn(D), "eps": 1e-6},
        ),
        "rotary": (
            layers.rotary,
            {
                "q": torch.randn(1, 2, 3, 4),
                "k": torch.randn(1, 1, 3, 4),
                "cos": torch.randn(1, 3, 4),
                "sin": torch.randn(1, 3, 4),
                "unsqueeze_dim": 1,
            },
        ),
        "sft_loss": (
            losses.sft_loss,
            {"logprob": logprob, "mask": torch.ones(2, 3).long(), "reduction": "token", "num_items": 3},
        ),
        "grpo_loss": (
            losses.grpo_loss,
            {
                "logprob": logprob,
                "old_logprob": logprob,
                "advantage": torch.randn(2),
                "mask": torch.ones(2, 3).bool(),
                "clip_low": 0.2,
                "ref_logprob": logprob,
                "beta": 0.1,
            },
        ),
        "dpo_loss": (
            losses.dpo_loss,
            {**pairs, "kind": "sigmoid", "beta": 0.1, "label_smoothing": 0.1, "num_items": 4},
        ),
        "plan_head": (lowtide.plan_head, {"N": 4, "D": 5, "V": 6, "dtype": torch.float32, "device": "cpu"}),
    }


def entropy(z: torch.Tensor) -> torch.Tensor:
    return torch.special.entr(z.softmax(-1)).sum(-1)


def bad_tensors(like: torch.Tensor) -> dict[str, Any]:
    """Return what stands in a tensor's place; those named first cannot give a result."""
    flat = like.detach()
    number = flat.float()
    found: dict[str, Any] = {
        "complex": number.to(torch.complex64),
        "sparse": number.to_sparse(),
        "nested": torch.nested.nested_tensor([torch.randn(2), torch.randn(3)], layout=torch.jagged),
        "float8": number.to(torch.float8_e4m3fn),
        "quantized": torch.quantize_per_tensor(number, 0.1, 0, torch.quint8),
        "wrong shape": flat.new_zeros((*flat.shape, 7, 2)),
        "on meta": flat.to("meta"),
        "text": "a",
        "list": flat.tolist(),
        "numpy": flat.numpy() if flat.dtype != torch.bfloat16 else None,
        "object": object(),
    }
    if flat.dim() == 2:
        found["csr"] = number.to_sparse_csr()
    found |= {
        "None": None,
        "bool": flat.to(torch.bool),
        "int16": flat.to(torch.int16),
        "double": flat.double(),
        "half": flat.half(),
        "one axis less": flat.sum(0) if flat.dim() else flat,
        "empty": flat.new_zeros((0,)),
        "inf": number * math.inf,
    }
    return found


REFUSED = {"complex", "sparse", "nested", "float8", "quantized", "wrong shape", "on meta", "text", "object", "csr"}
NUMBERS: dict[str, Any] = {
    "text": "a",
    "huge": 10**400,
    "nan": math.nan,
    "inf": math.inf,
    "negative": -1.0,
    "complex": 1j,
    "vector": torch.ones(2),
    "complex tensor": torch.tensor(1j),
    "bool": True,
    "large": 10**30,
    "list": [1],
    "object": object(),
    "None": None,
    "zero": 0,
    "tensor": torch.tensor(1.0),
}
NO_NUMBER = {"text", "complex", "vector", "complex tensor", "list", "object"}


def judge(name: str, argument: str, kind: str, value: Any) -> str | None:
    """Return what is wrong with the answer to a bad argument, None where nothing is."""
    function, kwargs = good()[name]
    must = (
        kind in REFUSED if isinstance(kwargs[argument], torch.Tensor) else kind in NO_NUMBER
    ) or kind == "complex tensor"
    leaves = {k: v.detach().requires_grad_(v.requires_grad) for k, v in kwargs.items() if isinstance(v, torch.Tensor)}
    kwargs = {**kwargs, **leaves, argument: value}
    try:
        out = function(**kwargs)
    except LowtideError as error:
        return (
            None if argument.split("_")[0] in str(error) or "expected" in str(error) else f"says nothing of it: {error}"
        )
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:150]}"
    if must:
        return f"taken in silence: {str(out)[:80]}"
    results = [
        r for r in (out if isinstance(out, tuple) else (out,)) if isinstance(r, torch.Tensor) and r.requires_grad
    ]
    if results:
        sum(r.sum() for r in results).backward()  # type: ignore[union-attr]
    return None


CASES = [(name, argument) for name, (_, kwargs) in good().items() for argument in kwargs if name != "plan_head"]
CASES += [("plan_head", size) for size in "NDV"]


@pytest.mark.parametrize(("name", "argument"), CASES, ids=lambda x: str(x))
def test_a_bad_argument_is_refused_in_lowtides_words(name: str, argument: str) -> None:
    value, wrong = good()[name][1][argument], {}
    if isinstance(value, torch.Tensor) and value.dim():
        bad = bad_tensors(value)
    else:
        bad = NUMBERS
    for kind, other in bad.items():
        if (found := judge(name, argument, kind, other)) is not None:
            wrong[kind] = found
    assert not wrong
