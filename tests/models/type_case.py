"""One model type of the sweep: a tiny model, stock against patched, loss and every gradient, with logits watched for.

Legend: B sequences of T tokens, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from lowtide.measure.allocations import track_allocations
from models.tiny import HEAD_DIMS, VOCAB, tiny_model

B, T = 2, 23
ORDINARY_TOKENS = VOCAB - 100  # the highest ones stand for images and the like
# One row of logits and what else is stored per token: no chunk of lowtide's can be mistaken for the model's logits.
OPTIONS = lowtide.HeadOptions(workspace_mib=4 * VOCAB * 4 / 2**20)
ULP = 2.0**-23  # of float32, relative
# How many times what an ulp in each weight does to a result may rounding in another order do.
FACTOR = 20.0
KINDS = {  # the class that makes a model of the kind, and its title
    "causal": ("AutoModelForCausalLM", "Causal language models"),
    "image-text": ("AutoModelForImageTextToText", "Images and text"),
    "seq2seq": ("AutoModelForSeq2SeqLM", "Sequence to sequence"),
}
FUSED, FELL_BACK, NOT_BUILT, DIFFERENT = "fused", "fell back", "not built", "different"
CRASHED, TIMED_OUT = "crashed", "timed out"  # neither equal nor different is known of these
COMPARED = (FUSED, FELL_BACK, DIFFERENT)


def types(kind: str) -> list[str]:
    """Return the model types of a kind, in the order of their names."""
    import transformers

    return sorted({config.model_type for config in getattr(transformers, KINDS[kind][0])._model_mapping})


def check(kind: str, model_type: str, seed: int = 0) -> dict[str, Any]:
    """Return a type's row: ``status``, ``why``, ``cases``, ``parts`` and ``tolerances`` (of loss and gradients)."""
    try:
        make, extra = maker(kind, model_type, seed)
    except Exception as error:
        return {"status": NOT_BUILT, "why": _reason(error)}
    try:
        return _compared(make, extra, seed)
    except Exception as error:
        return {"status": CRASHED, "why": _reason(error)}


def maker(kind: str, model_type: str, seed: int) -> tuple[Callable[[], Any], dict[str, Any]]:
    """Return what makes a model that computes a loss, the same one each time, and what it needs beside tokens.

    Where none does, the last error is raised.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    config_class = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]
    auto = getattr(transformers, KINDS[kind][0])
    last: Exception | None = None
    for head_dim in HEAD_DIMS:
        make = functools.partial(tiny_model, auto, config_class, head_dim=head_dim, decoder=kind == "causal", seed=seed)
        try:
            model = make()
            for extra in _extras(model):
                try:
                    run(model, {**batch(seed), **extra})
                except Exception as error:
                    last = error
                else:
                    return make, extra
        except Exception as error:
            last = error
    assert last is not None
    raise last


def _extras(model: Any) -> list[dict[str, Any]]:
    """Return what may have to be passed beside tokens: nothing, then images."""
    names = inspect.signature(model.forward).parameters
    found: list[dict[str, Any]] = [{}]
    vision = getattr(model.config, "vision_config", None) or getattr(model.config, "encoder", None)
    size = getattr(vision, "image_size", None)
    if "pixel_values" in names and isinstance(size, int):
        channels, generator = getattr(vision, "num_channels", 3), torch.Generator().manual_seed(2)
        images = {"pixel_values": torch.rand(B, channels, size, size, generator=generator)}
        found.append(images)
        if "qformer_input_ids" in names:
            found.append({**images, "qformer_input_ids": batch(0)["input_ids"]})
    return found


def batch(seed: int) -> dict[str, Tensor]:
    """Return B sequences of random tokens with a third of the labels ignored."""
    generator = torch.Generator().manual_seed(seed + 1)
    ids = torch.randint(3, ORDINARY_TOKENS, (B, T), generator=generator)
    labels = ids.where(torch.rand(ids.shape, generator=generator) > 0.33, -100)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def cases(model: Any, seed: int) -> dict[str, dict[str, Any]]:
    """Return the batches: what is passed to the model in each, by name."""
    plain = batch(seed)
    mask = plain["attention_mask"].clone()
    mask[0, -5:] = 0
    padded = {**plain, "attention_mask": mask, "labels": plain["labels"].where(mask.bool(), -100)}
    found: dict[str, dict[str, Any]] = {
        "labels": plain,
        "padding": padded,
        "num_items_in_batch": {**plain, "num_items_in_batch": torch.tensor(17)},
        "output_hidden_states": {**plain, "output_hidden_states": True},
    }
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        found["logits_to_keep"] = {**plain, "logits_to_keep": T}
    if hasattr(model.config, "output_router_logits"):
        found["output_router_logits"] = {**plain, "output_router_logits": True}
    return found


def run(model: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Tensor | None]]:
    """Return the model's outputs and every gradient of its loss."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    outputs = model(**inputs)
    if outputs.loss is None:
        raise ValueError("the model returned no loss")
    outputs.loss.backward()
    if not torch.isfinite(outputs.loss):
        raise ValueError(f"the loss is {outputs.loss.item()}")
    return outputs, {name: p.grad for name, p in model.named_parameters()}


