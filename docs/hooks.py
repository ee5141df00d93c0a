"""mkdocs hooks: formulas as MathML, which browsers draw without scripts, and pictures from where the studies draw them."""

from __future__ import annotations

import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DRAWN = ("eval/results", "examples")
"""Folders outside of docs/ whose pictures pages show, under the paths that also work where the repository is read."""


def _math(source: str, language: str, css_class: str, options: dict, md: object, **others: object) -> str:
    return f'<div class="math">{convert(source, display="block")}</div>'


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {}).setdefault("custom_fences", [])
    fences.append({"name": "math", "class": "math", "format": _math})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for folder in DRAWN:
        for path in sorted((Path(config.config_file_path).parent / folder).glob("*.png")):
            files.append(File.generated(config, f"pictures/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to such pictures lead into the site."""
    root = "../" * page.file.src_uri.count("/")
    return re.sub(rf"\]\((?:\.\./)+(?:{'|'.join(DRAWN)})/([\w-]+\.png)\)", rf"]({root}pictures/\1)", markdown)
