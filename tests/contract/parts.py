"""The layers' functions beside the head's: the gated MLP, experts, norms and rotations."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contract import references
from contract.function import Arguments, Function, Mode, near
from lowtide import swiglu_mlp
from lowtide.arguments import operand_dtype
from lowtide.errors import UnsupportedError
from lowtide.layers import add_rms_norm, rms_norm, rotary
from lowtide.mlp.experts import Form, experts_mlp
from lowtide.mlp.projection import Adapter, Projection
from lowtide.mlp.swiglu import adapted_mlp
from mlp.experts import FORMS, by_pairs
from support import Sharded, mlp, rotary_oracle

LEADING = [(2, 5), (), (1,), (13,), (3, 1, 4), (0,), (2, 0)]
PROJECTIONS = ("gate", "up", "down")
OF_MLP = ("input", *(f"{p}_weight" for p in PROJECTIONS), *(f"{p}_bias" for p in PROJECTIONS))
SCALES = dict(zip(PROJECTIONS, (0.5, 1.7, 2.0), strict=True))
PAIRS = ["halves", "interleaved", "repeated", "deinterleaved", "short", "short_interleaved", "trailing", "backwards"]


def random_leaf(choice: Arguments, *shape: int, scale: float = 1.0) -> Tensor:
    numbers = scale * torch.randn(*shape, generator=choice["g"], dtype=torch.float64)
    return numbers.to(choice["dtype"]).requires_grad_()


def of_mlp(choice: Arguments) -> Arguments:
    drawn = mlp(*(choice[name] for name in ("leading", "D", "F")), dtype=choice["dtype"], seed=choice["seed"])
    tensors = dict(zip(OF_MLP, drawn, strict=True))
    if not choice["bias"]:
        tensors |= dict.fromkeys(OF_MLP[4:])
    return tensors | {name: choice[name] for name in ("activation", "checkpoint_level", "tile_tokens")}


def mlp_truth(*, checkpoint_level: int, tile_tokens: int | None, **kwargs: Any) -> Tensor:
    value: Tensor = references.swiglu(**kwargs)[0]
    return value


def of_adapted(choice: Arguments) -> Arguments:
    """Draw adapters beside the weights; a joined projection has the weight, bias and adapter of gate and of up."""
    kwargs, D, width, rank = of_mlp(choice), choice["D"], choice["F"], 3
    sides = {"gate": (D, width), "up": (D, width), "down": (width, D)}
    if choice["joined"]:
        sides = {"gate": (D, 2 * width), "down": (width, D)}
        for kind in ("weight", "bias"):
            one, two = kwargs[f"gate_{kind}"], kwargs.pop(f"up_{kind}")
            kwargs[f"gate_{kind}"] = None if one is None else torch.cat((one, two)).detach().requires_grad_()
    for name in sides if choice["adapted"] else ():
        into, out = sides[name]
        kwargs[f"{name}_a"] = random_leaf(choice, rank, into, scale=max(into, 1) ** -0.5)
        kwargs[f"{name}_b"] = random_leaf(choice, out, rank, scale=rank**-0.5)
    return kwargs | {"joined": choice["joined"]}


def adapted(
    *, input: Tensor, activation: str, checkpoint_level: int, tile_tokens: int | None, joined: str,
    dropout: float = 0.0, **sides: Any,
) -> Tensor:  # fmt: skip
    found = []
    for name in PROJECTIONS:
        a, b = sides.get(f"{name}_a"), sides.get(f"{name}_b")
        adapter = None if a is None else Adapter(a, b, SCALES[name], dropout)
        weight = sides.get(f"{name}_weight")
        found.append(None if weight is None else Projection(weight, sides[f"{name}_bias"], adapter))
    gate, up, down = found
    return adapted_mlp(
        input, gate, up, down, activation=activation, checkpoint_level=checkpoint_level, tile_tokens=tile_tokens,
        joined=joined,
    )  # fmt: skip


def adapted_truth(*, input: Tensor, activation: str, joined: str, **sides: Any) -> Tensor:
    """The same as PEFT computes it: in the leaves' dtypes, a module at a time."""

    def project(x: Tensor, name: str) -> Tensor:
        y = F.linear(x, sides[f"{name}_weight"], sides[f"{name}_bias"])
        a, b = sides.get(f"{name}_a"), sides.get(f"{name}_b")
        return y if a is None else (y + F.linear(F.linear(x.to(a.dtype), a), b) * SCALES[name]).to(y.dtype)

    gate = project(input, "gate")
    if not joined:
        up = project(input, "up")
    elif joined == "interleaved":
        gate, up = gate[..., ::2], gate[..., 1::2]
    else:
        first, second = gate.chunk(2, -1)
        gate, up = (first, second) if joined == "gate first" else (second, first)
    act = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return project(act * up, "down")


