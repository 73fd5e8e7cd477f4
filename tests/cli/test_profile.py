"""``lowtide profile`` from arguments to files, on a CPU and small."""

from __future__ import annotations

import importlib.util
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.train_ranks import run_command, shared
from lowtide.bench.way import Way
from lowtide.bench.ways import build_way
from lowtide.cli import main
from lowtide.errors import ArgumentValueError
from lowtide.measure.child import ChildResult
from lowtide.memory.planner.optimizers import OPTIMIZERS
from lowtide.profile import run as profiling
from lowtide.profile.config import ProfileConfig
from lowtide.profile.phases import BACKWARD, FORWARD, HEAD, HEAD_BACKWARD
from lowtide.profile.plot import draw_profile
from profiling.browser import find_browser, run_page
from profiling.test_page import BARE, WHOLE, profile, row

TINY = {
    "model_type": "llama", "vocab_size": 613, "hidden_size": 48, "intermediate_size": 112, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
PATTERN = "*-profile-cpu"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("model") / "config.json"
    file.write_text(json.dumps(TINY))
    return file


@pytest.fixture(scope="module")
def written(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two implementations."""
    folder = tmp_path_factory.mktemp("out")
    arguments = ["--impl", "stock,lowtide:2xall/1", "--policy", "stock=all", "--seq-len", 64, "--steps", 2]
    everything = ["profile", "--model", tiny.parent, *arguments, "--device", "cpu", "--output", folder]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lowtide.measure.child.run_command", run_command)
        assert main(list(map(str, everything))) == 0
    return folder


def result(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob(f"{PATTERN}.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_two_implementations_from_arguments_to_files(written: Path, tiny: Path) -> None:
    told = result(written)
    assert told["command"] == (
        f"lowtide profile --model {tiny.parent} --impl stock,lowtide:2xall/1 --seq-len 64 --policy stock=all --steps 2"
        " --device cpu"
    )
    assert {"commit", "date", "machine", "settings", "model"} <= set(told)
    assert told["machine"]["torch"]
    assert "liger-kernel" in told["machine"]
    stock, lowtide = told["implementations"]
    assert [one["name"] for one in (stock, lowtide)] == ["stock", "lowtide:2xall/1"]
    assert stock["losses"] == pytest.approx(lowtide["losses"], rel=1e-4)
    assert stock["losses"][0] > stock["losses"][-1]
    assert lowtide["peak"]["owners_gib"]["head"] < stock["peak"]["owners_gib"]["head"]
    assert lowtide["peak"]["gib"] < stock["peak"]["gib"]
    # 2 a multiplication; half of attention's scores; backward twice forward
    T, D, F, V = 64, 48, 112, 613
    products = 2 * T * (D * D * 2 + D * 24 * 2 + 3 * D * F) + 4 * T * T / 2 * D
    flop = 3 * (2 * products + 2 * T * D * V)
    assert sum(told["step_tflop"].values()) * 1e12 == pytest.approx(flop)
    assert stock["tflops"]["step"] == pytest.approx(flop / stock["seconds"] / 1e12)
    assert "mfu" not in stock
    stems = [f"{next(written.glob(f'{PATTERN}.json')).stem}{rest}" for rest in ("-stock", "-lowtide-2xall-1")]
    names = {file.name for file in written.iterdir()}
    assert names == {f"{stem}-trace.json.gz" for stem in stems} | {
        file.name for ending in ("json", "png", "html") for file in written.glob(f"{PATTERN}.{ending}")
    }
    assert [one["files"]["trace"] for one in (stock, lowtide)] == [f"{stem}-trace.json.gz" for stem in stems]


def test_what_is_written_to_the_terminal(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lowtide.profile.tables import ROWS, tables

    told = result(written)
    text = tables(told)
    for words in ("peak, MiB", "optimizer states", "head: logits, loss", "time, ms", "layers, forward", "tokens/s"):
        assert words in text
    widths = {len(each) for each in text.split("\n\n")[1].splitlines()}
    assert len(widths) == 1, "columns that end where they begin"
    assert "2xall/1" in ROWS.line(told["implementations"][1])
    failed = tables(profile(row("stock", "stock", 79.0, 900, failed="out of memory at 79.00 GiB"), BARE))
    assert "out of memory" in failed
    assert "time, ms" not in failed
    assert tables(profile(BARE)) == "\n"


@pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed that runs without a screen")
def test_the_page_of_a_real_run_works_in_a_browser(written: Path, tmp_path: Path) -> None:
    browser = find_browser()
    assert browser is not None
    (page,) = written.glob(f"{PATTERN}.html")
    script = "return [document.querySelectorAll('#timeline path').length, document.getElementById('data').textContent]"
    lines, data = run_page(browser, page, script, tmp_path)
    assert lines == 2
    assert json.loads(data) == result(written)


def test_earlier_runs_are_shown_beside_others(
    written: Path, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,) = written.glob(f"{PATTERN}.json")
    assert main(["profile", "--impl", "none", "--include", str(first), "--output", str(tmp_path / "again")]) == 0
    again = result(tmp_path / "again")
    assert {**again, "command": "", "included": ""} == {**result(written), "command": "", "included": ""}
    assert again["included"] == [result(written)["command"]]
    assert {file.suffix for file in (tmp_path / "again").iterdir()} == {".json", ".png", ".html"}
    good = row("lowtide", "lowtide", 1.0, 10)
    monkeypatch.setattr(profiling, "run_child", lambda *args, **kwargs: ended(good))
    old = {**result(written), "machine": {**result(written)["machine"], "torch": "2.0"}}
    (tmp_path / "old.json").write_text(json.dumps(old))
    both = ["--impl", "lowtide", "--include", str(tmp_path / "old.json"), "--device", "cpu", "--seq-len", "64"]
    assert main(["profile", "--model", str(tiny.parent), *both, "--output", str(tmp_path / "both")]) == 0
    names = [(one["name"], one.get("note")) for one in result(tmp_path / "both")["implementations"]]
    note = "measured on torch 2.0"
    assert names == [("stock", note), ("lowtide:2xall/1", note), ("lowtide", None)]
    capsys.readouterr()
    for arguments, says in (
        (["--impl", "stock", "--include", first], "include: expected each name once, got stock twice"),
        (["--impl", "lowtide", "--include", first], "include: expected a profile with model lowtide-small, as now"),
        (["--impl", "none", "--include", tmp_path / "none.json"], "include: expected a json file of lowtide profile"),
        (["--impl", "none", "--include", tiny], "include: expected a json file of lowtide profile"),
        (["--impl", "none"], "impl: expected names out of"),
    ):
        assert main(["profile", "--device", "cpu", "--output", str(tmp_path / "no"), *map(str, arguments)]) == 2
        assert f"lowtide profile: {says}" in capsys.readouterr().err


@pytest.mark.usefixtures("forked_children")
def test_parameters_on_the_host_and_adapters(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    files = [word for kind in ("json", "png", "html") for word in (f"--{kind}", str(tmp_path / f"a.{kind}"))]
    command = f"profile --model {tiny} --impl lowtide --seq-len 33 --steps 1 --lora 2 --offload-params --no-trace"
    assert main([*command.split(), "--device", "cpu", "--output", str(tmp_path), *files]) == 0
    told = json.loads((tmp_path / "a.json").read_text())
    (lowtide,) = told["implementations"]
    assert "failed" not in lowtide
    assert told["settings"]["sharding"] == "zero3"
    assert lowtide["trained_parameters"] < 0.2 * lowtide["parameters"]
    # on a CPU the shards and what is gathered of them lie in the same memory
    weights = lowtide["parameters"] * 4 / 2**30
    assert weights < lowtide["peak"]["owners_gib"]["weights"] <= 2 * weights
    assert {file.name for file in tmp_path.iterdir()} == {"a.json", "a.png", "a.html"}


@pytest.mark.usefixtures("forked_children")
def test_full_training_with_parameters_on_the_host(tiny: Path, tmp_path: Path) -> None:
    """The same steps, whoever computes the loss; on a CPU only peers' checkpoints can be offloaded."""
    command = f"profile --model {tiny} --impl stock:input-offload,checkpoint-8:input-offload,lowtide --seq-len 33"
    command += " --steps 1 --offload-params --no-trace --device cpu"
    assert main([*command.split(), "--output", str(tmp_path)]) == 0
    rows = result(tmp_path)["implementations"]
    assert not [row["failed"] for row in rows if "failed" in row]
    assert [row["trained_parameters"] for row in rows] == [row["parameters"] for row in rows]
    for other in rows[1:]:
        assert other["losses"] == pytest.approx(rows[0]["losses"], rel=1e-5)


RANK = """
import json, os
os.environ.update(json.loads(os.environ["EACH"])[int(os.environ["RANK"])])
from lowtide.measure.child import _call_here
_call_here()
"""


class Together:
    """As `run_command` of `train_ranks`, for ranks that are started one by one: they begin when all have come."""

    def __init__(self, ranks: int, script: Path) -> None:
        self.ranks, self.script = ranks, script
        self.given: dict[int, dict[str, str]] = {}
        self.all_here = threading.Barrier(ranks, self._run)
        script.write_text(RANK)

    def _run(self) -> None:
        each = [self.given[rank] for rank in range(self.ranks)]
        self.ended = shared()(self.ranks, script=self.script, EACH=json.dumps(each))

    def __call__(self, command: list[str], *, env: dict[str, str], capture: bool) -> ChildResult:
        rank = int(env["RANK"])
        self.given[rank] = {name: value for name, value in env.items() if not name.startswith("MASTER")}
        self.all_here.wait()
        return ended(status=self.ended.statuses[rank], stderr=self.ended.err[rank])


def test_two_ranks_of_which_the_first_is_shown(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.measure.child.run_command", Together(2, tmp_path / "rank.py"))
    command = f"profile --model {tiny} --impl lowtide --seq-len 33 --steps 1 --fsdp zero3 --gpus 2 --policy all"
    assert main([*command.split(), "--device", "cpu", "--output", str(tmp_path)]) == 0
    told = result(tmp_path)
    (lowtide,) = told["implementations"]
    assert "failed" not in lowtide
    # Half of the optimizer's states lie here; what is gathered of the weights comes and goes.
    states = [gib for gib in lowtide["timeline"]["owners"]["optimizer"] if gib]
    assert states == pytest.approx([lowtide["parameters"] * 4 / 2**30] * len(states), rel=0.02)
    weights = lowtide["timeline"]["owners"]["weights"]
    assert min(weights) == pytest.approx(lowtide["parameters"] * 4 / 2 / 2**30, rel=0.02)
    assert max(weights) > 1.5 * min(weights)
    assert lowtide["tokens_per_s"] == pytest.approx(66 / lowtide["seconds"])
    assert len(list(tmp_path.glob("*-trace.json.gz"))) == 1


def ended(value: Any = None, status: int = 0, stderr: str = "") -> ChildResult:
    return ChildResult(returncode=status, seconds=1, peak_bytes=0, value=value, stderr=stderr)


@pytest.mark.parametrize(
    ("child", "says", "status"),
    [
        (ended({"failed": "out of memory at 3.00 GiB, in the head"}), "out of memory at 3.00 GiB, in the head", 0),
        (ended({"failed": "ValueError: x"}), "ValueError: x", 1),
        (ended(None, -9), "ended by signal 9 (the system kills processes that take too much host memory)", 1),
        (ended(None, -6), "ended by signal 6", 1),
        (ended(None, 1, "Trace\nRuntimeError: no\n  and why\n"), "RuntimeError: no", 1),
        (ended(None, 1, "x\nlowtide.errors.UnsupportedError: out of memory at 3 GiB\n"), "out of memory at 3 GiB", 0),
        (ended(None, 3), "ended with status 3", 1),
    ],
)
def test_one_that_fails_is_a_row_and_the_others_run(
    child: ChildResult, says: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    good = row("stock", "stock", 1.0, 10)
    own = ("name", "impl", "policy", "mfu")
    answers = {"lowtide": child, "stock": ended({k: v for k, v in good.items() if k not in own})}
    monkeypatch.setattr(profiling, "run_child", lambda _, way, *args, **kwargs: answers[way["impl"]])
    if child.returncode != 0:  # one picture is enough, and takes longer than all else
        monkeypatch.setattr(profiling, "draw_profile", lambda at, told: at.touch())
    arguments = ["--impl", "lowtide", "stock", "--device", "cpu", "--output", str(tmp_path)]
    assert main(["profile", *arguments]) == status
    lowtide, stock = result(tmp_path)["implementations"]
    assert lowtide["failed"] == says
    assert stock["seconds"] == 0.01
    out = capsys.readouterr().out
    assert says in out
    assert next(tmp_path.glob(f"{PATTERN}.html")).exists()


def test_all_that_fail_leave_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "run_child", lambda *args, **kwargs: ended({"failed": "ValueError: x"}))
    assert main(["profile", "--impl", "stock", "--device", "cpu", "--output", str(tmp_path)]) == 0
    assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".html"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--impl nobody", "impl: expected names out of stock, compile, liger, lowtide, lowtide-compile, torch, "),
        ("--impl ,", "impl: expected names out of"),
        ("--impl stock,stock", "impl: expected each name once"),
        ("--impl stock --policy some", "policy: expected all, attention or input"),
        ("--impl stock --policy all-mlp1", "policy: expected for stock all, attention or input"),
        ("--impl stock --policy 1xall+1xinput", "policy: expected for stock"),
        ("--impl compile:attention", "policy: expected for compile all or input"),
        ("--impl stock --policy lowtide=all", "policy: expected NAME=POLICY with a name of --impl"),
        ("--model nothing", "model: expected a folder with a config.json"),
        ("--seq-len 1", "seq_len: expected at least 2 tokens"),
        ("--steps 0", "steps: expected a whole number of at least 1"),
        ("--warm 0", "warm: expected"),
        ("--gpus 2", "gpus: expected 1, or --fsdp"),
        ("--offload-params --fsdp zero2", "fsdp: expected none or zero3"),
        ("--offload-params --optimizer adamw-8bit", "optimizer: expected another with --offload-params"),
        ("--memory-limit 3GiB --device cpu", "memory_limit: expected a GPU"),
        ("--memory-limit 0 --device cpu", "memory_limit: expected a size above 0"),
        ("--memory-limit some --device cpu", "memory_limit: expected a size such as 40GiB"),
        ("--json /nowhere/at/all.json", "json: expected a file in a folder that exists"),
        ("--json .", "json: expected a file, got the folder .."),
        ("--seed -1", "seed: expected"),
    ],
)
def test_what_cannot_be_profiled_is_one_line(
    arguments: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", *arguments.split(), "--output", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"lowtide profile: {says}" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "module", "says"),
    [
        ("--impl stock,liger", "liger_kernel", "impl: expected the package liger-kernel to be installed"),
        ("--lora 4", "peft", "lora: expected the package peft"),
        ("--optimizer adamw-8bit", "bitsandbytes", "optimizer: expected the package bitsandbytes"),
        ("--png x.png", "matplotlib", "png: expected the package matplotlib"),
    ],
)
def test_a_package_that_is_missing_is_named(
    arguments: str, module: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find(name))
    assert main(["profile", *arguments.split(), "--output", str(tmp_path)]) == 2
    assert f"lowtide profile: {says}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_a_model_is_called(tmp_path: Path) -> None:
    folder = tmp_path / "Llama-3-8B"
    folder.mkdir()
    for name in ("config.json", "small.json"):
        (folder / name).touch()
    names = [
        profiling.title_name(str(each))
        for each in (folder, folder / "config.json", folder / "small.json", "llama-3-8b")
    ]
    assert names == ["Llama-3-8B", "Llama-3-8B", "small", "llama-3-8b"]


VISION = {"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
          "num_attention_heads": 2, "image_size": 8, "patch_size": 4}  # fmt: skip


@pytest.mark.parametrize(("kind", "text"), [("llava", "llama"), ("gemma3", "gemma3_text")])
def test_of_a_multimodal_model_the_language_model_inside(
    kind: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "seeing.json"
    inside = {**TINY, "model_type": text, "head_dim": 12}
    file.write_text(json.dumps({"model_type": kind, "text_config": inside, "vision_config": VISION}))
    monkeypatch.setattr(profiling, "run_child", lambda *args, **kwargs: ended({"failed": "ValueError: x"}))
    assert main(["profile", "--model", str(file), "--impl", "stock", "--device", "cpu", "--output", str(tmp_path)]) == 0
    told = result(tmp_path)
    assert told["model"]["name"] == f"seeing, the {text} inside"
    assert told["model"]["hidden_size"] == TINY["hidden_size"]
    model = build_way(
        Way(impl="lowtide"), str(file), torch.float32, torch.device("cpu"), seed=0, vocab_size=TINY["vocab_size"]
    )
    assert model.config.model_type == text
    assert not any("vision" in name for name, _ in model.named_modules())


@pytest.mark.parametrize("command", ["profile", "bench step"])
def test_what_is_no_causal_language_model_is_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "t5.json"
    file.write_text(json.dumps({"model_type": "t5", "d_model": 16}))
    output = tmp_path / "out"
    assert main([*command.split(), "--model", str(file), "--output", str(output)]) == 2
    assert ": model: expected a causal language model, got a t5." in capsys.readouterr().err
    assert not output.exists()


def test_policies_of_all_and_of_one() -> None:
    config = ProfileConfig(
        impl=("stock,compile", "lowtide", "lowtide:all,lowtide-compile:2xall"),
        policy=("input", "lowtide=2 x all/1, 1 x input/0"),
    )
    assert config.ways == {
        "stock": Way(impl="stock"),
        "compile": Way(impl="compile"),
        "lowtide": Way(impl="lowtide", policy="2 x all/1, 1 x input/0"),
        "lowtide:all": Way(impl="lowtide", policy="all"),
        "lowtide-compile:2xall": Way(impl="lowtide-compile", policy="2xall"),
    }
    assert "'lowtide=2 x all/1, 1 x input/0'" in config.command()


def test_a_policy_as_lowtide_plan_prints_it_behind_a_name() -> None:
    config = ProfileConfig(impl=("stock,lowtide:12 x input/1, 4 x all/0,compile",))
    assert config.ways["lowtide:12 x input/1, 4 x all/0"].policy == "12 x input/1, 4 x all/0"
    assert list(config.ways)[::2] == ["stock", "compile"]


@pytest.mark.parametrize("where", [{"policy": ("2xall@states=2.5",)}, {"impl": ("lowtide:all@states",)}])
def test_states_in_host_memory_are_not_profiled(where: dict[str, tuple[str, ...]]) -> None:
    with pytest.raises(ArgumentValueError, match="optimizer states"):
        ProfileConfig(**where)  # type: ignore[arg-type]


def test_every_optimizer_of_the_planner_can_be_profiled() -> None:
    for name in OPTIMIZERS:
        ProfileConfig(optimizer=name)  # type: ignore[arg-type]
    with pytest.raises(ArgumentValueError, match="optimizer"):
        ProfileConfig(optimizer="lion")  # type: ignore[arg-type]


def test_operations_behind_frozen_weights_and_of_models_nobody_can_count() -> None:
    full, _ = profiling.step_flop(TINY, 64, 2, lora=False)
    lora, why = profiling.step_flop(TINY, 64, 2, lora=True)
    attention = 2 * 2 * 4 * 64 * 64 / 2 * 48  # of all layers and sequences
    assert why is None
    assert lora[FORWARD] == full[FORWARD]
    assert lora[HEAD_BACKWARD] == full[HEAD] == full[HEAD_BACKWARD] / 2
    assert lora[BACKWARD] == full[FORWARD] + attention
    assert full[BACKWARD] == 2 * full[FORWARD]
    none, why = profiling.step_flop({**TINY, "model_type": "t5"}, 64, 2, lora=False)
    assert none == {}
    assert "'t5'" in str(why)


def test_operations_of_layers_without_formulas_are_counted() -> None:
    settings = {**TINY, "model_type": "olmo2", "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    found, why = profiling.step_flop(settings, 64, 2, lora=False)
    assert why is None
    assert found == profiling.step_flop(TINY, 64, 2, lora=False)[0]  # its norms are elsewhere than Llama's


def test_the_share_of_a_known_gpus_peak() -> None:
    told = {"seconds": 2.0, "time_by_kind_ms": {FORWARD: 500.0, HEAD: 100.0, HEAD_BACKWARD: 0.0, BACKWARD: 1000.0}}
    tflop = {FORWARD: 100.0, HEAD: 10.0, HEAD_BACKWARD: 20.0, BACKWARD: 200.0}
    profiling.add_rates(told, tflop, 989.0)
    assert told["tflops"] == {"forward": 200, "head": 300, "backward": 200, "step": 165}
    assert told["mfu"] == pytest.approx(165 / 989)


def test_peaks_and_phases_are_named_in_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Figure = pytest.importorskip("matplotlib.figure").Figure
    texts: list[str] = []
    save = Figure.savefig

    def look(figure: Any, *args: Any, **kwargs: Any) -> None:
        texts.extend(text.get_text() for axes in figure.axes for text in axes.texts)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", look)
    deep = row("stock", "stock", 3.0, 90, layers=40)
    draw_profile(tmp_path / "a.png", profile(deep, row("lowtide", "lowtide", 2.9, 80, failed="out of memory at 2.9")))
    for text in ("3 in backward of the head", "2.9 in backward of the head", "forward of layers 0 to 39"):
        assert texts.count(text) == 1
    assert "backward of layers 39 to 0" in texts
    assert {"0", "3"} <= set(texts), "of four layers each has its number"
    assert "39" not in texts


def test_pictures_of_much_and_of_little(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    many = profile(*(row(f"lowtide:{i}xall", "lowtide", 3.0 + i, 90, layers=80) for i in range(6)))
    for i, told in enumerate((WHOLE, many, profile(row("stock", "stock", 0.001, 0.2)))):
        draw_profile(tmp_path / f"{i}.png", told)
        assert (tmp_path / f"{i}.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_is_missing_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without matplotlib, which torch and transformers do not bring."""
    earlier = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-21-profile-cpu.json"
    monkeypatch.setattr("lowtide.profile.run.importlib.util.find_spec", lambda _: None)
    assert main(["profile", "--impl", "none", "--include", str(earlier), "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert ".html" in out
    assert "no plot: matplotlib is not installed. pip install 'lowtide[plot]'" in out
    assert not list(tmp_path.glob("*.png"))
