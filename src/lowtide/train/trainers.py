"""What both trainers of a run correct, and `transformers.Trainer` on blocks of text."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer

from lowtide.train.ranks import correct_fsdp2


class Corrected:
    """FSDP2 as `correct_fsdp2` leaves it, a log before each save, and batches that are counted by the callbacks.

    A callback with ``add_batch(tokens, loss)`` is told of each batch: the tokens of all ranks, padding included, and
    this rank's loss.
    """

    accelerator: Any
    args: Any
    model: Any
    state: Any
    control: Any
    label_smoother: Any
    processing_class: Any
    callback_handler: Any

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.label_smoother is not None:  # Trainer shifts by the name of the model's class, which FSDP2 changes
            self.label_smoother = partial(self.label_smoother, shift_labels=True)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, and correct what it makes of FSDP2."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        correct_fsdp2(self.accelerator)
        self.is_fsdp_enabled = getattr(self.accelerator.state, "fsdp_plugin", None) is not None

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return the batches of a step; none if a resumed run has done its steps: `Trainer` would do one more."""
        if self.state.global_step < self.state.max_steps:
            return super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        self.control.should_training_stop = True
        return [], None

    def _get_num_items_in_batch(self, batch_samples: list[Any], *args: Any, **kwargs: Any) -> Any:
        """Return the number of labels that a step's loss is averaged over, at least 1: without any the loss is 0."""
        items = super()._get_num_items_in_batch(batch_samples, *args, **kwargs)  # type: ignore[misc]
        return items.clamp(min=1) if isinstance(items, Tensor) else items

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Do the step and tell the callbacks."""
        tokens = inputs["input_ids"].numel() * self.args.world_size
        loss = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        for callback in self.callback_handler.callbacks:
            if add := getattr(callback, "add_batch", None):
                add(tokens, loss)
        return loss

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log before a checkpoint, an evaluation and the end, so that no weights are used that made the loss NaN."""
        control = self.control
        control.should_log |= control.should_save or control.should_evaluate or control.should_training_stop
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model and its tokenizer, which `Trainer` leaves out of sharded checkpoints.

        The folder then exists for every rank: `Trainer` next looks on each whether the best checkpoint exists, while
        another rank may be making it.
        """
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        if self.args.should_save and not (folder / "tokenizer_config.json").exists():
            self.processing_class.save_pretrained(folder)


class BlockTrainer(Corrected, Trainer):  # type: ignore[misc]
    """A `Trainer` that reads its training blocks in their order, which was shuffled when they were made.

    A resumed run skips the batches before it without reading them. The order of a step's sequences does not depend on
    the number of processes, as long as they have as many sequences in a step together.
    """

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the loader of this process's share of the blocks."""
        loader: DataLoader[Any] = DataLoader(
            self.train_dataset,
            batch_size=self.args.train_batch_size,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
            drop_last=True,
        )
        prepared: DataLoader[Any] = self.accelerator.prepare(loader)
        return prepared
