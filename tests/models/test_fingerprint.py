"""One bit that changes, or two values that change places, change a tensor's fingerprint; nothing else does."""

import pytest
import torch

from lowtide.models import fingerprint as module
from lowtide.models.fingerprint import fingerprint

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn]
SHAPES = [(1,), (97, 16), (3, 4099), (40001,)]  # more than a row of factors, and odd ends


def kernel(x):
    pytest.importorskip("triton")
    from lowtide.models.kernels.fingerprint import sum_bits

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return sum_bits(
        x.view(-1).view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]).to(device)
    )


def slowly(x):
    """Return what a device without integer products would."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "_row_sums", lambda values, factors: (values * factors).sum(1))
        return fingerprint([x])


WAYS = {"torch": lambda x: fingerprint([x]), "kernel": kernel}
CASES = [*(("torch", dtype, shape) for dtype in DTYPES for shape in SHAPES), ("kernel", torch.bfloat16, (3, 4099))]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # Triton's interpreter computes in NumPy, which warns
@pytest.mark.parametrize(("way", "dtype", "shape"), CASES)
def test_every_bit_and_place_counts(way, dtype, shape):
    of = WAYS[way]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = of(x).item()
    assert of(x.clone()).item() == before
    n = x.numel()
    for at in {0, n - 1}:
        changed = x.clone()
        changed.view(-1).view(torch.uint8)[at * x.itemsize] ^= 1
        assert of(changed).item() != before
        swapped, to = x.clone().view(-1), (at + n // 3) % n
        if swapped[at].item() != swapped[to].item():
            kept = swapped[at].clone()
            swapped[at] = swapped[to]
            swapped[to] = kept
            assert of(swapped.view(shape)).item() != before


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("way", WAYS)
def test_rows_of_equal_sums_that_change_places(way):
    x = torch.eye(140)
    before = WAYS[way](x).item()
    for i, j in ((1, 130), (64, 128)):
        x[[i, j]] = x[[j, i]]
        assert WAYS[way](x).item() != before
        x[[i, j]] = x[[j, i]]
    assert WAYS[way](x).item() == before


def test_strides_offsets_threads_and_devices():
    x = torch.randn(700, 4099)
    expected = fingerprint([x])
    assert torch.equal(slowly(x), expected)
    assert torch.equal(fingerprint([torch.cat([x[:1], x])[1:]]), expected)  # which begins at four bytes
    assert not torch.equal(fingerprint([-torch.zeros(3)]), fingerprint([torch.zeros(3)]))
    nan = torch.full((3,), torch.nan)
    assert torch.equal(fingerprint([nan, None, nan[:0]]), fingerprint([nan.clone(), nan[:0]]))
    assert fingerprint([torch.randn(5, 7).t().expand(2, 7, 5)]).shape == (1,)
    assert fingerprint([x.to("meta")]) is None
    with torch.inference_mode():
        assert torch.equal(fingerprint([x.clone()]), expected)
    try:
        torch.set_num_threads(2)
        assert torch.equal(fingerprint([x]), expected)
    finally:
        torch.set_num_threads(1)
