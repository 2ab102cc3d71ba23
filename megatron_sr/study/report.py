"""A report as sections of text, tables and pictures: one self-contained HTML file, and the pictures as PNG files beside it."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_sr.study.drawing import Files, Size, render, superscripts

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Picture:
    """name: of its PNG file; draw(size) -> Figure; caption: how to read it; alt: what it shows, for those who do not see it."""

    name: str
    draw: Callable[[Size], Figure]
    caption: str
    alt: str


@dataclass(frozen=True)
class Table:
    """Cells are text. text_columns: how many of the first columns hold words, the others hold numbers; stacked: all hold sentences,
    and on a telephone every row becomes a block of its own.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    stacked: bool = False
    text_columns: int = 1


@dataclass(frozen=True)
class Section:
    """lead: the question; findings: sentences made from the numbers; details: tables that few need; left_out: what did not run, why."""

    title: str
    lead: str = ""
    findings: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    details: Sequence[Table] = ()
    left_out: str | None = None

    @property
    def anchor(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


@dataclass(frozen=True)
class Report:
    """failure: why the run failed, or None; success: what is said then, or None if nothing was judged; keys: (number, what it is)
    worth a first look.
    """

    title: str
    subtitle: str
    failure: str | None
    success: str | None
    sections: Sequence[Section]
    keys: Sequence[tuple[str, str]] = ()
    footer: Sequence[str] = field(default_factory=tuple)


def write_report(directory: Path, report: Report) -> Path:
    """Write `report.html`, and every picture as `name.png`, into `directory`. Nothing in the file points outside it.

    Raises ValueError when two pictures share a name.
    """
    import jinja2

    pictures = [picture for section in report.sections for picture in section.pictures]
    names = [picture.name for picture in pictures]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two pictures are called {', '.join(twice)}")
    directory.mkdir(parents=True, exist_ok=True)
    images = {}
    for picture in pictures:
        files = render(picture.draw)
        (directory / f"{picture.name}.png").write_bytes(files.png)
        images[picture.name] = _inlined(files)
    template = resources.files("megatron_sr.study").joinpath("report.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: superscripts(value) if type(value) is str else value,
    )
    path = directory / "report.html"
    path.write_text(environment.from_string(template).render(report=report, images=images), encoding="utf-8")
    return path


def _inlined(files: Files) -> dict[str, str]:
    def data(svg: bytes) -> str:
        return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()

    return {"wide": data(files.wide), "narrow": data(files.narrow)}
