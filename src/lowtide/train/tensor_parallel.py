"""Tensor parallelism: groups of processes share each layer by transformers' plan, and FSDP2 shards over the groups.

The two are the axes of one mesh. FSDP2 prepares the model also where all processes are one group, so that weights,
clipping and checkpoints are handled in one way.
"""

from __future__ import annotations

import inspect
from typing import Any

from lowtide.errors import ArgumentValueError, UnsupportedError, message
from lowtide.train.files import why

_NAME = "tensor_parallel"
_HEADS = ("num_attention_heads", "num_key_value_heads")


def mesh_sizes(tensor_parallel: int, processes: int) -> Any:
    """Return accelerate's sizes of a mesh for so many processes, ``tensor_parallel`` of them a group; None for 1."""
    if tensor_parallel == 1:
        return None
    from accelerate import ParallelismConfig

    class Sizes(ParallelismConfig):  # type: ignore[misc]
        dp_shard_enabled = True  # FSDP2 has an axis of the mesh also if its length is 1
        fsdp_dim_names = ("dp_shard",)  # that axis, which is not joined with context parallelism

    return Sizes(tp_size=tensor_parallel, dp_shard_size=processes // tensor_parallel)


def shard_layers(model: Any, sizes: Any, device_type: str) -> None:
    """Shard the layers of a model, which is whole and the same on every process, in place.

    Raises:
        ArgumentValueError: its heads or features cannot be divided by the number of processes.
        UnsupportedError: transformers has no plan for the model, or is too old.
    """
    import torch

    try:
        from transformers import DistributedConfig
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    except ImportError as error:
        hint = "pip install --upgrade transformers"
        raise UnsupportedError(message(_NAME, "transformers 5.17 or later", why(error), hint)) from error

    ranks, config = sizes.tp_size, model.config.get_text_config()
    if not model.tp_plan:
        hint = "Leave --tensor-parallel out."
        raise UnsupportedError(message(_NAME, "a model with a plan in transformers", type(model).__name__, hint))
    for name in _HEADS:
        if (heads := getattr(config, name, None) or ranks) % ranks:
            hint = "Give a smaller --tensor-parallel."
            raise ArgumentValueError(message(_NAME, f"a divisor of the model's {heads} {name}", ranks, hint))
    for name in getattr(model, "all_tied_weights_keys", None) or ():  # each is sharded by its own module's style
        owner, _, kind = name.rpartition(".")
        setattr(model.get_submodule(owner), kind, torch.nn.Parameter(model.get_parameter(name).data))
    mesh = sizes.get_device_mesh(device_type)["tp"]
    arguments = [mesh]
    if "tp_plan" in inspect.signature(apply_tensor_parallelism).parameters:
        arguments.append(model._resolve_parallel_plans(DistributedConfig(tp_size=ranks))[0])
    else:  # transformers 5.17 reads the model's, which leaves an embedding whole unless it is tied
        embedding = model.get_input_embeddings()
        if isinstance(embedding, torch.nn.Embedding):
            name = next(name for name, module in model.named_modules() if module is embedding)
            model.tp_plan = {name: "embedding_rowwise", **model.tp_plan}
    try:
        apply_tensor_parallelism(model, *arguments)
    except (ValueError, NotImplementedError) as error:
        expected = f"a model that transformers can shard among {ranks}"
        raise ArgumentValueError(message(_NAME, expected, why(error))) from error
    model.tie_weights()


def share_layers(accelerator: Any, sizes: Any) -> None:
    """Give accelerate the mesh on which `shard_layers` has sharded a model, before it prepares the model for FSDP2."""
    # as an argument accelerate would refuse it on CPUs, and where FSDP2 has one group to shard over
    accelerator.state.parallelism_config = sizes
    accelerator.state.device_mesh = sizes.get_device_mesh(accelerator.device.type)
    # which would make DTensors of the weights that all ranks have, by a style that transformers no longer has
    accelerator._prepare_tp = lambda *args: args


def gather_once(accelerator: Any, tensor: Any) -> Any:
    """Return what the first process of each group has of a batch to evaluate, without the rows that fill the last one.

    ``accelerator.gather_for_metrics`` cuts off those rows as if each process had read a batch of its own.
    """
    state, gradients = accelerator.state, accelerator.gradient_state
    by_rank = accelerator.gather(tensor).unflatten(0, (state.num_processes, -1))
    gathered = by_rank[:: state.parallelism_config.tp_size].flatten(0, 1)
    return gathered[: gradients.remainder] if gradients.end_of_dataloader and gradients.remainder > 0 else gathered


def share_random_state(accelerator: Any) -> None:
    """Let all processes of a group draw the numbers of its first: dropout has one mask for what each of them has whole.

    A checkpoint of another engine, or of other groups, has other states for them.
    """
    import torch

    generators = [torch, torch.cuda] if accelerator.device.type == "cuda" else [torch]
    states = [one.get_rng_state() for one in generators]
    group = accelerator.state.device_mesh["tp"].get_group()
    torch.distributed.broadcast_object_list(states, group=group, group_src=0)
    for one, state in zip(generators, states, strict=True):
        one.set_rng_state(state)


def join_groups(groups: list[dict[str, Any]], decays: dict[Any, bool]) -> None:
    """Join an optimizer's groups of parameters to those with and without weight decay, in the model's order.

    transformers 5.23 makes one for each mesh of these. Another number of processes has other meshes, and could not load
    the optimizer's states.
    """
    if len(groups) <= 2:
        return
    joined = []
    for kind in (True, False):
        if parts := [group for group in groups if decays[group["params"][0]] == kind]:
            members = {parameter for group in parts for parameter in group["params"]}
            joined.append({**parts[0], "params": [parameter for parameter in decays if parameter in members]})
    groups[:] = joined
