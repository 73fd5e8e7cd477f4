"""What stands in for TRL's functions, on CUDA; TRL itself is not needed."""

from __future__ import annotations

import pytest
import torch

from lowtide.trl.calls import LogProbCall
from support import on_gpu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.parametrize(("dtype", "cap"), [(torch.float32, None), (torch.bfloat16, 5.0)])
def test_a_policy_and_its_own_reference_agree_to_the_bit(dtype: torch.dtype, cap: float | None) -> None:
    x, w, b, y = on_gpu(3001, 128, 5003, dtype=dtype)
    policy, *_ = LogProbCall(x, w, b, y, 0.8, 1, cap).run(None)
    frozen = [t.detach() for t in (x, w, b)]
    with torch.no_grad():
        reference, *_ = LogProbCall(*frozen, y, 0.8, 1, cap, 1.0, ("log_probs",)).run(None)
    assert policy is not None
    assert reference is not None
    assert torch.equal(policy, reference)
