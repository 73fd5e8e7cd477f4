"""Tiny models by name, a patched one beside its stock copy, and how the two are compared."""

from __future__ import annotations

import copy
import io
import pickle
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from four_bit import in_four_bits
from lowtide.models import PatchReport

transformers = pytest.importorskip("transformers")

VOCAB = 97
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
GPT2 = {
    "vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "bos_token_id": 1,
    "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
_BERT = {
    **{k: v for k, v in SHAPE.items() if k not in ("num_key_value_heads", "head_dim")}, "is_decoder": True,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_MOE = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "experts_implementation": "eager",  # the grouped GEMM knows no float64
}  # fmt: skip
MLP = ["gate_proj", "up_proj", "down_proj"]

# name -> (class, settings). Dropout is off: both models of a comparison would draw their own.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", SHAPE),
    "llama-tied": ("LlamaForCausalLM", {**SHAPE, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", SHAPE),  # norms of heads
    "qwen3-moe": ("Qwen3MoeForCausalLM", {**SHAPE, **_MOE, "output_router_logits": True}),
    "gpt-oss": ("GptOssForCausalLM", {**SHAPE, **_MOE}),
    "gemma2": ("Gemma2ForCausalLM", {**SHAPE, "final_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3ForCausalLM", {**SHAPE, "final_logit_softcapping": 0.7, "sliding_window": 8}),
    "cohere2": ("Cohere2ForCausalLM", {**SHAPE, "logit_scale": 0.25, "sliding_window": 8}),
    "granite": ("GraniteForCausalLM", {**SHAPE, "logits_scaling": 3.0}),
    "phi3": ("Phi3ForCausalLM", SHAPE),  # gate and up in one projection
    "glm4": ("Glm4ForCausalLM", SHAPE),  # the same, and rotations of interleaved pairs
    "phi": ("PhiForCausalLM", SHAPE),  # a head with a bias
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "bert": ("BertLMHeadModel", _BERT),
}


def make(name: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """Return a tiny model, the same one all through a test; its weights make losses differ from log(V)."""
    torch.manual_seed(torch.initial_seed())
    kind, own = MODELS[name]
    made = getattr(transformers, kind)
    model = made(made.config_class(**{**own, **settings}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype).train()


def lora(**settings: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "init_lora_weights": False, **settings})


def wrap(model: Any, *configs: Any, **settings: Any) -> Any:
    """Return the model with adapters of these configs, all of random weights; the first one is active."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(torch.initial_seed())  # a second model gets the same
    first, *more = configs
    wrapped = peft.get_peft_model(model, first, **settings)
    for i, config in enumerate(more):
        wrapped.add_adapter(f"more{i}", config)
    with torch.no_grad():
        for name, p in wrapped.named_parameters():  # some start at 0 or 1, where their neighbours' gradients are 0
            if p.requires_grad or "more" in name:
                p.add_(0.1 * torch.randn_like(p))
    return wrapped.train()


# Models with adapters or in 4 bits, of a Llama.
ADAPTED: dict[str, Callable[[], Any]] = {
    "lora": lambda: wrap(make("llama"), lora(target_modules=["q_proj", *MLP])),
    "saved": lambda: wrap(make("llama"), lora(target_modules=["q_proj", "up_proj"], modules_to_save=["lm_head"])),
    "4bit": lambda: wrap(
        in_four_bits(make("llama", hidden_size=64, intermediate_size=128, head_dim=32), torch.float32),
        lora(target_modules=["q_proj", "up_proj"]),
    ),
}


@pytest.fixture
def build() -> Callable[..., Any]:
    """A tiny random model by its name."""
    return make


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """Two sequences of 11 tokens; a third of the labels ignored."""
    generator = torch.Generator().manual_seed(torch.initial_seed() + 1)
    ids = torch.randint(3, VOCAB, (2, 11), generator=generator)
    labels = ids.where(torch.rand(ids.shape, generator=generator) > 0.33, -100)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


@pytest.fixture
def pair() -> Callable[..., tuple[Any, Any]]:
    """A model and a copy of it, to patch the first and compare with the second."""

    def pair(name: str, dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[Any, Any]:
        model = ADAPTED[name]() if name in ADAPTED else make(name, dtype, **settings)
        return model, copy.deepcopy(model)

    return pair


@pytest.fixture
def patched(pair: Callable[..., Any]) -> Callable[..., tuple[Any, Any, PatchReport]]:
    """A patched model, its stock copy, and the report. `settings` are the model's, `parts` those of `patch`."""

    def patched(
        name: str, dtype: torch.dtype = torch.float32, settings: dict[str, Any] | None = None, **parts: Any
    ) -> tuple[Any, Any, PatchReport]:
        model, stock = pair(name, dtype, **(settings or {}))
        return model, stock, lowtide.patch(model, **parts)

    return patched


@pytest.fixture
def one_process() -> Any:
    """A process group of this process alone."""
    dist = torch.distributed
    if not dist.is_available():
        pytest.skip("torch.distributed is not in this build")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


_NODES = {"SwigluMlp": "mlp", "ExpertsMlp": "mlp", "RmsNorm": "norm", "Rotary": "rope"}


def fused(*results: Tensor) -> Counter[str]:
    """Return how many modules of each part ran lowtide's operation: the nodes of it that results' graphs have."""
    found: Counter[str] = Counter()
    seen, left = set(), [result.grad_fn for result in results]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found[_NODES.get(node.name().removesuffix("Backward"), "")] += 1
            left += [following for following, _ in node.next_functions]
    del found[""]
    return found


def assert_same_gradients(model: nn.Module, stock: nn.Module, rtol: float = 1e-5) -> None:
    """Every gradient of `model` is that of `stock`, to `rtol` of it, with a floor at `rtol` of the largest one."""
    expected = {name: p.grad for name, p in stock.named_parameters()}
    floor = rtol * max(g.abs().max().item() for g in expected.values() if g is not None)
    assert floor > 0
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (expected[name] is None), name
        if parameter.grad is not None:
            torch.testing.assert_close(
                parameter.grad, expected[name], rtol=rtol, atol=floor, msg=lambda m, name=name: f"{name}: {m}"
            )


def assert_same_training(
    model: nn.Module,
    stock: nn.Module,
    of: Any,
    *,
    through: Any = None,
    seed: int | None = None,
    gradients: float = 2e-5,
    **tolerance: float,
) -> Tensor:
    """The same value of `of` both, and then all gradients so far, to `gradients`; return the model's value.

    `of` is a function of the model, or the arguments of a call whose loss is compared; `through` runs the model where
    it is not itself; `seed` is set before each.
    """
    function = of if callable(of) else lambda m: m(**of).loss
    values = []
    for m in (model if through is None else through, stock):
        if seed is not None:
            torch.manual_seed(seed)
        values.append(function(m))
        values[-1].sum().backward()
    torch.testing.assert_close(*values, **tolerance)
    assert_same_gradients(model, stock, gradients)
    result: Tensor = values[0]
    return result


def assert_no_further_from_the_truth(
    model: nn.Module, stock: nn.Module, loss: Callable[[nn.Module], Tensor], draws: int = 16
) -> None:
    """The gradients of `model` err by at most 1.25 times what those of `stock` do, in the median over draws of weights.

    With one draw either may be the nearer one by half, and where a router chooses another expert one errs threefold.
    The truth is `stock` in float64, and errors are relative to it.
    """
    errors: tuple[list[float], list[float]] = ([], [])
    for _ in range(draws):
        for p, q in zip(model.parameters(), stock.parameters(), strict=True):
            if p.dim() > 1:
                p.data.normal_(std=q.float().std().item())
                q.data.copy_(p.data)
        exact = copy.deepcopy(stock).double()
        for m in (model, stock, exact):
            m.zero_grad()
            loss(m).backward()
        true = {name: p.grad for name, p in exact.named_parameters() if p.grad is not None}
        norm = sum(grad.square().sum().item() for grad in true.values())
        for i, m in enumerate((model, stock)):
            differences = (p.grad.double() - true[n] for n, p in m.named_parameters() if n in true)
            errors[i].append((sum(d.square().sum().item() for d in differences) / norm) ** 0.5)
    assert 0 < median(errors[0]) <= 1.25 * median(errors[1])


def expect_calls(report: PatchReport, fused: int, built: int = 0) -> None:
    assert (report.calls_fused, report.calls_materialised) == (fused, built), str(report)


# Other libraries' warnings about what they do themselves.
DYNAMO = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
PEFT = [
    pytest.mark.filterwarnings("ignore:.?is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]


def saved_and_loaded(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


# Ways to copy a model.
COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)), "torch.save": saved_and_loaded}


def types_of(model: nn.Module) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules()}


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return each module's class, the names of its attributes, and a forward of its own."""
    return {
        name: (type(module), sorted(vars(module)), {k: id(v) for k, v in vars(module).items() if k == "forward"})
        for name, module in model.named_modules()
    }


def set_level(model: nn.Module, level: int, tile: int | None = None) -> None:
    """Set what patched MLPs keep."""
    for module in model.modules():
        if hasattr(module, "checkpoint_level"):
            module.checkpoint_level = level
            if tile is not None:
                module.tile_tokens = tile


def called_without_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return lazy logits of which nothing was computed yet."""
    logits: Tensor = model(input_ids=batch["input_ids"], num_items_in_batch=3).logits
    return logits


class Doubling(torch.overrides.TorchFunctionMode):
    """Doubles what some functions return."""

    def __init__(self, *functions: Callable[..., Any]) -> None:
        super().__init__()
        self.functions = functions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func in self.functions else result


class OwnFunction(torch.autograd.Function):
    """A custom autograd function, which PyTorch calls past `__torch_function__`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 5.0  # not the gradient of forward, so that going around it shows


V = 300  # past the integers that Python has one object of


class Tiny(nn.Module):
    """The least that can be patched: tracing a Llama takes a hundred times as long. ``tail`` is its loss."""

    def __init__(self, tail: Callable[..., Any]) -> None:
        super().__init__()
        self.embedding, self.lm_head, self.tail = nn.Embedding(V, 8), nn.Linear(8, V), tail

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.lm_head(self.embedding(input_ids).tanh())
        return self.tail(logits, labels), logits
