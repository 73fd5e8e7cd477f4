"""The settings of the benchmarks of whole models: each field's default and meaning, and each one's help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from lowtide.bench.settings import RunSettings, Sdpa, Settings, numbers, setting
from lowtide.bench.way import HEADS, LOWTIDE, LOWTIDE_COMPILED
from lowtide.measure.output_files import checked_folder
from lowtide.measure.units import parse_gib
from lowtide.memory.policy import FORM, STATES_FORM, parse_policies, split_states
from lowtide.train.shapes import model_folder

NONE = "none"
OFFLOADED = "-offload"  # ends the name of a way whose checkpoints lie in host memory
SDPA = "attention's kernel, the same for all; auto: as PyTorch chooses"
Train = Literal["full", "lora"]


@dataclass(frozen=True, kw_only=True)
class StepBenchConfig(RunSettings):
    """Time, peak memory and loss of one step of full fine-tuning: forward, backward and fused AdamW, by stock
    transformers, with Liger's kernels, under torch.compile, and patched by lowtide with each activation policy; and by
    stock transformers with a loss of lowtide bench head, torchtune's with compiled layers too. A peer's layers are
    checkpointed; NAME-attention saves attention's output, NAME-all saves everything. Each way is a process of its own.
    The last column is the time over that of the first way.
    """

    benchmark, summary = "step", "a training step, end to end"
    exit_1 = "lowtide itself failed, other than by running out of memory, or a way of --peer cannot run here"
    by_name = "peer"
    known: ClassVar = {
        "ways": (
            *(f"{who}{saved}" for who in ("liger", "stock") for saved in ("", "-attention", "-all")),
            *(f"{who}{saved}" for who in ("compile", *HEADS) for saved in ("", "-all")),
            NONE,
        )
    }
    examples: ClassVar = {
        "": "a Llama-3.2-1B at three lengths",
        "--tokens 32768 --peer liger --policy all 8xall+8xattention-mlp1 --sdpa cudnn": "layers of two policies",
        "--tokens 32768 --policy 10xattention-mlp0+6xall@states": "idle optimizer states in host memory",
        "--tokens 8192 --model llama-3-8b --peer torchtune-8 torchtune-8-all": "losses that users write",
        "--model lowtide-small --tokens 64 --device cpu --peer stock --policy all input": "a quick run without a GPU",
    }

    tokens: tuple[str, ...] = setting((), "lengths of a sequence (default: 8192 32768 65536)", metavar="T")
    peer: tuple[str, ...] = setting(
        ("liger", "liger-attention", "stock", "compile"), "these peers: {ways}", metavar="PEER", known="ways"
    )
    policy: tuple[str, ...] = setting(
        ("input", "attention", "all-mlp1", "all"),
        f"lowtide with these policies: {FORM}; {STATES_FORM}",
        metavar="POLICY",
    )
    compile_layers: bool = setting(False, "lowtide with each policy a second time, each layer through torch.compile")
    sdpa: Sdpa = setting("auto", SDPA)  # noqa: RUF009
    model: str = setting("llama-3.2-1b", "whose shape, as in lowtide train --model; random weights", metavar="NAME")
    layers: int | None = setting(None, "this many layers instead of the model's: a run in less time", least=1)
    batch: int = setting(1, "sequences of a step", least=1)
    warm: int = setting(2, "steps that do not count", last=True, least=0)
    reps: int = setting(4, "steps that count; the median is taken", last=True, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("tokens", all(n > 1 for n in self.lengths), "whole numbers above 1")
        for text in self.policy:
            parse_policies(split_states(text)[0])

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of a sequence."""
        return tuple(sorted(numbers("tokens", self.tokens, int))) or (8192, 32768, 65536)

    @property
    def ways(self) -> tuple[str, ...]:
        """Who is measured: the peers, then lowtide with each policy, then the same with compiled layers."""
        ours = (LOWTIDE, LOWTIDE_COMPILED) if self.compile_layers else (LOWTIDE,)
        named = (f"{name}:{text}" for name in ours for text in self.policy)
        return (*(peer for peer in self.peer if peer != NONE), *named)


