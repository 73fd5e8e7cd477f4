"""What stands in for TRL's functions, on CUDA; TRL itself is not needed."""

from __future__ import annotations

import pytest
import torch

from lowtide.trl.calls import DivergenceCall, LogProbCall
from support import doubled, on_gpu, relative_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cap", [None, 5.0])
def test_a_policy_and_its_own_reference_agree_to_the_bit(dtype: torch.dtype, cap: float | None) -> None:
    x, w, b, y = on_gpu(3001, 128, 5003, dtype=dtype)
    policy, *_ = LogProbCall(x, w, b, y, 0.8, 1, cap).run(None)
    frozen = [t.detach() for t in (x, w, b)]
    with torch.no_grad():
        reference, *_ = LogProbCall(*frozen, y, 0.8, 1, cap, 1.0, ("log_probs",)).run(None)
    assert policy is not None
    assert reference is not None
    assert torch.equal(policy, reference)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 2e-2)])
def test_values_and_gradients(dtype: torch.dtype, tolerance: float) -> None:
    x, w, b, y = on_gpu(301, 128, 2003, dtype=dtype)
    true = doubled(x, w, b)
    z = 5 * torch.tanh(0.5 * (true[0] @ true[1].T + true[2]) / 5) / 0.7
    logp = z.log_softmax(-1)
    expected = logp.gather(-1, y[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    found = LogProbCall(x, w, b, y, 0.7, 1, 5.0, 0.5).run(None)
    for mine, theirs in zip(found, expected, strict=False):
        assert mine is not None
        assert relative_error(mine, theirs) < tolerance
    (2 * found[0] + 0.5 * found[1]).sum().backward()  # type: ignore[operator]
    (2 * expected[0] + 0.5 * expected[1]).sum().backward()
    for tensor, reference in zip((x, w, b), true, strict=True):
        assert relative_error(tensor.grad, reference.grad) < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_divergences(dtype: torch.dtype, tolerance: float, beta: float) -> None:
    x, w, b, _ = on_gpu(301, 128, 2003, dtype=dtype)
    teacher = [t.detach().flip(0).contiguous() for t in (x, w, b)]
    value, entropy = DivergenceCall(x, w, b, *teacher, beta, 0.7).run(None)
    logits = [(t[0].double() @ t[1].double().T + t[2].double()) / 0.7 for t in ((x, w, b), teacher)]
    log_s, log_t = (z.detach().log_softmax(-1) for z in logits)
    log_m = log_t if beta == 1 else log_s if beta == 0 else ((1 - beta) * log_s.exp() + beta * log_t.exp()).log()
    forward, reverse = (log_t.exp() * (log_t - log_m)).sum(-1), (log_s.exp() * (log_s - log_m)).sum(-1)
    expected = forward if beta == 0 else reverse if beta == 1 else beta * forward + (1 - beta) * reverse
    assert relative_error(value, expected) < tolerance
    assert relative_error(entropy, -(log_s.exp() * log_s).sum(-1)) < tolerance
    assert value.requires_grad
    assert not entropy.requires_grad
