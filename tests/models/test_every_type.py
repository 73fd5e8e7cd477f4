"""A sample of model types, each built tiny from its default config and compared; all with --slow."""

import multiprocessing
import os
import pkgutil
import time
import warnings

import pytest
import torch
import torch.nn.functional as F

import lowtide
from lowtide.measure.allocations import track_allocations
from models import all_types, type_case
from models.tiny import VOCAB, tiny_values
from models.type_case import COMPARED, CRASHED, DIFFERENT, FELL_BACK, FUSED, NOT_BUILT, TIMED_OUT, check, types

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # what models of all ages say when they are built

# Chosen for what is different about them and not in conftest.MODELS: positions, biases, experts, scales, prediction
# heads, a loss inside forward, encoders, pictures.
SAMPLE = [
    ("causal", "opt"), ("causal", "bloom"), ("causal", "falcon"), ("causal", "mixtral"), ("causal", "cohere"),
    ("causal", "mamba"), ("causal", "granitemoehybrid"), ("causal", "prophetnet"), ("causal", "rembert"),
    ("seq2seq", "m2m_100"), ("seq2seq", "t5gemma"), ("image-text", "qwen2_vl"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "model_type"), SAMPLE, ids=lambda x: x)
def test_a_type_never_builds_logits(kind, model_type):
    row = check(kind, model_type)
    assert (row["status"], row["why"]) == (FUSED, "")
    assert len(row["cases"]) >= 4
    assert set(row["cases"].values()) == {"equal"}
    assert row["tolerances"]["loss"] < 1e-3
    assert row["tolerances"]["gradients_median"] < 1e-3


@pytest.mark.slow
def test_no_type_is_silently_different(request):
    rows = all_types.checked_types(seconds=300, workers=os.cpu_count() or 1)
    if request.config.getoption("--supported-models"):
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        (request.config.rootpath / "docs" / "supported-models.md").write_text(all_types.page(rows, versions))
    assert [row for row in rows if row["status"] == DIFFERENT] == []
    assert sum(row["status"] == FUSED for row in rows if row["kind"] == "causal") >= 120
    assert sum(row["status"] in COMPARED for row in rows) >= 0.8 * len(rows)


@pytest.mark.parametrize(
    ("check", "status", "why"),
    [
        (lambda *_: os._exit(3), CRASHED, "ended with status 3"),
        (lambda *_: time.sleep(60), TIMED_OUT, "no answer within 0.1 s"),
    ],
    ids=["crash", "hang"],
)
def test_a_child_that_does_not_answer_is_a_row(check, status, why, monkeypatch):
    monkeypatch.setattr(all_types, "check", check)
    row = all_types._in_child(multiprocessing.get_context("fork"), "causal", "gpt2", 0.1 if status == TIMED_OUT else 60)
    assert row["status"] == status
    assert why in row["why"]


def test_the_page_counts_and_names_what_is_different():
    rows = [
        {"kind": "causal", "type": "gpt2", "status": FUSED, "why": "", "parts": {"mlp": 0, "norm": 5, "rope": 2}},
        {"kind": "causal", "type": "llama", "status": DIFFERENT, "why": "a | b"},
        {"kind": "seq2seq", "type": "t5", "status": NOT_BUILT, "why": "no"},
    ]
    page = all_types.page(rows, {"transformers": "5", "torch": "2"})
    assert "Of the 3 model types in transformers 5, 1 train without logits, 0 fall back" in page
    assert "| Causal language models | 1 | 0 | 1 | 2 |" in page
    assert "| gpt2 | fused |  | 5 | 2 |" in page
    assert "| llama | **different**: a \\| b |  |  |  |" in page


def test_the_kinds_have_their_types():
    assert {"llama", "gpt2", "bert"} <= set(types("causal"))
    assert {"t5", "bart"} <= set(types("seq2seq"))
    assert "llava" in types("image-text")


def test_a_type_that_cannot_be_built_says_why():
    row = check("image-text", "pix2struct")
    assert row["status"] == NOT_BUILT
    assert "flattened_patches" in row["why"]


