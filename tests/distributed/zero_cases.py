"""DeepSpeed's ZeRO-2, ZeRO-3 and Ulysses around a patched model, beside the stock model.

Stock models are trained by plain PyTorch, and by another engine where it is compared what that gathers.
"""

from __future__ import annotations

import copy
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
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig

os.environ.setdefault("DS_ACCELERATOR", os.environ.get("RANKS_DEVICE", "cpu"))
import deepspeed

import lowtide
from distributed.launch import DEVICE, THOROUGH, main
from distributed.models import VOCAB, Functional, batch_of, fused, model_of, qlora
from lowtide.measure.timing import peak_above
from lowtide.memory import ActivationPolicy, apply_policy

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


def of_mlp(model: nn.Module) -> int:
    """Return how many weights the first MLP computes with itself, so that DeepSpeed gathers them for it: fused ones."""
    mlps = [m for name, m in model.named_modules() if name.endswith("layers.0.mlp")]
    return len(vars(mlps[0]).get("_external_params", ()))


def step(
    engine: Any, batch: dict[str, Tensor], loss_of: Callable[[Any], Tensor] = lambda output: output.loss
) -> Tensor:
    loss = loss_of(engine(**batch))
    engine.backward(loss)
    engine.step()
    return loss.detach()


def alike(what: str, got: Any, want: Any, rtol: float = 1e-5, atol: float = 1e-5, **how: Any) -> None:
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol, msg=lambda m: f"{what}: {m}", **how)


def same_steps(what: str, engine: Any, stock: Any, *, batches: int = 1, rtol: float = 1e-4, **settings: Any) -> None:
    """Two steps, the second with what DeepSpeed has learned in the first: the losses, then the weights."""
    rank = dist.get_rank()
    for _, i in itertools.product(range(2), range(batches)):
        alike(what, *(step(one, batch_of(rank + 7 * i), **settings) for one in (engine, stock)), rtol=0.1 * rtol)
    same_weights(what, engine, weights(stock), rtol)


def same_weights(what: str, engine: Any, want: dict[str, Tensor], rtol: float = 1e-4) -> None:
    for name, weight in weights(engine).items():  # packed ones may have the bytes of NaN
        alike(f"{what} {name}", weight, want[name].to(weight.dtype), rtol, 0.1 * rtol, equal_nan=True)


def trains_as_stock(
    what: str,
    model: Any = None,
    stage: int = 3,
    options: lowtide.HeadOptions | None = RECOMPUTE,
    *,
    rtol: float = 1e-4,
    batches: int = 1,
    **settings: Any,
) -> Any:
    """Compare two steps of an engine of a patched model with plain ones of the stock model; return the engine."""
    model = model_of() if model is None else model
    stock = Plain(copy.deepcopy(model), settings.get("accumulate", 1))
    report = lowtide.patch(model, options=options)
    engine = zero(model, stage, **settings)
    same_steps(what, engine, stock, batches=batches, rtol=rtol)
    fused(report, 2 * batches, what=what)
    return engine


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


def what_is_gathered() -> None:
    """No more than by the stock model, nor for longer: the head's weight not beyond the last layer's backward."""
    model = model_of(num_hidden_layers=2)
    engines = [zero(copy.deepcopy(model))]
    lowtide.patch(model)
    engines.insert(0, zero(model))
    seen: list[set[str]] = []
    last = engines[0].module.model.layers[1]
    last.register_full_backward_pre_hook(lambda *_: seen.append(gathered(engines[0])))
    counts = []
    for one in engines:
        step(one, batch_of(dist.get_rank()))
        with counted_gathers() as counted:
            step(one, batch_of(dist.get_rank()))
        counts.append(counted)
    assert counts[1]["elements"] > 0
    assert all(counts[0][name] <= counts[1][name] for name in counts[1]), counts
    assert seen == [set(), set()], seen
    assert gathered(engines[0]) == set()
    assert of_mlp(engines[0].module) == 3


def scores() -> None:
    """Log-probabilities from a call without labels: as stock's, and nothing stays gathered after it."""
    ids, found = batch_of(dist.get_rank())["input_ids"], []
    ours, stock = model_of(), model_of()
    lowtide.patch(ours, scoring=True)
    engine = zero(ours)
    for model in (engine, stock):
        logits = model(input_ids=ids).logits
        assert model is stock or gathered(engine) == set()
        found.append(logits.log_softmax(-1).gather(-1, ids[..., None]))
    alike("log-probabilities", *found)


