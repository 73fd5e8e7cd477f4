"""What `lowtide train --tensor-parallel` refuses, prints and makes of optimizers; its steps: test_train_ranks.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distributed.train_runs import Runs, assert_same, rows_of, runs, sharing
from lowtide.errors import ArgumentValueError, LowtideError, UnsupportedError
from lowtide.train.config import TrainConfig
from lowtide.train.parallel import engine_of
from lowtide.train.settings import trainer_settings
from lowtide.train.tensor_parallel import join_groups

needs_gloo = pytest.mark.skipif(not dist.is_gloo_available(), reason="ranks on CPUs use gloo")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return runs(tmp_path_factory.getbasetemp())


NEXT = "or give --tensor-parallel 1"
REFUSED = [
    (1, {}, ArgumentValueError, f"a number of processes that 2 divides, got 1 of them. .*-per-node 2, {NEXT}"),
    (3, {}, ArgumentValueError, f"a number of processes that 2 divides, got 3 of them. .*-per-node 4, {NEXT}"),
    (2, {"parallel": "ddp"}, UnsupportedError, "parallel: expected fsdp2 beside --tensor-parallel, got ddp. Give"),
    (4, {"parallel": "zero3"}, UnsupportedError, "parallel: expected fsdp2 beside --tensor-parallel, got zero3."),
    (2, {"options": {"deepspeed": "zero.json"}}, UnsupportedError, "fsdp2 beside --tensor-parallel, got DeepSpeed."),
]


@pytest.mark.parametrize(("ranks", "settings", "error", "told"), REFUSED)
def test_processes_that_cannot_share_layers(
    ranks: int, settings: dict[str, str], error: type[LowtideError], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    config = TrainConfig(tensor_parallel=2, **settings)  # type: ignore[arg-type]
    with pytest.raises(error, match=told), engine_of(config):
        pass


@pytest.mark.parametrize("option", ["use_peft", "load_in_4bit"])
def test_models_that_are_not_trained_whole(option: str, made: Runs, tmp_path: Path) -> None:
    options = {option: True, "dtype": "bfloat16"}
    config = TrainConfig(model=str(made.folder / "pretrained"), tensor_parallel=2, options=options)
    with pytest.raises(UnsupportedError, match=f"tensor_parallel: expected .* trained whole, got --{option}"):
        trainer_settings(config, tmp_path, save=False)


def test_tiles_of_a_sharded_vocabulary_are_not_skipped(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"skip: expected a whole vocabulary, got --tensor-parallel\. Leave"):
        trainer_settings(TrainConfig(tensor_parallel=2, skip=5e-3), tmp_path, save=False)


@needs_gloo
def test_tokens_that_are_not_averaged_over_devices(made: Runs, tmp_path: Path) -> None:
    """The two ranks have one batch, and its own mean is the loss."""
    words = [*made.arguments("tune"), "--average_tokens_across_devices", "false", "--output", tmp_path / "run"]
    made.ranks.succeed(2, *words, *sharing("tp2"), "--per_device_train_batch_size", rows_of(2, "tp2"))
    assert_same(tmp_path / "run", made.of("tune", "one")[0])


@needs_gloo
def test_heads_that_cannot_be_divided(made: Runs, tmp_path: Path) -> None:
    words = [*made.arguments("pretrain"), "--tensor-parallel", 4, "--output", tmp_path / "run"]
    ended = made.ranks(4, *words)
    assert ended.statuses == [2] * 4, ended
    told = "tensor_parallel: expected a divisor of the model's 2 num_key_value_heads, got 4. Give a smaller"
    assert ended.err[0].startswith(f"lowtide train: {told}"), ended


@needs_gloo
def test_a_model_without_a_plan(made: Runs, tmp_path: Path) -> None:
    shape = '{"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 512}'
    (tmp_path / "gpt2.json").write_text(shape)
    words = [*made.arguments("pretrain"), "--model", tmp_path / "gpt2.json", "--tensor-parallel", 2]
    ended = made.ranks(2, *words, "--output", tmp_path / "run")
    assert ended.statuses == [2] * 2, ended
    assert "tensor_parallel: expected a model with a plan in transformers, got GPT2LMHeadModel" in ended.err[0]


@needs_gloo
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_budget_is_that_of_a_share(ranks: int, made: Runs, tmp_path: Path) -> None:
    """Planned with what a group shares and FSDP2 shards over the groups."""
    words = [*made.arguments("pretrain"), "--tensor-parallel", 2, "--memory-budget", "1GiB", "--max-steps", 1]
    ended = made.ranks.succeed(ranks, *words, "--output", tmp_path / "run")
    assert f"tokens/s on {ranks} h100" in ended.out[0], ended
    assert "tensor parallelism: exchanges hide behind nothing" in ended.out[0]


@needs_gloo
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--parallel fsdp2-zero2", "expected --parallel fsdp2 beside --tensor-parallel, got FSDP2 that keeps"),
        (
            "--host-budget 1GiB",
            "expected no --host-budget beside --tensor-parallel, got 1GiB. A --policy needs",
        ),
        (
            "--optim adamw_8bit",
            "expected an --optim of adamw_torch_fused, adamw_torch, sgd beside --tensor-parallel",
        ),
    ],
)
def test_a_budget_that_is_planned_for_whole_layers_alone(more: str, said: str, made: Runs, tmp_path: Path) -> None:
    words = [*made.arguments("pretrain"), "--tensor-parallel", 2, "--memory-budget", "1GiB", *more.split()]
    ended = made.ranks(2, *words, "--output", tmp_path / "run")
    assert ended.statuses == [2] * 2, ended
    assert f"memory_budget: {said}" in ended.err[0]


@needs_gloo
def test_a_budget_for_experts_that_are_shared(made: Runs, tmp_path: Path) -> None:
    words = [*made.arguments("experts"), "--tensor-parallel", 2, "--memory-budget", "1GiB"]
    ended = made.ranks(2, *words, "--output", tmp_path / "run")
    assert ended.statuses == [2] * 2, ended
    said = "memory_budget: expected a model that is planned beside --tensor-parallel, got qwen3_moe (parallel has to be"
    assert said in ended.err[0]


@needs_gloo
def test_how_the_model_is_shared_is_printed(made: Runs) -> None:
    printed = {engine: made.of("tune", engine)[1].out[0] for engine in ("tp2", "fsdp2xtp2")}
    assert "parallel 2 processes, tensor parallelism: 2 share each layer" in printed["tp2"]
    assert "4 processes, FSDP2 over 2 groups, tensor parallelism: 2 share each layer" in printed["fsdp2xtp2"]
    for text in printed.values():  # of all sequences once, whoever shares them
        assert "4 steps of 4 sequences" in text


@needs_gloo
def test_weights_in_16_bits_are_trained_in_32(made: Runs, tmp_path: Path) -> None:
    """As FSDP2 alone trains them beside --bf16."""
    words = [*made.arguments("pretrain"), "--dtype", "bfloat16", "--bf16", "true", "--max-steps", 1]
    made.ranks.succeed(2, *words, "--tensor-parallel", 2, "--output", tmp_path / "run")
    states = torch.load(tmp_path / "run" / "checkpoint-1" / "optimizer.bin", weights_only=True)["state"]
    assert {state["exp_avg"].dtype for state in states.values()} == {torch.float32}


@needs_gloo
def test_what_a_group_reads_is_counted_once(made: Runs, tmp_path: Path) -> None:
    """Two groups log the held-out loss and the tokens of two processes, also where rows are left for the last batch."""
    words = [*made.arguments("tune"), "--max-steps", 2, "--held-out", 5, "--per_device_eval_batch_size", 1]
    words += ["--per_device_train_batch_size", 2, "--save_strategy", "no", "--include_num_input_tokens_seen", "true"]
    logs = []
    for ranks, engine in ((4, "fsdp2xtp2"), (2, "ddp")):
        output = tmp_path / engine
        made.ranks.succeed(ranks, *words, *sharing(engine), "--output", output)
        lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
        logs.append([(line.get("eval_loss", line.get("loss")), line["num_input_tokens_seen"]) for line in lines])
    assert len(logs[0]) == 4
    for (loss, tokens), (expected, expected_tokens) in zip(*logs, strict=True):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert tokens == expected_tokens


@needs_gloo
def test_operations_of_a_group_are_counted_once(made: Runs) -> None:
    files = [made.of("pretrain", engine)[0] / "checkpoint-4" / "trainer_state.json" for engine in ("tp2", "one")]
    shared, alone = (json.loads(file.read_text())["total_flos"] for file in files)
    assert shared == alone > 0


@needs_gloo
def test_a_resumed_group_draws_the_same_random_numbers(made: Runs, tmp_path: Path) -> None:
    """Else dropout would have another mask on each rank for activations that all have."""
    output = made.copy("tune", "ddp", tmp_path / "run")
    file = output / "checkpoint-2" / "rng_state_1.pth"
    other = torch.Generator().manual_seed(1).get_state()
    torch.save({**torch.load(file, weights_only=False), "cpu": other}, file)
    ended = made.resume(output, 2, "--parallel", "fsdp2", engine="tp2")  # in place of ddp
    assert ended.statuses == [0, 0], ended
    files = [output / "checkpoint-4" / f"rng_state_{rank}.pth" for rank in range(2)]
    first, second = (torch.load(file, weights_only=False)["cpu"] for file in files)
    assert torch.equal(first, second)


def test_an_optimizer_has_the_groups_of_one_process() -> None:
    """Of four groups, by decay and mesh, there are two again, in the model's order and with their settings."""
    a, b, c, d = (torch.nn.Parameter(torch.zeros(1)) for _ in range(4))
    groups = [{"params": [p], "weight_decay": decay} for p, decay in ((c, 0.1), (a, 0.1), (d, 0.0), (b, 0.0))]
    join_groups(groups, {a: True, b: False, c: True, d: False})
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [[id(p) for p in group["params"]] for group in groups] == [[id(a), id(c)], [id(b), id(d)]]
    before = [dict(group) for group in groups]
    join_groups(groups, {})
    assert groups == before
