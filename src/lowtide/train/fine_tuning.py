"""`trl.SFTTrainer` with the loss of the patched model in place of TRL's own head."""

from __future__ import annotations

from typing import Any

from transformers import Trainer
from trl import SFTTrainer

from lowtide.train.trainers import Measured


class FineTuner(Measured, SFTTrainer):  # type: ignore[misc]
    """An `SFTTrainer` that calls ``model(**inputs)``, so that `lowtide.patch` computes the loss.

    TRL installs a head of its own on every model. It runs the backbone, takes the head's weight and builds a few rows
    of logits at a time; under FSDP2 it gathers that weight with ``full_tensor()``. Here it is not called: transformers'
    own `Trainer.compute_loss` is, which also smooths labels in one forward where TRL takes two.

    Not logged, in contrast to TRL: entropy and token accuracy, which are computed by that head. ``stock`` keeps TRL's
    loss; with ``waits`` the model stays where it is until `place_model`, since not all of it may fit on the GPU; the
    other arguments are SFTTrainer's.
    """

    def __init__(self, *, stock: bool = False, waits: bool = False, **kwargs: Any) -> None:
        self._stock, self._waits = stock, waits
        self._to: Any = None  # the device, where the model waits
        super().__init__(**kwargs)
        for module in self.model.modules():  # TRL changes the config alone, which many models have read by then
            if hasattr(module, "router_aux_loss_coef"):
                module.router_aux_loss_coef = self.router_aux_loss_coef

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        if self._waits:
            self._to = device
        else:
            super()._move_model_to_device(model, device)

    def place_model(self) -> None:
        """Move the model to the GPU, if it has waited for this."""
        self._waits = False
        if self._to is not None:
            self._move_model_to_device(self.model, self._to)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of a batch, by the model itself; TRL's where its ``loss_type`` is another than "nll"."""
        if self._stock or self.args.loss_type != "nll":
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs["use_cache"] = False
        if self.aux_loss_enabled:
            inputs["output_router_logits"] = True
        loss, outputs = Trainer.compute_loss(self, model, inputs, True, num_items_in_batch)
        if self.aux_loss_enabled and num_items_in_batch is not None and self.label_smoother is None:
            # the model adds its load-balancing loss once per batch, and Trainer scales it like a sum over tokens
            processes = (
                self.accelerator.num_processes // self.get_tp_size() if self.args.average_tokens_across_devices else 1
            )
            batches = self.current_gradient_accumulation_steps if self.model.training else 1
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss * (1 / batches - processes)
        return (loss, outputs) if return_outputs else loss
