"""Norms, rotations and joined MLPs are known by their numbers: what only looks like one is left alone."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.errors import ArgumentTypeError, ArgumentValueError
from lowtide.models import norm_part
from models.conftest import fused, make
from promises import promise

pytestmark = promise("patched", "reported")


class Holder(nn.Module):
    """A model that has nothing but one module."""

    def __init__(self, held):
        super().__init__()
        self.held = held

    def get_output_embeddings(self):
        return None


def patched(part, module, **settings):
    """Patch the module, whose class is named, and return the line of the report."""
    return lowtide.patch(Holder(module), **{"fuse": (type(module),), **settings}).parts[part]


def refused(module):
    """Return why a module whose class is named is not fused; it is left as it was."""
    kind = type(module)
    with pytest.raises(ArgumentValueError, match=f"fuse: expected {kind.__name__} to be an MLP") as error:
        lowtide.patch(Holder(module), fuse=(kind,))
    assert type(module) is kind
    return str(error.value)


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
    assert patched("norm", Norm(plain, eps)).patched
    for forward in (epsilon_outside, epsilon_as_least):
        refused(Norm(forward, eps))


@promise("dtypes")
def test_a_norm_runs_its_own_code_for_dtypes_that_no_probe_saw():
    def in_the_weights_dtype(norm, x):  # of float32 rows and a bfloat16 weight bfloat16, as T5's
        narrow = norm.weight.dtype not in (torch.float32, x.dtype)
        return plain(norm, x).to(norm.weight.dtype if narrow else torch.promote_types(norm.weight.dtype, x.dtype))

    norm = Norm(in_the_weights_dtype)
    assert patched("norm", norm).patched
    norm.bfloat16()
    assert norm(torch.randn(3, 12)).dtype == torch.bfloat16
    assert fused(norm(torch.randn(3, 12).bfloat16())) == {"norm": 1}


@pytest.mark.parametrize(
    "forward",
    [
        lambda norm, x: F.rms_norm(x, (12,), norm.weight.to(x.dtype), norm.variance_epsilon),
        lambda norm, x: plain(norm, x) * 1.001,
        lambda norm, x: plain(norm, x.clamp(-20, 20)),
        lambda norm, x: plain(norm, x).clamp(-0.5, 0.5) if x.dtype == torch.float16 else plain(norm, x),
        lambda norm, x: norm.weight * F.layer_norm(x.float(), (12,)).to(x.dtype),
        lambda norm, x: norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)),  # narrow
    ],
)
def test_what_is_no_norm_by_its_numbers_stays(forward):
    assert "left as it is: it is not an RMS norm whose arithmetic is float32" in refused(Norm(forward))


def test_modules_that_are_alike_are_probed_once(build, monkeypatch):
    """A probe takes 16 ms, and a model of 16 layers has 33 norms."""
    model, probed, find = build("llama"), [], norm_part.find
    model.model.layers[1].input_layernorm.variance_epsilon = 1e-3
    monkeypatch.setattr(norm_part, "find", lambda norm, base: probed.append(norm.variance_epsilon) or find(norm, base))
    line = lowtide.patch(model).parts["norm"]
    assert probed == [model.config.rms_norm_eps, 1e-3]
    assert sum(row.count for row in (line, *line.more) if row.patched) == 5


def attention(turn):
    """A module whose forward calls ``turn`` by the name that attention calls its rotary embedding by."""
    scope = {"apply_rotary_pos_emb": turn, "nn": nn}
    exec(
        "class Attention(nn.Module):\n"
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


def turn_one(x, cos, sin, unsqueeze_dim=1):
    return stock_turn(x, x, cos, sin, unsqueeze_dim)[0]


def turn_one_twice(x, cos, sin, unsqueeze_dim=1):
    return turn_one(turn_one(x, cos, sin, unsqueeze_dim), cos, sin, unsqueeze_dim)


def turn_one_without_batch(x, cos, sin):
    return turn_one(x.unsqueeze(0), cos.unsqueeze(0), sin.unsqueeze(0), 2).squeeze(0)


def turn_with_tables_exchanged(q, k, cos, sin, unsqueeze_dim=1):
    return stock_turn(q, k, sin, cos, unsqueeze_dim)


def turn_by_complex(q, k, table):
    def turned(x):
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * table[:, :, None]).flatten(-2).type_as(x)

    return turned(q), turned(k)


@pytest.mark.parametrize(
    "turn",
    [
        turn_one_twice, turn_with_tables_exchanged, lambda q, k, cos, sin: (q, k),
    ],
)  # fmt: skip
def test_what_is_no_rotation_by_its_numbers_stays(turn):
    assert "rotates other pairs" in refused(attention(turn))


def as_tuple(result):
    return (result,) if isinstance(result, torch.Tensor) else result


def arguments_of(turn, shapes):
    """Return heads that are trained, and tables: one complex one where the function takes such."""
    kinds = [torch.complex64 if name == "table" else torch.float32 for name in inspect.signature(turn).parameters]
    args = [torch.randn(shape, dtype=kind) for shape, kind in zip(shapes, kinds, strict=False)]
    return [x.requires_grad_(x.dim() > args[-1].dim()) for x in args]


HEADS = [(2, 3, 5, 8), (2, 1, 5, 8)]


@pytest.mark.parametrize(
    ("turn", "shapes"),
    [
        (stock_turn, [*HEADS, (2, 5, 8), (2, 5, 8)]),
        (stock_turn, [*HEADS, (1, 5, 6), (1, 5, 6)]),
        (turn_one, [(2, 3, 5, 8), (1, 5, 4), (1, 5, 4)]),
        (turn_one_without_batch, [(2, 5, 3, 8), (5, 6), (5, 6)]),
        (turn_by_complex, [(2, 5, 3, 8), (2, 5, 1, 8), (1, 5, 4)]),
    ],
)
def test_how_a_function_takes_its_arguments(turn, shapes):
    module = attention(turn)
    assert patched("rope", module).patched
    args = arguments_of(turn, shapes)
    for given in (args, [x.conj() if x.is_complex() else x for x in args]):
        got, expected = (as_tuple(f(*given)) for f in (module, turn))
        assert fused(*got) == {"rope": 1}
        torch.testing.assert_close(got, expected)
        trained = [x for x in given if x.requires_grad]
        upstream = [torch.randn_like(x) for x in expected]
        torch.testing.assert_close(*(torch.autograd.grad(outs, trained, upstream) for outs in (got, expected)))


def test_calls_of_another_form_are_stock():
    """Also tables that are trained, of which the fused rotation has no derivative."""
    by_complex, alone, both = attention(turn_by_complex), attention(turn_one), attention(stock_turn)
    for module in (by_complex, alone, both):
        assert patched("rope", module).patched
    q, k, table = arguments_of(turn_by_complex, [(2, 5, 3, 8), (2, 5, 1, 8), (2, 5, 4)])
    x, cos, sin = arguments_of(turn_one, [(2, 5, 5, 8), (2, 5, 8), (2, 5, 8)])
    learned = cos.clone().requires_grad_()
    calls = [
        (by_complex, turn_by_complex, (q.double(), k, table), {}),
        (by_complex, turn_by_complex, (q, k, table.real), {}),
        (alone, turn_one, (x, cos, sin), {"unsqueeze_dim": -2}),
        (alone, turn_one, (), {"x": x, "cos": cos, "sin": sin}),
        (alone, turn_one, (x, cos, sin, 2), {}),
        (both, stock_turn, (x, x, learned, sin), {}),
    ]
    for module, turn, args, kwargs in calls:
        got, expected = (as_tuple(f(*args, **kwargs)) for f in (module, turn))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        assert not fused(*got)
    assert fused(alone(x, cos, sin, unsqueeze_dim=2)) == {"rope": 1}


# Forwards of modules with the children of a joined MLP.
def up_first(self, x):
    up, gate = self.gate_up_proj(x).chunk(2, dim=-1)
    return self.down_proj(up * self.activation_fn(gate))


def interleaved(self, x):
    both = self.gate_up_proj(x)
    return self.down_proj(both[..., 1::2] * self.activation_fn(both[..., ::2]))


def split(self, x):
    both = self.gate_up_proj(x)
    gate, up = both.split(both.shape[-1] // 2, dim=-1)
    return self.down_proj(up * self.activation_fn(gate))


JOINED = {"gate first": split, "up first": up_first, "interleaved": interleaved}


def joined_mlp(build, forward):
    mlp = build("phi3").model.layers[0].mlp
    mlp.__class__ = type("Own", (nn.Module,), {"forward": forward})
    return mlp, copy.deepcopy(mlp)


# Code whose values are a norm's, an MLP's, a rotation's; gradients and attributes are not.
def detached_statistic(norm, x):
    wide = x.float()
    root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).detach()
    return norm.weight * (wide * root).to(x.dtype)


def detached_activation(self, x):
    gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
    return self.down_proj(up * self.activation_fn(gate).detach())


def recorded(self, x):
    self.aux = x.abs().mean()
    return split(self, x)


def rotated_detached(q, k, cos, sin):
    return stock_turn(q, k.detach(), cos, sin)


def of_detached_weights(experts):
    kind = type(experts)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return kind.forward(self, hidden_states, top_k_index, top_k_weights.detach())

    experts.__class__ = type("Own", (kind,), {"forward": forward})
    return experts


@pytest.mark.parametrize(
    ("make_one", "why"),
    [
        (lambda: Norm(detached_statistic), "not an RMS norm"),
        (lambda: joined_mlp(make, detached_activation)[0], "it is not down"),
        (lambda: joined_mlp(make, recorded)[0], "changes attributes"),
        (lambda: attention(rotated_detached), "rotates other pairs"),
        (lambda: of_detached_weights(make("qwen3-moe").model.layers[0].mlp.experts), "its experts are not"),
    ],
)
def test_other_gradients_and_records_run_their_own_code(make_one, why):
    for module in (make_one(), make_one()):
        assert why in refused(module)
        model = Holder(module)
        rows = lowtide.patch(model).parts.values()
        assert not any(row.patched for row in rows)
        assert any(
            "not transformers' own code; name it to fuse it: lowtide.patch(model, fuse=(" in str(row) for row in rows
        )


def test_code_that_is_not_transformers_own_is_fused_where_it_is_named(build):
    """A class, one whose forward a subclass inherits, and a function or an activation set in transformers' own."""
    model = build("llama")
    mlp, norm = model.model.layers[0].mlp, Norm(plain)
    mlp.act_fn = type("Own", (nn.Module,), {"forward": lambda self, x: F.silu(x)})()
    model.model.norm.__class__ = type("Inherits", (type(model.model.norm),), {})
    report = lowtide.patch(model)
    assert {row.module: row.patched for row in (report.parts["mlp"], *report.parts["mlp"].more)} == {
        "model.layers.1.mlp": True, "model.layers.0.mlp": False,
    }  # fmt: skip
    assert "a child's forward is not transformers' own code" in str(report)
    assert sum(row.count for row in (report.parts["norm"], *report.parts["norm"].more)) == 5
    assert report.parts["norm"].patched
    assert not any("left" in row.outcome for row in report.parts["norm"].more)
    lowtide.patch(model, fuse=(type(build("llama").model.layers[0].mlp),))
    assert fused(mlp(torch.randn(3, 16))) == {"mlp": 1}
    with pytest.raises(ArgumentValueError, match=r"fuse: expected Norm to be .*, got none in mlp, norm, rope"):
        lowtide.patch(model, fuse=(type(norm),))
    with pytest.raises(ArgumentTypeError, match="fuse: expected a tuple of classes of modules, got"):
        lowtide.patch(model, fuse=type(norm))


@pytest.mark.parametrize("joined", JOINED)
@pytest.mark.parametrize("level", [0, 1])
def test_the_probe_finds_where_gate_and_up_are(joined, level, build):
    mlp, stock = (m.double() for m in joined_mlp(build, JOINED[joined]))
    assert f"which keeps gate and up, one projection ({joined})" in patched("mlp", mlp).outcome
    mlp.checkpoint_level = level
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    results = []
    for m in (mlp, stock):
        y = m(x)
        assert bool(fused(y)) == (m is mlp)
        results.append([y, *torch.autograd.grad(y.square().sum(), (x, *m.parameters()))])
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-11)
