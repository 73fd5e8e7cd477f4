"""`lowtide train` with DeepSpeed's ZeRO on two ranks of a CPU, where DeepSpeed is installed."""

from __future__ import annotations

import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from distributed.test_train_ranks import assert_same, history
from distributed.train_ranks import Ranks, shared
from lowtide.train.checkpoints import check_states
from lowtide.train.parallel import variables
from train.conftest import SHAPE, tiny_arguments

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="ranks on a CPU speak gloo")
installed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

SPIED = {"SPY": "distributed.spy_zero"}


@pytest.fixture
def ranks() -> Ranks:
    return shared()


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [*tiny_arguments(tmp_path_factory.mktemp("tiny")), "--grad-accum", "2", "--keep", "5"]


@installed
@pytest.mark.parametrize("engine", [pytest.param("zero2", marks=pytest.mark.slow), "zero3"])
def test_is_one_process_and_goes_on(engine: str, ranks: Ranks, arguments: list[str], tmp_path: Path) -> None:
    alone, output = tmp_path / "alone", tmp_path / "run"
    ranks.succeed(1, *arguments, "--batch-size", 4, "--output", alone)
    ended = ranks.succeed(2, *arguments, "--parallel", engine, "--output", output, **SPIED)
    assert_same(output, alone, 6)
    before = history(output, 6)
    assert re.search(r"[1-9]\d* without logits, 0 with\b", ended.out[0]), ended.out[0]
    whole = load_file(output / "model" / "model.safetensors")
    assert whole.keys() == load_file(alone / "model" / "model.safetensors").keys()
    shutil.rmtree(output / "checkpoint-6")
    refused = [(2, "ddp")] if engine == "zero2" else [(2, "ddp"), (3, engine)]  # each start takes its seconds
    for wrong, another in refused:
        ended = ranks(wrong, "train", "--resume", "--output", output, "--parallel", another, **SPIED)
        assert ended.statuses == [2] * wrong, ended
        assert "DeepSpeed's on 2 ranks" in ended.err[0]
    ranks.succeed(2, "train", "--resume", "--output", output, **SPIED)
    assert history(output, 6) == before


@installed
def test_one_rank_reads(ranks: Ranks, tmp_path: Path) -> None:
    """Of weights of 65 MiB the second rank has none under ZeRO-3, and then its half; of LoRA's and in bfloat16 too."""
    arguments = tiny_arguments(tmp_path)
    size = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "max_position_embeddings": 32}
    (tmp_path / "tiny.json").write_text(json.dumps({**SHAPE, **size}))
    said = ["--max-steps", 1, "--save-every", 0, "--eval-blocks", 1, "--lora-rank", 2, "--dtype", "bfloat16"]
    ended = ranks.succeed(2, *arguments, *said, "--parallel", "zero3", "--output", tmp_path / "run", **SPIED)
    first, second = (float(re.findall(r"spied read ([\d.]+) MiB", out)[0]) for out in ended.out)
    assert first > 64, (first, second)
    assert second < 16, (first, second)


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="DeepSpeed is installed")
def test_without_deepspeed_is_one_error(ranks: Ranks, arguments: list[str]) -> None:
    ended = ranks(2, *arguments, "--parallel", "zero3", "--output", "never-written")
    assert ended.statuses == [2, 2]
    assert ended.err[0].count("\n") == 1
    assert "pip install deepspeed" in ended.err[0]
    assert not Path("never-written").exists()


@pytest.mark.parametrize(("wrote", "now"), [(2, 3), (3, 2), (2, 2), (3, 3)])
def test_another_stage_is_one_error(wrote: int, now: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's files of weights are named by the rank where each rank has a part of them."""
    checkpoint = tmp_path / "checkpoint-3"
    (checkpoint / "global_step3").mkdir(parents=True)
    names = ["zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"]
    for name in names if wrote == 3 else [names[0], "mp_rank_00_model_states.pt"]:
        (checkpoint / "global_step3" / name).touch()
    (checkpoint / "scheduler.pt").touch()
    (checkpoint / "trainer_state.json").write_text('{"log_history": []}')
    for name, value in {"WORLD_SIZE": "2", **variables(f"zero{now}")}.items():
        monkeypatch.setenv(name, value)
    if wrote == now:
        check_states(checkpoint, 2)
        return
    with pytest.raises(ValueError, match=rf"parallel: .*written by ZeRO-{wrote}.*got ZeRO-{now}"):
        check_states(checkpoint, 2)
