"""FSDP2 on several ranks, each with its own data: a patched model and the functional head beside stock ones."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import lowtide
from distributed.collectives import counted_collectives
from distributed.launch import DEVICE, THOROUGH, main
from distributed.models import (
    VOCAB,
    Functional,
    batch_of,
    fused,
    gradients,
    model_of,
    near,
    qlora,
    same,
    same_mean,
    step,
)
from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from lowtide.memory import ActivationPolicy, apply_policy, copies
from memory.models import LazySide


def shard(model: Any, how: str = "root", reshard: bool | None = None, mesh: Any = None, **settings: Any) -> Any:
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),)) if mesh is None else mesh
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **settings)
    units = {  # "tail": as accelerate does where the head is tied
        "own": model.lm_head,
        "grouped": [model.model.norm, model.lm_head],
        "tail": [model.model.norm, model.model.embed_tokens, model.lm_head],
    }
    if how in units:
        fully_shard(units[how], mesh=mesh, reshard_after_forward=reshard, **settings)
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


def on_joined_batch(model: Any, streams: int) -> dict[str, Tensor]:
    batches = [batch_of(stream) for stream in range(streams)]
    return step(model, {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]})


def compare(ours: Any, stock: Any, joined: dict[str, Tensor], where: object) -> None:
    """Loss and gradients of two steps as stock FSDP2's and one process's, by no more collectives.

    The second step has FSDP2's buffers and its order of the modules from the first.
    """
    for _ in range(2):
        want, stock_counts = counted_step(stock, batch_of(dist.get_rank()))
        got, counts = counted_step(ours, batch_of(dist.get_rank()))
        same(got, want, where)
        same_mean(got["loss"], joined["loss"])
        same(got | {"loss": joined["loss"]}, joined, where)
        assert sum(stock_counts.values()) >= 5, stock_counts
        assert counts <= stock_counts, (where, counts, stock_counts)


def patched_models() -> None:
    """A head in the root's unit, its own, one with the norm, and one with norm and embedding; patched before, after."""
    ways: list[tuple[str, bool | None, Any, str]] = [
        ("root", None, "forward", "llama"),
        ("own", True, "recompute", "gemma2"),
        ("grouped", False, "forward", "gemma2"),
        ("tail", True, "recompute", "llama"),
    ]
    for i, (how, reshard, gradient, family) in enumerate(ways):
        model = model_of(family, tie_word_embeddings=how in ("tail", "root"), num_hidden_layers=2)
        joined = on_joined_batch(model, dist.get_world_size())
        stock = shard(copy.deepcopy(model), how, reshard)
        options = lowtide.HeadOptions(gradient=gradient)
        report = lowtide.patch(model, options=options) if i % 2 == 0 else None
        shard(model, how, reshard)
        report = report or lowtide.patch(model, options=options)
        compare(model, stock, joined, (how, family))
        fused(report, 2, what=how)


