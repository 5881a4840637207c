"""The templates of reports and pictures; all text passes through their escaping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

FOLDER = Path(__file__).parent
_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(FOLDER),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
)


def render(template: str, **values: Any) -> str:
    return _ENVIRONMENT.get_template(template).render(**values)
