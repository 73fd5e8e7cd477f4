"""Two real runs through the command, and one that is killed and resumed."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import lowtide
from lowtide.cli import main
from lowtide.errors import ArgumentValueError
from lowtide.train.arguments import parse
from lowtide.train.checkpoints import COMPLETE, checkpoints
from lowtide.train.endings import Terminated
from lowtide.train.meter import RunResult
from lowtide.train.run import train
from promises import promise
from train.conftest import Files, assert_same_weights, history, losses

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # other libraries' to each other


def trained(given: list[str], *callbacks: Any) -> RunResult:
    """Train as a command line says, in silence."""
    return train(parse(given), show=str, callbacks=callbacks)


class Ended:
    def __init__(self, output: Path, out: str) -> None:
        self.output, self.out = output, out


@pytest.fixture(scope="module")
def scratch(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run from random weights of two epochs, a checkpoint at each end."""
    return run(files.scratch(max_steps=12, save_steps=6, logging_steps=1), tmp_path_factory.mktemp("scratch"))


@pytest.fixture(scope="module")
def tuned(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A fine-tuning on conversations, with a budget of memory."""
    pytest.importorskip("trl")
    more = {"assistant_only_loss": True, "save_steps": 2, "save_total_limit": 2, "memory-budget": "1GiB"}
    return run(files.tune(logging_steps=1, **more), tmp_path_factory.mktemp("tuned"))


def run(given: list[str], folder: Path) -> Ended:
    with pytest.MonkeyPatch.context() as patch:
        out = folder / "out.txt"
        with out.open("w") as file:
            patch.setattr("sys.stdout", file)
            status = main(["train", *given, "--output_dir", str(folder / "run")])
    assert status == 0, out.read_text()
    return Ended(folder / "run", out.read_text())


@promise("trainers")
def test_random_weights_learn_the_text_and_are_saved_in_the_stock_format(scratch: Ended, files: Files) -> None:
    found = losses(scratch.output, 12)
    assert list(found) == list(range(1, 13))
    assert found[1] == pytest.approx(math.log(512), rel=0.1)
    held_out = [entry["eval_loss"] for entry in history(scratch.output, 12) if "eval_loss" in entry]
    assert held_out[0] == pytest.approx(math.log(512), rel=0.1)
    after = float(re.search(r"held out \S+ -> (\S+)", scratch.out)[1])  # type: ignore[index]
    assert after < held_out[0] - 0.1
    model = AutoModelForCausalLM.from_pretrained(scratch.output)
    tokenizer = AutoTokenizer.from_pretrained(scratch.output)
    assert tokenizer.decode(tokenizer("the tide came in")["input_ids"]) == "the tide came in"
    blocks = tokenizer("".join(path.read_text() for path in sorted(files.text.glob("*"))), return_tensors="pt")
    with torch.no_grad():
        assert model(input_ids=blocks["input_ids"][:, :64], labels=blocks["input_ids"][:, :64]).loss < held_out[0]


@promise("commands")
def test_the_screens_say_what_is_trained_on_what(scratch: Ended, tuned: Ended) -> None:
    for ended in (scratch, tuned):
        assert re.search(r"^losses   \d+ without logits, 0 with$", ended.out, re.MULTILINE)
        assert re.search(r"^speed    [\d,]+ tokens/s, [\d,]+ ms a step", ended.out, re.MULTILINE)
        assert f"saved    {ended.output}" in ended.out
    assert "tokens   768 in 24 sequences" in scratch.out
    assert "rows     80 with messages" in tuned.out
    assert re.search(
        r"^trained  \d+ of the \d+ tokens of the first sequence, the last '<.im_end", tuned.out, re.MULTILINE
    )
    assert re.search(r"^memory   2 x \S+: expected peak", tuned.out, re.MULTILINE)
    assert "gradient_checkpointing is turned off" in tuned.out
    assert "steps    6 steps of 2 sequences of at most 96 tokens, on 1 x cpu" in tuned.out


@promise("resume")
def test_checkpoints_are_marked_and_older_ones_removed(tuned: Ended) -> None:
    assert [path.name for path in checkpoints(tuned.output)] == ["checkpoint-4", "checkpoint-6"]
    assert not (tuned.output / "checkpoint-2").exists()
    assert not [path for path in tuned.output.iterdir() if path.name.startswith(".")]
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {path.name for path in tuned.output.iterdir()}


class At(TrainerCallback):  # type: ignore[misc]
    """Does something to the model at the beginning of a step."""

    def __init__(self, step: int, do: Callable[[Any], None]) -> None:
        self._step, self._do = step, do

    def on_step_begin(self, _args: Any, state: Any, _control: Any, model: Any, **_: Any) -> None:
        if state.global_step == self._step - 1:
            self._do(model)


@promise("resume")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "Ctrl-C"])
def test_a_signal_ends_a_run_that_resumes_to_the_bit(
    number: int, status: int, files: Files, scratch: Ended, tmp_path: Path
) -> None:
    """In the middle of an epoch: the next batch is the one that would have come; the second epoch has its own order."""
    output, before = tmp_path / "run", signal.getsignal(number)
    given = [*files.scratch(max_steps=12, save_steps=6, logging_steps=1), "--output_dir", str(output)]
    with pytest.raises(Terminated) as ended:
        trained(given, At(4, lambda _: os.kill(os.getpid(), number)))
    assert ended.value.exit_status == status
    assert f"after step 4. Resume with: lowtide train --model_name_or_path {files.shape}" in str(ended.value)
    assert signal.getsignal(number) is before
    assert [path.name for path in checkpoints(output)] == ["checkpoint-4"]
    if number == signal.SIGTERM:  # the other signal's checkpoint is the same
        trained([*given, "--resume_from_checkpoint", "auto"])
        assert losses(output, 12) == losses(scratch.output, 12)
        assert_same_weights(output, scratch.output)


@promise("resume")
def test_a_killed_run_goes_on_from_the_last_whole_checkpoint(files: Files, tuned: Ended, tmp_path: Path) -> None:
    """What a run that was killed in a save leaves is no checkpoint."""
    output = tmp_path / "run"
    shutil.copytree(tuned.output, output)
    (output / "checkpoint-6" / COMPLETE).unlink()
    (output / "checkpoint-6" / "trainer_state.json").unlink()
    more = {"assistant_only_loss": True, "save_steps": 2, "memory-budget": "1GiB", "resume_from_checkpoint": "auto"}
    trained([*files.tune(logging_steps=1, **more), "--output_dir", str(output)])
    assert [path.name for path in checkpoints(output)] == ["checkpoint-4", "checkpoint-6"]
    assert losses(output, 6) == losses(tuned.output, 6)
    assert_same_weights(output, tuned.output)


@promise("errors")
def test_a_folder_with_a_run_is_not_begun_again(tuned: Ended, files: Files, refused: Callable[..., str]) -> None:
    line = refused(*files.tune(), "--output_dir", tuned.output)
    assert "Resume it with --resume_from_checkpoint auto" in line


@promise("errors")
def test_out_of_memory_says_what_would_fit_and_keeps_the_checkpoint(files: Files, tmp_path: Path) -> None:
    def no_memory(_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried 9 GiB.")

    output = tmp_path / "run"
    given = [*files.scratch(save_steps=2), "--output_dir", str(output)]
    with pytest.raises(lowtide.train.OutOfMemory) as raised:
        trained(given, At(4, no_memory))
    text = str(raised.value)
    assert raised.value.exit_status == 3
    assert text.startswith("out of memory in step 4. CUDA out of memory. Tried 9 GiB.\nWhat would fit")
    assert "--memory-budget" in text
    assert "--per_device_train_batch_size 1, and twice the steps" in text
    assert text.endswith("--resume_from_checkpoint auto")
    assert [path.name for path in checkpoints(output)] == ["checkpoint-2"]
    assert raised.value.__cause__ is not None


@promise("errors")
@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_weights_of_a_loss_that_is_not_finite_are_never_saved(kind: str, files: Files, tmp_path: Path) -> None:
    """It is logged before it is saved, whatever --logging_steps is."""

    def poison(model: Any) -> None:
        next(model.parameters()).data.fill_(float(kind))

    output = tmp_path / "run"
    given = [*files.scratch(save_steps=2, logging_steps=50), "--output_dir", str(output)]
    with pytest.raises(ArgumentValueError) as raised:
        trained(given, At(3, poison))
    assert "--learning_rate: expected a training loss that stays finite, got nan by step 4" in str(raised.value)
    assert [path.name for path in checkpoints(output)] == ["checkpoint-2"]
    assert not (output / "model.safetensors").exists()


@promise("reported")
def test_a_stock_run_builds_logits_and_says_nothing_of_a_patch(files: Files, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    given = [*files.tune("pairs", max_steps=2, save_strategy="no"), "--no-patch", "--output_dir", str(tmp_path / "run")]
    stock = trained(given)
    assert (stock.calls_fused, stock.calls_materialised) == (None, None)
    patched = trained([word for word in given if word != "--no-patch"])
    assert patched.calls_materialised == 0
    assert patched.calls_fused is not None
    assert patched.calls_fused > 0
    assert list(patched.losses.values()) == pytest.approx(list(stock.losses.values()), rel=1e-5)
    assert patched.held_out == pytest.approx(stock.held_out, rel=1e-5)


@promise("errors")
def test_what_trl_refuses_is_one_line(files: Files, refused: Callable[..., str], tmp_path: Path) -> None:
    """Wrong beside the data or the model: nothing of it is known before they are read."""
    pytest.importorskip("trl")
    line = refused(*files.tune("pairs"), "--assistant_only_loss", "--output_dir", tmp_path / "run")
    assert "the dataset is not conversational" in line
    broken = tmp_path / "broken"
    shutil.copytree(files.pretrained, broken)
    (broken / "model.safetensors").write_bytes(b"nothing")
    line = refused(*files.tune(model_name_or_path=broken), "--output_dir", tmp_path / "other")
    assert "a model, options and data that TRL's SFTTrainer accepts" in line


@promise("adapters")
def test_adapters_are_trained_and_saved_alone(files: Files, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("trl")
    given = files.tune("pairs", use_peft=True, lora_r=4, max_steps=2, save_strategy="no", output_dir=tmp_path / "run")
    result = trained(given)
    assert result.calls_materialised == 0
    assert (tmp_path / "run" / "adapter_model.safetensors").exists()
    assert not (tmp_path / "run" / "model.safetensors").exists()
