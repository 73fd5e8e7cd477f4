"""The checks of files and folders that a user names for output, before anything is computed. No torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError, message


def check_output_files(**files: Path | str | None) -> None:
    """Check the files that arguments name; None: none.

    Raises:
        ArgumentValueError: one is in no folder, is a folder itself, or is the file of another argument too.
    """
    seen: dict[Path, str] = {}
    for name, file in files.items():
        if file is None:
            continue
        path = Path(file).absolute()
        if not path.parent.is_dir():
            raise ArgumentValueError(message(name, "a file in a folder that exists", file))
        if path.is_dir():
            raise ArgumentValueError(message(name, "a file", f"the folder {file}"))
        if (other := seen.setdefault(path.resolve(), name)) != name:
            raise ArgumentValueError(message(name, f"another file than {other}'s", file))


def checked_folder(name: str, folder: object) -> Path:
    """Return an argument that is a folder in which files can be made.

    Raises:
        UnsupportedError: The system is not Linux.
        ArgumentTypeError: It is no path.
        ArgumentValueError: It is no folder, or nothing can be written there.
    """
    if not sys.platform.startswith("linux"):
        raise UnsupportedError(message(name, "Linux", sys.platform, f"Leave {name} out."))
    if not isinstance(folder, str | os.PathLike):
        raise ArgumentTypeError(message(name, "a folder's path", f"{folder!r}"))
    path = Path(folder)
    if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
        hint = "Make the folder, on a fast disk of this machine."
        raise ArgumentValueError(message(name, "a folder that can be written to", f"{path}", hint))
    return path
