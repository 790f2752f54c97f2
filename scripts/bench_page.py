"""The page at `/` in a real browser: how soon it paints, and how it keeps up with denoise frames.

    python scripts/bench_page.py
    python scripts/bench_page.py -- --model-path jdllm-nano-canvas --dllm-algorithm LLaDA

Starts a server (its flags come after `--`; the bundled model by default) and a new headless browser
for each repetition, as the tests of the page do: a Chromium or Chrome of the system, driven by
playwright (`pip install '.[browser]'`). "Cold" is the first page of a browser, "warm" the same
address in another tab. Then a question is asked at a high temperature, so that no end token comes
soon and the answer takes many steps. Prints medians.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence

import started_server
from playwright import sync_api

from jdllm.bench import tables

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUIET = ("--disable-gpu", "--no-first-run", "--disable-background-networking")
WAIT_MS = 300_000
QUESTION = "Tom has 7 apples. He buys 5 more apples. How many apples does he have now?"

LOADED = """() => {
  const files = [...performance.getEntriesByType("navigation"),
                 ...performance.getEntriesByType("resource")];
  const paints = performance.getEntriesByType("paint").map((one) => [one.name, one.startTime]);
  return {
    ...Object.fromEntries(paints),
    requests: files.length,
    kilobytes: files.reduce((sum, one) => sum + one.transferSize, 0) / 1000,
  };
}"""
HAS_PAINTED = "() => performance.getEntriesByName('first-contentful-paint').length > 0"
# Frames that arrived are counted by the scrubber, pictures by the cells that are replaced.
RECORD = """() => {
  const seen = (window.seen = { arrivals: [], pictures: [], ticks: [] });
  const tick = () => { seen.ticks.push(performance.now()); requestAnimationFrame(tick); };
  requestAnimationFrame(tick);
  new MutationObserver((changes) => {
    for (const { target, attributeName } of changes) {
      if (attributeName === "max" && Number(target.max) + 1 > seen.arrivals.length) {
        while (seen.arrivals.length <= Number(target.max)) seen.arrivals.push(performance.now());
      }
    }
    if (changes.some((one) => one.type === "childList" && one.target.matches(".canvas"))) {
      seen.pictures.push(performance.now());
    }
  }).observe(document.getElementById("turns"),
             { subtree: true, childList: true, attributeFilter: ["max"] });
}"""
# The page shows the last frame a moment after it came.
IS_SHOWN = """() => {
  const bar = document.querySelector(".lane .replay input");
  return bar && Number(bar.max) > 0 && bar.value === bar.max;
}"""


def main() -> None:
    """Parses the command line, measures, prints two tables of medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--start-limit-s", type=float, default=900.0)
    parser.add_argument("--log-file", default="bench-page-server.log", help="of the server")
    parser.add_argument("flags", nargs="*", help="flags of jdllm.serve, after --")
    args = parser.parse_args()
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        parser.error(f"none of {', '.join(BROWSERS)} is installed")
    flags = ["--max-running-requests", "1", "--log-level", "warning", *args.flags]
    found: dict[str, list[dict[str, float]]] = {"cold": [], "warm": [], "answer": []}
    with (
        started_server.started(flags, log_file=args.log_file, limit_s=args.start_limit_s) as server,
        sync_api.sync_playwright() as playwright,
    ):
        for _ in range(args.repeats):
            sandbox = ("--no-sandbox",) if os.geteuid() == 0 else ()  # refused to root
            browser = playwright.chromium.launch(executable_path=path, args=[*QUIET, *sandbox])
            about = f"{server.model}, {os.path.basename(path)} {browser.version}"
            context = browser.new_context()
            context.set_default_timeout(WAIT_MS)
            for name in ("cold", "warm"):
                page = context.new_page()
                found[name].append(opened(page, server.client.base_url))
            found["answer"].append(answered(page, args.max_tokens))
            browser.close()
    tables.say(f"# {' '.join(sys.argv)}\n# {about}; medians of {args.repeats}")
    show({name: found[name] for name in ("cold", "warm")})
    show({"answer": found["answer"]})


def opened(page: sync_api.Page, url: str) -> dict[str, float]:
    """Opens the page; returns its paints in ms, its requests and the kilobytes of their answers."""
    page.goto(url)
    page.wait_for_selector("#chat:not([hidden])")
    page.wait_for_function(HAS_PAINTED)
    return page.evaluate(LOADED)


def answered(page: sync_api.Page, max_tokens: int) -> dict[str, float]:
    """Asks a question on a page that is open; returns what came and what was drawn meanwhile."""
    page.get_by_label("Most tokens").first.fill(str(max_tokens))
    page.get_by_label("Temperature").first.fill("100")
    page.get_by_label("Seed").first.fill("1")
    page.fill("#question", QUESTION)
    page.evaluate(RECORD)
    page.press("#question", "Enter")
    page.wait_for_selector("#send:not([hidden])")
    page.wait_for_function(IS_SHOWN)
    seen: Mapping[str, Sequence[float]] = page.evaluate("() => window.seen")
    begin, came, end = seen["arrivals"][0], seen["arrivals"][-1], seen["pictures"][-1]
    ticks = [at for at in seen["ticks"] if begin <= at <= end]
    gaps = [after - before for before, after in zip(ticks, ticks[1:], strict=False)]
    return {
        "frames that arrived": len(seen["arrivals"]),
        "frames that arrived, per s": 1e3 * (len(seen["arrivals"]) - 1) / (came - begin),
        "pictures of the answer drawn": len(seen["pictures"]),
        "pictures of the answer drawn, per s": 1e3 * len(seen["pictures"]) / (end - begin),
        "animation frames, per s": 1e3 * len(ticks) / (end - begin),
        "longest gap between animation frames, ms": max(gaps),
        "the last picture after the last frame, ms": end - came,
        "seconds": (end - begin) / 1e3,
    }


def show(columns: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    """Prints a row for each figure: its median in each column."""
    tables.say(f"| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for name in next(iter(columns.values()))[0]:
        medians = [statistics.median(one[name] for one in rows) for rows in columns.values()]
        tables.say(f"| {name} | {' | '.join(f'{value:.1f}' for value in medians)} |")


if __name__ == "__main__":
    main()
