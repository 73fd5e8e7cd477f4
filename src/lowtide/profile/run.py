"""``lowtide profile``: each implementation in its own process, then tables, plot, page and json."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lowtide.bench.harness import OUT_OF_MEMORY, Benchmark, Row, Run, chosen_device, replace
from lowtide.bench.models import config_of, language_part
from lowtide.bench.variant import OURS
from lowtide.errors import LowtideError
from lowtide.measure.child import ALLOCATOR, ChildResult, run_child
from lowtide.measure.plots import NO_PLOT
from lowtide.plan.arguments import PlanArguments
from lowtide.plan.gpus import DEFAULT as ANY_GPU
from lowtide.plan.gpus import GPUS, known_as
from lowtide.plan.job import Job
from lowtide.plan.layer_costs import flop_of_layers
from lowtide.plan.shapes import read_shape
from lowtide.profile.config import AUTO, ProfileConfig
from lowtide.profile.phases import BACKWARD, FORWARD, HEAD, HEAD_BACKWARD
from lowtide.profile.plot import draw_profile
from lowtide.profile.report import ROWS, tables, title_of, write_page
from lowtide.profile.steps import measure
from lowtide.train.shapes import DEFAULT, SHAPES, VOCAB_SIZE

GPU_MODEL, GPU_TOKENS, CPU_TOKENS = "llama-3.2-1b", 8192, 1024
_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads")


def _model_name(config: ProfileConfig, device: torch.device) -> str:
    return config.model if config.model != AUTO else GPU_MODEL if device.type == "cuda" else DEFAULT


def _check(config: ProfileConfig) -> None:
    device = chosen_device(config.device)
    if device.type == "cpu":
        config.check_cpu()
    language_part(config_of(_model_name(config, device)))


def _measure(run: Run[ProfileConfig]) -> None:
    """Measure each implementation, and write the plot and the page."""
    _describe_job(run)
    rows: list[Row] = []
    run.result["implementations"] = rows
    run.say(f"{title_of(run.result)}\n\n{ROWS.header}")
    for name, variant in run.config.variants.items():
        stem = f"{run.files.json.with_suffix('')}-{re.sub('[^A-Za-z0-9.]+', '-', name)}"
        ended = run_child(measure, dataclasses.asdict(variant), run.result["settings"], stem, env=ALLOCATOR)
        row = {"name": name, "impl": variant.impl, "policy": variant.policy, **_result(ended)}
        add_rates(row, run.result["step_tflop"], run.result["peak_tflops"])
        run.add(row, rows, ROWS)
    run.say(tables(run.result))
    _write_pages(run)


def _describe_job(run: Run[ProfileConfig]) -> None:
    """Add to the result what is measured: settings without "auto", the model, its FLOP and the device's peak."""
    config, cuda = run.config, run.device.type == "cuda"
    name, vocab_size = _model_name(config, run.device), VOCAB_SIZE
    whole = config_of(name, vocab_size=vocab_size)
    model = language_part(whole)
    settings = {
        **{key: value for key, value in config.recorded().items() if key not in ("impl", "policy", "variants")},
        "model": name,
        "vocab_size": vocab_size,
        "dtype": run.dtype_name,
        "device": run.device.type,
        "seq_len": config.seq_len or (GPU_TOKENS if cuda else CPU_TOKENS),
        "memory_limit": config.memory_limit_gib,
    }
    inside = "" if model is whole else f", the {model.model_type} inside"
    text = model.get_text_config()
    peak = device_peak(run.device, run.dtype)
    flop, why_not = step_flop(model.to_dict(), settings["seq_len"], config.batch_size, lora=config.lora > 0)
    run.result |= {
        "settings": settings,
        "model": {
            "name": (name if name in SHAPES else Path(name).resolve().stem) + inside,
            "model_type": text.model_type,
            **{size: getattr(text, size, None) for size in _SIZES},
        },
        "peak_tflops": None if peak is None else peak / 1e12,
        "step_tflop": {kind: value / 1e12 for kind, value in flop.items()},
        "flop_note": why_not,
    }


