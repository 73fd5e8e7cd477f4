"""What a resumed run is told of its optimizer now, in place of what its checkpoint says."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback

from lowtide.train.parallel import uses_deepspeed


class RatesAsGiven(TrainerCallback):  # type: ignore[misc]
    """Gives a resumed run's optimizer the learning rate, weight decay, betas and epsilon that it was given.

    A checkpoint of an optimizer has them, and of a schedule its peak: loaded, they would stand against what the user
    says now, in silence. Those of a run that is given nothing new are the same numbers as before. The rate of the first
    step is the schedule's, which may be a longer one now.
    """

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, optimizer: Any, lr_scheduler: Any = None, **_: Any
    ) -> None:
        """Put them into the optimizer's groups of parameters."""
        del control
        if state.global_step == 0 or uses_deepspeed():  # whose engine has an optimizer of its own
            return
        groups = optimizer.param_groups
        own = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
        for group in groups:
            group.update({name: value for name, value in own.items() if _is_number_like(group.get(name), value)})
        if "weight_decay" in groups[0]:
            groups[0]["weight_decay"] = args.weight_decay  # Trainer's first group decays, its second one does not
        inner = getattr(lr_scheduler, "scheduler", lr_scheduler)  # accelerate's wrapper
        if isinstance(inner, LambdaLR) and all("initial_lr" in group for group in groups):
            inner.base_lrs = [args.learning_rate] * len(groups)
            rates = [args.learning_rate * of(inner.last_epoch) for of in inner.lr_lambdas]
            for group, rate in zip(groups, rates, strict=True):
                group["initial_lr"], group["lr"] = args.learning_rate, rate
            inner._last_lr = rates


def _is_number_like(found: Any, value: Any) -> bool:
    """Return whether a group has a value of that kind: Adafactor's epsilon is two, SGD has none."""
    if isinstance(value, tuple):  # a checkpoint's is a list
        return isinstance(found, tuple | list) and len(found) == len(value)
    return isinstance(found, float)
