"""What the tests of CCE, Liger and TRL cover, as tables of shapes, dtypes and options, lowtide in the peer's place.

The facts (sizes, options, tolerances) are those of apple/ml-cross-entropy's `tests/test_cce_loss_*.py`,
linkedin/Liger-Kernel's `test/transformers` and `test/chunked_loss`, and TRL 1.16's `tests`; tensors, references
(`references`, in float64) and judgement are ours. Sizes that need a GPU's speed are `slow`. CCE compares with a plain
computation's own error plus a tolerance, Liger with tolerances alone.

Deviations that are meant: `DEVIATIONS`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from fuzz import references
from support import relative_error

DEVIATIONS = {
    "Liger: z-loss with class weights and reduction 'mean'": (
        "Liger divides the z-loss by the number of valid tokens, and the rest by their class weights; lowtide divides"
        " both by the class weights, as one mean of one loss a token."
    )
}
SLOW = pytest.mark.slow
LOW = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def leaves(
    seed: int, N: int, V: int, D: int, dtype: torch.dtype, bias: float | None, unit: bool
) -> list[Tensor | None]:
    """Hidden states, weight and bias as CCE draws them: the first classes are hidden states themselves."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(N, D, generator=g) / (D**0.5 if unit else 1.0)
    w = torch.randn(V, D, generator=g)
    if unit:
        w[: min(N, V) // 2] = x[: min(N, V) // 2]
    b = None if bias is None else bias * torch.randn(V, generator=g)
    return [None if t is None else t.to(dtype).requires_grad_() for t in (x, w, b)]


def exact(tensors: list[Tensor | None], dtype: torch.dtype = torch.float64) -> list[Tensor | None]:
    return [None if t is None else t.detach().to(dtype).requires_grad_() for t in tensors]


def within(got: Tensor, true: Tensor, plain: Tensor, tolerance: float) -> None:
    """CCE's judgement of each entry, and ours of the whole: no further off than twice plain PyTorch and a rounding."""
    excess = (got.double() - true).abs() - (plain.double() - true).abs()
    assert excess.max().item() <= tolerance, excess.max().item()
    assert relative_error(got, true) <= 2 * relative_error(plain, true) + 3e-6 + LOW[got.dtype]


def beside(
    ours: Callable[..., Any], true: Callable[..., Any], tensors: list[Tensor | None]
) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of each value, and of each gradient for one upstream: ours, and the truth in float64."""
    found, upstream = [], list[Tensor]()
    for function, of in ((ours, tensors), (true, exact(tensors))):
        values = function(*of)
        values = values if isinstance(values, tuple) else (values,)
        upstream = upstream or [torch.randn(v.shape).to(v.dtype) if v.dim() else torch.ones_like(v) for v in values]
        grads = [u.to(v.dtype) for u, v in zip(upstream, values, strict=True)]
        found.append((*values, *torch.autograd.grad(values, [t for t in of if t is not None], grads)))
    return list(zip(*found, strict=True))


CCE_SHAPES = [(256, 512, 128), (252, 507, 128), (252, 507, 123)]  # tokens, vocabulary, hidden size
CCE_FORWARD = [(torch.float32, 1e-5), (torch.float16, 1e-3), (torch.bfloat16, 1e-2)]
CCE_BACKWARD = [(torch.float32, 5e-4), *CCE_FORWARD[1:]]
CCE_REDUCED = [["none", "mean", "sum"], [0.0, 1.0]]
CCE_CASES = (  # values alone, and with gradients
    [*itertools.product(CCE_SHAPES, CCE_FORWARD, [None, 20.0], [None, 0.01], [0, 2], [False, True])],
    [*itertools.product(CCE_SHAPES, CCE_BACKWARD, [None, 20.0], [None, 0.02], *[[False, True]] * 2, *CCE_REDUCED)],
)


def ignored(y: Tensor, share: float, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    y[torch.randperm(y.numel(), generator=g)[: int(share * y.numel())]] = -100
    return y


def cce(seed: int, case: Any, *, backward: bool) -> None:
    (N, V, D), (dtype, tolerance), softcap, bias, shift, invalid, *rest = case
    reduction, z_loss = rest or ("none", 0.0)
    tensors = leaves(seed, N, V, D, dtype, bias, unit=True)
    y = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(seed + 1))
    y = (ignored(y, 0.2, seed) if invalid else y).view(4, -1)
    kwargs: dict[str, Any] = {"softcap": softcap, "reduction": reduction, "z_loss": z_loss}
    results = []
    for which, of in (("ours", tensors), ("true", exact(tensors)), ("plain", exact(tensors, dtype))):
        h, target = of[0].view(4, -1, D), y  # type: ignore[union-attr]
        if shift == 2:  # two steps ahead: one of them by hand
            h, target = h[:, :-1], target[:, 1:]
        function = lowtide.linear_cross_entropy if which == "ours" else references.cross_entropy
        loss = function(h, of[1], target, linear_bias=of[2], shift=bool(shift), **kwargs)
        loss = loss if which == "ours" else loss[0]
        parts = [t for t in of if t is not None]
        results.append([loss, *(torch.autograd.grad(loss.mean(), parts) if backward else ())])
    for got, true, plain in zip(*results, strict=True):
        within(got.detach(), true.detach(), plain.detach(), tolerance * (N if reduction == "sum" else 1))


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("backward", [False, True])
def test_cce(backward: bool, part: int) -> None:
    """144 sets of options of the loss and 864 of its gradients, of which each run without --slow takes some."""
    for seed, case in enumerate(CCE_CASES[backward]):
        if seed % 4 == part and (seed // 4) % (54 if backward else 12) == part:
            cce(seed, case, backward=backward)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_all_of_cce(part: int) -> None:
    for backward, cases in enumerate(CCE_CASES):
        for seed, case in enumerate(cases[part::8]):
            cce(seed, case, backward=bool(backward))


LIGER_HEAD = {  # tokens, hidden size, vocabulary; atol and rtol by dtype, for "mean" and "sum"
    "shapes": [(4 * 47, 31, 123), pytest.param((8 * 128, 1024, 4096), marks=SLOW)],
    "tolerances": [
        ("mean", torch.bfloat16, 5e-3, 5e-2), ("mean", torch.float32, 1e-5, 5e-4),
        ("sum", torch.bfloat16, 5.0, 50.0), ("sum", torch.float32, 1e-3, 5e-2),
    ],
    "options": [
        {}, {"label_smoothing": 0.1, "ignore_index": 42, "z_loss": 1e-4, "softcap": 30.0},
        {"class weights": True, "label_smoothing": 0.1, "ignore_index": 42, "softcap": 30.0},
        {"class weights": True, "label_smoothing": 0.1, "ignore_index": 42, "z_loss": 1e-4, "softcap": 30.0},
    ],
}  # fmt: skip


@pytest.mark.parametrize("options", LIGER_HEAD["options"], ids=str)
@pytest.mark.parametrize("bias", [None, 1.0])
@pytest.mark.parametrize("case", LIGER_HEAD["tolerances"])
@pytest.mark.parametrize("shape", LIGER_HEAD["shapes"])
def test_liger_linear_cross_entropy(shape: Any, case: Any, bias: float | None, options: dict[str, Any]) -> None:
    """Against what Liger's tests compare with, in float64; the one deviation is its z-loss's denominator, shown."""
    (N, D, V), (reduction, dtype, atol, rtol) = shape, case
    kwargs = {k: v for k, v in options.items() if k != "class weights"}
    tensors = leaves(1, N, V, D, dtype, bias, unit=False)
    q = torch.rand(V) if "class weights" in options else None
    index = kwargs.get("ignore_index", -100)
    y = torch.randint(0, V, (N,))
    y[torch.randperm(N)[: N // 3]] = index

    def true(x: Any, w: Any, b: Any, **changes: Any) -> Tensor:
        return references.cross_entropy(x, w, y, b, q, reduction, **kwargs | changes)[0]

    def ours(x: Any, w: Any, b: Any) -> Tensor:
        return lowtide.linear_cross_entropy(x, w, y, linear_bias=b, weight=q, reduction=reduction, **kwargs)

    for got, want in beside(ours, true, tensors):
        torch.testing.assert_close(got.double(), want, atol=atol, rtol=rtol)
        assert relative_error(got, want) < 2e-5 + 1.5 * LOW[dtype]
    if q is not None and "z_loss" in kwargs and reduction == "mean":
        kept, of = y != index, exact(tensors)
        whole, without = true(*of), true(*of, z_loss=0.0)
        z_alone = (whole - without) * q[y.where(kept, 0)].double().where(kept, 0).sum()
        assert not torch.isclose(without + z_alone / kept.sum(), whole, rtol=1e-6), DEVIATIONS


@pytest.mark.parametrize("ignored_share", [0.0, 0.25, 1.0])
@pytest.mark.parametrize(("temperature", "beta"), [(1.0, 0.5), (2.0, 0.1), (1.0, 0.0), (1.0, 1.0)])
@pytest.mark.parametrize("case", [(torch.bfloat16, 5e-3, 5e-2), (torch.float32, 1e-5, 5e-4)])
@pytest.mark.parametrize("shape", [(4, 8, 8), (63, 41, 41), pytest.param((4 * 423, 167, 1423), marks=pytest.mark.slow)])
def test_liger_linear_jsd(shape: Any, case: Any, temperature: float, beta: float, ignored_share: float) -> None:
    """A student of half the teacher's hidden size, some tokens left out; the mean is over those that are not."""
    (N, D, V), (dtype, atol, rtol) = shape, case
    student = leaves(2, N, V, max(1, D // 2), dtype, None, unit=False)[:2]
    h, u, _ = (None if t is None else t.detach() for t in leaves(3, N, V, D, dtype, None, unit=False))
    mask = torch.rand(N) >= ignored_share
    kwargs: dict[str, Any] = {"kind": "jsd", "beta": beta, "temperature": temperature, "mask": mask}
    kwargs |= {"reduction": "mean", "num_items": max(1, int(mask.sum()))}
    for got, want in beside(
        lambda x, w: lowtide.linear_divergence(x, w, h, u, **kwargs),
        lambda x, w: references.divergence(x, w, *exact([h, u]), **kwargs),
        student,
    ):
        torch.testing.assert_close(got.double(), want, atol=atol, rtol=rtol)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(
    ("leading", "D", "F"),
    [((6, 42), 123, 431), *(pytest.param(*size, marks=SLOW) for size in (((2, 256), 256, 512), ((9, 41), 341, 4231)))],
)
def test_liger_gated_mlp(leading: Any, D: int, F: int, dtype: torch.dtype, rtol: float, activation: str) -> None:
    """Liger allows an absolute error of 1 and of 10,000 beside these; we allow none of the norm."""
    shapes = enumerate([(*leading, D), (F, D), (F, D), (D, F)])
    tensors = [torch.randn(*s).div(s[-1] ** 0.5 if i else 1.0).to(dtype).requires_grad_() for i, s in shapes]
    ours, true = (partial(function, activation=activation) for function in (lowtide.swiglu_mlp, references.swiglu))
    for got, want in beside(ours, true, tensors):
        assert relative_error(got, want) < rtol


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("offset", "rounding"), [(0.0, "before_weight"), (1.0, "after_weight"), (0.0, "after_weight")])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("shape", [(2, 128, 512), (5, 123, 123), (2, 2, 8), (9, 7, 41)])
def test_liger_rms_norm(
    shape: tuple[int, ...], dtype: torch.dtype, tolerance: float, offset: float, rounding: Any, affine: bool
) -> None:
    x = torch.randn(shape).to(dtype).requires_grad_()
    w = torch.randn(shape[-1]).to(dtype).requires_grad_() if affine else None
    given = {"eps": 1e-6, "offset": offset, "rounding": rounding}
    ours, true = (partial(norm, **given) for norm in (lowtide.layers.rms_norm, references.rms_norm))
    for got, want in beside(ours, true, [x, w]):
        assert relative_error(got, want) < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
@pytest.mark.parametrize("expanded", [True, False])
@pytest.mark.parametrize(
    "shape", [(1, 2, 2, 2, 8), (1, 2, 1, 2, 8), (1, 128, 32, 8, 64), pytest.param((3, 423, 73, 155, 92), marks=SLOW)]
)
def test_liger_rotary(shape: tuple[int, ...], expanded: bool, dtype: torch.dtype, tolerance: float) -> None:
    B, T, heads, kv_heads, d = shape
    tensors = [torch.randn(B, T, H, d).transpose(1, 2).to(dtype).detach().requires_grad_() for H in (heads, kv_heads)]
    angles = torch.arange(T)[:, None] * 1e-4 ** (torch.arange(d // 2) / (d // 2))
    table = torch.cat((angles, angles), -1)[None].expand(B if expanded else 1, T, d)
    cos, sin = table.cos().to(dtype), table.sin().to(dtype)
    for got, want in beside(
        lambda q, k: lowtide.layers.rotary(q, k, cos, sin),
        lambda q, k: references.rotary(q, k, cos.double(), sin.double()),
        tensors,
    ):
        assert relative_error(got, want) < tolerance


TRL_SHAPES = [(2, 8, 16, 32), (1, 5, 4, 7), (3, 17, 31, 123)]  # sequences, tokens, hidden size, vocabulary


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
@pytest.mark.parametrize("shape", TRL_SHAPES)
def test_trl_log_probabilities_and_entropies(shape: tuple[int, int, int, int], temperature: float) -> None:
    """`selective_log_softmax` and `entropy_from_logits` of the installed TRL, whose tests compare with log-softmax."""
    utils = pytest.importorskip("trl.trainer.utils")
    B, T, D, V = shape
    x, w, y = (
        torch.randn(B, T, D, dtype=torch.float64),
        torch.randn(V, D, dtype=torch.float64),
        torch.randint(0, V, (B, T)),
    )
    stats = lowtide.linear_token_stats(x, w, y, want=("logprob", "entropy"), logit_scale=1 / temperature)
    z = x @ w.T / temperature
    torch.testing.assert_close(stats.logprob, utils.selective_log_softmax(z, y), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(stats.entropy, utils.entropy_from_logits(z), rtol=1e-10, atol=1e-10)
    several = torch.randint(0, V, (B, T, 3))
    torch.testing.assert_close(
        lowtide.linear_logprobs(x, w, several, logit_scale=1 / temperature),
        utils.selective_log_softmax(z, several),
        rtol=1e-10,
        atol=1e-10,
    )