def _compared(make: Callable[[], Any], extra: dict[str, Any], seed: int) -> dict[str, Any]:
    stock, model = make(), make()  # not copies: some models keep what belongs to a graph
    report = lowtide.patch(model, options=OPTIONS)
    noise = noise_of(stock, make(), {**batch(seed), **extra})
    found: dict[str, Any] = {
        "parts": {part: sum(r.count for r in (row, *row.more) if r.patched) for part, row in report.parts.items()},
        "tolerances": (noise.loss, sorted(noise.gradients.values())[len(noise.gradients) // 2]),
    }
    results: dict[str, str] = {}
    built = sighted = False
    for name, inputs in cases(stock, seed).items():
        before = report.calls_materialised
        failed = "not for this type"
        try:
            with track_allocations() as seen_stock:
                expected = run(stock, {**inputs, **extra})
            failed = DIFFERENT
            with track_allocations() as seen:
                got = run(model, {**inputs, **extra})
        except Exception as error:
            results[name] = f"{failed}: {_reason(error)}"
            continue
        wrong = difference(got, expected, noise)
        sighted |= name == "labels" and bool(rows_of_logits(seen_stock, stock))
        built |= bool(rows_of_logits(seen, stock)) or report.calls_materialised > before
        if wrong is None and name == "labels":
            wrong = _read_after(got[0], expected[0], noise)
        results[name] = "equal" if wrong is None else f"{DIFFERENT}: {wrong}"
        _save_less(model)  # in the batches behind the first
    status, why = _status(results, report, built=built, sighted=sighted)
    return {**found, "cases": results, "status": status, "why": why}


def _save_less(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "checkpoint_level"):
            vars(module)["checkpoint_level"] = 1


def _status(results: dict[str, str], report: lowtide.PatchReport, *, built: bool, sighted: bool) -> tuple[str, str]:
    wrong = [f"{name}: {text}" for name, text in results.items() if text.startswith(DIFFERENT)]
    if wrong:
        return DIFFERENT, "; ".join(wrong)
    if not sighted:
        return FELL_BACK, "the stock model builds no logits that could be watched for"
    if not built and report.calls_fused:
        return FUSED, ""
    loss = report.parts["loss"]
    reasons = [why for why in report.why_materialised if why != READ_AFTER]
    if not loss.patched:
        reasons = [loss.outcome.removeprefix("left as it is: ")]
    return FELL_BACK, "; ".join(reasons) or "logits were built, and the report does not count them"


READ_AFTER = "read by TensorBase.positive"


def _read_after(found: Any, expected: Any, noise: Noise) -> str | None:
    """Return how logits that are read after the loss differ, None where they do not."""
    logits, stock = (getattr(outputs, "logits", None) for outputs in (found, expected))
    if not isinstance(stock, Tensor):
        return None
    if not isinstance(logits, Tensor) or logits.shape != stock.shape or logits.dtype != stock.dtype:
        return "the logits read after the loss have another shape or dtype"
    error = (logits.positive() - stock).abs().max().item()
    return None if error <= noise.logits else f"the logits read after the loss differ by {error:.1e}"


@dataclass(frozen=True)
class Noise:
    """What rounding may do to a model's results: the tolerances.

    Attributes:
        loss: of the loss, absolute.
        logits: of the logits, absolute.
        gradients: of each gradient, by its parameter's name; relative to its largest entry.
        floor: of any gradient, relative to the largest entry of all.
    """

    loss: float
    logits: float
    gradients: dict[str, float]
    floor: float = 16 * ULP


def noise_of(stock: Any, shaken: Any, inputs: dict[str, Any]) -> Noise:
    """Return `FACTOR` times what one ulp more or less in each weight changes, and a floor of a few ulps."""
    outputs, gradients = run(stock, inputs)
    gradients = {name: g if g is None else g.clone() for name, g in gradients.items()}
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in shaken.parameters():
            p.mul_(1 + ULP * (2.0 * torch.randint(0, 2, p.shape, generator=generator) - 1))
    other, shaken_gradients = run(shaken, inputs)
    relative = {}
    for name, g in gradients.items():
        again = shaken_gradients[name]
        largest = _largest(g)
        moved = 0.0 if g is None or again is None else _largest(again - g)
        relative[name] = FACTOR * (moved / largest if largest else 0.0) + 16 * ULP
    loss = FACTOR * abs(float(other.loss - outputs.loss)) + 16 * ULP * abs(float(outputs.loss))
    logits = 0.0
    if isinstance(getattr(outputs, "logits", None), Tensor):
        logits = FACTOR * _largest(other.logits - outputs.logits) + 16 * ULP * _largest(outputs.logits)
    return Noise(loss, logits, relative)


def _largest(t: Tensor | None) -> float:
    return 0.0 if t is None else t.abs().max().item()


def difference(found: Any, expected: Any, noise: Noise) -> str | None:
    """Return the first way in which outputs and gradients differ by more than rounding does, None where they agree."""
    (outputs, gradients), (stock, stock_gradients) = found, expected
    error = abs(float(outputs.loss) - float(stock.loss))
    if not error <= noise.loss:
        return f"the loss {float(outputs.loss):.7g} is not {float(stock.loss):.7g}"
    largest = max(map(_largest, stock_gradients.values()), default=0.0)
    for name, g in stock_gradients.items():
        got = gradients[name]
        if (got is None) != (g is None):
            return f"{name} has {'no' if got is None else 'a'} gradient"
        if g is None or got is None:
            continue
        error = _largest(got - g)
        allowed = noise.gradients[name] * _largest(g) + noise.floor * largest
        if not error <= allowed:
            return f"the gradient of {name} differs by {error:.1e} of {_largest(g):.1e}, allowed {allowed:.1e}"
    return None


def rows_of_logits(seen: Any, model: nn.Module) -> list[int]:
    """Return the rows of allocations that may be logits: V columns, half a batch's tokens or more, and no parameter."""
    parameters = {p.numel() * p.element_size() for p in model.parameters()}
    sizes = {event.bytes for event in seen.events if event.bytes > 0} - parameters
    rows = {size / VOCAB / itemsize for size in sizes for itemsize in (2, 4, 8)}
    return sorted(int(n) for n in rows if n.is_integer() and n >= B * T / 2)


def _reason(error: BaseException) -> str:
    """Return an error as one line, and where in the model it came from."""
    text = " ".join(str(error).split())[:200]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "transformers" in f.filename]
    where = f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{where}"
