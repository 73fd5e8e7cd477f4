"""FSDP2 on several ranks, each with its own data: a patched model and the functional head beside stock ones."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

import lowtide
from distributed.launch import DEVICE, THOROUGH, main
from distributed.models import VOCAB, batch_of, counted, fused, gradients, model_of, qlora, same, same_mean, step
from lowtide.measure.collectives import counted_collectives
from lowtide.models import experts_part, mlp_part
from support import relative_error


def shard(model: Any, how: str, reshard: bool | None, **settings: Any) -> Any:
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **settings)
    if how == "own":
        fully_shard(model.lm_head, mesh=mesh, reshard_after_forward=reshard, **settings)
    elif how == "grouped":
        fully_shard([model.model.norm, model.lm_head], mesh=mesh, reshard_after_forward=reshard, **settings)
    elif how == "tail":  # as accelerate does where the head is tied
        modules = [model.model.norm, model.model.embed_tokens, model.lm_head]
        fully_shard(modules, mesh=mesh, reshard_after_forward=reshard, **settings)
    if "mp_policy" in settings:
        settings["mp_policy"] = replace(settings["mp_policy"], output_dtype=torch.float32)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard if how == "root" else None, **settings)
    return model


@contextmanager
def units_that_end_their_forward() -> Iterator[None]:
    """Fail where FSDP2 believes at the end that some module of a unit has not run: then its hooks are not all there."""
    # torch 2.13 ends such units' forward itself, with the root's; before it warned, behind backward
    name = "_force_complete_incomplete_states"
    name = name if hasattr(FSDPState, name) else "_root_post_backward_final_callback"
    stock = getattr(FSDPState, name)

    def ends(self: Any, *args: Any) -> Any:
        waiting = [state._modules_to_run_forward for state in self._state_ctx.all_states if state is not self]
        assert not any(waiting), waiting
        return stock(self, *args)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(FSDPState, name, ends)
        yield


def counted_step(model: Any, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], Counter[str]]:
    with counted_collectives() as counts, units_that_end_their_forward():
        found = step(model, batch)
    return found, counts


def on_joined_batch(model: Any) -> dict[str, Tensor]:
    batches = [batch_of(rank) for rank in range(dist.get_world_size())]
    return step(model, {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]})


def same_on_joined(got: dict[str, Tensor], joined: dict[str, Tensor]) -> None:
    """Compare a rank's step with one process's on the joined batch, and the mean of the ranks' losses."""
    same_mean(got["loss"], joined["loss"])
    same(got | {"loss": joined["loss"]}, joined)


def patched_models() -> None:
    """Loss and gradients as stock FSDP2's and one process's; no more collectives, and as many in each wrapping."""
    rank = dist.get_rank()
    ways: list[tuple[str, bool | None, Any, str]] = [
        ("root", None, "forward", "llama"),
        ("own", True, "recompute", "gemma2"),
        ("grouped", False, "forward", "gemma2"),
        ("tail", True, "recompute", "llama"),
    ]
    if THOROUGH:
        other = {"forward": "recompute", "recompute": "forward", "llama": "gemma2", "gemma2": "llama"}
        ways += [(how, reshard, other[gradient], other[family]) for how, reshard, gradient, family in reversed(ways)]
    for i, (how, reshard, gradient, family) in enumerate(ways):
        tied = how == "tail" or (how == "root" and reshard is None and gradient == "forward")
        where = f"{family} {how} {reshard} {gradient} {tied}"
        model = model_of(family, tie_word_embeddings=tied)
        joined = on_joined_batch(model)
        stock = shard(copy.deepcopy(model), how, reshard)
        options = lowtide.HeadOptions(gradient=gradient)
        if i % 2 == 0:
            report = lowtide.patch(model, options=options)
            shard(model, how, reshard)
        else:
            shard(model, how, reshard)
            report = lowtide.patch(model, options=options)
        for _ in range(2):  # the second step has FSDP2's buffers and its order of the modules from the first
            want, stock_counts = counted_step(stock, batch_of(rank))
            got, counts = counted_step(model, batch_of(rank))
            same(got, want, where)
            same_on_joined(got, joined)
            assert sum(stock_counts.values()) >= 6, stock_counts
            assert counts <= stock_counts, (where, counts, stock_counts)
        fused(report, 2, what=where)


