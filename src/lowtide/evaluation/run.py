"""One evaluation: the model and the data are loaded, windows and tasks are scored, the figures are printed."""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from lowtide.errors import ArgumentValueError, UnsupportedError, message
from lowtide.evaluation.config import EvalConfig
from lowtide.evaluation.windows import Windows, batches, document_of
from lowtide.measure.failures import is_out_of_memory
from lowtide.measure.machine import describe_machine, source_commit
from lowtide.measure.resident import cuda_peak_bytes, peak_resident_bytes, reset_cuda_peak, reset_peak_resident
from lowtide.measure.units import mib
from lowtide.models import PatchReport, scoring
from lowtide.train.config import columns_of
from lowtide.train.files import find_data
from lowtide.train.model import check_model, check_vocabulary, pretrained_model
from lowtide.train.shapes import config_file, model_folder
from lowtide.train.tokenizer import check_template, load_tokenizer
from lowtide.train.tokens import IGNORED

Say = Callable[[str], object]


@dataclass(frozen=True)
class Perplexity:
    """How well text was predicted.

    Attributes:
        documents: how many there were.
        skipped: rows without text, and conversations without a turn of the assistant.
        windows: how many the model was given.
        tokens: how many were scored.
        bytes: of the scored text in UTF-8.
        nats: the negative log-likelihood of all scored tokens.
        seconds: for all of it, tokenising included.
        peak_bytes: the peak memory: of tensors on a GPU, of the process on a CPU.
    """

    documents: int
    skipped: int
    windows: int
    tokens: int
    bytes: int
    nats: float
    seconds: float
    peak_bytes: int

    @property
    def mean_loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """The exponential of the mean loss; infinite where that has no float."""
        return math.exp(self.mean_loss) if self.mean_loss < 709 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of the text."""
        return self.nats / math.log(2) / self.bytes

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON has them: null for one that is not finite."""
        own = ("mean_loss", "perplexity", "bits_per_byte")
        figures = asdict(self) | {name: getattr(self, name) for name in own}
        return {name: value if math.isfinite(value) else None for name, value in figures.items()}


def run(config: EvalConfig, say: Say) -> None:
    """Evaluate as the config says, print the figures and write them.

    Raises:
        ArgumentValueError: the model, the data or a task cannot be used, or the file not be written.
        UnsupportedError: memory ran out.
    """
    if config.json is not None:
        _check_writable(Path(config.json))
    device = _device(config)
    model, tokenizer = _loaded(config, device)
    result: dict[str, Any] = {}
    with _scores(model, config) as report, _memory_suffices():
        if config.data:
            found = _perplexity(config, model, tokenizer)
            result["data"] = found.to_json()
            say(_text(found, device))
        if config.tasks:
            from lowtide.evaluation.harness import run_tasks

            reset_peak(device)
            result["tasks"], table = run_tasks(config, model, tokenizer)
            result["tasks"]["peak_bytes"] = peak_bytes(device)
            say(f"{table}\n{_line('peak memory', _memory(result['tasks']['peak_bytes'], device))}")
    if report is not None:
        result["calls"] = {"scored": report.calls_fused, "built": report.calls_materialised}
        result["why_built"] = report.why_materialised
        say(_calls(report))
    if config.json is not None:
        about = {"command": config.command(), "config": config.recorded()}
        _write(Path(config.json), {**about, **result, "machine": describe_machine(("lm-eval", "datasets"))})
        say(f"written: {config.json}\n")


