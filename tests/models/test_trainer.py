"""transformers.Trainer with a patched model: the same losses, no logits, evaluation included."""

import pytest
import torch

from models.conftest import expect_calls
from models.test_callback import losses, trainer

pytest.importorskip("accelerate")


def train(model, folder, **settings):
    run = trainer(folder, model, max_steps=4, gradient_accumulation_steps=2, **settings)
    run.train()
    return losses(run), run.evaluate()


def own_loss(outputs, labels, num_items_in_batch=None):
    loss = torch.nn.functional.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum", label_smoothing=0.05
    )
    return loss / (num_items_in_batch or (labels[:, 1:] != -100).sum())


def own_logprobs(outputs, labels, num_items_in_batch=None):
    logprobs = outputs.logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:].clamp(min=0).unsqueeze(-1)).squeeze(-1)
    valid = labels[:, 1:] != -100
    return -(logprobs * (1 - logprobs.exp()).square())[valid].sum() / num_items_in_batch  # focal


WAYS = {
    "float32": {},
    "bf16 autocast": {"bf16": True},
    "label smoothing by the trainer": {"label_smoothing_factor": 0.1},
    "a loss of one's own": {"compute_loss_func": own_loss},
    "a loss of log-probabilities": {"compute_loss_func": own_logprobs},
    "prediction loss only": {"prediction_loss_only": True, "compute_metrics": lambda _: {}},
    "tokens averaged across devices": {"average_tokens_across_devices": True},
    "tokens not averaged": {"average_tokens_across_devices": False},
}


@pytest.mark.parametrize("way", WAYS)
def test_same_losses_as_stock_without_logits(way, patched, tmp_path):
    model, stock, report = patched("llama")
    (ours, evaluation), (expected, expected_evaluation) = (train(m, tmp_path, **WAYS[way]) for m in (model, stock))
    assert len(ours) == 4
    tolerance = 2e-2 if "bf16" in WAYS[way] else 1e-4
    assert ours == pytest.approx(expected, rel=tolerance)
    assert evaluation["eval_loss"] == pytest.approx(expected_evaluation["eval_loss"], rel=tolerance)
    # micro-batches, and evaluation batches of 8
    expect_calls(report, 4 * 2 + 2)


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def accuracy_of_classes(prediction):
    assert prediction.predictions.shape == prediction.label_ids.shape
    valid = prediction.label_ids[:, 1:] != -100
    return {"accuracy": float((prediction.predictions[:, :-1] == prediction.label_ids[:, 1:])[valid].mean())}


@pytest.mark.parametrize(
    ("settings", "built"),
    [
        ({"compute_metrics": accuracy}, 2),
        (
            {
                "compute_metrics": accuracy_of_classes,
                "preprocess_logits_for_metrics": lambda logits, _: logits.argmax(-1),
            },
            0,
        ),
    ],
    ids=["of logits", "of the highest class, without logits"],
)
def test_metrics(settings, built, patched, tmp_path):
    model, stock, report = patched("gemma2")
    evaluation, expected = (train(m, tmp_path, **settings)[1] for m in (model, stock))
    assert evaluation["eval_accuracy"] == expected["eval_accuracy"]
    expect_calls(report, 10, built)
