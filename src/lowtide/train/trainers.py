"""`transformers.Trainer` as both kinds of runs have it, TRL's SFTTrainer among them, and random weights' arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from transformers import Trainer, TrainingArguments

from lowtide.train.ranks import check_fsdp2_has_gpus, reduce_in_float32


@dataclass
class BlockArguments(TrainingArguments):  # type: ignore[misc]
    """Of training on blocks of one length, by the names of TRL's `SFTConfig`."""

    max_length: int = field(default=256, metadata={"help": "tokens of a sequence"})
    packing: bool = field(default=True, init=False)
    packing_strategy: str = field(default="wrapped", init=False)


class BaseTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose FSDP2 reduces in float32, with a log before each save, and tokens that callbacks count.

    A callback with ``add_batch(tokens)`` is told of each batch: the tokens of all ranks, padding included.
    """

    label_smoother: Any

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.label_smoother is not None:  # Trainer shifts by the name of the model's class, which FSDP2 changes
            self.label_smoother = partial(self.label_smoother, shift_labels=True)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, and correct what it makes of FSDP2."""
        super().create_accelerator_and_postprocess()
        check_fsdp2_has_gpus(self.accelerator.state)
        reduce_in_float32(self.accelerator.state)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return the batches of a step; none if a resumed run has done its steps: `Trainer` would do one more."""
        if self.state.global_step < self.state.max_steps:
            return super().get_batch_samples(*args, **kwargs)
        self.control.should_training_stop = True
        return [], None

    def _get_num_items_in_batch(self, batch_samples: list[Any], *args: Any, **kwargs: Any) -> Any:
        """Return the number of labels that a step's loss is averaged over, at least 1: without any the loss is 0."""
        items = super()._get_num_items_in_batch(batch_samples, *args, **kwargs)
        return items.clamp(min=1) if isinstance(items, Tensor) else items

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Do the step, and tell the callbacks of its tokens."""
        for callback in self.callback_handler.callbacks:
            if add := getattr(callback, "add_batch", None):
                add(inputs["input_ids"].numel() * self.args.world_size)
        return super().training_step(model, inputs, *args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log before a checkpoint, an evaluation and the end, so that no weights are used that made the loss NaN."""
        control = self.control
        control.should_log |= control.should_save or control.should_evaluate or control.should_training_stop
        super()._maybe_log_save_evaluate(*args, **kwargs)
