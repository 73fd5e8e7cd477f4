"""The exponential path from end to end, both its schedules, against float64 autograd; kernels by Triton's interpreter.

In float32, since the interpreter's bfloat16 products are wrong. On a GPU `tests/gpu` runs it as users do.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from lowtide.head import plan
from lowtide.head.call import CrossEntropyArgs, Head, Wanted
from lowtide.head.engine import gradient_buffers
from lowtide.head.gradients import Gradients
from lowtide.head.kernels import configs
from lowtide.head.ranks.alone import Alone
from lowtide.head.terms import cross_entropy as terms
from support import oracle, relative_error

if torch.cuda.is_available():
    pytest.skip("on a GPU tests/gpu runs this path", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy
SMALL = configs.GemmConfig(rows=16, columns=32, depth=16, group=2, stages=1, warps=4, pieces=2)
NEAR = 5e-6  # beside what plain PyTorch in float32 errs

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "capped": {"softcap": 9.0, "z_loss": 0.01, "logit_scale": 0.7},
    "smoothed": {"label_smoothing": 0.1, "z_loss": 0.01, "weight": "rand", "token_weight": "rand"},
}


def small_plan(N: int, V: int, schedule: str, rows: int) -> plan.HeadPlan:
    """Return a plan of chunks and blocks as small as the matrices here."""
    blocks = schedule == "blocks"
    return plan.HeadPlan(
        backend="exp", reason="", gradient="forward", accumulate="input", rows=N, chunks=-(-N // rows),
        chunk_rows=rows, scratch_bytes=0, accumulator_bytes=0, cast_bytes=0, note="", schedule=schedule,
        block_columns=24 if blocks else V, sum_rows=17, product_rows=rows if blocks else 7,
    )  # fmt: skip


def run(
    x: Tensor, w: Tensor, y: Tensor, b: Tensor | None, kwargs: dict[str, Any], schedule: str, rows: int, wanted: Wanted
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the mean and its gradients."""
    given = Head(
        input=x, weight_VD=w, bias_V=b, softcap=kwargs.get("softcap"),
        scale=None if "logit_scale" not in kwargs else torch.tensor(kwargs["logit_scale"]), dtype=torch.float32,
        workspace_mib=None, accumulate="auto", backend="auto", ranks=Alone(len(w)),
    )  # fmt: skip
    args = CrossEntropyArgs(
        target=y, weight=kwargs.get("weight"), token_weight=kwargs.get("token_weight"), num_items=None,
        reduction="mean", ignore_index=-100, label_smoothing=kwargs.get("label_smoothing", 0.0),
        z_loss=kwargs.get("z_loss", 0.0),
    )  # fmt: skip
    made: list[Gradients] = []

    def poisoned(*args: Any, **kwargs: Any) -> Gradients:
        into = gradient_buffers(*args, **kwargs)
        for buffer in (into.input_ND, into.weight_VD):
            if buffer is not None:
                buffer.fill_(torch.nan)
        made.append(into)
        return into

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(terms, "plan_cross_entropy", lambda *_: small_plan(len(y), len(w), schedule, rows))
        patched.setattr(terms, "drops_rows", lambda device: False)
        patched.setattr(terms, "gradient_buffers", poisoned)
        values = terms.forward(given.prepared(), args, wanted, False)
    into = made[0] if made else Gradients()
    return values["loss"], [into.input_ND, into.weight_VD, into.bias_V]


@pytest.mark.parametrize(
    ("N", "D", "V", "rows", "huge", "name"),
    [
        *((37, 24, 61, 16, huge, name) for huge in (False, True) for name in OPTIONS),
        *((1, 8, 2, 1, False, name) for name in OPTIONS),
        *((33, 40, 64, 33, name != "smoothed", name) for name in OPTIONS),
    ],
)
@pytest.mark.parametrize("schedule", ["chunks", "blocks"])
def test_loss_and_gradients(
    name: str, schedule: str, N: int, D: int, V: int, rows: int, huge: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configs, "of_device", lambda device: SMALL)
    x, w, b = torch.randn(N, D), torch.randn(V, D), torch.randn(V)
    y = torch.randint(0, V, (N,))
    y[3::4] = -100
    kwargs = dict(OPTIONS[name])
    for key, size in (("weight", V), ("token_weight", N)):
        if key in kwargs:
            kwargs[key] = torch.rand(size) + 0.1
    if huge:
        x[: N // 5] *= 100  # of one token alone the gradient may be too small for float32
    exact = [t.double().requires_grad_() for t in (x, w, b)]
    usual = [t.clone().requires_grad_() for t in (x, w, b)]
    wide = {k: v.double() if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    expected = oracle(exact[0], exact[1], y, linear_bias=exact[2], **wide)
    in_float32 = oracle(usual[0], usual[1], y, linear_bias=usual[2], **kwargs)
    expected.backward()
    in_float32.backward()
    # a single product may err so much, and lse has no more digits, from which blocks are rebuilt
    digits = (usual[0].abs() @ usual[1].abs().T).max().item() * 2**-22 if huge else 0.0
    near = NEAR + digits + 4 * relative_error(in_float32, expected)
    x[3::4] = torch.nan  # ignored
    loss, grads = run(x, w, y, b, kwargs, schedule, rows, Wanted(True, True, True))
    assert relative_error(loss, expected) < near
    for grad, leaf, baseline in zip(grads, exact, usual, strict=True):
        assert grad is not None
        assert leaf.grad is not None
        assert baseline.grad is not None
        assert relative_error(grad, leaf.grad) < 4 * NEAR + digits + 4 * relative_error(baseline.grad, leaf.grad)
    only, nothing = run(x, w, y, b, kwargs, schedule, rows, Wanted(False, False, False))
    assert relative_error(only, expected) < near
    assert nothing == [None, None, None]


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
@pytest.mark.parametrize("schedule", ["chunks", "blocks"])
def test_one_gradient_at_a_time(
    wanted: tuple[bool, bool, bool], schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configs, "of_device", lambda device: SMALL)
    x, w, b, y = torch.randn(20, 16), torch.randn(50, 16), torch.randn(50), torch.randint(0, 50, (20,))
    _, together = run(x, w, y, b, {}, schedule, 8, Wanted(True, True, True))
    _, alone = run(x, w, y, b, {}, schedule, 8, Wanted(*wanted))
    for got, want, is_wanted in zip(alone, together, wanted, strict=True):
        assert (got is not None) == is_wanted
        if got is not None and want is not None:
            assert torch.equal(got, want)


def test_no_tokens() -> None:
    x, w = torch.randn(0, 16), torch.randn(50, 16)
    for schedule in ("chunks", "blocks"):
        _, grads = run(x, w, torch.zeros(0, dtype=torch.long), None, {}, schedule, 1, Wanted(True, True, False))
        assert grads[0] is not None
        assert grads[0].shape == (0, 16)
        assert grads[1] is not None
        assert (grads[1] == 0).all()
