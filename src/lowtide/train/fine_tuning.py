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
    loss; the other arguments are SFTTrainer's.
    """

    def __init__(self, *, stock: bool = False, **kwargs: Any) -> None:
        self._stock = stock
        super().__init__(**kwargs)
        for module in self.model.modules():  # TRL changes the config alone, which many models have read by then
            if hasattr(module, "router_aux_loss_coef"):
                module.router_aux_loss_coef = self.router_aux_loss_coef

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
            processes = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
            batches = self.current_gradient_accumulation_steps if self.model.training else 1
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss * (1 / batches - processes)
        return (loss, outputs) if return_outputs else loss
