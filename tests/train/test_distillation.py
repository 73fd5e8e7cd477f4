"""Distillation by the command, beside a teacher and from its stored states: full logits give the same."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from chat_data import word_tokenizer
from lowtide.errors import ArgumentValueError
from lowtide.train import train, write_teacher_states
from lowtide.train.arguments import parse
from lowtide.train.trainers import BaseTrainer
from promises import promise
from train.conftest import WORDS, Files, save_model

pytest.importorskip("trl")
pytestmark = [
    promise("trainers"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # other libraries' to each other
]


def full_logits(z: torch.Tensor, theirs: torch.Tensor, kind: str, T: float) -> torch.Tensor:
    """Return the mean divergence of logits [N, V] from a teacher's."""

    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.exp() * (a - b)).sum(-1).mean()

    s, t = (x.div(T).log_softmax(-1) for x in (z, theirs))
    m = torch.stack((s, t)).logsumexp(0) - torch.tensor(2.0).log()
    return {"forward_kl": kl(t, s), "reverse_kl": kl(s, t), "jsd": (kl(t, m) + kl(s, m)) / 2}[kind]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another hidden size, with more rows than the student has, and a soft cap."""
    more = {"hidden_size": 48, "head_dim": 16, "vocab_size": 576, "final_logit_softcapping": 9.0}
    return save_model(tmp_path_factory.mktemp("teacher"), model_type="gemma2", **more)


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="module")
def rows(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenised rows in a folder; the first tokens of each are not trained on."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(files.pretrained)
    ids = [tokenizer(line)["input_ids"][9:90] for line in files.pairs.read_text().splitlines()]
    folder = tmp_path_factory.mktemp("rows")
    Dataset.from_dict({"input_ids": ids, "labels": [[-100] * 3 + row[3:] for row in ids]}).save_to_disk(folder)
    return folder


def some(rows: Path) -> Any:
    from datasets import load_from_disk

    return load_from_disk(str(rows))


@pytest.fixture(scope="module")
def states(rows: Path, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states")
    write_teacher_states(load(teacher), some(rows), folder, batch_tokens=200, shard_tokens=900)
    write_teacher_states(load(teacher), some(rows), folder / "int8", dtype=torch.int8, shard_tokens=900)
    return folder


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Batch, loss and gradients of a run's first step."""
    found: list[Any] = []
    stock = BaseTrainer.training_step

    def step(self: Any, model: Any, inputs: Any, *args: Any) -> Any:
        batch = dict(inputs)
        loss = stock(self, model, inputs, *args)
        if not found:
            found.extend((batch, loss, {name: p.grad.clone() for name, p in model.named_parameters()}))
        return loss

    monkeypatch.setattr(BaseTrainer, "training_step", step)
    return found


def run(files: Files, folder: Path, **more: object) -> Any:
    once = {"max_steps": 1, "save_strategy": "no", "logging_steps": 1, "output_dir": folder / "run"}
    return train(parse(files.tune(**{"data": "pairs", **once, **more})), show=str)


