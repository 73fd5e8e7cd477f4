"""``lowtide profile``: each implementation in its own process, then tables, plot, page and json."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path

from lowtide.bench.harness import Row, Run, replace
from lowtide.bench.models import language_part
from lowtide.bench.variant import LIGER
from lowtide.errors import UnsupportedError, message
from lowtide.measure.child import allocator, run_child
from lowtide.profile.config import AUTO
from lowtide.profile.report import ROWS, draw_profile, text_of, title_of, write_page
from lowtide.profile.steps import measure
from lowtide.train.shapes import DEFAULT, SHAPES, model_config

GPU_MODEL, GPU_TOKENS, CPU_TOKENS = "llama-3.2-1b", 8192, 1024
_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads")


def profile(run: Run) -> None:
    """Measure each implementation, and write the plot and the page.

    Raises:
        UnsupportedError: Liger is to run on a CPU.
        ArgumentValueError: there is no causal language model in the config.
    """
    cuda = run.device.type == "cuda"
    if not cuda and any(variant.impl == LIGER for variant in run.config.variants.values()):
        raise UnsupportedError(message("impl", "a GPU for liger", "a CPU", "Leave liger out."))
    name = run.config.model if run.config.model != AUTO else GPU_MODEL if cuda else DEFAULT
    tokens = run.config.seq_len or (GPU_TOKENS if cuda else CPU_TOKENS)
    whole = model_config(name)
    text, rows = language_part(whole), list[Row]()
    inside = "" if text is whole else f", the {text.model_type} inside"
    settings = {**run.settings, "model": name, "seq_len": tokens}
    del settings["impl"], settings["policy"]  # each implementation has its own
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
        measured = run_child(measure, dataclasses.asdict(variant), settings, stem, env=allocator())
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
