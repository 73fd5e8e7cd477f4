"""The check that the functions of this room share."""

from lowtide.arguments import check_tensor, is_dtensor
from lowtide.errors import ArgumentTypeError, message


def why_not_taken(name: str, value: object) -> ArgumentTypeError | None:
    """Return the error for what is no dense floating-point tensor that is whole on this rank, None for one that is."""
    try:
        tensor = check_tensor(name, value)
    except ArgumentTypeError as error:
        return error
    if not tensor.is_floating_point():
        return ArgumentTypeError(message(name, "a floating-point dtype", str(tensor.dtype)))
    if is_dtensor(tensor):
        hint = "Call it inside the forward of the module that fully_shard has taken, or on what to_local() returns."
        return ArgumentTypeError(message(name, "a tensor that is whole on this rank", "a DTensor", hint))
    return None
