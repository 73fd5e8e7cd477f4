"""transformers.Trainer with a patched model: the same losses, no logits, evaluation included."""

import pytest
import torch

pytest.importorskip("accelerate")


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.ids = torch.randint(3, 97, (16, 12), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        labels = self.ids[index].clone()
        labels[: index % 5] = -100
        return {"input_ids": self.ids[index], "labels": labels}


def train(model, folder, *, compute_metrics=None, preprocess=None, loss=None, **settings):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=1e-2, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no",
        dataloader_pin_memory=False, seed=0, **settings,
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=arguments, train_dataset=Rows(), eval_dataset=Rows(), compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess, compute_loss_func=loss,
    )  # fmt: skip
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.evaluate()


@pytest.mark.parametrize("settings", [{}, {"bf16": True}], ids=["float32", "bf16 autocast"])
def test_same_losses_as_stock(settings, patched, tmp_path):
    model, stock, report = patched("llama")
    losses, evaluation = train(model, tmp_path, **settings)
    expected, expected_evaluation = train(stock, tmp_path, **settings)
    assert len(losses) == 4
    tolerance = 2e-2 if settings else 1e-4
    assert losses == pytest.approx(expected, rel=tolerance)
    assert evaluation["eval_loss"] == pytest.approx(expected_evaluation["eval_loss"], rel=tolerance)
    assert report.calls_fused == 4 * 2 + 2  # micro-batches, evaluation batches of 8
    assert report.calls_materialised == 0, str(report)


def test_metrics_get_their_logits(patched, tmp_path):
    def accuracy(prediction):
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    model, stock, report = patched("llama")
    evaluation, expected = (train(m, tmp_path, compute_metrics=accuracy)[1] for m in (model, stock))
    assert evaluation["eval_accuracy"] == expected["eval_accuracy"]
    assert (report.calls_fused, report.calls_materialised) == (10, 2)


def test_label_smoothing_by_the_trainers_own_loss_without_logits(patched, tmp_path):
    model, stock, report = patched("llama")
    losses, evaluation = train(model, tmp_path, label_smoothing_factor=0.1)
    expected, expected_evaluation = train(stock, tmp_path, label_smoothing_factor=0.1)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert evaluation["eval_loss"] == pytest.approx(expected_evaluation["eval_loss"], rel=1e-4)
    assert (report.calls_fused, report.calls_materialised) == (10, 0), str(report)


def test_metrics_of_the_highest_class_need_no_logits(patched, tmp_path):
    def accuracy(prediction):
        assert prediction.predictions.shape == prediction.label_ids.shape
        kept = prediction.label_ids[:, 1:] != -100
        return {"accuracy": float((prediction.predictions[:, :-1] == prediction.label_ids[:, 1:])[kept].mean())}

    model, stock, report = patched("gemma2")
    ways = {"compute_metrics": accuracy, "preprocess": lambda logits, _: logits.argmax(-1)}
    evaluation, expected = (train(m, tmp_path, **ways)[1] for m in (model, stock))
    assert evaluation["eval_accuracy"] == expected["eval_accuracy"]
    assert (report.calls_fused, report.calls_materialised) == (10, 0), str(report)


def test_prediction_loss_only_needs_no_logits(patched, tmp_path):
    model, stock, report = patched("llama")
    settings = {"prediction_loss_only": True, "compute_metrics": lambda _: {}}
    evaluation, expected = (train(m, tmp_path, **settings)[1] for m in (model, stock))
    assert evaluation["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-4)
    assert (report.calls_fused, report.calls_materialised) == (10, 0), str(report)


def own_loss(outputs, labels, num_items_in_batch=None):
    loss = torch.nn.functional.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum", label_smoothing=0.05
    )
    return loss / (num_items_in_batch or (labels[:, 1:] != -100).sum())


def own_logprobs(outputs, labels, num_items_in_batch=None):
    logprobs = outputs.logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:].clamp(min=0).unsqueeze(-1)).squeeze(-1)
    kept = labels[:, 1:] != -100
    return -(logprobs * (1 - logprobs.exp()).square())[kept].sum() / num_items_in_batch  # focal


@pytest.mark.parametrize("loss", [own_loss, own_logprobs])
def test_compute_loss_func_without_logits(loss, patched, tmp_path):
    model, stock, report = patched("llama")
    (losses, evaluation), (expected, expected_evaluation) = (train(m, tmp_path, loss=loss) for m in (model, stock))
    assert losses == pytest.approx(expected, rel=1e-4)
    assert evaluation["eval_loss"] == pytest.approx(expected_evaluation["eval_loss"], rel=1e-4)
    assert (report.calls_fused, report.calls_materialised) == (10, 0), str(report)


@pytest.mark.parametrize("average", [True, False])
def test_average_tokens_across_devices(average, patched, tmp_path):
    model, stock, report = patched("llama")
    losses = [train(m, tmp_path, average_tokens_across_devices=average)[0] for m in (model, stock)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert report.calls_materialised == 0
