"""DeepSpeed's ZeRO-2 and ZeRO-3 around a patched model, on ranks with data of their own, beside the stock model.

Stock models are trained by plain PyTorch, and by another engine where it is compared what that gathers.
"""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import itertools
import logging
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig

os.environ.setdefault("DS_ACCELERATOR", os.environ.get("RANKS_DEVICE", "cpu"))
import deepspeed
import torch.nn.functional as F

import lowtide
from distributed.fsdp_cases import Functional
from distributed.launch import DEVICE, main
from distributed.models import SHAPE, batch_of, counted, fused, model_of, qlora
from lowtide.measure.timing import peak_above
from lowtide.models import experts_part

RATE = 0.25
RECOMPUTE = lowtide.HeadOptions(gradient="recompute")
# A line for each engine and each collective, on a pipe that is not read while the other rank runs.
deepspeed.utils.logger.setLevel(logging.ERROR)
warnings.filterwarnings("ignore", category=FutureWarning)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled for a minute at first; gloo does as well


def zero(model: Any, stage: int = 3, *, dtype: torch.dtype = torch.float32, mpu: Any = None, **settings: Any) -> Any:
    """Return the model in an engine that by default holds no gathered weight longer than a call needs it."""
    sharing = {"stage": stage}
    if stage == 3:
        sharing |= {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
        sharing |= {"stage3_prefetch_bucket_size": 0}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": settings.pop("accumulate", 1),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,  # by default 1: a factor of all gradients would not be seen
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": sharing | settings,
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    gc.freeze()  # each engine collects garbage: looking through all of torch takes as long as the rest of it
    optimizer = torch.optim.SGD(trained, lr=RATE)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=mpu)[0]


class Plain:
    """The model trained by PyTorch alone, each rank with a whole copy: what an engine computes, with its methods."""

    def __init__(self, module: Any, accumulate: int = 1) -> None:
        self.module, self.accumulate, self.batches = module, accumulate, 0
        self.train, self.eval = module.train, module.eval

    def __call__(self, **batch: Tensor) -> Any:
        return self.module(**batch)

    def backward(self, loss: Tensor) -> None:
        (loss / (self.accumulate * dist.get_world_size())).backward()
        self.batches += 1

    def step(self) -> None:
        if self.batches % self.accumulate:
            return
        trained = [p for p in self.module.parameters() if p.grad is not None]
        for p in trained:
            dist.all_reduce(p.grad)
        torch.optim.SGD(trained, lr=RATE).step()
        self.module.zero_grad()


def weights(engine: Any) -> dict[str, Tensor]:
    found = {}
    for name, p in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
            found[name] = p.detach().clone()
    return found


def gathered(engine: Any) -> set[str]:
    """Return which parameters are whole just now."""
    return {name for name, p in engine.module.named_parameters() if p.numel() > 0 and not p.ds_persist}


def step(engine: Any, batch: dict[str, Tensor]) -> Tensor:
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
    return loss.detach()


def alike(what: str, got: Any, want: Any, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol, msg=lambda m: f"{what}: {m}")


def same_steps(what: str, engine: Any, stock: Any, *, steps: int = 2, batches: int = 1, rtol: float = 1e-4) -> None:
    """Two steps, the second with what DeepSpeed has learned in the first: the losses, then the weights."""
    rank = dist.get_rank()
    for _, i in itertools.product(range(steps), range(batches)):
        alike(what, *(step(one, batch_of(rank + 7 * i)) for one in (engine, stock)), rtol=0.1 * rtol)
    want = weights(stock)
    for name, weight in weights(engine).items():
        alike(f"{what} {name}", weight, want[name], rtol, 0.1 * rtol)


def pair(
    model: Any = None,
    stage: int = 3,
    options: lowtide.HeadOptions | None = None,
    *,
    engines: bool = False,
    **settings: Any,
) -> tuple[Any, Any, lowtide.PatchReport]:
    """Return the engine of a patched model, what trains the stock one, with ``engines`` another, and the report."""
    model = model_of() if model is None else model
    stock: Any = Plain(copy.deepcopy(model), settings.get("accumulate", 1))
    if engines:
        stock = zero(stock.module, stage, **settings)
    report = lowtide.patch(model, options=options)
    return zero(model, stage, **settings), stock, report


