"""A page in a real browser without a screen: what its console said, and what a script found in it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chrome-headless-shell", "chromium", "chromium-browser", "google-chrome")

# Errors are caught before the page's own script runs; what the test's script returns is written into the page.
_BEFORE = """<script>
window.testErrors = [];
window.addEventListener("error", (e) => window.testErrors.push(String(e.message)));
const said = console.error;
console.error = (...words) => { window.testErrors.push(words.join(" ")); said(...words); };
</script>"""
_AFTER = """<script>
(() => {
  let found;
  try { found = (() => { %s })(); } catch (error) { window.testErrors.push(String(error.stack)); }
  const answer = document.createElement("pre");
  answer.id = "test-answer";
  answer.textContent = JSON.stringify({ found, errors: window.testErrors });
  document.body.append(answer);
})();
</script>"""


def find_browser() -> str | None:
    """Return the path of a browser that can run without a screen."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def run_page(
    browser: str, page: Path, script: str, folder: Path, *, width: int = 1240, picture: Path | None = None
) -> Any:
    """Open a copy of a page, run a script in it as a function's body, and return what that returns.

    Raises:
        AssertionError: the page, or the script, had an error, or the browser's console has one.
    """
    text = page.read_text(encoding="utf-8")
    assert "<head>" in text
    text = text.replace("<head>", f"<head>{_BEFORE}", 1)
    at = text.rindex("</body>")
    copy = folder / "page.html"
    copy.write_text(text[:at] + _AFTER % script + text[at:], encoding="utf-8")
    arguments = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
        "--enable-logging=stderr", "--virtual-time-budget=4000", f"--window-size={width},2200",
        f"--user-data-dir={folder / 'profile'}",
        "--host-resolver-rules=MAP * ~NOTFOUND",  # no network, whatever the page asks for
    ]  # fmt: skip
    if picture is not None:
        subprocess.run(
            [*arguments, f"--screenshot={picture}", copy.as_uri()], capture_output=True, check=True, timeout=120
        )
    ended = subprocess.run(
        [*arguments, "--dump-dom", copy.as_uri()], capture_output=True, text=True, check=True, timeout=120
    )
    said = [line for line in ended.stderr.splitlines() if "CONSOLE" in line]
    assert not said, said
    answer = re.search(r'<pre id="test-answer">(.*?)</pre>', ended.stdout, re.DOTALL)
    assert answer is not None, ended.stdout[-2000:]
    told = json.loads(html.unescape(answer[1]))
    assert told["errors"] == []
    return told["found"]
