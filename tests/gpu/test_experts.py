"""Fused experts on a CUDA device: beside plain PyTorch and transformers', what is saved, no host waits, compiled."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from gpu.conftest import ON_GPU, no_waits, peak_beyond_gradients
from lowtide.measure.timing import kept_above
from lowtide.mlp import groups
from lowtide.mlp.expert_call import Form
from mlp.experts import FORMS, GPT_OSS, by_pairs, fused, operands, with_gradients
from support import doubled, every_pair, relative_error

pytestmark = [*ON_GPU, pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")]
# T, K, E, D, F: of whole 16 bytes and not, many experts without tokens, no token
SIZES = [(300, 3, 8, 64, 48), (77, 2, 5, 36, 20), (40, 2, 64, 128, 64), (0, 2, 4, 16, 8)]
FEW = 100  # tokens
# With few numbers, one at a limit decides an error: its gradient passes or not, as it was rounded.
RARELY_LIMITED = GPT_OSS._replace(limit=7.0)
LEVELS = pytest.mark.parametrize("level", [0, 1])


@every_pair(sizes=SIZES, form=FORMS, transposed=[False, True], level=[0, 1])
def test_in_bfloat16_errs_no_more_than_plain_pytorch(sizes: Any, form: Form, transposed: bool, level: int) -> None:
    if sizes[0] < FEW and form == GPT_OSS:
        form = RARELY_LIMITED
    leaves, ids = operands(sizes, dtype=torch.bfloat16, transposed=transposed, device="cuda")
    true = doubled(*leaves)
    expected = with_gradients(by_pairs(true, ids, form, transposed=transposed), true)
    plain = with_gradients(by_pairs(leaves, ids, form, transposed=transposed), leaves)
    y = fused(leaves, ids, form, transposed=transposed, checkpoint_level=level)
    twice = with_gradients(y, leaves, retain_graph=True)
    got = with_gradients(y, leaves)  # in place now
    few = 2e-3 if sizes[0] < FEW else 0.0  # of few numbers plain PyTorch may be lucky with all
    for g, again, p, e in zip(got, twice, plain, expected, strict=True):
        assert torch.equal(g, again)
        assert relative_error(g, e) <= 1.3 * relative_error(p, e) + few


@pytest.mark.parametrize(("dtype", "level"), [(torch.float32, 1), (torch.float16, 0)])
def test_other_dtypes(dtype: torch.dtype, level: int) -> None:
    leaves, ids = operands((77, 2, 5, 36, 20), dtype=dtype, device="cuda")
    true = doubled(*leaves)
    expected = with_gradients(by_pairs(true, ids, GPT_OSS), true)
    plain = with_gradients(by_pairs(leaves, ids, GPT_OSS), leaves)
    got = with_gradients(fused(leaves, ids, GPT_OSS, checkpoint_level=level), leaves)
    for g, p, e in zip(got, plain, expected, strict=True):
        assert relative_error(g, e) <= 1.3 * relative_error(p, e) + 8 * torch.finfo(dtype).eps


@LEVELS
def test_pairs_of_no_expert_add_nothing(level: int) -> None:
    """No GEMM writes their rows: memory of NaN shows where one is read."""
    leaves, ids = operands((300, 3, 8, 64, 48), dtype=torch.bfloat16, device="cuda")
    ids[::3, 1], ids[7] = 8, 8
    for _ in range(2):
        room = torch.full((2**22,), torch.nan, device="cuda", dtype=torch.bfloat16)
        del room
        got = with_gradients(fused(leaves, ids, RARELY_LIMITED, checkpoint_level=level), leaves)
        true = doubled(*leaves)
        expected = with_gradients(by_pairs(true, ids, RARELY_LIMITED), true)
        for g, e in zip(got, expected, strict=True):
            assert relative_error(g, e) <= 2e-2
        assert not got[2][ids == 8].any()


def test_grouped_gemms_beside_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same to a last digit of bfloat16, an expert without rows included; the loop is what a CPU runs."""
    leaves, ids = operands((300, 3, 8, 64, 48), dtype=torch.bfloat16, device="cuda")
    assert groups._has_grouped(leaves[0], leaves[2].mT) == (torch.cuda.get_device_capability() >= (9, 0))
    grouped = with_gradients(fused(leaves, ids, GPT_OSS), leaves)
    monkeypatch.setattr(groups, "_has_grouped", lambda *_: False)
    looped = with_gradients(fused(leaves, ids, GPT_OSS), leaves)
    for g, w in zip(grouped, looped, strict=True):
        assert relative_error(g, w) <= 4e-3


