"""Several shapes, one after the other, through one `torch.compile` of each function: values and gradients in float64's.

With the compiler's front end and autograd's tracing (`aot_eager`), which is where planning would enter a trace; the
code generator adds nothing to that but time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from fuzz import references
from fuzz.test_bad_arguments import entropy
from support import relative_error

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own
SHAPES = [(7, 8, 33), (12, 8, 33), (5, 6, 19), (3, 10, 50)]  # tokens, hidden size, vocabulary: three graphs at most


def nll_sum(z: Tensor) -> Tensor:
    return z.logsumexp(-1).sum()


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "linear_cross_entropy": (
        lambda x, w, y: lowtide.linear_cross_entropy(x, w, y, z_loss=0.01, softcap=4.0),
        lambda x, w, y: references.cross_entropy(x, w, y, z_loss=0.01, softcap=4.0)[0],
    ),
    "linear_logprobs": (
        lambda x, w, y: lowtide.linear_logprobs(x, w, y, logit_scale=0.7).sum(),
        lambda x, w, y: references.token_stats(x, w, y, logit_scale=0.7)[0].sum(),
    ),
    "linear_token_stats": (
        lambda x, w, y: lowtide.linear_token_stats(x, w, want=("entropy",)).entropy.sum(),  # type: ignore[union-attr]
        lambda x, w, y: references.token_stats(x, w, None, want=("entropy",))[0].sum(),
    ),
    "linear_divergence": (
        lambda x, w, y: lowtide.linear_divergence(
            x, w, x.detach() * 2, w.detach(), kind="reverse_kl", reduction="mean"
        ),
        lambda x, w, y: references.divergence(x, w, x.detach() * 2, w.detach(), kind="reverse_kl", reduction="mean")[0],
    ),
    "linear_apply": (
        lambda x, w, y: lowtide.linear_apply(entropy, x, w).sum(),
        lambda x, w, y: references.apply(entropy, x, w)[0].sum(),
    ),
    "linear_apply of a sum": (
        lambda x, w, y: lowtide.linear_apply(nll_sum, x, w, out="sum"),
        lambda x, w, y: nll_sum(references.logits_of(x, w)),
    ),
    "swiglu_mlp": (
        lambda x, w, y: lowtide.swiglu_mlp(x, w, w.cos(), w.sin().T.contiguous()).square().sum(),
        lambda x, w, y: references.swiglu(x, w, w.cos(), w.sin().T)[0].square().sum(),
    ),
    "rms_norm": (
        lambda x, w, y: lowtide.layers.rms_norm(x, w[0], 1e-6).square().sum() + w.sum(),
        lambda x, w, y: references.rms_norm(x, w[0], 1e-6)[0].square().sum() + w.sum(),
    ),
}


SLOW = pytest.mark.slow
QUICK = ("linear_apply", "linear_apply of a sum")  # tests/head compiles the others, at two shapes


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=SLOW), pytest.param(False, marks=SLOW)])
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else SLOW) for n in FUNCTIONS])
def test_shapes_one_after_the_other(name: str, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    ours, truth = FUNCTIONS[name]
    compiled = torch.compile(ours, dynamic=dynamic, backend="aot_eager")
    for seed, (N, D, V) in enumerate(SHAPES):
        g = torch.Generator().manual_seed(seed)
        x, w = torch.randn(N, D, generator=g).requires_grad_(), torch.randn(V, D, generator=g).requires_grad_()
        y = torch.randint(0, V, (N,), generator=g)
        exact = [t.detach().double().requires_grad_() for t in (x, w)]
        got, want = compiled(x, w, y), truth(*exact, y)
        mine, theirs = torch.autograd.grad(got, (x, w)), torch.autograd.grad(want, exact)
        for a, b in zip((got, *mine), (want, *theirs), strict=True):
            assert relative_error(a, b) < 5e-6, (name, N, D, V)
