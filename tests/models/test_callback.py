"""The callback for trainers (transformers', TRL's), and patched models in a Trainer."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import ArgumentTypeError, UnsupportedError
from lowtide.models.instance import part_of
from models.conftest import DYNAMO, PEFT, expect_calls, lora, types_of
from promises import promise

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

pytestmark = [*DYNAMO, *PEFT, promise("trainers", "reported")]
VOCAB = 97


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self) -> None:
        self.ids = torch.randint(3, VOCAB, (16, 12), generator=torch.Generator().manual_seed(torch.initial_seed()))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.ids[index].clone()
        labels[: index % 5] = -100
        return {"input_ids": self.ids[index], "labels": labels}


OF_TRAINER = ("model_init", "compute_metrics", "preprocess_logits_for_metrics", "compute_loss_func")


def trainer(folder: Path, model: Any, *callbacks: Any, **settings: Any) -> Any:
    """Return a Trainer; of its settings some are its own arguments, the others those of TrainingArguments."""
    own = {name: settings.pop(name) for name in OF_TRAINER if name in settings}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1, report_to=[],
        use_cpu=True, disable_tqdm=True, save_strategy="no", dataloader_pin_memory=False,
        seed=torch.initial_seed(),
        **{"max_steps": 3, **settings},
    )  # fmt: skip
    rows = Rows()
    return transformers.Trainer(
        model=model, args=arguments, train_dataset=rows, eval_dataset=rows, callbacks=list(callbacks), **own
    )


def losses(ran: Any) -> list[float]:
    return [entry["loss"] for entry in ran.state.log_history if "loss" in entry]


def own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    loss = torch.nn.functional.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum", label_smoothing=0.05
    )
    return loss / (num_items_in_batch or (labels[:, 1:] != -100).sum())


def accuracy(prediction: Any) -> dict[str, float]:
    found = prediction.predictions if prediction.predictions.ndim == 2 else prediction.predictions.argmax(-1)
    valid = prediction.label_ids[:, 1:] != -100
    return {"accuracy": float((found[:, :-1] == prediction.label_ids[:, 1:])[valid].mean())}


# What the trainer is given, and how many evaluation batches build their logits.
WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "bf16 autocast": ({"bf16": True}, 0),
    "accumulation": ({"gradient_accumulation_steps": 2}, 0),
    "label smoothing by the trainer": ({"label_smoothing_factor": 0.1}, 0),
    "a loss of one's own": ({"compute_loss_func": own_loss}, 0),
    "metrics of logits": ({"compute_metrics": accuracy}, 2),
    "metrics of the highest class": (
        {"compute_metrics": accuracy, "preprocess_logits_for_metrics": lambda logits, _: logits.argmax(-1)},
        0,
    ),
    "compiled": ({"torch_compile": True, "torch_compile_backend": "eager", "compute_metrics": accuracy}, 2),
}


@promise("patched")
@pytest.mark.parametrize("way", WAYS)
def test_a_trainer_has_the_numbers_of_stock_without_logits(way: str, build: Any, tmp_path: Path) -> None:
    settings, built = WAYS[way]
    texts: list[str] = []
    callback = lowtide.PatchCallback(show=texts.append)
    ours = trainer(tmp_path, build("llama", num_hidden_layers=1), callback, **settings)
    plain = {name: value for name, value in settings.items() if "compile" not in name}
    stock = trainer(tmp_path, build("llama", num_hidden_layers=1), **plain)
    report = callback.report
    assert report is not None
    assert all(line.patched for line in report.parts.values())
    assert texts == [str(report)], "shown once, before anything ran"
    for run in (ours, stock):
        run.train()
    tolerance = 2e-2 if "bf16" in way else 1e-4
    assert losses(ours) == pytest.approx(losses(stock), rel=tolerance)
    expect_calls(report, 3 * settings.get("gradient_accumulation_steps", 1))
    evaluation, expected = ours.evaluate(), stock.evaluate()
    assert evaluation["eval_loss"] == pytest.approx(expected["eval_loss"], rel=tolerance)
    assert evaluation.get("eval_accuracy") == expected.get("eval_accuracy")
    assert report.calls_materialised == built
    steps = 3 * settings.get("gradient_accumulation_steps", 1)
    assert texts[1:] == [f"losses   {steps} without logits, 0 with"], "when training ended"
    assert part_of(ours.model) == "loss"
    assert callback.trl_report is None


@promise("reversible")
def test_it_prints_and_undoes(build: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = lowtide.PatchCallback(mlp=False, unpatch=True)
    ours = trainer(tmp_path, build("llama"), callback, max_steps=1)
    printed = capsys.readouterr().out
    assert str(callback.report) in printed
    assert "left as it is: mlp=False" in printed
    assert part_of(ours.model.model.layers[0].mlp) is None
    for _ in range(2):  # the second training patches anew
        ours.train()
        assert types_of(ours.model) == types_of(build("llama"))
        assert all(part_of(module) is None for module in ours.model.modules())
    assert "calls with the loss fused: 0" in capsys.readouterr().out
    expect_calls(callback.report, 1)


@promise("reversible")
def test_a_model_that_something_has_changed_stays_patched(build: Any) -> None:
    """FSDP2 as a rule: no reason to end a training run in an error."""
    texts: list[str] = []
    callback = lowtide.PatchCallback(unpatch=True, show=texts.append)
    model, state = build("llama"), SimpleNamespace(is_world_process_zero=True)
    callback.on_init_end(transformers.TrainingArguments(use_cpu=True, report_to=[]), state, None, model=model)
    callback.on_train_begin(None, state, None, model=nn.ModuleDict({"wrapped": model}))  # as DDP is around it
    assert len(texts) == 1
    nn.utils.parametrizations.weight_norm(model.lm_head)
    callback.on_train_end(None, state, None, model=model)
    assert texts[-1].startswith("left patched: ")
    assert part_of(model.model.norm) == "norm"


def test_a_callback_travels(build: Any, tmp_path: Path) -> None:
    """As trainers are pickled that search for settings in processes of their own."""
    callback = lowtide.PatchCallback(norm=False, show=None)
    trainer(tmp_path, build("llama"), callback)
    copied = pickle.loads(pickle.dumps(callback))
    ours = trainer(tmp_path, build("llama"), copied)
    assert part_of(ours.model) is not None
    assert {part.part for part in copied.report.parts.values() if part.patched} == {"loss", "mlp", "rope"}


@pytest.mark.parametrize("bf16", [False, True])
def test_a_model_that_is_made_later(bf16: bool, build: Any, tmp_path: Path) -> None:
    """model_init's own model of each run comes to a callback after accelerate has prepared it."""
    texts: list[str] = []
    callback = lowtide.PatchCallback(show=texts.append)
    ours = trainer(tmp_path, None, callback, model_init=lambda: build("llama"), bf16=bf16)
    ours.train()
    assert len(texts) == 3
    assert "in model_init for what this leaves out" in texts[1]
    assert ("forward was replaced on the instance" in texts[1]) == bf16
    assert callback.report is lowtide.patch(ours.model)
    assert callback.report.calls_fused == (0 if bf16 else 3)