@LEVELS
def test_the_host_does_not_wait_and_the_bits_are_the_same(level: int) -> None:
    leaves, ids = operands((512, 4, 16, 64, 48), dtype=torch.bfloat16, device="cuda")
    upstream = torch.randn_like(leaves[0])

    def step() -> list[Tensor]:
        y = fused(leaves, ids, GPT_OSS, checkpoint_level=level)
        return [y.detach(), *torch.autograd.grad(y, leaves, upstream)]

    first = step()
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("PyTorch's grouped GEMM is for Hopper and later")
    with no_waits():
        second = step()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_deterministic_algorithms() -> None:
    leaves, ids = operands((300, 3, 8, 64, 48), dtype=torch.bfloat16, device="cuda")
    expected = with_gradients(fused(leaves, ids, GPT_OSS), leaves)
    torch.use_deterministic_algorithms(True)
    try:
        got = with_gradients(fused(leaves, ids, GPT_OSS), leaves)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_saved_bytes_and_peaks() -> None:
    T, K, _, D, F = sizes = 4096, 4, 8, 512, 1024  # whole MiB
    leaves, ids = operands(sizes, dtype=torch.bfloat16, bias=False, device="cuda")
    trained = [t for t in leaves if t is not None]
    row = 2 * T * K  # bytes of a bfloat16 number of each row
    fused(leaves, ids, Form("silu")).sum().backward()
    small = 2**20
    for level, saved, most in ((0, 2 * F * row, (3 * F + D) * row), (1, 0, (3 * F + D) * row)):

        def step(level: int = level) -> None:
            fused(leaves, ids, Form("silu"), checkpoint_level=level).backward(leaves[0].detach())

        kept = kept_above(lambda k=level: fused(leaves, ids, Form("silu"), checkpoint_level=k), "cuda")
        assert abs(kept - leaves[0].nbytes - saved) <= small  # the output is there too
        peak = peak_beyond_gradients(step, *trained)
        assert peak <= most + D * row + leaves[0].nbytes + small


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
@LEVELS
def test_compiled(level: int) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda *args: fused(args[:-1], args[-1], GPT_OSS, checkpoint_level=level), fullgraph=True)
    leaves, ids = operands((300, 3, 8, 64, 48), dtype=torch.bfloat16, device="cuda")
    got = with_gradients(compiled(*leaves, ids), leaves)
    for g, w in zip(got, with_gradients(fused(leaves, ids, GPT_OSS), leaves), strict=True):
        assert relative_error(g, w) <= 2e-3


@pytest.mark.parametrize(("family", "level"), [("Qwen3Moe", 0), ("GptOss", 1)])
def test_a_model_beside_stock(family: str, level: int) -> None:
    """In bfloat16, gradients as near to float64 as those of transformers' grouped GEMMs."""
    transformers = pytest.importorskip("transformers")
    import lowtide

    config = getattr(transformers, f"{family}Config")(
        vocab_size=499, hidden_size=64, intermediate_size=48, moe_intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts=8, num_local_experts=8,
        num_experts_per_tok=2, experts_implementation="grouped_mm", attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    stock = getattr(transformers, f"{family}ForCausalLM")(config).cuda().bfloat16().train()
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model = copy.deepcopy(stock)
    report = lowtide.patch(model, loss=False, norm=False, rope=False)
    assert report.parts["mlp"].patched, str(report)
    for module in model.modules():
        if hasattr(module, "checkpoint_level"):
            module.checkpoint_level = level
    ids = torch.randint(3, 499, (2, 200), device="cuda")
    losses = [m(input_ids=ids, labels=ids).loss for m in (model, stock)]
    torch.testing.assert_close(*losses, rtol=4e-3, atol=0)
    for loss in losses:
        loss.backward()
    for (name, p), q in zip(model.named_parameters(), stock.parameters(), strict=True):
        if "experts" in name and q.grad is not None:
            assert relative_error(p.grad, q.grad) <= 0.1, name
