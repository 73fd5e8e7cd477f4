"""How a run ends early: SIGTERM as clusters send it, more than once and to all processes."""

from __future__ import annotations

import signal
from types import SimpleNamespace

from lowtide.train.ending import SaveAndStop


def test_a_second_sigterm_leaves_the_checkpoint_to_be_written() -> None:
    """Slurm signals the ranks and torchrun, which signals them again."""
    before = signal.getsignal(signal.SIGTERM)
    stop = SaveAndStop(saves=True)
    control = SimpleNamespace(should_training_stop=False, should_save=False)
    stop.on_train_begin(None, None, control)
    try:
        signal.raise_signal(signal.SIGTERM)
        assert callable(signal.getsignal(signal.SIGTERM)), "the next one would kill the process"
        signal.raise_signal(signal.SIGTERM)
        stop.on_step_end(SimpleNamespace(device="cpu"), None, control)
        signal.raise_signal(signal.SIGTERM)  # while the checkpoint is written
        assert control.should_save
        assert control.should_training_stop
    finally:
        stop.close()
    assert signal.getsignal(signal.SIGTERM) is before
