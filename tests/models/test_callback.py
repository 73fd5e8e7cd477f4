"""The callback for trainers (transformers', TRL's), and patched models in a Trainer."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from lowtide.errors import ArgumentTypeError, UnsupportedError
from lowtide.models.instance import part_of
from models.conftest import expect_calls

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")  # peft, TRL
]
VOCAB = 37


def build(**settings: Any) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2, **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self) -> None:
        self.ids = torch.randint(3, VOCAB, (16, 12), generator=torch.Generator().manual_seed(0))

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
        use_cpu=True, disable_tqdm=True, save_strategy="no", dataloader_pin_memory=False, seed=0,
        **{"max_steps": 3, **settings},
    )  # fmt: skip
    return transformers.Trainer(
        model=model, args=arguments, train_dataset=Rows(), eval_dataset=Rows(), callbacks=list(callbacks), **own
    )


def losses(ran: Any) -> list[float]:
    return [entry["loss"] for entry in ran.state.log_history if "loss" in entry]


@pytest.mark.parametrize("settings", [{"bf16": True}, {"gradient_accumulation_steps": 2}], ids=str)
def test_trainer(settings: dict[str, Any], tmp_path: Path) -> None:
    texts: list[str] = []
    callback = lowtide.PatchCallback(show=texts.append)
    ours, stock = trainer(tmp_path, build(), callback, **settings), trainer(tmp_path, build(), **settings)
    assert callback.report is not None
    assert all(line.patched for line in callback.report.parts.values())
    assert texts == [str(callback.report)], "shown once, before anything ran"
    for run in (ours, stock):
        run.train()
    assert losses(ours) == pytest.approx(losses(stock), rel=2e-2 if settings.get("bf16") else 1e-4)
    assert (callback.report.calls_fused, callback.report.calls_materialised) == (3 * (1 + ("grad" in str(settings))), 0)
    assert len(texts) == 1
    evaluation = ours.evaluate()
    assert evaluation["eval_loss"] == pytest.approx(stock.evaluate()["eval_loss"], rel=2e-2)
    assert callback.report.calls_materialised == 0
    assert part_of(ours.model) == "loss"
    assert callback.trl_report is None


def test_it_prints_and_undoes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = lowtide.PatchCallback(mlp=False, unpatch=True)
    ours = trainer(tmp_path, build(), callback)
    printed = capsys.readouterr().out
    assert str(callback.report) in printed
    assert "left as it is: mlp=False" in printed
    assert part_of(ours.model.model.layers[0].mlp) is None
    ours.train()
    assert type(ours.model).__bases__ == type(build()).__bases__
    assert all(part_of(module) is None for module in ours.model.modules())
    capsys.readouterr()
    ours.train()
    assert "calls with the loss fused: 0" in capsys.readouterr().out
    assert callback.report.calls_fused == 3
    assert part_of(ours.model) is None


def test_a_callback_travels(tmp_path: Path) -> None:
    """As trainers are pickled that search for settings in processes of their own."""
    callback = lowtide.PatchCallback(norm=False, show=None)
    trainer(tmp_path, build(), callback)
    copied = pickle.loads(pickle.dumps(callback))
    ours = trainer(tmp_path, build(), copied)
    assert part_of(ours.model) is not None
    assert {part.part for part in copied.report.parts.values() if part.patched} == {"loss", "mlp", "rope"}


@pytest.mark.parametrize("bf16", [False, True])
def test_a_model_that_is_made_later(bf16: bool, tmp_path: Path) -> None:
    """model_init's own model of each run comes to a callback after accelerate has prepared it."""
    texts: list[str] = []
    callback = lowtide.PatchCallback(show=texts.append)
    ours = trainer(tmp_path, None, callback, model_init=lambda: build(), bf16=bf16)
    ours.train()
    assert len(texts) == 2
    assert "in model_init for what this leaves out" in texts[1]
    assert ("forward was replaced on the instance" in texts[1]) == bf16
    assert callback.report is lowtide.patch(ours.model)
    assert callback.report.calls_fused == (0 if bf16 else 3)

    reports = []

    def made() -> Any:
        model = build()
        reports.append(lowtide.patch(model))
        return model

    trainer(tmp_path, None, model_init=made, bf16=bf16).train()
    assert reports[-1].calls_fused == 3


@pytest.mark.parametrize(
    ("name", "value"), [("mlp", 1), ("unpatch", None), ("trl", "yes"), ("show", 3), ("loss", "no")]
)
def test_bad_arguments(name: str, value: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=f"{name}: expected"):
        lowtide.PatchCallback(**{name: value})
    with pytest.raises(ArgumentTypeError, match="options: expected"):
        lowtide.PatchCallback(options={"workspace_mib": 1})