def stages_and_settings() -> None:
    """ZeRO-2; the loss in the head's forward; offloading; accumulation; parameters that stay gathered; a policy."""
    cpu = {"device": "cpu"}
    trains_as_stock("ZeRO-2", model_of(tie_word_embeddings=True), 2, offload_optimizer=cpu)
    trains_as_stock("offloaded", offload_param=cpu, offload_optimizer=cpu, batches=2, accumulate=2)
    reuse = {"stage3_max_reuse_distance": 10**9, "stage3_prefetch_bucket_size": 10**6}
    trains_as_stock(
        "as DeepSpeed has it", model_of(num_hidden_layers=2), stage3_param_persistence_threshold=100, **reuse
    )
    model = model_of()
    stock = Plain(Functional(copy.deepcopy(model), "stock"))
    same_steps("the function", zero(Functional(model, "inside", RECOMPUTE)), stock)
    model = model_of()
    apply_policy(model, ActivationPolicy(keep="attention"))
    assert gathered(trains_as_stock("policy", model)) == set()


def kinds_of_model() -> None:
    """bfloat16; a tied head with a soft cap; experts."""
    dtype = torch.bfloat16
    trains_as_stock("bfloat16", model_of(dtype=dtype), dtype=dtype, rtol=8e-2)
    trains_as_stock("gemma2", model_of("gemma2", tie_word_embeddings=True))
    trains_as_stock("experts", model_of("qwen3_moe"))


def adapters() -> None:
    """LoRA and a head of modules_to_save; over weights in 4 bits."""
    from peft import LoraConfig, get_peft_model

    mlp = ["gate_proj", "up_proj", "down_proj"]
    lora = LoraConfig(r=2, target_modules=mlp, modules_to_save=["lm_head"], init_lora_weights=False)
    engine = trains_as_stock("LoRA", get_peft_model(model_of(), lora))
    assert gathered(engine) == set()
    assert of_mlp(engine.module) == 9
    if (model := qlora()) is not None:
        engine = trains_as_stock("4 bits", model)
        assert gathered(engine) == set()
        assert of_mlp(engine.module) == 7


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


def patched_inside() -> None:
    """`patch` on the engine's module, after steps of the stock model, and undone."""
    model = model_of(num_hidden_layers=2)
    stock, engine = Plain(copy.deepcopy(model)), zero(model, stage3_prefetch_bucket_size=10**6)
    same_steps("before", engine, stock)
    report = lowtide.patch(engine.module, options=RECOMPUTE)
    same_steps("patched", engine, stock)
    fused(report, 2)
    assert of_mlp(engine.module) == 3
    lowtide.unpatch(engine.module)
    assert of_mlp(engine.module) == 0, "gathered for nothing"
    same_steps("unpatched", engine, stock)


def trls_function() -> None:
    """TRL's divergence by lowtide's head is TRL's on whole weights, which are gathered no longer than a call."""
    pytest.importorskip("trl")
    student, teacher = model_of("phi"), model_of("phi", hidden_size=8, head_dim=2)
    stock, engine = Plain(Distilled(copy.deepcopy(student), teacher)), zero(Distilled(student, copy.deepcopy(teacher)))
    batches = [batch_of(dist.get_rank() + 7 * i) for i in range(2)]
    expected = [step(stock, batch) for batch in batches]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write('{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2}')
        file.flush()
        active = HfDeepSpeedConfig(file.name)  # while it lives, TRL gathers the heads
        report = lowtide.patch_trl()
        alike("losses", [step(engine, batch) for batch in batches], expected)
        del active
    lowtide.unpatch_trl()
    assert (report.calls_trl, sum(report.calls_lowtide.values())) == ({}, 2), report
    same_weights("TRL", engine, weights(stock))
    assert gathered(engine) == set()


def logits_read() -> None:
    """Logits that something reads after all: in training, evaluation and generation; gradients through them."""
    batch, model = batch_of(dist.get_rank()), model_of()
    stock = Plain(copy.deepcopy(model))
    report = lowtide.patch(model)
    engine, read = zero(model), []
    for one in (engine, stock):
        output = one(**batch)
        early = output.logits.detach().clone()
        one.backward(output.loss)
        read.append((early, output.logits.detach().clone()))
        one.step()
    alike("before backward, and after", *read)
    with torch.no_grad():
        found = []
        for one in (engine, stock):
            one.eval()
            output = one(**batch)
            found.append((output.loss, output.logits + 0))
        alike("evaluation", *found)
        settings = {"max_new_tokens": 3, "do_sample": False, "synced_gpus": True}
        assert torch.equal(*(one.module.generate(batch["input_ids"], **settings) for one in (engine, stock)))
    for one in (engine, stock):
        one.train()

    def twice(output: Any) -> Tensor:
        return output.loss + output.logits.float().pow(2).mean()

    def outside(output: Any) -> Tensor:
        rows = output.logits[:, :-1].flatten(0, 1).float()
        return F.cross_entropy(rows, batch["labels"][:, 1:].flatten())

    for loss_of in (twice, outside):
        built = report.calls_materialised
        same_steps(loss_of.__name__, engine, stock, loss_of=loss_of)
        assert (report.calls_materialised == built) == (loss_of is outside), loss_of.__name__
    assert gathered(engine) == set()


