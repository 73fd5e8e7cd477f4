"""`python -m lowtide`: the `lowtide` command, as torchrun and accelerate launch can start it."""

import sys

from lowtide.cli import main

if __name__ == "__main__":
    sys.exit(main())
