"""The kernel that turns rows of logits into losses and gradients, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from head.kernels.rows import DEVICE, INF, NAN, NARROW, padded
from lowtide.head.kernels.gemm import LogitTransform
from lowtide.head.kernels.logit_rows import softmax_rows
from promises import promise
from support import assert_near, every_pair, oracle, relative_error

DTYPES = {"wide": torch.float32, **NARROW}
LOOSE = {
    "wide": 2e-6,
    "bfloat16": 2**-8 if DEVICE == "cuda" else 2**-7,
    "float16": 2**-11,
}  # it cuts bfloat16 off
OPTIONS = ["bias_V", "logit_scale", "softcap", "class_weight_V", "label_smoothing", "z_loss"]
PLAIN, ALL = (), tuple(OPTIONS)

pytestmark = [promise("kernels"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # the interpreter's NumPy


def options(V: int, names: tuple[str, ...] = ALL) -> dict[str, Any]:
    """Return the arguments of these names, for a vocabulary of V."""
    g = torch.Generator().manual_seed(1)
    q = (torch.rand(V, generator=g) + 0.1).to(DEVICE)
    values = {
        "bias_V": torch.randn(V, generator=g).to(DEVICE),
        "logit_scale": torch.tensor(-0.7, device=DEVICE),
        "softcap": 3.0,
        "class_weight_V": q,
        "label_smoothing": 0.3,
        "z_loss": 0.02,
    }
    chosen = {name: values[name] for name in names}
    return chosen | {"total_class_weight": q.sum()} if "class_weight_V" in chosen else chosen


def launched(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a launcher's arguments, the options of logits and of the loss in their records."""
    given = dict(kwargs)
    transform = LogitTransform(*(given.pop(name, None) for name in ("bias_V", "logit_scale", "softcap")))
    names = {"class_weight_V": None, "total_class_weight": None, "label_smoothing": 0.0, "z_loss": 0.0}
    terms = tuple(given.pop(name, default) for name, default in names.items())
    return given | {"transform": transform, "terms": terms}


def batch(C: int, V: int) -> tuple[Tensor, Tensor]:
    """Return random logits [C, V] and targets, the first and the last class among them."""
    g = torch.Generator().manual_seed(C + V)
    y = torch.randint(0, V, (C,), generator=g)
    y[0], y[-1] = 0, V - 1
    return 2 * torch.randn(C, V, generator=g).to(DEVICE), y.to(DEVICE)


def run(z_CV: Tensor, y_C: Tensor, *, gradient: Any = "wide", **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Return the loss and the gradient, an fp16 one lifted, of logits that are left alone."""
    V, whole = z_CV.shape[1], padded(z_CV)[1:-1]
    loss, lift = softmax_rows(whole[:, :V], y_C, gradient=DTYPES[gradient], **launched(kwargs))
    if gradient in NARROW:
        narrow = whole.view(NARROW[gradient])[:, :V].float()
        return loss, narrow if lift is None else narrow * lift[:, None]
    return loss, whole[:, :V]


def truth(z_CV: Tensor, y_C: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Return the same in float64 from autograd."""
    names = {"bias_V": "linear_bias", "class_weight_V": "weight"}
    wide = {
        names.get(name, name): value.double() if isinstance(value, Tensor) else value
        for name, value in kwargs.items()
        if name != "total_class_weight"
    }
    z = z_CV.double().requires_grad_()
    same = torch.eye(z.shape[1], dtype=torch.float64, device=DEVICE)
    loss = oracle(z, same, y_C, reduction="none", **wide)
    loss.sum().backward()
    return loss.detach(), z.grad


def assert_close(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], tolerance: float = 2e-6) -> None:
    """Row by row, so that a large row hides no other."""
    for g_C, w_C in zip(got, want, strict=True):
        assert_near(g_C, w_C, tolerance)


@pytest.mark.parametrize("names", [PLAIN, ALL], ids=["plain", "all"])
@pytest.mark.parametrize("gradient", ["wide", *NARROW])
@pytest.mark.parametrize(("V", "block"), [(1, 4096), (2, 4096), (37, 4096), (1003, 4096), (1003, 256), (1024, 256)])
def test_sizes(V: int, block: int, gradient: str, names: tuple[str, ...]) -> None:
    z, y = batch(3, V)
    kwargs = options(V, names)
    (loss, g), (want, w) = run(z, y, gradient=gradient, longest_block=block, **kwargs), truth(z, y, **kwargs)
    if V == 1 and not names:
        assert not loss.any()
        assert not g.any()
        return
    assert_close((loss, g), (want, w), LOOSE[gradient])


