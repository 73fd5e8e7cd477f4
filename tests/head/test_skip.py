"""Gradients that skip tiles of the softmax, by their kernels in Triton's interpreter: beside float64, and dense."""

import copy
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import lowtide
from head.kernel_plans import counted, use_kernels
from lowtide import HeadOptions
from lowtide.errors import ArgumentValueError, UnsupportedError
from lowtide.head import skipping as asked
from lowtide.head import threshold, vocabulary_order
from lowtide.head.exponentials.comparison import Comparison
from lowtide.head.host_numbers import host_memory
from lowtide.head.kernels import configs, kept_gemms_hopper, kept_lists
from lowtide.head.kernels.input_rows_hopper import InputRows
from lowtide.head.kernels.kept_gemms_hopper import Lists, Shares
from lowtide.head.kernels.kept_tiles import Targets
from lowtide.head.terms import cross_entropy
from lowtide.measure.allocations import track_allocations

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
        rows = 160
        object.__setattr__(found, "chunk_rows", rows)
        object.__setattr__(found, "product_rows", rows)
        object.__setattr__(found, "kept", args[0].order > 0)
        object.__setattr__(found, "chunks", -(-found.rows // rows))
        return found

    monkeypatch.setattr(cross_entropy, "plan_cross_entropy", plan)
    monkeypatch.setattr(configs, "of_device", lambda device: configs.GemmConfig())
    monkeypatch.setattr(asked, "skips_ignored", lambda device: True)
    monkeypatch.setattr(asked, "OPERANDS", torch.float32)
    monkeypatch.setattr(kept_gemms_hopper, "input_grad", input_grad)
    monkeypatch.setattr(kept_gemms_hopper, "weight_grad", weight_grad)
    monkeypatch.setattr(kept_lists, "multiprocessors", lambda device: PROGRAMS)
    monkeypatch.setattr(vocabulary_order, "BAND", 512)
    monkeypatch.setattr(threshold, "FIRST", 0.06)
    monkeypatch.setattr(vocabulary_order, "CLUSTERS", 4)


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


@pytest.mark.parametrize(("N", "D", "V"), [(270, 24, 1800), (150, 264, 1100)])
def test_errors(kernels: None, N: int, D: int, V: int) -> None:
    """The loss is exact, and both gradients are as near as asked, with most tiles left out."""
    x, w, y = problem(N, D, V)
    right = exact(x, w, y)
    parameter = w.requires_grad_()
    for _ in range(4):
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
    N, D, V = 200, 40, 1600
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
    for _ in range(4):
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


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("more", [{}, {"skip_unbiased": True}])
def test_softcap(kernels: None, reduction: str, more: dict[str, Any]) -> None:
    """E then has a slope in it: what tiles are chosen by and what stands for them is of E, and the loss of its sums."""
    N, D, V, cap, scale = 200, 40, 1600, 3.0, 1.3
    x, w, y = problem(N, D, V)
    b, g = torch.randn(V) * 0.3, torch.randn(N)
    parameter, bias = w.requires_grad_(), b.requires_grad_()
    right_leaves = [z.detach().double().requires_grad_() for z in (x, w, b)]
    logits = cap * torch.tanh((right_leaves[0] @ right_leaves[1].T + right_leaves[2]) * scale / cap)
    each = torch.nn.functional.cross_entropy(logits, y, reduction="none")
    upstream = g if reduction == "none" else torch.ones(N)
    right = torch.autograd.grad((each * upstream).sum(), right_leaves)
    for _ in range(4):
        hidden = x.clone().requires_grad_()
        found = lowtide.linear_cross_entropy(
            hidden, parameter, y, linear_bias=bias, logit_scale=scale, softcap=cap, reduction=reduction,
            options=HeadOptions(skip=0.02, **more),
        )  # fmt: skip
        grads = torch.autograd.grad(found, (hidden, parameter, bias), g if reduction == "none" else None)
        expected = each if reduction == "none" else each.sum()
        torch.testing.assert_close(found.detach().double(), expected.detach(), rtol=1e-5, atol=1e-5)
        errors = [relative(one, other) for one, other in zip(grads, right, strict=True)]
        assert max(errors) < 0.02
        assert errors[2] < 1e-5
    report = lowtide.skip_report(parameter)
    assert report is not None
    assert report.share < 0.95
    assert report.logit_error > 0


PER_TOKEN: list[Callable[..., Tensor]] = [
    lambda x, w, y, o: lowtide.linear_cross_entropy(x, w, y, reduction="none", options=o),
    lambda x, w, y, o: -lowtide.linear_logprobs(x, w, y, options=o),
    lambda x, w, y, o: -lowtide.linear_token_stats(x, w, y, want=("logprob",), options=o).logprob,  # type: ignore[operator]
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy
@pytest.mark.parametrize("losses", PER_TOKEN)
def test_a_value_for_each_token(kernels: None, losses: Callable[..., Tensor]) -> None:
    """What flows back is known in backward only, of both signs, and 0 at some tokens; a graph may be walked twice."""
    x, w, y = problem(270, 24, 1800)
    g = torch.randn(270)
    g[5::7], g[y < 0] = 0, torch.nan
    right_x, right_w = (t.double().requires_grad_() for t in (x, w))
    each = torch.nn.functional.cross_entropy(right_x @ right_w.T, y, reduction="none")
    right = torch.autograd.grad((each * g.nan_to_num()).sum(), (right_x, right_w))
    parameter, options = w.requires_grad_(), HeadOptions(skip=0.02)
    for call in range(3):
        hidden = x.clone().requires_grad_()
        found = losses(hidden, parameter, y, options)
        torch.testing.assert_close(found.detach().double(), each.detach(), rtol=1e-5, atol=1e-5)
        for keep in (True, False) if call == 2 else (False,):
            grads = torch.autograd.grad(found, (hidden, parameter), g, retain_graph=keep)
            assert max(relative(one, other) for one, other in zip(grads, right, strict=True)) < 0.02
    report = lowtide.skip_report(parameter)
    assert report is not None
    assert report.share < 0.95
    assert (report.calls, report.dense) == (3, 1)
    assert 0 < report.dropped_mass < 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy
@pytest.mark.parametrize("options", [{}, {"skip_unbiased": True}])
def test_several_calls_before_their_backward(kernels: None, options: dict[str, Any]) -> None:
    """Each has its own tiles in its own order, also where that was renewed since; empty ones have gradients of 0."""
    x, w, y = problem(150, 24, 1100)
    g, parameter, parts = torch.randn(150), w.requires_grad_(), (slice(0, 70), slice(70, 70), slice(70, 150))
    right_x, right_w = (t.double().requires_grad_() for t in (x, w))
    each = -torch.nn.functional.cross_entropy(right_x @ right_w.T, y, reduction="none")
    right = torch.autograd.grad((each * g).sum(), (right_x, right_w))
    for turn in range(4):
        hidden, total = x.clone().requires_grad_(), torch.zeros_like(w)
        found = [
            lowtide.linear_logprobs(hidden[part], parameter, y[part], options=HeadOptions(skip=0.02, **options))
            for part in parts
        ]
        for part, one in zip(parts[:: -1 if turn % 2 else 1], found[:: -1 if turn % 2 else 1], strict=True):
            (one * g[part]).sum().backward(inputs=[hidden, parameter])
            total += parameter.grad
            parameter.grad = None
        most = 0.04 if options else 0.02  # draws of five tiles, which the accepted error bounds in the mean
        assert relative(hidden.grad, right[0]) < most
        assert relative(total, right[1]) < most
    nothing = lowtide.linear_logprobs(hidden, parameter, y, options=HeadOptions(skip=0.02, **options))
    grads = torch.autograd.grad(nothing, (hidden, parameter), torch.zeros(150))
    assert not any(grad.any() for grad in grads)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy
@pytest.mark.parametrize("reentrant", [True, False])
def test_inside_a_checkpoint(kernels: None, reentrant: bool) -> None:
    """A recompute is a call that may decide otherwise than its forward, whose decision counts."""
    x, w, y = problem(60, 16, 500)
    g, parameter, options = torch.randn(60), w.requires_grad_(), HeadOptions(skip=0.02)
    right_x, right_w = (t.double().requires_grad_() for t in (x, w))
    each = -torch.nn.functional.cross_entropy(right_x @ right_w.T, y, reduction="none")
    right = torch.autograd.grad((each * g).sum(), (right_x, right_w))

    def logprobs(hidden: Tensor, target: Tensor) -> Tensor:
        return lowtide.linear_logprobs(hidden, parameter, target, options=options)

    for turn in range(3):
        hidden, parameter.grad = x.clone().requires_grad_(), None
        parts = zip(hidden.split(30), y.split(30), strict=True)
        found = torch.cat([checkpoint(logprobs, *part, use_reentrant=reentrant) for part in parts])
        if turn == 2:
            remembered(parameter)._shares.append(0.9)
        (found * g).sum().backward()
        assert relative(hidden.grad, right[0]) < 0.02
        assert relative(parameter.grad, right[1]) < 0.02
    assert lowtide.skip_report(parameter) is not None


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy
def test_gradients_of_a_mean_that_backward_recomputes(kernels: None) -> None:
    """As of one whose gradients forward stores, and without anything stored."""
    x, w, y = problem(150, 24, 1100)
    right, parameter = exact(x, w, y), w.requires_grad_()
    for _ in range(3):
        hidden = x.clone().requires_grad_()
        options = HeadOptions(skip=0.02, gradient="recompute")
        loss = lowtide.linear_cross_entropy(hidden, parameter, y, options=options)
        grads = torch.autograd.grad(3 * loss, (hidden, parameter))
        assert loss.item() == pytest.approx(right[0].item(), rel=1e-5)
        assert max(relative(found / 3, one) for found, one in zip(grads, right[1:], strict=True)) < 0.02
    report = lowtide.skip_report(parameter)
    assert report is not None
    assert report.dense == 1


def test_unbiased(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of gradients over the random numbers tends to the exact ones, as that of others does not."""
    monkeypatch.setattr(vocabulary_order.VocabularyOrder, "adapt", lambda *_: None)
    monkeypatch.setattr(threshold, "FIRST", 0.3)
    x, w, y = problem(140, 24, 1300)
    right, shares = exact(x, w, y)[1:], []
    for unbiased in (False, True):
        parameter, calls = w.clone().requires_grad_(), 32 if unbiased else 4
        total, squares = [torch.zeros_like(x), torch.zeros_like(w)], [0.0, 0.0]
        for call in range(1 + calls):
            hidden = x.clone().requires_grad_()
            options = HeadOptions(skip=0.02, skip_unbiased=unbiased)
            loss = lowtide.linear_cross_entropy(hidden, parameter, y, options=options)
            grads = torch.autograd.grad(loss, (hidden, parameter))
            if call:
                total = [a + b / calls for a, b in zip(total, grads, strict=True)]
                squares = [a + relative(*b) ** 2 / calls for a, *b in zip(squares, grads, right, strict=True)]
        shares.append([relative(a, b) / c**0.5 for a, b, c in zip(total, right, squares, strict=True)])
    biased, unbiased_shares = shares
    assert max(unbiased_shares) < 0.45  # a sixth, of independent errors
    assert min(biased) > 0.9


def step(
    x: Tensor, w: Tensor, y: Tensor, skip: float = 0.02, *, unbiased: bool = False, **more: Any
) -> tuple[Any, ...]:
    """Return a call's loss and gradients."""
    hidden = x.clone().requires_grad_()
    options = HeadOptions(skip=skip, skip_unbiased=unbiased)
    loss = lowtide.linear_cross_entropy(hidden, w, y, options=options, **more)
    return [loss.detach(), *torch.autograd.grad(loss, (hidden, w))]


def remembered(w: Tensor) -> vocabulary_order.VocabularyOrder:
    """Return what is, of a weight that has had calls."""
    known = vocabulary_order.known_order(w)
    assert known is not None
    return known


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy
@pytest.mark.parametrize("gradient", ["forward", "recompute"])
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("more", [{"label_smoothing": 0.1}, {"softcap": 9.0}])
def test_what_tiles_add_to_the_errors(
    kernels: None, monkeypatch: pytest.MonkeyPatch, gradient: str, unbiased: bool, more: dict[str, Any]
) -> None:
    """A comparison tells it from rounding, of which float32 has nearly none; signs estimate it."""
    seen: list[threshold.Errors] = []
    monkeypatch.setattr(vocabulary_order.VocabularyOrder, "adapt", lambda _, errors: seen.append(errors))
    monkeypatch.setattr(vocabulary_order, "COMPARED", 1000)
    monkeypatch.setattr(threshold, "FIRST", 1.0)
    x, w, y = problem(270, 24, 1800)
    b, parameter = torch.randn(1800) * 0.3, w.clone().requires_grad_()
    asked, grads = HeadOptions(skip=0.05, skip_unbiased=unbiased, gradient=gradient), []
    for options in (None, *[asked] * 5):
        hidden = x.clone().requires_grad_()
        loss = lowtide.linear_cross_entropy(hidden, parameter, y, linear_bias=b, options=options, **more)
        grads.append(torch.autograd.grad(loss, (hidden, parameter)))
    for found, errors in zip(grads[2:], seen, strict=True):
        assert errors.own.max() < 1e-4 < 1e-2 < errors.tiles.min()
        torch.testing.assert_close(errors.whole, errors.tiles, rtol=1e-3, atol=0)
        right = [relative(one, other.double()) for one, other in zip(found, grads[0], strict=True)]
        assert errors.tiles.tolist() == pytest.approx(right, rel=0.5)


@pytest.mark.parametrize(("N", "V", "most"), [(64, 20000, 512 * 20000), (20000, 256, 192 * 20000)])
def test_memory_of_a_comparison(N: int, V: int, most: int) -> None:
    """Per class 448 bytes, 64 more with float32 operands, as here, and 192 per token."""
    D, C = 4, 32
    x, w, e, y = torch.randn(C, D), torch.randn(V, D), torch.randn(C, V), torch.zeros(C, dtype=torch.int32)
    signs, shared, targets = torch.ones(D, 16), torch.randn(-(-V // COLUMNS), D), Targets(y, x[:, 0], x[:, 1])
    dx = torch.randn(N, D)
    with track_allocations() as seen:
        comparison = Comparison(w, signs, N)
        for begin in range(0, 64, C):
            comparison.see_input(e, targets, InputRows(dx, D, torch.arange(begin, begin + C)))
            comparison.see_weight(e, targets, x)
            comparison.see_lost(e, targets)
        comparison.see_sum(w, shared)
        assert comparison.errors(dx).whole.isfinite().all()
    assert most < seen.peak_bytes < 1.05 * most + 300 * min(N, V)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy
@pytest.mark.parametrize("gradient", ["forward", "recompute"])
def test_a_threshold_is_relative_to_the_gradients(
    kernels: None, monkeypatch: pytest.MonkeyPatch, gradient: str
) -> None:
    """Class weights that are all alike, or a scale that the weight makes up for, change neither tiles nor masses."""
    monkeypatch.setattr(vocabulary_order.VocabularyOrder, "adapt", lambda *_: None)
    monkeypatch.setattr(threshold, "FIRST", 0.3)
    (x, w, y), reports = problem(120, 24, 1100), []
    for scale, weight in ((1.0, 1.0), (16.0, 1024.0), (0.0625, 1.0)):
        parameter, q = (w / scale).requires_grad_(), torch.full((1100,), weight)
        options = HeadOptions(skip=0.02, gradient=gradient)
        for _ in range(2):
            hidden = x.clone().requires_grad_()
            loss = lowtide.linear_cross_entropy(hidden, parameter, y, weight=q, logit_scale=scale, options=options)
            torch.autograd.grad(loss, (hidden, parameter))
        report = lowtide.skip_report(parameter)
        assert report is not None
        reports.append(report[:3])
    assert reports[0][0] < 0.95
    assert reports[1] == pytest.approx(reports[0], rel=1e-3)
    assert reports[2] == pytest.approx(reports[0], rel=1e-3)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy
@pytest.mark.parametrize("gradient", ["forward", "recompute"])
@pytest.mark.parametrize("unbiased", [False, True])
def test_what_the_gradient_of_the_logits_loses(
    kernels: None, monkeypatch: pytest.MonkeyPatch, unbiased: bool, gradient: str
) -> None:
    """It is reported of calls that compare nothing, with each option, and bounds what both gradients lose."""
    monkeypatch.setattr(vocabulary_order.VocabularyOrder, "compares", False)
    monkeypatch.setattr(threshold, "FIRST", 1.0)
    N, D, V = 190, 264, 1100
    x, w, y = problem(N, D, V)
    b, q, t = torch.randn(V) * 0.3, torch.rand(V) + 0.5, torch.rand(N) + 0.5
    b[5], y[2:9:3], t[4::9] = -100, 5, 0  # a target so unlikely that the others' exponentials overflow beside it
    b[6], y[3:9:3] = -60, 6  # the squares alone would
    logits = (x.double() @ w.double().T).requires_grad_()
    z = (logits + b) * 0.9
    each = torch.nn.functional.cross_entropy(z, y, q.double(), reduction="none", label_smoothing=0.1)
    valid = y >= 0
    (right,) = torch.autograd.grad(((each + 1e-3 * z.logsumexp(1).square()) * t)[valid].sum(), logits)
    even = (t * valid)[:, None] * q * (0.9 * 0.1 / V)  # what smoothing subtracts, which is not in E

    parameter, options = w.clone().requires_grad_(), HeadOptions(skip=0.05, skip_unbiased=unbiased, gradient=gradient)
    for _ in range(2):
        known = vocabulary_order.known_order(parameter)
        order = None if known is None else known.order  # which the call may renew
        hidden = x.clone().requires_grad_()
        loss = lowtide.linear_cross_entropy(
            hidden, parameter, y, linear_bias=b, weight=q, label_smoothing=0.1, z_loss=1e-3, logit_scale=0.9,
            token_weight=t, reduction="sum", options=options,
        )  # fmt: skip
        dx, dw = (grad.double() for grad in torch.autograd.grad(loss, (hidden, parameter)))
    x, w = x.double(), w.double()
    found = (dw @ torch.linalg.pinv(x)).T  # of dW = G^T X, with fewer tokens than hidden sizes
    lost = found - right
    report = lowtide.skip_report(parameter)
    assert report is not None
    assert order is not None
    assert 0.01 < report.logit_error < 1
    assert report.logit_error == pytest.approx((lost.norm() / (right + even).norm()).item(), rel=1e-3)

    classes = order[1:].long()
    tiles = [lost[:, tile].sum(1) for tile in classes.split(COLUMNS)]
    assert torch.stack(tiles).abs().max() < 1e-4 * lost.abs().max()
    means = torch.cat([w[tile].mean(0).expand(len(tile), D) for tile in classes.split(COLUMNS)])
    assert relative(dx, found @ w) < 1e-4
    assert (dx - right @ w).norm() <= lost.norm() * torch.linalg.matrix_norm(w[classes] - means, 2) * 1.001
    assert (dw - right.T @ x).norm() <= lost.norm() * torch.linalg.matrix_norm(x, 2) * 1.001


@pytest.mark.parametrize("lies", ["columns", "wide", "transposed"])
def test_a_weight_in_any_order(kernels: None, lies: str) -> None:
    """Strides within rows and between them; a view made in each call is the same weight."""
    N, D, V = 90, 16, 600
    x, w, y = problem(N, D, V)
    store = torch.randn(V + 8, 2 * D)
    views: dict[str, Callable[[Tensor], Tensor]] = {
        "columns": lambda of: of[:V, D:],
        "wide": lambda of: of[8:, :D],
        "transposed": lambda of: of.view(-1)[: V * D].view(D, V).T,
    }
    views[lies](store).copy_(w)
    store.requires_grad_()
    right = exact(x, w, y)
    for _ in range(3):
        grads = step(x, views[lies](store), y)[1:]
    assert max(relative(found, one) for found, one in zip(grads, right[1:], strict=True)) < 0.02
    report = lowtide.skip_report(views[lies](store))
    assert report is not None
    assert (report.calls, report.dense) == (3, 1)


def test_the_last_report(kernels: None) -> None:
    """Of the weight that was last to skip: a dense call with another one after it does not count."""
    x, w, y = problem(60, 16, 500)
    first, second, third = (w.clone().requires_grad_() for _ in range(3))
    for parameter, calls in ((first, 3), (second, 2), (third, 1)):
        for _ in range(calls):
            step(x, parameter, y)
    assert vocabulary_order.last_report() == lowtide.skip_report(second) != lowtide.skip_report(first)


class Head(torch.nn.Linear):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return lowtide.linear_cross_entropy(x, self.weight, y, options=HeadOptions(skip=0.02))


@pytest.mark.skipif(not dist.is_gloo_available(), reason="ranks on CPUs use gloo")
def test_sharded_parameters(kernels: None) -> None:
    """FSDP2 gathers the same tensor in each step, whose report is there while it is gathered."""
    x, w, y = problem(60, 16, 500)
    model = Head(len(w[0]), len(w), bias=False)
    model.weight.data.copy_(w)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        right = exact(x, w, y)
        for _ in range(3):
            model.zero_grad()
            model(x, y).backward()
        assert isinstance(model.weight.grad, DTensor)
        assert relative(model.weight.grad.full_tensor(), right[2]) < 0.02
        assert lowtide.skip_report(model.weight) is None
        model.unshard()
        report = lowtide.skip_report(model.weight)
        assert report is not None
        assert (report.calls, report.dense) == (3, 1)
    finally:
        dist.destroy_process_group()


def test_a_weight_that_changes_its_size(kernels: None) -> None:
    """A parameter may get other memory, of more classes: its order begins anew."""
    x, w, y = problem(60, 16, 500)
    parameter = torch.nn.Parameter(w.clone())
    step(x, parameter, y)
    step(x, parameter, y)
    w = torch.cat((w, torch.randn(300, 16) / 4))
    parameter.data, y[1] = w.clone(), 790
    right = exact(x, w, y)
    for _ in range(2):
        found = step(x, parameter, y)
        assert max(relative(one, other) for one, other in zip(found[1:], right[1:], strict=True)) < 0.02


def test_what_is_asked_may_change(kernels: None) -> None:
    """The order stays; a threshold falls with the error, and does not rise by itself."""
    x, w, y = problem(60, 16, 500)
    parameter = w.requires_grad_()
    for skip, unbiased in [(0.02, False), (0.02, False), (0.2, False), (0.01, False), (0.01, True), (0.02, True)]:
        known = vocabulary_order.known_order(parameter)
        before = None if known is None or known.threshold is None else known.threshold.value.item()
        step(x, parameter, y, skip, unbiased=unbiased)
        known = remembered(parameter)
        assert known.threshold is not None
        assert before is None or known.threshold.value.item() <= 2.01 * max(before, threshold.FIRST * skip)
        assert known.threshold.value.item() <= 2.01 * skip
    assert (known.calls, known.dense) == (6, 1)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy
def test_batches_that_say_nothing(kernels: None) -> None:
    """Without tokens, and where numbers overflow, the threshold stays, and the order is of numbers."""
    x, w, y = problem(60, 16, 500)
    parameter = w.clone().requires_grad_()
    step(x, parameter, y)
    step(x, parameter, y)
    known = remembered(parameter)
    assert known.threshold is not None
    before = known.threshold
    of_nan, some = x.clone().index_fill(0, torch.tensor(1), torch.nan), torch.full_like(y, -100)
    for hidden, targets in ((x * torch.nan, some), (x[:0], y[:0]), (of_nan, y)):
        found = step(hidden, parameter, targets, reduction="sum")
        assert not any(one.any() for one in found) or hidden is of_nan
        assert all(map(torch.equal, known.threshold, before))
        report = lowtide.skip_report(parameter)
        assert report is not None
        assert math.isnan(report.logit_error)
    assert known.mean is not None
    assert known.mean.isfinite().all()


def errors_of(tiles: Tensor) -> threshold.Errors:
    """Return what is measured where tiles add so much [2]."""
    own = torch.tensor([1.6e-3, 2.2e-3])
    return threshold.Errors((own.square() + tiles.square()).sqrt(), own, tiles)


def whole(errors: threshold.Errors) -> Tensor:
    """Return what gradients are off by."""
    return (errors.whole.square() + torch.tensor(threshold.SHARED).square()).sqrt()


def test_thresholds_end() -> None:
    """They stay small where calls lose nothing, of which nothing is learned, and above 0 where errors are too large."""
    accepted, none, nothing = 5e-3, errors_of(torch.zeros(2)), torch.zeros(())
    found = threshold.Threshold.first(accepted, torch.device("cpu"))
    for _ in range(40):
        found = found.adapted(none, nothing, accepted)
    assert found.value.item() == pytest.approx(threshold.BLIND * threshold.FIRST * accepted)
    higher = found._replace(value=found.value * 3)
    for lost in (nothing, nothing * torch.nan):
        assert higher.adapted(none, lost, accepted).value == higher.value

    for _ in range(400):
        found = found.adapted(errors_of(torch.tensor([5e-3, 0])), found.value[0], accepted)
    assert found.value.item() == pytest.approx(threshold.LEAST * accepted)
    assert found.change == 1
    for _ in range(100):
        errors = errors_of(found.value * 4 * torch.ones(2))
        found = found.adapted(errors, found.value[0], accepted)
    assert whole(errors).max() > 0.9 * accepted


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_thresholds_whatever_the_default_dtype(dtype: torch.dtype) -> None:
    """They are float32: the kernel that reads one multiplies it by itself."""
    tiles = torch.full((2,), 1e-3)
    errors, lost = errors_of(tiles), tiles[0]
    torch.set_default_dtype(dtype)
    try:
        found = threshold.Threshold.first(0.02, torch.device("cpu"))
        for _ in range(4):
            assert {x.dtype for x in found} == {torch.float32}
            found = found.adapted(errors, lost, 0.02)
    finally:
        torch.set_default_dtype(torch.float32)


def test_numbers_reach_the_host_whatever_the_default_device() -> None:
    """Pinned memory is the host's."""
    with torch.device("meta"):
        assert host_memory(3).device.type == "cpu"


@pytest.mark.parametrize("period", [2, 4, 16])
@pytest.mark.parametrize("easier", [0.9, 0.5])
def test_thresholds_of_unlike_calls(period: int, easier: float) -> None:
    """Where one in so many has smaller errors, the threshold is not only that one's, and seldom changes by much."""
    known, found = ordered(), []
    assert known.threshold is not None
    for n in range(1, 800):
        lost = known.threshold.value.item()
        known.ended, known.sums = n, torch.tensor([[0.0], [lost**2], [1.0]])
        errors = errors_of(torch.tensor([4.0, 6.0]) * lost * (easier if n % period == 0 else 1))
        found.append(whole(errors).max().item() / known.asked.error)
        if known.compares:
            known.adapt(errors)
            known._change = known.threshold.change.item()
    assert max(found) < 1.3
    assert sum(x**2 for x in found) / len(found) < 1


@pytest.mark.parametrize("other", [0.016, 0.008])
def test_thresholds_of_two_errors(other: float) -> None:
    """Where calls ask for one and another in turns, neither is exceeded."""
    known, shares = ordered(), []
    for n in range(1, 40):
        accepted = other if n % 2 else 0.02
        known.ask(vocabulary_order.Asked(accepted, False, 0))
        assert known.threshold is not None
        lost = known.threshold.value.item()
        known.sums = torch.tensor([[0.0], [lost**2], [1.0]])
        errors = errors_of(torch.tensor([4.0, 6.0]) * lost)
        known.adapt(errors)
        shares.append(whole(errors).max().item() / accepted)
    assert max(shares) < 1
    assert max(shares[-2:]) > 0.6


@pytest.mark.parametrize("steps", [0, 3, 10])
@pytest.mark.parametrize(("grows", "power"), [(0.7, 1.0), (4.0, 1.0), (12.0, 1.0), (10.0, 1.2), (20.0, 1.3)])
def test_thresholds_follow_errors(grows: float, power: float, steps: float) -> None:
    """They come near what is accepted within 10 comparisons, and never go beyond: also where few tiles can go."""
    accepted = 5e-3
    found, errors = threshold.Threshold.first(accepted, torch.device("cpu")), errors_of(torch.zeros(2))
    for _ in range(10):
        lost = found.value[0]
        if steps:  # what can be left out is of so many sizes to each power of ten
            lost = 10 ** ((lost.log10() * steps).floor() / steps)
        errors = errors_of(lost**power * grows * torch.tensor([0.7, 1]))
        assert whole(errors).max() < accepted
        found = found.adapted(errors, lost, accepted)
    assert steps or whole(errors).max() > 0.85 * accepted


@pytest.mark.parametrize("own", [2.6e-3, 4e-3])
def test_thresholds_where_rounding_is_all_that_is_accepted(own: float) -> None:
    """Tiles may still add a little to it, however its size changes from call to call."""
    accepted, lost = 3e-3, torch.zeros(())
    found = threshold.Threshold.first(accepted, torch.device("cpu"))
    for n in range(200):
        lost, rounding = found.value[0], torch.full((2,), own * (1.1 if n % 3 else 0.9))
        tiles = 10 * lost * torch.ones(2)
        errors = threshold.Errors((rounding.square() + tiles.square()).sqrt(), rounding, tiles)
        found = found.adapted(errors, lost, accepted)
    assert 0.08 < (10 * lost / accepted).item() < 0.35


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_calls_of_which_few_skip(at_once: int) -> None:
    """Where too many tiles stay, the calls that try again also compare: the threshold still finds its place."""
    known = ordered()
    known._shares.append(0.9)
    skipping = []
    for _ in range(200 // at_once):
        for skips in [known.begin() for _ in range(at_once)]:
            if skips:
                skipping.append(known.compares)
                known.adapt(errors_of(torch.zeros(2)))
            known.ended += skips
            known.dense += not skips
    assert len(skipping) == 7
    assert all(skipping)


@pytest.mark.parametrize("nothing_below", [0.0, 2.0, 4.9])
def test_calls_skip_until_the_threshold_is_found(nothing_below: float) -> None:
    """Where few tiles can go, the first calls lose nothing: those that follow still skip as long as it grows."""
    known, skipped, accepted = ordered(), [], 0.02
    assert known.threshold is not None
    assert known.total is not None
    for _ in range(60):
        skipped.append(known.begin())
        if not skipped[-1]:
            known.dense += 1
            continue
        value = known.threshold.value.item()
        lost = value if value > nothing_below * threshold.FIRST * accepted else 0.0
        known.total = torch.tensor([60 if lost > 0.1 * accepted else 90, 100], dtype=torch.int32)
        known.sums = torch.tensor([[0.0], [lost**2], [1.0]])
        if known.compares:
            known.adapt(errors_of(torch.tensor([4.0, 6.0]) * lost))
        known.end()
    assert all(skipped), skipped
    assert lost > 0.1 * accepted


def passes(known: vocabulary_order.VocabularyOrder, sources: list[float], share: float) -> list[tuple[bool, bool]]:
    """Make calls before the first one's backward; return whether each one skips, and whether it is compared.

    The tiles of each add so many times what it loses.
    """
    assert known.threshold is not None
    found = []
    for grows, skips in zip(sources, [known.begin() for _ in sources], strict=True):
        compares = skips and known.compares
        found.append((skips, compares))
        known.dense += not skips
        if not skips:
            continue
        lost = known.threshold.value.item()
        known.total = torch.tensor([round(100 * share), 100], dtype=torch.int32)
        known.sums = torch.tensor([[0.0], [lost**2], [1.0]])
        if compares:
            known.adapt(errors_of(torch.tensor([0.7, 1]) * grows * lost))
        known.end()
    return found


@pytest.mark.parametrize("at_once", [1, 3, 8])
@pytest.mark.parametrize("share", [0.3, 0.9])
@pytest.mark.parametrize("sources", [[5.0, 10.0], [5.0, 5.0, 10.0], [*[5.0] * 7, 10.0]])
def test_calls_of_several_sources(sources: list[float], share: float, at_once: int) -> None:
    """The threshold rises and falls with them: few calls are compared, and few skip where that does not pay."""
    known, calls = ordered(), []
    for n in range(0, 960, at_once):
        calls += passes(known, [sources[(n + i) % len(sources)] for i in range(at_once)], share)
    skipped, compared = (sum(flags) / 720 for flags in zip(*calls[240:], strict=True))
    assert compared < 0.25
    assert skipped == 1 if share < 0.5 else skipped < 0.05


@pytest.mark.parametrize("micro_batches", [2, 3, 8])
def test_calls_that_try_again_take_turns(micro_batches: int) -> None:
    """Where skipping does not pay, each micro-batch of a step is tried, and not always the same one."""
    known = ordered()
    tried = {n % micro_batches for n in range(400) if passes(known, [5.0], 0.9)[0][0] and n > 100}
    assert tried == set(range(micro_batches))


def test_calls_skip_again_where_errors_fall() -> None:
    """Where skipping did not pay, one of the calls that try again finds that the threshold may grow: others follow."""
    known = ordered()
    assert known.threshold is not None
    skipped = 0
    for n in range(500):
        ((skips, _),) = passes(known, [30 if n < 200 else 6], 0.9 if known.threshold.value < 0.001 else 0.5)
        skipped += skips and 100 <= n < 200
        assert skips or n < 300
    assert skipped < 5


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_passes_that_compare_or_renew_the_order(at_once: int) -> None:
    """The same ones, however many calls come before the first one's backward pass."""
    known, renewed, compared = ordered(), [], []
    for n in range(200):
        for _ in range(0 if n % at_once else at_once):
            assert known.begin()
        if known.refreshes:
            renewed.append(n)
        if known.compares:
            compared.append(n)
            known.adapt(errors_of(torch.zeros(2)))
        known.ended += 1
    assert renewed == [0, 1, 2, 4, 8, 16, 32, 64, 128, 192]
    assert compared == [*range(17), *range(17, 200, 17)]


def ordered() -> vocabulary_order.VocabularyOrder:
    """Return what is remembered of a weight whose classes are in order."""
    known = vocabulary_order.VocabularyOrder(vocabulary_order.Asked(0.02, False, 0), 1)
    known.see(torch.rand(300))
    known.refresh(torch.randn(300, 8))
    known.sums = torch.zeros(3, 1)
    return known


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy
def test_ignored_tokens_and_overflow(kernels: None) -> None:
    """Hidden states of ignored tokens do not matter, exponentials overflow, and tokens' weights have signs."""
    x, w, y = problem(150, 16, 700)
    x[3:9] *= 300
    t = torch.randn(150)
    right_x = x.double().requires_grad_()
    right_w = w.double().requires_grad_()
    each = torch.nn.functional.cross_entropy(right_x @ right_w.T, y, reduction="none") * t
    right = torch.autograd.grad(each.sum() / (y >= 0).sum(), (right_x, right_w))
    x[y < 0] = torch.tensor([torch.nan, torch.inf]).repeat(8)
    parameter = w.clone().requires_grad_()
    for _ in range(3):
        found = step(x, parameter, y, 0.05, token_weight=t)
    assert max(relative(one, other) for one, other in zip(found[1:], right, strict=True)) < 0.05
    report = lowtide.skip_report(parameter)
    assert report is not None
    assert 0 <= report.dropped_mass < 1


@pytest.mark.parametrize(
    ("why", "call"),
    [
        ("compute capability", lambda x, w, y, o: lowtide.linear_cross_entropy(x, w, y, options=o)),
        ("compute capability", lambda x, w, y, o: lowtide.linear_cross_entropy(x, w, y, softcap=30.0, options=o)),
        ("compute capability", lambda x, w, y, o: lowtide.linear_logprobs(x, w, y, options=o)),
        ("one target a token", lambda x, w, y, o: lowtide.linear_logprobs(x, w, y[:, None], options=o)),
        ("one target a token", lambda x, w, y, o: lowtide.linear_logprobs(x, w, y, support=y, options=o)),
        ("one target a token", lambda x, w, y, o: lowtide.linear_token_stats(x, w, y, options=o)),
        ("only the loss", lambda x, w, y, o: lowtide.linear_divergence(x, w, x, w, options=o)),
        ("only the loss", lambda x, w, y, o: lowtide.linear_apply(lambda z: z.sum(1), x, w, options=o)),
    ],
)  # fmt: skip
def test_elsewhere(why: str, call: Callable[..., Any]) -> None:
    """What cannot skip says so, by the option's name."""
    x, w = torch.randn(3, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
    with pytest.raises(UnsupportedError, match=f"options: expected skip=None.*{why}"):
        call(x, w, torch.tensor([1, 2, 3]), HeadOptions(skip=0.01))


@pytest.mark.parametrize(
    ("why", "weight", "more"),
    [
        ("gets no gradient", lambda w: w.detach(), {}),
        ("gets no gradient", lambda w: w.detach(), {"reduction": "none"}),
        ("a result of the call", lambda w: w * 1.0, {}),
    ],
)
def test_calls_that_cannot(kernels: None, why: str, weight: Callable[[Tensor], Tensor], more: dict[str, Any]) -> None:
    """Nor does a call on the right device fall back in silence; without gradients there is nothing to skip."""
    x, w = torch.randn(3, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
    options, y = HeadOptions(skip=0.01), torch.tensor([1, 2, 3])
    with pytest.raises(UnsupportedError, match=f"options: expected skip=None.*{why}"):
        lowtide.linear_cross_entropy(x, weight(w), y, options=options, **more)
    with torch.no_grad():
        lowtide.linear_cross_entropy(x, weight(w), y, options=options, **more)
    assert lowtide.skip_report(w) is None


def test_wrong_options() -> None:
    """The range is in the message."""
    for wrong in (0, 1, -0.1, math.nan):
        with pytest.raises(ArgumentValueError, match="skip: expected a number above 0 and below 1"):
            HeadOptions(skip=wrong)
    with pytest.raises(ArgumentValueError, match="skip_unbiased"):
        HeadOptions(skip_unbiased=True)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which Dynamo asks for
def test_compiled_and_deterministic(kernels: None) -> None:
    """A compiler's graph ends before the call, and nothing refuses to be deterministic."""
    x, w, y = problem(60, 16, 500)
    weight, right = torch.nn.Parameter(w.clone()), exact(x, w, y)

    @torch.compile(backend="eager")
    def loss(hidden: Tensor) -> Any:
        return lowtide.linear_cross_entropy(hidden * 1.0, weight, y, options=HeadOptions(skip=0.02)) * 2

    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            (grad,) = torch.autograd.grad(loss(x), weight)
    finally:
        torch.use_deterministic_algorithms(False)
        torch._dynamo.reset()
    assert relative(grad / 2, right[2]) < 0.02
    assert lowtide.skip_report(weight) is not None


def test_a_weight_is_forgotten(kernels: None) -> None:
    """What is remembered of it goes with it, and a copy has nothing of it."""
    x, w, y = problem(20, 16, 300)
    weight = torch.nn.Parameter(w)
    step(x, weight, y)
    step(x, weight, y)
    known = weakref.ref(remembered(weight))
    assert lowtide.skip_report(copy.deepcopy(weight)) is None
    del weight
    assert known() is None
