"""Patched models whose head is sharded over ranks, beside the stock model in the same parallelisation.

The truth is one process in float64; a patched model may err as much as the stock one in the same parallelisation.
"""

from __future__ import annotations

import functools
import itertools
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from transformers import DistributedConfig

import lowtide
from distributed.launch import DEVICE, THOROUGH, main
from distributed.models import (
    FAMILIES,
    GATHERED,
    LOCAL,
    SHAPE,
    VOCAB,
    T,
    batch_of,
    counted,
    double,
    fair,
    fused,
    in_sequence,
    model_of,
    parallel,
    ranks_mesh,
    step,
    trio,
    whole,
)
from lowtide.errors import UnsupportedError
from lowtide.measure.timing import peak_above
from lowtide.models import parallel_mlp
from lowtide.models.lazy_logits import LazyLogits
from support import relative_error


def kinds_of_heads() -> None:
    """Soft caps, scales, biases; patched before and after; logits that are plain and such that are DTensors."""
    outputs = [
        GATHERED,
        ColwiseParallel(output_layouts=Replicate(), use_local_output=False),
        ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    ]
    heads = itertools.cycle(outputs)
    kinds = [(family, i % 2 == 0) for i, family in enumerate((*FAMILIES, "gemma2", "llama"))]
    for i, (family, first) in enumerate(kinds):
        options = lowtide.HeadOptions(gradient=("forward", "recompute")[i % 2], workspace_mib=0.002)
        head, layers = next(heads), family == "llama"
        cuts = [functools.partial(parallel, head=one, layers=layers) for one in (head, GATHERED)]
        # stock's cross entropy takes no DTensor
        ours, stock, true, report = trio(*cuts, first=first, family=family, options=options)
        streams = 2 if i < 2 or THOROUGH else 1
        for stream in range(streams):
            fair(ours, stock, true, batch_of(stream), (family, first, head))
        fused(report, streams)
        # what else reads the logits has those that stock has: the kind, and the numbers
        parallel(stock := model_of(family), head, layers=layers)
        outputs = ours(**batch_of())
        assert isinstance(outputs.loss, DTensor) != head.use_local_output
        lazy = outputs.logits
        real = stock(input_ids=batch_of()["input_ids"]).logits
        assert type(lazy) is LazyLogits
        assert lazy.shape == real.shape
        read = whole(lazy.full_tensor() if isinstance(real, DTensor) else lazy + 0)
        torch.testing.assert_close(read, whole(real), rtol=1e-5, atol=1e-5)
        if isinstance(real, DTensor):
            assert lazy.placements == real.placements
        fused(report, streams + 1, 1)
        lowtide.unpatch(ours)
        assert type(ours(input_ids=batch_of()["input_ids"], num_items_in_batch=1).logits) is type(real)


def with_loss_parallel() -> None:
    """Inside `loss_parallel`, which the stock model needs for logits in parts: ours needs it not, and does not mind."""
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    ours, stock, true, report = trio(functools.partial(parallel, head=head))
    items = {"num_items_in_batch": torch.tensor(7, device=DEVICE)}
    right = step(true, {**batch_of(), **items})
    with loss_parallel():
        got, want = (step(m, {**batch_of(), **items}) for m in (ours, stock))
    for name, value in got.items():
        assert relative_error(value, right[name]) <= 3 * relative_error(want[name], right[name]) + 5e-7, name
    fused(report, 1)


def sequences(stream: int = 0) -> dict[str, Tensor]:
    """A batch to be cut along its sequences: before torch 2.13 DTensors that are take no more than one in a matmul."""
    several = torch.__version__ >= (2, 13)
    return {name: x if several else x[:1] for name, x in batch_of(stream).items()}


