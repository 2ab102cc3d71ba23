"""A self-contained HTML report (pictures inlined) and the same pictures as PNG files."""

from __future__ import annotations

import base64
import io
from importlib import resources
from pathlib import Path


def write_report(directory: Path, pictures: dict[str, tuple[object, str]], context: dict) -> Path:
    """Render `report.html` into `directory`, with each of `pictures` (name -> (Figure, caption)) also as `name.png`.

    `context` is what the template report.html of this folder shows.
    """
    import jinja2

    images = []
    for name, (figure, caption) in pictures.items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=130)
        (directory / f"{name}.png").write_bytes(buffer.getvalue())
        images.append({"data": base64.b64encode(buffer.getvalue()).decode(), "caption": caption})
    template = resources.files("megatron_sr.study").joinpath("report.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    path = directory / "report.html"
    path.write_text(environment.from_string(template).render(images=images, **context), encoding="utf-8")
    return path
