"""`lowtide train` on two ranks: its steps are those of one process, under each engine and after a resume."""

from __future__ import annotations

import base64
import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from chat_data import byte_tokenizer
from distributed.train_runs import (
    SEQUENCES,
    SHAPE,
    SHARDS,
    STEPS,
    ZERO3,
    Runs,
    assert_same,
    history,
    runs,
    sharing,
    spied,
    weights,
)
from lowtide.errors import ArgumentValueError
from lowtide.train.checkpoints import checkpoints, write_run_file
from lowtide.train.config import TrainConfig
from lowtide.train.parallel import engine_of, variables, zero_stage
from lowtide.train.resuming import check_engine, current_engine

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="ranks on CPUs use gloo")

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None or shutil.which("ninja") is None, reason="DeepSpeed compiles its Adam for CPUs"
)


def cases(*names: str, slow: bool = False) -> list[Any]:
    """Return a kind of run with an engine, and what follows them, as parameters."""
    marks = [[needs_deepspeed] * ("zero" in name) + [needs_compiler] * ("offload" in name) for name in names]
    marks = [[*found, *[pytest.mark.slow] * slow] for found in marks]
    return [pytest.param(*name.split(), marks=of, id=name) for name, of in zip(names, marks, strict=True)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return runs(tmp_path_factory.getbasetemp())


ENGINES = [
    *("pretrain ddp", "pretrain fsdp2", "pretrain zero2", "pretrain zero3-config"),
    *("tune ddp", "tune fsdp2", "tune fsdp2-zero2", "tune zero3", "adapt fsdp2"),
]
SLOW = ["pretrain zero3-offload", "tune shards", "tune zero2", "adapt zero3"]


@pytest.mark.parametrize(("kind", "engine"), [*cases(*ENGINES), *cases(*SLOW, slow=True)])
def test_steps_are_those_of_one_process(kind: str, engine: str, made: Runs) -> None:
    """Also with ranks whose sequences have different numbers of tokens, and with accumulated gradients."""
    alone, (output, ended) = made.of(kind, "one")[0], made.of(kind, engine)
    assert_same(output, alone)
    for out in ended.out:
        (result,) = spied(out, "result")
        assert result["fused"] > 0
        assert result["materialised"] == 0
        assert result["deepspeed"] == engine.startswith("zero")
        assert list(result["losses"].values()) == history(output)["loss"]
    assert ended.out[0].count("held-out loss") == 1
    assert ("weights in host memory" in ended.out[0]) == engine.endswith("offload")
    assert re.sub("^spied.*\n", "", ended.out[1]) == "", "one rank prints"
    assert not "".join(ended.err).strip()
    assert [path.name for path in checkpoints(output)] == ["checkpoint-2", "checkpoint-4"]
    if kind == "adapt":
        assert "adapters 0.00 M parameters are trained" in ended.out[0]
        return
    loaded = AutoModelForCausalLM.from_pretrained(output / "model").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in weights(output).items())


RESUMED = [
    *("pretrain one 2 ddp", "tune ddp 1 auto", "experts one 1 auto"),
    *("tune fsdp2 2 fsdp2", "adapt fsdp2 2 fsdp2", "pretrain zero2 2 zero2"),
]
SLOW_RESUMED = ["tune shards 2 shards", "adapt zero3 2 zero3", "pretrain zero3-offload 2 zero3-offload"]


