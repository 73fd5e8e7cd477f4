"""`transformers.Trainer` with streamed blocks and checkpoints that are whole or not there; its loop is its own."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from lowtide.errors import ArgumentValueError, did_you_mean, message
from lowtide.train import checkpoints, states
from lowtide.train.checkpoints import SCHEDULER
from lowtide.train.config import TrainConfig
from lowtide.train.ending import is_lost_rank
from lowtide.train.first_rank import by_first, share_out
from lowtide.train.packing import Batches, PackedBlocks, nothing_predicted
from lowtide.train.parallel import check_precision, first_reads, settle, uses_zero3
from lowtide.train.positions import write_positions
from lowtide.train.ranks import Shares
from lowtide.train.rates import Rates
from lowtide.train.stopping import best_step
from lowtide.train.streams import IGNORED, Block

# What ``trainer_args`` may override: the usual choices for language models where Trainer has others.
_USUAL = {
    "lr_scheduler_type": "cosine",
    "adam_beta2": 0.95,
    # To find unused parameters, DDP looks into the model's outputs: that would build the logits.
    "ddp_find_unused_parameters": False,
}


class LowtideTrainer(Trainer):  # type: ignore[misc]
    """A `Trainer` whose training data is `PackedBlocks`.

    It leaves the loop, the optimizer, mixed precision and every kind of sharding to Trainer, and changes three things:
    blocks reach each rank as that rank packed them (accelerate would have every rank pack everything); a checkpoint is
    written aside with the data's position in it and renamed when it is whole; and every loss is a mean over tokens,
    whatever the model's loss takes as its denominator, of all batches and ranks of a step, or of all held-out text.

    Args:
        blocks: this rank's.
        shares: how they are dealt to ranks and batches.
        keep_best: the checkpoint of the lowest held-out loss is never removed.
        args: Trainer's own.
        eval_dataset: held-out blocks.
        kwargs: Trainer's own.
    """

    def __init__(
        self,
        *,
        blocks: PackedBlocks,
        shares: Shares,
        args: TrainingArguments,
        eval_dataset: Sequence[Block],
        keep_best: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(args=args, eval_dataset=_evenly(eval_dataset, args), **kwargs)
        self.remove_callback(PrinterCallback)
        self._saving, self._keep_best = False, keep_best
        self._blocks, self._shares = blocks, shares
        self._held_out_mean = sum(_targets(row["labels"]) for row in self.eval_dataset) / len(self.eval_dataset)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, and see to it that it takes the engine that was asked for."""
        super().create_accelerator_and_postprocess()
        settle(self.accelerator)
        self.is_fsdp_enabled = getattr(self.accelerator.state, "fsdp_plugin", None) is not None

    def train(self, resume_from_checkpoint: str | None = None, **kwargs: Any) -> Any:
        """Train, from a checkpoint where one is given."""
        if resume_from_checkpoint is not None and self.is_fsdp_enabled:
            # the stock format, read while the model is whole: any engine goes on from any other's checkpoint
            self.is_fsdp_enabled = False
            if first_reads():
                by_first(lambda: self._load_from_checkpoint(resume_from_checkpoint))
            else:
                self._load_from_checkpoint(resume_from_checkpoint)
            self.is_fsdp_enabled = True
        if uses_zero3():
            share_out(self.model, self.accelerator)
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the loader of this rank's blocks: no workers and nothing fetched ahead, so its position is exact."""
        return DataLoader(
            Batches(self._blocks, self._shares.sizes, nothing_predicted(self.eval_dataset[0])),
            batch_size=None,  # they come as batches
            collate_fn=self.data_collator,
            pin_memory=self.args.device.type == "cuda",
            # its iterator draws a number: from the global generator, whose state a resume has just restored for dropout
            generator=torch.Generator(),
        )

    def conversations(self) -> tuple[int, int, int]:
        """Return how many conversations all ranks have read, and how many of them were cut and left out."""
        counts = torch.tensor(self._blocks.counts(), device=self.args.device)
        seen, cut, left_out = self.accelerator.reduce(counts).tolist()
        return seen, cut, left_out

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return a batch's share of the mean over all tokens of the step.

        Trainer hands the step's tokens to models that take them. The loss of one that does not is the mean over the
        batch, which is weighted here with the tokens it has.
        """
        if self.model_accepts_loss_kwargs or num_items_in_batch is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss, outputs = super().compute_loss(model, inputs, True, None)
        tokens = _targets(inputs["labels"])
        loss = torch.where(tokens > 0, loss, 0.0) * tokens / num_items_in_batch
        if self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes
        if hasattr(self, "loss_is_scaled_for_ga"):
            self.loss_is_scaled_for_ga = True
        else:  # an older Trainer divides such a loss by the number of batches, whatever is in them
            loss = loss * self.current_gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Return a step's batches and how many tokens of all ranks are predicted in them."""
        batches = [next(epoch_iterator) for _ in range(num_batches)]
        count = torch.stack([_targets(batch["labels"]) for batch in batches]).sum().to(device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            count = self.accelerator.gather(count).sum()
        return batches, count

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[torch.Tensor, None, None]:
        """Return a held-out batch's loss such that Trainer's mean over rows is the mean over tokens."""
        del prediction_loss_only, ignore_keys
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = model(**inputs)["loss"].detach()
        tokens = _targets(inputs["labels"])
        weight = tokens / (self._held_out_mean * len(inputs["labels"]))
        return torch.where(tokens > 0, loss, 0.0) * weight, None, None

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model in the stock format, from the first rank, also where all have but a part of it."""
        if not self.is_fsdp_enabled:
            super().save_model(output_dir, _internal_call)
            return
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.model, options=whole)  # on the first rank; empty on the others
        if self.args.should_save:  # an older Trainer's _save lets every rank write
            self._save(output_dir, state_dict=state)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is not None:  # gathered: a tied weight is there under each of its names, and would be saved twice
            parameters = self.model.named_parameters(remove_duplicate=False)
            names = {id(parameter): name for name, parameter in reversed(list(parameters))}
            tied = {name for name, p in self.model.named_parameters(remove_duplicate=False) if names[id(p)] != name}
            state_dict = {name: value for name, value in state_dict.items() if name not in tied}
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_fsdp_enabled:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        states.save_parts(Path(output_dir), self.model, self.optimizer)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self.is_fsdp_enabled:  # else it was read before the model was shared out
            with checkpoints.reading(resume_from_checkpoint):
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        rates = None if self.is_deepspeed_enabled else Rates.of(self.optimizer, self.lr_scheduler)
        with checkpoints.reading(checkpoint):
            in_parts = self.is_fsdp_enabled or (Path(checkpoint) / states.PARTS).is_dir()
            if not in_parts or self.is_deepspeed_enabled:
                super()._load_optimizer_and_scheduler(checkpoint)
            else:
                states.load_optimizer(Path(checkpoint), self.model, self.optimizer)
                self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))
        if rates is not None:  # DeepSpeed has loaded an optimizer of its own by now
            rates.restore(self.optimizer, self.lr_scheduler)

    def _load_scaler(self, checkpoint: str | None) -> None:
        with checkpoints.reading(checkpoint):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with checkpoints.reading(checkpoint):
            super()._load_rng_state(checkpoint)

    def _get_output_dir(self, trial: Any) -> str:
        output = super()._get_output_dir(trial)
        return str(Path(output) / checkpoints.STAGING) if self._saving else output

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint aside, add the data's position, rename it, and remove old ones."""
        final = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        staged = Path(self.args.output_dir) / checkpoints.STAGING / final.name
        try:
            if self.args.should_save:
                checkpoints.clear_staging(final.parent)
            self.accelerator.wait_for_everyone()
            self._saving = True
            super()._save_checkpoint(model, trial)
            write_positions(staged, self._blocks, self._shares)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                checkpoints.publish(staged, final)
                best = best_step(self.state.log_history) if self._keep_best else None
                checkpoints.remove_old(final.parent, self.args.save_total_limit, best)
            self.accelerator.wait_for_everyone()
        except (Exception, CheckpointException) as error:
            if is_lost_rank(error):
                raise
            shutil.rmtree(staged, ignore_errors=True)
            if not checkpoints.is_not_written(error):
                raise
            raise checkpoints.save_error(final, error) from error
        finally:
            self._saving = False

    def save_whole_model(self) -> Path:
        """Write the model and its tokenizer in the stock format, whole or not at all, and return where.

        Raises:
            SaveError: they could not be written.
        """
        final = Path(self.args.output_dir) / checkpoints.MODEL
        staged = final.parent / checkpoints.STAGING / checkpoints.MODEL
        try:
            self.save_model(str(staged), _internal_call=True)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                checkpoints.publish(staged, final)
                checkpoints.clear_staging(final.parent)
        except Exception as error:
            if is_lost_rank(error):
                raise
            shutil.rmtree(staged, ignore_errors=True)
            if not checkpoints.is_not_written(error):
                raise
            raise checkpoints.save_error(final, error) from error
        return final


def _evenly(blocks: Sequence[Block], args: TrainingArguments) -> list[Block]:
    """Return held-out blocks in batches that are full on every rank: accelerate would take the first ones again.

    What is added has nothing to predict. One process takes them as they are.
    """
    missing = -len(blocks) % (args.world_size * args.per_device_eval_batch_size) if args.world_size > 1 else 0
    return [*blocks, *[nothing_predicted(blocks[0])] * missing]


def _targets(labels: torch.Tensor) -> torch.Tensor:
    """Return how many tokens are predicted: the first of a row has nothing before it."""
    return labels[..., 1:].ne(IGNORED).sum()


class Collate:
    """Makes a batch of blocks; for flash attention with the bounds of its documents, which it takes in place of a mask.

    Args:
        bounds: whether to add ``cu_seq_lens_q`` and ``_k`` (int32, over all rows joined) and ``max_length_q`` and
            ``_k``: known here without asking the GPU.
    """

    def __init__(self, *, bounds: bool) -> None:
        self._bounds = bounds

    def __call__(self, blocks: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
        """Return the blocks stacked."""
        batch: dict[str, Any] = {name: torch.stack([block[name] for block in blocks]) for name in blocks[0]}
        if self._bounds:
            places = batch["position_ids"].flatten()
            starts = (places == 0).nonzero().flatten()
            ends = torch.cat([starts, torch.tensor([len(places)])]).int()
            longest = int(ends.diff().max())
            batch |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
            batch |= {"max_length_q": longest, "max_length_k": longest}
        return batch


def training_arguments(
    config: TrainConfig, output: Path, *, save: bool, resuming: bool, batches: int = 1
) -> TrainingArguments:
    """Return Trainer's arguments for a run.

    Args:
        config: the run's settings.
        output: its folder.
        save: write checkpoints.
        resuming: the run goes on from a checkpoint.
        batches: of this rank, in the place of each that the run's settings have.

    Raises:
        ArgumentValueError: one of ``trainer_args`` is unknown or unusable, or the machine lacks the dtype.
    """
    own: dict[str, Any] = {
        "output_dir": str(output),
        "max_steps": config.max_steps,
        "per_device_train_batch_size": config.batch_size,
        "per_device_eval_batch_size": config.batch_size,
        "gradient_accumulation_steps": config.grad_accum * batches,
        "learning_rate": config.lr,
        "warmup_steps": config.warmup_steps,
        "seed": config.seed,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,  # a NaN shows as a NaN
        "save_strategy": "steps" if save else "no",
        "save_steps": config.save_every or config.max_steps,
        "save_total_limit": config.keep,
        "eval_strategy": "steps" if config.eval_every else "no",
        "eval_steps": config.eval_every or None,
        "eval_on_start": not resuming,
        "ignore_data_skip": True,  # the streams begin where the checkpoint says
        "disable_tqdm": True,
        "log_on_each_node": False,  # the first rank speaks, not the first of each machine
        "report_to": "none",
        "use_cpu": not torch.accelerator.is_available(),  # else bfloat16 is refused where there is no GPU
        "push_to_hub": False,
        "dataloader_pin_memory": False,
        _checkpointing_name(): config.gradient_checkpointing,
    }
    extra = _trainer_args(config.trainer_args, set(own))
    own |= _precision(config)
    check_precision(bf16=own["bf16"], fp16=own["fp16"])
    try:
        args = TrainingArguments(**{**_USUAL, **own, **extra})
    except (TypeError, ValueError, ImportError, RuntimeError) as error:
        why = " ".join(str(error).split())[:300]
        raise ArgumentValueError(message("trainer_args", "arguments TrainingArguments accepts", why)) from error
    if args.n_gpu > 1:  # nn.DataParallel would copy the model at each step; several GPUs are torchrun's to start
        args._n_gpu = 1
    return args


def _precision(config: TrainConfig) -> dict[str, bool]:
    """Return the mixed-precision arguments for the run's dtype on this machine."""
    on_gpu = torch.cuda.is_available()
    dtype = product_dtype(config)
    if config.weights == "bfloat16" and not config.lora_rank:
        return {"bf16": False, "fp16": False}  # all is bfloat16 as it is; adapters are float32 and want autocast
    if dtype == "float16" and not on_gpu:
        hint = "Take bfloat16 or float32 on a CPU."
        raise ArgumentValueError(message("dtype", "float16 on a GPU only", "float16 without one", hint))
    return {"bf16": dtype == "bfloat16", "fp16": dtype == "float16"}


def product_dtype(config: TrainConfig) -> str:
    """Return the dtype that a run's products have on this machine."""
    if config.weights == "bfloat16":
        return "bfloat16"
    if config.dtype != "auto":
        return config.dtype
    return "bfloat16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float32"


def _checkpointing_name() -> str:
    """Return what this version of transformers calls gradient checkpointing."""
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    return "activation_checkpointing" if "activation_checkpointing" in names else "gradient_checkpointing"


# What Trainer would take and this trainer not heed, or worse.
_REFUSED = {
    "label_smoothing_factor": "Trainer's label smoothing takes the labels away and builds the logits.",
    "save_only_model": "A run could not be resumed without its optimizer.",
    "resume_from_checkpoint": "Use --resume.",
    "auto_find_batch_size": "The data is laid out for --batch-size.",
    "dataloader_num_workers": "Blocks are packed in the process, so that a checkpoint knows where they were.",
    "data_seed": "Use --seed.",
    "use_cache": "A cache has no use in training, and with one packed documents see each other.",
    "average_tokens_across_devices": "A step's loss is the mean over the tokens of all ranks.",
    "metric_for_best_model": "Use --early-stop, which knows the held-out loss alone.",
    "load_best_model_at_end": "Use --early-stop.",
    "fsdp": "Use --parallel fsdp2, or accelerate launch with a configuration of your own.",
    "fsdp_config": "Give accelerate launch a configuration of your own.",
    "deepspeed": "Use --parallel zero2 or zero3, or accelerate launch with a configuration of your own.",
}


def _trainer_args(pairs: tuple[str, ...], own: set[str]) -> dict[str, Any]:
    """Return KEY=VALUE pairs as arguments; values are read as JSON where they are it, else as text."""
    known = {field.name: field for field in dataclasses.fields(TrainingArguments) if field.init}
    extra: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key not in known:
            expected = "KEY=VALUE with a key of TrainingArguments"
            raise ArgumentValueError(message("trainer_args", expected, repr(pair), did_you_mean(key, known)))
        if key in own or key in ("bf16", "fp16"):
            hint = "`lowtide train --help` lists lowtide's own options."
            raise ArgumentValueError(message("trainer_args", "a key that no option of lowtide sets", repr(key), hint))
        if key in _REFUSED:
            raise ArgumentValueError(message("trainer_args", "a key that works here", repr(key), _REFUSED[key]))
        try:
            extra[key] = json.loads(value)
        except ValueError:
            extra[key] = value
        if isinstance(extra[key], str) and isinstance(known[key].default, int | float):
            raise ArgumentValueError(message("trainer_args", f"a number for {key}", repr(value)))
    return extra
