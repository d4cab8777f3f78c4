"""The page of a report: one HTML file that opens anywhere, with every picture in it."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image

from peer.files import write_atomically
from peer.rundir import panmesh_version
from simulations.typeset import Sheet

CSS_DPI = 96.0
TYPES = {".png": "image/png", ".gif": "image/gif"}


@dataclass(frozen=True)
class Picture:
    """A picture file, and what one sees in it."""

    file: Path
    heading: str
    caption: str

    @property
    def name(self) -> str:
        """What links to the picture are made of."""
        return self.file.stem

    @property
    def width(self) -> int:
        """Its width on the page in CSS pixels: a drawing has more dots, for dense screens."""
        with Image.open(self.file) as image:
            dots = float(image.info.get("dpi", (CSS_DPI, CSS_DPI))[0])
            return round(image.width * CSS_DPI / dots)

    @property
    def uri(self) -> str:
        """The file itself, as a data URI."""
        content = base64.b64encode(self.file.read_bytes()).decode("ascii")
        return f"data:{TYPES[self.file.suffix]};base64,{content}"


@dataclass(frozen=True)
class Page:
    """What a report says: figures that matter most, a table, pictures, and the files of the run."""

    title: str
    lead: str
    notes: Sequence[str]
    facts: Sequence[tuple[str, str]]
    sheet: Sheet
    pictures: Sequence[Picture]
    files: Sequence[tuple[str, str]]
    collection: bool = False


def write_page(page: Page, path: Path) -> Path:
    """Write a page, and return its path; all text is escaped."""
    environment = Environment(
        loader=PackageLoader("simulations"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True,
    )  # fmt: skip
    template = environment.get_template("report.html.jinja")
    write_atomically(path, template.render(vars(page), version=panmesh_version()))
    return path
