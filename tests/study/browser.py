"""A headless Chromium, driven from the command line: a screenshot, and what a page's script has to say."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Where nothing may stick out: everything but the insides of scroll containers and pictures.
PROBE = """<script>addEventListener("load", async () => {
  document.querySelectorAll("details").forEach(details => { details.open = true });
  await Promise.all([...document.images].map(image => image.decode().catch(() => 0)));
  const wide = document.documentElement.clientWidth, out = [];
  for (const e of document.body.querySelectorAll("*")) {
    if (e.parentElement.closest(".scroll")) continue;
    const box = e.getBoundingClientRect(), name = e.tagName + "." + e.className;
    if (box.width && (box.right > wide + 0.5 || box.left < -0.5)) out.push(name + " ends at " + box.right);
    if (!e.matches(".scroll") && e.clientWidth && e.scrollWidth > e.clientWidth + 1) out.push("content of " + name);
  }
  const images = [...document.images], loaded = performance.getEntriesByType("resource").map(entry => entry.name);
  console.log("PROBE" + JSON.stringify({
    width: innerWidth,
    page: document.documentElement.scrollWidth,
    out: out,
    images: images.length,
    broken: images.filter(image => !image.naturalWidth || !image.alt).length,
    external: loaded.filter(name => !name.startsWith("data:")),
    scrolling: [...document.querySelectorAll(".scroll")].filter(e => e.scrollWidth > e.clientWidth).length,
  }) + "EORP");
})</script>"""


def find() -> str:
    """The browser's path; skips the test, with the reason, if there is none."""
    for name in (os.environ.get("MEGATRON_SR_BROWSER"), *NAMES):
        if name and shutil.which(name):
            return shutil.which(name)
    pytest.skip(
        f"no browser: none of {', '.join(NAMES)} is on the PATH (apt install chromium), MEGATRON_SR_BROWSER is not set"
    )


def look(page: Path, width: int, height: int, screenshot: Path) -> dict:
    """Open `page` with a probe in it, `width` CSS pixels wide; takes the screenshot and returns what PROBE found."""
    probed = page.with_name(f"probed-{width}.html")
    probed.write_text(page.read_text(encoding="utf-8").replace("</body>", PROBE + "</body>"), encoding="utf-8")
    command = [
        find(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--window-size={width},{height}",
    ]
    command += ["--enable-logging=stderr", "--virtual-time-budget=5000", f"--user-data-dir={page.parent / 'profile'}"]
    done = subprocess.run(
        [*command, f"--screenshot={screenshot}", probed.as_uri()],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    start, end = done.stderr.find("PROBE{"), done.stderr.find("}EORP")
    assert 0 <= start < end, done.stderr[-2000:]
    return json.loads(done.stderr[start + 5 : end + 1].replace('\\"', '"'))