def of_experts(choice: Arguments) -> Arguments:
    """Draw the choice of K of E experts; one expert has no token, and some pairs have no expert."""
    N, D, E, width, K = math.prod(choice["leading"]), choice["D"], 5, choice["F"], 3
    gate_up, down = (E, 2 * width, D), (E, D, width)
    if choice["transposed"]:
        gate_up, down = (E, D, 2 * width), (E, width, D)
    leaf = partial(random_leaf, choice)
    scores = torch.rand(N, E, generator=choice["g"])
    scores[:, 2] = -1
    ids = scores.topk(K).indices
    if choice["ids"] == "some of none":
        ids[::3, 0], ids[4:5], ids[1:2, 1] = E, E, ids[1:2, 2]  # and an expert that a token has twice
    return {
        "input": leaf(*choice["leading"], D),
        "routing": leaf(N, K),
        "gate_up": leaf(*gate_up, scale=D**-0.5),
        "down": leaf(*down, scale=width**-0.5),
        "gate_up_bias": leaf(E, 2 * width) if choice["bias"] else None,
        "down_bias": leaf(E, D) if choice["bias"] else None,
        "ids": ids,
        **{name: choice[name] for name in ("form", "transposed", "checkpoint_level")},
    }


def experts(*, input: Tensor, routing: Tensor, ids: Tensor, **kwargs: Any) -> Tensor:
    weights = [kwargs.pop(name) for name in ("gate_up", "down", "gate_up_bias", "down_bias")]
    dtype = operand_dtype(input)
    x = input.reshape(-1, input.shape[-1]).to(dtype)
    return experts_mlp(x, ids, routing, weights, dtype=dtype, **kwargs).view(input.shape)


def experts_truth(*, input: Tensor, ids: Tensor, form: Form, transposed: bool, **kwargs: Any) -> Tensor:
    kwargs.pop("checkpoint_level")
    leaves = [input.reshape(-1, input.shape[-1]), *kwargs.values()]
    return by_pairs(leaves, ids, form, transposed=transposed).view(input.shape)


def of_norm(choice: Arguments, *more: str) -> Arguments:
    shape = (*choice["leading"], choice["D"])
    tensors = {name: random_leaf(choice, *shape, scale=3.0) for name in ("input", *more)}
    weight = random_leaf(choice, choice["D"])
    return tensors | {"weight": weight, "eps": 1e-5, "offset": choice["offset"], "rounding": choice["rounding"]}


def norm_truth(**kwargs: Any) -> Any:
    found = references.rms_norm(**kwargs)
    return found if "residual" in kwargs else found[0]


def of_rotary(choice: Arguments) -> Arguments:
    """Draw heads for each of the tokens, as if they were sequences: q [N, H, T, d] as a view of [N, T, H, d]."""
    N, T, d, r = math.prod(choice["leading"]), 5, choice["d"], choice["r"]
    r = d if r is None else r
    values = r // 2 if choice["pairs"] in ("short", "short_interleaved", "trailing") else r
    tables = {
        name: random_leaf(choice, N if choice["tables"] == "each" else 1, T, values).detach() for name in ("cos", "sin")
    }
    q, k = (random_leaf(choice, N, T, H, d).detach() for H in (3, 2))
    if choice["unsqueeze_dim"] == 1:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    heads = {"q": q.requires_grad_(), "k": k.requires_grad_()}
    return heads | tables | {name: choice[name] for name in ("pairs", "unsqueeze_dim")}


