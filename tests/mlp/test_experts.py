"""The fused experts beside every pair of a token and an expert in plain PyTorch, in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lowtide.errors import ArgumentValueError, UnsupportedError
from lowtide.mlp import expert_rows
from lowtide.mlp.expert_call import Form
from mlp.experts import FORMS, GPT_OSS, SIZES, by_pairs, fused, operands, with_gradients
from mlp.test_swiglu_memory import after_forward
from support import assert_near, doubled, relative_error

LEVELS = pytest.mark.parametrize("level", [0, 1])


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_rows, "PIECE", 2**7)  # several pieces of rows


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@LEVELS
def test_values_and_gradients(form: Form, bias: bool, transposed: bool, level: int) -> None:
    leaves, ids = operands(bias=bias, transposed=transposed)
    expected = with_gradients(by_pairs(leaves, ids, form, transposed=transposed), leaves)
    y = fused(leaves, ids, form, transposed=transposed, checkpoint_level=level)
    twice = with_gradients(y, leaves, retain_graph=True)
    for got in (twice, with_gradients(y, leaves)):  # the second writes over what was saved
        assert_near(got, expected, 1e-13)
    assert expected[3][2].abs().max() == 0  # of the expert without tokens


@pytest.mark.parametrize("sizes", [(0, 2, 3, 8, 12), (1, 1, 1, 8, 12), (5, 4, 4, 3, 1), (9, 2, 70, 16, 8)], ids=str)
@LEVELS
def test_sizes(sizes: tuple[int, ...], level: int) -> None:
    leaves, ids = operands(sizes, empty=None)
    got = with_gradients(fused(leaves, ids, GPT_OSS, checkpoint_level=level), leaves)
    assert_near(got, with_gradients(by_pairs(leaves, ids, GPT_OSS), leaves), 1e-13)


@pytest.mark.parametrize("bias", [False, True])
@LEVELS
def test_pairs_of_no_expert_add_nothing(level: int, bias: bool) -> None:
    """As transformers' experts skip an id that is the number of experts; also all pairs of a token, and of all."""
    leaves, ids = operands(bias=bias)
    E = leaves[2].shape[0]
    ids[::3, 0], ids[4] = E, E
    for each in (ids, torch.full_like(ids, E)):
        got = with_gradients(fused(leaves, each, GPT_OSS, checkpoint_level=level), leaves)
        assert_near(got, with_gradients(by_pairs(leaves, each, GPT_OSS), leaves), 1e-13)
        assert not got[2][each == E].any()


@LEVELS
def test_an_expert_that_a_token_has_twice(level: int) -> None:
    leaves, ids = operands()
    ids[:, 1] = ids[:, 0]
    got = with_gradients(fused(leaves, ids, GPT_OSS, checkpoint_level=level), leaves)
    assert_near(got, with_gradients(by_pairs(leaves, ids, GPT_OSS), leaves), 1e-13)


