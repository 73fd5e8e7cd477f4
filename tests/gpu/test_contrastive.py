"""The contrastive loss on a CUDA device: values and gradients, which backend runs, no waits, the same bits, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpu.conftest import ON_GPU, no_waits, peak_beyond_gradients
from head.test_contrastive import naive
from lowtide import HeadOptions, linear_contrastive
from lowtide.errors import UnsupportedError
from support import in_float64, relative_error

pytestmark = ON_GPU
Q, K, D = 700, 1100, 136
NEAR = {torch.float32: (1e-5, 1e-5), torch.float16: (1e-4, 2e-3), torch.bfloat16: (1e-4, 1e-2)}
CASES: dict[str, dict[str, Any]] = {
    "in-batch": {},
    "ids": {"P": 0},
    "several": {"P": 3},
    "masked": {"masked": True},
    "masked, several": {"masked": True, "P": 3},
    "symmetric": {"symmetric": True},
    "all": {"masked": True, "P": 3, "symmetric": True},
}


def arguments(case: dict[str, Any], dtype: torch.dtype, size: tuple[int, int, int] = (Q, K, D)) -> dict[str, Any]:
    """Return normalised queries and keys, ids of which some are padding, a mask and a trained temperature."""
    (queries, keys, hidden), g = size, torch.Generator().manual_seed(0)
    sides = [torch.randn(rows, hidden, generator=g) for rows in (queries, keys)]
    x, w = (F.normalize(side).to("cuda", dtype).requires_grad_() for side in sides)
    wide = torch.promote_types(dtype, torch.float32)
    found: dict[str, Any] = {"queries": x, "keys": w, "symmetric": case.get("symmetric", False)}
    found["temperature"] = torch.tensor(0.07, dtype=wide, device="cuda", requires_grad=True)
    if "P" in case:
        y = torch.randint(keys, (queries, max(1, case["P"])), generator=g)
        y[torch.rand(y.shape, generator=g) < 0.2] = -1
        found["positives"] = (y if case["P"] else y[:, 0]).cuda()
    if case.get("masked"):
        found["mask"] = (torch.rand(queries, keys, generator=g) < 0.3).cuda()
    return found


def step(kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    loss = linear_contrastive(**kwargs)
    return (loss, *torch.autograd.grad(loss, [kwargs[name] for name in ("queries", "keys", "temperature")]))


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, torch.bfloat16) for case in CASES),
        *((case, dtype) for case in ("ids", "all") for dtype in (torch.float32, torch.float16)),
    ],
)
def test_values_and_gradients(case: str, dtype: torch.dtype) -> None:
    kwargs = arguments(CASES[case], dtype)
    on_host = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in kwargs.items()}
    true = in_float64({name: value.detach() if isinstance(value, Tensor) else value for name, value in on_host.items()})
    leaves = [true[name].requires_grad_() for name in ("queries", "keys", "temperature")]
    want = naive(**true)
    near, of_gradients = NEAR[dtype]
    loss, *grads = step(kwargs)
    assert relative_error(loss.cpu(), want) < near
    for g, e in zip(grads, torch.autograd.grad(want, leaves), strict=True):
        assert relative_error(g.cpu(), e) < of_gradients


@pytest.mark.parametrize("case", ["in-batch", "several", "symmetric", "all"])
def test_no_host_waits_and_the_same_bits(case: str) -> None:
    kwargs = arguments(CASES[case], torch.bfloat16)
    for _ in range(4):
        step(kwargs)
    with no_waits():
        step(kwargs)
    # whether the default skips padded queries follows from earlier calls of this size: those of other tests too
    kwargs["options"] = HeadOptions(ignored_tokens="skip")
    first = step(kwargs)
    for _ in range(3):
        again = step(kwargs)
    for one, two in zip(first, again, strict=True):
        assert torch.equal(one, two)
    if "mask" in kwargs:
        assert not torch.equal(step(kwargs | {"mask": torch.zeros_like(kwargs["mask"])})[0], first[0])


def test_a_mask_rules_out_exponentials_and_nothing_else_does() -> None:
    options = HeadOptions(backend="exp")
    kwargs = arguments({}, torch.bfloat16)
    if (9, 0) <= torch.cuda.get_device_capability() < (12, 0):
        assert linear_contrastive(**kwargs, options=options).isfinite()
    with pytest.raises(UnsupportedError, match="each token's distribution lacks others"):
        linear_contrastive(**arguments({"masked": True}, torch.bfloat16), options=options)
    assert linear_contrastive(**arguments({"masked": True}, torch.bfloat16), options=HeadOptions(backend="row"))


@pytest.mark.parametrize("case", ["several", "symmetric"])
def test_memory(case: str) -> None:
    """The workspace and a few tensors as large as the embeddings, beyond inputs and gradients: no similarities."""
    N, hidden, options = 16384, 256, HeadOptions(workspace_mib=64)
    kwargs = arguments(CASES[case], torch.bfloat16, (N, N, hidden))
    leaves = [kwargs[name] for name in ("queries", "keys", "temperature")]
    peak = peak_beyond_gradients(lambda: linear_contrastive(**kwargs, options=options).backward(), *leaves)
    assert peak < 64 * 2**20 + 6 * N * hidden * 4


def test_a_wrong_id_is_nan() -> None:
    kwargs = arguments({"P": 0}, torch.bfloat16)
    kwargs["positives"][5] = K
    for symmetric in (False, True):
        assert linear_contrastive(**kwargs | {"symmetric": symmetric}).isnan()
