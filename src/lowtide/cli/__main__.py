"""`python -m lowtide.cli`, which torchrun and accelerate launch can start."""

import sys

from lowtide.cli import main

sys.exit(main())
