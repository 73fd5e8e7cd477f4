"""Write the pages of the public interface, from the docstrings, into a folder: python docs/build.py [site]."""

import sys
from pathlib import Path

import pdoc
import pdoc.render

import lowtide

MODULES = ("lowtide", "lowtide.measure", "lowtide.train", r"!lowtide\.(measure|train)\.")  # what users call


def build(folder: Path) -> None:
    """Render each public module as a page that opens offline."""
    assert lowtide.PatchCallback is not None  # there from the first use on
    pdoc.render.configure(docformat="google", math=False, show_source=False)
    pdoc.pdoc(*MODULES, output_directory=folder)


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "site")
    build(target)
    sys.stdout.write(f"{target / 'lowtide.html'}\n")