def trains_as_stock(what: str, *args: Any, rtol: float = 1e-4, **settings: Any) -> tuple[Any, Any]:
    """Compare two steps of a `pair` of these arguments, without logits; return the engine and what trains stock."""
    engine, stock, report = pair(*args, **settings)
    same_steps(what, engine, stock, rtol=rtol)
    fused(report, 2, what=what)
    return engine, stock


@contextmanager
def counted_gathers() -> Iterator[Counter[str]]:
    """Count what DeepSpeed gathers: calls and elements."""
    backend = importlib.import_module("deepspeed.comm.torch").TorchBackend
    counts: Counter[str] = Counter()

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            outputs = args[0] if args else kwargs.get("output_tensor", kwargs.get("output_tensors"))
            several = outputs if isinstance(outputs, list | tuple) else [outputs]
            counts.update(calls=1, elements=sum(x.numel() for x in several))
            return function(self, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patched:
        for name in ("all_gather_into_tensor", "all_gather_coalesced"):
            patched.setattr(backend, name, counting(getattr(backend, name)))
        yield counts


def patched_models() -> None:
    """Losses and weights are those of the stock model, and no logits are built; no more is gathered, nor for longer."""
    rank = dist.get_rank()
    ways: list[tuple[int, bool, Any]] = [(2, True, "recompute"), (3, True, "forward"), (3, False, "recompute")]
    for stage, tied, gradient in ways:
        what = f"stage {stage} tied {tied} {gradient}"
        options = lowtide.HeadOptions(gradient=gradient)
        model = model_of(tie_word_embeddings=tied)
        engine, stock = trains_as_stock(what, model, stage, options, engines=stage == 3)
        if stage == 2:
            continue
        seen: list[set[str]] = []
        last = engine.module.model.layers[1]
        watched = last.register_full_backward_pre_hook(lambda *_, s=seen, e=engine: s.append(gathered(e)))
        counts = []
        for one in (engine, stock):
            with counted_gathers() as counted:
                step(one, batch_of(rank))
            counts.append(counted)
        watched.remove()
        assert counts[1]["elements"] > 0
        assert all(counts[0][name] <= counts[1][name] for name in counts[1]), f"{what} {counts}"
        assert seen == [set()], f"{what} {seen}"  # the head's weight is let go of before the last layer's backward
        assert gathered(engine) == set(), what
        mlp = engine.module.model.layers[0].mlp
        assert len(mlp._external_params) == 3, "the MLP was not fused"


def functional_head() -> None:
    """The function inside the head's forward, where ZeRO-3 has gathered the weight; in backward too, if recomputed."""
    for stage, gradient in ((2, "forward"), (3, "recompute")):
        model = model_of()
        stock = Plain(Functional(copy.deepcopy(model), "stock"))
        engine = zero(Functional(model, "inside", lowtide.HeadOptions(gradient=gradient)), stage)
        same_steps(f"stage {stage} {gradient}", engine, stock)


def offloaded() -> None:
    """Parameters and the optimizer in the CPU's memory; parameters that stay gathered; gradients accumulated."""
    cpu = {"device": "cpu"}
    ways: dict[str, dict[str, Any]] = {
        "both": {"offload_param": cpu, "offload_optimizer": cpu},
        "as DeepSpeed has it": {
            "stage3_param_persistence_threshold": 100,
            "stage3_max_reuse_distance": 10**9,
            "stage3_prefetch_bucket_size": 10**6,
        },
        "accumulated": {"accumulate": 2},
    }
    for what, settings in ways.items():
        engine, stock, report = pair(options=RECOMPUTE, **settings)
        batches = 2 if what == "accumulated" else 1
        for one in (engine, stock):  # with the MLPs' own code, as DeepSpeed then expects it; weights stay gathered
            with torch.no_grad():
                for _ in range(2):
                    one(input_ids=batch_of(0)["input_ids"])
        same_steps(what, engine, stock, batches=batches)
        fused(report, 2 * batches, what=what)
    trains_as_stock("ZeRO-2, the optimizer on the CPU", stage=2, offload_optimizer=cpu)


def checkpointed_layers() -> None:
    """Layers recomputed in backward, by both kinds of checkpoint, with MLPs that keep little or nothing."""
    for reentrant, level in ((False, 0), (True, 1)):
        model = model_of()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.config.use_cache = False
        engine, stock, report = pair(model, options=RECOMPUTE)
        for layer in engine.module.model.layers:
            layer.mlp.checkpoint_level = level
        what = f"reentrant {reentrant} level {level}"
        same_steps(what, engine, stock)
        fused(report, 2, what=what)
        assert gathered(engine) == set(), what


def kinds_of_model() -> None:
    """bfloat16; a soft cap with tied weights; gate and up in one projection; experts; a head frozen, or alone."""
    dtype = torch.bfloat16
    trains_as_stock("bfloat16", model_of(dtype=dtype), engines=True, dtype=dtype, rtol=4e-2)
    trains_as_stock("gemma2", model_of("gemma2", tie_word_embeddings=True), options=RECOMPUTE)
    engine, stock, report = pair(model_of("phi3"), options=RECOMPUTE)
    same_steps("phi3", engine, stock)
    fused(report, 2, what="phi3")
    assert len(engine.module.model.layers[0].mlp._external_params) == 2, "the MLP was not fused"
    engine, stock, report = pair(model_of("qwen3_moe"), options=RECOMPUTE)
    for layer in engine.module.model.layers:
        layer.mlp.experts.checkpoint_level = 1
    with counted(experts_part, "experts_mlp") as calls:
        same_steps("qwen3_moe", engine, stock)
    assert calls == [4], str(report)
    for alone in (True, False):
        model = model_of()
        for name, p in model.named_parameters():
            p.requires_grad_(name.startswith("lm_head") == alone)
        engine, _ = trains_as_stock(f"head alone {alone}", model)
        assert gathered(engine) == set()


def patched_inside() -> None:
    """`patch` on the engine's module: at once, after steps of the stock model, and undone."""
    model = model_of()
    for ran, prefetched in ((0, 0), (2, 10**6)):
        stock = Plain(copy.deepcopy(model))
        engine = zero(copy.deepcopy(model), stage3_prefetch_bucket_size=prefetched)
        if ran:
            same_steps("before", engine, stock, steps=ran)
        report = lowtide.patch(engine.module, options=RECOMPUTE)
        same_steps(f"patched after {ran}", engine, stock, steps=3)
        fused(report, 3)
        assert all(kind in str(report) for kind in ("swiglu_mlp", "rms_norm"))
    assert any(vars(m).get("_external_params") for m in engine.module.modules())
    lowtide.unpatch(engine.module)
    assert not any(vars(m).get("_external_params") for m in engine.module.modules()), "gathered for nothing"
    same_steps("unpatched", engine, stock)


def logits_read() -> None:
    """Logits that something reads after all: in training, evaluation and generation; gradients through them."""
    rank, batch = dist.get_rank(), batch_of(dist.get_rank())
    engine, stock, report = pair()
    for when in ("before backward", "after"):
        read = []
        for one in (engine, stock):
            output = one(**batch)
            logits = output.logits.detach().clone() if when == "before backward" else None
            one.backward(output.loss)
            read.append(output.logits.detach().clone() if logits is None else logits)
            one.step()
        alike(when, *read)
    assert (report.calls_fused, report.calls_materialised) == (2, 2)
    with torch.no_grad():
        found = []
        for one in (engine, stock):
            one.eval()
            output = one(**batch)
            found.append((output.loss, output.logits + 0))
        alike("evaluation", *found)
        tokens = [
            one.module.generate(batch["input_ids"], max_new_tokens=3, do_sample=False, synced_gpus=True)
            for one in (engine, stock)
        ]
        assert torch.equal(*tokens)
    for one in (engine, stock):
        one.train()
    same_steps("training on", engine, stock)

    def twice(output: Any) -> Tensor:
        return output.loss + output.logits.float().pow(2).mean()

    def outside(output: Any) -> Tensor:
        return F.cross_entropy(output.logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten())

    for loss_of in (twice, outside):
        built = report.calls_materialised
        for _ in range(2):
            losses = []
            for one in (engine, stock):
                loss = loss_of(one(**batch))
                one.backward(loss)
                one.step()
                losses.append(loss.detach())
            alike(loss_of.__name__, *losses)
        assert (report.calls_materialised == built) == (loss_of is outside), loss_of.__name__
        same_steps(f"after {loss_of.__name__}, rank {rank}", engine, stock, steps=1)
    assert gathered(engine) == set()


class Wrapped(nn.Module):
    """A module around the model, whose outputs DeepSpeed looks at as well, and where the loss is computed."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        output = self.inner(input_ids=input_ids, labels=labels)
        again = F.cross_entropy(output.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        output.loss = output.loss + 0.5 * again
        return output


def wrapped() -> None:
    model = model_of()
    stock = Plain(Wrapped(copy.deepcopy(model)))
    report = lowtide.patch(model)
    engine = zero(Wrapped(model))
    same_steps("wrapped", engine, stock)
    fused(report, 2)
    # nor did anything outside of the head ask for its weight, which DeepSpeed would gather there from then on
    assert not any(module._external_params for module in (engine.module, engine.module.inner))
    assert gathered(engine) == set()


def built_in_parts() -> None:
    """A model that no rank ever has as a whole, patched before there is an engine: a new one, and one that is read."""
    whole = model_of()
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    with deepspeed.zero.Init(config_dict_or_path=config):
        fresh = LlamaForCausalLM(whole.config)
    known = copy.deepcopy(whole)
    for p, q in zip(fresh.parameters(), known.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([p]), torch.no_grad():
            q.copy_(p)
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        whole.save_pretrained(shared[0])  # the first rank's: with several, transformers has that one write
        dist.barrier()
        alive = HfDeepSpeedConfig(config)  # transformers builds in parts as long as there is one
        read = LlamaForCausalLM.from_pretrained(shared[0])
        del alive
        dist.barrier()
    for what, parts, same in (("new", fresh, known), ("read", read, whole)):
        assert all(p.numel() == 0 for p in parts.parameters()), what
        report = lowtide.patch(parts, options=RECOMPUTE)
        assert all(kind in str(report) for kind in ("swiglu_mlp", "rms_norm", "rotary")), f"{what}\n{report}"
        stock, engine = Plain(same.train()), zero(parts.train())
        same_steps(what, engine, stock)
        fused(report, 2, what=what)


def adapters() -> None:
    """LoRA on MLPs and head, and a head of modules_to_save: weights of layers inside the layer that is called."""
    from peft import LoraConfig, get_peft_model

    mlp = ["gate_proj", "up_proj", "down_proj"]
    for saved in (False, True):
        settings = {"modules_to_save": ["lm_head"]} if saved else {}
        targets = mlp if saved else [*mlp, "lm_head"]
        model = get_peft_model(model_of(), LoraConfig(r=2, target_modules=targets, **settings))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.1 * p.requires_grad)
        engine, _ = trains_as_stock(f"modules_to_save {saved}", model, options=RECOMPUTE)
        assert gathered(engine) == set(), saved
        layer = engine.module.base_model.model.model.layers[0].mlp
        assert len(layer._external_params) == 9, "the MLP was not fused"


def weights_in_4_bits() -> None:
    """QLoRA: a fused MLP gathers the weights in 4 bits of the layers inside it."""
    if (model := qlora()) is None:
        return
    engine, _ = trains_as_stock("4 bits", model)
    assert gathered(engine) == set()
    mlp = engine.module.base_model.model.model.layers[0].mlp
    assert {id(p) for p in mlp._external_params.values()} == {id(p) for p in mlp.parameters()}, "it was not fused"


class Distilled(nn.Module):
    """A student's divergence from a frozen teacher, by TRL's function in the student's forward."""

    def __init__(self, student: Any, teacher: Any) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher.requires_grad_(False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        function = importlib.import_module("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
        heads: list[Any] = []
        for model in (self.student, self.teacher):
            head = model.get_output_embeddings()
            heads += [model.base_model(input_ids).last_hidden_state.flatten(0, 1), head.weight, head.bias]
        found, entropy = function.apply(*heads, 0.3, 0.7)
        assert not entropy.requires_grad
        return SimpleNamespace(loss=found[labels.flatten() != -100].mean())


class Scored(nn.Module):
    """The mean log-probability and entropy that TRL's fused head returns, within the model's forward."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        found = self.model(input_ids=input_ids, labels=labels, fused_lm_head=True)
        return SimpleNamespace(loss=found.loss - 0.1 * found.entropy.mean())


def scored(*, tied: bool = False) -> nn.Module:
    model = model_of("llama" if tied else "phi", tie_word_embeddings=tied)
    importlib.import_module("trl.trainer.utils").add_fused_lm_head(model, 0.8, outputs=("log_probs", "entropy"))
    return Scored(model)


def distilled() -> nn.Module:
    return Distilled(model_of("phi"), model_of("phi", hidden_size=8, head_dim=2))


def trls_functions() -> None:
    """TRL's two functions by lowtide's heads are TRL's on whole weights, and no more is gathered than for TRL's own."""
    pytest.importorskip("trl")
    rank, ways = dist.get_rank(), {"tied head": functools.partial(scored, tied=True)}
    for what, build in {
        **ways,
        "divergence": distilled,
    }.items():  # TRL's own of the last fails: its graph has no weight
        stock, engine, theirs = Plain(build()), zero(build()), zero(build()) if what in ways else None
        expected = [step(stock, batch_of(rank + 7 * i)) for i in range(3)]
        assert expected[0] != expected[2], "nothing was trained"
        seen: dict[Any, list[set[str]]] = {}
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write('{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2}')
            file.flush()
            active = HfDeepSpeedConfig(file.name)  # while it lives, TRL gathers the heads
            for one in filter(None, (theirs, engine)):
                report = lowtide.patch_trl() if one is engine else None
                last = next(m for name, m in one.module.named_modules() if name.endswith("layers.1"))
                last.register_full_backward_pre_hook(
                    lambda *_, e=one, seen=seen: seen.setdefault(e, []).append(gathered(e))
                )
                alike(what, [step(one, batch_of(rank + 7 * i)) for i in range(3)], expected)
            del active
        lowtide.unpatch_trl()
        assert report is not None
        assert (report.calls_trl, sum(report.calls_lowtide.values())) == ({}, 3), report
        want = weights(stock)
        for name, weight in weights(engine).items():
            alike(f"{what} {name}", weight, want[name], 1e-4, 1e-5)
        most = seen[theirs] if theirs else [set()] * 3
        assert all(mine <= other for mine, other in zip(seen[engine], most, strict=True)), f"{what} {seen}"
        assert gathered(engine) == set(), what


def memory() -> None:
    """A step of ZeRO-3 takes less than half of the logits above what is there; the stock one takes several of them."""
    V = 4001 if DEVICE == "cpu" else 64001  # on a GPU cuBLAS's workspace is megabytes
    config = LlamaConfig(**{**SHAPE, "vocab_size": V})
    model = LlamaForCausalLM(config).to(DEVICE)
    engine, stock, report = pair(model, options=lowtide.HeadOptions(workspace_mib=1))
    ids = torch.randint(V, (2, 301), device=DEVICE)
    batch = {"input_ids": ids, "labels": ids}
    logits = ids.numel() * V * 4
    peaks = []
    for one in (engine, stock):
        step(one, batch)
        peaks.append(peak_above(functools.partial(step, one, batch), DEVICE))
    assert peaks[0] < 0.5 * logits, f"{peaks} {logits}"
    assert peaks[1] > 2 * logits, f"{peaks} {logits}"
    assert report.calls_materialised == 0


if __name__ == "__main__":
    main(vars())
