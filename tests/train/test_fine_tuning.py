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
from torch import Tensor, nn

from lowtide.memory import plan_memory
from lowtide.mlp.packed import Packed
from lowtide.mlp.swiglu import adapted_mlp
from lowtide.train import TrainConfig, checkpoints
from lowtide.train.run import run
from lowtide.trl import patch_trl, unpatch_trl
from train.conftest import Run, log, losses, save_model, weights, write_rows

pytest.importorskip("trl")
from lowtide.train.fine_tuning import FineTuner

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
    "packed, wrapped": ("rows", {"packing": True, "packing_strategy": "wrapped"}),
    "adapters": ("messages", LORA),
    "accumulated": ("pairs", {"gradient_accumulation_steps": 3}),
    "smoothed": ("rows", {"label_smoothing_factor": 0.2}),
    "dft": ("pairs", {"loss_type": "dft"}),
    "policy": ("messages", {"policy": "1 x input, 1 x all/0"}),
    "groups": ("messages", {"policy": "input every 2"}),
    "evaluated": ("rows", {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 3}),
}


class Batches:
    """The batches and the gradients of each step of a run, and of the evaluations before and after."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[list[dict[str, Tensor]]] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.at_start: dict[str, Tensor] = {}
        original = FineTuner.training_step
        samples = FineTuner.get_batch_samples

        def training_step(trainer: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.at_start:
                self.at_start = {name: value.detach().clone() for name, value in model.state_dict().items()}
            loss = original(trainer, model, inputs, *args, **kwargs)
            if trainer.accelerator.sync_gradients:
                self.gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
            return loss

        def get_batch_samples(trainer: Any, *args: Any) -> Any:
            found = samples(trainer, *args)
            self.steps.append([{n: v.clone() for n, v in one.items() if isinstance(v, Tensor)} for one in found[0]])
            return found

        monkeypatch.setattr(FineTuner, "training_step", training_step)
        monkeypatch.setattr(FineTuner, "get_batch_samples", get_batch_samples)


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


def reference(
    batches: list[dict[str, Tensor]], state: dict[str, Tensor], model: Path, dtype: torch.dtype, smoothing: float = 0.0
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a step by plain PyTorch, each document of each row alone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    plain: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    plain.load_state_dict(state)
    plain.to(dtype).train()
    documents = []
    for batch in batches:
        for row, ids in enumerate(batch["input_ids"]):
            labels = batch["labels"][row]
            starts = [0]
            if "position_ids" in batch:
                starts = (batch["position_ids"][row] == 0).nonzero().flatten().tolist()
            mask = batch.get("attention_mask")
            end = len(ids) if mask is None else int(mask[row].sum())
            documents += [(ids[a:b], labels[a:b]) for a, b in zip(starts, [*starts[1:], end], strict=True)]
    count = sum(int((labels[1:] != -100).sum()) for _, labels in documents)
    total = 0.0
    for ids, labels in documents:
        if len(ids) < 2:
            continue
        logits = plain(input_ids=ids[None]).logits[0, :-1]
        loss = nn.functional.cross_entropy(logits, labels[1:], reduction="sum", label_smoothing=smoothing) / count
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad for name, p in plain.named_parameters()}


@pytest.mark.parametrize(
    "kind", ["rows of text", "text files", "assistant's turns", "completions", "packed", "accumulated", "smoothed"]
)
def test_a_step_is_its_documents_one_by_one_in_float64(
    kind: str, tune: Tune, pretrained: Path, lowtide: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within what the stock trainer errs; documents that are packed must not see each other, nor padding count."""
    smoothing = KINDS[kind][1].get("label_smoothing_factor", 0.0)
    arguments, errors = tune(KINDS[kind][0], **KINDS[kind][1], max_grad_norm=1e9), []
    for more in ([], ["--no-patch"]):
        with pytest.MonkeyPatch.context() as patch:
            seen = Batches(patch)
            logged = tuned([*arguments, "--max-steps", "1"], lowtide, tmp_path / f"run{len(more)}", *more)
        loss, exact = reference(seen.steps[0], seen.at_start, pretrained, torch.float64, smoothing)
        scale = max(float(g.abs().max()) for g in exact.values())
        (got,) = seen.gradients
        assert got.keys() == exact.keys()
        error = max(float((got[n].double() - g).abs().max()) for n, g in exact.items()) / scale
        errors.append((abs(logged[1] - loss) / loss, error))
    (loss_error, error), (stock_loss_error, stock_error) = errors
    assert loss_error <= 2 * stock_loss_error + 1e-6
    assert error <= 2 * stock_error + 1e-7
    assert stock_error < 1e-5, "the reference is that of the stock trainer"
    if kind == "packed":
        whole = [{name: value for name, value in batch.items() if name != "position_ids"} for batch in seen.steps[0]]
        _, other = reference(whole, seen.at_start, pretrained, torch.float64)
        assert max(float((other[n] - g).abs().max()) for n, g in exact.items()) / scale > 1e-3, "they would be seen"