def step_flop(
    settings: Mapping[str, Any], seq_len: int, batch_size: int, *, lora: bool
) -> tuple[dict[str, float], str | None]:
    """Return the FLOP of a step's GEMMs by kind of phase, and why there are none if the model cannot be counted.

    Two per multiply-add; causal attention without the masked half; backward twice forward; recompute does not count.
    With ``lora`` GEMMs have one gradient, not two, as weights are frozen; the adapters' own GEMMs do not count.
    """
    try:
        shape = read_shape(settings)
    except LowtideError as error:
        return {}, str(error).partition(". ")[0]  # without the planner's hint
    given = PlanArguments(seq_len=seq_len, batch_size=batch_size, device=ANY_GPU, dtype="bfloat16")
    job = Job.of(shape, given)  # the formulas read neither GPU, dtype nor optimizer
    gemms, attention = flop_of_layers(job)
    head, gradients = 2.0 * job.tokens * shape.vocab_params, 1 if lora else 2
    backward = gradients * gemms + 2 * attention
    return {FORWARD: gemms + attention, HEAD: head, HEAD_BACKWARD: gradients * head, BACKWARD: backward}, None


def device_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the device's FLOP per second for a dtype according to its data sheet, None if we have none."""
    name = known_as(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if name is None:
        return None
    return GPUS[name].peak32 if dtype == torch.float32 else GPUS[name].peak


def add_rates(row: dict[str, Any], tflop: Mapping[str, float], peak_tflops: float | None) -> None:
    """Add TFLOP/s of the parts and of the whole step, and the share of the device's peak."""
    if not tflop or "seconds" not in row:
        return
    times = row["time_by_kind_ms"]
    kinds = {"forward": (FORWARD,), "head": (HEAD, HEAD_BACKWARD), "backward": (BACKWARD,)}
    parts = {name: (sum(tflop[k] for k in of), sum(times[k] for k in of)) for name, of in kinds.items()}
    parts["step"] = (sum(tflop.values()), row["seconds"] * 1e3)
    row["tflops"] = {name: work / ms * 1e3 for name, (work, ms) in parts.items() if ms > 0}
    if peak_tflops is not None:
        row["mfu"] = row["tflops"]["step"] / peak_tflops


def _result(ended: ChildResult) -> dict[str, Any]:
    """Return a process's result, or why there is none."""
    if ended.returncode == 0 and ended.value:
        result: dict[str, Any] = ended.value
        return result
    if ended.returncode < 0:
        hint = " (the system kills processes that take too much host memory)" if ended.returncode == -9 else ""
        return {"failed": f"ended by signal {-ended.returncode}{hint}"}
    lines = [text for text in ended.stderr.strip().splitlines() if text.strip()]
    errors = [text for text in lines if re.match(r"[\w.]+(Error|Exception)\b", text)]
    return {"failed": (errors or lines or [f"ended with status {ended.returncode}"])[-1][:300]}


def _write_pages(run: Run[ProfileConfig]) -> None:
    """Write the plot and the page, and print their paths; the harness prints the json's."""
    plot, page = (run.files.json.with_suffix(suffix) for suffix in (".png", ".html"))
    drawn = any("peak" in row for row in run.result["implementations"])
    if drawn and importlib.util.find_spec("matplotlib") is None:
        run.say(f"no plot: matplotlib is not installed. {NO_PLOT}\n")
        drawn = False
    if drawn:
        replace(plot, lambda file: draw_profile(file, run.result))
        run.say(f"written: {plot}\n")
    replace(page, lambda file: write_page(file, run.result, plot if drawn else None))
    run.say(f"written: {page}\n")


PROFILE = Benchmark(
    measure=_measure,
    failed=lambda row: row["impl"] in OURS and not row.get("failed", OUT_OF_MEMORY).startswith(OUT_OF_MEMORY),
    packages=("liger-kernel", "peft", "bitsandbytes"),
    check=_check,
)
