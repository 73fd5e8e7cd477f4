"""Fine-tuning: TRL's SFTTrainer with the loss of the patched model. Its values, beside float64 and beside TRL's own."""

from __future__ import annotations

import json
import math
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.train import TrainConfig, checkpoints
from lowtide.train.run import run
from train.conftest import Run, log, losses, save_model, weights, write_rows

pytest.importorskip("trl")

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")
Tune = Callable[..., list[str]]
# fused MLPs draw other random numbers for dropout than stock ones
LORA = {"use_peft": True, "lora_r": 4, "lora_dropout": 0, "lora_target_modules": ("q_proj", "down_proj")}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "rows of text": ("rows", {}),
    "text files": ("text", {}),
    "conversations": ("messages", {}),
    "assistant's turns": ("messages", {"assistant_only_loss": True}),
    "completions": ("pairs", {}),
    "packed": ("messages", {"packing": True, "assistant_only_loss": True}),
    "adapters": ("messages", LORA),
    "accumulated": ("pairs", {"gradient_accumulation_steps": 3}),
    "smoothed": ("rows", {"label_smoothing_factor": 0.2}),
    "dft": ("pairs", {"loss_type": "dft"}),
    "policy": ("messages", {"policy": "1 x input, 1 x all/0"}),
    "groups": ("messages", {"policy": "input every 2"}),
    "evaluated": ("rows", {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 3}),
}


def tuned(arguments: list[str], lowtide: Run, output: Path, *more: object) -> dict[int, float]:
    out = lowtide.done(*arguments, "--output", output, *more)
    if "--no-patch" not in more:
        fused = out.partition("losses  ")[2].split()
        assert int(fused[0]) >= len(losses(output)), out
        assert fused[3] == "0", "no logits"
    return losses(output)


def test_steps_without_a_trained_token(tune: Tune, lowtide: Run, tmp_path: Path) -> None:
    """Prompts that fill whole sequences: the loss is 0, as TRL's, and neither 0 / 0 nor the end of the run."""
    rows = [{"prompt": "the tide came in " * (12 if i % 3 else 1), "completion": "and went out"} for i in range(24)]
    data = write_rows(tmp_path / "long.jsonl", rows)
    arguments = tune("pairs", **{"packing": True, "seq-len": 48, "per_device_train_batch_size": 1, "data": data})
    stock = tuned(arguments, lowtide, tmp_path / "stock", "--no-patch")
    assert 0.0 in stock.values()
    assert set(stock.values()) != {0.0}
    assert tuned(arguments, lowtide, tmp_path / "patched") == pytest.approx(stock, rel=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_no_logits_are_built_and_the_run_is_that_of_the_stock_trainer(
    kind: str, tune: Tune, lowtide: Run, tmp_path: Path
) -> None:
    """The stock one is TRL's own head, for losses, gradients' norms and what is evaluated."""
    arguments = tune(KINDS[kind][0], **KINDS[kind][1])
    if "--policy" not in arguments:
        stock = tuned(arguments, lowtide, tmp_path / "stock", "--no-patch")
    else:
        stock = tuned(tune(KINDS[kind][0]), lowtide, tmp_path / "stock", "--no-patch")
    assert tuned(arguments, lowtide, tmp_path / "patched") == pytest.approx(stock, rel=2e-6)
    for ours, theirs in zip(log(tmp_path / "patched"), log(tmp_path / "stock"), strict=True):
        for name in {"grad_norm", "eval_loss", "learning_rate"} & theirs.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=2e-5), name
    assert len(stock) == 6


