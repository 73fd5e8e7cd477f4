"""The parts of a model that `lowtide.patch` fuses: `mlp`, `norm` and `rope`.

A part is one or more files, for modules of several forms, with three functions each. ``is_candidate(module)``: whether
a module has that form. ``find(module, base)``: what is done to a candidate of stock class ``base``, as text, and the
arguments of ``overrides``; or why nothing is. ``overrides(base, *args)``: what the class of a patched module does
differently. A file may have ``ATTRIBUTES`` that a patched module gets, with their first values.
"""

from collections.abc import Iterator
from types import ModuleType

from torch import nn

from lowtide.distributed.zero import forget
from lowtide.models import experts_part, mlp_part, norm_part, rope_part
from lowtide.models.instance import give_class, is_on_top, part_of, stock_class, take_class_back
from lowtide.models.report import PartReport, PatchReport

PARTS: dict[str, tuple[ModuleType, ...]] = {
    "mlp": (mlp_part, experts_part),
    "norm": (norm_part,),
    "rope": (rope_part,),
}


def fuse(model: nn.Module, part: str, report: PatchReport) -> None:
    """Fuse every module of a part that allows it, and report what was done, or why not."""
    rows: list[PartReport] = []
    for name, module in model.named_modules():
        if part_of(module) not in (None, part):
            continue
        kind = next((kind for kind in PARTS[part] if kind.is_candidate(module)), None)
        if kind is None:
            continue
        ours = part_of(module) == part
        if ours and not is_on_top(module):
            rows.append(PartReport(part, name, "patched before, and its class was changed since", patched=True))
            continue
        found = kind.find(module, stock_class(module))
        if isinstance(found, str):
            if ours:
                _restore(module)
            rows.append(PartReport(part, name, f"left as it is: {found}", patched=False))
            continue
        what, args = found
        give_class(module, part, kind.overrides, *args)
        for attribute, value in getattr(kind, "ATTRIBUTES", {}).items():
            vars(module).setdefault(attribute, value)
        rows.append(PartReport(part, name, what, patched=True))
    if rows:
        report.add_modules(part, rows)
    else:
        report.add(part, "-", "left as it is: the model has no module of that form", patched=False)


def restore(model: nn.Module, part: str) -> None:
    """Undo `fuse`, of modules whose class nothing else has changed since."""
    for module in list(patched_modules(model, part)):
        _restore(module)


def patched_modules(model: nn.Module, part: str) -> Iterator[nn.Module]:
    """Return the modules that `fuse` changed."""
    return (module for module in model.modules() if part_of(module) == part)


def _restore(module: nn.Module) -> None:
    take_class_back(module)
    forget(module)
    for attribute in mlp_part.ATTRIBUTES:
        vars(module).pop(attribute, None)
