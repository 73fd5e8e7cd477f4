"""Norms and rotations are known by their numbers: what looks like one and computes something else is left alone."""

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


def attention(turn):
    """A module whose forward calls ``turn`` by the name that attention calls its rotary embedding by."""
    scope = {"apply_rotary_pos_emb": turn, "nn": nn}
    exec(
        "class Attention(nn.Module):\n"
        "    def forward(self, q, k, cos, sin):\n"
        "        return apply_rotary_pos_emb(q, k, cos, sin)\n",
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
        (stock_turn, True), (turn_the_last, False), (turn_pairs, True), (turn_the_other_way, False),
        (turn_one, False), (turn_clamped_in_float16, False), (turn_in_place, False),
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
    turned_alone = rope_part._rotating(plain_forward(module), *found[1]).__globals__["apply_rotary_pos_emb"](
        q=q, k=k, cos=cos, sin=sin
    )
    assert torch.equal(turned_alone[0], turn(q, k, cos, sin)[0])
    assert len(calls) == 3
    assert plain_forward(module).__globals__["apply_rotary_pos_emb"] is turn
