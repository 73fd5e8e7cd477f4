"""Where the streams of a run are at a checkpoint: a file of each rank, read by however many ranks go on from it."""

from __future__ import annotations

import json
from pathlib import Path

from lowtide.errors import ArgumentValueError, message
from lowtide.train.config import TrainConfig
from lowtide.train.packing import PackedBlocks, positions
from lowtide.train.ranks import Shares, launched_rank, launched_ranks
from lowtide.train.streams import START, Position


def write_positions(checkpoint: Path, blocks: PackedBlocks, shares: Shares) -> None:
    """Write where this rank's streams are into a checkpoint."""
    told = {"ranks": shares.ranks, "of": shares.streams, "streams": blocks.state()}
    _file(checkpoint, shares.rank).write_text(json.dumps(told))


def read_positions(checkpoint: Path) -> list[Position]:
    """Return where all streams of a run were at a checkpoint.

    Raises:
        ArgumentValueError: they are not all there.
    """
    first, ranks, of = _read(checkpoint, 0)
    found = first + [at for rank in range(1, ranks) for at in _read(checkpoint, rank)[0]]
    if len(found) != of:
        got = f"{checkpoint}, which has the positions of {len(found)} streams of {of}"
        raise ArgumentValueError(message("resume", "a whole checkpoint", got, "Remove it, to take an older one."))
    return found


def ranks_at(checkpoint: Path) -> int:
    """Return how many ranks wrote a checkpoint.

    Raises:
        ArgumentValueError: it cannot be read.
    """
    return _read(checkpoint, 0)[1]


def shares_of(config: TrainConfig, resume_from: Path | None) -> tuple[Shares, list[Position]]:
    """Return this rank's share of the run's streams, and where each of them begins.

    Raises:
        ArgumentValueError: the checkpoint's positions cannot be read, or there are more ranks than streams.
    """
    ranks = launched_ranks()
    starts = [START] * (config.batch_size * ranks) if resume_from is None else read_positions(resume_from)
    shares = Shares(streams=len(starts), ranks=ranks, rank=launched_rank(), rows=config.batch_size)
    return shares, starts[shares.first : shares.first + shares.count]


def _read(checkpoint: Path, rank: int) -> tuple[list[Position], int, int]:
    """Return a rank's positions, and how many ranks and streams there were."""
    file = _file(checkpoint, rank)
    try:
        told = json.loads(file.read_text())
        start, ranks = positions(told["streams"]), int(told["ranks"])
        return start, ranks, int(told.get("of", len(start) * ranks))
    except (OSError, ValueError, KeyError, TypeError) as error:
        got = f"{checkpoint}, where {file.name} cannot be read"
        hint = "Remove it, to take an older one."
        raise ArgumentValueError(message("resume", "a whole checkpoint of a lowtide run", got, hint)) from error


def _file(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"data_position_{rank}.json"
