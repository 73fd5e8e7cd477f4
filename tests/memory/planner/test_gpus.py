"""GPUs by name, by the driver's name, and remembered measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lowtide.errors import ArgumentValueError, UnsupportedError
from lowtide.memory.planner import at_hand as module
from lowtide.memory.planner.at_hand import MEASURED, find_gpu, measured_gpu
from lowtide.memory.planner.gpus import GPUS, Gpu, known_as

DRIVER = {
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 NVL": "h100-nvl",  # has 94 GB
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA A100 80GB PCIe": "a100-80gb",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA L40S": "l40s",
    "NVIDIA L4": "l4",
    "NVIDIA A10": "a10",
    "NVIDIA A10G": None,
    "NVIDIA RTX A6000": "a6000",
    "NVIDIA GeForce RTX 5090": "rtx5090",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA GeForce RTX 3090": "rtx3090",
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,  # has two thirds of the memory
    "Tesla T4": None,
    "NVIDIA H100 80GB HBM3 MIG 3g.40gb": None,  # has half of the memory
}
PEOPLE = {
    "H100": "h100", "h-100": "h100", "a100": "a100-80gb", "NVIDIA A100": "a100-80gb", "A100_40GB": "a100-40gb",
    "4090": "rtx4090", "RTX 4090": "rtx4090", "GeForce RTX 3090": "rtx3090", "RTX-5090": "rtx5090", "L40s": "l40s",
    "NVIDIA H100 PCIe": "h100-pcie", "NVIDIA A100-SXM4-40GB": "a100-40gb",
}  # fmt: skip


@pytest.mark.parametrize("name", DRIVER)
def test_drivers_names_are_known(name: str) -> None:
    assert known_as(name) == DRIVER[name]


@pytest.mark.parametrize("name", PEOPLE)
def test_gpus_are_found_as_people_write_them(name: str) -> None:
    assert find_gpu(name) is GPUS[PEOPLE[name]]


def test_every_gpu_of_the_table_has_a_driver_s_name() -> None:
    assert set(GPUS) == {name for name in DRIVER.values() if name}


@pytest.mark.parametrize("name", GPUS)
def test_rates_are_below_the_data_sheets(name: str) -> None:
    gpu = GPUS[name]
    assert gpu.gemm32 < gpu.gemm
    assert gpu.attention_backward < gpu.attention < gpu.gemm * 1.01
    assert gpu.pcie < gpu.bandwidth / 4
    assert not gpu.measured


def test_rates_of_an_h100() -> None:
    """Products at 670 to 790 TFLOP/s, copies at 2.5 TB/s, PCIe at 55 GB/s: benchmarks/results, 2026-11-21-plan-h100."""
    gpu = GPUS["h100"]
    assert 650e12 < gpu.gemm < 800e12
    assert gpu.bandwidth == pytest.approx(2.52e12, rel=0.01)
    assert gpu.pcie == pytest.approx(55e9, rel=0.01)


def test_a_gpu_of_one_s_own_is_taken() -> None:
    mine = replace(GPUS["h100"], name="mine", memory_gib=12.5)
    assert find_gpu(mine) is mine
    assert mine.memory_bytes == 12.5 * 2**30


def test_an_unknown_one_is_refused() -> None:
    for name in ("h300", "", " ", "cuda:x", "cuda:", "cpu", "meta", "rtx", "nvidia", "100", "H100 MIG 1g.10gb"):
        with pytest.raises(ArgumentValueError, match=r"^device: expected 'cuda' .* h100, "):
            find_gpu(name)


@pytest.fixture
def at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A GPU that is not there, measured by a stand-in; the list grows by each measurement."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA Q1")
    measured: list[str] = []

    def measure(device: torch.device) -> Gpu:
        measured.append(str(device))
        return replace(GPUS["l4"], name="NVIDIA Q1", measured=True)

    monkeypatch.setattr(module, "_measure", measure)
    return measured


def test_a_gpu_that_is_not_there_is_refused(at_hand: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_gpu("cuda:1").measured
    with pytest.raises(UnsupportedError, match="device: expected one of the 2 GPUs here, got 'cuda:2'"):
        find_gpu("CUDA:2")
    assert at_hand == ["cuda:1"]


def test_a_measurement_is_cached(at_hand: list[str]) -> None:
    first = measured_gpu(torch.device("cuda"))
    assert find_gpu("cuda") == find_gpu(torch.device("cuda")) == find_gpu(None) == first
    assert first.measured
    assert at_hand == ["cuda"]
    told = json.loads(MEASURED.file.read_text())
    assert list(told) == [f"NVIDIA Q1, torch {torch.__version__}"]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"NVIDIA Q1": 3}', '{"a": {"name": "old"}}'])
def test_a_file_that_cannot_be_read_is_measured_again(at_hand: list[str], text: str) -> None:
    MEASURED.file.parent.mkdir(parents=True)
    MEASURED.file.write_text(text)
    assert measured_gpu(torch.device("cuda")).name == "NVIDIA Q1"
    assert measured_gpu(torch.device("cuda")).measured
    assert len(at_hand) == 1


def test_one_that_is_known_is_not_measured(at_hand: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA A100-SXM4-40GB")
    assert find_gpu(None) is GPUS["a100-40gb"]
    assert at_hand == []
