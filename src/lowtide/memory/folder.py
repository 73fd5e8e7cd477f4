"""The check of a folder that a user names for files. No torch: command lines call it before they load torch."""

import os
import sys
from pathlib import Path

from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError, message


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
