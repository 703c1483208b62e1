"""The tables of the configuration page, written from the schema."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from wan_trainer.config.fields import KeyInfo
from wan_trainer.config.schema import SECTIONS, keys, section_fields

BEGIN = "<!-- keys: written by wan_trainer.config.document -->"
END = "<!-- end of keys -->"


def default_text(info: KeyInfo) -> str:
    """A key's default as YAML."""
    if info.required:
        return "required"
    if isinstance(info.default, str):
        return info.default or "''"
    return json.dumps(info.default)


def key_tables() -> str:
    """One Markdown table a section: key, type, default, meaning."""
    blocks: list[str] = [BEGIN]
    for section in SECTIONS:
        rows = [f"### {section.title}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        for name in section_fields(section):
            info = keys()[name]
            default = default_text(info)
            shown = default if info.required else f"`{default}`"
            rows.append(f"| `{name}` | {info.type_name} | {shown} | {info.meaning} |")
        blocks.append("\n".join(rows))
    blocks.append(END)
    return "\n\n".join(blocks)


def with_current_tables(page: str) -> str:
    """`page` with the text between its marks replaced by the schema's tables."""
    before, mark, rest = page.partition(BEGIN)
    _, closing, after = rest.partition(END)
    assert mark and closing, "the page has both marks"
    return before + key_tables() + after


if __name__ == "__main__":
    page_path = Path(sys.argv[1])
    page_path.write_text(with_current_tables(page_path.read_text(encoding="utf-8")), encoding="utf-8")
