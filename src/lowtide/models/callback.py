"""`lowtide.PatchCallback`: the one line that puts `lowtide.patch`, and a budget of memory, into a Trainer."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import TrainerCallback

from lowtide.arguments import check_flag
from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError, message
from lowtide.head.options import HeadOptions, check_options
from lowtide.models.budget import Budget
from lowtide.models.parts import check_fuse
from lowtide.models.patch import patch, unpatch
from lowtide.models.report import PatchReport
from lowtide.plan import MemoryPlan
from lowtide.trl.patch import TrlReport, patch_trl, unpatch_trl

_MADE_LATER = (
    "lowtide: the trainer has made another model for this run (model_init), which is patched now, after accelerate "
    "prepared it. Call lowtide.patch(model) in model_init for what this leaves out."
)


class PatchCallback(TrainerCallback):  # type: ignore[misc]
    """Patches the model of a ``transformers.Trainer``, or of one of TRL's trainers, when the trainer is made.

    That is after the trainer has moved its model and wrapped it with peft, and before DDP, FSDP, DeepSpeed or
    ``torch.compile`` wrap it, which is when `lowtide.patch` has to come. A trainer whose settings are TRL's gets
    `lowtide.patch_trl` as well, for TRL's trainers take their losses from functions of TRL's own; that one holds for
    the whole process. A trainer that is given ``model_init`` makes a new model for each run, and prepares it before a
    callback sees it: call `lowtide.patch` in that function, or with mixed precision the loss stays as it is.

    Args:
        loss: As `lowtide.patch` has it.
        mlp: The same.
        norm: The same.
        rope: The same.
        fuse: The same.
        trl: Whether to call `lowtide.patch_trl` too. None: where the trainer's settings are TRL's, and TRL is of a
            version that lowtide supports; else the reason is shown.
        options: How the losses are to run, for both.
        unpatch: Whether to undo all of it when training ends.
        show: What is called with the report's text, in the main process alone, once a model and, with the number of
            losses without logits and with, when training ends: ``print``, a logger's ``info``, or None for nothing.
        memory_budget: GPU memory for the tensors of a step, such as ``"24GiB"``, or ``"auto"``: 92% of what is free.
            `lowtide.plan.plan_memory` then chooses what each layer saves for backward, for the batch of the
            trainer's arguments, so that the step is the fastest that fits. ``gradient_checkpointing`` is turned off.
        host_budget: Pinned host memory, of each process, that layers and optimizer states may be offloaded into.
        length: The most tokens of a sequence. None: the arguments' ``max_length`` (SFT, DPO), or on one process, by the
            dataset's first 1,000 rows, the longest prompt plus a completion (GRPO) or the longest ``input_ids``.

    Attributes:
        report: What `lowtide.patch` returned; None before a trainer was made. Its counts are live.
        trl_report: What `lowtide.patch_trl` returned; None where it was not called.

    Raises:
        ArgumentTypeError: An argument of another type.
        ArgumentValueError: A budget that is no size; when the trainer is made: nothing fits, or no length is known.

    Example:
        >>> trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[lowtide.PatchCallback()])
        >>> trainer.train()
    """

    def __init__(
        self,
        *,
        loss: bool = True,
        mlp: bool = True,
        norm: bool = True,
        rope: bool = True,
        fuse: tuple[type[nn.Module], ...] = (),
        trl: bool | None = None,
        options: HeadOptions | None = None,
        unpatch: bool = False,
        show: Callable[[str], Any] | None = print,
        memory_budget: str | None = None,
        host_budget: str | None = None,
        length: int | None = None,
    ) -> None:
        self._parts = {"loss": loss, "mlp": mlp, "norm": norm, "rope": rope}
        for name, flag in {**self._parts, "unpatch": unpatch}.items():
            check_flag(name, flag)
        if trl is not None:
            check_flag("trl", trl)
        if show is not None and not callable(show):
            raise ArgumentTypeError(message("show", "a function of a text, or None", f"{show!r}"))
        check_fuse(fuse)
        check_options(options)
        if memory_budget is None and host_budget is not None:
            raise ArgumentValueError(message("host_budget", "a memory_budget beside it", repr(host_budget)))
        self._budget = None if memory_budget is None else Budget(memory_budget, host_budget, length)
        self._fuse, self._trl, self._options, self._unpatch, self._show = fuse, trl, options, unpatch, show
        self._undone = False
        self._model: weakref.ref[nn.Module] | None = None
        self.report: PatchReport | None = None
        self.trl_report: TrlReport | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Patch the trainer's model, and show the report."""
        texts = [self._patch(kwargs["model"])]
        of_trl = any(kind.__module__.split(".")[0] == "trl" for kind in type(args).__mro__)
        if self._trl or (self._trl is None and of_trl):
            try:
                self.trl_report = patch_trl(options=self._options)
            except UnsupportedError as error:
                if self._trl:
                    raise
                texts.append(f"TRL left as it is: {error}")
            else:
                texts.append(str(self.trl_report))
        if self._budget is not None and (lines := self._budget.apply(kwargs["model"], args)):
            texts.append(lines)
        self._report(state, *texts)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Patch the model if it is not the one that is patched, nor that one wrapped, and plan what had to wait."""
        if self._undone:
            self._undone = False
            self.on_init_end(args, state, control, **kwargs)
        else:
            before = self._model() if self._model is not None else None
            if not any(module is before for module in kwargs["model"].modules()):
                self._report(state, self._patch(kwargs["model"]), _MADE_LATER)
        if self._budget is not None:
            self._plan_late(args, state, **kwargs)

    def _plan_late(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Plan by the dataset, where the arguments have no length, and offload the optimizer's states."""
        assert self._budget is not None
        if self._budget.plan is None:
            data = getattr(kwargs.get("train_dataloader"), "dataset", None) if args.world_size == 1 else None
            lines = self._budget.apply(kwargs["model"], args, data, kwargs.get("processing_class"))
            if lines is None:
                hint = "Pass PatchCallback(..., length=N)."
                raise ArgumentValueError(message("length", "the most tokens of a sequence", "None", hint))
            self._report(state, lines)
        self._budget.offload_states(kwargs["model"], args, kwargs["optimizer"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Show how many losses were computed without logits, and undo the patch, if ``unpatch``."""
        if self.report is not None:
            self._report(state, "losses   {:,} without logits, {:,} with".format(*self.counts()))
        if not self._unpatch:
            return
        model = self._model() if self._model is not None else None
        try:
            unpatch(kwargs["model"] if model is None else model)
        except UnsupportedError as error:  # FSDP2 has changed its class since: no reason to end in an error
            self._report(state, f"left patched: {error}")
        else:
            self._undone = True
        if self.trl_report is not None:
            unpatch_trl()

    @property
    def plan(self) -> MemoryPlan | None:
        """What the budget's plan is; None without one."""
        return None if self._budget is None else self._budget.plan

    def counts(self) -> tuple[int, int]:
        """Return how many losses were computed without logits, and with, by the model and by TRL's trainers."""
        report, trl = self.report, self.trl_report
        fused = 0 if report is None else report.calls_fused
        built = 0 if report is None else report.calls_materialised
        if trl is not None:
            fused, built = fused + sum(trl.calls_lowtide.values()), built + sum(trl.calls_trl.values())
        return fused, built

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_model": None}  # a copy is another trainer's, which patches its own

    def _patch(self, model: nn.Module) -> str:
        self.report = patch(model, **self._parts, fuse=self._fuse, options=self._options)
        self._model = weakref.ref(model)
        return str(self.report)

    def _report(self, state: Any, *texts: str) -> None:
        if self._show is not None and state.is_world_process_zero:
            self._show("\n".join(texts))
