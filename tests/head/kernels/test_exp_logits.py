"""The GEMM that leaves exponentials, against float64: bf16 on a GPU, else float32 in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from head.kernels.rows import DEVICE, DTYPE, POISON, UNIT, apart
from lowtide.head.kernels import gemm
from lowtide.head.kernels.exp_logits import ExpRows, exp_tile
from lowtide.head.kernels.gemm import GemmConfig, LogitTransform
from promises import promise
from support import every_pair

pytestmark = [promise("kernels"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # the interpreter's NumPy
SMALL = {"rows": 16, "columns": 32, "depth": 16, "group": 2, "stages": 1, "warps": 4}
CONFIGS = [GemmConfig()] if DEVICE == "cuda" else [GemmConfig(**SMALL)]
NEAR = 2e-5 if DEVICE == "cuda" else 3e-6  # of float32 sums
NEAR_E = 2**-8 if DEVICE == "cuda" else NEAR
OPTIONS = ("bias_V", "scale", "softcap")
SIZES = [(1, 1, 1), (3, 2, 1), (16, 32, 4), (17, 37, 5), (33, 64, 3), (50, 100, 9)]  # C, V, D / UNIT
# depths that are no multiple of 16 bytes, in rows that are
SIZES += [(5, 37, D / UNIT) for D in (1, 3, 2 * UNIT + 1)]


def close(got: Tensor, want: Tensor, near: float) -> bool:
    """Row by row, so that a large row hides no other; exact where a row is 0."""
    return bool(((got.double() - want).norm(dim=-1) <= near * want.norm(dim=-1)).all())


@every_pair(
    size=SIZES + ([(300, 1003, 25), (513, 512, 32)] if DEVICE == "cuda" else []),
    config=CONFIGS,
    names=[(), *((name,) for name in OPTIONS), OPTIONS],
    coefficient=[False, True],
    first_class=[0, 5],
)
def test_exponentials_and_their_sums(
    size: tuple[int, int, float], config: GemmConfig, names: tuple[str, ...], coefficient: bool, first_class: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Each by itself and both at once; the target is elsewhere in some rows, and some are ignored."""
    monkeypatch.setattr(gemm, "CONFIG", config)
    (C, V, D), P = size, gemm.tiles_across(size[1])
    x, w = apart(torch.randn(C, round(D * UNIT))), apart(2 * torch.randn(V, round(D * UNIT)) / (D * UNIT) ** 0.5)
    y = (torch.randint(0, V, (C,), dtype=torch.int32) + torch.randint(0, 2, (C,)) * first_class).to(DEVICE).int()
    y[2::7] = -1
    given: dict[str, Any] = {"bias_V": torch.randn(V), "scale": torch.tensor(-0.7), "softcap": 3.0}
    given = {n: given[n].to(DEVICE) if isinstance(given[n], Tensor) else given[n] for n in names}
    z = x.double() @ w.double().T + given.get("bias_V", torch.zeros((), device=DEVICE)).double()
    z = z * given.get("scale", torch.ones((), device=DEVICE)).double()
    cap = given.get("softcap")
    z = z if cap is None else cap * torch.tanh(z / cap)
    reference = z[:, 0].float() + torch.randn(C, device=DEVICE)
    c = torch.linspace(-2, 2, C, device=DEVICE).to(DTYPE).float() if coefficient else None

    at_target = torch.arange(V, device=DEVICE) + first_class == y[:, None]
    e = (z - reference.double()[:, None]).exp().where(~at_target & (y >= 0)[:, None], 0)
    stored = e if cap is None else e * (1 - (z / cap) ** 2)
    stored = stored if c is None else stored.where(~at_target, c.double()[:, None])

    for wants_e, wants_sums in ((True, True), (True, False), (False, True)):
        room = torch.full((C + 2, -(-V // UNIT) * UNIT + UNIT), POISON, dtype=DTYPE, device=DEVICE)
        sums = torch.full((C + 2, P + 3), POISON, device=DEVICE)
        rows = ExpRows(reference, y, c, first_class, *gemm.matrix(sums[1:-1, :P] if wants_sums else None)[:2])
        out = room[1:-1, :V] if wants_e else None
        gemm.gemm_tiles(exp_tile, x, w, out, rows, LogitTransform(**given))
        # TMA writes units of 16 bytes
        for part, width in ((room, -(-V // UNIT) * UNIT if DEVICE == "cuda" else V), (sums, P)):
            assert (part[[0, -1]] == POISON).all()
            assert (part[:, width:] == POISON).all()
        assert not wants_e or close(room[1:-1, :V], stored, NEAR_E)
        assert not wants_sums or close(sums[1:-1, :P].double().sum(1, keepdim=True), e.sum(1, keepdim=True), NEAR)
