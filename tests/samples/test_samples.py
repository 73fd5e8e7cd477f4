"""Samples of weights: what they detect, in plain PyTorch and by the kernel in Triton's interpreter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from lowtide.samples import weights
from lowtide.samples.weights import Samples

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.int64,
    torch.uint8, torch.bool,
]  # fmt: skip
SHAPES = [(), (1,), (7,), (1, 9), (9, 1), (30, 12), (12, 30), (3, 8, 16), (129, 65), (5000,)]


@pytest.fixture(params=["torch", "kernel"])
def assertions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Exception]]:
    """Plain PyTorch, or the kernel in Triton's interpreter, whose failed assertions end up in the list."""
    failed: list[Exception] = []
    if request.param == "kernel":
        if DEVICE == "cuda":
            pytest.skip("compiled kernels take no tensors of a CPU")
        pytest.importorskip("triton")
        from triton.runtime.interpreter import InterpreterError, interpreter_builder

        options = dataclasses.replace(interpreter_builder.options, debug=True, sanitize_overflow=False)
        monkeypatch.setattr(interpreter_builder, "options", options)
        monkeypatch.setattr(weights, "why_no_triton", lambda *_: None)
        launch = weights._launch

        def launched(*args: object, **kwargs: object) -> None:
            try:
                launch(*args, **kwargs)  # type: ignore[arg-type]
            except InterpreterError as error:
                failed.append(error)

        monkeypatch.setattr(weights, "_launch", launched)
    yield failed
    assert all(weights._ON_DEVICE in str(error) for error in failed)


def values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    bits = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return bits.view(dtype).view(shape) if dtype is not torch.bool else (bits[..., 0] > 99)


def parameters(dtype: torch.dtype) -> list[Tensor]:
    each = [values(shape, dtype) for shape in SHAPES]
    each += [
        values((12, 20), dtype).t(),
        values((12, 20), dtype)[:, 3:],
        values((6, 5), dtype)[2:],
        values((0, 3), dtype),
    ]
    return [nn.Parameter(x, requires_grad=False) for x in each]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_has_the_checksum_of_plain_pytorch(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    from lowtide.samples.kernels.checksum import MOST

    group = [nn.Parameter(p.data.to(DEVICE), requires_grad=False) for p in parameters(dtype) if p.numel()] * 3
    assert len(group) > MOST  # several launches
    sums = torch.empty(len(group), dtype=torch.int64, device=DEVICE)
    weights._launch(group, sums)
    assert sums.sum() == weights._sum(group)
    first = 0
    for p, found in zip(group[:9], sums.tolist(), strict=False):  # of each, its places go on after those before it
        step = weights._stride(p.shape)
        bits = p.contiguous().view(-1)[::step].view(weights.INTEGERS[dtype.itemsize]).tolist()
        wanted = sum(x * (2 * (first + k) + 1) for k, x in enumerate(bits))
        assert (wanted - found) % 2**64 == 0, p.shape
        first += len(bits)


def transposed(p: Tensor) -> None:
    p.data = p.data.t().contiguous().t()


def swapped(p: Tensor) -> None:
    p.data[[0, 1]] = p.data[[1, 0]]


CHANGES: dict[str, tuple[Callable[[Tensor], object], bool]] = {
    "nothing": (lambda p: None, False),
    "all": (lambda p: p.data.mul_(2), True),
    "row": (lambda p: p.data[5].zero_(), True),
    "column": (lambda p: p.data[:, 3].zero_(), True),
    "two rows": (swapped, True),
    "moved": (lambda p: setattr(p, "data", p.data.clone()), False),
    "moved and written": (lambda p: setattr(p, "data", p.data * 3), True),
    "other strides": (transposed, False),
    "dtype": (lambda p: setattr(p, "data", p.data.double()), True),
    "shape": (lambda p: setattr(p, "data", p.data.reshape(24, 10)), True),
    "freed": (lambda p: p.untyped_storage().resize_(0), False),
}


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("name", CHANGES)
def test_what_is_detected(name: str, at: int, assertions: list[Exception]) -> None:
    """Of two weights of one dtype beside some of another, contiguous or not."""
    change, detected = CHANGES[name]
    group = [nn.Parameter(torch.randn(12, 20)), nn.Parameter(torch.randn(20, 12).t())]
    seen = Samples([*group, *parameters(torch.bfloat16)])
    assert not seen.changed()
    assert not assertions
    change(group[at])
    assert (seen.changed() or bool(assertions)) == detected


def test_two_weights_whose_values_were_exchanged(assertions: list[Exception]) -> None:
    one, other = nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(6, 5))
    seen = Samples([one, other])
    one.data, other.data = other.data, one.data
    assert seen.changed() or assertions


def test_weights_that_are_not_sampled(assertions: list[Exception]) -> None:
    freed, plain = nn.Parameter(torch.randn(3, 4)), torch.randn(3, 4)
    freed.untyped_storage().resize_(0)
    seen = Samples([freed, plain, nn.Parameter(torch.randn(2, 2, device="meta"))])
    plain.zero_()
    assert not seen.changed()
    assert not assertions