def scores() -> None:
    """Log-probabilities from a call without labels: as stock's, and the head's unit is sharded again after it."""
    ids, found = batch_of(dist.get_rank())["input_ids"], []
    ours, stock = (shard(model_of(), "own", True) for _ in range(2))
    lowtide.patch(ours, scoring=True)
    for model in (ours, stock):
        logits = model(input_ids=ids).logits
        assert isinstance(model.lm_head.weight, DTensor)
        found.append(logits.log_softmax(-1).gather(-1, ids[..., None]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def logits_after_backward() -> None:
    """Backward has resharded the head, in its own unit or the root's: values are stock's, and another step an error."""
    for how in ("root", "own"):
        ours, stock = (shard(model_of(), how) for _ in range(2))
        report = lowtide.patch(ours)
        batch = batch_of(dist.get_rank())
        expected = stock(**batch).logits.detach()
        found = []
        for _ in range(3):
            outputs = ours(**batch)
            outputs.loss.backward()
            found.append(outputs.logits)
        assert isinstance(ours.lm_head.weight, DTensor)
        torch.testing.assert_close(found[0] + 0, expected)
        assert torch.equal(found[1].detach().argmax(-1), expected.argmax(-1))
        assert isinstance(ours.lm_head.weight, DTensor), how
        fused(report, 3, 1, what=how)
        if how == "root":
            with pytest.raises(UnsupportedError, match="FSDP2 has resharded the weight"):
                (found[0] * 2).sum().backward()
            with pytest.raises(UnsupportedError, match="FSDP2 has resharded the weight"):
                nn.functional.cross_entropy(found[1].flatten(0, 1), batch["input_ids"].flatten())
        torch.optim.SGD(ours.parameters(), lr=0.1).step()
        with pytest.raises(UnsupportedError, match=r"read outputs\.logits before"):
            found[2].sum()


def functional_head() -> None:
    """The function on the weight of a sharded head, in each place where it may stand."""
    places = [("root", None, "root", "forward"), ("own", True, "inside", "recompute")]
    places += [("own", True, "unshard", "forward"), ("grouped", True, "inside", "recompute")]
    for how, reshard, way, gradient in places:
        model = model_of(tie_word_embeddings=way == "root")
        joined = on_joined_batch(Functional(copy.deepcopy(model), "stock"), dist.get_world_size())
        stock = shard(Functional(copy.deepcopy(model), "stock"), how, reshard)
        for each in ("forward", "recompute") if THOROUGH else (gradient,):
            ours = Functional(copy.deepcopy(model), way, lowtide.HeadOptions(gradient=each))
            compare(shard(ours, how, reshard), stock, joined, (how, way, each))


def a_sharded_weight_is_refused() -> None:
    """With plain hidden states the meaning of a DTensor's shards is ambiguous: an error, and never a wrong gradient."""
    model = shard(Functional(model_of(), "root"), "own", True)
    labels = torch.zeros(3, dtype=torch.long, device=DEVICE)
    calls: list[Callable[[Tensor, Tensor], Any]] = [
        lambda x, w: lowtide.linear_cross_entropy(x, w, labels),
        lambda x, w: lowtide.linear_token_stats(x, w, want=("entropy",)),
        lambda x, w: lowtide.linear_divergence(x, torch.randn(VOCAB, 16, device=DEVICE), x, w),
        lambda x, w: lowtide.linear_apply(lambda z: z.sum(1), x, w),
    ]
    for call in calls:
        with pytest.raises(ArgumentTypeError, match=r"_weight: .*unshard.*tensor parallelism"):
            call(torch.randn(3, 16, device=DEVICE), model.lm_head.weight)


def mixed_precision() -> None:
    """bfloat16 for compute, float32 for the reduction, as the policy says: no further from float64 than stock is."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = model_of()
    joined = on_joined_batch(copy.deepcopy(model).double(), dist.get_world_size())
    stock = shard(copy.deepcopy(model), "own", True, mp_policy=policy)
    report = lowtide.patch(model, mlp=False, norm=False, rope=False)
    shard(model, "own", True, mp_policy=policy)
    (got, counts), (want, stock_counts) = (counted_step(one, batch_of(dist.get_rank())) for one in (model, stock))
    assert {value.dtype for value in got.values()} == {torch.float32}
    torch.testing.assert_close(got.pop("loss"), want.pop("loss"), rtol=2e-3, atol=0)
    assert counts <= stock_counts
    near(got, want, {name: joined[name] for name in got}, "mixed", 2e-3)
    fused(report, 1)


def parts_of_models() -> None:
    """Policies around layers, experts in units of their own, weights in 4 bits: MLPs at both levels, beside stock.

    Also offloaded, on what is sharded already; one input for several layers is refused: its weights are not all there.
    """

    def experts_apart(model: Any) -> Any:
        for layer in model.model.layers:
            fully_shard(layer.mlp.experts)
        return shard(model)

    def inside_peft(model: Any) -> Any:
        shard(model.base_model.model)
        return model

    ways: list[tuple[Any, Any, Any]] = [
        (model_of(tie_word_embeddings=True), shard, ActivationPolicy(keep="attention", mlp_level=1)),
        (model_of("qwen3_moe"), experts_apart, None),
        (qlora(), inside_peft, None),
        (model_of(num_hidden_layers=4), shard, ActivationPolicy(keep="input", offload=True)),
    ]
    side = LazySide()
    with pytest.MonkeyPatch.context() as patched:
        if DEVICE == "cpu":
            patched.setattr(copies, "available", lambda: True)
            patched.setattr(copies, "side_for", lambda _: side)
        for i, (model, cut, policy) in enumerate(ways):
            if model is None:
                continue
            stock = cut(copy.deepcopy(model))
            if i % 2:
                cut(model)
            report = lowtide.patch(model)
            if policy is not None:
                apply_policy(model, policy)
            elif i == 2:
                for layer in model.base_model.model.model.layers:
                    layer.mlp.checkpoint_level = 1
            if not i % 2:
                cut(model)
            for _ in range(2):
                same(step(model, batch_of(dist.get_rank())), step(stock, batch_of(dist.get_rank())), i)
            fused(report, 2)
            assert any(report.parts[part].patched for part in ("mlp", "experts") if part in report.parts), str(report)
    apply_policy(model, ActivationPolicy(keep="input", every=2))
    with pytest.raises(UnsupportedError, match=r"expected with every > 1 a layer that holds its weights"):
        model(**batch_of())


def accumulation() -> None:
    """Three batches a step, reduced with the last one alone: no step's gradient is lost or counted twice."""
    model = model_of()
    alone = copy.deepcopy(model)
    lowtide.patch(model)
    shard(model, "own", True)
    for _ in range(2):
        for k in range(3):
            model.set_requires_gradient_sync(k == 2)
            model(**batch_of(3 * dist.get_rank() + k)).loss.backward()
        got = gradients(model)
        for stream in range(3 * dist.get_world_size()):
            (alone(**batch_of(stream)).loss / dist.get_world_size()).backward()
        same(got, gradients(alone))


def two_axes() -> None:
    """FSDP2 over one axis, the vocabulary sharded over the other, by the function; both at once refused.

    On two ranks one of the axes is of one rank.
    """
    ranks = dist.get_world_size()
    mesh = init_device_mesh(DEVICE, (max(1, ranks // 2), min(2, ranks)), mesh_dim_names=("dp", "tp"))
    dp, tp, stream = mesh["dp"], mesh["tp"], mesh["dp"].get_local_rank()
    for gradient in ("forward", "recompute"):
        model = model_of()
        joined = on_joined_batch(Functional(copy.deepcopy(model), "stock"), dp.size())
        model = Functional(model, "inside", lowtide.HeadOptions(gradient=gradient))
        model.lm_head.weight = nn.Parameter(distribute_tensor(model.lm_head.weight.detach(), tp, [Shard(0)]))
        shard(model, "own", True, mesh=dp)
        for _ in range(2):
            got = step(model, batch_of(stream))
            same_mean(got["loss"], joined["loss"], dp.get_group())
            same(got | {"loss": joined["loss"]}, joined, gradient)
    weight = distribute_tensor(torch.randn(VOCAB, 16, device=DEVICE), mesh, [Replicate(), Shard(0)])
    hidden = distribute_tensor(torch.randn(6, 16, device=DEVICE), mesh, [Shard(0), Replicate()])
    labels = torch.zeros(6, dtype=torch.long, device=DEVICE)
    on_one = distribute_tensor(torch.randn(VOCAB, 16, device=DEVICE), tp, [Shard(0)])
    for wrong in (weight, on_one):
        with pytest.raises(ArgumentValueError, match=r"linear_weight: .*mesh of one axis.*mesh\[.tp.\]"):
            lowtide.linear_cross_entropy(hidden, wrong, labels)


if __name__ == "__main__":
    main(vars())
