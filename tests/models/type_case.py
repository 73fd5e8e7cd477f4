"""One model type of the sweep: a tiny model, stock against patched, loss and every gradient, with logits watched for.

Legend: B sequences of T tokens, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable
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
LOSS, LOGITS = "the loss", "the logits"
Results = dict[str, Tensor | None]  # these, and gradients by the names of their parameters
FUSED, FELL_BACK, NOT_BUILT, DIFFERENT = "fused", "fell back", "not built", "different"
CRASHED, TIMED_OUT = "crashed", "timed out"  # neither equal nor different is known of these
COMPARED = (FUSED, FELL_BACK, DIFFERENT)


def types(kind: str) -> list[str]:
    """Return the model types of a kind, in the order of their names."""
    import transformers

    return sorted({config.model_type for config in getattr(transformers, KINDS[kind][0])._model_mapping})


def check(kind: str, model_type: str, seed: int = 0) -> dict[str, Any]:
    """Return a type's row: ``status``, ``why``, ``cases``, ``parts`` and ``tolerances`` (the loss's, the median)."""
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


def run(model: Any, inputs: dict[str, Any]) -> tuple[Results, Any]:
    """Return the model's loss with every gradient of it, by its parameter's name, and the outputs."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    outputs = model(**inputs)
    if outputs.loss is None:
        raise ValueError("the model returned no loss")
    outputs.loss.backward()
    if not torch.isfinite(outputs.loss):
        raise ValueError(f"the loss is {outputs.loss.item()}")
    return {LOSS: outputs.loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}, outputs


def logits_of(outputs: Any) -> Results:
    """Return the logits, read: none where the model has another form of them."""
    logits = getattr(outputs, "logits", None)
    return {LOGITS: logits.positive().detach() if isinstance(logits, Tensor) else None}


def _compared(make: Callable[[], Any], extra: dict[str, Any], seed: int) -> dict[str, Any]:
    stock, model = make(), make()  # not copies: some models keep what belongs to a graph
    report = lowtide.patch(model, options=OPTIONS)
    noise = noise_of(stock, make(), {**batch(seed), **extra})
    found: dict[str, Any] = {
        "parts": {part: sum(r.count for r in (row, *row.more) if r.patched) for part, row in report.parts.items()},
        "tolerances": (noise[LOSS], sorted(noise.values())[len(noise) // 2]),
    }
    results: dict[str, str] = {}
    built = sighted = False
    for name, inputs in cases(stock, seed).items():
        before = report.calls_materialised
        failed = "not for this type"
        try:
            with track_allocations() as seen_stock:
                expected, stock_outputs = run(stock, {**inputs, **extra})
            failed = DIFFERENT
            with track_allocations() as seen:
                got, outputs = run(model, {**inputs, **extra})
        except Exception as error:
            results[name] = f"{failed}: {_reason(error)}"
            continue
        sighted |= name == "labels" and bool(rows_of_logits(seen_stock, stock))
        built |= bool(rows_of_logits(seen, stock)) or report.calls_materialised > before
        if name == "labels":
            got, expected = got | logits_of(outputs), expected | logits_of(stock_outputs)
        wrong = difference(got, expected, noise)
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


def noise_of(stock: Any, shaken: Any, inputs: dict[str, Any]) -> dict[str, float]:
    """Return what rounding may do to each result, relative to its largest value.

    `FACTOR` times what one ulp more or less in each weight does, and a few ulps.
    """
    results, outputs = run(stock, inputs)
    results |= logits_of(outputs)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in shaken.parameters():
            p.mul_(1 + ULP * (2.0 * torch.randint(0, 2, p.shape, generator=generator) - 1))
    others, outputs = run(shaken, inputs)
    others |= logits_of(outputs)
    noise = {}
    for name, t in results.items():
        other, most = others[name], _largest(t)
        moved = 0.0 if t is None or other is None or not most else _largest(other - t) / most
        noise[name] = FACTOR * moved + 16 * ULP
    return noise


def _largest(t: Tensor | None) -> float:
    return 0.0 if t is None else t.abs().max().item()


def difference(results: Results, stock: Results, noise: dict[str, float]) -> str | None:
    """Return the first result that differs by more than rounding does, None where all agree."""
    largest = max((_largest(t) for name, t in stock.items() if name not in (LOSS, LOGITS)), default=0.0)
    for name, expected in stock.items():
        got = results[name]
        if got is None or expected is None:
            if got is not expected:
                return f"{name} is {'None' if got is None else 'not None'}"
            continue
        if got.shape != expected.shape or got.dtype != expected.dtype:
            return f"{name}: {got.dtype} {list(got.shape)} for {expected.dtype} {list(expected.shape)}"
        floor = 0.0 if name in (LOSS, LOGITS) else 16 * ULP * largest
        error, allowed = _largest(got - expected), noise[name] * _largest(expected) + floor
        if not error <= allowed:
            return f"{name} differs by {error:.1e} of {_largest(expected):.1e}, allowed {allowed:.1e}"
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