def test_without_transformers_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """That `import lowtide` imports none is a test of the package."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "lowtide.models.callback", raising=False)
    with pytest.raises(UnsupportedError, match=r"PatchCallback: expected transformers.*lowtide\[hf\]"):
        lowtide.__getattr__("PatchCallback")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        lowtide.__getattr__("nothing")


def trl_trainer(kind: str, folder: Path, *callbacks: Any, peft_config: Any = None) -> Any:
    pytest.importorskip("trl", reason="TRL comes with the trl extra")
    from trl_patch import conftest

    settings = {"gradient_checkpointing": False, "max_steps": 2}
    return conftest.trl_trainer(folder, kind, build(), *callbacks, peft_config=peft_config, **settings)


@pytest.mark.parametrize(("kind", "adapters"), [("SFT", False), ("SFT", True), ("DPO", True), ("GRPO", False)])
def test_trl(kind: str, adapters: bool, tmp_path: Path) -> None:
    peft_config = None
    if adapters:
        peft = pytest.importorskip("peft")
        peft_config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM")
    texts: list[str] = []
    callback = lowtide.PatchCallback(show=texts.append, unpatch=True)
    torch.manual_seed(0)
    stock = trl_trainer(kind, tmp_path, peft_config=peft_config)
    stock.train()
    torch.manual_seed(0)
    ours = trl_trainer(kind, tmp_path, callback, peft_config=peft_config)
    assert callback.report is not None
    assert callback.trl_report is not None
    assert len(texts) == 1
    assert str(callback.trl_report)[:7] in texts[0]
    assert ("LoRA on up_proj, down_proj with it" in texts[0]) == adapters
    ours.train()
    assert losses(ours) == pytest.approx(losses(stock), rel=1e-3, abs=1e-5)
    assert callback.trl_report.calls_trl == {}
    assert callback.trl_report.calls_lowtide["ChunkedLogProbFunction"] >= 2
    assert len(texts) == 1, texts[1:]
    assert lowtide.patch_trl() is not callback.trl_report, "undone when training ended"
    lowtide.unpatch_trl()


def test_a_trl_that_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for by name it raises; else the text says so, and the rest is done."""

    def refuse(**_: Any) -> None:
        raise UnsupportedError("TRL: expected 1.16, got another")

    monkeypatch.setattr("lowtide.models.callback.patch_trl", refuse)
    texts: list[str] = []
    trl_trainer("SFT", tmp_path, lowtide.PatchCallback(show=texts.append))
    assert "TRL left as it is: TRL: expected 1.16" in texts[0]
    with pytest.raises(UnsupportedError, match=r"expected 1\.16"):
        trainer(tmp_path, build(), lowtide.PatchCallback(trl=True, show=None))
    trl_trainer("SFT", tmp_path, lowtide.PatchCallback(trl=False, show=texts.append))
    assert "TRL" not in texts[1]


def train(model: Any, folder: Path, **settings: Any) -> tuple[list[float], dict[str, float]]:
    run = trainer(folder, model, max_steps=4, gradient_accumulation_steps=2, **settings)
    run.train()
    return losses(run), run.evaluate()


def own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    loss = torch.nn.functional.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum", label_smoothing=0.05
    )
    return loss / (num_items_in_batch or (labels[:, 1:] != -100).sum())


WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16 autocast": {"bf16": True},
    "label smoothing by the trainer": {"label_smoothing_factor": 0.1},
    "a loss of one's own": {"compute_loss_func": own_loss},
    "prediction loss only": {"prediction_loss_only": True, "compute_metrics": lambda _: {}},
    "tokens averaged across devices": {"average_tokens_across_devices": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_same_losses_as_stock_without_logits(way: str, patched: Any, tmp_path: Path) -> None:
    model, stock, report = patched("llama")
    (ours, evaluation), (expected, expected_evaluation) = (train(m, tmp_path, **WAYS[way]) for m in (model, stock))
    assert len(ours) == 4
    tolerance = 2e-2 if "bf16" in WAYS[way] else 1e-4
    assert ours == pytest.approx(expected, rel=tolerance)
    assert evaluation["eval_loss"] == pytest.approx(expected_evaluation["eval_loss"], rel=tolerance)
    # micro-batches, and evaluation batches of 8
    expect_calls(report, 4 * 2 + 2)


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def accuracy_of_classes(prediction: Any) -> dict[str, float]:
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
def test_metrics(settings: dict[str, Any], built: int, patched: Any, tmp_path: Path) -> None:
    model, stock, report = patched("gemma2")
    evaluation, expected = (train(m, tmp_path, **settings)[1] for m in (model, stock))
    assert evaluation["eval_accuracy"] == expected["eval_accuracy"]
    expect_calls(report, 10, built)


@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")  # dynamo's
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("settings", [{}, pytest.param({"bf16": True}, marks=pytest.mark.slow)], ids=str)
def test_a_compiled_trainer(settings: dict[str, Any], tmp_path: Path) -> None:
    """With evaluation, which gathers the logits that the graph returned."""
    callback = lowtide.PatchCallback(show=None)
    settings |= {"compute_metrics": size_of_logits}
    stock = trainer(tmp_path, build(), **settings)
    torch._dynamo.reset()
    settings |= {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    ours = trainer(tmp_path, build(), callback, **settings)
    ours.train(), stock.train()
    precision = {"rtol": 2e-2, "atol": 1e-2} if settings.get("bf16") else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(losses(ours), losses(stock), **precision)
    report = callback.report
    assert report is not None
    expect_calls(report, 3)
    results = [each.evaluate() for each in (ours, stock)]
    assert results[0]["eval_size"] == results[1]["eval_size"]
    torch.testing.assert_close(results[0]["eval_loss"], results[1]["eval_loss"], **precision)
    assert report.calls_fused == 5
    torch._dynamo.reset()


def size_of_logits(prediction: Any) -> dict[str, int]:
    return {"size": prediction.predictions.size}