@dataclass(frozen=True, kw_only=True)
class LongestBenchConfig(RunSettings):
    """Tokens per second at one length, and the longest sequence that runs, of a large model on one GPU: full training
    with parameters, gradients and AdamW's states in host memory (FSDP2's CPU offload in a world of one), or LoRA; by
    lowtide, whose layers save their inputs in pinned host memory as far as there is room and on the GPU beyond, and by
    transformers' checkpointing, with Liger's kernels or without, its checkpoints on the GPU or offloaded. Each attempt
    is a process of its own; the search starts at the planner's limit. Running out of memory, on the GPU or on the host,
    is a result: what should not fit into the host is skipped, and an attempt is ended before the host has none left.
    The result is written after each attempt.
    """

    benchmark, summary = "longest", "the longest sequence that runs"
    exit_1 = "lowtide itself failed, other than by running out of memory or time"
    known: ClassVar = {"ways": ("lowtide", "liger", f"liger{OFFLOADED}", "stock", f"stock{OFFLOADED}")}
    examples: ClassVar = {
        "--no-search": "the rate of a Llama of 8B at 32768 tokens, every parameter trained",
        "--train lora --way lowtide --tokens 0 --seconds 3600": "how long a sequence can be with adapters",
        "--layers 4 --way lowtide --start 262144 --sdpa cudnn": "the GPU's side of it in less time",
        "--model lowtide-small --device cpu --way lowtide --tokens 256 --start 512 --seconds 60": "without a GPU",
    }

    train: Train = setting(  # noqa: RUF009
        "full", "full: every parameter, in host memory with gradients and optimizer states; lora: adapters of rank 16"
    )
    way: tuple[str, ...] = setting(
        ("lowtide", "liger", "liger-offload"), "by whom: {ways}", metavar="WAY", known="ways"
    )
    model: str = setting("llama-3-8b", "whose shape, as in lowtide train --model; random weights", metavar="NAME")
    layers: int | None = setting(None, "this many layers instead of the model's: a run in less time", least=1)
    tokens: int = setting(32768, "length of the rate, where lowtide saves what makes the step fastest; 0: no rate")
    search: bool = setting(True, "measure the rate alone, without a search for the longest sequence")
    start: int | None = setting(None, "length to start the search with (default: the longest that should fit)", least=2)
    step: int = setting(8192, "tokens: how near to the longest sequence the search goes", least=1)
    seconds: float = setting(
        1800.0, "for each way's rate and search: what takes longer is ended, or skipped", metavar="S"
    )
    tile: int = setting(16384, "tokens per tile of lowtide's layers", least=1)
    budget: str | None = setting(
        None, "GPU memory to plan with, such as 70GiB (default: 93% of the GPU's)", metavar="SIZE"
    )
    host: str | None = setting(
        None, "host memory, such as 120GiB (default: what is free now, less 6 GiB)", metavar="SIZE"
    )
    disk: str | None = setting(
        None,
        "a folder on a fast disk (NVMe) for what --host does not hold of lowtide's layers, on a GPU",
        metavar="DIR",
    )
    sdpa: Sdpa = setting("auto", SDPA)  # noqa: RUF009
    warm: int = setting(1, "steps that do not count, where the rate is measured", last=True, least=0)
    reps: int = setting(2, "steps that count there; of a long sequence one step is run", last=True, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("way", bool(self.way), f"names out of {', '.join(self.known['ways'])}")
        self._require("tokens", self.tokens == 0 or self.tokens > 1, "0, or a whole number above 1")
        self._require("search", self.search or self.tokens > 0, "--tokens above 0 beside --no-search")
        self._require_positive("seconds")
        for name in ("budget", "host"):
            if getattr(self, name) is not None:
                parse_gib(name, getattr(self, name))
        self._require("budget", self.budget is None or parse_gib("budget", self.budget) > 0, "a size above 0")
        if self.disk is not None:
            checked_folder("disk", self.disk)


@dataclass(frozen=True, kw_only=True)
class SkipBenchConfig(RunSettings):
    """HeadOptions(skip=...) on a model's own hidden states of text, or on random ones whose softmax is as concentrated:
    time and errors of cross entropy's gradients that skip tiles of the softmax, the share of tiles that is computed,
    and the peak memory, beside the dense loss; each interleaved with the bare GEMMs. "busy" is with the launches
    hidden, as in training; x limit is the GEMMs' time over it. Where nothing can be skipped, rows have the reason.
    """

    benchmark, summary = "skip", "gradients that skip tiles"
    examples: ClassVar = {
        "": "random hidden states and a random head, of sizes for a GPU",
        "--model runs/model --data held-out.txt": "a model that lowtide train wrote, on text it has not seen",
        "--model runs/model --data held-out.txt --accepted 2e-2 1e-2 5e-3 3e-3 --unbiased": "error against speed",
        "--tokens 1024 --hidden 256 --vocab 8192 --device cpu": "a quick run without a GPU: the dense loss alone",
    }

    model: str = setting("", "a folder with a trained model and its tokenizer", metavar="DIR")
    data: tuple[str, ...] = setting((), "with --model: text files that it was not trained on", metavar="FILE")
    accepted: tuple[str, ...] = setting(("5e-3", "3e-3"), "relative errors that are accepted", metavar="X")
    unbiased: bool = setting(False, "also the form without bias")
    per_token: bool = setting(False, "losses of each token, their upstream gradients known in backward: four GEMMs")
    tokens: int = setting(16384, "of the batch", least=1)
    hidden: int = setting(2048, "without --model: the hidden size", least=1)
    vocab: int = setting(131072, "without --model: the size of the vocabulary", least=1)
    softcap: float | None = setting(None, "without --model: a soft cap of the logits; with it they have the model's")
    seq_len: int = setting(1024, "with --model: tokens of a sequence", least=1)
    calls: int = setting(24, "before the first that counts: the threshold adapts", least=2)
    workspace_mib: float | None = setting(None, "scratch memory in MiB; without it, that of the dense loss")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("data", bool(self.data) or not self.model, "text files beside --model")
        self._require("data", bool(self.model) or not self.data, "--model beside it")
        errors = numbers("accepted", self.accepted, float)
        self._require("accepted", all(0 < error < 1 for error in errors), "numbers above 0 and below 1")
        self._require_positive("workspace_mib")
        self._require_positive("softcap")

    def check_here(self) -> None:
        """Check the model's folder and the text files, where they are given."""
        folder = model_folder(self.model) if self.model else None
        whole = not self.model or (folder is not None and (folder / "config.json").is_file())
        self._require("model", whole, "a folder with a trained model and its tokenizer")
        self._require("data", all(Path(file).is_file() for file in self.data), "files")


@dataclass(frozen=True, kw_only=True)
class ModelsBenchConfig(Settings):
    """What lowtide.patch does to every model type in transformers: a tiny model with random weights of each, stock
    beside patched, float32 on the CPU; loss and every gradient are compared, and allocations watched for logits. A type
    is "fused" (no logits were built), "fell back" (they were, with the reason, and all was equal), "not built" (no tiny
    model of it could be made or run; with the reason), "crashed", "timed out", or "different", which is a defect of
    lowtide. Each is one process. The result is written after each type.
    """

    benchmark, summary = "models", "what patch does to every model type"
    exit_1 = "one is different"
    known: ClassVar = {"kinds": ("causal", "image-text", "seq2seq")}
    device: ClassVar[str] = "cpu"
    dtype: ClassVar[str] = "float32"
    examples: ClassVar = {
        "--only llama gemma2 t5": "a few types",
        "--table docs/supported-models.md --output benchmarks/results": "all of them, and the page of the documents",
        "--resume 2026-11-21-models-cpu.json": "continue a result that was interrupted",
    }

    kind: tuple[str, ...] = setting((), "these kinds: {kinds} (default: all)", metavar="KIND", known="kinds")
    only: tuple[str, ...] = setting((), "these types alone, by their model_type", metavar="TYPE")
    workers: int = setting(2, "processes at a time, each with one thread", least=1)
    timeout: int = setting(120, "seconds after which a type is given up", metavar="S", least=1)
    seed: int = setting(0, "of weights and tokens", least=0)
    resume: str = setting("", "a result to continue: types compared there are not run again", metavar="FILE")
    table: str = setting("", "also write the table as Markdown", metavar="FILE")
    output: str = setting(".", "folder for the result (json)", metavar="DIR", last=True)
