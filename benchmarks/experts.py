"""Time and memory of a mixture's experts, forward and backward with a fixed routing, beside peers and the bare GEMMs.

    python benchmarks/experts.py --shape all

N tokens, each visiting K of E experts, D hidden size, F width of an expert. gpt-oss-20b has its limits, biases and
layout. The figures are those of lowtide bench mlp; the limit is 6 bare grouped GEMMs, or 7 where gate and up are
recomputed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from mixture import Mixture, make_mixture
from script import main

from lowtide.bench.case import Function, measure_cases
from lowtide.bench.harness import Peer, by_name, gpu_module
from lowtide.bench.settings import ShapeSettings, setting, shape_setting
from lowtide.errors import UnsupportedError
from lowtide.mlp.experts import Form, experts_mlp

GPT_OSS = Form("silu", limit=7.0, alpha=1.702, shift=1.0, joined="interleaved")


SIZES = ("N", "D", "F", "E", "K")
NAMED = {"qwen3-30b-a3b": (16384, 2048, 768, 128, 8), "gpt-oss-20b": (16384, 2880, 2880, 32, 4)}


def _lowtide(level: int) -> Callable[[Mixture], Function]:
    def build(mixture: Mixture) -> Function:
        form, oss = (GPT_OSS, True) if mixture.is_gpt_oss else (Form("silu"), False)
        settings: Any = {"form": form, "transposed": oss, "dtype": mixture.x.dtype, "checkpoint_level": level}
        return lambda: experts_mlp(mixture.x, mixture.ids, mixture.routing, mixture.weights, **settings)

    return build


def _transformers(implementation: str) -> Callable[[Mixture], Function]:
    """Return what builds transformers' own module, which computes with the mixture's weights."""

    def build(mixture: Mixture) -> Function:
        folder, family = ("gpt_oss", "GptOss") if mixture.is_gpt_oss else ("qwen3_moe", "Qwen3Moe")
        package = f"transformers.models.{folder}"
        config_class = getattr(importlib.import_module(f"{package}.configuration_{folder}"), f"{family}Config")
        module_class = getattr(importlib.import_module(f"{package}.modeling_{folder}"), f"{family}Experts")
        shape = mixture.shape
        sizes = {"hidden_size": shape.D, "intermediate_size": shape.F, "moe_intermediate_size": shape.F}
        config = config_class(**sizes, num_experts=shape.E, num_local_experts=shape.E)
        config._experts_implementation = implementation
        with torch.device("meta"):
            module = module_class(config)
        names = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
        for name, weight in zip(names, mixture.weights, strict=True):
            if weight is not None:
                setattr(module, name, weight)
        return lambda: module(mixture.x, mixture.ids, mixture.routing)

    return build


def _liger(mixture: Mixture) -> Function:
    module = gpu_module(mixture, "liger_kernel.ops.fused_moe")
    if mixture.is_gpt_oss:
        raise UnsupportedError("no biases and limits")
    gate_up, down, *_ = mixture.weights
    ids = mixture.ids.to(torch.int32)
    return lambda: module.LigerFusedMoEFunction.apply(mixture.x, gate_up, down, ids, mixture.routing)


PEERS = by_name(
    Peer("lowtide-0", _lowtide(0), gemms=6),
    Peer("lowtide-1", _lowtide(1), gemms=7),
    Peer("liger", _liger, "liger-kernel", gemms=6),
    Peer("grouped_mm", _transformers("grouped_mm"), "transformers", gemms=6),
    Peer("eager", _transformers("eager"), "transformers", gemms=6),
)


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(ShapeSettings):
    benchmark = "experts"
    shape: tuple[str, ...] = shape_setting("qwen3-30b-a3b", SIZES, NAMED)
    only: tuple[str, ...] = setting((), "measure these alone", metavar="PEER", names=PEERS)


measure = partial(measure_cases, cases=lambda run, shape: [make_mixture(shape, run.dtype, run.device)])


if __name__ == "__main__":
    sys.exit(main(measure, ExpertsConfig, __doc__, PEERS))
