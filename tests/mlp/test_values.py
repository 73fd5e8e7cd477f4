"""What the contract's tests of the gated MLP and the experts do not see: far gates, tiles, adapters, dropout."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from contract.function import Mode, leaves, trained
from contract.parts import FUNCTIONS, MODES, SCALES
from lowtide import swiglu_mlp
from lowtide.mlp import elementwise, projection
from promises import promise
from support import in_float64, mlp_slack, relative_error

MLP, ADAPTED, EXPERTS = (Mode(FUNCTIONS[name]) for name in ("swiglu_mlp", "adapted_mlp", "experts"))
OF_MLPS = ("mlp", "mlp-saved", "mlp-tiles", "mlp-lora", "mlp-joined", "experts")
LEVELS = pytest.mark.parametrize("level", [0, 1])


def everything(mode: Mode, kwargs: dict[str, Any], upstream: Tensor, run: Any = None) -> list[Tensor]:
    """Return the value and all gradients."""
    (y,) = (run or mode.run)(kwargs).values()
    return [y.detach(), *torch.autograd.grad(y, leaves(kwargs), upstream.to(y.dtype))]


@promise("values")
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gates_of_any_size(activation: str, dtype: torch.dtype) -> None:
    """Far out the activation is its argument or 0, and its derivative 1 or 0: no overflow on the way."""
    a = torch.tensor([-1e30, -1e13, -3e4, -90.0, -20.0, -5.0, 0.0, 5.0, 20.0, 90.0, 3e4, 1e13, 1e30], dtype=dtype)
    one = torch.ones(1, 1, dtype=dtype)
    for level in (0, 1):
        x = torch.stack((a, torch.ones_like(a)), 1).requires_grad_()
        first, second = torch.tensor([[1.0, 0.0]], dtype=dtype), torch.tensor([[0.0, 1.0]], dtype=dtype)
        down = torch.cat((one, 0 * one), 0)
        y = swiglu_mlp(x, first, second, down, activation=activation, checkpoint_level=level)
        (grad,) = torch.autograd.grad(y[:, 0].sum(), x)
        exact = a.detach().double().clamp(-1e4, 1e4).requires_grad_()
        act = F.silu(exact) if activation == "silu" else F.gelu(exact, approximate="tanh")
        (slope,) = torch.autograd.grad(act.sum(), exact)
        inside = a.abs() < 1e4
        # PyTorch's own tanh cancels where GELU is about -1e-6
        near = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 1e-5 if activation == "gelu_tanh" else 1e-30}
        torch.testing.assert_close(y[inside, 0].double(), act[inside], **near)
        torch.testing.assert_close(grad[:, 0].double(), slope, **near)
        torch.testing.assert_close(y[~inside, 0], a[~inside].clamp(min=0))


@promise("values")
def test_tiles_sum_narrow_gradients_in_float32() -> None:
    """As near to float64 as without tiles, over several draws: of one, an error may be small by chance."""
    squares = torch.zeros(2, 5)
    for _ in range(8):
        kwargs = MLP.arguments(512, D=16, F=24, dtype=torch.bfloat16, bias=False)
        upstream = torch.randn(512, 16).bfloat16()
        expected = everything(MLP, in_float64(kwargs), upstream, MLP.truth)
        for i, tile in enumerate((None, 2)):
            got = everything(MLP, kwargs | {"tile_tokens": tile}, upstream)
            squares[i] += torch.tensor([relative_error(g, e) ** 2 for g, e in zip(got, expected, strict=True)])
    whole, tiled = squares.sqrt()
    assert torch.all(tiled < 1.2 * whole), (tiled, whole)


@promise("values")
@pytest.mark.parametrize("mode", [MLP, EXPERTS], ids=["mlp", "experts"])
def test_pieces_of_rows_are_the_whole(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    kwargs = mode.arguments(13)
    upstream = torch.randn(13, kwargs["input"].shape[-1])
    whole = everything(mode, kwargs, upstream)
    monkeypatch.setattr(elementwise, "PIECE", 25)
    # vector units take the ends of rows in another way
    torch.testing.assert_close(everything(mode, kwargs, upstream), whole, rtol=1e-13, atol=1e-13)


@promise("ignored")
@pytest.mark.parametrize("name", OF_MLPS)
def test_a_poisoned_token_stays_its_own(name: str) -> None:
    mode = MODES[name]
    kwargs = mode.arguments((2, 9))
    if mode.name == "experts":
        kwargs["ids"][:] = torch.tensor([0, 1, 3])
        kwargs["ids"][12] = 4  # alone with its expert
    with torch.no_grad():
        kwargs["input"][1, 3] = torch.nan
    y, dx, *grads = everything(mode, kwargs, torch.randn(kwargs["input"].shape))
    for rows in (y, dx):
        assert rows[1, 3].isnan().all()
        assert rows.isnan().sum() == rows.shape[-1]
    if mode.name == "experts":
        routing, gate_up = grads[:2]
        assert routing[torch.arange(18) != 12].isfinite().all()
        assert gate_up[:4].isfinite().all()


@promise("again")
@pytest.mark.parametrize("name", [*OF_MLPS, "experts-recomputed"])
def test_what_a_mode_holds_is_not_written_to(name: str) -> None:
    """Selective checkpointing holds the results of operators; backward writes over gate and up where nobody does."""

    class Holding(TorchDispatchMode):
        held: list[tuple[Tensor, Tensor]] = []  # noqa: RUF012

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func.namespace == "lowtide":
                self.held += [(t, t.detach().clone()) for t in (out if isinstance(out, list) else [out])]
            return out

    kwargs = MODES[name].arguments(9)
    with Holding() as holding:
        (y,) = MODES[name].run(kwargs).values()
    assert holding.held
    y.sum().backward()
    assert all(torch.equal(t, kept) for t, kept in holding.held)


@promise("adapters", "dtypes")
@LEVELS
@pytest.mark.parametrize(
    ("dtype", "adapters", "autocast"),
    [
        (torch.bfloat16, torch.float32, None),  # what peft makes of a bfloat16 model
        (torch.float16, torch.float32, None),
        (torch.float32, torch.bfloat16, None),
        (torch.float32, torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.bfloat16),
    ],
)
def test_adapters_of_another_dtype(
    level: int, dtype: torch.dtype, adapters: torch.dtype, autocast: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No further from the truth than peft's modules, one at a time."""
    monkeypatch.setattr(projection, "PIECE", 7 * 96)  # several pieces, the last one shorter
    kwargs = ADAPTED.arguments(67, D=64, F=96, dtype=dtype, checkpoint_level=level)
    kwargs |= {n: kwargs[n].detach().to(adapters).requires_grad_() for n in trained(kwargs) if n[-2:] in ("_a", "_b")}
    upstream = torch.randn(67, 64)
    wanted = everything(ADAPTED, in_float64(kwargs), upstream, ADAPTED.truth)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        ours, theirs = (everything(ADAPTED, kwargs, upstream, run) for run in (ADAPTED.run, ADAPTED.truth))
    assert ours[0].dtype == (autocast or dtype)
    slack = mlp_slack(autocast or dtype, leaves(kwargs))
    for tensor, g, p, e in zip([ours[0], *leaves(kwargs)], ours, theirs, wanted, strict=True):
        assert g.dtype == tensor.dtype
        assert relative_error(g, e) <= 1.3 * relative_error(p, e) + slack