EXPERTS = [{}, {"gradient_accumulation_steps": 3}, {"router_aux_loss_coef": 0.7}]
EXPERTS += [{"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}]


@pytest.mark.parametrize("more", EXPERTS, ids=str)
def test_a_mixture_of_experts_has_the_auxiliary_loss_that_trl_gives_it(
    more: dict[str, Any], tune: Tune, lowtide: Run, tmp_path: Path
) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    model = save_model(tmp_path / "moe", model_type="mixtral", router_aux_loss_coef=0.3, **experts)
    arguments = tune("rows", model=model, **more)
    stock = tuned(arguments, lowtide, tmp_path / "stock", "--no-patch")
    patched = tuned(arguments, lowtide, tmp_path / "patched")
    assert patched == pytest.approx(stock, rel=2e-6)
    norms = [[line["grad_norm"] for line in log(tmp_path / one) if "grad_norm" in line] for one in ("patched", "stock")]
    assert norms[0] == pytest.approx(norms[1], rel=2e-5)
    held_out = [[line["eval_loss"] for line in log(tmp_path / o) if "eval_loss" in line] for o in ("patched", "stock")]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-5)
    none = tuned(tune("rows", model=model, **{**more, "router_aux_loss_coef": 0}), lowtide, tmp_path / "none")
    assert (patched[1] - none[1] > 0.2) == ("label_smoothing_factor" not in more), "which TRL leaves out there, too"


def test_the_first_screen_shows_what_is_trained_on(tune: Tune, lowtide: Run, tmp_path: Path) -> None:
    turns = [{"role": "human", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    empty = [{"role": "user", "content": "hi"}]
    data = write_rows(tmp_path / "c.jsonl", [{"messages": turns}] * 40 + [{"messages": empty}] * 3)
    arguments = tune(data=data, assistant_only_loss=True, dtype="bfloat16", **{"max-steps": 1, "seq-len": 200})
    out = lowtide.done(*arguments, "--output", tmp_path / "out")
    assert "rows     40 conversations, 3 with nothing to train on skipped" in out
    assert "'human' in 40 of the conversations" in out
    assert re.search(r"trained  4 of the \d+ tokens of the first sequence, the last '<\|im_end\|>'", out)
    assert "up to 0.001: high for a pretrained model" in out
    assert "the config is for 128 positions" in out
    assert "rounded away" in out
    assert {value.dtype for value in weights(tmp_path / "out" / "model").values()} == {torch.bfloat16}


def test_it_needs_no_network(tune: Tune, lowtide: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*args: Any) -> Any:
        raise AssertionError(f"a connection to {args[1:]}")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    lowtide.done(*tune(use_peft=True, **{"max-steps": 1}), "--output", tmp_path / "out")


def test_the_python_interface_returns_what_was_measured(
    pretrained: Path, data: dict[str, Path], tmp_path: Path
) -> None:
    options = {"per_device_train_batch_size": 2, "num_train_epochs": 2, "save_strategy": "no", "logging_steps": 5}
    config = TrainConfig(
        model=str(pretrained), data=(str(data["pairs"]),), output=str(tmp_path / "out"), seq_len=64, options=options
    )
    result = run(config)
    logged = [1, *range(5, 75, 5), 72]
    assert sorted(result.losses) == logged, "of 72 steps, the last too: a tenth of the rows is held out"
    assert result.held_out_after is not None
    assert math.isfinite(result.held_out_after)
    assert (result.calls_materialised, result.saved) == (0, str(tmp_path / "out" / "model"))
    assert checkpoints.checkpoints(tmp_path / "out") == []
    assert json.loads((tmp_path / "out" / "run.json").read_text())["sequences"] == 2


@pytest.mark.parametrize("nested", [False, True])
def test_a_base_in_4_bits(
    nested: bool, tune: Tune, lowtide: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the stock trainer to bfloat16's rounding, with a plan for weights in 4 bits."""
    bnb = pytest.importorskip("bitsandbytes")
    # on some CPUs an evaluation packs weights anew, for kernels that do not train
    monkeypatch.setattr(bnb.nn.modules, "has_avx512bf16", lambda: False)
    lora = {**LORA, "lora_target_modules": ("q_proj", "gate_proj", "up_proj", "down_proj")}
    arguments = tune("messages", **lora, load_in_4bit=True, use_bnb_nested_quant=nested or None)
    stock = tuned(arguments, lowtide, tmp_path / "stock", "--no-patch")
    assert tuned(arguments, lowtide, tmp_path / "out", "--memory-budget", "1GiB") == pytest.approx(stock, rel=1e-3)
    assert len(stock) == 6
