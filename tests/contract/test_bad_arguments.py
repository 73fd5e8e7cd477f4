"""Arguments that no function takes, in the place of each good one: a result or lowtide's own error, nothing else."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lowtide
from contract import parts
from contract.cases import FUNCTIONS, arguments
from lowtide import losses
from lowtide.errors import ArgumentTypeError, LowtideError
from promises import promise

pytestmark = [promise("errors"), pytest.mark.filterwarnings("ignore")]  # PyTorch's own, about the tensors made here
N, D, V = 3, 4, 5


def good() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    common: dict[str, Any] = {"D": D, "V": V, "leading": (N,), "softcap": 3.0, "logit_scale": "tensor"}
    choices: dict[str, dict[str, Any]] = {
        "linear_cross_entropy": {
            "weight": True, "token_weight": True, "num_items": "tensor", "label_smoothing": 0.1, "z_loss": 0.1,
        },
        "linear_logprobs": {},
        "linear_token_stats": {"want": ("logprob", "entropy", "topk")},
        "linear_divergence": {
            "kind": ("jsd", 0.5), "teacher_bias": True, "teacher_softcap": 3.0, "temperature": "tensor",
            "reduction": "mean", "num_items": "tensor", "ignored": "some",
        },
    }  # fmt: skip
    heads = {
        name: (FUNCTIONS[name].run, arguments(name, torch.float32, **common | choice))
        for name, choice in choices.items()
    }
    x, w = heads["linear_logprobs"][1]["input"], heads["linear_logprobs"][1]["linear_weight"]
    head = {name: heads["linear_logprobs"][1][name] for name in ("input", "linear_weight", "linear_bias", "softcap")}
    mask, scale = torch.ones(N, dtype=torch.bool), torch.tensor(0.5)
    logprob = -torch.rand(2, 3)
    names = ("chosen_logprob", "rejected_logprob", "ref_chosen_logprob", "ref_rejected_logprob")
    pairs = dict(zip(names, -torch.rand(4, 3), strict=True))
    return heads | {
        "linear_divergence of a top k": (
            lambda ids, logprobs: lowtide.linear_divergence(x, w, None, None, teacher_topk=(ids, logprobs)),
            {"ids": torch.zeros(N, 1, dtype=torch.long), "logprobs": -torch.rand(N, 1)},
        ),
        "linear_apply": (
            applied,
            {"fn": entropy, **head, "token_args": torch.rand(N), "mask": mask, "logit_scale": scale, "out": "token"},
        ),
        **parts.GOOD,
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


def applied(fn: Any, input: Any, linear_weight: Any, token_args: Any, **kwargs: Any) -> Any:
    return lowtide.linear_apply(fn, input, linear_weight, token_args, **kwargs)


def entropy(z: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return torch.special.entr(z.softmax(-1)).sum(-1)


def bad_tensors(like: torch.Tensor) -> dict[str, Any]:
    """Return what stands in a tensor's place; those named first cannot give a result."""
    flat = like.detach()
    number = flat.float()
    found: dict[str, Any] = {
        "complex": number.to(torch.complex64),
        "sparse": number.to_sparse(),
        "nested": torch.nested.nested_tensor([number]),
        "float8": number.to(torch.float8_e4m3fn),
        "float8, wide range": number.to(torch.float8_e5m2),
    }
    if not flat.dim():
        return found
    found |= {
        "jagged": torch.nested.nested_tensor([number[:1], number[1:]], layout=torch.jagged),
        "jagged, of another shape": torch.nested.nested_tensor([torch.randn(2), torch.randn(3)], layout=torch.jagged),
        "quantized": torch.quantize_per_tensor(number, 0.1, 0, torch.quint8),
        "wrong shape": flat.new_zeros((*flat.shape, 7, 2)),
        "on meta": flat.to("meta"),
        "text": "a",
        "list": flat.tolist(),
        "numpy": flat.numpy() if flat.dtype != torch.bfloat16 else None,
        "object": object(),
    }
    if flat.dim() > 1:
        found["csr"] = number.to_sparse_csr()
    found |= {
        "None": None,
        "bool": flat.to(torch.bool),
        "int16": flat.to(torch.int16),
        "double": flat.double(),
        "half": flat.half(),
        "one axis less": flat.sum(0),
        "empty": flat.new_zeros((0,)),
        "inf": number * math.inf,
    }
    return found


NO_FORM = {"complex", "sparse", "nested", "jagged", "float8", "float8, wide range", "csr"}  # named as such
REFUSED = NO_FORM | {"jagged, of another shape", "quantized", "wrong shape", "on meta", "text", "object"}
AS_IT_IS = {"complex", "float8", "float8, wide range", "wrong shape", "quantized"}  # what fn gets for a token
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
    is_tensor = isinstance(kwargs[argument], torch.Tensor)
    must = kind in NO_NUMBER or (is_tensor and kind in REFUSED)
    must &= argument != "token_args" or kind not in AS_IT_IS
    leaves = {k: v.detach().requires_grad_(v.requires_grad) for k, v in kwargs.items() if isinstance(v, torch.Tensor)}
    kwargs = {**kwargs, **leaves, argument: value}
    try:
        out = function(**kwargs)
    except LowtideError as error:
        if must and is_tensor and kind in NO_FORM:
            of_it = re.match(rf"(teacher_topk\.)?{argument}(\[0\])?: expected", str(error))
            return None if of_it and isinstance(error, ArgumentTypeError) else f"not named: {error!r}"
        said = argument.split("_")[0] in str(error) or "expected" in str(error)
        return None if said else f"says nothing of it: {error}"
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
    is_tensor = isinstance(value, torch.Tensor)
    bad = (bad_tensors(value) if is_tensor else {}) | (NUMBERS if not is_tensor or not value.dim() else {})
    for kind, other in bad.items():
        if (found := judge(name, argument, kind, other)) is not None:
            wrong[kind] = found
    assert not wrong


def test_good_arguments_are_taken() -> None:
    for function, kwargs in good().values():
        function(**kwargs)
    function, kwargs = good()["linear_cross_entropy"]  # integers and booleans are real numbers
    counts = {"weight": torch.arange(V), "token_weight": torch.arange(N) > 0, "logit_scale": torch.tensor(2)}
    function(**kwargs | counts)