@promise("adapters")
@pytest.mark.parametrize(("level", "tile", "joined"), [(0, None, "gate first"), (1, 4, "")])
def test_backward_drops_what_forward_dropped(
    level: int, tile: int | None, joined: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(projection, "PIECE", 2 * 10)  # several pieces
    kwargs = ADAPTED.arguments(7, D=4, F=5, tile_tokens=tile, joined=joined, checkpoint_level=level)
    names = trained(kwargs)

    def dropping(*tensors: Tensor, dropout: float = 0.25) -> Tensor:
        torch.manual_seed(1)
        return FUNCTIONS["adapted_mlp"].run(**kwargs | dict(zip(names, tensors, strict=True)), dropout=dropout)

    assert torch.autograd.gradcheck(dropping, leaves(kwargs))
    plain = {name: value for name, value in kwargs.items() if name[-2:] not in ("_a", "_b")}
    torch.testing.assert_close(dropping(*leaves(kwargs), dropout=1.0), FUNCTIONS["adapted_mlp"].run(**plain))


@promise("adapters", "checkpoint")
def test_dropout_keeps_its_share_and_draws_anew() -> None:
    """Of one projection it drops the input's values once, as peft's layer does."""
    x, one, p = torch.ones(500, 1, requires_grad=True), torch.ones(1, 1), 0.25
    sides = {"gate_weight": torch.zeros(2, 1), "down_weight": one, "gate_bias": None, "down_bias": None}
    run = partial(
        FUNCTIONS["adapted_mlp"].run, input=x, **sides, gate_a=one, gate_b=torch.ones(2, 1), activation="silu",
        checkpoint_level=0, tile_tokens=None, joined="gate first", dropout=p,
    )  # fmt: skip
    y, again = run(), run()
    inner = torch.tensor(SCALES["gate"] / (1 - p))
    torch.testing.assert_close(y, F.silu(inner) * inner * (y != 0))
    assert abs((y == 0).float().mean().item() - p) < 5 * (p * (1 - p) / 500) ** 0.5
    assert not torch.equal(y, again)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx != 0, y != 0), "backward drops others"


@promise("dtypes")
@LEVELS
def test_weights_of_the_other_16_bits_than_autocasts(level: int) -> None:
    kwargs = MLP.arguments(25, D=8, F=12, dtype=torch.bfloat16, bias=False, checkpoint_level=level)
    with torch.autocast("cpu", torch.float16):
        y = MLP.run(kwargs)[""]
        plain = MLP.truth(kwargs)[""]
    assert y.dtype == plain.dtype == torch.float16
    got, want = (torch.autograd.grad(out.float().sum(), leaves(kwargs)) for out in (y, plain))
    for g, e in zip((y, *got), (plain, *want), strict=True):
        assert relative_error(g, e) < 1e-2
