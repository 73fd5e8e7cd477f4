"""lm-evaluation-harness, the real package: its ``hf`` model, unmodified, on a model that scores without logits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import lowtide
from lowtide import HeadOptions
from lowtide.measure.allocations import track_allocations

pytest.importorskip("lm_eval")
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from lowtide.train.model import pretrained_model
from lowtide.train.tokenizer import load_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def model(model_folder):
    return pretrained_model(model_folder).eval()


def evaluated(model: Any, folder: Any, names: list[str], **settings: Any) -> dict[str, Any]:
    """What the harness makes of each request (log-probabilities, whether they are greedy, texts), and the metrics."""
    lm = HFLM(pretrained=model, tokenizer=load_tokenizer(folder), batch_size=4, max_length=128, **settings)
    manager = TaskManager(include_defaults=False)  # to read the thousands that there are takes seconds
    found = simple_evaluate(lm, tasks=names, bootstrap_iters=0, task_manager=manager)
    assert found is not None
    answers = {name: [one["resps"] for one in samples] for name, samples in found["samples"].items()}
    return {"answers": answers, "results": found["results"]}


def flat(answers: Any) -> list[Any]:
    return [x for one in answers for x in (flat(one) if isinstance(one, list | tuple) else [one])]


@pytest.mark.parametrize("logits_cache", [True, False])
@pytest.mark.parametrize("task", ["tide_choice", "tide_letter", "tide_text"])
def test_scores_are_those_of_stock_and_no_logits_are_built(task, logits_cache, model, model_folder, tasks):
    stock, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    names = [str(tasks[task])]
    settings = {"logits_cache": logits_cache}
    with lowtide.scoring(model) as report:
        got = evaluated(model, model_folder, names, **settings)
    expected, true = (evaluated(m, model_folder, names, **settings) for m in (stock, exact))
    ours, stocks, exacts = (flat(one["answers"][task]) for one in (got, expected, true))
    assert [x for x in ours if isinstance(x, bool)] == [x for x in stocks if isinstance(x, bool)]
    numbers = [
        torch.tensor([x for x in one if type(x) is float], dtype=torch.float64) for one in (ours, stocks, exacts)
    ]
    assert len(numbers[0]) > 8
    error, stocks_error = (numbers[0] - numbers[2]).abs().max(), (numbers[1] - numbers[2]).abs().max()
    assert error <= 2 * stocks_error + 1e-7 * numbers[2].abs().max()
    assert report.calls_materialised == 0
    assert report.calls_fused > 0
    assert got["results"].keys() == expected["results"].keys()
    for metric, value in got["results"][task].items():
        stocks_value = expected["results"][task][metric]
        assert value == (pytest.approx(stocks_value, rel=1e-5) if isinstance(value, float) else stocks_value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softmax", [None, "float32"])
def test_models_of_16_bits_score_as_stock_does(dtype, softmax, model, model_folder, tasks):
    model = model.to(dtype)
    stock = copy.deepcopy(model)
    names = [str(tasks["tide_choice"])]
    with lowtide.scoring(model) as report:
        got = evaluated(model, model_folder, names, softmax_dtype=softmax)["answers"]["tide_choice"]
    expected = evaluated(stock, model_folder, names, softmax_dtype=softmax)["answers"]["tide_choice"]
    assert [x for x in flat(got) if isinstance(x, bool)] == [x for x in flat(expected) if isinstance(x, bool)]
    pairs = ([x for x in flat(one) if type(x) is float] for one in (got, expected))
    torch.testing.assert_close(*map(torch.tensor, pairs), rtol=4 * torch.finfo(dtype).eps, atol=0.0)
    assert report.calls_materialised == 0


def test_generation_is_that_of_stock(model, model_folder, tasks):
    stock, names = copy.deepcopy(model), [str(tasks["tide_words"])]
    with lowtide.scoring(model) as report:
        got = evaluated(model, model_folder, names)
    assert got["answers"] == evaluated(stock, model_folder, names)["answers"]
    assert report.calls_fused == 0
    assert set(report.why_materialised) == {"one token of each sequence, as in generation"}


def test_the_peak_is_that_of_the_workspace_and_not_of_the_logits(model_folder, tasks):
    """Stock holds the logits and their log-softmax, here of 4 x 127 tokens and 65,536 classes."""
    model = pretrained_model(model_folder).eval()
    model.resize_token_embeddings(2**16)
    logits_bytes = 4 * 127 * 2**16 * 4
    lm = HFLM(pretrained=model, tokenizer=load_tokenizer(model_folder), batch_size=4, max_length=128)
    requests = [(("", ""), [1], [3 + (i * k) % 200 for k in range(127)]) for i in range(1, 5)]
    peaks, scores = [], []
    for scoring in (False, True):
        lowtide.patch(model, scoring=scoring, options=HeadOptions(workspace_mib=4))
        with track_allocations() as seen:
            scores.append(lm._loglikelihood_tokens(requests, disable_tqdm=True))
        peaks.append(seen)
    assert peaks[0].peak_bytes >= 2 * logits_bytes
    assert peaks[1].largest_bytes <= 4 * 2**20
    assert peaks[1].peak_bytes < logits_bytes / 10
    for ours, stocks in zip(scores[1], scores[0], strict=True):
        assert ours[0] == pytest.approx(stocks[0], rel=1e-6)
        assert ours[1] == stocks[1]
