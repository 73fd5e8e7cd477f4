"""``lowtide profile``: each implementation in a process of its own, then tables, picture, page and json."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from lowtide.bench.harness import chosen_device, chosen_dtype
from lowtide.bench.results import Files, begin, replace
from lowtide.bench.way import LIGER, Way
from lowtide.bench.ways import language_part
from lowtide.errors import ArgumentValueError, UnsupportedError, message
from lowtide.measure.child import ALLOCATOR, ChildResult, run_child
from lowtide.measure.units import parse_gib
from lowtide.profile.config import AUTO, ProfileConfig
from lowtide.profile.flops import device_peak, step_flop
from lowtide.profile.include import include, read_profiles
from lowtide.profile.looks import title_of
from lowtide.profile.page import write_page
from lowtide.profile.phases import BACKWARD, FORWARD, HEAD, HEAD_BACKWARD
from lowtide.profile.picture import draw_profile
from lowtide.profile.table import line, tables
from lowtide.profile.way_run import measure
from lowtide.train.config import TrainConfig
from lowtide.train.model import model_config
from lowtide.train.shapes import DEFAULT, SHAPES

GPU_MODEL, GPU_TOKENS, CPU_TOKENS = "llama-3.2-1b", 8192, 1024
NO_PICTURES = "pip install 'lowtide[plot]'"
_PACKAGES = ("liger-kernel", "peft", "bitsandbytes")


def run(config: ProfileConfig, say: Callable[[str], object]) -> dict[str, Any]:
    """Profile each implementation, tell its row as it is known, write all files, and return what the json tells.

    Args:
        config: What.
        say: Gets the text.

    Raises:
        UnsupportedError: There is no such device, or too few GPUs; a package that was asked for is not installed.
        ArgumentValueError: There is no such model, or a file cannot be written.
    """
    earlier = read_profiles(config.include)
    _check_names(config, earlier)
    files, told = _begin(config) if config.ways else _begin_again(config, earlier[0])
    include(told, earlier)
    say(f"{title_of(told)}\n\n")
    for row in told["implementations"]:
        say(line(row))
    for name, way in config.ways.items():
        stem = files.json.with_name(f"{files.json.stem}-{re.sub('[^A-Za-z0-9.]+', '-', name)}")
        ended = _in_children(way, told["settings"], stem)
        row = {"name": name, "impl": way.impl, "policy": way.policy, **_result(ended)}
        _add_rates(row, told["step_tflop"], told["peak_tflops"])
        told["implementations"].append(row)
        say(line(row))
        files.write_json(told)
    written = _write(config, files, told)
    say(tables(told))
    for file in written:
        say(f"written: {file}\n")
    if importlib.util.find_spec("matplotlib") is None:
        say(f"no picture: matplotlib is not installed. {NO_PICTURES}\n")
    return told


def _begin(config: ProfileConfig) -> tuple[Files, dict[str, Any]]:
    """Return the files of a run, and what its json tells first."""
    device = chosen_device(config.device)
    settings = _settings(config, device)
    _check(config, device)
    whole = model_config(settings["model"], vocab_size=settings["vocab_size"])
    model = language_part(whole)
    inside = "" if model is whole else f", the {model.model_type} inside"
    peak = device_peak(device, getattr(torch, settings["dtype"]))
    flop, why_not = step_flop(model.to_dict(), settings["seq_len"], settings["batch_size"], lora=config.lora > 0)
    files, about = begin(config.output, "profile", config.command(), device, _PACKAGES)
    return files, {
        **about,
        "settings": settings,
        "model": {"name": _name(settings["model"]) + inside, **_shape(model)},
        "peak_tflops": None if peak is None else peak / 1e12,
        "step_tflop": {kind: value / 1e12 for kind, value in flop.items()},
        "flop_note": why_not,
        "implementations": [],
    }


def _begin_again(config: ProfileConfig, first: dict[str, Any]) -> tuple[Files, dict[str, Any]]:
    """Return the same where nothing is to be measured: what the first profile told, but for its implementations."""
    gpu = first["machine"]["gpu"] if first["settings"]["device"] == "cuda" else None
    files = Files.prepare(config.output, f"{first['date']}-profile", gpu)
    return files, {**first, "command": config.command(), "implementations": []}


def _check_names(config: ProfileConfig, earlier: list[dict[str, Any]]) -> None:
    """Raise where two implementations have one name."""
    names = [*(row["name"] for one in earlier for row in one["implementations"]), *config.ways]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        hint = "Call one of them NAME:POLICY."
        raise ArgumentValueError(message("include", "each name once", f"{', '.join(twice)} twice", hint))


def _settings(config: ProfileConfig, device: torch.device) -> dict[str, Any]:
    """Return what a child needs, with nothing left to choose."""
    cuda = device.type == "cuda"
    own = {"json", "png", "html", "output", "impl", "policy", "fsdp", "include"}
    kept = {name: value for name, value in dataclasses.asdict(config).items() if name not in own}
    return {
        **kept,
        "model": (GPU_MODEL if cuda else DEFAULT) if config.model == AUTO else config.model,
        "seq_len": config.seq_len or (GPU_TOKENS if cuda else CPU_TOKENS),
        "vocab_size": TrainConfig.vocab_size,
        "dtype": str(chosen_dtype(config.dtype, device)).removeprefix("torch."),
        "device": device.type,
        "sharding": config.sharding,
        "memory_limit": 0.0 if config.memory_limit is None else parse_gib("memory_limit", config.memory_limit),
    }


def _check(config: ProfileConfig, device: torch.device) -> None:
    """Raise where what was asked for cannot begin."""
    for way in config.ways.values():
        way.check_installed()
        if way.impl == LIGER and device.type != "cuda":
            raise UnsupportedError(message("impl", "a GPU for liger", "a CPU", "Leave liger out."))
    if config.lora and importlib.util.find_spec("peft") is None:
        raise UnsupportedError(message("lora", "the package peft to be installed", "none", "pip install peft."))
    if config.optimizer == "adamw-8bit" and importlib.util.find_spec("bitsandbytes") is None:
        hint = "pip install bitsandbytes, or take another."
        raise UnsupportedError(message("optimizer", "the package bitsandbytes to be installed", "none", hint))
    if config.png is not None and importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError(message("png", "matplotlib to be installed", "none", NO_PICTURES))
    if config.memory_limit is not None and device.type != "cuda":
        raise UnsupportedError(message("memory_limit", "a GPU", "a CPU", "Leave it out: a CPU's memory has no limit."))
    if device.type == "cuda" and config.gpus > torch.cuda.device_count():
        raise UnsupportedError(message("gpus", f"at most the {torch.cuda.device_count()} here", config.gpus))
    for name in ("json", "png", "html"):
        file = getattr(config, name)
        if file is not None and not Path(file).absolute().parent.is_dir():
            raise ArgumentValueError(message(name, "a file in a folder that exists", file))


def _name(model: str) -> str:
    """Return what a title calls a model: its built-in name, else that of its folder or file."""
    path = Path(model).expanduser()
    if model in SHAPES or not path.exists():
        return model
    return (
        path.resolve().parent.name
        if path.name == "config.json"
        else path.stem
        if path.is_file()
        else path.resolve().name
    )


def _shape(model: Any) -> dict[str, Any]:
    """Return the sizes that a reader wants to see, as far as the config has them."""
    text = model.get_text_config()
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads")
    return {"model_type": text.model_type, **{name: getattr(text, name, None) for name in names}}


def _in_children(way: Way, settings: dict[str, Any], stem: Path) -> list[ChildResult]:
    """Run an implementation's ranks, each a process, and return how they ended, the first first."""
    arguments = (dataclasses.asdict(way), settings, str(stem))
    if settings["sharding"] == "none":
        return [run_child(measure, *arguments, env=ALLOCATOR)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = settings["gpus"]
    group = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def rank(number: int) -> ChildResult:
        return run_child(
            measure, *arguments, env={**ALLOCATOR, **group, "RANK": str(number), "LOCAL_RANK": str(number)}
        )

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(rank, range(world)))


