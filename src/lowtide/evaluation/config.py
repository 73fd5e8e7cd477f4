"""The settings of ``lowtide eval``, their defaults and their checks. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lowtide.bench.settings import Device, Dtype, Settings, setting
from lowtide.errors import ArgumentValueError, message
from lowtide.measure.output_files import check_output_files
from lowtide.train.config import columns_of
from lowtide.train.files import find_data
from lowtide.train.shapes import SHAPES, config_file

_YAML = (".yaml", ".yml")


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Settings):
    """What ``lowtide eval`` computes and writes; each field is the option of the same name.

    Raises:
        ArgumentValueError: a value that no run could use.
    """

    benchmark, program = "eval", "lowtide eval"
    folders = ("json",)

    model: str | None = setting(
        None,
        "a folder with a pretrained model, or the name of one in the Hub's local cache (required)",
        metavar="NAME_OR_PATH",
    )
    data: tuple[str, ...] = setting(
        (),
        "files or folders of text, .jsonl, .json, .parquet or .csv, a dataset that `save_to_disk` wrote, or a Hub name "
        "in the local cache, as lowtide train takes them: texts and conversations, of which every token is scored, or "
        "prompts with completions, of which the completion is",
        metavar="PATH",
    )
    tasks: tuple[str, ...] = setting(
        (),
        "tasks of lm-evaluation-harness, separated by commas or spaces: names, or YAML files "
        "(needs lowtide[eval]; data sets from the Hub's local cache)",
        metavar="TASK",
    )
    columns: tuple[str, ...] = setting(
        (), "the columns of the data, as lowtide train takes them: text=content", metavar="FORMAT=COLUMN"
    )
    tokenizer: str | None = setting(None, "a folder with a tokenizer (default: the model's own)", metavar="PATH")
    seq_len: int = setting(1024, "tokens of a window", least=2)
    stride: int | None = setting(
        None,
        "tokens that each window scores; below --seq-len, each has more of the text before it (default: --seq-len)",
        least=1,
    )
    pack: bool = setting(
        False, "join all documents to one sequence, an end-of-text token behind each; else each has its own windows"
    )
    batch_size: int = setting(8, "windows, or the harness's requests, per call of the model", least=1)
    limit: int | None = setting(None, "only the first N documents of the data, and of each task", least=1)
    dtype: Dtype = setting("auto", "of the weights; auto: as they are stored")  # noqa: RUF009 (a field, like the others)
    device: Device = setting("auto", "auto: the GPU if there is one")  # noqa: RUF009
    patch: bool = setting(True, "score without logits; --no-patch evaluates the stock model")
    json: str | None = setting(None, "write the figures, with the hardware and the versions", metavar="FILE")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("model", bool(self.model), "a folder with a pretrained model")
        self._require("data", bool(self.data or self.tasks), "--data, --tasks or both")
        self._require("data", "" not in self.data, "names that are not empty")
        self._require("stride", self.stride is None or self.stride <= self.seq_len, "at most --seq-len")
        self._require("tokenizer", self.tokenizer != "", "a name that is not empty")
        self._require("json", self.json != "", "a name that is not empty")
        columns_of(self.columns)

    @property
    def task_names(self) -> list[str]:
        """The tasks, one by one."""
        return [name for given in self.tasks for name in given.split(",") if name]

    def check_here(self) -> None:
        """Check what depends on files, before torch is loaded.

        Raises:
            ArgumentValueError: there is no such model, data, task file or folder.
        """
        assert self.model is not None
        if self.model in SHAPES:
            hint = "A built-in shape has no weights."
            raise ArgumentValueError(message("model", "a folder with a pretrained model", self.model, hint))
        config_file(self.model)
        if self.data:
            find_data(self.data)
        for name in self.task_names:
            if name.endswith(_YAML) and not Path(name).is_file():
                raise ArgumentValueError(message("tasks", "a YAML file that exists", name))
        check_output_files(json=self.json)
