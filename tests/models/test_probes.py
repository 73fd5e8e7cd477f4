"""Norms and rotations are known by their numbers: what looks like one and computes something else is left alone."""

import functools
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide.models import norm_part, rope_part
from lowtide.models.instance import give_class


class Norm(nn.Module):
    def __init__(self, forward, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12))
        self.variance_epsilon = eps
        self.compute = forward

    def forward(self, x):
        return self.compute(self, x)


def plain(norm, x):
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * normed.to(x.dtype)


def epsilon_outside(norm, x):
    wide = x.float()
    root = wide.pow(2).mean(-1, keepdim=True).sqrt()
    return norm.weight * (wide / (root + norm.variance_epsilon)).to(x.dtype)


def epsilon_as_least(norm, x):
    wide = x.float()
    square = wide.pow(2).mean(-1, keepdim=True).clamp_min(norm.variance_epsilon)
    return norm.weight * (wide * torch.rsqrt(square)).to(x.dtype)


@pytest.mark.parametrize("eps", [1e-5, 1e-9, 1e-16])
def test_where_the_epsilon_stands_shows_however_small_it_is(eps):
    assert isinstance(norm_part.find(Norm(plain, eps), Norm), tuple)
    for forward in (epsilon_outside, epsilon_as_least):
        assert isinstance(norm_part.find(Norm(forward, eps), Norm), str)


def test_a_norm_is_not_patched_for_dtypes_that_no_probe_saw():
    def in_the_weights_dtype(norm, x):  # of float32 rows and a bfloat16 weight bfloat16, as T5's
        narrow = norm.weight.dtype not in (torch.float32, x.dtype)
        return plain(norm, x).to(norm.weight.dtype if narrow else torch.promote_types(norm.weight.dtype, x.dtype))

    norm = Norm(in_the_weights_dtype)
    give_class(norm, "norm", norm_part.overrides, *norm_part.find(norm, Norm)[1])
    norm.bfloat16()
    assert norm(torch.randn(3, 12)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("forward", "patched"),
    [
        (plain, True),
        (lambda norm, x: F.rms_norm(x, (12,), norm.weight.to(x.dtype), norm.variance_epsilon), False),
        (lambda norm, x: plain(norm, x) * 1.001, False),
        (lambda norm, x: plain(norm, x) + 1e-3, False),
        (lambda norm, x: plain(norm, x.clamp(-20, 20)), False),
        (lambda norm, x: plain(norm, x).clamp(-0.5, 0.5) if x.dtype == torch.float16 else plain(norm, x), False),
        (lambda norm, x: plain(norm, x.clamp(-3000, 3000)), False),
        (lambda norm, x: norm.weight * F.layer_norm(x.float(), (12,)).to(x.dtype), False),
        (lambda norm, x: norm.weight * F.normalize(x.float(), dim=-1).to(x.dtype) * 12**0.5, False),  # no epsilon
        (lambda norm, x: norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)), False),  # narrow
        (lambda norm, x: plain(norm, x).tolist(), False),
    ],
)
def test_a_norm_is_what_its_numbers_say(forward, patched):
    found = norm_part.find(Norm(forward), Norm)
    assert isinstance(found, tuple) == patched, found


def test_a_norm_that_learns_more_or_takes_more_stays():
    class Gated(Norm):
        def forward(self, x, gate=None):
            return plain(self, x) if gate is None else plain(self, x) * gate

    assert "more than one input" in norm_part.find(Gated(plain), Gated)
    assert "not a finite number" in norm_part.find(Norm(plain, eps=None), Norm)
    biased = Norm(plain)
    biased.bias = nn.Parameter(torch.zeros(12))
    assert not norm_part.is_candidate(biased)
    assert not norm_part.is_candidate(nn.BatchNorm1d(12))
    assert norm_part.is_candidate(Norm(plain))
    assert norm_part.find(nn.RMSNorm(12, eps=1e-5), nn.RMSNorm)


def attention(turn, decorate=None):
    """A module whose forward calls ``turn`` by the name that attention calls its rotary embedding by."""
    scope = {"apply_rotary_pos_emb": turn, "nn": nn, "decorate": decorate or (lambda forward: forward)}
    exec(
        "class Attention(nn.Module):\n"
        "    @decorate\n"
        "    def forward(self, *args, **kwargs):\n"
        "        return apply_rotary_pos_emb(*args, **kwargs)\n",
        scope,
    )
    return scope["Attention"]()