def tokens_in_parts() -> None:
    """Hidden states in parts of the sequence: each rank's gradient is that of its part."""
    layouts = {"input_layouts": Shard(1), "output_layouts": Replicate()}
    for local, gradient in ((True, "recompute"), (False, "forward")):
        heads = (ColwiseParallel(**layouts, use_local_output=local), ColwiseParallel(**layouts))
        cuts = [functools.partial(in_sequence, head=head) for head in heads]
        ours, stock, true, report = trio(*cuts, options=lowtide.HeadOptions(gradient=gradient))
        fair(ours, stock, true, sequences(), ("sequence", local))
        assert isinstance(ours(**sequences()).loss, DTensor) != local
        fused(report, 2)
        if local:  # rows of all ranks are chosen, so that all are gathered; and what else there is needs real logits
            for loss_of in (each_token, log_probabilities):
                fair(ours, stock, true, sequences(1), loss_of, loss_of)
            fused(report, 3, 1)
            assert "DTensors of its input and weight" in report.parts["norm"].more[-1].outcome, str(report)
    # nothing around the head: DTensors go in and come out
    models = [in_sequence(model_of(), None) for _ in range(2)]
    for model in models:
        weight = distribute_tensor(model.lm_head.weight.detach(), ranks_mesh(), [Shard(0)])
        model.lm_head.weight = nn.Parameter(weight)
    report = lowtide.patch(models[0])
    got, right = step(models[0], sequences()), step(double(model_of()), sequences())
    for name, value in got.items():
        assert relative_error(value, right[name]) < 3e-6, name
    lazy, real = models[0](**sequences()).logits, models[1](input_ids=sequences()["input_ids"]).logits
    torch.testing.assert_close(lazy.full_tensor(), real.full_tensor(), rtol=1e-5, atol=1e-5)
    fused(report, 2, 1)
    # plain tensors that the style says to be parts: as many of each rank
    batch = {name: x[:, : T - T % dist.get_world_size()] for name, x in sequences().items()}
    plain = {"model.norm": SequenceParallel(use_local_output=True), "lm_head": ColwiseParallel(**layouts)}
    enter = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),))

    def cut(model: Any) -> None:
        parallelize_module(model, ranks_mesh(), {"model.norm": enter})
        parallelize_module(model, ranks_mesh(), plain)

    *models, report = trio(cut)
    fair(*models, batch, "plain parts")
    fused(report, 1)


