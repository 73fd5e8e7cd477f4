"""The page: one file that needs nothing else, with the json in it, which draws without an error in a real browser."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lowtide.profile.owners import OWNERS
from lowtide.profile.page import write_page
from lowtide.profile.phases import KINDS
from profiling.browser import find_browser, run_page

BROWSER = find_browser()
in_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed that runs without a screen")
VOID = {"meta", "link", "input", "br", "hr", "img"}


def row(name: str, impl: str, peak: float, ms: float, layers: int = 4, **more: Any) -> dict[str, Any]:
    """One implementation's part of the json, made up."""
    parts, now = [], 0.0
    kinds = [("embedding", None), *(("forward", i) for i in range(layers)), ("head", None), ("head backward", None)]
    for i in reversed(range(layers)):
        kinds += [("recompute", i), ("backward", i)]
    kinds += [("embedding backward", None), ("optimizer", None)]
    for kind, layer in kinds:
        text = kind if layer is None else f"{kind} of layer {layer}"
        parts.append({"name": text, "kind": kind, "layer": layer, "begin_ms": now, "end_ms": now + ms / len(kinds)})
        now += ms / len(kinds)
    points = 50
    at = [now * i / points for i in range(points)]
    gib = [peak * (0.4 + 0.6 * (1 - abs(2 * i / points - 1))) for i in range(points)]
    shares = {owner: 1 / len(OWNERS) for owner in OWNERS}
    told = {
        "name": name, "impl": impl, "policy": "input", "segments": parts,
        "timeline": {"ms": at, "gib": gib, "owners": {o: [g * s for g in gib] for o, s in shares.items()}},
        "peak": {
            "gib": peak, "ms": at[points // 2], "phase": "backward of the head",
            "owners_gib": {o: peak * s for o, s in shares.items()},
            "activations_gib": {f"layer {i}": 0.1 for i in range(layers)},
            "largest": [{"gib": 1.5, "operation": "aten::<mm> & co", "phase": "head", "owner": "head"}],
        },
        "time_by_kind_ms": {k: sum(p["end_ms"] - p["begin_ms"] for p in parts if p["kind"] == k) for k in KINDS},
        "losses": [11.5, None], "files": {"trace": "a.json.gz"}, "host_peak_gib": 1.0,
        "seconds": ms / 1e3, "tokens_per_s": 1e6 / ms, "tflops": {"step": 300.0, "head": 500.0}, "mfu": 0.41,
        **more,
    }  # fmt: skip
    if "failed" in more:
        for key in ("seconds", "tokens_per_s", "tflops", "mfu"):
            del told[key]
    return told


def profile(*rows: dict[str, Any]) -> dict[str, Any]:
    machine = {"cpu": "A CPU", "gpu": "A GPU </script><b>", "torch": "2.13", "transformers": "5.23", "peft": None}
    settings = {
        "device": "cuda", "dtype": "bfloat16", "optimizer": "adamw", "lora": 16, "offload_params": True, "gpus": 1,
        "sharding": "zero3", "batch_size": 1, "seq_len": 32768,
    }  # fmt: skip
    return {
        "command": "lowtide profile --model '<x>'", "date": "2026-11-21", "commit": "abc", "machine": machine,
        "settings": settings, "model": {"name": "llama-3-8b"}, "peak_tflops": 989.0, "step_tflop": {},
        "flop_note": None, "implementations": list(rows),
    }  # fmt: skip


FAILED = row("stock", "stock", 79.0, 900, failed="out of memory at 79.00 GiB, in the backward of layer 3")
BARE = {"name": "compile", "impl": "compile", "policy": "all", "failed": "ended by signal 9"}
WHOLE = profile(
    FAILED, BARE, row("liger", "liger", 30.0, 1400), row("lowtide", "lowtide", 22.0, 1200),
    row("lowtide:2xall+2xattention-mlp1", "lowtide", 28.0, 1100),
)  # fmt: skip


def write(folder: Path, told: dict[str, Any]) -> tuple[Path, str]:
    text = json.dumps(told, indent=1) + "\n"
    write_page(folder / "p.html", text)
    return folder / "p.html", text


class Balanced(HTMLParser):
    """Fails on tags that do not match, and keeps what scripts hold and what attributes point to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.scripts: dict[str, str] = {}
        self.links: list[str] = []
        self._script: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.links += [value for name, value in attrs if name in ("src", "href", "srcset", "action") and value]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self._script = found.get("id") or f"script {len(self.scripts)}"
            self.scripts[self._script] = ""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self._script = None

    def handle_data(self, data: str) -> None:
        if self._script is not None:
            self.scripts[self._script] += data


def test_the_page_is_whole_and_needs_nothing_else(tmp_path: Path) -> None:
    page, text = write(tmp_path, WHOLE)
    source = page.read_text()
    parser = Balanced()
    parser.feed(source)
    parser.close()
    assert parser.open == []
    assert parser.links == ["data:,"]
    assert set(re.findall(r"(?:https?:)?//[\w.]+\.\w+[\w/]*", source)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(|/\*[A-Z]+\*/", source)
    assert json.loads(parser.scripts["data"]) == json.loads(text)
    names = json.loads(parser.scripts["names"])
    assert [one["id"] for one in names["owners"]] == list(OWNERS)
    assert [one["id"] for one in names["kinds"]] == list(KINDS)
    assert names["tables"]["peak"]["lines"][0] == ["weights", ["9.88", "3.75", "2.75", "3.50"], "#5b6770", False]
    assert names["tables"]["time"]["lines"][-1][1] == ["11.5000, not finite"] * 3
    assert len(names["colors"]) == 5
    assert len(set(names["colors"])) == 5


def test_data_that_looks_like_the_pages_own_marks_stays_data(tmp_path: Path) -> None:
    told = profile(row("lowtide", "lowtide", 2.0, 12))
    told["command"] = "/*SCRIPT*/ \\1 </script> /*DATA*/"
    page, _ = write(tmp_path, told)
    parser = Balanced()
    parser.feed(page.read_text())
    assert json.loads(parser.scripts["data"])["command"] == told["command"]


def test_every_owner_and_kind_has_a_name_and_a_colour_of_its_own() -> None:
    for labels in (OWNERS, KINDS):
        assert len({label.text for label in labels.values()}) == len(labels)
        assert len({label.color for label in labels.values()}) == len(labels)


SCRIPT = """
const all = (selector) => [...document.querySelectorAll(selector)];
const text = (selector) => all(selector).map((e) => e.textContent);
const tip = document.getElementById("tip");
const over = (element, part) => {
  const box = element.getBoundingClientRect();
  const at = { clientX: box.left + part * box.width, clientY: box.top + 20, bubbles: true };
  element.dispatchEvent(new MouseEvent("mousemove", at));
  return tip.hidden ? null : tip.innerText;
};
const cover = () => all("#timeline rect").at(-1);
const found = { ready: document.body.dataset.ready, title: document.title, cards: text(".card") };
found.lines = all("#timeline path").length;
found.hover = over(cover(), 0.5);
found.end = over(cover(), 0.999);
cover().dispatchEvent(new MouseEvent("mouseleave"));
found.hidden = tip.hidden;
const box = document.querySelector("#controls input");
box.click();
found.fewer = all("#timeline path").length;
box.click();
document.getElementById("share").click();
found.shared = text("#timeline text").filter((t) => t.includes("%"));
found.share_hover = over(cover(), 0.999);
const view = document.getElementById("view");
view.selectedIndex = view.options.length - 1;
view.dispatchEvent(new Event("change"));
found.owners = all("#timeline path").map((e) => e.getAttribute("fill"));
found.owner_hover = over(cover(), 0.5);
view.selectedIndex = 0;
view.dispatchEvent(new Event("change"));
document.getElementById("share").click();
cover().dispatchEvent(new MouseEvent("mouseleave"));
found.bar_hover = over(all("#peaks svg rect")[1], 0.5);
all("#peaks svg rect")[1].dispatchEvent(new MouseEvent("mouseleave"));
found.tables = ["peak-table", "time-table", "about", "layer-table"].map((id) => all(`#${id} tr`).length);
found.peak_row = text("#peak-table tr:nth-child(2) td");
found.largest = text("#largest td");
found.injected = all("b").filter((e) => e.closest("pre, #where")).length;
found.nan = document.body.innerText.match(/NaN|undefined|Infinity/g);
found.paths = all("svg path").filter((e) => /NaN|undefined/.test(e.getAttribute("d"))).length;
const inside = document.querySelector("main").getBoundingClientRect();
found.outside = all("svg text").filter((e) => {
  const b = e.getBoundingClientRect();
  return b.left < inside.left - 1 || b.right > inside.right + 1;
}).map((e) => e.textContent);
const texts = all("#timeline svg text:not(.small), #peaks svg text, #times svg text");
found.overlaps = [];
texts.forEach((a, i) => texts.slice(i + 1).forEach((b) => {
  if (a.closest("svg") !== b.closest("svg")) return;
  const [p, q] = [a.getBoundingClientRect(), b.getBoundingClientRect()];
  if (p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 2 && q.top < p.bottom - 2)
    found.overlaps.push([a.textContent, b.textContent]);
}));
return found;
"""


@in_browser
@pytest.mark.parametrize("width", [1240, 700, 400])
def test_the_page_works_in_a_browser(width: int, tmp_path: Path) -> None:
    assert BROWSER is not None
    page, _ = write(tmp_path, WHOLE)
    found = run_page(BROWSER, page, SCRIPT, tmp_path, width=width)
    assert found["ready"] == "true"
    assert found["title"].startswith("lowtide profile: llama-3-8b, 1 x 32768 tokens")
    assert len(found["cards"]) == 5
    assert "out of memory at 79.00 GiB, in the backward of layer 3" in found["cards"][0]
    assert found["lines"] == 4  # compile has none
    assert found["fewer"] == 3
    assert "lowtide, input" in found["hover"]
    assert "GiB" in found["hover"]
    assert re.search(r"(forward|backward|recompute) of layer \d|head", found["hover"])
    assert "its step has ended" in found["end"]
    assert found["hidden"] is True
    assert found["shared"] == ["share of the step, %"]
    assert "its step has ended" not in found["share_hover"]
    assert found["owners"] == [OWNERS[owner].color for owner in OWNERS]
    assert "optimizer states" in found["owner_hover"]
    assert found["bar_hover"]
    assert found["tables"][0] == 1 + len(OWNERS) + 4  # sum, share, phase, out of memory
    assert found["tables"][3] == 1 + 4
    assert found["peak_row"] == [" weights", "9.88", "3.75", "2.75", "3.50"]
    assert "aten::<mm> & co" in found["largest"]
    assert (found["injected"], found["nan"], found["paths"]) == (0, None, 0)
    assert found["outside"] == []
    assert found["overlaps"] == []


@in_browser
def test_layers_too_many_for_their_numbers_are_named_together(tmp_path: Path) -> None:
    assert BROWSER is not None
    page, _ = write(tmp_path, profile(row("stock", "stock", 9.0, 1200, layers=40), row("few", "lowtide", 9.0, 1200)))
    script = 'return [...document.querySelectorAll("#timeline svg text.small")].map((text) => text.textContent);'
    found = run_page(BROWSER, page, script, tmp_path)
    assert found[:2] == ["forward of layers 0 to 39", "backward of layers 39 to 0"]
    assert set(found[2:]) == {"0", "1", "2", "3"}


@in_browser
@pytest.mark.parametrize(
    "rows", [[], [BARE], [row("lowtide", "lowtide", 0.001, 0.3, layers=80)]], ids=["none", "failed", "small"]
)
def test_little_to_draw_is_no_error(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    assert BROWSER is not None
    page, _ = write(tmp_path, profile(*rows))
    found = run_page(BROWSER, page, "return document.body.innerText.match(/NaN|undefined|Infinity/g)", tmp_path)
    assert found is None