class Functional(nn.Module):
    """A body and a head, and the loss by a call of the function; ``way``: how it comes by the head's weight."""

    def __init__(self, model: Any, way: str, options: lowtide.HeadOptions | None = None) -> None:
        super().__init__()
        self.model, self.lm_head, self.way, self.options = model.model, model.lm_head, way, options
        if way == "inside":
            self.lm_head = HeadWithLoss(model.lm_head.weight, options)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        hidden = self.model(input_ids=input_ids).last_hidden_state
        if self.way == "stock":
            loss = nn.functional.cross_entropy(
                self.lm_head(hidden)[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
            )
        elif self.way == "inside":
            loss = self.lm_head(hidden, labels)
        else:
            if self.way == "unshard":
                self.lm_head.unshard()
            loss = lowtide.linear_cross_entropy(hidden, self.lm_head.weight, labels, shift=True, options=self.options)
        return Output(loss)


class HeadWithLoss(nn.Module):
    def __init__(self, weight: nn.Parameter, options: lowtide.HeadOptions | None) -> None:
        super().__init__()
        self.weight, self.options = weight, options

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return lowtide.linear_cross_entropy(hidden, self.weight, labels, shift=True, options=self.options)


class Output(NamedTuple):
    loss: Tensor


def functional_head() -> None:
    """The function on the weight of a sharded head, in each place where it may stand."""
    rank = dist.get_rank()
    places = [("root", None, "root"), ("root", True, "root"), ("own", True, "inside"), ("own", False, "inside")]
    places += [("own", True, "unshard"), ("grouped", True, "inside")]
    ways = enumerate(itertools.product(places, ("forward", "recompute")))
    # each on two ranks or, a third, on three, where nothing but the shards' sizes is another
    chosen = [way for i, way in ways if THOROUGH or (i % 3 == 0) == (dist.get_world_size() == 3)]
    for (how, reshard, way), several in itertools.groupby(chosen, lambda way: way[0]):
        model = model_of(tie_word_embeddings=way == "root")
        joined = on_joined_batch(Functional(copy.deepcopy(model), "stock"))
        stock = shard(Functional(copy.deepcopy(model), "stock"), how, reshard)
        of_stock = [counted_step(stock, batch_of(rank)) for _ in range(2)]
        for _, gradient in several:
            options = lowtide.HeadOptions(gradient=gradient)
            ours = shard(Functional(copy.deepcopy(model), way, options), how, reshard)
            for want, stock_counts in of_stock:
                got, counts = counted_step(ours, batch_of(rank))
                same(got, want)
                same_on_joined(got, joined)
                assert counts <= stock_counts, (how, reshard, way, counts, stock_counts)


def a_sharded_weight_is_refused() -> None:
    """With plain hidden states the meaning of a DTensor's shards is ambiguous: an error, and never a wrong gradient."""
    model = shard(Functional(model_of(), "root"), "own", True)
    calls: list[Callable[[Tensor, Tensor], Any]] = [
        lambda x, w: lowtide.linear_cross_entropy(x, w, torch.zeros(3, dtype=torch.long, device=DEVICE)),
        lambda x, w: lowtide.linear_logprobs(x, w, torch.zeros(3, dtype=torch.long, device=DEVICE)),
        lambda x, w: lowtide.linear_token_stats(x, w, want=("entropy",)),
        lambda x, w: lowtide.linear_divergence(x, w, x, w),
        lambda x, w: lowtide.linear_divergence(x, torch.randn(VOCAB, 16, device=DEVICE), x, w),
        lambda x, w: lowtide.linear_apply(lambda z: z.sum(1), x, w),
    ]
    for call in calls:
        with pytest.raises(lowtide.errors.ArgumentTypeError, match=r"_weight: .*unshard.*tensor parallelism"):
            call(torch.randn(3, 16, device=DEVICE), model.lm_head.weight)
    with pytest.raises(lowtide.errors.ArgumentTypeError, match="linear_weight"):
        model(**batch_of(dist.get_rank()))


def mixed_precision() -> None:
    """bfloat16 for compute, float32 for the reduction, as the policy says: no further from float64 than stock is."""
    rank = dist.get_rank()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for how, reshard in (("root", None), ("own", True)):
        model = model_of()
        joined = on_joined_batch(model.double())
        model = model.float()
        stock = shard(copy.deepcopy(model), how, reshard, mp_policy=policy)
        report = lowtide.patch(model, mlp=False, norm=False, rope=False)
        shard(model, how, reshard, mp_policy=policy)
        got, counts = counted_step(model, batch_of(rank))
        want, stock_counts = counted_step(stock, batch_of(rank))
        loss = got.pop("loss")
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, want["loss"], rtol=2e-3, atol=0)
        assert counts <= stock_counts
        assert report.calls_fused == 1
        for name, gradient in got.items():
            assert gradient.dtype == torch.float32
            error, stock_error = relative_error(gradient, joined[name]), relative_error(want[name], joined[name])
            assert error <= 1.3 * stock_error + 1e-3, (name, error, stock_error)