def rotary_truth(*, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, pairs: str, unsqueeze_dim: int) -> Any:
    if (
        q.dtype.itemsize == 2 and pairs == "halves" and q.shape[-1] == cos.shape[-1]
    ):  # as transformers does, which rounds each product

        def turned(x: Tensor) -> Tensor:
            half = x.shape[-1] // 2
            rotated = torch.cat((-x[..., half:], x[..., :half]), -1)
            return x * cos.unsqueeze(unsqueeze_dim) + rotated * sin.unsqueeze(unsqueeze_dim)

        return turned(q), turned(k)
    if unsqueeze_dim == 1:
        return rotary_oracle(q, cos, sin, pairs), rotary_oracle(k, cos, sin, pairs)
    return tuple(rotary_oracle(x.transpose(1, 2), cos, sin, pairs).transpose(1, 2) for x in (q, k))


MLP: Arguments = {
    "sizes": {"D": 7, "F": 11},
    "large": {"D": 32, "F": 48},
    "tolerance": near(1e-12, 5e-6, times=3),
    "widens": False,
}
OF_WEIGHTS: dict[str, list[Any]] = {
    "leading": LEADING,
    "checkpoint_level": [1, 0],
    "tile_tokens": [None, 1, 4],
    "activation": ["silu", "gelu_tanh"],
    "bias": [True, False],
}
NORM: Arguments = {
    "options": {"leading": LEADING, "offset": [0.0, 1.0], "rounding": ["after_weight", "before_weight"]},
    "sizes": {"D": 24},
    "large": {"D": 64},
    "tolerance": near(1e-13, 1e-6, times=3),
    "instead": r"torch\.nn\.functional\.rms_norm",
    "widens": False,
}
FUNCTIONS = {
    "swiglu_mlp": Function(
        name="swiglu_mlp", run=swiglu_mlp, truth=mlp_truth, draw=of_mlp, options=OF_WEIGHTS, cast=OF_MLP,
        saved=OF_MLP[:3], instead=r"write it out.*linear", **MLP,
    ),
    "adapted_mlp": Function(
        name="adapted_mlp", run=adapted, truth=adapted_truth, draw=of_adapted,
        options=OF_WEIGHTS | {"joined": ["", "gate first", "up first", "interleaved"], "adapted": [True, False]},
        cast=OF_MLP, saved=("gate_weight", "gate_a"), instead="write it out", public=False, **MLP,
    ),
    "experts": Function(
        name="experts", run=experts, truth=experts_truth, draw=of_experts,
        options={
            "leading": LEADING,
            "form": [*FORMS[1:], FORMS[0]],  # first one without a clamp, at whose edge a gradient jumps
            "bias": [True, False],
            "transposed": [False, True],
            "checkpoint_level": [0, 1],
            "ids": ["all", "some of none"],
        },
        cast=("input", "gate_up", "down", "gate_up_bias", "down_bias"), saved=("input", "gate_up"), instead="experts",
        public=False, **MLP,
    ),
    "rms_norm": Function(
        name="rms_norm", run=rms_norm, truth=norm_truth, draw=of_norm, saved=("input", "weight"), **NORM
    ),
    "add_rms_norm": Function(
        name="add_rms_norm", run=add_rms_norm, truth=norm_truth, draw=lambda choice: of_norm(choice, "residual"),
        saved=("weight",), saves_outputs=True, **NORM,
    ),
    "rotary": Function(
        name="rotary", run=rotary, truth=rotary_truth, draw=of_rotary,
        options={
            "leading": LEADING,
            "tables": ["one", "each"],
            "pairs": PAIRS,
            "r": [None, 6, 4, 0],
            "unsqueeze_dim": [1, 2],
        },
        sizes={"d": 8}, large={"d": 16}, tolerance=near(1e-13, 1e-6), instead="rotate_half", saved=("cos", "sin"),
        widens=False,
    ),
}  # fmt: skip
MODES = {
    "mlp": Mode(FUNCTIONS["swiglu_mlp"]),
    "mlp-dense": Mode(FUNCTIONS["swiglu_mlp"], {"checkpoint_level": 0, "bias": False}),
    "mlp-saved": Mode(FUNCTIONS["swiglu_mlp"], {"checkpoint_level": 0, "activation": "gelu_tanh"}),
    "mlp-tiles": Mode(FUNCTIONS["swiglu_mlp"], {"tile_tokens": 4, "bias": False}),
    "mlp-lora": Mode(FUNCTIONS["adapted_mlp"], {"checkpoint_level": 0, "tile_tokens": 4}),
    "mlp-joined": Mode(FUNCTIONS["adapted_mlp"], {"joined": "interleaved"}),
    "experts": Mode(FUNCTIONS["experts"]),
    "experts-recomputed": Mode(FUNCTIONS["experts"], {"checkpoint_level": 1, "ids": "some of none"}),
    "rms_norm": Mode(FUNCTIONS["rms_norm"], {"offset": 1.0, "rounding": "before_weight"}),
    "add_rms_norm": Mode(FUNCTIONS["add_rms_norm"]),
    "rotary": Mode(FUNCTIONS["rotary"]),
}
COMPILED = ("mlp", "experts", "add_rms_norm", "rotary")  # modes whose code torch.compile sees in ways of its own

