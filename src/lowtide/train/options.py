"""The options of TRL and transformers: their names, read from the libraries' sources without importing them.

Importing TRL takes 7 to 14 s. An option that is misspelled should not take that long to report, and a run that trains
from random weights never imports it. This is the one file that depends on where TRL and transformers declare them.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from lowtide.errors import ArgumentValueError, did_you_mean, message
from lowtide.train.config import TrainConfig, flag
from lowtide.train.files import why

_DECLARED = {  # in which files, of which library
    False: (("transformers", "training_args.py"),),
    True: (
        ("transformers", "training_args.py"),
        ("trl", "trainer/base_config.py"),
        ("trl", "trainer/sft_config.py"),
        ("trl", "trainer/model_config.py"),
    ),
}
# what TRL's ModelConfig and SFTConfig call settings that pre-training has, too
PRETRAINING = ("dtype", "attn_implementation", "dataset_text_field", "trust_remote_code")
ALIASES = {  # TRL's names of lowtide's short ones
    "model_name_or_path": "model",
    "dataset_name": "data",
    "output_dir": "output",
    "max_length": "seq_len",
    "learning_rate": "lr",
}
_NOT_IN_A_FILE = {  # what --config cannot have
    **dict.fromkeys(("compare", "json", "config", "write_launch_file"), "Give it on the command line."),
    "env": "Set the environment's variables before the command.",
    "datasets": "Name files and folders with data: [...].",
}


def parse(
    own: Mapping[str, Any], words: Sequence[str], config_file: Path | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return lowtide's own settings and the options of TRL and transformers that a command and a YAML file give.

    The command line has ``own`` settings and, beside them, ``words``: ``--name value ...``, ``--name=value`` or
    ``--name``, with dashes or underscores. It overrides the file. Values are a text, a list of texts, or what the file
    has.

    Raises:
        ArgumentValueError: an option that neither library has, with the nearest one, a setting given by two names, or a
            file that is no YAML mapping.
    """
    in_file = _from_file(config_file) if config_file is not None else {}
    for name in in_file.keys() & _NOT_IN_A_FILE.keys():
        raise ArgumentValueError(message("--config", "options of training alone", name, _NOT_IN_A_FILE[name]))
    in_words = dict(_from_words(words))
    for name in in_file | in_words:
        _check(name, fine_tunes=True)
    own_in_file, file_options = _split({}, in_file)
    own_in_words, word_options = _split(own, in_words)
    return own_in_file | own_in_words | dict(own), file_options | word_options


def check_pretraining(options: Mapping[str, Any]) -> None:
    """Raise if a run from random weights does not have an option that `parse` returned: it is TRL's.

    Raises:
        ArgumentValueError: there is one.
    """
    for name in options:
        _check(name, fine_tunes=False)


def _check(name: str, *, fine_tunes: bool) -> None:
    """Raise where there is no such option."""
    own, known = set(TrainConfig.__dataclass_fields__) - {"options"}, names(fine_tunes=fine_tunes)
    if name in own or name in ALIASES or known is None or name.removeprefix("no_") in known:
        return
    if not fine_tunes and (of_trl := names(fine_tunes=True)) and name.removeprefix("no_") in of_trl:
        expected, got = "an option of transformers' TrainingArguments to train from random weights", "TRL's"
        hint = "Name a pretrained model with --model to fine-tune it."
        raise ArgumentValueError(message(_flag(name), expected, got, hint))
    expected = "an option of lowtide train, TRL's SFTConfig or transformers' TrainingArguments"
    near = did_you_mean(_flag(name), map(_flag, {*own, *ALIASES, *known}))
    raise ArgumentValueError(message(_flag(name), expected, "another name", near))


def _split(own: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return lowtide's own settings among options, TRL's names of them resolved, and the others.

    Raises:
        ArgumentValueError: a setting is given by two of its names, or has a value of another kind.
    """
    settings, others = {}, {}
    for name, value in given.items():
        target = ALIASES.get(name, name)
        if target not in TrainConfig.__dataclass_fields__ or target == "options":
            others[name] = value
            continue
        if target in own or target in settings or (target != name and target in given):
            raise ArgumentValueError(message(_flag(name), f"one of {_flag(name)} and {flag(target)}", "both"))
        settings[target] = _typed(target, value)
    return settings, others


@lru_cache
def names(*, fine_tunes: bool) -> frozenset[str] | None:
    """Return the names of all options, read from the sources of transformers and TRL; None where they are elsewhere."""
    found: set[str] = set() if fine_tunes else set(PRETRAINING)
    for package, file in _DECLARED[fine_tunes]:
        try:
            spec = importlib.util.find_spec(package)
            assert spec is not None
            assert spec.origin is not None
            tree = ast.parse((Path(spec.origin).parent / file).read_text(encoding="utf-8"))
        except (AssertionError, OSError, SyntaxError, ValueError):
            return None  # TRL itself reports a wrong name later
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                fields = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
                found |= {each.id for each in fields if isinstance(each, ast.Name) and not each.id.startswith("_")}
    return frozenset(found)


def words_of(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield options as words of a command line, as transformers' `HfArgumentParser` reads them."""
    for name, value in options.items():
        if isinstance(value, list | tuple):
            yield f"--{name}"
            yield from map(str, value)
        elif value is True and name.startswith("no_"):  # a flag without a value
            yield f"--{name}"
        elif value is not None:  # with "=", so that it may begin with a dash
            yield f"--{name}={json.dumps(value) if isinstance(value, Mapping) else value}"


def _from_words(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the options of a command line."""
    at = 0
    while at < len(words):
        if not words[at].startswith("--"):
            expected, hint = "an option that begins with --", "Several values follow their option."
            raise ArgumentValueError(message("arguments", expected, repr(words[at]), hint))
        name, equals, value = words[at][2:].partition("=")
        end = at + 1
        while end < len(words) and not equals and not words[end].startswith("--"):
            end += 1
        values = [value] if equals else list(words[at + 1 : end])
        yield name.replace("-", "_"), values[0] if len(values) == 1 else values or True
        at = end


def _from_file(file: Path) -> dict[str, Any]:
    """Return the options of a YAML file."""
    expected = "a YAML file of options and their values, such as 'learning_rate: 1e-5'"
    try:
        import yaml

        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except ImportError as error:
        hint = "pip install pyyaml"
        raise ArgumentValueError(message("--config", "PyYAML to be installed", "none", hint)) from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ArgumentValueError(message("--config", expected, f"{file} ({why(error)})")) from error
    found = {} if found is None else found  # comments alone
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ArgumentValueError(message("--config", expected, f"something else in {file}"))
    return {name.replace("-", "_"): value for name, value in found.items() if value not in (None, [])}


def _typed(name: str, value: Any) -> Any:
    """Return an own setting's value in the type of its field: command lines have texts, and YAML reads 1e-5 as one."""
    kind = str(TrainConfig.__dataclass_fields__[name].type)
    if kind.startswith("tuple"):
        if isinstance(value, Mapping):  # columns in YAML
            return tuple(f"{key}={each}" for key, each in value.items())
        return tuple(map(str, value)) if isinstance(value, list | tuple) else (str(value),)
    try:
        if kind.startswith("bool"):
            return {"true": True, "false": False}[str(value).lower()]
        if kind.startswith(("int", "float")):
            return (int if kind.startswith("int") else float)(value)
    except (KeyError, TypeError, ValueError) as error:
        expected = "true or false" if kind.startswith("bool") else "a number"
        raise ArgumentValueError(message(name, expected, repr(value))) from error
    return str(value)


def _flag(name: str) -> str:
    return f"--{name}"
