"""The projections that `lowtide.swiglu_mlp` can replace: plain linear layers."""

from torch import nn

from lowtide.code import MODULE_HOOKS
from lowtide.errors import UnsupportedError, message


def why_not_plain(projection: object) -> str | None:
    """Return why a module's output is not ``x W^T + b`` of its own ``weight`` and ``bias``, or None if it is.

    A parametrised weight is plain: reading it computes it. Not plain are a LoRA layer, a quantised one, a subclass's or
    an instance's own forward, and hooks, which would not run.
    """
    if not isinstance(projection, nn.Linear):
        return f"it is a {type(projection).__name__}"
    if type(projection).forward is not nn.Linear.forward or "forward" in projection.__dict__:
        return f"it is a {type(projection).__name__} with a forward of its own"
    if any(getattr(projection, kind) for kind in MODULE_HOOKS):
        return "it has hooks, which would not run"
    return None


def check_plain(**projections: object) -> list[nn.Linear]:
    """Return the projections, given by name, each of them a plain `torch.nn.Linear`.

    Raises:
        UnsupportedError: One is not.
    """
    found = []
    for name, projection in projections.items():
        reason = why_not_plain(projection)
        if reason or not isinstance(projection, nn.Linear):
            hint = "Adapters and wrappers go around the projections of an MLP that calls them one by one."
            raise UnsupportedError(message(name, "a plain torch.nn.Linear", f"{reason}", hint))
        found.append(projection)
    return found