def _result(ended: list[ChildResult]) -> dict[str, Any]:
    """Return what the first rank tells, or why it tells nothing: the last line of a rank that failed."""
    if ended[0].value is not None:
        return dict(ended[0].value)
    failed = next((one for one in ended if one.returncode not in (0, -15)), ended[0])
    lines = [text for text in failed.stderr.strip().splitlines() if text.strip()]
    errors = [text for text in lines if re.match(r"[\w.]+(Error|Exception)\b", text)]
    if failed.returncode < 0:
        hint = " (the system kills what takes too much host memory)" if failed.returncode == -9 else ""
        return {"failed": f"ended by signal {-failed.returncode}{hint}"}
    last = (errors or lines or [f"ended with status {failed.returncode}"])[-1]
    return {"failed": last.removeprefix("lowtide.errors.UnsupportedError: ")[:300]}


def _add_rates(row: dict[str, Any], tflop: dict[str, float], peak_tflops: float | None) -> None:
    """Add the TFLOP a second of the parts and of the whole step, and the share of the device's peak."""
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


def _write(config: ProfileConfig, files: Files, told: dict[str, Any]) -> list[Path]:
    """Write the json, the picture and the page where they are to lie, and return where that is."""
    if config.json is not None:
        files.json.unlink()
        files = Files(Path(config.json))
    files.write_json(told)
    written = [files.json]
    page = Path(config.html) if config.html is not None else files.json.with_suffix(".html")
    picture = Path(config.png) if config.png is not None else files.json.with_suffix(".png")
    drawn = any("peak" in row for row in told["implementations"])
    if drawn and importlib.util.find_spec("matplotlib") is not None:
        replace(picture, lambda at: draw_profile(at, told))
        written.append(picture)
    replace(page, lambda at: write_page(at, files.json.read_text()))
    return [*written, page]