X, GATE, UP, DOWN = torch.randn(3, 4), torch.randn(6, 4), torch.randn(6, 4), torch.randn(4, 6)
EIGHT, TABLE = torch.ones(2, 8), torch.ones(1, 5, 8)
GOOD: dict[str, tuple[Callable[..., Any], Arguments]] = {  # good arguments of a function
    "swiglu_mlp": (
        swiglu_mlp,
        {
            "input": X, "gate_weight": GATE, "up_weight": UP, "down_weight": DOWN, "gate_bias": torch.randn(6),
            "up_bias": torch.randn(6), "down_bias": torch.randn(4), "activation": "silu", "checkpoint_level": 1,
            "tile_tokens": 2,
        },
    ),
    "rms_norm": (rms_norm, {"input": EIGHT, "weight": torch.ones(8), "eps": 1e-5, "offset": 1.0}),
    "add_rms_norm": (add_rms_norm, {"input": EIGHT, "residual": EIGHT, "weight": torch.ones(8), "eps": 1e-5}),
    "rotary": (
        rotary,
        {"q": torch.ones(2, 3, 5, 8), "k": torch.ones(2, 1, 5, 8), "cos": TABLE, "sin": TABLE, "unsqueeze_dim": 1},
    ),
}  # fmt: skip
WHOLE = r"expected a tensor that is whole.*FSDP2|expected .*whole.*got a DTensor"
Bad = tuple[Arguments, type[Exception], str]
OF_NORMS: list[Bad] = [
    ({"input": [1.0]}, TypeError, "input: expected a torch.Tensor"),
    ({"input": torch.ones(2, 8, dtype=torch.int64)}, TypeError, "input: expected float64, float32"),
    ({"weight": torch.ones(8, dtype=torch.bool)}, TypeError, "weight: expected float64, float32"),
    ({"weight": torch.ones(8).as_subclass(Sharded)}, TypeError, f"weight: {WHOLE}"),
    ({"weight": torch.ones(7)}, ValueError, r"weight: expected shape \[D\]"),
    ({"weight": torch.ones(1, 8)}, ValueError, r"weight: expected shape \[D\]"),
    ({"weight": torch.ones(8, device="meta")}, ValueError, "weight: expected a tensor on cpu"),
    ({"eps": "small"}, TypeError, "eps: expected a number"),
    ({"eps": torch.tensor(1e-5)}, TypeError, r"eps: expected a number, got Tensor\. Pass float\(eps\)"),
    ({"eps": -1e-5}, ValueError, "eps: expected a finite number of at least 0, got -1e-05"),
    ({"eps": math.nan}, ValueError, "eps: expected a finite number"),
    ({"offset": True}, TypeError, "offset: expected a number"),
    ({"rounding": "never"}, ValueError, "rounding: expected 'before_weight' or 'after_weight'"),
]
BAD: dict[str, list[Bad]] = {  # changes of the good arguments, the error, and what it says
    "swiglu_mlp": [
        ({"input": [1.0]}, TypeError, r"input: expected a torch.Tensor, got list"),
        ({"input": X[:, :3]}, ValueError, r"input: expected shape \[..., 4\], as gate_weight .*, got \[3, 3\]"),
        ({"gate_weight": GATE[0]}, ValueError, r"gate_weight: expected shape \[F, D\], got \[4\]"),
        ({"up_weight": UP[:5]}, ValueError, r"up_weight: expected shape \[6, 4\], as gate_weight is .* got \[5, 4\]"),
        ({"down_weight": DOWN.T}, ValueError, r"down_weight: expected shape \[4, 6\].* got \[6, 4\]"),
        ({"gate_bias": torch.randn(4)}, ValueError, r"gate_bias: expected shape \[6\].* got \[4\]"),
        ({"up_bias": torch.randn(1, 6)}, ValueError, r"up_bias: expected shape \[6\].* got \[1, 6\]"),
        ({"down_bias": torch.randn(6)}, ValueError, r"down_bias: expected shape \[4\].* got \[6\]"),
        ({"up_weight": UP.to(torch.float8_e4m3fn)}, TypeError, r"up_weight: expected float64.*got torch.float8_e4m3fn"),
        ({"up_weight": UP.double()}, TypeError, r"up_weight: expected dtype torch.float32.*autocast"),
        ({"down_bias": torch.randn(4).half()}, TypeError, r"down_bias: expected dtype torch.float32, as input has"),
        ({"down_weight": DOWN.to("meta")}, ValueError, r"down_weight: expected a tensor on cpu.* got meta"),
        ({"gate_weight": GATE.as_subclass(Sharded)}, TypeError, f"gate_weight: {WHOLE}"),
        ({"activation": "gelu"}, ValueError, r"activation: expected 'silu' or 'gelu_tanh', got 'gelu'"),
        ({"checkpoint_level": 2}, ValueError, r"checkpoint_level: expected 0 .* or 1 .* got 2"),
        ({"checkpoint_level": True}, TypeError, r"checkpoint_level: expected an int, got True"),
        ({"tile_tokens": 0}, ValueError, r"tile_tokens: expected a whole number above 0, or None, got 0"),
    ],
    "rms_norm": OF_NORMS,
    "add_rms_norm": [
        *OF_NORMS,
        ({"residual": EIGHT.double()}, TypeError, "residual: expected torch.float32"),
        ({"residual": torch.ones(8)}, ValueError, r"residual: expected shape \[2, 8\]"),
    ],
    "rotary": [
        ({"q": torch.ones(2, 5, 8)}, ValueError, "q: expected 4 axes"),
        ({"k": torch.ones(2, 1, 4, 8)}, ValueError, "k: expected q's sizes"),
        ({"k": torch.ones(2, 1, 5, 8).double()}, TypeError, "k: expected torch.float32"),
        ({"k": torch.ones(2, 1, 5, 8).as_subclass(Sharded)}, TypeError, f"k: {WHOLE}"),
        ({"cos": torch.ones(5, 8)}, ValueError, r"cos: expected shape \[2 or 1, 5, r\]"),
        ({"cos": torch.ones(1, 5, 7)}, ValueError, "cos: expected shape"),
        ({"cos": torch.ones(3, 5, 8)}, ValueError, "cos: expected shape"),
        ({"cos": torch.ones(1, 5, 10)}, ValueError, "cos: expected shape"),
        ({"sin": torch.ones(1, 5, 6)}, ValueError, "sin: expected shape"),
        ({"sin": TABLE.half()}, TypeError, "sin: expected torch.float32"),
        ({"sin": TABLE.to("meta")}, ValueError, "sin: expected a tensor on cpu"),
        ({"cos": torch.ones(1, 5, 8, requires_grad=True)}, UnsupportedError, "cos: expected a table"),
        ({"unsqueeze_dim": 0}, ValueError, "unsqueeze_dim: expected 1 or 2"),
        ({"pairs": "short"}, ValueError, r"cos: expected shape \[2 or 1, 5, r / 2\]"),
        ({"pairs": "odd"}, ValueError, "pairs: expected 'halves', 'interleaved'.* or 'backwards'"),
    ],
}