def built_in_parts() -> None:
    """A model that no rank ever has as a whole, patched before there is an engine."""
    whole = model_of(num_hidden_layers=2)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        whole.save_pretrained(shared[0])  # the first rank's: with several, transformers has that one write
        dist.barrier()
        alive = HfDeepSpeedConfig(config)  # transformers builds in parts as long as there is one
        parts = LlamaForCausalLM.from_pretrained(shared[0])
        del alive
        dist.barrier()
    assert all(p.numel() == 0 for p in parts.parameters())
    report = lowtide.patch(parts, options=RECOMPUTE)
    assert all(kind in str(report) for kind in ("swiglu_mlp", "rms_norm", "rotary")), str(report)
    same_steps("read", zero(parts.train()), Plain(whole.train()))
    fused(report, 2)


def memory() -> None:
    """A step of ZeRO-3 takes less than half of the logits above what is there; the stock one takes several of them."""
    V = 4001 if DEVICE == "cpu" else 64001  # on a GPU cuBLAS's workspace is megabytes
    model, ids = model_of(vocab_size=V), torch.randint(V, (2, 301), device=DEVICE)
    lowtide.patch(model, options=lowtide.HeadOptions(workspace_mib=1))
    engine, logits = zero(model), ids.numel() * V * 4
    step(engine, {"input_ids": ids, "labels": ids})
    assert peak_above(lambda: step(engine, {"input_ids": ids, "labels": ids}), DEVICE) < 0.5 * logits


def ulysses() -> None:  # the last: what DeepSpeed keeps of it changes later engines
    """Each rank a shard of every sequence, and in attention some of the heads: losses and weights of one process.

    ZeRO-3 alone: DeepSpeed's other stages scale the stock model's gradients otherwise.
    """
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.integrations.deepspeed import deepspeed_sp_compute_loss
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    deepspeed.init_distributed()
    ranks, T, settings = dist.get_world_size(), 22, {"num_hidden_layers": 2}
    batches, true, want = [], Plain(model_of(**settings).double()), []
    for stream in range(2):
        ids = torch.randint(3, VOCAB, (2, T), generator=torch.Generator().manual_seed(stream)).to(DEVICE)
        labels = ids.where(ids % 3 > 0, -100)
        labels[:, : stream * (T // ranks + 1)] = -100  # of the second batch none on the first rank, as in a long prompt
        batches.append((ids, labels))
        want.append(step(true, {"input_ids": ids, "labels": labels}).float())
    stock_attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
    try:
        mpu = UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model_of(**settings), core_attn_implementation="sdpa", sequence_parallel_size=ranks,
            micro_batch_size=2, seq_length_is_variable=True,
        )  # fmt: skip
        sizes: Any = SimpleNamespace(sp_backend="deepspeed", sp_size=ranks)
        for keep, gradient in (("attention", "recompute"), (None, "forward"))[: 2 if THOROUGH else 1]:
            ours = model_of(**settings)
            report = lowtide.patch(ours, options=lowtide.HeadOptions(gradient=gradient))
            if keep is not None:
                apply_policy(ours, ActivationPolicy(keep=keep))
            engine = zero(ours, mpu=mpu)
            for (ids, labels), right in zip(batches, want, strict=True):
                places = torch.arange(T, device=ids.device).expand(2, -1)
                every = {
                    "input_ids": ids,
                    "shift_labels": F.pad(labels, (0, 1), value=-100)[:, 1:],
                    "position_ids": places,
                }
                mine = {name: x.chunk(ranks, 1)[dist.get_rank()].contiguous() for name, x in every.items()}
                loss = deepspeed_sp_compute_loss(None, engine, mine, False, sizes)
                engine.backward(loss)
                engine.step()
                alike(f"{keep} loss", loss.detach(), right)
            same_weights(f"{keep}", engine, weights(true))
            fused(report, len(batches))
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = stock_attention


if __name__ == "__main__":
    main(vars())
