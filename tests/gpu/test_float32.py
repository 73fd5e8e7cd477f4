"""Float32 heads on a CUDA device: pieces by their kernel, errors beside float32 GEMMs, memory, no waits.

    pytest -s tests/gpu/test_float32.py

writes the errors and peaks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpu.conftest import ON_GPU, no_waits, peak_beyond_gradients
from lowtide import HeadOptions, linear_cross_entropy, linear_token_stats, plan_head
from lowtide.head.backends import SPLITTING, why_not_exp
from lowtide.head.pieces import put_pieces_by_torch, side_by_side
from support import doubled, on_gpu, recorded_heads, relative_error, split_float32

pytestmark = [
    *ON_GPU,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() not in SPLITTING,
        reason="this GPU's float32 GEMMs are not split",
    ),
]
BF16 = torch.bfloat16
# n pieces: how far from float64 a logit may be, in units of a float32 GEMM's own error here, and beside it: 2**-18 of
# three, since tensor cores add products with fewer bits than float32 has
BOUNDS = {3: (8.0, 2**-18), 2: (8.0, 2e-5), 1: (8.0, 8e-3)}


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


@pytest.fixture(autouse=True)
def _setting() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("size", [(1, 1), (130, 1023), (7, 4096), (3, 0)])
def test_the_kernel_writes_what_plain_pytorch_does(size: tuple[int, int]) -> None:
    x = torch.randn(size, device="cuda") * 10 ** (8 * torch.randn(size, device="cuda"))
    x.view(-1)[::17] = torch.inf
    x.view(-1)[1::19] = torch.nan
    x.view(-1)[2::23] = 3.4028234e38
    for given in (x, x.T, torch.randn(size[0], size[1] + 3, device="cuda")[:, 3:]):
        for inner in (0, 1):
            for places in ((2, 1, 0, 1, 0, 3), (1, 0, 3), (3,)):
                got = side_by_side(given, places, inner)
                want = torch.empty_like(got)
                put_pieces_by_torch(given, want, places, inner)
                torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(300, 64, 3000), (513, 1000, 12345), (64, 4096, 50257)])
def test_errors_beside_float32_gemms(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, b, y = on_gpu(*shape)
    copies = doubled(x, w, b)
    logp = F.linear(*copies).log_softmax(-1)
    chosen, entropy = logp.gather(1, y[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    exact = [chosen, entropy, *torch.autograd.grad((chosen + 0.1 * entropy).sum(), copies)]

    def errors() -> list[float]:
        got = linear_token_stats(x, w, y, want=("logprob", "entropy"), linear_bias=b)
        assert got.logprob is not None
        assert got.entropy is not None
        found = [got.logprob, got.entropy, *torch.autograd.grad((got.logprob + 0.1 * got.entropy).sum(), (x, w, b))]
        return [relative_error(*both) for both in zip(found, exact, strict=True)]

    rows = {}
    for name, n in (("highest", 3), ("high", 2), ("medium", 1)):
        torch.set_float32_matmul_precision(name)
        rows[n] = errors()
    torch.set_float32_matmul_precision("highest")
    split_float32(monkeypatch, 0)
    own = errors()
    say(f"\n{shape}: relative errors of log-probability, entropy, dX, dW, db")
    for name, row in (("float32", own), *((f"{n} pieces", rows[n]) for n in rows)):
        say(f"{name:>10}" + "".join(f" {error:9.1e}" for error in row))
    for n, (times, beside) in BOUNDS.items():
        for got, of_float32 in zip(rows[n], own, strict=True):
            assert got <= times * of_float32 + beside, n


@pytest.mark.parametrize("workspace_mib", [None, 40, 8])
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_memory_is_as_planned(workspace_mib: float | None, precision: str) -> None:
    torch.set_float32_matmul_precision(precision)
    shape, options = (3000, 512, 20000), HeadOptions(workspace_mib=workspace_mib)
    x, w, _, y = on_gpu(*shape, bias=False)

    def step() -> None:
        linear_cross_entropy(x, w, y, options=options).backward()

    step()
    plan = plan_head(*shape, torch.float32, "cuda", options)
    assert plan.pieces
    peak = peak_beyond_gradients(step, x, w)
    say(f"\n{precision} {workspace_mib}: {peak / 2**20:.1f} MiB of {plan.scratch_bytes / 2**20:.1f} planned")
    assert peak <= plan.scratch_bytes


def test_the_setting_is_read_in_each_call() -> None:
    """Also where a call is repeated from a record: from the third one with the same shapes on."""
    x, w, _, y = on_gpu(300, 64, 3000, bias=False)
    results: dict[str, list[Tensor]] = {}
    for _ in range(4):
        for name in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(name)
            loss = linear_cross_entropy(x, w, y)
            found = [loss.detach(), *torch.autograd.grad(loss, (x, w))]
            assert all(map(torch.equal, found, results.setdefault(name, found)))
    gradients = [results[name][1] for name in results]
    assert not torch.equal(gradients[0], gradients[1])
    assert not torch.equal(gradients[1], gradients[2])


def cast(*tensors: Tensor) -> list[Tensor]:
    return [t.float() for t in tensors]


def test_no_waits() -> None:
    x, w, _, y = on_gpu(300, 64, 3000, bias=False)
    x16, w16 = (t.detach().to(BF16).requires_grad_() for t in (x, w))

    def run() -> None:
        for operands in ((x, w), (x16.float(), w), cast(x16, w16)):
            linear_cross_entropy(*operands, y).backward()

    run()
    with no_waits():
        run()


def test_casts_of_bfloat16_tensors_run_as_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as the bfloat16 call, by the exponential path where there is one."""
    x, w, _, y = on_gpu(700, 256, 6000, bias=False, dtype=BF16)
    heads = recorded_heads(monkeypatch)
    options = HeadOptions(backend="auto" if why_not_exp(x.device, BF16, 256, 6000) else "exp")
    plain = linear_cross_entropy(x, w, y, options=options)
    own = torch.autograd.grad(plain, (x, w))
    loss = linear_cross_entropy(*cast(x, w), y, options=options)
    found = torch.autograd.grad(loss, (x, w))
    assert heads[-1].dtype == BF16
    copies = doubled(x, w)
    true = F.cross_entropy(F.linear(*copies), y)
    exact = torch.autograd.grad(true, copies)
    say(f"\nloss {abs(loss.item() - true.item()) / true.item():.1e}")
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
    for got, of_bf16, want in zip(found, own, exact, strict=True):
        assert relative_error(got, want) <= 1.1 * relative_error(of_bf16, want)


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
def test_compiled() -> None:
    x, w, b, y = on_gpu(300, 64, 3000)

    def run(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return linear_cross_entropy(x, w, y, linear_bias=b)

    eager, compiled = run(x, w, b), torch.compile(run, fullgraph=True)(x, w, b)
    assert eager.item() == compiled.item()
    for got, want in zip(torch.autograd.grad(compiled, (x, w, b)), torch.autograd.grad(eager, (x, w, b)), strict=True):
        assert torch.equal(got, want)