@pytest.mark.parametrize("gradient", ["wide", *NARROW])
@pytest.mark.parametrize(("V", "stride"), [(37, 40), (37, 64), (32, 32), (3, 8)])
def test_a_row_writes_to_its_own_memory(V: int, stride: int, gradient: Any) -> None:
    z, y = batch(4, V)
    room = padded(z, stride)
    _, lift = softmax_rows(room[1:5, :V], y, gradient=DTYPES[gradient], longest_block=16)
    out = room if gradient == "wide" else room.view(NARROW[gradient])
    got = out[1:5, :V].float() * (1 if lift is None else lift[:, None])
    assert relative_error(got, truth(z, y)[1]) < LOOSE[gradient]
    pad = -(-V // 8) * 8
    assert (out[1:5, V:pad] == 0).all()
    assert room[[0, 5]].isnan().all()
    assert room[1:5, pad:].isnan().all()
    if gradient != "wide":  # the second half of what was written to is as it was
        untouched = -(-pad // 2)
        assert torch.equal(room[1:5, untouched:V], z[:, untouched:])


ODD_ROWS = {  # what is put where; the target is class 20, in the second of three blocks
    "nan": {3: NAN}, "nan late": {36: NAN}, "nan at target": {20: NAN},
    "inf": {3: INF}, "inf late": {36: INF}, "inf at target": {20: INF}, "two infs": {3: INF, 20: INF},
    "-inf": {3: -INF, 36: -INF}, "-inf at target": {20: -INF}, "-inf first block": dict.fromkeys(range(16), -INF),
    "-inf but target": dict.fromkeys(range(37), -INF) | {20: 1.0},
    "-inf but the first": dict.fromkeys(range(37), -INF) | {0: 1.0},
    "-inf but the last": dict.fromkeys(range(37), -INF) | {36: 1.0},
    "all -inf": dict.fromkeys(range(37), -INF),
}  # fmt: skip


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("gradient", ["wide", *NARROW])
def test_odd_rows_come_out_as_from_log_softmax_and_poison_no_other(gradient: str, smoothing: float) -> None:
    V = 37
    z, _ = batch(2 * len(ODD_ROWS), V)
    y = torch.full((len(z),), 20, device=DEVICE)
    clean = run(z, y, gradient=gradient, label_smoothing=smoothing)
    for row, values in zip(z[::2], ODD_ROWS.values(), strict=True):
        for v, value in values.items():
            row[v] = value
    got = run(z, y, gradient=gradient, label_smoothing=smoothing, longest_block=16)
    wide = z.double().requires_grad_()
    want = torch.nn.functional.cross_entropy(wide, y, reduction="none", label_smoothing=smoothing)
    (grad,) = torch.autograd.grad(want.sum(), wide)
    loose = 5 * LOOSE["wide"] + LOOSE[gradient]
    for name, g, w in zip(ODD_ROWS, got[0][::2], want[::2], strict=True):
        torch.testing.assert_close(g.double(), w, rtol=1e-5, atol=1e-6, equal_nan=True, msg=lambda m, n=name: n + m)
    for name, g, w in zip(ODD_ROWS, got[1][::2], grad[::2], strict=True):
        torch.testing.assert_close(g.double(), w, rtol=loose, atol=1e-7, equal_nan=True, msg=lambda m, n=name: n + m)
    for g, c in zip(got, clean, strict=True):
        torch.testing.assert_close(g[1::2], c[1::2], rtol=2 * loose, atol=1e-7)


def lifted(z: Tensor, y: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Return what an fp16 gradient leaves in memory, and its lift."""
    V, whole = z.shape[1], padded(z)[1:-1]
    _, lift = softmax_rows(whole[:, :V], y, gradient=torch.float16, **launched(kwargs))
    return whole.view(torch.float16)[:, :V], lift


@every_pair(
    heavy=[1e-20, 1.0, 7e4, 1e12], scale=[1.0, -3e-5, 300.0], names=[PLAIN, ("label_smoothing",), ("z_loss",), ALL]
)
def test_a_lifted_row_fits_fp16(names: tuple[str, ...], scale: float, heavy: float) -> None:
    V = 37
    z, y = batch(3, V)
    z /= max(abs(scale), 1)
    kwargs = options(V, tuple({*names, "logit_scale", "class_weight_V"}))
    kwargs["logit_scale"] = torch.tensor(scale, device=DEVICE)
    q = kwargs["class_weight_V"] = heavy * kwargs["class_weight_V"]
    kwargs["total_class_weight"] = q.sum()
    stored, lift = lifted(z, y, **kwargs)
    assert stored.abs().max() <= 2**14
    want = truth(z, y, **kwargs)[1]
    for s, k, w in zip(stored, lift, want, strict=True):
        assert relative_error(s.double() * k, w) < 2**-10
