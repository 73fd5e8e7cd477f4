"""The model of a run: pretrained weights from a folder, or random ones for a config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from lowtide.errors import ArgumentValueError, LowtideError, message
from lowtide.measure.failures import is_out_of_memory
from lowtide.train.parallel import built_whole
from lowtide.train.shapes import DEFAULT, SHAPES, config_file

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_ALONE = "Take --packing none, where every document has a row of its own."


def has_weights(name: str) -> bool:
    """Return whether a ``--model`` is a folder with pretrained weights (and so with a tokenizer of its own)."""
    folder = Path(name).expanduser()
    return name not in SHAPES and any((folder / weights).is_file() for weights in _WEIGHTS)


def model_config(name: str, *, vocab_size: int) -> Any:
    """Return the `transformers` config that a ``--model`` names.

    Args:
        name: a built-in name, a .json file, or a folder with a config.json.
        vocab_size: the vocabulary of the default model, which has none of its own.

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


def build_model(name: str, config: Any, *, seed: int, dtype: torch.dtype = torch.float32) -> Any:
    """Return the causal language model: pretrained where the folder has weights, else freshly initialised.

    Raises:
        ArgumentValueError: the config describes no causal language model, or the weights cannot be read.
    """
    from transformers import AutoModelForCausalLM, set_seed

    set_seed(seed)
    lacking: list[str] = []
    try:
        if has_weights(name):
            folder = Path(name).expanduser().absolute()
            with built_whole():
                model, told = AutoModelForCausalLM.from_pretrained(
                    folder, dtype=dtype, local_files_only=True, output_loading_info=True
                )
            lacking = sorted(map(str, [*told["missing_keys"], *told["mismatched_keys"]]))
        else:
            with built_whole():
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            _round_weights(model, dtype)
    except Exception as error:  # wrong shapes, missing or broken files, unknown architectures: no common base
        if is_out_of_memory(error):
            raise
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ArgumentValueError(message("model", "a causal language model", f"{name} ({why})")) from error
    if lacking:
        got = f"{name}, which lacks {len(lacking)}, {lacking[0]} among them"
        hint = "They would be random: save the whole model, or name its config.json to train from scratch."
        raise ArgumentValueError(message("model", "a folder with all the model's weights", got, hint))
    return model


def _round_weights(model: Any, dtype: torch.dtype) -> None:
    """Give a model's parameters a dtype, so that a seed means the same weights in each; buffers stay as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype


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
    length = min(8, seq_len)
    ids = torch.arange(length)[None] % model.get_input_embeddings().num_embeddings
    changed = ids.clone()
    changed[0, -1] = (changed[0, -1] + 1) % model.get_input_embeddings().num_embeddings
    training = model.training
    model.eval()
    with torch.no_grad():
        before, after = (model(input_ids=x.to(model.device)).logits[0, :-1] for x in (ids, changed))
    model.train(training)
    if not torch.allclose(before.float(), after.float(), rtol=1e-3, atol=1e-4):
        hint = "A model of an encoder's architecture needs is_decoder set to true in its config."
        got = f"{type(model).__name__}, whose tokens see those after them"
        raise ArgumentValueError(message("model", "a causal language model", got, hint))


def check_separate(model: Any, *, seq_len: int) -> None:
    """Raise where a token of a packed document can see those of the document before it.

    Two short documents in one row: what the second one's logits owe to the embeddings of the first is exactly nothing
    where attention does not cross, in any dtype; and they are those of the document alone.

    Raises:
        ArgumentValueError: it can, or positions do not begin again.
    """
    length = max(1, min(6, seq_len // 2))
    ids = torch.arange(2 * length, device=model.device)[None] % model.get_input_embeddings().num_embeddings
    places = torch.arange(length, device=model.device).repeat(2)[None]
    seen: list[torch.Tensor] = []

    def keep(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        seen.append(output.detach().requires_grad_())
        return seen[-1].clone()  # some models scale their embeddings in place, as no leaf can be

    training = model.training
    model.eval()
    hook = model.get_input_embeddings().register_forward_hook(keep)
    try:
        packed = model(input_ids=ids, position_ids=places).logits[:, length:]
        if not seen:
            got = f"{type(model).__name__}, which does not call its input embeddings, so that nobody can tell"
            raise ArgumentValueError(message("packing", "a model that keeps packed documents apart", got, _ALONE))
        (owed,) = torch.autograd.grad(packed.float().square().sum(), seen[0])
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:  # as when it takes no positions
        # after the GPU's own errors nothing runs there any more, with or without packing
        if isinstance(error, (LowtideError, torch.AcceleratorError)) or is_out_of_memory(error):
            raise
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        got = f"{type(model).__name__}, whose forward or backward of two in a row raised {why}"
        raise ArgumentValueError(message("packing", "a model that can take packed documents", got, _ALONE)) from error
    finally:
        hook.remove()
    with torch.no_grad():
        alone = model(input_ids=ids[:, length:]).logits
    model.train(training)
    rounding = {torch.float32: 1e-4}.get(alone.dtype, 5e-2) * alone.float().abs().max()
    if owed[:, :length].any() or ((packed - alone).abs().max() > rounding):
        got = f"{type(model).__name__}, whose tokens see the document before theirs"
        raise ArgumentValueError(message("packing", "a model that keeps packed documents apart", got, _ALONE))


def choose_attention(model: Any, name: str) -> None:
    """Set transformers' implementation of attention.

    Raises:
        ArgumentValueError: it is not installed, or the model has no such attention.
    """
    try:
        model.set_attn_implementation(name)
    except (ImportError, ValueError, RuntimeError) as error:
        why = " ".join(str(error).split())[:200]
        expected = "an implementation of attention that is installed and that the model has"
        raise ArgumentValueError(message("attention", expected, f"{name} ({why})", "sdpa is always there.")) from error


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


def _from_settings(settings: dict[str, Any], where: str) -> Any:
    """Return the config object of a dictionary like a config.json's."""
    from transformers import AutoConfig

    if "model_type" not in settings:
        raise ArgumentValueError(message("model", "a config with a model_type", f"{where}, which has none"))
    try:
        return AutoConfig.for_model(**settings)
    except Exception as error:  # transformers' checks of configs have no common base
        why = " ".join(str(error).split())[:200] or type(error).__name__
        hint = "Mend the config, or take a built-in name."
        raise ArgumentValueError(
            message("model", "a config that transformers accepts", f"{where}: {why}", hint)
        ) from error
