"""Calls without labels: log-probabilities and argmax without logits, and everything else as in the stock model."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F

import lowtide
from lowtide import HeadOptions
from lowtide.errors import ArgumentValueError, UnsupportedError
from lowtide.measure.allocations import track_allocations
from lowtide.models.lazy_logits import LazyLogits
from models.conftest import DYNAMO, VOCAB, assert_same_training, expect_calls, state_of
from promises import promise
from support import every_pair

pytestmark = [*DYNAMO, promise("patched", "reported")]
V, T = VOCAB, 11


def harness(z, ids, *, dtype=None, start=4):
    """The log-probability, the greedy tokens and each log-probability of continuations, as lm-evaluation-harness does.

    The second half of the continuations is requested of two copies of the rows, as for one-token continuations.
    """
    sums, greedy, each = [], [], []
    for row, sequence in zip(F.log_softmax(z, dim=-1, dtype=dtype), ids, strict=True):
        logits = row[start : row.shape[0] - 1].unsqueeze(0)
        greedy.append(logits.argmax(dim=-1))
        for part, moved in zip(logits.expand(2, -1, -1).chunk(2), (0, 1), strict=True):
            tokens = (sequence[start + 1 :] + moved).remainder(z.shape[-1]).unsqueeze(0)
            chosen = torch.gather(part, 2, tokens.unsqueeze(-1)).squeeze(-1)
            sums.append(chosen.sum())
            each.append(chosen)
    return torch.stack(sums), torch.cat(greedy), torch.cat(each)


def assert_as_exact_as_stock(got, stock, true):
    """Values err by at most 1.5 times what stock's largest error is, and a rounding of the values' own dtype."""
    floor = 2 * torch.finfo(got.dtype).eps * true.abs().max()
    assert (got - true).abs().max() <= 1.5 * (stock - true).abs().max() + floor


CALLS = {
    "plain": lambda ids: {},
    "left padding": lambda ids: {
        "attention_mask": (mask := torch.ones_like(ids).index_fill(1, torch.arange(4), 0)),
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
    },
    "logits_to_keep": lambda ids: {"logits_to_keep": 7},
}


@promise("values")
@every_pair(
    name=["llama", "gemma2", "cohere2", "phi", "gpt2", "qwen3-moe"],
    dtype=[torch.float32, torch.bfloat16, torch.float16],
    mode=[torch.no_grad, torch.inference_mode],
    call=CALLS,
)
def test_a_harness_scores_as_with_stock_and_builds_no_logits(name, dtype, mode, call, pair, batch):
    if name in ("gpt2", "gemma2") and call == "left padding":  # gemma2's padded rows are NaN in stock
        call = "plain"
    model, stock = (m.eval() for m in pair(name, dtype))
    ids = batch["input_ids"]
    call = CALLS[call](ids)

    def score(m):
        logits = m(input_ids=ids, **call).logits
        return logits, harness(logits, ids[:, -logits.shape[1] :])

    with lowtide.scoring(model) as report, mode():
        logits, got = score(model)
        assert type(logits) is LazyLogits
    with mode():
        expected, true = score(stock)[1], score(copy.deepcopy(stock).double())[1]
    assert [x.dtype for x in got] == [x.dtype for x in expected]
    assert torch.equal(got[1], expected[1])
    assert_as_exact_as_stock(got[2], expected[2], true[2])
    expect_calls(report, 1)


ROUNDED = {
    "logits": lambda z: z.bfloat16().float(),
    "logits of some": lambda z: z[:, 3:].bfloat16().float(),
    "log-probabilities": lambda z: z.log_softmax(-1, dtype=torch.bfloat16).float(),
}


@promise("dtypes")
@pytest.mark.parametrize("made", ROUNDED)
def test_the_argmax_is_the_first_of_those_that_were_rounded_to_the_same(made, pair):
    model, stock = pair("llama")
    with torch.no_grad():
        for m in (model, stock):  # every class has a later one with a logit that is slightly higher
            m.lm_head.weight[49:97] = m.lm_head.weight[:48] * 1.0001
    ids = torch.arange(2 * T).view(2, T)
    with lowtide.scoring(model.eval()) as report, torch.no_grad():
        got = ROUNDED[made](model(input_ids=ids).logits).argmax(-1)
        assert torch.equal(got, ROUNDED[made](stock.eval()(input_ids=ids).logits).argmax(-1))
    expect_calls(report, 1)


@every_pair(dtype=[torch.float32, torch.bfloat16], bad=[float("nan"), float("inf"), float("-inf")])
def test_the_argmax_of_rows_with_a_logit_that_is_not_finite(bad, dtype, pair, batch):
    model, stock = pair("phi", dtype)
    with torch.no_grad():
        for m in (model, stock):
            m.lm_head.bias[60] = bad
    with lowtide.scoring(model.eval()) as report, torch.no_grad():
        got, expected = (m(input_ids=batch["input_ids"]).logits for m in (model, stock.eval()))
        for rows in (slice(None), slice(3)):
            assert torch.equal(got[:, rows].argmax(-1), expected[:, rows].argmax(-1))
            assert torch.equal(got.log_softmax(-1)[:, rows].argmax(-1), expected.log_softmax(-1)[:, rows].argmax(-1))
    expect_calls(report, 1)


def large(build):
    return build("llama", vocab_size=8192, max_position_embeddings=4096).eval(), torch.randint(8192, (8, 64))


@promise("memory")
def test_no_tensor_of_all_tokens_and_classes_is_allocated(build):
    model, ids = large(build)
    logits_bytes, peaks = ids.numel() * 8192 * 4, {}
    for scoring in (False, True):
        report = lowtide.patch(model, scoring=scoring, options=HeadOptions(workspace_mib=1))
        with torch.no_grad(), track_allocations() as seen:
            harness(model(input_ids=ids).logits, ids)
        peaks[scoring] = seen
    assert peaks[False].largest_bytes >= logits_bytes
    assert peaks[True].largest_bytes <= 2**20
    assert peaks[True].peak_bytes < logits_bytes / 4 < peaks[False].peak_bytes / 8
    expect_calls(report, 1)
    with torch.no_grad():  # a few rows of long sequences are computed alone
        logits = model(input_ids=ids.view(1, -1).repeat(1, 4)).logits
        with track_allocations() as seen:
            logits.log_softmax(-1)[:, -3:].argmax(-1)
    assert 8192 * 4 <= seen.peak_bytes < 40 * 8192 * 4


@pytest.mark.parametrize("settings", [{"do_sample": False}, {"do_sample": True}], ids=str)
def test_generation_is_unchanged_and_builds_the_last_token_alone(settings, pair, batch):
    model, stock = pair("llama")
    outputs = []
    with lowtide.scoring(model.eval()) as report:
        for m in (model, stock.eval()):
            torch.manual_seed(3)
            outputs.append(m.generate(batch["input_ids"], max_new_tokens=6, min_new_tokens=6, **settings))
    assert torch.equal(*outputs)
    assert report.calls_fused == 0
    assert report.why_materialised == {"one token of each sequence, as in generation": 6}


@promise("reversible")
@pytest.mark.parametrize("patched_before", [False, True])
def test_the_context_restores_what_was_there(patched_before, pair, batch):
    model, _ = pair("llama")
    report = lowtide.patch(model) if patched_before else None
    before, lines = state_of(model), None if report is None else dict(report.parts)
    with contextlib.suppress(ZeroDivisionError), lowtide.scoring(model) as inner, torch.no_grad():
        assert report in (None, inner)
        assert inner.parts["loss"].patched
        with lowtide.scoring(model):
            pass
        logits = model(input_ids=batch["input_ids"]).logits
        assert type(logits) is LazyLogits
        raise ZeroDivisionError
    assert state_of(model) == before
    assert report is None or report.parts == lines
    with torch.no_grad():
        assert type(model(input_ids=batch["input_ids"]).logits) is torch.Tensor
    if not patched_before:
        with pytest.raises(UnsupportedError, match="the model was unpatched"):
            logits.log_softmax(-1).exp()


@promise("errors")
def test_scoring_needs_the_loss(build):
    with pytest.raises(ArgumentValueError, match="scoring: expected loss=True beside it"):
        lowtide.patch(build("llama"), loss=False, scoring=True)
    model = build("llama")
    lowtide.patch(model, loss=False)
    with pytest.raises(ArgumentValueError, match="the loss patched, got left as it is: loss=False"):
        lowtide.scoring(model).__enter__()


def test_scores_have_the_gradients_of_stock(patched, batch):
    model, stock, report = patched("gemma2", scoring=True)
    ids = batch["input_ids"]

    def loss(m):
        logprobs = m(input_ids=ids).logits[:, :-1].log_softmax(-1)
        return -logprobs[0].gather(-1, ids[0, 1:, None]).sum() - logprobs[1].gather(-1, ids[1, 1:, None]).sum()

    assert_same_training(model, stock, loss)
    expect_calls(report, 1)
