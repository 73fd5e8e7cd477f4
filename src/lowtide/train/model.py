"""The model of a run: pretrained weights from a folder, or random ones for a config."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from lowtide.errors import ArgumentValueError, message
from lowtide.measure.failures import is_out_of_memory
from lowtide.train.files import why
from lowtide.train.parallel import first_does, receives_weights, uses_fsdp
from lowtide.train.shapes import DEFAULT, SHAPES, config_file


def model_config(name: str, *, vocab_size: int) -> Any:
    """Return the `transformers` config that a ``--model`` names; the default model gets the ``vocab_size``.

    Raises:
        ArgumentValueError: there is no such model, or its config cannot be used.
    """
    if name in SHAPES:
        shape = {"vocab_size": vocab_size, **SHAPES[name]} if name == DEFAULT else SHAPES[name]
        return _from_settings(shape, name)
    file = config_file(name)
    try:
        settings = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentValueError(message("model", "a readable JSON config", f"{file} ({error})")) from error
    if not isinstance(settings, dict):
        raise ArgumentValueError(message("model", "a JSON object", f"something else in {file}"))
    return _from_settings(settings, str(file))


def random_model(config: Any, *, seed: int, dtype: torch.dtype = torch.float32, attention: str | None = None) -> Any:
    """Return the causal language model of a config with random weights, the same ones in each dtype.

    On a process that receives its shard of the first one's weights they are not written, and take no memory.

    Raises:
        ArgumentValueError: the config describes no causal language model.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM, set_seed

    set_seed(seed)
    own = {"attn_implementation": attention} if attention else {}
    receives = receives_weights()
    nowhere = init_empty_weights(include_buffers=False) if receives else nullcontext()
    with _loading(str(getattr(config, "model_type", "config"))), nowhere:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **own)
    if receives:
        for module in model.modules():
            for name, p in module.named_parameters(recurse=False):
                setattr(module, name, torch.nn.Parameter(torch.empty(p.shape), requires_grad=p.requires_grad))
        model.tie_weights()
    for parameter in model.parameters():
        parameter.data = torch.empty_like(parameter, dtype=dtype) if receives else parameter.data.to(dtype)
    model.config.dtype = dtype
    return _saves_tied_once(model)


def pretrained_model(name: Path | str, *, dtype: Any = "auto", alone: bool = False, **kwargs: Any) -> Any:
    """Return the model in a folder or of a name on the Hub, with all of its weights.

    On a process that receives its shard of the first one's weights, those of another dtype than the file's are not
    written, and take no memory; the others are the file's pages. If ``alone``, this process reads the whole model by
    itself; otherwise all do, and ZeRO-3 leaves each its shard.

    Raises:
        ArgumentValueError: it is no causal language model, or lacks weights, which would be random.
    """
    from transformers import AutoModelForCausalLM

    receives = receives_weights() and not alone and "quantization_config" not in kwargs
    with _loading(str(name)):
        model, info = AutoModelForCausalLM.from_pretrained(
            name, dtype="auto" if receives else dtype, output_loading_info=True, **kwargs
        )
    if lacking := sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]])):
        got = f"{name}, which lacks {len(lacking)}, {lacking[0]} among them"
        hint = "They would be random: save the whole model, or name its config.json to train from scratch."
        raise ArgumentValueError(message("model", "a folder with all the model's weights", got, hint))
    if uses_fsdp() and not alone:
        dtypes, model.config.dtype = first_does(lambda: (_dtypes(model), model.config.dtype))
        for key, parameter in model.named_parameters():
            if receives and parameter.dtype != dtypes[key]:
                parameter.data = torch.empty_like(parameter, dtype=dtypes[key])
    return _saves_tied_once(model)


def _dtypes(model: Any) -> dict[str, torch.dtype]:
    return {name: parameter.dtype for name, parameter in model.named_parameters()}


def _saves_tied_once(model: Any) -> Any:
    """Leave the second name of tied weights out of saved files, as for one process; FSDP and DeepSpeed untie copies."""
    if tied := getattr(model, "all_tied_weights_keys", None):
        model._keys_to_ignore_on_save = {*(model._keys_to_ignore_on_save or ()), *tied}
    return model


def count(parameters: Iterable[torch.nn.Parameter]) -> int:
    """Return how many numbers parameters have in all processes together; ZeRO-3 leaves each one its shard."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in parameters)


def check_model(model: Any, *, seq_len: int) -> None:
    """Raise where a model cannot be trained to predict the next of ``seq_len`` tokens.

    Raises:
        ArgumentValueError: it has learned positions for fewer, or its tokens see what comes after them.
    """
    for name, module in model.named_modules():
        is_positions = isinstance(module, torch.nn.Embedding) and ("position" in name or name.endswith("wpe"))
        if is_positions and module.num_embeddings < seq_len:
            expected = f"at most {module.num_embeddings}, as the model has learned so many positions ({name})"
            raise ArgumentValueError(message("seq_len", expected, str(seq_len)))
    tokens = model.get_input_embeddings().num_embeddings
    ids = torch.arange(min(8, seq_len))[None] % tokens
    changed = ids.clone()
    changed[0, -1] = (changed[0, -1] + 1) % tokens
    training = model.training
    model.eval()
    with torch.no_grad():
        before, after = (model(input_ids=x.to(model.device)).logits[0, :-1] for x in (ids, changed))
    model.train(training)
    if not torch.allclose(before.float(), after.float(), rtol=1e-3, atol=1e-4):
        hint = "A model of an encoder's architecture needs is_decoder set to true in its config."
        got = f"{type(model).__name__}, whose tokens see those after them"
        raise ArgumentValueError(message("model", "a causal language model", got, hint))


def check_vocabulary(config: Any, tokens: int) -> None:
    """Raise where the tokenizer has ids that the model has no row for.

    Raises:
        ArgumentValueError: it has.
    """
    rows = config.get_text_config().vocab_size
    if tokens > rows:
        expected = f"a vocabulary of at least the tokenizer's {tokens} tokens"
        hint = "Name the model's own tokenizer with --tokenizer, lower --vocab-size, or raise vocab_size in the config."
        raise ArgumentValueError(message("model", expected, f"{rows}", hint))


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """Turn what transformers raises while it makes a model into one error; these have no common base."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ArgumentValueError(message("model", "a causal language model", f"{name} ({why(error)})")) from error


def _from_settings(settings: dict[str, Any], where: str) -> Any:
    """Return the config object of a dictionary like a config.json's."""
    from transformers import AutoConfig

    if "model_type" not in settings:
        raise ArgumentValueError(message("model", "a config with a model_type", f"{where}, which has none"))
    try:
        return AutoConfig.for_model(**settings)
    except Exception as error:  # transformers' checks of configs have no common base
        expected, hint = "a config that transformers accepts", "Fix the config, or take a built-in name."
        raise ArgumentValueError(message("model", expected, f"{where}: {why(error)}", hint)) from error