def sequence_parallel_layers() -> None:
    """All of a model cut so: what lies between attention and MLPs is in parts of the sequence, up to the head."""
    parts, whole_input = {"output_layouts": Shard(1), "use_local_output": False}, (Replicate(),)
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), **parts),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for layer in ("model.layers.0.", "model.layers.1."):
        plan |= {layer + norm: SequenceParallel() for norm in ("input_layernorm", "post_attention_layernorm")}
        plan |= {f"{layer}self_attn.{x}_proj": ColwiseParallel() for x in "qkv"}
        plan |= {f"{layer}mlp.{x}_proj": ColwiseParallel() for x in ("gate", "up")}
        plan |= {layer + rows: RowwiseParallel(**parts) for rows in ("self_attn.o_proj", "mlp.down_proj")}
        plan[layer + "mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=whole_input)
        plan[layer + "self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
            use_local_output=True,
        )
    length = T - T % dist.get_world_size()
    batch = {name: x[:, :length] for name, x in sequences().items()}
    batch["position_ids"] = torch.arange(length, device=DEVICE)[None]  # the model would count those of its part
    *models, report = trio(lambda model: parallelize_module(model, ranks_mesh(), plan))
    fair(*models, batch, "sequence parallel")
    fused(report, 1)


def each_token(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"], num_items_in_batch=1).logits[:, :-1]
    each = F.cross_entropy(
        logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="none", label_smoothing=0.1
    )
    return (each * torch.linspace(0.5, 2, each.numel(), device=each.device)).sum()


def log_probabilities(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"], num_items_in_batch=1).logits
    chosen = logits.log_softmax(-1).gather(-1, batch["input_ids"][..., None])[..., 0]
    return (chosen * batch["labels"].clamp(min=0)).sum() / 100


def raw_logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"], num_items_in_batch=1).logits
    return logits.gather(-1, batch["input_ids"][..., None]).square().mean() + logits.std()


def losses_of_ones_own() -> None:
    """What becomes of plain logits outside of the model: without building them where it can be, and right."""
    ours, stock, true, report = trio(parallel)
    for loss_of in (each_token, log_probabilities):
        fair(ours, stock, true, batch_of(), loss_of.__name__, loss_of)
    fused(report, 2)
    fair(ours, stock, true, batch_of(), "raw logits", raw_logits)
    with torch.no_grad():
        lazy, real = (m(**batch_of()).logits for m in (ours, stock))
        assert torch.equal(lazy.argmax(-1), real.argmax(-1))
        assert report.calls_materialised == 1, str(report)
        assert torch.equal(lazy.topk(3).indices, real.topk(3).indices)
        assert torch.equal(lazy.max(-1).values, lazy.topk(1).values[..., 0])


def labels_and_counts() -> None:
    """Labels that are all ignored block no rank; ``num_items_in_batch``; without gradients; in bfloat16."""
    ours, stock, true, report = trio(parallel)
    batch = batch_of()
    fair(ours, stock, true, {**batch, "num_items_in_batch": torch.tensor(5, device=DEVICE)}, "items")
    nothing = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    got = step(ours, {**nothing, "num_items_in_batch": torch.tensor(5, device=DEVICE)})
    assert all(not x.any() for x in got.values())
    assert ours(**nothing).loss.isnan()
    ours.eval(), stock.eval()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            outputs, expected = ours(**batch), stock(**batch)
            torch.testing.assert_close(outputs.loss, expected.loss)
            torch.testing.assert_close(outputs.logits + 0, expected.logits)
    with torch.autocast(DEVICE, torch.bfloat16):
        fair(ours, stock, true, [batch_of(stream) for stream in range(8)], "autocast")
    fused(report, 13, 2)


def embeddings_that_are_tied() -> None:
    """One DTensor for both: the gradient is the sum of both."""

    def cut(model: Any) -> None:
        plan = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate()), "lm_head": GATHERED}
        parallelize_module(model, ranks_mesh(), plan)
        model.lm_head.weight = model.model.embed_tokens.weight

    *models, report = trio(cut, tie_word_embeddings=True)
    fair(*models, batch_of(), "tied")
    assert models[0].lm_head.weight is models[0].model.embed_tokens.weight
    fused(report, 1)


def saved(model: Any) -> Path:
    """A folder with the model, the same on all ranks."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        model.save_pretrained(folder[0])
    dist.barrier()
    return Path(folder[0])


def for_transformers() -> tuple[int, dict[str, Tensor]]:
    """A number of classes that divides by the ranks, as transformers 5.17 wants it, and a batch of them."""
    vocab = 16 * dist.get_world_size()
    return vocab, {name: x.where(x < 0, x % vocab) for name, x in batch_of().items()}


def plan_of_transformers() -> None:
    """``tp_plan="auto"``, as from_pretrained applies it: tied and not, generating, saving."""
    if torch._C._get_accelerator().type != DEVICE:  # transformers takes what the machine has
        return
    vocab, batch = for_transformers()
    for tied in (False, True):
        settings = {"vocab_size": vocab, "tie_word_embeddings": tied}
        folder, config = saved(model_of(**settings)), DistributedConfig(tp_size=dist.get_world_size())
        read = transformers.LlamaForCausalLM.from_pretrained
        ours, stock = (read(folder, distributed_config=config).train() for _ in range(2))
        true = double(model_of(**settings))
        report = lowtide.patch(ours)
        assert report.parts["loss"].patched, str(report)
        assert report.parts["mlp"].patched, str(report)
        for _ in range(2):
            fair(ours, stock, true, batch, ("transformers", tied))
        fused(report, 2)
        torch.testing.assert_close(ours(**batch).logits + 0, stock(**batch).logits)
        prompt = {"input_ids": batch["input_ids"][:1, :4], "max_new_tokens": 4, "do_sample": False}
        assert torch.equal(ours.generate(**prompt), stock.generate(**prompt))
        with torch.no_grad():
            lazy, real = ours(**batch), stock(**batch)
            torch.testing.assert_close(lazy.loss, real.loss)
            torch.testing.assert_close(lazy.logits + 0, real.logits)
        fused(report, 4, 2)
        lowtide.unpatch(ours)
        assert type(ours(**batch).logits) is Tensor


def wrapped_by_transformers_later() -> None:
    """Patched before: what transformers wraps is the patched forward then, and the model's own loss reads logits."""
    from transformers.distributed.tensor_parallel import ColwiseParallel as Style

    def reads(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
        return F.cross_entropy(logits.transpose(1, 2), labels) + logits.square().mean()

    vocab, batch = for_transformers()
    *models, true = (model_of(vocab_size=vocab) for _ in range(3))
    true = true.double()
    report = lowtide.patch(models[0])
    for model in models:
        style = Style(input_layouts=Replicate(), output_layouts=Replicate())
        style.shard_param(model.lm_head, "weight", ranks_mesh())
        style.install_forward(model.lm_head, ranks_mesh())
    fair(*models, true, batch, "later")
    fused(report, 1)
    for model in (*models, true):
        model.loss_function = reads
    fair(*models, true, batch, "reads")
    assert report.calls_materialised == 1, str(report)


def what_is_left_alone() -> None:
    """Whatever is not of the form that is known runs as it came, and the report says why."""
    mesh, W = ranks_mesh(), dist.get_world_size()
    rows = RowwiseParallel(input_layouts=Replicate())

    def replicated(model: Any) -> None:
        parallel(model)
        weight = model.lm_head.weight.detach().redistribute(placements=[Replicate()])
        model.lm_head.weight = nn.Parameter(weight)

    def two_axes(model: Any) -> None:
        parallel(model)
        square = init_device_mesh(DEVICE, (1, W), mesh_dim_names=("dp", "tp"))
        weight = whole(model.lm_head.weight.detach())
        model.lm_head.weight = nn.Parameter(distribute_tensor(weight, square, [Replicate(), Shard(0)]))

    def watched(model: Any) -> None:
        parallel(model).lm_head.register_forward_hook(lambda _m, _x, y: y * 2)

    ways: dict[str, tuple[Callable[[Any], Any], str]] = {
        "rows": (lambda m: parallelize_module(m, mesh, {"lm_head": rows}), "in another way than by ColwiseParallel"),
        "replicated": (replicated, r"has placements \(Replicate\(\),\), not Shard\(0\) on one axis"),
        "watched": (watched, "has a hook from __main__"),
        "local": (lambda m: parallel(m, LOCAL), "returns this rank's logits alone"),
        "compiled": (lambda m: parallel(m).lm_head.compile(backend="eager"), "was not called"),
        "two axes": (two_axes, "is not on the mesh of what wraps it"),
    }
    for name, (change, why) in ways.items():
        ours, stock, _, report = trio(change, first=False)
        results = [outcome_of(model) for model in (ours, stock)]
        assert type(results[0]) is type(results[1]), (name, results)
        if isinstance(results[0], dict):
            for key, value in results[1].items():
                torch.testing.assert_close(results[0][key], value, msg=lambda m, n=name, k=key: f"{n} {k}: {m}")
        assert report.calls_fused == 0, name
        (said,) = report.why_materialised
        assert re.search(why, said), (name, said)


def outcome_of(model: Any) -> Any:
    """A step's results, or the error that the stock model has as well."""
    try:
        return step(model, batch_of())
    except RuntimeError as error:
        return error


def an_error_inside() -> None:
    """A label that is no class raises on every rank, and leaves the hooks as they were."""
    ours, stock = parallel(model_of()), parallel(model_of())
    lowtide.patch(ours)
    if DEVICE == "cpu":
        wrong = {**batch_of(), "labels": batch_of()["labels"] + VOCAB}
        with pytest.raises(IndexError, match="target: expected class indices"):
            ours(**wrong)
    kinds = ("_forward_pre_hooks", "_forward_hooks")
    assert [len(getattr(ours.lm_head, kind)) for kind in kinds] == [1, 1]
    assert vars(ours.lm_head).keys() == vars(stock.lm_head).keys()
    batch = {"input_ids": batch_of()["input_ids"]}
    with torch.no_grad():
        torch.testing.assert_close(ours(**batch).logits, stock(**batch).logits)


def mlps_in_parts() -> None:
    """Each rank's part of an MLP is fused: biases, both levels, tiles, autocast, patched before and after."""
    for i, (bias, first) in enumerate(((True, True), (True, False), (False, True))):
        settings = {"mlp_bias": bias, "num_hidden_layers": 1}
        ours, stock, true, report = trio(functools.partial(parallel, layers=True), first=first, **settings)
        assert report.parts["mlp"].patched
        mlp = ours.model.layers[0].mlp
        mlp.checkpoint_level, mlp.tile_tokens = i % 2, (None, 5, None)[i]
        kinds: list[type] = []
        mlp.register_forward_hook(lambda _m, _x, y, kinds=kinds: kinds.append(type(y)))
        with counted(parallel_mlp, "swiglu_mlp") as count:
            fair(ours, stock, true, batch_of(), (bias, first))
        assert count == [1]
        assert kinds == [Tensor]
        with torch.autocast(DEVICE, torch.bfloat16), counted(parallel_mlp, "swiglu_mlp") as count:
            fair(ours, stock, true, [batch_of(stream) for stream in range(8)], (bias, first, "autocast"))
        assert count == [8]
        sums = []
        for model in (ours.model, stock.model):
            with counted(funcol, "all_reduce") as count:
                model(input_ids=batch_of()["input_ids"]).last_hidden_state.sum().backward()
            sums.append(count[0])
        assert sums[0] == sums[1] - 1, "one sum for the gradients through gate and up"
        with torch.no_grad(), counted(parallel_mlp, "swiglu_mlp") as count:  # as the stock code on a CPU, to the bit
            assert torch.equal(ours(**batch_of()).logits + 0, stock(**batch_of()).logits) or DEVICE != "cpu"
        assert count == [0]
    lowtide.unpatch(ours)
    assert "checkpoint_level" not in vars(ours.model.layers[0].mlp)


def parts_of_layers() -> None:
    """What is cut in another way runs the stock code, as the report says; norms and rotations are fused."""
    gathered = ColwiseParallel(output_layouts=Replicate(), use_local_output=True)
    ways: dict[str, tuple[dict[str, Any], str]] = {
        "one": ({"gate_proj": ColwiseParallel(output_layouts=Replicate())}, "in another way"),
        "whole inside": (
            {"gate_proj": gathered, "up_proj": gathered, "down_proj": RowwiseParallel(input_layouts=Replicate())},
            "in another way",
        ),
        "hooked": (
            {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()},
            "hook",
        ),
    }
    for name, (plan, why) in ways.items():
        ours, stock, true = model_of(), model_of(), double(model_of())
        for model in (ours, stock):
            parallelize_module(model, ranks_mesh(), {f"model.layers.*.mlp.{key}": style for key, style in plan.items()})
        if name == "hooked":
            for model in (ours, stock, true):
                model.model.layers[1].mlp.up_proj.register_forward_hook(lambda _m, _x, y: y * 0.5)
        report = lowtide.patch(parallel(ours))
        assert why in str(report), (name, str(report))
        assert report.parts["mlp"].patched == (name == "hooked")
        assert report.parts["norm"].patched
        assert report.parts["rope"].patched
        parallel(stock)
        fair(ours, stock, true, batch_of(), name)


def looked_at_on_one_rank() -> None:
    """A hook that the first rank alone has: all run the stock code, and none waits."""
    first = dist.get_rank() == 0
    for what in ("head", "projection"):
        ours, stock, true, report = trio(functools.partial(parallel, layers=True))
        seen: list[Any] = []
        if first:
            watched = ours.lm_head if what == "head" else ours.model.layers[0].mlp.up_proj
            watched.register_forward_hook(lambda _m, _x, y, seen=seen: seen.append(y))
        for _ in range(2):
            with counted(parallel_mlp, "swiglu_mlp") as count:
                fair(ours, stock, true, batch_of(), what)
            assert count == [{"head": 2, "projection": 1}[what]]
            assert bool(seen) == first
        assert report.calls_fused == (2 if what == "projection" else 0)
        if not first and what != "projection":
            assert report.why_materialised == {
                "on ranks [0] of its group something looks at the calls of this module": 2
            }
    # later, when the ranks have agreed to fuse: an error where it is
    ours = parallel(model_of())
    report = lowtide.patch(ours)
    step(ours, batch_of())
    if first:
        hook = ours.lm_head.register_forward_hook(lambda _m, _x, y: y)
        with pytest.raises(UnsupportedError, match=r"a hook from __main__.*lowtide\.patch\(model\) again"):
            ours(**batch_of())
        hook.remove()
    step(ours, batch_of())
    ours.lm_head.register_forward_hook(lambda _m, _x, y: y)
    lowtide.patch(ours)
    fair(ours, *trio(parallel)[1:3], batch_of(), "again")
    fused(report, 2, 1)


def memory() -> None:
    """No rank has logits, not those of its own classes either."""
    vocab, length = 6000, 256
    model = lowtide_model = model_of(vocab_size=vocab, max_position_embeddings=length, num_hidden_layers=1)
    report = lowtide.patch(parallel(lowtide_model), options=lowtide.HeadOptions(workspace_mib=0.2))
    ids = torch.randint(3, vocab, (1, length), device=DEVICE)
    hidden = torch.randn(1, length, SHAPE["hidden_size"], device=DEVICE, requires_grad=True)
    model.model.forward = lambda **_: transformers.modeling_outputs.BaseModelOutputWithPast(last_hidden_state=hidden)
    model(input_ids=ids, labels=ids)
    peak = peak_above(lambda: model(input_ids=ids, labels=ids).loss.backward(), DEVICE)
    shard = -(-vocab // dist.get_world_size())
    assert peak < 3 * 4 * shard * SHAPE["hidden_size"] + 0.2 * 2**20 + 2**18 < 4 * shard * length, peak
    fused(report, 2)


if __name__ == "__main__":
    main(vars())
