"""`python -m lowtide`: the `lowtide` command, as torchrun and accelerate launch can start it."""

import sys

from lowtide.cli import main

sys.exit(main())
