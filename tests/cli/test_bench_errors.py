"""What no benchmark can run is one line that names the setting, and status 2."""

from __future__ import annotations

import pytest

from lowtide.bench.peers import PEERS
from lowtide.bench.sweep_config import SWEEP_PEERS
from lowtide.cli import main

TOKENS = {
    "--shape nonsense": "shape: expected",
    "--shape 1,2": "shape: expected",
    "--shape 1,2,3,0": "shape: expected",
    "--work nonsense": "work: expected names out of",
    "--only nonsense": "only: expected names out of lowtide",
    "--only naive --skip naive": "skip: expected at least one peer that is left",
}
EVERYONES = {
    "--reps 0": "reps: expected a whole number of at least 1",
    "--warm -1": "warm: expected a whole number of at least 0",
    f"--seed {2**32 - 1}": "seed: expected a whole number below",
    "--output=": "output: expected a name",
}
BAD = {
    "head": {
        "--shape nonsense": "shape: expected llama-1b",
        "--shape 1,2": "shape: expected",
        "--shape 0,2,3": "shape: expected",
        "--shape ²,2,3": "shape: expected",
        "--only nobody": "only: expected names out of lowtide",
        "--skip nobody": "skip: expected names out of lowtide",
        f"--skip {' '.join(PEERS)}": "skip: expected at least one peer that is left",
        "--workspace-mib 4": "workspace_mib: expected --sweep beside it, got 4",
        "--sweep --workspace-mib 0": "workspace_mib: expected numbers above 0",
        "--sweep --workspace-mib x": "workspace_mib: expected numbers, got 'x'",
        "--sweep --workspace-mib nan": "workspace_mib: expected numbers above 0",
        "--tokens 1.5": "tokens: expected numbers",
        "--tokens -1": "tokens: expected whole numbers above 0",
        "--no-table": "table: expected --sweep, --settings or --tokens",
    },
    "mlp": {
        "--shape nonsense": "shape: expected published-1, ",
        "--shape 1,2,3,4": "shape: expected published-1, ",
        "--shape 1,2,3,4,0": "shape: expected published-1, ",
        "--only nobody": "only: expected names out of lowtide-0",
        "--only naive --skip naive": "skip: expected at least one peer",
    },
    "apply": {
        "--shape nonsense": "shape: expected 4x4096, 64x512",
        "--only nobody": "only: expected names out of cross-entropy",
        "--no-table": "table: expected --train or --grpo beside --no-table",
        "--steps 0": "steps: expected a whole number of at least 1",
        "--seq-len 7": "seq_len: expected a whole number of at least 8",
    },
    "sweep": {
        "--shape all": "shape: expected",
        "--only nobody": "only: expected names out of lowtide",
        f"--skip {' '.join(SWEEP_PEERS)}": "skip: expected at least one peer that is left",
        "--tokens 0": "tokens: expected whole numbers above 0, or none",
        "--hidden x": "hidden: expected numbers",
        "--seconds 0": "seconds: expected a number above 0",
        "--tokens none --hidden none --vocab none": "tokens: expected one line that is not none",
    },
    "stats": TOKENS,
    "divergence": TOKENS,
}


@pytest.mark.parametrize(
    ("kind", "arguments", "says"),
    [(kind, arguments, says) for kind, bad in BAD.items() for arguments, says in {**bad, **EVERYONES}.items()],
)
def test_bad_input_is_one_line(kind: str, arguments: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", kind, *arguments.split()]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"lowtide bench {kind}: {says}")
    assert err.count("\n") == 1