@pytest.mark.parametrize(("model_type", "inner"), [("blip", "text_decoder"), ("nemotron_h_omni", "language_model")])
def test_a_model_around_one_with_a_head_names_it(model_type, inner):
    make, extra = type_case._maker("image-text", model_type, 0)
    stock, model = make(), make()
    why = lowtide.patch(model).parts["loss"].outcome
    assert f"its {inner} has one: pass that to patch, with scoring=True" in why
    lowtide.unpatch(model)
    report = lowtide.patch(model.get_submodule(inner), scoring=True, options=type_case.OPTIONS)
    ids = {**type_case.batch(0), **extra}
    with track_allocations() as seen:
        got = type_case._run(model, ids)
    assert type_case.rows_of_logits(seen, model) == []
    assert (report.calls_fused, report.calls_materialised) == (1, 0)
    noise = type_case._noise(stock, make(), ids)
    assert type_case.difference(got, type_case._run(stock, ids), noise) is None


def wrong_loss(loss):
    return lambda *args, **kwargs: loss(*args, **kwargs) * 1.001


def wrong_gradient(loss):
    return lambda hidden, *args, **kwargs: loss(hidden * 0.999 + hidden.detach() * 0.001, *args, **kwargs)


def no_gradient(loss):
    return lambda hidden, weight, *args, **kwargs: loss(hidden, weight.detach(), *args, **kwargs)


def with_logits(_):
    def loss(hidden, head, target, *, reduction, ignore_index, **_):
        return F.cross_entropy(F.linear(hidden, head), target, reduction=reduction, ignore_index=ignore_index)

    return loss


def broken(_):
    def loss(*_, **__):
        raise RuntimeError("none of it")

    return loss


def wrong_logits(logits):
    return lambda *args, **kwargs: logits(*args, **kwargs) + 0.01


LOSS, LOGITS = "lowtide.models.lazy_results.linear_cross_entropy", "lowtide.models.head_call.HeadCall.logits"
MISTAKES = [
    *((LOSS, wrong, "opt", DIFFERENT, "labels: different: ") for wrong in (wrong_loss, wrong_gradient, no_gradient)),
    (LOSS, with_logits, "gpt2", FELL_BACK, "logits were built, and the report does not count them"),
    (LOSS, broken, "gpt2", DIFFERENT, "none of it"),
    (LOGITS, wrong_logits, "gpt2", DIFFERENT, "logits read after the loss differ"),
]


@pytest.mark.parametrize(("what", "mistake", "model_type", "status", "why"), MISTAKES)
def test_a_mistake_in_the_patch_is_found(what, mistake, model_type, status, why, monkeypatch):
    monkeypatch.setattr(what, mistake(pkgutil.resolve_name(what)))
    row = check("causal", model_type)
    assert row["status"] == status
    assert why in row["why"]


def test_what_is_random_is_drawn_alike():
    """Two models of one seed are the same, or the comparison would be of two models."""
    first, second = (type_case._maker("causal", "gpt2", 0)[0]() for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True))


def test_a_config_is_shrunk_by_what_its_settings_are_called():
    values = {
        "vocab_size": 200000, "hidden_size": 4096, "num_hidden_layers": 6, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "num_experts": 64,
        "num_experts_per_tok": 8, "attention_dropout": 0.1, "rms_norm_eps": 1e-6, "image_token_id": 150000,
        "eos_token_id": [5, 6], "id2label": {0: "a"}, "sliding_window": None, "tie_word_embeddings": True,
        "layer_types": ["local", "local", "local", "full", "local", "local"],
        "rope_parameters": {"rope_theta": 1e4, "mrope_section": [16, 24, 24]},
        "vision_config": {"depth": 24, "num_heads": 16, "hidden_size": 1024, "patch_size": 14},
    }  # fmt: skip
    assert tiny_values(values) == {
        "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64, "num_experts": 4,
        "num_experts_per_tok": 2, "attention_dropout": 0.0, "rms_norm_eps": 1e-6, "image_token_id": VOCAB - 1,
        "eos_token_id": [2], "id2label": {0: "a"}, "sliding_window": None, "tie_word_embeddings": True,
        "layer_types": ["local", "full"],
        "rope_parameters": {"rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        "vision_config": {"depth": 2, "num_heads": 2, "hidden_size": 32, "patch_size": 14},
    }  # fmt: skip