def accumulation() -> None:
    """Three batches a step, reduced with the last one alone: no step's gradient is lost or counted twice."""
    rank = dist.get_rank()
    for gradient in ("forward", "recompute"):
        model = model_of()
        alone = copy.deepcopy(model)
        lowtide.patch(model, options=lowtide.HeadOptions(gradient=gradient))
        shard(model, "own", True)
        for _ in range(2):
            for k in range(3):
                model.set_requires_gradient_sync(k == 2)
                model(**{name: x.roll(k, 1) for name, x in batch_of(rank).items()}).loss.backward()
            got = gradients(model)
            want = {name: torch.zeros_like(p) for name, p in alone.named_parameters()}
            for r, k in itertools.product(range(dist.get_world_size()), range(3)):
                found = step(alone, {name: x.roll(k, 1) for name, x in batch_of(r).items()})
                for name in want:
                    want[name] += found[name] / dist.get_world_size()
            same(got, want)


def policies() -> None:
    """Patched MLPs, norms and rotations at both checkpoint levels, with a policy around the layers."""
    rank = dist.get_rank()
    for keep, level in (("attention", 1), ("input", 0)):
        model = model_of(tie_word_embeddings=True)
        joined = on_joined_batch(model)
        report = lowtide.patch(model)
        policy = lowtide.memory.ActivationPolicy(keep=keep, mlp_level=level)
        lowtide.memory.apply_policy(model, policy)
        shard(model, "root", None)
        for _ in range(2):
            same_on_joined(counted_step(model, batch_of(rank))[0], joined)
        fused(report, 2)
        assert all(row.patched for row in report.parts.values()), str(report)


def experts_in_units_of_their_own() -> None:
    """Experts that FSDP2 shards apart from their layers, patched before that and after it, at both levels."""

    def cut(model: Any) -> None:
        for layer in model.model.layers:
            fully_shard(layer.mlp.experts)
        shard(model, "root", None)

    batch = batch_of(dist.get_rank())
    for first, level in ((False, 0), (True, 1)):
        model = model_of("qwen3_moe")
        stock = copy.deepcopy(model)
        cut(stock)
        for change in (lowtide.patch, cut) if first else (cut, lowtide.patch):
            change(model)
        for layer in model.model.layers:
            layer.mlp.experts.checkpoint_level = level
        with counted(experts_part, "experts_mlp") as calls:
            for _ in range(2):
                same(step(model, batch), step(stock, batch), (first, level))
        assert calls == [4], f"{first} {level}"


def weights_in_4_bits() -> None:
    """QLoRA: MLPs and head run fused over whole weights that FSDP2 gathers, patched before or after it shards them."""
    if (model := qlora(skip=())) is None:
        return
    stock = copy.deepcopy(model)
    shard(stock.base_model.model, "root", None)
    for level, first in ((0, True), (1, False)):
        ours = copy.deepcopy(model)
        if first:
            lowtide.patch(ours)
        shard(ours.base_model.model, "root", None)
        report = lowtide.patch(ours)
        assert report.parts["mlp"].patched, str(report)
        for layer in ours.base_model.model.model.layers:
            layer.mlp.checkpoint_level = level
        with counted(mlp_part, "adapted_mlp") as calls:
            for _ in range(2):
                got, want = (step(one, batch_of(dist.get_rank())) for one in (ours, stock))
                same(got, want)
        assert calls == [4]
        fused(report, 2)


if __name__ == "__main__":
    main(vars())
