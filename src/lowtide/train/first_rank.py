"""A model that the first rank alone reads before FSDP2 or ZeRO-3 shares it out: others have a form without memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import init_empty_weights
from accelerate.utils import broadcast_object_list

from lowtide.errors import LowtideError
from lowtide.train.parallel import all_read, built_whole, first_reads
from lowtide.train.ranks import is_first_rank


@dataclass(frozen=True)
class Form:
    """What of a model is not its parameters' values.

    Attributes:
        config: of transformers.
        dtypes: of the parameters, by their names.
        buffers: computed from the config as they are, and not a part of what is saved.
    """

    config: Any
    dtypes: dict[str, torch.dtype]
    buffers: dict[str, torch.Tensor]

    @classmethod
    def of(cls, model: Any) -> Form | None:
        """Return a model's, None where its parameters or buffers cannot be handed on.

        Buffers that are saved are not shared out, and accelerate hands on what is; and weights that the config ties and
        the file does not are others than those of a model made by the config.
        """
        dtypes, buffers = {name: p.dtype for name, p in model.named_parameters()}, dict(model.named_buffers())
        if buffers.keys() & model.state_dict().keys():
            return None
        sizes = ({name: p.shape for name, p in one.named_parameters()} for one in (model, _nowhere(model.config)))
        return cls(model.config, dtypes, buffers) if next(sizes) == next(sizes) else None

    def model(self) -> Any:
        """Return such a model with parameters on the CPU that nobody has written: they take no memory until one does.

        On no device ("meta") they would not do: accelerate tells an optimizer's parameters by their addresses.
        """
        model = _nowhere(self.config)
        made = {
            parameter: torch.nn.Parameter(
                torch.empty(parameter.shape, dtype=self.dtypes[name]), requires_grad=parameter.requires_grad
            )
            for name, parameter in model.named_parameters()
        }
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                setattr(module, name, made[parameter])
        for name, value in self.buffers.items():
            owner, _, own = name.rpartition(".")
            model.get_submodule(owner).register_buffer(own, value, persistent=False)
        model.config.dtype = self.config.dtype
        return model


def _nowhere(config: Any) -> Any:
    """Return a model whose parameters are on no device; its buffers are where they belong."""
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False), built_whole():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.tie_weights()  # moved one by one, they were no longer
    return model


def read_by_first(read: Callable[[], Any]) -> Any:
    """Return the model that ``read`` gives: on other ranks than the first one of its form, if weights are shared out.

    Nothing may look at the values of those ranks' parameters: they get their parts of the first rank's by the engine.

    Raises:
        LowtideError: the first rank's ``read`` raised it; on all ranks.
    """
    if not first_reads():
        return read()
    kept: list[Any] = []

    def form() -> Form | None:
        kept.append(read())
        return Form.of(kept[0])

    found = by_first(form)
    if found is None:
        all_read()
        return kept[0] if kept else read()
    return kept[0] if kept else found.model()


def share_out(model: Any, accelerator: Any) -> None:
    """Leave each rank its part of the first rank's parameters, by ZeRO-3, one parameter at a time.

    DeepSpeed itself would first have the whole model on each rank's device.
    """
    import deepspeed

    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
    for parameter in model.parameters():
        if narrow is not None and parameter.is_floating_point():  # as DeepSpeed will have them
            nothing = torch.empty_like(parameter, dtype=narrow)  # on other ranks, which nobody writes
            parameter.data = parameter.data.to(narrow) if is_first_rank() else nothing
    for buffer in model.buffers():
        buffer.data = buffer.data.to(accelerator.device)
    told = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
    settings = {name: value for name, value in told.items() if value != "auto"}
    deepspeed.zero.Init(
        module=model,
        config_dict_or_path={"train_micro_batch_size_per_gpu": 1, "zero_optimization": settings},
        dtype=narrow or torch.float32,
    )


def by_first(do: Callable[[], Any]) -> Any:
    """Return on all ranks what ``do`` returns on the first, which alone does it.

    Raises:
        LowtideError: ``do`` raised it; on all ranks. Any other error is the first rank's alone, and ends it.
    """
    told: list[Any] = [None, None]
    if is_first_rank():
        try:
            told[0] = do()
        except LowtideError as error:
            told[1] = error
    told = broadcast_object_list(told)
    if told[1] is not None:
        raise told[1]
    return told[0]
