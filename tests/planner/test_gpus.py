"""GPUs by name and by the driver's name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lowtide.errors import ArgumentValueError, UnsupportedError
from lowtide.plan.gpus import GPUS, find_gpu

NAMES = {
    "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H100 PCIe": "h100-pcie", "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA A100-SXM4-40GB": "a100-40gb", "NVIDIA A10": "a10", "NVIDIA L40": "l40",
    "NVIDIA RTX 6000 Ada Generation": "rtx6000-ada", "NVIDIA RTX A6000": "a6000", "NVIDIA GeForce RTX 4090": "rtx4090",
    # as people write them
    "NVIDIA A100": "a100", "A100_40GB": "a100-40gb", "4090": "rtx4090", "GeForce RTX 3090": "rtx3090",
}  # fmt: skip
# One of another name; a part of one; and what is none.
UNKNOWN = (
    "NVIDIA A10G", "Tesla T4", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 80GB HBM3 MIG 3g.40gb", "h300", "",
    "cuda:x", "cuda:", "cpu", "meta", "rtx", "nvidia", "100",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_gpus_are_known_as_drivers_and_people_name_them(name: str) -> None:
    assert find_gpu(name) is GPUS[NAMES[name]]


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_one_is_refused(name: str) -> None:
    with pytest.raises(ArgumentValueError, match=r"^device: expected 'cuda' .* h100, "):
        find_gpu(name)


def test_the_gpu_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the table lacks has its own memory, and the rates of an H100."""
    name = "NVIDIA A100-SXM4-40GB"
    about = SimpleNamespace(total_memory=22 * 2**30, major=8, minor=6)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**vars(about), name=name))
    assert find_gpu(None) is find_gpu("cuda") is find_gpu(torch.device("cuda:1")) is GPUS["a100-40gb"]
    name = "NVIDIA Q1"
    gpu = find_gpu(None)
    assert (gpu.name, gpu.memory_gib, gpu.capability, gpu.like) == ("NVIDIA Q1", 22, (8, 6), "h100")
    assert gpu.gemm(2) == GPUS["h100"].gemm(2)
    with pytest.raises(UnsupportedError, match="device: expected a CUDA GPU on this machine, got 'cuda:2'"):
        find_gpu("CUDA:2")
