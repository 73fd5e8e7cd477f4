"""The kernels over rows of the statistics' gradient, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from lowtide.head.kernels import stats_logits, stats_rows
from lowtide.head.kernels.exp_terms import finish_input_grad
from support import relative_error

if torch.cuda.is_available():
    pytest.skip("the interpreter's", allow_module_level=True)

NEAR = 5e-6


@pytest.mark.parametrize("room", [0, 5])  # for rows of a chunk that a shorter last one has not
def test_entries_are_rounded_once(room: int) -> None:
    """What the entry of each of several targets loses in a narrow buffer is found again in the input's gradient."""
    N, K, V, D = 9, 4, 40, 24
    x, w, ids = torch.randn(N, D).bfloat16(), torch.randn(V, D).bfloat16(), torch.randint(0, V, (N, K))
    ids[:, 2] = ids[:, 1]
    logp = (x.double() @ w.double().T).log_softmax(1)
    g = torch.randn(N, K)
    entries = stats_logits.Entries.empty(N + room, K, x.device, heat=False, even=False)
    known = stats_rows.RowStats(
        lse=(x.double() @ w.double().T).logsumexp(1).float(), top=logp.argmax(1), top_logprob=logp.amax(1).float(),
        logprob=logp.gather(1, ids).float(),
    )  # fmt: skip
    stats_rows.prepare_stats(known, stats_rows.RowStats(logprob=g), ids.int(), x, entries, V)
    softmax_part = (logp.exp() * -g.double().sum(1, keepdim=True)) / entries.s[:N, None]
    e = softmax_part.bfloat16()
    stats_rows.put_entries(e, entries, 0)
    dx = torch.empty(N, D)
    finish_input_grad(e.float() @ w.float(), dx, w, entries.s, entries.id[:, 1:], entries.rest)
    exact = softmax_part.scatter_add(1, ids, g.double() / entries.s[:N, None])
    torch.testing.assert_close(e.double(), exact, rtol=2**-7, atol=1e-6)  # the interpreter cuts digits off
    rounded = e.double().scatter(1, ids, exact.gather(1, ids))
    want = entries.s[:N, None] * (rounded @ w.double())
    assert relative_error(dx, want) < NEAR
