"""``lowtide profile``: each implementation in its own process, then tables, plot, page and json."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from lowtide.bench.harness import OUT_OF_MEMORY, Benchmark, Row, Run, chosen_device
from lowtide.bench.results import replace
from lowtide.bench.way import OURS, Way
from lowtide.bench.ways import language_part
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
from lowtide.profile.page import write_page
from lowtide.profile.phases import BACKWARD, FORWARD, HEAD, HEAD_BACKWARD
from lowtide.profile.plot import draw_profile
from lowtide.profile.steps import measure
from lowtide.profile.tables import ROWS, tables, title_of
from lowtide.train.config import TrainConfig
from lowtide.train.model import model_config
from lowtide.train.shapes import DEFAULT, SHAPES

GPU_MODEL, GPU_TOKENS, CPU_TOKENS = "llama-3.2-1b", 8192, 1024
_OWN = ("output", "impl", "policy", "fsdp")  # settings of this process alone


def _check(config: ProfileConfig) -> None:
    config.check_here()
    config.check_device(chosen_device(config.device).type, gpus=torch.cuda.device_count())
    _language_model(config)


def _measure(run: Run[ProfileConfig]) -> None:
    """Measure each implementation, and write the plot and the page."""
    _describe_job(run)
    rows: list[Row] = []
    run.result["implementations"] = rows
    run.say(f"{title_of(run.result)}\n\n{ROWS.header}")
    for name, way in run.config.ways.items():
        stem = f"{run.files.json.with_suffix('')}-{re.sub('[^A-Za-z0-9.]+', '-', name)}"
        ended = _in_children(way, run.result["settings"], stem)
        row = {"name": name, "impl": way.impl, "policy": way.policy, **_result(ended)}
        add_rates(row, run.result["step_tflop"], run.result["peak_tflops"])
        run.add(row, rows, ROWS)
    run.say(tables(run.result))
    _write_pages(run)


def _describe_job(run: Run[ProfileConfig]) -> None:
    """Add to the result what is measured: settings without "auto", the model, its FLOP and the device's peak."""
    config, cuda = run.config, run.device.type == "cuda"
    name = _model_name(config, cuda=cuda)
    whole, model = _language_model(config)
    settings = {
        **{name: value for name, value in dataclasses.asdict(config).items() if name not in _OWN},
        "model": name,
        "seq_len": config.seq_len or (GPU_TOKENS if cuda else CPU_TOKENS),
        "vocab_size": TrainConfig.vocab_size,
        "dtype": run.dtype_name,
        "device": run.device.type,
        "sharding": config.sharding,
        "memory_limit": config.memory_limit_gib,
    }
    inside = "" if model is whole else f", the {model.model_type} inside"
    text = model.get_text_config()
    sizes = ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads")
    peak = device_peak(run.device, run.dtype)
    flop, why_not = step_flop(model.to_dict(), settings["seq_len"], config.batch_size, lora=config.lora > 0)
    run.result |= {
        "settings": settings,
        "model": {
            "name": (name if name in SHAPES else Path(name).resolve().stem) + inside,
            "model_type": text.model_type,
            **{size: getattr(text, size, None) for size in sizes},
        },
        "peak_tflops": None if peak is None else peak / 1e12,
        "step_tflop": {kind: value / 1e12 for kind, value in flop.items()},
        "flop_note": why_not,
    }


def _model_name(config: ProfileConfig, *, cuda: bool) -> str:
    return (GPU_MODEL if cuda else DEFAULT) if config.model == AUTO else config.model


def _language_model(config: ProfileConfig) -> tuple[Any, Any]:
    """Return the config of the model, and of the causal language model inside it, which may be itself."""
    name = _model_name(config, cuda=chosen_device(config.device).type == "cuda")
    whole = model_config(name, vocab_size=TrainConfig.vocab_size)
    return whole, language_part(whole)


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
    head = 2.0 * job.tokens * shape.vocab_params
    gradients = 1 if lora else 2
    flop = {
        FORWARD: gemms + attention,
        HEAD: head,
        HEAD_BACKWARD: gradients * head,
        BACKWARD: gradients * gemms + 2 * attention,
    }
    return flop, None


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
    parts = {
        "forward": (tflop[FORWARD], times[FORWARD]),
        "head": (tflop[HEAD] + tflop[HEAD_BACKWARD], times[HEAD] + times[HEAD_BACKWARD]),
        "backward": (tflop[BACKWARD], times[BACKWARD]),
        "step": (sum(tflop.values()), row["seconds"] * 1e3),
    }
    row["tflops"] = {name: work / ms * 1e3 for name, (work, ms) in parts.items() if ms > 0}
    if peak_tflops is not None:
        row["mfu"] = row["tflops"]["step"] / peak_tflops


def _in_children(way: Way, settings: dict[str, Any], stem: str) -> list[ChildResult]:
    """Run an implementation's ranks, each a process, and return how they ended, in order."""
    arguments = (dataclasses.asdict(way), settings, stem)
    if settings["sharding"] == "none":
        return [run_child(measure, *arguments, env=ALLOCATOR)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = settings["gpus"]
    group = {**ALLOCATOR, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def run_rank(rank: int) -> ChildResult:
        return run_child(measure, *arguments, env={**group, "RANK": str(rank), "LOCAL_RANK": str(rank)})

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run_rank, range(world)))


def _result(ended: list[ChildResult]) -> dict[str, Any]:
    """Return the first rank's result, or why there is none: the last line of a rank that failed."""
    if ended[0].value is not None:
        return dict(ended[0].value)
    failed = next((one for one in ended if one.returncode not in (0, -15)), ended[0])
    if failed.returncode < 0:
        hint = " (the system kills processes that take too much host memory)" if failed.returncode == -9 else ""
        return {"failed": f"ended by signal {-failed.returncode}{hint}"}
    lines = [text for text in failed.stderr.strip().splitlines() if text.strip()]
    errors = [text for text in lines if re.match(r"[\w.]+(Error|Exception)\b", text)]
    last = (errors or lines or [f"ended with status {failed.returncode}"])[-1]
    return {"failed": last.removeprefix("lowtide.errors.UnsupportedError: ")[:300]}


def _write_pages(run: Run[ProfileConfig]) -> None:
    """Write the plot and the page, and print their paths; the harness prints the json's."""
    plot: Path | None = run.files.json.with_suffix(".png")
    if importlib.util.find_spec("matplotlib") is None:
        run.say(f"no plot: matplotlib is not installed. {NO_PLOT}\n")
        plot = None
    elif plot is not None and any("peak" in row for row in run.result["implementations"]):
        replace(plot, lambda at: draw_profile(at, run.result))
        run.say(f"written: {plot}\n")
    else:
        plot = None
    page = run.files.json.with_suffix(".html")
    replace(page, lambda at: write_page(at, run.result, plot))
    run.say(f"written: {page}\n")


PROFILE = Benchmark(
    measure=_measure,
    failed=lambda row: row["impl"] in OURS and not row.get("failed", OUT_OF_MEMORY).startswith(OUT_OF_MEMORY),
    packages=("liger-kernel", "peft", "bitsandbytes"),
    check=_check,
)
