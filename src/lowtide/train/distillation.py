"""Distillation: a teacher's divergence in the loss of a trainer, without the logits of either model.

The teacher runs beside the student, or its last hidden states lie in a folder: shards of rows, its head and tokenizer.
A row is found by the digest of its tokens, so any order, packing and number of processes can read them.

B sequences of T tokens, D the teacher's hidden size, V classes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations import is_deepspeed_zero3_enabled

import lowtide
from lowtide.arguments import check_number
from lowtide.errors import ArgumentValueError, message
from lowtide.models.lazy_logits import without_logits
from lowtide.train.arguments import Arguments

_HEAD = "head.safetensors"  # in a folder of states
_SHARDS = "states-{}.safetensors"  # each row's states [T, D], by the digest of its tokens
_SCALE = " scale"  # behind that digest: of states in int8, [T, 1]
_BATCH = "teacher_states"  # in a batch: [B, T, D]

Head = dict[str, Any]  # weight [V, D], bias [V] and softcap, where there is one


class Distillation:
    """Makes a trainer's loss ``(1 - alpha) task + alpha temperature**2 divergence``; in an evaluation it is the task's.

    Both are means over the tokens that the task's loss scores. Classes that one side alone has, beyond a vocabulary
    that is the same, are left out of the divergence.

    Args:
        found: the options: ``--teacher`` and those beside it.

    Raises:
        ArgumentValueError: the teacher is neither a pretrained model nor a folder of `write_teacher_states`.
    """

    _model: Any = None  # unless its states are stored
    _states: Any = None  # of a batch, until its loss

    def __init__(self, found: Arguments) -> None:
        check_number("--alpha", found.run.alpha, 0, 1)
        device, folder = found.training.device, Path(str(found.run.teacher)).expanduser()
        self._run, self._files = found.run, _files(folder)
        if self._files:
            self._head: Head = load_file(folder / _HEAD, str(device))
            return
        try:
            if is_deepspeed_zero3_enabled():
                raise ValueError("a model, which ZeRO-3 would shard")
            self._model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=found.gemm_dtype, attn_implementation=found.model.attn_implementation
            )
        except Exception as error:  # those of models have no common base
            expected = "a causal language model, or a folder of lowtide.train.write_teacher_states"
            why = f"{folder} ({' '.join(str(error).split())[:300]})"
            raise ArgumentValueError(message("--teacher", expected, why)) from error
        self._model.to(device)
        lowtide.patch(self._model, scoring=True)
        _, self._head = _last_states(self._model, input_ids=torch.zeros(1, 2, dtype=torch.int64, device=device))

    def attach(self, trainer: Any) -> str:
        """Put the divergence into the loss of the trainer's model, and return a line about it.

        Raises:
            ArgumentValueError: the teacher has another vocabulary than the student, or its states are of other rows.
        """
        run, tokenizer = self._run, trainer.processing_class
        student = getattr(trainer.model, "get_base_model", lambda: trainer.model)()
        theirs, own = len(self._head["weight"]), student.config.get_text_config().vocab_size
        known = _tokenizer(run.teacher)
        same = _tokens(known) == _tokens(tokenizer) if known else theirs == own
        if not same or len(tokenizer) > theirs:
            got = f"{run.teacher}, with another of {theirs:,} tokens beside {own:,}"
            raise ArgumentValueError(message("--teacher", "a model with the student's tokenizer", got))
        if self._files and hasattr(trainer.train_dataset, "__len__"):
            for row in trainer.train_dataset:
                self._find(row)
        self._task, student.loss_function, trainer.distillation = student.loss_function, self._loss, self
        return (
            f"teacher  {run.teacher}, {'stored' if self._files else 'loaded'}: "
            f"{run.alpha:g} of the loss is {run.divergence} at temperature {run.temperature:g}"
        )

    def _find(self, row: Mapping[str, Any]) -> list[str]:
        """Return the digest of each text in a row, which may be packed, whose states are all there."""
        ids = torch.as_tensor(row["input_ids"])
        found = [_digest(text) for text in ids.split(row.get("seq_lengths") or len(ids))]  # type: ignore[no-untyped-call]
        if not self._files.keys() >= {*found}:
            expected = "the states of all rows, as they are trained on: tokenised, and cut to --max_length"
            got = f"{self._run.teacher}, without those of a row of {len(ids):,} tokens"
            raise ArgumentValueError(message("--teacher", expected, got))
        return found

    def collator(self, collate: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Return ``collate``, whose batches then have the teacher's stored states."""

        def with_states(rows: list[Any]) -> Any:
            batch, states = collate(rows), []
            for row in rows:
                found: Any = [(digest, safe_open(self._files[digest], "pt")) for digest in self._find(row)]
                states.append(torch.cat([_read(shard, digest) for digest, shard in found]))
            B, T = batch["input_ids"].shape
            states = states if len(states) == B else [torch.cat(states)]  # without padding, one row after another
            batch[_BATCH] = torch.stack([pad(one, (0, 0, 0, T - len(one))) for one in states])
            return batch

        return with_states if self._files else collate

    @contextmanager
    def step(self, inputs: dict[str, Any]) -> Iterator[None]:
        """Have the teacher's states of a batch for the loss that is computed in the block.

        Raises:
            ArgumentValueError: the model's own loss function was not called in it.
        """
        self._states = inputs.pop(_BATCH, None)
        if self._model is not None and inputs["input_ids"].shape[-1] > 1:  # else there is nothing to predict
            self._states, _ = _last_states(self._model, **{k: x for k, x in inputs.items() if k != "labels"})
        yield
        if self._states is not None:
            expected = "a loss by the model's own loss_function, no label smoothing and no --loss_type"
            raise ArgumentValueError(message("--teacher", expected, "another"))

    def _loss(self, logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of logits [B, T, V], as transformers' loss functions take them."""
        states, self._states, run = self._states, None, self._run
        if states is None:
            return self._task(logits, labels, *args, **kwargs)
        task = self._task(logits, labels, *args, **kwargs) if run.alpha < 1 else 0.0
        teacher, softcap = self._head["weight"], self._head.get("softcap")

        def divergence(
            hidden: Tensor, weight: Any, *, linear_bias: Any, logit_scale: float, options: Any, **more: Any
        ) -> Tensor:
            V = min(len(teacher), len(weight))
            weight, bias, their, their_bias = (
                x if x is None or len(x) == V else x[:V] for x in (weight, linear_bias, teacher, self._head.get("bias"))
            )
            return lowtide.linear_divergence(
                hidden if logit_scale == 1 else hidden * logit_scale,
                weight,
                states.to(their),
                their,
                kind=run.divergence,  # type: ignore[arg-type]
                temperature=run.temperature,
                linear_bias=bias,
                teacher_bias=their_bias,
                teacher_softcap=softcap and float(softcap),
                mask=pad(labels[..., 1:], (0, 1), value=-100) != -100,
                reduction="mean",
                num_items=kwargs.get("num_items_in_batch"),
                # less than the default: the gradients of the task are there too
                options=options or lowtide.HeadOptions(workspace_mib=512),
                **more,
            )

        return (1 - run.alpha) * task + run.alpha * run.temperature**2 * without_logits(logits, divergence)


def write_teacher_states(
    model: Any,
    dataset: Iterable[Mapping[str, Any]],
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    batch_tokens: int = 2**13,
    shard_tokens: int = 2**16,
) -> None:
    """Write a teacher's last hidden states of each row, and its head: what ``lowtide train --teacher FOLDER`` reads.

    In shards that appear when they are whole. Rows that the folder has, in either dtype, are left out: after a kill the
    same call goes on. No logits are built.

    Args:
        model: A causal language model of transformers, in the dtype and on the devices that it is to run in.
        dataset: Rows with ``input_ids``, as they are trained on: tokenised, and cut to the length of a sequence.
        folder: Where to; of one model.
        dtype: bfloat16, 2 D bytes a token; or int8, D + 2 bytes: ``round(x / s)`` and ``s = max |x| / 127`` of a token.
        batch_tokens: About how many tokens the model is given at once.
        shard_tokens: About how many a shard has.

    Raises:
        ArgumentValueError: ``dtype`` is neither, ``dataset`` has no ``input_ids``, or ``folder`` has the states of
            another model.
        UnsupportedError: The model's output embedding is not a plain linear layer.

    Example:
        >>> teacher = AutoModelForCausalLM.from_pretrained("path/to/model")
        >>> lowtide.train.write_teacher_states(teacher, [{"input_ids": row} for row in ids], "states")
    """
    if dtype not in (torch.bfloat16, torch.int8):
        raise ArgumentValueError(message("dtype", "torch.bfloat16 or torch.int8", str(dtype)))
    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    model.eval()
    with lowtide.scoring(model):
        for shard in _shards(dataset, {*_files(folder)}, shard_tokens):
            waiting, states = sorted(shard.items(), key=lambda pair: -len(pair[1])), dict[str, Tensor]()
            while waiting:  # texts of about one length
                B = max(1, batch_tokens // len(waiting[0][1]))
                batch, waiting = waiting[:B], waiting[B:]
                ids = pad_sequence([text for _, text in batch], batch_first=True, padding_value=-1)
                # one token more: the logits of a single one are built, as in generation
                ids = pad(ids, (0, 1), value=-1).to(model.device)
                hidden, head = _last_states(model, input_ids=ids.clamp(min=0), attention_mask=(ids >= 0).long())
                for (digest, text), x in zip(batch, hidden.to("cpu", torch.bfloat16), strict=True):
                    x = x[: len(text)].clone()
                    if dtype == torch.int8:
                        states[digest + _SCALE] = s = x.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
                        x = (x.float() / s).round().to(dtype)
                    states[digest] = x
            _write_head(folder, head, model)
            _save(folder / _SHARDS.format(digest), states)


def _shards(dataset: Iterable[Mapping[str, Any]], known: set[str], tokens: int) -> Iterator[dict[str, Tensor]]:
    """Yield the rows that are not ``known``, by their digests, each time that they have so many tokens."""
    shard: dict[str, Tensor] = {}
    for row in dataset:
        if "input_ids" not in row:
            raise ArgumentValueError(message("dataset", "rows with input_ids", f"one with {', '.join(row)}"))
        text = torch.as_tensor(row["input_ids"])
        digest = _digest(text)
        if len(text) and digest not in known:
            known.add(digest)
            shard[digest] = text
        if sum(map(len, shard.values())) >= tokens:
            yield shard
            shard = {}
    if shard:
        yield shard


@torch.no_grad()
def _last_states(model: Any, **inputs: Any) -> tuple[Tensor, Head]:
    """Return what a model's head is given [B, T, D], scaled as its logits are, and the head."""
    head: Head = {}

    def take(hidden: Tensor, weight: Tensor, *, linear_bias: Any, logit_scale: float, softcap: Any, **_: Any) -> Tensor:
        head.update(weight=weight.detach(), bias=linear_bias, softcap=softcap)
        return hidden * logit_scale

    return without_logits(model(**inputs, use_cache=False).logits, take), head


def _write_head(folder: Path, head: Head, model: Any) -> None:
    """Write a head, and the model's tokenizer, where there is none; raise where there is one of another model."""
    if not (folder / _HEAD).is_file():
        if tokenizer := _tokenizer(model.name_or_path):
            tokenizer.save_pretrained(folder)
        _save(folder / _HEAD, {k: torch.as_tensor(x).cpu().contiguous() for k, x in head.items() if x is not None})
    elif not torch.equal(load_file(folder / _HEAD)["weight"], head["weight"].cpu()):
        raise ArgumentValueError(message("model", f"the model whose states are in {folder}", "another one"))


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file that is whole once it has its name."""
    part = path.with_name(f".{path.name}")
    save_file(tensors, part)
    part.replace(path)


def _read(shard: Any, digest: str) -> Tensor:
    """Return a text's states [T, D] in bfloat16."""
    x: Tensor = shard.get_tensor(digest)
    return x * shard.get_tensor(digest + _SCALE) if x.dtype == torch.int8 else x


def _files(folder: Path) -> dict[str, Path]:
    """Return the shard of each row, by the digest of its tokens."""
    files = folder.glob(_SHARDS.format("*"))
    return {digest: file for file in files for digest in safe_open(file, "pt").keys()}  # type: ignore[no-untyped-call] # noqa: SIM118


def _digest(ids: Tensor) -> str:
    return hashlib.blake2b(ids.to(torch.int64).numpy().tobytes(), digest_size=16).hexdigest()


def _tokenizer(name: Any) -> Any:
    """Return the tokenizer in a folder, or of a model's name; None where there is none."""
    try:
        return AutoTokenizer.from_pretrained(Path(name).expanduser())
    except Exception:  # those of tokenizers have no common base
        return None


def _tokens(tokenizer: Any) -> Any:
    """Return pairs of a tokenizer's tokens and their ids, without added ones, such as the marks of a turn."""
    return tokenizer.get_vocab().items() - tokenizer.get_added_vocab().items()