def _device(config: EvalConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ArgumentValueError(message("device", "a GPU", "none", "Leave it out on a CPU."))
    return torch.device("cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu")


def _loaded(config: EvalConfig, device: torch.device) -> tuple[Any, Any]:
    """Return the model and its tokenizer, checked."""
    assert config.model is not None
    folder = model_folder(config.model) or config_file(config.model).parent
    tokenizer = load_tokenizer(config.tokenizer or folder)
    model = pretrained_model(folder, dtype="auto" if config.dtype == "auto" else getattr(torch, config.dtype))
    check_vocabulary(model.config, len(tokenizer))
    check_model(model, seq_len=config.seq_len)
    return model.to(device).eval(), tokenizer


@contextmanager
def _scores(model: Any, config: EvalConfig) -> Iterator[PatchReport | None]:
    with scoring(model) if config.patch else nullcontext() as report:
        yield report


@contextmanager
def _memory_suffices() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        hint = "Lower --batch-size or --seq-len."
        raise UnsupportedError(message("memory", "enough for a batch", "less", hint)) from error


def _perplexity(config: EvalConfig, model: Any, tokenizer: Any) -> Perplexity:
    from lowtide.train.rows import load_rows

    rows, notes = load_rows(
        find_data(config.data),
        columns=columns_of(config.columns),
        text_field="text",
        check=lambda row: check_template(tokenizer, row),
        check_key=str(tokenizer.chat_template),
    )
    documents = (document_of(row, tokenizer) for row in itertools.islice(rows, config.limit))
    stride = config.stride or config.seq_len
    windows = Windows(documents, tokenizer, seq_len=config.seq_len, stride=stride, pack=config.pack)
    count, tokens, nats = 0, 0, 0.0
    reset_peak(model.device)
    begin = time.perf_counter()
    for batch in batches(windows, config.batch_size):
        targets = batch.targets.to(model.device)
        with torch.inference_mode():
            given = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
            logits = model(**{name: x.to(model.device) for name, x in given.items()}, use_cache=False).logits
            losses = F.cross_entropy(
                logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
            )
            nats += float(losses.double().sum())
        tokens += int((batch.targets != IGNORED).sum())
        count += len(targets)
    if tokens == 0:
        raise ArgumentValueError(message("data", "texts with at least one token", "none"))
    seconds = time.perf_counter() - begin
    peak = peak_bytes(model.device)
    return Perplexity(windows.documents, notes.skipped, count, tokens, windows.bytes, nats, seconds, peak)


def reset_peak(device: torch.device) -> None:
    """Begin to measure the peak memory on a device."""
    if device.type == "cuda":
        reset_cuda_peak()
    else:
        reset_peak_resident()


def peak_bytes(device: torch.device) -> int:
    """Return the peak since `reset_peak`: of tensors on a GPU, of the process on a CPU."""
    return cuda_peak_bytes() if device.type == "cuda" else peak_resident_bytes()


def _text(found: Perplexity, device: torch.device) -> str:
    skipped = f"; {found.skipped:,} rows skipped" if found.skipped else ""
    rows = (
        ("tokens", f"{found.tokens:,} of {found.documents:,} documents, in {found.windows:,} windows{skipped}"),
        ("mean loss", f"{found.mean_loss:.4f}"),
        ("perplexity", f"{found.perplexity:,.3f}"),
        ("bits per byte", f"{found.bits_per_byte:.4f}"),
        ("speed", f"{found.tokens / found.seconds:,.0f} tokens/s"),
        ("peak memory", _memory(found.peak_bytes, device)),
    )
    return "".join(_line(*row) for row in rows)


def _memory(size: int, device: torch.device) -> str:
    return f"{mib(size):,.0f} MiB {'of tensors on the GPU' if device.type == 'cuda' else 'resident'}"


def _calls(report: PatchReport) -> str:
    text = f"{report.calls_fused:,} scored without logits, {report.calls_materialised:,} with the logits built"
    reasons = [f"  {times:,} x {why}\n" for why, times in report.why_materialised.items()]
    if not report.parts["loss"].patched:
        reasons.append(f"  {report.parts['loss'].outcome}\n")
    return _line("calls", text) + "".join(reasons)


def _line(name: str, value: str) -> str:
    return f"{name:<15}  {value}\n"


def _write(file: Path, content: dict[str, Any]) -> None:
    """Write JSON beside the file and rename it when it is whole.

    Raises:
        ArgumentValueError: it cannot be written.
    """
    with _beside(file) as aside:
        aside.write_text(json.dumps({**content, "commit": source_commit()}, indent=1, default=str) + "\n")
        aside.replace(file)


def _check_writable(file: Path) -> None:
    """Check that `_write` can write.

    Raises:
        ArgumentValueError: it cannot.
    """
    if file.is_dir():
        raise ArgumentValueError(message("json", "a file", f"the folder {file}"))
    with _beside(file) as aside:
        aside.touch()
        aside.unlink()


@contextmanager
def _beside(file: Path) -> Iterator[Path]:
    aside = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        yield aside
    except OSError as error:
        with suppress(OSError):  # its name may be why
            aside.unlink(missing_ok=True)
        raise ArgumentValueError(message("json", "a file that can be written", f"{file} ({error})")) from error
