"""The parts of a model that `lowtide.patch` fuses: `mlp`, `norm` and `rope`.

A module is fused where its class's forward is transformers' own code, or where the user names the class, and a probe
finds that an operation of lowtide computes the same: values, gradients and attributes, in training and in evaluation.

A part is one or more files, for modules of several forms, each with: ``is_candidate(module)``, whether a module has
that form; ``find(module, base)``, what a candidate of stock class ``base`` computes, as text and as arguments of
``overrides``, or why it stays as it is; ``overrides(base, *args)``, what a patched module's class does differently.
Beside these ``INPUTS``, how many its forward takes, None for any; ``WEIGHTS``, the names of the weights and layers that
it computes with, None where its other children do not matter; and ``ATTRIBUTES`` that a patched module gets, with their
first values.
"""

import inspect
from collections.abc import Hashable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn

from lowtide.distributed.zero import forget, shape_of
from lowtide.errors import ArgumentTypeError, ArgumentValueError, message
from lowtide.models import experts_part, mlp_part, norm_part, rope_part
from lowtide.models.eligibility import are_untouched
from lowtide.models.instance import (
    children_beside,
    give_class,
    is_code_of,
    is_on_top,
    parameters_of,
    part_of,
    stock_class,
    take_class_back,
)
from lowtide.models.probe import surroundings
from lowtide.models.report import PartReport, PatchReport

PARTS: dict[str, tuple[ModuleType, ...]] = {
    "mlp": (mlp_part, experts_part),
    "norm": (norm_part,),
    "rope": (rope_part,),
}
_OWN = ("transformers.", "torch.")


class Candidate(NamedTuple):
    """A module of a part's form."""

    name: str
    module: nn.Module
    kind: Any
    outcome: str  # as in the report
    args: tuple[Any, ...] | None  # of ``overrides``; None: its class stays


def find(model: nn.Module, part: str, fuse: tuple[type, ...]) -> list[Candidate]:
    """Return the modules of a part's form, and how each is fused, or why it is not; nothing is changed.

    Modules that are alike are looked at once.
    """
    rows = []
    known: dict[Hashable, tuple[str, tuple[Any, ...]] | str] = {}
    with surroundings():
        for name, module in model.named_modules():
            kind = next((kind for kind in PARTS[part] if kind.is_candidate(module)), None)
            if kind is None or part_of(module) not in (None, part):
                continue
            form = _form(module)
            if form not in known:
                known[form] = _fusion(module, kind, stock_class(module), fuse)
            fusion = known[form]
            outcome, args = (f"left as it is: {fusion}", None) if isinstance(fusion, str) else fusion
            rows.append(Candidate(name, module, kind, outcome, args))
    return rows


def _form(module: nn.Module) -> Hashable:
    """Return what is the same for modules that are alike: classes, attributes, children, and forms of weights."""

    def plain(x: Any) -> Hashable:
        if type(x) is nn.Parameter:
            return shape_of(x), x.dtype, x.device
        if isinstance(x, dict | list | tuple | set):  # of parameters, buffers, hooks
            return tuple(map(plain, x.items() if isinstance(x, dict) else x))
        return (type(x), x) if type(x) in (int, float, str, bool) else id(x)

    attributes = ((name, plain(x)) for name, x in vars(module).items() if name != "_modules")
    return type(module), *attributes, *((name, _form(child)) for name, child in module.named_children())


def _fusion(module: nn.Module, kind: Any, base: Any, fuse: tuple[type, ...]) -> tuple[str, tuple[Any, ...]] | str:
    if part_of(module) is not None and not is_on_top(module):
        return "it was patched before, and its class was changed since"
    named = _is_named(base, fuse)
    name_it = f"not transformers' own code; name it to fuse it: lowtide.patch(model, fuse=({base.__name__},))"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    if not named and not is_code_of(base.forward, *_OWN):
        return f"its forward is {name_it}"
    if kind.INPUTS is not None and len(inspect.signature(base.forward).parameters) != 1 + kind.INPUTS:
        return f"its forward takes other inputs than {kind.INPUTS}"
    if kind.WEIGHTS is not None:
        tensors = dict(module.named_buffers(recurse=False)) | parameters_of(module)
        others = children_beside(module, kind.WEIGHTS)
        states = (x for child in others for x in (*child.parameters(), *child.buffers()))
        if any(True for _ in states) or any(x is not None and key not in kind.WEIGHTS for key, x in tensors.items()):
            return "it has weights or buffers beside its projections"
        if not are_untouched(others):
            return "a child has hooks or a forward of its own"
        classes = (type(inner) for child in others for inner in child.modules())
        if not named and not all(is_code_of(inner.forward, *_OWN) for inner in classes):
            return f"a child's forward is {name_it}"
    fusion: tuple[str, tuple[Any, ...]] | str = kind.find(module, base)
    return fusion


def _is_named(base: Any, fuse: tuple[type, ...]) -> bool:
    """Whether the user has named a class, or one whose forward it inherits."""
    return any(issubclass(base, named) and base.forward is named.forward for named in fuse)  # type: ignore[attr-defined]


def check_fuse(fuse: object) -> None:
    """Check that the user has named classes of modules."""
    if not isinstance(fuse, tuple) or not all(isinstance(x, type) and issubclass(x, nn.Module) for x in fuse):
        raise ArgumentTypeError(message("fuse", "a tuple of classes of modules", repr(fuse)))


def check_named(fuse: tuple[type, ...], found: dict[str, list[Candidate]]) -> None:
    """Check that each class that the user has named is fused.

    Raises:
        ArgumentValueError: A module of the class is not, or there is none.
    """
    for named in fuse:
        named_rows = [row for rows in found.values() for row in rows if _is_named(stock_class(row.module), (named,))]
        got = next((f"{row.name} {row.outcome}" for row in named_rows if row.outcome.startswith("left")), None)
        if got is not None or not named_rows:
            expected = f"{named.__name__} to be an MLP, experts, a norm or attention that can be fused"
            raise ArgumentValueError(message("fuse", expected, got or f"none in {', '.join(found) or 'no part'}"))


def fuse(rows: Sequence[Candidate], part: str, report: PatchReport) -> None:
    """Fuse what `find` found of a part, and report what was done, or why not."""
    lines = []
    for name, module, kind, outcome, args in rows:
        if args is not None:
            give_class(module, part, kind.overrides, *args)
            for attribute, value in kind.ATTRIBUTES.items():
                vars(module).setdefault(attribute, value)
        elif is_on_top(module):
            _restore(module)
        lines.append(PartReport(part, name, outcome, patched=part_of(module) is not None))
    if lines:
        report.add_modules(part, lines)
    else:
        report.add(part, "-", "left as it is: the model has no module of that form", patched=False)


def restore(model: nn.Module, part: str) -> None:
    """Undo `fuse`, of modules whose class nothing else has changed since."""
    for module in model.modules():
        if part_of(module) == part:
            _restore(module)


def _restore(module: nn.Module) -> None:
    take_class_back(module)
    forget(module)
    for attribute in mlp_part.ATTRIBUTES:
        vars(module).pop(attribute, None)
