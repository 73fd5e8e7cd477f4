import copy
import functools
import io
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.models import PatchReport, experts_part, mlp_part, norm_part, rope_part

transformers = pytest.importorskip("transformers")

VOCAB = 97
_SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_BERT = {**{k: v for k, v in _SHAPE.items() if k not in ("num_key_value_heads", "head_dim")}, "is_decoder": True}
_GPT2 = {
    "vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip

# name -> (class, its own settings). Dropout is off: both models of a comparison would draw their own.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {}),
    "qwen3-moe": (
        "Qwen3Moe",
        # the grouped GEMM knows no float64
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "output_router_logits": True,
            "experts_implementation": "eager",
        },
    ),
    "gemma2": ("Gemma2", {"final_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3", {"final_logit_softcapping": 0.7, "sliding_window": 8}),
    "cohere2": ("Cohere2", {"logit_scale": 0.25, "sliding_window": 8}),
    "granite": ("Granite", {"logits_scaling": 3.0}),
    "phi3": ("Phi3", {}),
    "phi": ("Phi", {}),  # a head with a bias
    "gpt2": ("GPT2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "mistral": ("Mistral", {}),
    "qwen2": ("Qwen2", {}),
    "olmo2": ("Olmo2", {}),
    "glm4": ("Glm4", {}),  # gate and up in one projection, rotations of interleaved pairs
    "gpt-neox": ("GPTNeoX", {"attention_dropout": 0.0, "hidden_dropout": 0.0}),
    "bert": ("Bert", {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "roberta": ("Roberta", {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
}
# Models whose heads and losses are another's in the list; their parts are tested one by one.
ALIKE = ("qwen3", "mistral", "qwen2", "olmo2", "glm4", "gpt-neox", "roberta")
_CONFIGS = {"Gemma3": "Gemma3TextConfig"}
_CLASSES = {"Bert": "BertLMHeadModel", "GPT2": "GPT2LMHeadModel"}


def saved_and_loaded(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


@pytest.fixture
def build() -> Callable[..., Any]:
    """A tiny random model by its name in MODELS; its weights are large enough for losses to differ from log(V)."""

    def build(name: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
        family, own = MODELS[name]
        shape = {"GPT2": _GPT2, "Bert": _BERT, "Roberta": _BERT}.get(family, _SHAPE)
        config = getattr(transformers, _CONFIGS.get(family, f"{family}Config"))(**{**shape, **own, **settings})
        torch.manual_seed(0)
        model = getattr(transformers, _CLASSES.get(family, f"{family}ForCausalLM"))(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        return model.to(dtype).train()

    return build


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """Two sequences of 11 tokens; a third of the labels ignored."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (2, 11), generator=generator)
    labels = ids.where(torch.rand(ids.shape, generator=generator) > 0.33, -100)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


@pytest.fixture
def pair(build: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """A model and a copy of it, to patch the first and compare with the second."""

    def pair(name: str, dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[Any, Any]:
        model = build(name, dtype, **settings)
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
def ran(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each fused operation was called, by its name."""
    counts: Counter[str] = Counter()

    def counted(name: str, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        counts[name] += name != "experts_mlp" or torch.is_grad_enabled()  # its probe calls it without
        return stock(*args, **kwargs)

    operations = (
        (mlp_part, "plain_mlp", "swiglu_mlp"),
        (mlp_part, "adapted_mlp", "adapted_mlp"),
        (experts_part, "experts_mlp", "experts_mlp"),
        (norm_part, "checked_rms_norm", "rms_norm"),
        (rope_part, "checked_rotary", "rotary"),
    )
    for part, called, name in operations:
        monkeypatch.setattr(part, called, functools.partial(counted, name, getattr(part, called)))
    return counts


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
    gradients: float = 1e-5,
    **tolerance: float,
) -> None:
    """The same value of `of` both, and then all gradients so far, to `gradients`.

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


def assert_no_further_from_the_truth(
    model: nn.Module, stock: nn.Module, loss: Callable[[nn.Module], Tensor], draws: int
) -> None:
    """The gradients of `model` err by at most 1.2 times what those of `stock` do, in the mean over draws of weights.

    With one draw either may be the nearer one by half. The truth is `stock` in float64.
    """
    squares = [0.0, 0.0]
    for seed in range(draws):
        torch.manual_seed(seed)
        for p, q in zip(model.parameters(), stock.parameters(), strict=True):
            if p.dim() > 1:
                p.data.normal_(std=q.float().std().item())
                q.data.copy_(p.data)
        exact = copy.deepcopy(stock).double()
        for m in (model, stock, exact):
            m.zero_grad()
            loss(m).backward()
        true = {name: p.grad for name, p in exact.named_parameters() if p.grad is not None}
        for i, m in enumerate((model, stock)):
            errors = (p.grad.double() - true[n] for n, p in m.named_parameters() if n in true)
            squares[i] += sum(error.square().sum().item() for error in errors)
    assert 0 < squares[0] <= 1.2**2 * squares[1]


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
]

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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "any_model" in metafunc.fixturenames:
        names = [name if name not in ALIKE else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
        metafunc.parametrize("any_model", names)
