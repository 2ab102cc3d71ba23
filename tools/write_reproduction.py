"""Write docs/reproduction.md and its pictures from docs/reproduction.json, the committed result of `megatron-sr reproduce`.

    python tools/write_reproduction.py                    # anew, from the committed JSON
    python tools/write_reproduction.py --from RUN         # take RUN/results.json as the new docs/reproduction.json first
    python tools/write_reproduction.py --check            # exit code 1 if the document is not what the JSON says

The document is never edited by hand: a test runs the check.
"""

from __future__ import annotations

import argparse
import difflib
import shutil
import sys
from pathlib import Path

from megatron_sr.study import results as results_file
from megatron_sr.study.drawing import render
from megatron_sr.study.markdown import to_markdown
from megatron_sr.study.reproduction_report import build

DOCS = Path(__file__).resolve().parents[1] / "docs"
PICTURES = (
    "sticking",
    "magnitudes",
    "convergence-reward",
    "mantissa-1e-6-bits",
    "learning-rate",
    "drift",
    "staleness",
    "headline-reward",
)
FOLDER = "images/reproduction"
NOTICE = (
    "*Made by `python tools/write_reproduction.py` from [reproduction.json](reproduction.json), the result of `megatron-sr reproduce`: "
    "every number below is measured, none is typed. `megatron-sr reproduce --quick` makes the like on your machine.*"
)


def document(docs: Path) -> str:
    """The text that `docs`/reproduction.json leads to. Raises FileNotFoundError or ValueError as `results.load`."""
    return to_markdown(build(results_file.load(docs / "reproduction.json"), {}), NOTICE, PICTURES, FOLDER)


def difference(docs: Path) -> str | None:
    """How `docs`/reproduction.md differs from what the JSON says, as a diff; None if it does not."""
    path = docs / "reproduction.md"
    found = path.read_text(encoding="utf-8") if path.exists() else ""
    diff = difflib.unified_diff(
        found.splitlines(),
        document(docs).splitlines(),
        "docs/reproduction.md",
        "docs/reproduction.json says",
        "",
        "",
        1,
        "",
    )
    return "\n".join(diff) or None


def main(argv: list[str] | None = None, docs: Path = DOCS) -> int:
    """Returns 0; 1 if --check finds a difference; 2 for bad input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument(
        "--from", dest="run", type=Path, help="folder of a run whose results.json becomes docs/reproduction.json"
    )
    args = parser.parse_args(argv)
    try:
        if args.run:
            results_file.load(args.run / "results.json")
            shutil.copyfile(args.run / "results.json", docs / "reproduction.json")
        if args.check:
            found = difference(docs)
            if found:
                print(
                    f"{found}\n\ndocs/reproduction.md is not what docs/reproduction.json says: run tools/write_reproduction.py"
                )
            return int(found is not None)
        (docs / "reproduction.md").write_text(document(docs), encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"write_reproduction: error: {error}", file=sys.stderr)
        return 2
    write_pictures(docs)
    return 0


def write_pictures(docs: Path) -> None:
    """PNG files of PICTURES, as far as the results have them."""
    folder = docs / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for section in build(results_file.load(docs / "reproduction.json"), {}).sections:
        for picture in section.pictures:
            if picture.name in PICTURES:
                (folder / f"{picture.name}.png").write_bytes(render(picture.draw).png)


if __name__ == "__main__":
    sys.exit(main())
