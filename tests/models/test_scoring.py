"""Calls without labels: log-probabilities and argmax without logits, and everything else as in the stock model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import lowtide
from lowtide import HeadOptions
from lowtide.errors import ArgumentValueError, UnsupportedError
from lowtide.measure.allocations import track_allocations
from lowtide.models.instance import part_of
from lowtide.models.lazy_logits import LazyLogits
from models.conftest import DYNAMO, assert_same_training, expect_calls, types_of
from support import every_pair

V = 97
T = 11


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


def exact(stock, ids, score=harness, **call):
    with torch.no_grad():
        return score(copy.deepcopy(stock).double()(input_ids=ids, **call).logits, ids)


def assert_as_exact_as_stock(got, stock, true):
    """Values err by at most 1.5 times what stock's do, and a rounding of the values' own dtype."""
    floor = torch.finfo(got.dtype).eps * true.abs().max()
    assert (got - true).abs().max() <= 1.5 * (stock - true).abs().max() + floor


MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@every_pair(
    name=["llama", "gemma2", "cohere2", "granite", "phi", "gpt2", "qwen3-moe"],
    dtype=[torch.float32, torch.bfloat16, torch.float16],
    mode=MODES,
)
def test_a_harness_scores_as_with_stock_and_builds_no_logits(name, dtype, mode, pair, batch):
    model, stock = pair(name, dtype)
    ids = batch["input_ids"]
    with lowtide.scoring(model.eval()) as report, MODES[mode]():
        logits = model(input_ids=ids).logits
        assert type(logits) is LazyLogits
        got = harness(logits, ids)
    with MODES[mode]():
        expected = harness(stock.eval()(input_ids=ids).logits, ids)
    true = exact(stock, ids)
    assert [x.dtype for x in got] == [x.dtype for x in expected]
    assert torch.equal(got[1], expected[1])
    assert_as_exact_as_stock(got[2], expected[2], true[2])
    expect_calls(report, 1)


@pytest.mark.parametrize("softmax_dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_of_the_softmax_and_autocast_are_those_of_stock(softmax_dtype, pair, batch):
    model, stock = pair("gemma2")
    ids = batch["input_ids"]
    results = []
    lowtide.patch(model, scoring=True)
    for m in (model.eval(), stock.eval()):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            logits = m(input_ids=ids).logits
        results.append(harness(logits, ids, dtype=softmax_dtype))
    (sums, greedy, each), expected = results
    assert each.dtype == expected[2].dtype == softmax_dtype
    assert sums.dtype == expected[0].dtype
    if softmax_dtype == torch.bfloat16:
        assert torch.equal(greedy, expected[1])
    torch.testing.assert_close(each, expected[2], rtol=2e-2, atol=2e-2)


ROUNDED = {
    "logits": lambda z: z.bfloat16().float(),
    "logits of some": lambda z: z[:, 3:].bfloat16().float(),
    "log-probabilities": lambda z: z.log_softmax(-1, dtype=torch.bfloat16).float(),
}


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
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


@pytest.mark.parametrize("argument", ["left padding", "logits_to_keep"])
def test_padding_and_the_last_positions_alone(argument, pair, batch):
    model, stock = pair("llama")
    ids = batch["input_ids"]
    call = {"logits_to_keep": 5}
    if argument == "left padding":
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        call = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}

    def score(z, ids):
        return harness(z, ids[:, -z.shape[1] :], start=1)

    with lowtide.scoring(model.eval()) as report, torch.no_grad():
        got = score(model(input_ids=ids, **call).logits, ids)
    with torch.no_grad():
        expected = score(stock.eval()(input_ids=ids, **call).logits, ids)
    assert torch.equal(got[1], expected[1])
    assert_as_exact_as_stock(got[2], expected[2], exact(stock, ids, score, **call)[2])
    expect_calls(report, 1)


# Each takes logits [2, 11, V] and ids [2, 11].
READ = {
    "next tokens": lambda z, ids: z.float().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1),
    "next tokens of one": lambda z, ids: F.log_softmax(z[1, :-1], -1).gather(-1, ids[1, 1:, None]).mean(),
    "cross entropy": lambda z, ids: F.cross_entropy(z[:, :-1].reshape(-1, V), ids[:, 1:].reshape(-1)),
    "cross entropy of each": lambda z, ids: torch.stack([F.cross_entropy(z[i, :-1], ids[i, 1:]) for i in (0, 1)]),
    "sum of a row": lambda z, ids: z.log_softmax(-1).sum(-1),
    "several classes": lambda z, ids: z.log_softmax(-1)[0, 3:].gather(-1, torch.arange(24).view(8, 3)),
    "argmax of log-probabilities": lambda z, ids: z.log_softmax(-1).argmax(-1, keepdim=True).float(),
    "argmax of one sequence": lambda z, ids: torch.argmax(z[1], -1).float(),
    "logsumexp of some": lambda z, ids: z[:, 2:5].logsumexp(-1),
    "on the CPU": lambda z, ids: z.cpu().log_softmax(-1).to("cpu")[0].gather(-1, ids[0, :, None]),
    "split": lambda z, ids: torch.cat([part.argmax(-1) for part in z.split([4, 7], dim=1)], 1).float(),
    "unbound": lambda z, ids: torch.stack([row.argmax(-1) for row in z.unbind(1)], 1).float(),
    "repeated rows": lambda z, ids: z.log_softmax(-1)[:1].expand(3, T, V).gather(
        -1, torch.arange(3 * T).view(3, T, 1)
    ),
    "copies of all rows": lambda z, ids: z.log_softmax(-1).unsqueeze(1).expand(2, 3, -1, -1).gather(
        -1, torch.arange(6 * T).remainder(V).view(2, 3, T, 1)
    ),
    "two scales of a row": lambda z, ids: (
        (z / 0.7).log_softmax(-1)[0].gather(-1, ids[0, :, None]) - z.log_softmax(-1)[0].gather(-1, ids[0, :, None])
    ),
    "biased, of a row": lambda z, ids: (
        (z + torch.linspace(-3, 3, V)).log_softmax(-1)[1].gather(-1, ids[1, :, None])
        + (z + torch.linspace(-3, 3, V)).log_softmax(-1)[1].argmax(-1, keepdim=True)
    ),
}  # fmt: skip


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("name", ["llama", "phi"])
def test_what_is_read_without_logits(name, read, pair, batch):
    model, stock = pair(name)
    ids = batch["input_ids"]
    with lowtide.scoring(model.eval()) as report, torch.no_grad():
        got = READ[read](model(input_ids=ids).logits, ids)
    with torch.no_grad():
        expected = READ[read](stock.eval()(input_ids=ids).logits, ids)
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-5)
    expect_calls(report, 1)


BUILT = {
    "themselves": lambda z, ids: z,
    "probabilities": lambda z, ids: z.softmax(-1),
    "the highest five": lambda z, ids: z.log_softmax(-1).topk(5).values,
    "in place": lambda z, ids: z.mul_(2),
    "classes one by one": lambda z, ids: torch.stack(list(z.unbind(-1))[:3]),
    "argmax over tokens": lambda z, ids: z.argmax(1),
    "least likely": lambda z, ids: (-z.log_softmax(-1)).argmax(-1),
    "gathered, then repeated": lambda z, ids: (
        (lp := z.log_softmax(-1)).gather(-1, ids[..., None]),
        lp[:1].expand(3, -1, -1) * 2,
    )[1],
}


@pytest.mark.parametrize("read", BUILT)
def test_anything_else_builds_logits_as_stock_does(read, pair, batch):
    model, stock = pair("gemma2")
    ids = batch["input_ids"]
    with lowtide.scoring(model.eval()) as report, torch.no_grad():
        got = BUILT[read](model(input_ids=ids).logits, ids)
        expected = BUILT[read](stock.eval()(input_ids=ids).logits, ids)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    assert report.calls_materialised == 1
    assert sum(report.why_materialised.values()) == 1


def large(build, dtype=torch.float32):
    return build("llama", dtype, vocab_size=8192).eval(), torch.randint(8192, (8, 64))


def test_no_tensor_of_all_tokens_and_classes_is_allocated(build):
    model, ids = large(build)
    logits_bytes = ids.numel() * 8192 * 4
    peaks = {}
    for scoring in (False, True):
        report = lowtide.patch(model, scoring=scoring, options=HeadOptions(workspace_mib=1))
        with torch.no_grad(), track_allocations() as seen:
            harness(model(input_ids=ids).logits, ids)
        peaks[scoring] = seen
    assert peaks[False].largest_bytes >= logits_bytes
    assert peaks[True].largest_bytes <= 2**20
    assert peaks[True].peak_bytes < logits_bytes / 4 < peaks[False].peak_bytes / 8
    expect_calls(report, 1)


def test_a_few_rows_of_long_sequences_are_computed_alone(build):
    model, ids = large(build)
    model.config.max_position_embeddings = 4096
    ids = ids.view(1, -1).repeat(1, 4)
    one_row = 8192 * 4
    lowtide.patch(model, scoring=True)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        with track_allocations() as seen:
            logits.log_softmax(-1)[:, -3:].argmax(-1)
    assert one_row <= seen.peak_bytes < 40 * one_row


@pytest.mark.parametrize("how", ["greedy", "beams", "sampled"])
def test_generation_is_unchanged_and_builds_the_last_token_alone(how, pair, batch):
    settings = {"greedy": {}, "beams": {"num_beams": 3}, "sampled": {"do_sample": True}}[how]
    model, stock = pair("llama")
    ids, outputs = batch["input_ids"], []
    with lowtide.scoring(model.eval()) as report:
        for m in (model, stock.eval()):
            torch.manual_seed(3)
            outputs.append(m.generate(ids, max_new_tokens=6, do_sample=False, **settings) if how != "sampled"
                           else m.generate(ids, max_new_tokens=6, **settings))  # fmt: skip
    assert torch.equal(*outputs)
    assert report.calls_fused == 0
    assert report.why_materialised == {"one token of each sequence, as in generation": 6}


def test_the_context_restores_what_was_there(pair, batch):
    model, stock = pair("llama")
    before = types_of(model)
    with lowtide.scoring(model):
        assert part_of(model) == part_of(model.lm_head) == "loss"
        with lowtide.scoring(model):
            pass
        assert type(model(input_ids=batch["input_ids"]).logits) is LazyLogits
    assert types_of(model) == before
    with pytest.raises(ZeroDivisionError), lowtide.scoring(model):
        raise ZeroDivisionError
    assert types_of(model) == before
    assert part_of(model) is part_of(model.lm_head) is None
    assert vars(model).keys() == vars(stock).keys()


@pytest.mark.parametrize("loss", [True, False])
def test_the_context_leaves_an_earlier_patch_as_it_was(loss, patched, batch):
    model, _, report = patched("llama", loss=loss, mlp=True)
    before, lines = types_of(model), dict(report.parts)
    with lowtide.scoring(model) as inner, torch.no_grad():
        assert inner is report
        assert inner.parts["loss"].patched
        assert type(model(input_ids=batch["input_ids"]).logits) is LazyLogits
    assert types_of(model) == before
    assert report.parts == lines
    with torch.no_grad():
        assert type(model(input_ids=batch["input_ids"]).logits) is torch.Tensor


def test_scoring_needs_the_loss(build):
    with pytest.raises(ArgumentValueError, match="scoring: expected loss=True beside it"):
        lowtide.patch(build("llama"), loss=False, scoring=True)


def test_what_is_read_after_the_context_is_an_error(build, batch):
    model = build("llama").eval()
    with lowtide.scoring(model), torch.no_grad():
        logits = model(input_ids=batch["input_ids"]).logits
    with pytest.raises(UnsupportedError, match="the model was unpatched"):
        logits.log_softmax(-1).exp()


def test_scores_have_the_gradients_of_stock(patched, batch):
    model, stock, report = patched("gemma2", scoring=True)
    ids = batch["input_ids"]

    def loss(m):
        logprobs = m(input_ids=ids).logits[:, :-1].log_softmax(-1)
        return -logprobs[0].gather(-1, ids[0, 1:, None]).sum() - logprobs[1].gather(-1, ids[1, 1:, None]).sum()

    assert_same_training(model, stock, loss, gradients=2e-5)
    expect_calls(report, 1)


@DYNAMO[0]
@DYNAMO[1]
@DYNAMO[2]
def test_a_compiled_model_scores_without_logits(patched, batch):
    model, stock, report = patched("llama", scoring=True, mlp=False, norm=False, rope=False)
    ids = batch["input_ids"]
    compiled = torch.compile(model.eval(), fullgraph=True, backend="eager")
    with torch.no_grad():
        got, expected = (harness(m(input_ids=ids).logits, ids) for m in (compiled, stock.eval()))
        assert torch.equal(got[1], expected[1])
        torch.testing.assert_close(got[2], expected[2], rtol=1e-5, atol=1e-5)
        expect_calls(report, 1)
        torch.testing.assert_close(*(m(input_ids=ids[:, :1]).logits for m in (compiled, stock)), rtol=1e-5, atol=1e-5)
    assert report.why_materialised == {"one token of each sequence, as in generation": 1}
