"""A `report.Report` as Markdown: what docs/reproduction.md is made of."""

from __future__ import annotations

from collections.abc import Collection

from megatron_sr.study.drawing import superscripts
from megatron_sr.study.report import Report, Section, Table


def to_markdown(report: Report, notice: str, pictures: Collection[str] = (), folder: str = "images") -> str:
    """The report's text and tables; of its pictures those in `pictures`, as `folder`/NAME.png. `notice`: a line below the title."""
    lines = [f"# {report.title}", notice, report.subtitle]
    if report.failure or report.success:
        lines.append(f"**{report.failure or report.success}**")
    if report.keys:
        lines.append("\n".join(f"- **{number}** {meaning}" for number, meaning in report.keys))
    for section in report.sections:
        lines += _section(section, pictures, folder)
    return superscripts("\n\n".join(lines) + "\n")


def _section(section: Section, pictures: Collection[str], folder: str) -> list[str]:
    lines = [f"## {section.title}"]
    if section.lead:
        lines.append(section.lead)
    if section.left_out:
        lines.append(f"*Left out: {section.left_out}.*")
    if section.findings:
        lines.append("\n".join(f"- {finding}" for finding in section.findings))
    for picture in section.pictures:
        if picture.name in pictures:
            lines.append(f"![{_one_line(picture.alt)}]({folder}/{picture.name}.png)")
            lines.append(f"*{picture.caption}*")
    for table in (*section.tables, *section.details):
        lines += _table(table)
    return lines


def _table(table: Table) -> list[str]:
    words = len(table.header) if table.stacked else table.text_columns
    align = "|---" * words + "|---:" * (len(table.header) - words)
    rows = [_row(table.header), align + "|", *map(_row, table.rows)]
    return [*([table.caption] if table.caption else []), "\n".join(rows)]


def _row(cells) -> str:
    return "| " + " | ".join(_one_line(cell) for cell in cells) + " |"


def _one_line(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("[", "\\[").replace("]", "\\]").split())
