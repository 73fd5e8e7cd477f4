"""The checks of files that a user names for output, before anything is computed. No torch."""

from __future__ import annotations

from pathlib import Path

from lowtide.errors import ArgumentValueError, message


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