@pytest.mark.parametrize(("kind", "wrote", "ranks", "engine"), [*cases(*RESUMED), *cases(*SLOW_RESUMED, slow=True)])
def test_resumes(kind: str, wrote: str, ranks: str, engine: str, made: Runs, tmp_path: Path) -> None:
    output = made.copy(kind, wrote, tmp_path / "run")
    ended = made.resume(output, int(ranks), engine=engine)
    assert ended.statuses == [0] * int(ranks), ended
    assert_same(output, made.of(kind, wrote)[0], 0.0 if wrote == engine else 1e-5)
    assert not (output / ".incoming").exists()


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "fsdp2-zero2"])
def test_a_budget_is_that_of_each_process(engine: str, made: Runs, tmp_path: Path) -> None:
    """Planned with what FSDP2 shards and gathers; under other engines as if each process had all of it."""
    words = [*made.arguments("pretrain"), *sharing(engine), "--per_device_train_batch_size", SEQUENCES // 2]
    words += ["--memory-budget", "1GiB", "--max-steps", 1, "--output", tmp_path / "run"]
    ended = made.ranks.succeed(2, *words, **made.spies(engine))
    text = ended.out[0]
    assert ("tokens/s on 2 h100" in text) == (engine == "fsdp2"), text
    assert ("planned for one device with all the weights" in text) == (engine != "fsdp2"), text
    assert ("exchanges at" in text) == (engine == "fsdp2"), text


def test_smoothed_labels_are_those_of_the_next_tokens(made: Runs, tmp_path: Path) -> None:
    """Also under FSDP2, which changes the name of the model's class."""
    words = [*made.arguments("pretrain"), "--label_smoothing_factor", 0.1]
    for ranks, engine in ((1, "one"), (2, "fsdp2")):
        given = ["--per_device_train_batch_size", SEQUENCES // ranks, *sharing(engine), "--output", tmp_path / engine]
        made.ranks.succeed(ranks, *words, *given, **made.spies(engine))
    assert_same(tmp_path / "fsdp2", tmp_path / "one")


@pytest.mark.parametrize(("kind", "engine"), cases("experts one", "tune fsdp2"))
def test_the_best_model_is_saved(kind: str, engine: str, made: Runs, tmp_path: Path) -> None:
    """A learning rate of 1 makes the model worse after the first evaluation; another run ends there."""
    ranks = 1 if engine == "one" else 2
    given = [*sharing(engine), "--per_device_train_batch_size", SEQUENCES // ranks]
    given += ["--lr", 1, "--lr_scheduler_type", "constant"]
    given += ["--eval_strategy", "steps", "--eval_steps", 2, "--load_best_model_at_end", "true"]
    for name, steps in {"short": 2, "long": 4}.items():
        words = [*made.arguments(kind), *given, "--max-steps", steps, "--output", tmp_path / name]
        ended = made.ranks.succeed(ranks, *words, **made.spies(engine))
    assert "step 2: the run went on to step 4" in ended.out[0], ended.out[0]
    best, expected = (weights(tmp_path / name) for name in ("long", "short"))
    assert best.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in best.items())


@needs_deepspeed
def test_a_resumed_run_has_the_engine_that_it_began_with(made: Runs, tmp_path: Path) -> None:
    output = made.copy("pretrain", "zero3", tmp_path / "run")
    words = ["train", "--resume_from_checkpoint", "true", "--output", output]
    ended = made.ranks.succeed(2, *words, **made.spies("zero3"))
    assert "DeepSpeed ZeRO-3" in ended.out[0]


def test_an_engine_is_named_once() -> None:
    config = TrainConfig(parallel="fsdp2", options={"deepspeed": ZERO3})
    with pytest.raises(ArgumentValueError, match="parallel: expected auto beside --deepspeed, got fsdp2"):
        engine_of(config).__enter__()


@needs_deepspeed
@pytest.mark.parametrize("form", ["dict", "JSON", "base64", "file"])
def test_forms_of_a_deepspeed_configuration(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    text = json.dumps(ZERO3)
    file = tmp_path / "zero3.json"
    file.write_text(text)
    encoded = base64.b64encode(text.encode()).decode()
    given = {"dict": ZERO3, "JSON": text, "base64": encoded, "file": str(file)}[form]
    with engine_of(TrainConfig(options={"deepspeed": given})):
        assert zero_stage() == 3
    assert zero_stage() is None


def test_a_deepspeed_configuration_that_saves_no_weights() -> None:
    for more in ({}, {"stage3_gather_16bit_weights_on_model_save": False}):
        config = TrainConfig(options={"deepspeed": {"zero_optimization": {"stage": 3, **more}}})
        with pytest.raises(ArgumentValueError, match='gather_16bit_weights_on_model_save": true beside stage 3, got '):
            engine_of(config).__enter__()


@pytest.mark.parametrize("text", ["[1]", '{"zero_optimization": 3}', "{"])
def test_no_deepspeed_configuration(text: str, tmp_path: Path) -> None:
    (tmp_path / "of.json").write_text(text)
    for given in (str(tmp_path / "of.json"), str(tmp_path / "none.json"), text):
        with pytest.raises(ArgumentValueError, match="--deepspeed: expected a file with a DeepSpeed configuration"):
            engine_of(TrainConfig(options={"deepspeed": given})).__enter__()


@pytest.mark.parametrize("name", ["adafactor", "adagrad"])
def test_an_optimizer_that_cannot_be_sharded(name: str, made: Runs, tmp_path: Path) -> None:
    words = [*made.arguments("pretrain"), *sharing("fsdp2"), "--optim", name, "--output", tmp_path / "run"]
    ended = made.ranks(2, *words)
    assert ended.statuses == [2, 2], ended
    told = f"lowtide train: --optim: expected an optimizer that FSDP2 can shard, got {name}. Take adamw_torch_fused"
    assert ended.err[0].startswith(told), ended


def test_another_number_of_sequences_is_refused(made: Runs, tmp_path: Path) -> None:
    output = made.copy("tune", "ddp", tmp_path / "run")
    words = ["train", "--resume_from_checkpoint", "true", "--output", output, "--per_device_train_batch_size", 3]
    ended = made.ranks(2, *words)
    assert ended.statuses == [2, 2], ended
    assert "expected a divisor of the run's 4 sequences per step, got 2 processes with 3 each" in ended.err[0]


@pytest.mark.parametrize("now", ["whole", "fsdp2", "shards", "zero0", "zero2", "zero3"])
@pytest.mark.parametrize("wrote", ["whole", "fsdp2", "shards", "zero0", "zero2", "zero3"])
def test_checkpoints_of_another_engine_are_refused(
    wrote: str, now: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero0 = {**variables("zero2"), "ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"}
    environment = {"whole": {}, "shards": SHARDS, "zero0": zero0}
    for name in (wrote, now):
        with monkeypatch.context() as patch:
            patch.setenv("WORLD_SIZE", "2")
            for variable, value in (environment[name] if name in environment else variables(name)).items():
                patch.setenv(variable, value)
            if not (tmp_path / "run.json").exists():
                write_run_file(tmp_path, {"config": {}, "sequences": 1, "engine": current_engine()})
            elif wrote == now:
                check_engine(tmp_path / "checkpoint-3")
            else:
                with pytest.raises(ValueError, match=r"parallel: expected .*, which wrote checkpoint-3, got "):
                    check_engine(tmp_path / "checkpoint-3")


def test_fsdp2_reduces_in_float32_under_bfloat16(made: Runs, tmp_path: Path) -> None:
    """Each rank's loss and gradients have more digits than bfloat16; stock's are the same to what its GEMMs err.

    The mean over two ranks, which is logged, would have one more digit by itself.
    """
    losses = []
    for name, options in {"patched": [], "stock": ["--no-patch"]}.items():
        given = [
            "--parallel",
            "fsdp2",
            "--bf16",
            "true",
            "--save_strategy",
            "no",
            *options,
            "--output",
            tmp_path / name,
        ]
        ended = made.ranks.succeed(2, *made.arguments("pretrain"), *given, SPY="result dtypes")
        (result,) = spied(ended.out[0], "result")
        losses.append(list(result["losses"].values()))
        for out in ended.out:
            steps = list(spied(out, "dtypes"))
            assert len(steps) == STEPS
            assert any(step["loss"] for step in steps)
            assert all(step["finer"] == step["gradients"] > 0 for step in steps)
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


LARGE = {**SHAPE, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
MIB = 61  # of its weights in float32


@pytest.mark.parametrize(("kind", "engine"), cases("pretrain fsdp2", "tune fsdp2", "adapt zero3"))
def test_the_first_rank_alone_reads(kind: str, engine: str, made: Runs, tmp_path: Path) -> None:
    """The other one has no memory for the weights, or under ZeRO-3 for its shard; in a dtype that the file has not."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LARGE)).bfloat16()
    assert sum(p.numel() for p in model.parameters()) * 4 > MIB * 2**20
    model.save_pretrained(tmp_path / "large")
    byte_tokenizer().save_pretrained(tmp_path / "large")
    (tmp_path / "large.json").write_text(json.dumps(LARGE))
    large = tmp_path / ("large.json" if kind == "pretrain" else "large")
    given = ["--model", large, "--max-steps", 1, "--save_strategy", "no", "--parallel", engine]
    ended = made.ranks.succeed(
        2, *made.arguments(kind), *given, "--output", tmp_path / "run", **made.spies(engine, "memory")
    )
    first, second = (next(spied(out, "memory")) for out in ended.out)
    if engine == "zero3":  # whose start takes memory, too
        assert first["held"] == second["held"] == pytest.approx(MIB / 2, rel=0.01)
    else:
        assert first["read"] > MIB, (first, second)
        assert second["read"] < 0.4 * MIB, (first, second)
    assert f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters" in ended.out[0]
