"""`PatchCallback(memory_budget=...)` under any Trainer: what it plans, applies and says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import lowtide
from lowtide.errors import ArgumentValueError
from lowtide.memory import ActivationPolicy
from lowtide.models.budget import Budget, planned_step, step_length
from promises import promise
from train.conftest import SHAPE

pytestmark = [
    promise("plans", "trainers"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
]


def model() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{name: value for name, value in SHAPE.items() if name != "model_type"}))


def trainer(folder: Path, callback: Any, data: Any = None, **more: Any) -> Any:
    ids = torch.randint(512, (8, 40), generator=torch.Generator().manual_seed(0))
    args = TrainingArguments(
        str(folder), max_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to="none", save_strategy="no",
        disable_tqdm=True, logging_steps=1, **more,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in ids] if data is None else data
    return Trainer(model=model(), args=args, train_dataset=rows, callbacks=[callback])


def losses(one: Any) -> list[float]:
    one.train()
    return [entry["loss"] for entry in one.state.log_history if "loss" in entry]


def test_a_plan_is_applied_before_training_and_changes_no_number(tmp_path: Path) -> None:
    said: list[str] = []
    callback = lowtide.PatchCallback(memory_budget="1.02GiB", length=40, show=said.append)
    own = trainer(tmp_path, callback, gradient_checkpointing=True)
    assert callback.plan is not None
    assert len(callback.plan.policies) == 2
    assert all(isinstance(policy, ActivationPolicy) for policy in callback.plan.policies)
    assert (callback.plan.job.seq_len, callback.plan.job.batch_size) == (40, 2)
    assert not own.args.gradient_checkpointing
    assert "gradient_checkpointing is turned off" in said[0]
    assert "expected peak" in said[0]
    expected = losses(trainer(tmp_path, lowtide.PatchCallback(show=None)))
    torch.testing.assert_close(losses(own), expected, rtol=1e-5, atol=0)
    assert said[-1].endswith("losses   2 without logits, 0 with")


def test_without_a_length_it_is_that_of_the_rows(tmp_path: Path) -> None:
    callback = lowtide.PatchCallback(memory_budget="auto", show=None)
    own = trainer(tmp_path, callback)
    assert callback.plan is None  # a Trainer shows its rows when it begins
    own.train()
    assert callback.plan is not None
    assert callback.plan.job.seq_len == 40
    callback = lowtide.PatchCallback(memory_budget="auto", show=None)
    with pytest.raises(ArgumentValueError, match=r"length: expected the most tokens of a sequence.*length=N"):
        trainer(tmp_path, callback, data=[{"pixels": 1}] * 4, remove_unused_columns=False).train()


def test_where_nothing_fits_the_trainer_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(ArgumentValueError, match=r"memory_budget: expected at least .* GiB for 2 x 2000000 tokens"):
        trainer(tmp_path, lowtide.PatchCallback(memory_budget="1.0001GiB", length=2_000_000, show=None))
    with pytest.raises(ArgumentValueError, match="memory_budget"):
        lowtide.PatchCallback(memory_budget="much")
    with pytest.raises(ArgumentValueError, match="a memory_budget beside"):
        lowtide.PatchCallback(host_budget="1GiB")


@pytest.mark.parametrize(
    ("args", "length"),
    [
        ({"max_length": 64}, 64),
        ({"max_completion_length": 30}, None),
        ({"max_length": None}, None),
    ],
)
def test_the_length_is_the_trainers_own(args: dict[str, Any], length: int | None) -> None:
    assert step_length(SimpleNamespace(**args)) == length


def test_a_rollout_is_the_longest_prompt_and_a_completion() -> None:
    prompts = [
        {"prompt": [3, 4]},
        {"prompt": "one two three"},
        {"prompt": [{"role": "user", "content": "four words are here"}]},
    ]

    class Words:
        def __call__(self, text: str) -> dict[str, Any]:
            return {"input_ids": text.split()}

        def apply_chat_template(self, messages: Any, *, add_generation_prompt: bool, return_dict: bool) -> Any:
            assert add_generation_prompt
            assert return_dict
            return self(" ".join(message["content"] for message in messages))

    args = SimpleNamespace(max_completion_length=30)
    assert step_length(args, prompts, Words()) == 34
    assert step_length(args, prompts[:2], Words()) == 33
    assert step_length(args, [{"text": "x"}], Words()) is None


BASE = {
    "per_device_train_batch_size": 3, "gradient_accumulation_steps": 1, "optim": "adamw_torch_fused", "bf16": True,
    "fp16": False, "world_size": 1, "max_length": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "planned"),
    [
        ({}, {"seq_len": 64, "batch_size": 3, "keep_gradients": False, "autocast": True, "attention_mask": True}),
        ({"gradient_accumulation_steps": 2, "bf16": False}, {"keep_gradients": True, "autocast": False}),
        ({"packing": True, "packing_strategy": "bfd"}, {"seq_len": 192, "batch_size": 1, "attention_mask": True}),
        ({"packing": True, "packing_strategy": "wrapped"}, {"seq_len": 64, "batch_size": 3, "attention_mask": False}),
        ({"optim": "sgd", "per_device_train_batch_size": 1}, {"optimizer": "sgd", "attention_mask": False}),
        ({"world_size": 2}, {"gpus": 2, "parallel": "ddp"}),
        ({"world_size": 2, "fsdp": True}, {"gpus": 2, "parallel": "fsdp2"}),
        ({"world_size": 2, "deepspeed_plugin": SimpleNamespace(zero_stage=3)}, {"gpus": 2, "parallel": "zero3"}),
    ],
)
def test_what_is_planned_is_what_the_arguments_say(more: dict[str, Any], planned: dict[str, Any]) -> None:
    found = planned_step(model(), SimpleNamespace(**BASE | more))
    assert {name: found[name] for name in planned} == planned
    assert ("gpus" in found) == ("gpus" in planned)


def test_a_preference_is_two_sequences_beside_the_reference_model() -> None:
    args = type("DPOConfig", (SimpleNamespace,), {})(
        **BASE, precompute_ref_log_probs=False, device=torch.device("cpu"), gradient_checkpointing=False
    )
    own = model()
    assert planned_step(own, args)["batch_size"] == 2 * BASE["per_device_train_batch_size"]
    plans = []
    for kept in (True, False):
        args.precompute_ref_log_probs = not kept
        budget = Budget("3GiB", None, None)
        assert ("beside the reference model" in str(budget.apply(own, args))) == kept
        plans.append(budget.plan)
    reference = sum(p.nbytes for p in own.parameters())
    args.precompute_ref_log_probs = False
    with pytest.raises(
        ArgumentValueError, match=r"memory_budget: expected more than .* that the reference model takes"
    ):
        Budget("1KiB", None, None).apply(own, args)
    assert plans[1].budget_bytes - plans[0].budget_bytes == pytest.approx(reference, rel=1e-3)


def test_adapters_are_planned_as_they_are() -> None:
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(model(), peft.LoraConfig(r=4, target_modules=["v_proj", "q_proj"]))
    found = planned_step(wrapped, SimpleNamespace(**BASE))
    assert found["adapters"] == lowtide.plan.Adapters(4, ("q_proj", "v_proj"))
    with pytest.raises(ArgumentValueError, match="an optimizer that the planner has"):
        planned_step(wrapped, SimpleNamespace(**BASE | {"optim": "lion_32bit"}))
