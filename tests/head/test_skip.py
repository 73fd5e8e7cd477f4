"""Gradients that skip tiles of the softmax, by their kernels in Triton's interpreter: beside float64, and dense."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from head.kernel_plans import counted, use_kernels
from lowtide import HeadOptions
from lowtide.head import skipping as asked
from lowtide.head import vocabulary_order
from lowtide.head.kernels import kept_gemms_hopper, kept_tiles
from lowtide.head.kernels.kept_gemms_hopper import Lists, Shares
from lowtide.head.terms import cross_entropy

pytest.importorskip("triton")
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
        rows = 300
        object.__setattr__(found, "chunk_rows", rows)
        object.__setattr__(found, "product_rows", rows)
        object.__setattr__(found, "kept", args[0].order > 0)
        object.__setattr__(found, "chunks", -(-found.rows // rows))
        return found

    monkeypatch.setattr(cross_entropy, "plan_cross_entropy", plan)
    monkeypatch.setattr(asked, "skips_ignored", lambda device: True)
    monkeypatch.setattr(asked, "OPERANDS", torch.float32)
    monkeypatch.setattr(kept_gemms_hopper, "input_grad", input_grad)
    monkeypatch.setattr(kept_gemms_hopper, "weight_grad", weight_grad)
    monkeypatch.setattr(kept_tiles, "multiprocessors", lambda device: PROGRAMS)
    monkeypatch.setattr(vocabulary_order, "BAND", 512)
    monkeypatch.setattr(vocabulary_order, "FIRST", 0.06)
    monkeypatch.setattr(vocabulary_order, "CLUSTERS", 4)
    monkeypatch.setattr(vocabulary_order.VocabularyOrder, "end", lambda self: None)


def problem(N: int, D: int, V: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, a weight and targets with a softmax as concentrated as a trained model's."""
    w = torch.randn(V, D) / math.sqrt(D)
    frequency = torch.randperm(V).float().add(1).reciprocal()
    w[:, 0] = frequency.log() + 2
    y = torch.multinomial(frequency, N, replacement=True)
    x = torch.randn(N, D) * 1.5 + 2 * w[y] * math.sqrt(D) / 4
    x[:, 0] = 1
    y[::11] = -100
    return x, w, y


def exact(x: Tensor, w: Tensor, y: Tensor, **more: Any) -> tuple[Tensor, ...]:
    """Return loss and gradients in float64."""
    x, w = (t.double().requires_grad_() for t in (x, w))
    loss = torch.nn.functional.cross_entropy(x @ w.T, y, **more)
    return (loss.detach(), *torch.autograd.grad(loss, (x, w)))


def relative(found: Tensor, right: Tensor) -> float:
    """Return the error of a gradient."""
    return ((found.double() - right).norm() / right.norm()).item()


@pytest.mark.parametrize(("N", "D", "V"), [(700, 24, 2100), (300, 264, 1300)])
def test_errors(kernels: None, N: int, D: int, V: int) -> None:
    """The loss is exact, and both gradients are as near as asked, with most tiles left out."""
    x, w, y = problem(N, D, V)
    right = exact(x, w, y)
    parameter = w.requires_grad_()
    for _ in range(7):
        hidden = x.clone().requires_grad_()
        loss = lowtide.linear_cross_entropy(hidden, parameter, y, options=HeadOptions(skip=0.02))
        grads = torch.autograd.grad(loss, (hidden, parameter))
        errors = [relative(found, one) for found, one in zip(grads, right[1:], strict=True)]
        report = lowtide.skip_report(parameter)
        assert loss.item() == pytest.approx(right[0].item(), rel=1e-5)
        assert max(errors) < 0.02
    assert report is not None
    assert report.share < 0.95


@pytest.mark.parametrize("unbiased", [False, True])
def test_options(kernels: None, unbiased: bool) -> None:
    """A bias, a scale, weights of classes and tokens, smoothing and ignored tokens: errors as asked."""
    N, D, V = 500, 40, 1500
    x, w, y = problem(N, D, V)
    b, q, t = torch.randn(V) * 0.3, torch.rand(V) + 0.5, torch.rand(N) + 0.5
    options = HeadOptions(skip=0.02, skip_unbiased=unbiased, skip_seed=3)
    parameter, bias = w.requires_grad_(), b.requires_grad_()
    hidden, weight, linear_bias = (z.detach().double().requires_grad_() for z in (x, w, b))
    logits = (hidden @ weight.T + linear_bias) * 0.9
    each = torch.nn.functional.cross_entropy(logits, y, q.double(), reduction="none", label_smoothing=0.1)
    valid = y >= 0
    loss = (each * t)[valid].sum() / q[y[valid]].double().sum() + (
        1e-3 * (logits.logsumexp(1).square() * t)[valid].sum() / q[y[valid]].double().sum()
    )
    right = torch.autograd.grad(loss, (hidden, weight, linear_bias))
    for _ in range(6):
        hidden = x.clone().requires_grad_()
        found = lowtide.linear_cross_entropy(
            hidden, parameter, y, linear_bias=bias, weight=q, label_smoothing=0.1, z_loss=1e-3, logit_scale=0.9,
            token_weight=t, options=options,
        )  # fmt: skip
        grads = torch.autograd.grad(found, (hidden, parameter, bias))
        errors = [relative(one, other) for one, other in zip(grads, right, strict=True)]
        assert found.item() == pytest.approx(loss.item(), rel=1e-5)
        assert max(errors) < 0.02
        assert errors[2] < 1e-5
    report = lowtide.skip_report(parameter)
    assert report is not None
    assert report.share < 0.95


def test_unbiased(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of gradients over the random numbers tends to the exact ones, as that of others does not."""
    monkeypatch.setattr(vocabulary_order, "CHANGE", (1.0, 1.0))
    monkeypatch.setattr(vocabulary_order, "FIRST", 0.15)
    x, w, y = problem(400, 24, 1100)
    right, errors = exact(x, w, y), {}
    for unbiased in (False, True):
        parameter = w.clone().requires_grad_()
        total, one = [torch.zeros_like(x), torch.zeros_like(w)], [0.0, 0.0]
        for call in range(31):
            hidden = x.clone().requires_grad_()
            options = HeadOptions(skip=0.02, skip_unbiased=unbiased)
            loss = lowtide.linear_cross_entropy(hidden, parameter, y, options=options)
            grads = torch.autograd.grad(loss, (hidden, parameter))
            if call:
                total = [a + b for a, b in zip(total, grads, strict=True)]
                one = [relative(a, b) for a, b in zip(grads, right[1:], strict=True)]
        errors[unbiased] = [relative(a / 30, b) for a, b in zip(total, right[1:], strict=True)], one
    for mean, each in zip(*errors[True], strict=True):
        assert mean < 0.35 * each
    for mean, each in zip(*errors[False], strict=True):
        assert mean > 0.8 * each