def stock_turn(q, k, cos, sin, unsqueeze_dim=1):
    def turned(x):
        r = cos.shape[-1]
        a, b = x[..., : r // 2], x[..., r // 2 : r]
        half = torch.cat((-b, a), -1)
        c, s = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return torch.cat((x[..., :r] * c + half * s, x[..., r:]), -1)

    return turned(q), turned(k)


def turn_the_last(q, k, cos, sin, unsqueeze_dim=1):
    r = cos.shape[-1]
    parts = stock_turn(q[..., -r:], k[..., -r:], cos, sin, unsqueeze_dim)
    return tuple(torch.cat((x[..., :-r], part), -1) for x, part in zip((q, k), parts, strict=True))


def turn_pairs(q, k, cos, sin, unsqueeze_dim=1):
    def turned(x):
        x, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        half = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        return torch.cat((x * cos.unsqueeze(unsqueeze_dim) + half * sin.unsqueeze(unsqueeze_dim), rest), -1)

    return turned(q), turned(k)


def turn_the_other_way(q, k, cos, sin, unsqueeze_dim=1):
    return stock_turn(q, k, cos, -sin, unsqueeze_dim)


def turn_one(x, cos, sin, unsqueeze_dim=1):
    return stock_turn(x, x, cos, sin, unsqueeze_dim)[0]


def turn_one_twice(x, cos, sin, unsqueeze_dim=1):
    return turn_one(turn_one(x, cos, sin, unsqueeze_dim), cos, sin, unsqueeze_dim)


def turn_one_without_batch(x, cos, sin):
    return turn_one(x.unsqueeze(0), cos.unsqueeze(0), sin.unsqueeze(0), 2).squeeze(0)


def turn_with_tables_exchanged(q, k, cos, sin, unsqueeze_dim=1):
    return stock_turn(q, k, sin, cos, unsqueeze_dim)


def turn_to_halves(q, k, cos, sin, unsqueeze_dim=1):
    c, s = (t[..., : t.shape[-1] // 2].unsqueeze(unsqueeze_dim) for t in (cos, sin))
    pairs = ((x[..., ::2], x[..., 1::2]) for x in (q, k))
    return tuple(torch.cat((a * c - b * s, b * c + a * s), -1) for a, b in pairs)


def turn_by_complex(q, k, table):
    def turned(x):
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * table[:, :, None]).flatten(-2).type_as(x)

    return turned(q), turned(k)


def turn_by_conjugate(q, k, table):
    return turn_by_complex(q, k, table.conj())


def turn_clamped_in_float16(q, k, cos, sin, unsqueeze_dim=1):
    turned = stock_turn(q, k, cos, sin, unsqueeze_dim)
    return tuple(x.clamp(-0.5, 0.5) for x in turned) if q.dtype == torch.float16 else turned


def plain_forward(module):
    return type(module).__mro__[1].forward


def turn_in_place(q, k, cos, sin, unsqueeze_dim=1):
    for x, new in zip((q, k), stock_turn(q, k, cos, sin, unsqueeze_dim), strict=True):
        x.copy_(2 * new)
    return q, k


@pytest.mark.parametrize(
    ("turn", "fused"),
    [
        (stock_turn, True), (turn_the_last, False), (turn_pairs, True), (turn_the_other_way, True),
        (turn_one_twice, False), (turn_clamped_in_float16, False), (turn_in_place, False),
        (turn_with_tables_exchanged, False), (turn_by_conjugate, False),
        (lambda q, k, cos, sin: (q, k), False),
    ],
)  # fmt: skip
def test_a_rotation_is_what_its_numbers_say(turn, fused, monkeypatch):
    module = attention(turn)
    assert rope_part.is_candidate(module)
    found = rope_part.find(module, type(module))
    assert isinstance(found, tuple) == fused, found
    if not fused:
        return
    calls = []
    fused = rope_part.checked_rotary
    monkeypatch.setattr(rope_part, "checked_rotary", lambda *a, **k: (calls.append(1), fused(*a, **k))[1])
    give_class(module, "rope", rope_part.overrides, *found[1])
    q, k, cos, sin = (torch.randn(shape) for shape in ((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, 8), (2, 5, 8)))
    for tables in ((cos, sin), (cos[:, :, :6], sin[:, :, :6]), (cos[:1], sin[:1])):
        torch.testing.assert_close(module(q, k, *tables), turn(q, k, *tables))
    assert len(calls) == 3
    learned = cos.clone().requires_grad_()  # what rotary has no derivative for runs stock code, as do odd calls
    module(q, k, learned, sin)[0].sum().backward()
    assert learned.grad is not None
    turned_alone = type(module)._lowtide_probed.rotating.__globals__["apply_rotary_pos_emb"](q=q, k=k, cos=cos, sin=sin)
    assert torch.equal(turned_alone[0], turn(q, k, cos, sin)[0])
    assert len(calls) == 3
    assert plain_forward(module).__globals__["apply_rotary_pos_emb"] is turn


def test_attention_under_a_decorator_of_transformers_is_fused(ran):
    decorator = pytest.importorskip("transformers.utils.deprecation").deprecate_kwarg("keys", "99.0", new_name="k")
    module = attention(stock_turn, lambda forward: decorator(decorator(forward)))
    give_class(module, "rope", rope_part.overrides, *rope_part.find(module, type(module))[1])
    q, k, cos, sin = (torch.randn(shape) for shape in ((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, 8), (2, 5, 8)))
    torch.testing.assert_close(module(q, k, cos, sin), stock_turn(q, k, cos, sin))
    assert ran["rotary"] == 1
    with pytest.warns(FutureWarning, match="`keys` is deprecated"):  # the decorator still runs
        torch.testing.assert_close(module(q, keys=k, cos=cos, sin=sin), stock_turn(q, k, cos, sin))


def test_attention_under_another_decorator_stays():
    def decorator(forward):
        return functools.wraps(forward)(lambda *args, **kwargs: forward(*args, **kwargs))

    module = attention(stock_turn, decorator)
    assert rope_part.is_candidate(module)
    assert "wrapped in another function" in rope_part.find(module, type(module))


def arguments_of(turn, shapes):
    """Return heads that are trained, and tables: one complex one where the function takes such."""
    g = torch.Generator().manual_seed(0)
    kinds = [torch.complex64 if name == "table" else torch.float32 for name in inspect.signature(turn).parameters]
    args = [torch.randn(shape, generator=g, dtype=kind) for shape, kind in zip(shapes, kinds, strict=False)]
    return [x.requires_grad_(x.dim() > args[-1].dim()) for x in args]


@pytest.mark.parametrize(
    ("turn", "shapes"),
    [
        (turn_to_halves, [(2, 3, 5, 8), (2, 1, 5, 8), (2, 5, 8), (2, 5, 8)]),
        (turn_one, [(2, 3, 5, 8), (2, 5, 8), (2, 5, 8)]),
        (turn_one, [(2, 3, 5, 8), (1, 5, 4), (1, 5, 4)]),
        (turn_one_without_batch, [(5, 3, 8), (5, 8), (5, 8)]),
        (turn_one_without_batch, [(2, 5, 3, 8), (5, 6), (5, 6)]),
        (turn_by_complex, [(2, 5, 3, 8), (2, 5, 1, 8), (2, 5, 4)]),
        (turn_by_complex, [(2, 5, 3, 8), (2, 5, 1, 8), (1, 5, 4)]),
    ],
)
def test_how_a_function_takes_its_arguments(turn, shapes, ran):
    module = attention(turn)
    give_class(module, "rope", rope_part.overrides, *rope_part.find(module, type(module))[1])
    args = arguments_of(turn, shapes)
    flipped = [x.conj() if x.is_complex() else x for x in args]
    for given in (args, flipped):
        ran.clear()
        results = [f(*given) for f in (module, turn)]
        assert ran["rotary"] == 1
        got, expected = ([one] if isinstance(one, torch.Tensor) else one for one in results)
        torch.testing.assert_close(got, expected)
        trained = [x for x in given if x.requires_grad]
        upstream = [torch.randn_like(x) for x in expected]
        gradients = [torch.autograd.grad(outs, trained, upstream) for outs in (got, expected)]
        torch.testing.assert_close(*gradients)


def test_calls_of_another_form_are_stock(ran):
    by_complex = attention(turn_by_complex)
    give_class(by_complex, "rope", rope_part.overrides, *rope_part.find(by_complex, type(by_complex))[1])
    q, k, table = arguments_of(turn_by_complex, [(2, 5, 3, 8), (2, 5, 1, 8), (2, 5, 4)])
    for q_then in (q.double(), q):
        got, expected = (f(q_then, k, table if q_then is not q else table.real) for f in (by_complex, turn_by_complex))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    alone = attention(turn_one)
    give_class(alone, "rope", rope_part.overrides, *rope_part.find(alone, type(alone))[1])
    x, cos, sin = arguments_of(turn_one, [(2, 5, 5, 8), (2, 5, 8), (2, 5, 8)])
    by_name = {"x": x, "cos": cos, "sin": sin}
    for args, kwargs in (((x, cos, sin), {"unsqueeze_dim": -2}), ((), by_name), ((x, cos, sin, 2), {})):
        assert torch.equal(alone(*args, **kwargs), turn_one(*args, **kwargs))
    assert not ran
    alone(x, cos, sin, unsqueeze_dim=2)
    assert ran["rotary"] == 1