@promise("errors")
@pytest.mark.parametrize(
    ("name", "value"), [("mlp", 1), ("unpatch", None), ("trl", "yes"), ("show", 3), ("options", {"workspace_mib": 1})]
)
def test_bad_arguments(name: str, value: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=f"{name}: expected"):
        lowtide.PatchCallback(**{name: value})


@promise("adapters", "reversible")
def test_a_trainer_of_trls(build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets `patch_trl` too; what each of TRL's trainers computes then is a test of trl_patch."""
    pytest.importorskip("trl", reason="TRL comes with the trl extra")
    from trl_patch.conftest import trl_trainer

    seed, texts, ran = torch.initial_seed(), [], []
    config = lora(r=2, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    for callbacks in ([], [lowtide.PatchCallback(show=texts.append, unpatch=True)]):
        torch.manual_seed(seed)
        model = build("llama", vocab_size=37)
        ran.append(trl_trainer(tmp_path, "SFT", model, *callbacks, peft_config=config, max_steps=2))
        ran[-1].train()
    (callback,) = callbacks
    assert losses(ran[1]) == pytest.approx(losses(ran[0]), rel=1e-3, abs=1e-5)
    text, ending = texts
    assert str(callback.trl_report)[:7] in text
    assert ending.startswith("losses   ")
    assert ending.endswith(" without logits, 0 with")
    assert "LoRA on up_proj with it" in text
    assert callback.trl_report.calls_trl == {}
    assert callback.trl_report.calls_lowtide["ChunkedLogProbFunction"] >= 2
    assert lowtide.patch_trl() is not callback.trl_report, "undone when training ended"
    lowtide.unpatch_trl()

    def refuse(**_: Any) -> None:
        raise UnsupportedError("TRL: expected 1.16, got another")

    monkeypatch.setattr("lowtide.models.callback.patch_trl", refuse)
    state, model = SimpleNamespace(is_world_process_zero=True), build("llama")
    for trl, error in ((True, pytest.raises(UnsupportedError, match=r"expected 1\.16")), (None, nullcontext())):
        with error:  # asked for by name it raises; else the text says so, and the rest is done
            lowtide.PatchCallback(trl=trl, show=texts.append).on_init_end(ran[0].args, state, None, model=model)
    assert "TRL left as it is: TRL: expected 1.16" in texts[-1]