def test_dft_is_its_formula(tune: Tune, pretrained: Path, lowtide: Run, tmp_path: Path) -> None:
    """-p log p of each token, p not differentiated (arXiv 2508.05629)."""
    with pytest.MonkeyPatch.context() as patch:
        seen = Batches(patch)
        logged = tuned(tune("rows", loss_type="dft", **{"max-steps": 1}), lowtide, tmp_path / "out")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(pretrained).double()
    (batch,) = seen.steps[0]
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    logprobs = -nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    expected = -(logprobs.exp() * logprobs).sum() / (labels != -100).sum()
    assert logged[1] == pytest.approx(expected.item(), rel=1e-5)
    assert patch_trl().calls_lowtide == {}, "a new patch: the run has undone its own"
    unpatch_trl()


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


def test_adapters_are_saved(tune: Tune, pretrained: Path, lowtide: Run, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    output = tmp_path / "out"
    out = lowtide.done(*tune(**LORA, lora_alpha=12, learning_rate=0.02), "--output", output)
    assert "adapters 0.00 M parameters are trained" in out
    stock, base = (AutoModelForCausalLM.from_pretrained(pretrained) for _ in range(2))
    adapter = PeftModel.from_pretrained(base, str(output / "model"))
    ids = torch.arange(20)[None]
    assert not torch.allclose(adapter(ids).logits, stock(ids).logits, atol=1e-3)


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
    """As the stock trainer to bfloat16's rounding, with MLPs that run fused and a plan for weights in 4 bits."""
    bnb = pytest.importorskip("bitsandbytes")
    # on some CPUs an evaluation packs weights anew, for kernels that do not train
    monkeypatch.setattr(bnb.nn.modules, "has_avx512bf16", lambda: False)
    plans, calls = [], []

    def plan(*args: Any, **kwargs: Any) -> Any:
        plans.append(plan_memory(*args, **kwargs))
        return plans[-1]

    def mlp(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args[1].weight)
        return adapted_mlp(*args, **kwargs)

    monkeypatch.setattr("lowtide.train.activations.plan_memory", plan)
    monkeypatch.setattr("lowtide.models.mlp_part.adapted_mlp", mlp)
    lora = {**LORA, "lora_target_modules": ("q_proj", "gate_proj", "up_proj", "down_proj")}
    arguments = tune("messages", **lora, load_in_4bit=True, use_bnb_nested_quant=nested or None)
    stock = tuned(arguments, lowtide, tmp_path / "stock", "--no-patch")
    assert not calls
    assert tuned(arguments, lowtide, tmp_path / "out", "--memory-budget", "1GiB") == pytest.approx(stock, rel=1e-3)
    assert len(stock) == 6
    assert calls
    assert all(isinstance(weight, Packed) for weight in calls)
    assert ["double" in one.job.shape.four_bit for one in plans] == [nested]
    assert plans[0].job.shape.four_bit


def test_a_budget_is_planned_in_the_dtype_that_the_checkpoint_has(
    pretrained: Path, tune: Tune, lowtide: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    narrow = tmp_path / "narrow"
    AutoModelForCausalLM.from_pretrained(pretrained, dtype=torch.bfloat16).save_pretrained(narrow)
    AutoTokenizer.from_pretrained(pretrained).save_pretrained(narrow)
    plans = []

    def plan(*args: Any, **kwargs: Any) -> Any:
        plans.append(plan_memory(*args, **kwargs))
        return plans[-1]

    monkeypatch.setattr("lowtide.train.activations.plan_memory", plan)
    arguments = tune(model=narrow, dtype="auto", **{"max-steps": 1})
    lowtide.done(*arguments, "--memory-budget", "1GiB", "--output", tmp_path / "out")
    assert [one.job.dtype for one in plans] == [torch.bfloat16]
