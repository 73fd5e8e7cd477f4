"""The kernels of gradients that skip tiles where there is no Hopper GPU: those in Gluon by what they do, in PyTorch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from head.kernel_plans import counted, use_kernels

pytest.importorskip("triton")
from lowtide.head.kernels import configs
from lowtide.head.terms import cross_entropy
from lowtide.skip import memory, seam
from lowtide.skip.kernels import gemms_hopper, lists
from lowtide.skip.kernels.gemms_hopper import Lists, Shares

ROWS, COLUMNS, PROGRAMS = 128, 256, 5


def units(pid: int, lists: Lists, shares: Shares, across: int) -> list[tuple[int, int, int, int]]:
    """Return a program's (tile, begin, end, part or -1), as the kernel reads them."""
    record, found = shares.records[pid].tolist(), []
    for unit in range(record[1]):
        tile = unit * PROGRAMS + (PROGRAMS - 1 - record[0] if unit % 2 else record[0])
        end = lists.across_count[shares.order[tile // across]].item()
        found.append((tile, 0, record[2] if unit == record[1] - 1 else end, -1))
    for part in range(record[5], record[5] + record[6]):
        tile, begin, end, _ = shares.parts[part].tolist()
        found.append((tile, begin, end, part))
    return found


def input_grad(
    e_CV: Tensor, w_VD: Tensor, mass_CP: Tensor, mean_PD: Tensor, ends: Any, lists: Lists, shares: Shares, room: Any,
    used: Any,
) -> None:  # fmt: skip
    """Do what the kernel does, by the programs' units."""
    rows, D = counted(used, len(e_CV)), mean_PD.shape[1]
    product = torch.full((len(e_CV), D), torch.nan)
    parts: dict[int, Tensor] = {}
    for pid in range(PROGRAMS):
        record = shares.records[pid].tolist()
        for number, (tile, begin, end, part) in enumerate(units(pid, lists, shares, -(-D // COLUMNS))):
            r, column = shares.order[tile // -(-D // COLUMNS)].item(), tile % -(-D // COLUMNS)
            at = slice(r * ROWS, r * ROWS + ROWS)
            d = slice(column * COLUMNS, column * COLUMNS + COLUMNS)
            z = mass_CP[at] @ mean_PD[:, d] if part < 0 else torch.zeros(len(e_CV[at]), len(mean_PD[0, d]))
            for p in lists.across[r, begin:end].tolist():
                v = slice(p * COLUMNS, p * COLUMNS + COLUMNS)
                z = z + e_CV[at, v] @ w_VD[v, d]
            if part >= 0:
                assert part not in parts
                parts[part] = z
                assert shares.parts[part, 3] > pid  # whoever waits is started after it
                continue
            if number == record[1] - 1:
                for other in range(record[3], record[3] + record[4]):
                    z = z + parts.pop(other)
            product[at, d] = z
    assert not parts
    product = product[:rows]
    lost, own, s = ends.rest[:rows, None], w_VD[ends.y[:rows].clamp(0).long()], ends.s[:rows, None]
    product = ((product + torch.where(lost == 0, 0, lost * own)) * s).where(s != 0, 0)
    if ends.uniform is not None:
        product = product - ends.factor[:rows, None] * ends.share * (ends.scale or 1) * ends.uniform
    ends.out.as_strided((len(ends.out), D), (ends.out_stride, 1))[ends.to[:rows]] = product.to(ends.out.dtype)


def weight_grad(e_CV: Tensor, scaled_CD: Tensor, out_VD: Tensor, lists: Lists, *, add: bool) -> None:
    """Do what the kernel does."""
    for p, count in enumerate(lists.down_count.tolist()):
        v = slice(p * COLUMNS, p * COLUMNS + COLUMNS)
        z = torch.zeros_like(out_VD[v])
        for r in lists.down[p, :count].tolist():
            at = slice(r * ROWS, r * ROWS + ROWS)
            z += e_CV[at, v].T @ scaled_CD[at]
        if count or not add:
            out_VD[v] = out_VD[v] + z if add else z


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have calls skip tiles as on Hopper, in float32."""
    use_kernels(monkeypatch)
    of_loss = cross_entropy.plan_cross_entropy

    def plan(*args: Any) -> Any:
        found = of_loss(*args)
        rows = 160
        object.__setattr__(found, "chunk_rows", rows)
        object.__setattr__(found, "product_rows", rows)
        object.__setattr__(found, "kept", args[0].order > 0)
        object.__setattr__(found, "chunks", -(-found.rows // rows))
        return found

    monkeypatch.setattr(cross_entropy, "plan_cross_entropy", plan)
    monkeypatch.setattr(configs, "of_device", lambda device: configs.GemmConfig())
    monkeypatch.setattr(seam, "skips_ignored", lambda device: True)
    monkeypatch.setattr(seam, "OPERANDS", torch.float32)
    monkeypatch.setattr(gemms_hopper, "input_grad", input_grad)
    monkeypatch.setattr(gemms_hopper, "weight_grad", weight_grad)
    monkeypatch.setattr(lists, "multiprocessors", lambda device: PROGRAMS)
    monkeypatch.setattr(memory, "FIRST", 0.06)
