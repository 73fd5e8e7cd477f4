"""`lowtide train` as elastic torchrun starts it: an agent for each node, whose ranks are forked.

``elastic.py NODES RANKS FAULT ARGUMENT...``: as many nodes, on this host, with as many ranks each; the fault, of
`train_faults`, comes once.
"""

from __future__ import annotations

import mmap
import os
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from distributed.train_faults import cause
from lowtide.cli import main

# seconds until nodes go on without more, once ranks have run, and until a node that is silent counts as lost
PATIENCE = {"last_call_timeout": 1, "keep_alive_interval": 1, "keep_alive_max_attempt": 15, "is_host": False}
_begun = mmap.mmap(-1, 1)  # of all processes: whether ranks have begun


def _last_call(own: RendezvousTimeout) -> timedelta:
    """Return how long nodes wait for more: at first until all are there, however slowly they come."""
    return own._last_call if _begun[0] else timedelta(minutes=10)


def _rank(fault: str, arguments: list[str]) -> None:
    _begun[0] = 1
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        cause(fault)
    if status := main(arguments):
        os._exit(status)  # gloo's threads may still let tensors go, which aborts an interpreter being torn down


def _node(port: int, nodes: int, ranks: int, *what: Any) -> None:
    # torch 2.13's agents keep the store in which the ranks of before left their addresses
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = LaunchConfig(
        min_nodes=1, max_nodes=nodes, nproc_per_node=ranks, run_id="run", rdzv_backend="c10d", max_restarts=1,
        rdzv_endpoint=f"127.0.0.1:{port}", rdzv_configs={**PATIENCE}, monitor_interval=0.1, start_method="fork",
        local_addr="127.0.0.1",
    )  # fmt: skip
    elastic_launch(config, _rank)(*what)


def _main(nodes: int, ranks: int, fault: str, arguments: list[str]) -> None:
    """Start the nodes, and end well if one of them did."""
    RendezvousTimeout.last_call = property(_last_call)  # type: ignore[method-assign,assignment]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agents = []
    for _ in range(nodes):
        agents.append(pid := os.fork())
        if pid == 0:
            status = 1
            try:
                _node(store.port, nodes, ranks, fault, arguments)
                status = 0
            finally:
                os._exit(status)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in agents]
    sys.exit(0 if 0 in statuses else 1)


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
