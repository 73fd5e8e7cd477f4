"""The check of a file that a user names for output, before anything is computed. No torch."""

from __future__ import annotations

from pathlib import Path

from lowtide.errors import ArgumentValueError, message


def check_output_file(name: str, file: str | None) -> None:
    """Check the file that an argument names; None: none.

    Raises:
        ArgumentValueError: it is in no folder, or is a folder itself.
    """
    if file is None:
        return
    if not Path(file).absolute().parent.is_dir():
        raise ArgumentValueError(message(name, "a file in a folder that exists", file))
    if Path(file).is_dir():
        raise ArgumentValueError(message(name, "a file", f"the folder {file}"))