def assert_of_full_logits(first: list[Any], student: Any, theirs: Any, kind: str, alpha: float, T: float) -> None:
    """``theirs`` gives the teacher's logits [B, T, V] of a batch."""
    batch, loss, gradients = first
    labels = batch.pop("labels")
    valid = labels[:, 1:] != -100
    assert not valid.all()
    with torch.no_grad():
        of_teacher = theirs(batch)[:, :-1][valid][:, :512]
    z = student(**batch, use_cache=False).logits[:, :-1][valid]
    task = F.cross_entropy(z, labels[:, 1:][valid])
    expected = (1 - alpha) * task + alpha * T**2 * full_logits(z, of_teacher, kind, T)
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-5)
    expected.backward()
    for name, parameter in student.named_parameters():
        assert (gradients[name] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm(), name


@pytest.mark.parametrize(
    ("kind", "alpha", "T"), [("forward_kl", 0.3, 2.0), ("reverse_kl", 1.0, 1.0), ("jsd", 0.5, 0.7)]
)
def test_a_teacher_beside_the_student(
    kind: str, alpha: float, T: float, files: Files, teacher: Path, first: list[Any], tmp_path: Path
) -> None:
    result = run(files, tmp_path, teacher=teacher, divergence=kind, alpha=alpha, temperature=T)
    stock = load(teacher)
    assert_of_full_logits(first, load(files.pretrained), lambda batch: stock(**batch).logits, kind, alpha, T)
    assert result.calls_materialised == 0
    plain = run(files, tmp_path / "plain")
    assert result.held_out[0] == pytest.approx(plain.held_out[0])  # an evaluation's loss is the task's


def begins_of(batch: Any) -> list[list[int]]:
    """Return where the texts of each row begin, and where the last one ends."""
    if "attention_mask" in batch:
        return [[0, int(mask.sum())] for mask in batch["attention_mask"]]
    return [[*(at == 0).nonzero()[:, 0].tolist(), len(at)] for at in batch["position_ids"]]


@pytest.mark.parametrize(("packing", "stored"), [(False, "int8"), (True, ".")])
def test_stored_states(packing: bool, stored: str, files: Files, rows: Path, teacher: Path, states: Path,
                       first: list[Any], tmp_path: Path) -> None:  # fmt: skip
    """Logits of the states that are stored, in float32: of rows in another order, padded or packed."""
    given = {"model_name_or_path": files.pretrained, "dataset_name": rows, "max_length": 256 if packing else 96}
    more = {"packing": True, "per_device_train_batch_size": 1} if packing else {"per_device_train_batch_size": 3}
    run(files, tmp_path, **given, **more, teacher=states / stored)
    assert (first[0]["position_ids"] == 0).sum() > 1 if packing else len(first[0]["input_ids"]) == 3
    seen, stock = first[0].pop("teacher_states"), load(teacher)
    assert seen.dtype == torch.bfloat16
    head = stock.lm_head
    for states_TD, ids, begins in zip(seen, first[0]["input_ids"], begins_of(first[0]), strict=True):
        for begin, end in itertools.pairwise(begins):
            with torch.no_grad():
                exact = stock.model(input_ids=ids[None, begin:end]).last_hidden_state[0]
            # each rounding to bfloat16 is 2**-9 at most, and one to int8 half of a step
            bound = exact.abs() / 2**7 + (stored == "int8") * exact.abs().amax(1, keepdim=True) * 0.51 / 127
            assert ((states_TD[begin:end] - exact).abs() <= bound).all()
    assert_of_full_logits(
        first, load(files.pretrained), lambda _: 9 * torch.tanh(head(seen.float()) / 9), "forward_kl", 0.5, 1.0
    )


def all_states(folder: Path) -> dict[str, torch.Tensor]:
    return {k: x for path in folder.glob("states-*") for k, x in load_file(path).items()}


@promise("dtypes")
def test_int8_takes_half_of_the_bytes_and_no_other_dtype_is_taken(states: Path, teacher: Path) -> None:
    """How far such states are off: above."""
    wide, narrow = (sum(x.nbytes for x in all_states(folder).values()) for folder in (states, states / "int8"))
    assert narrow < 0.6 * wide
    with pytest.raises(ArgumentValueError, match=r"dtype: expected torch.bfloat16 or torch.int8, got torch.float16"):
        write_teacher_states(load(teacher), [], states, dtype=torch.float16)


class Killed(Exception):
    pass


@promise("resume")
def test_writing_goes_on_where_it_was_killed(
    rows: Path, teacher: Path, states: Path, files: Files, tmp_path: Path
) -> None:
    model = load(teacher)
    seen: list[int] = []

    def count(_: Any, __: Any, kwargs: Any) -> None:
        seen.append(int(kwargs["attention_mask"].sum()))
        if len(seen) == 8:
            raise Killed

    model.register_forward_pre_hook(count, with_kwargs=True)
    sizes = {"batch_tokens": 200, "shard_tokens": 900}
    with pytest.raises(Killed):
        write_teacher_states(model, some(rows), tmp_path, **sizes)

    done = all_states(tmp_path)
    assert done
    write_teacher_states(model, some(rows), tmp_path, **sizes)
    whole = all_states(states)
    assert sum(seen[8:]) == sum(len(x) for key, x in whole.items() if key not in done)
    found = all_states(tmp_path)
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[key], whole[key]) for key in whole)
    with pytest.raises(ArgumentValueError, match="model: expected the model whose states are in"):
        write_teacher_states(load(files.pretrained), [{"input_ids": [5, 6]}], tmp_path)
    with pytest.raises(ArgumentValueError, match="dataset: expected rows with input_ids, got one with text"):
        write_teacher_states(model, [{"text": "the tide"}], tmp_path)


@promise("errors")
def test_another_vocabulary_other_rows_and_no_teacher_are_refused(
    files: Files, teacher: Path, states: Path, refused: Callable[..., str], tmp_path: Path
) -> None:
    where = "--output_dir", tmp_path / "run"
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    word_tokenizer(WORDS).save_pretrained(other)
    line = refused(*files.tune("pairs", teacher=other), *where)
    assert f"--teacher: expected a model with the student's tokenizer, got {other}, with another of" in line
    line = refused(*files.tune("pairs", teacher=states), *where)
    assert "--teacher: expected the states of all rows, as they are trained on" in line
    line = refused(*files.tune("pairs", teacher=files.text), *where)
    assert "--teacher: expected a causal language model, or a folder of lowtide.train.write_teacher_states" in line
    line = refused(*files.tune("pairs", teacher=teacher, label_smoothing_factor=0.1), *where)
    assert "--teacher: expected a loss by the model's own loss_function" in line
    assert "--teacher: expected neither --compare nor --no-patch" in refused(*files.tune(teacher=teacher), "--compare")
