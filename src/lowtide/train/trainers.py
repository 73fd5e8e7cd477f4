"""`transformers.Trainer` as both kinds of runs have it, TRL's SFTTrainer among them, and random weights' arguments."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import Trainer, TrainingArguments

from lowtide.errors import ArgumentValueError, message


@dataclass
class BlockArguments(TrainingArguments):  # type: ignore[misc]
    """Of training on blocks of one length, by the names of TRL's `SFTConfig`."""

    max_length: int = field(default=256, metadata={"help": "tokens of a sequence"})
    packing: bool = field(default=True, init=False)
    packing_strategy: str = field(default="wrapped", init=False)


class BaseTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose FSDP2 reduces in float32, with a log before each save.

    ``state.num_input_tokens_seen`` has the tokens of all ranks, padding included, without a wait for a device.
    """

    data_collator: Any
    label_smoother: Any
    distillation: Any = None  # a `lowtide.train.distillation.Distillation` that is attached

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.label_smoother is not None:  # Trainer shifts by the name of the model's class, which FSDP2 changes
            self.label_smoother = partial(self.label_smoother, shift_labels=True)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, and let FSDP2 reduce in float32: in 16 bits it rounds the loss to them.

        Raises:
            ArgumentValueError: FSDP2 is asked for without GPUs: accelerate takes DDP in its place.
        """
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        plugin = getattr(state, "fsdp_plugin", None)
        if plugin is None and state.num_processes > 1 and parse_flag_from_env("ACCELERATE_USE_FSDP"):
            raise ArgumentValueError(message("--accelerate_config", "GPUs for FSDP2", "none", "Take multi_gpu."))
        if plugin is not None and plugin.fsdp_version == 2 and state.mixed_precision != "no":
            narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}[state.mixed_precision]
            plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32)

    def get_train_dataloader(self) -> Any:
        """Return the loader of what is trained on, with the teacher's states where they are stored."""
        collate = self.data_collator
        if self.distillation is not None:
            self.data_collator = self.distillation.collator(collate)
        loader = super().get_train_dataloader()
        self.data_collator = collate
        return loader

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Do forward and backward of a batch, beside the teacher if there is one."""
        with nullcontext() if self.distillation is None else self.distillation.step(inputs):
            return super().training_step(model, inputs, *args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return the batches of a step, whose tokens count; none if a resumed run has done its steps: `Trainer` would
        do one more.
        """
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return [], None
        batches, items = super().get_batch_samples(*args, **kwargs)
        self.state.num_input_tokens_seen += self.args.world_size * sum(one["input_ids"].numel() for one in batches)
        return batches, items

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Return the number of labels that a loss is averaged over, at least 1: without any the loss is 0."""
        items = super()._get_num_items_in_batch(*args, **kwargs)
        return items.clamp(min=1) if isinstance(items, torch.Tensor) else items

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log before a checkpoint, an evaluation and the end, so that no weights are used that made the loss NaN."""
        control = self.control
        control.should_log |= control.should_save or control.should_evaluate or control.should_training_stop
        super()._maybe_log_save_evaluate(*args, **kwargs)
