"""``lowtide profile``: each implementation in its own process, then tables, plot, page and json."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import torch

from lowtide.bench.harness import Row, Run, chosen_device, replace
from lowtide.bench.models import language_part
from lowtide.bench.variant import LIGER
from lowtide.errors import UnsupportedError, message
from lowtide.measure.child import allocator, run_child
from lowtide.profile.config import AUTO, ProfileConfig
from lowtide.profile.report import ROWS, draw_profile, text_of, title_of, write_page
from lowtide.profile.steps import measure
from lowtide.train.shapes import DEFAULT, SHAPES, VOCAB_SIZE, model_config

GPU_MODEL, GPU_TOKENS, CPU_TOKENS = "llama-3.2-1b", 8192, 1024
_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads")


def _model_name(config: ProfileConfig, device: torch.device) -> str:
    return config.model if config.model != AUTO else GPU_MODEL if device.type == "cuda" else DEFAULT


def run_profile(config: ProfileConfig, say: Callable[[str], object], command: str) -> int:
    """Measure each implementation, write the plot and the page, and return the exit status.

    Raises:
        UnsupportedError: there is no such device, or Liger is to run on a CPU.
        ArgumentValueError: there is no causal language model in the config, or the folder cannot be written.
    """
    device = chosen_device(config.device)
    if device.type == "cpu" and any(variant.impl == LIGER for variant in config.variants.values()):
        raise UnsupportedError(message("impl", "a GPU for liger", "a CPU", "Leave liger out."))
    language_part(model_config(_model_name(config, device)))
    with Run(config, say, command, packages=("liger-kernel", "peft", "bitsandbytes")) as run:
        _measure(run)
    return run.status


def _measure(run: Run) -> None:
    """Measure each implementation, and write the plot and the page."""
    name, tokens = _model_name(run.config, run.device), GPU_TOKENS if run.device.type == "cuda" else CPU_TOKENS
    whole = model_config(name, vocab_size=VOCAB_SIZE)
    text, rows = language_part(whole), list[Row]()
    inside = "" if text is whole else f", the {text.model_type} inside"
    settings = {**run.settings, "model": name, "vocab_size": VOCAB_SIZE, "seq_len": run.config.seq_len or tokens}
    del settings["output"], settings["impl"], settings["policy"]  # each implementation has its own
    run.result |= {
        "settings": settings,
        "model": {
            "name": (name if name in SHAPES else Path(name).resolve().stem) + inside,
            "model_type": text.model_type,
            **{size: getattr(text, size, None) for size in _SIZES},
        },
        "implementations": rows,
    }
    run.say(f"{title_of(run.result)}\n\n{ROWS.header}")
    for name, variant in run.config.variants.items():
        stem = f"{run.file.with_suffix('')}-{re.sub('[^A-Za-z0-9.]+', '-', name)}"
        ended = run_child(measure, dataclasses.asdict(variant), settings, stem, env=allocator())
        measured = ended.value or {"failed": ended.failure}
        run.add({"name": name, "impl": variant.impl, "policy": variant.policy, **measured}, rows, ROWS)
    run.say(text_of(run.result))
    plot, page = (run.file.with_suffix(suffix) for suffix in (".png", ".html"))
    drawn = any("peak" in row for row in rows)
    if drawn and importlib.util.find_spec("matplotlib") is None:
        run.say("no plot: matplotlib is not installed. pip install 'lowtide[plot]'\n")
        drawn = False
    if drawn:
        replace(plot, lambda file: draw_profile(file, run.result))
        run.say(f"written: {plot}\n")
    replace(page, lambda file: write_page(file, run.result, plot if drawn else None))
    run.say(f"written: {page}\n")