@LEVELS
def test_every_subset_of_frozen_tensors(level: int) -> None:
    for flags in itertools.product((False, True), repeat=6):
        leaves, ids = operands()
        for leaf, flag in zip(leaves, flags, strict=True):
            leaf.requires_grad_(flag)
        y = fused(leaves, ids, GPT_OSS, checkpoint_level=level)
        assert y.requires_grad == any(flags)
        if any(flags):
            assert_near(with_gradients(y, leaves), with_gradients(by_pairs(leaves, ids, GPT_OSS), leaves), 1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("routing", [None, torch.float32])
@LEVELS
def test_narrow_dtypes_err_no_more_than_plain_pytorch(
    dtype: torch.dtype, routing: torch.dtype | None, level: int
) -> None:
    leaves, ids = operands((64, 3, 5, 32, 48), dtype=dtype)
    if routing is not None:
        leaves[1] = leaves[1].detach().to(routing).requires_grad_()
    true = doubled(*leaves)
    expected = with_gradients(by_pairs(true, ids, GPT_OSS), true)
    plain = with_gradients(by_pairs(leaves, ids, GPT_OSS), leaves)
    got = with_gradients(fused(leaves, ids, GPT_OSS, checkpoint_level=level), leaves)
    for g, p, e in zip(got, plain, expected, strict=True):
        assert g.dtype == p.dtype or p is plain[0]  # PyTorch promotes a narrow row by a wide weight
        assert relative_error(g, e) <= 1.3 * relative_error(p, e) + torch.finfo(dtype).eps / 4


@LEVELS
def test_operands_of_another_dtype(level: int) -> None:
    """As under autocast: the output has the input's dtype, each gradient that of its tensor."""
    leaves, ids = operands((64, 3, 5, 32, 48), dtype=torch.float32)
    got = with_gradients(fused(leaves, ids, GPT_OSS, dtype=torch.bfloat16, checkpoint_level=level), leaves)
    narrow = [leaf.detach().bfloat16().requires_grad_() for leaf in leaves]
    same = with_gradients(fused(narrow, ids, GPT_OSS), narrow)
    true = doubled(*leaves)
    expected = with_gradients(by_pairs(true, ids, GPT_OSS), true)
    for g, s, e in zip(got, same, expected, strict=True):
        assert g.dtype == torch.float32
        assert relative_error(g, e) <= 1.2 * relative_error(s, e)


@LEVELS
def test_not_finite_values_stay_with_their_tokens(level: int) -> None:
    leaves, ids = operands()
    ids[:] = torch.tensor([0, 1, 3])
    ids[5] = 4  # alone with its expert
    with torch.no_grad():
        leaves[0][5] = torch.nan
    x, routing, gate_up, *_ = with_gradients(fused(leaves, ids, GPT_OSS, checkpoint_level=level), leaves)[1:]
    others = torch.arange(len(x)) != 5
    assert x[others].isfinite().all()
    assert routing[others].isfinite().all()
    assert x[5].isnan().all()
    assert gate_up[:4].isfinite().all()
    assert gate_up[4].isnan().all()


@pytest.mark.parametrize("reentrant", [False, True])
@LEVELS
def test_in_a_checkpoint(level: int, reentrant: bool) -> None:
    leaves, ids = operands()
    y = checkpoint(lambda *own: fused(own, ids, GPT_OSS, checkpoint_level=level), *leaves, use_reentrant=reentrant)
    expected = with_gradients(by_pairs(leaves, ids, GPT_OSS), leaves)
    generator = torch.Generator().manual_seed(7)
    y.backward(torch.randn(y.shape, generator=generator, dtype=torch.float64))
    assert_near([y.detach(), *(leaf.grad for leaf in leaves)], expected, 1e-13)


@LEVELS
def test_flop(level: int) -> None:
    leaves, ids = operands()
    T, K, _, D, size = SIZES
    pair = 2 * T * K * D * size  # of one GEMM of the size of down
    with FlopCounterMode(display=False) as forward:
        y = fused(leaves, ids, GPT_OSS, checkpoint_level=level)
    with FlopCounterMode(display=False) as backward:
        with_gradients(y, leaves)
    assert forward.get_total_flops() == 3 * pair
    assert backward.get_total_flops() == (6 + 2 * level) * pair


@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@LEVELS
def test_compiled(level: int) -> None:
    """One graph, also where T changes."""
    compiled = torch.compile(
        lambda leaves, ids: fused(leaves, ids, GPT_OSS, checkpoint_level=level) * 2, fullgraph=True
    )
    for T in (7, 23, 11):
        leaves, ids = operands((T, *SIZES[1:]))
        expected = with_gradients(by_pairs(leaves, ids, GPT_OSS) * 2, leaves)
        assert_near(with_gradients(compiled(leaves, ids), leaves), expected, 1e-13)


def test_the_same_bits_each_time() -> None:
    leaves, ids = operands(dtype=torch.float32)
    runs = [with_gradients(fused(leaves, ids, GPT_OSS), leaves) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_a_second_derivative_is_an_error() -> None:
    leaves, ids = operands()
    y = fused(leaves, ids, GPT_OSS)
    (grad,) = torch.autograd.grad(y.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(UnsupportedError, match="differentiated once"):
        grad.sum().backward()


def test_a_level_that_does_not_exist() -> None:
    leaves, ids = operands()
    with pytest.raises(ArgumentValueError, match="checkpoint_level"):
        fused(leaves, ids, GPT_OSS, checkpoint_level=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_bytes(dtype: torch.dtype) -> None:
    """Gate and up and the order of the pairs, or the order alone."""
    T, K, E, _, size = sizes = (64, 3, 5, 32, 48)
    leaves, ids = operands(sizes, dtype=dtype, bias=False)
    order = 4 * (T * K + E)
    for level, activations in ((0, 2 * size * T * K * dtype.itemsize), (1, 0)):
        saved = after_forward(lambda k=level: fused(leaves, ids, Form("silu"), checkpoint_level=k))
        assert order + activations <= saved <= order + activations + 64  # empty tensors have a few bytes
