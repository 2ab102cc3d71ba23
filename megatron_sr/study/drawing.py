"""How pictures look: colours, sizes, and files that suit a wide screen, a telephone, light and dark.

A picture is drawn twice, `WIDE` and `NARROW`, as SVG whose colours follow the reader's colour scheme, and as a PNG on white.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Size:
    """Inches; legend columns; columns of small multiples."""

    width: float
    height: float
    legend_columns: int
    panels_in_a_row: int


WIDE = Size(7.0, 4.3, 3, 2)
NARROW = Size(4.0, 4.2, 1, 1)


def is_narrow(size: Size) -> bool:
    return size.legend_columns == 1


# light, dark
INK = ("#1f2328", "#e6edf3")
MUTED = ("#59636e", "#9aa4af")
GRID = ("#d9dee4", "#343b44")
RED = ("#c2403a", "#ff7b72")
BLUE = ("#1b6fb8", "#66b3ff")
AMBER = ("#a8700f", "#e3b341")
GREEN = ("#2a8050", "#56d48a")
PURPLE = ("#7a52a8", "#c297ff")
TEAL = ("#0d7f86", "#4fd0d4")
PINK = ("#b34583", "#f78fc3")
THEMED = (INK, MUTED, GRID, RED, BLUE, AMBER, GREEN, PURPLE, TEAL, PINK)

STYLE = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": INK[0],
    "axes.edgecolor": MUTED[0],
    "axes.labelcolor": INK[0],
    "axes.titlecolor": INK[0],
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID[0],
    "grid.linewidth": 0.8,
    "xtick.color": MUTED[0],
    "ytick.color": MUTED[0],
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 2.0,
    "svg.fonttype": "none",  # text stays text: small files, the reader's own font
    "svg.hashsalt": "megatron-sr",  # equal pictures, equal bytes
}

OTHERS = (GREEN[0], PURPLE[0], PINK[0], TEAL[0], AMBER[0], MUTED[0])


@dataclass(frozen=True)
class Look:
    """Colour and line of one arm. Arms differ in more than colour."""

    colour: str
    dashes: str
    marker: str


def looks(names: Sequence[str]) -> dict[str, Look]:
    """Name of an arm -> how it looks. The arms that many pictures have look the same in all of them."""
    known = {
        "bf16-nearest": Look(RED[0], "-", "s"),
        "nearest": Look(RED[0], "-", "s"),
        "bf16-stochastic": Look(BLUE[0], "-", "o"),
        "stochastic": Look(BLUE[0], "-", "o"),
        "once": Look(BLUE[0], "-", "o"),
        "fp16": Look(AMBER[0], ":", "v"),
        "fp16-settled": Look(AMBER[0], "--", "^"),
        "fp32": Look(INK[0], "-.", "D"),
    }
    others, lines, markers = [n for n in names if n not in known], ("--", "-", "-."), "P*hXdx"
    for i, name in enumerate(others):
        known[name] = Look(OTHERS[i % len(OTHERS)], lines[i % 3], markers[i % len(markers)])
    return {name: known[name] for name in names}


def axes(size: Size, title: str, xlabel: str, ylabel: str, height: float = 1.0) -> tuple[Figure, Axes]:
    """A figure with one pair of axes; `height` scales that of `size`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size.width, size.height * height), layout="constrained")
    heading(figure, size, title)
    ax = figure.add_subplot()
    ax.set(xlabel=xlabel, ylabel=ylabel)
    return figure, ax


def heading(figure: Figure, size: Size, title: str) -> None:
    """The title over the whole width, in as many lines as it needs."""
    text = wrapped(title, 42 if is_narrow(size) else 80)
    figure.suptitle(text, x=0.012, ha="left", fontsize=STYLE["axes.titlesize"], fontweight="bold")


def small_multiples(size: Size, count: int, height: float = 0.75) -> tuple[Figure, list[Axes]]:
    """A figure with `count` axes, as many in a row as `size` holds; each `height` of the size's."""
    from matplotlib.figure import Figure

    columns = min(size.panels_in_a_row, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(size.width, size.height * height * rows), layout="constrained")
    grid = [figure.add_subplot(rows, columns, i + 1) for i in range(count)]
    return figure, grid


def legend(figure: Figure, size: Size, ax: Axes, columns: int | None = None) -> None:
    """Below the axes, where it hides nothing."""
    handles, labels = ax.get_legend_handles_labels()
    labels = [wrapped(label, 60) for label in labels]
    longest = max(map(len, labels), default=0)
    most = columns or (size.legend_columns if longest < 24 or is_narrow(size) else 2)
    if is_narrow(size) and longest < 18:
        most = 2
    figure.legend(handles, labels, loc="outside lower center", ncols=min(most, len(labels)))


def band(ax: Axes, x, mean, sem, look: Look, label: str) -> None:
    """A line, and mean +- standard error around it."""
    ax.plot(x, mean, look.dashes, color=look.colour, label=label)
    if any(s for s in sem):
        low, high = [m - s for m, s in zip(mean, sem)], [m + s for m, s in zip(mean, sem)]
        ax.fill_between(x, low, high, color=look.colour, alpha=0.16, lw=0)


def wrapped(text: str, width: int) -> str:
    """`text` in lines of at most `width` characters."""
    return "\n".join(textwrap.wrap(superscripts(text), width))


def superscripts(text: str) -> str:
    """2^16 with superscript digits."""
    return re.sub(r"\b2\^(-?\d+)", lambda match: power_of_two(int(match[1])), text)


def rate(lr: float) -> str:
    """A learning rate: 1e-6."""
    return f"{lr:.0e}".replace("e-0", "e-")


def power_of_two(exponent: float) -> str:
    """2 to the `exponent`, with superscript digits."""
    return "2" + f"{exponent:g}".translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


@dataclass(frozen=True)
class Files:
    """A picture, rendered: PNG of the wide form on white; SVG of both."""

    png: bytes
    wide: bytes
    narrow: bytes


def render(draw: Callable[[Size], Figure]) -> Files:
    """Draw in both sizes."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        wide, narrow = draw(WIDE), draw(NARROW)
        png = io.BytesIO()
        wide.savefig(png, format="png", dpi=144, facecolor="white")
        wide.set_layout_engine("none")  # laid out; the second file need not do it again
        return Files(png.getvalue(), _svg(wide), _svg(narrow))


def _svg(figure: Figure) -> bytes:
    """SVG whose colours and font are the reader's."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(r"<\?xml.*?<svg", "<svg", text, flags=re.DOTALL)  # the external DTD
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for number, (light, _) in enumerate(THEMED):
        text = text.replace(light, f"var(--c{number})")
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, 'DejaVu Sans', sans-serif", text)
    light = "".join(f"--c{i}:{pair[0]};" for i, pair in enumerate(THEMED))
    dark = "".join(f"--c{i}:{pair[1]};" for i, pair in enumerate(THEMED))
    style = f"<style>:root{{{light}}}@media (prefers-color-scheme: dark){{:root{{{dark}}}}}</style>"
    return re.sub(r"(<svg[^>]*>)", lambda m: m[1] + style, text, count=1).encode()
