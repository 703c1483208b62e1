"""The configuration page lists the schema as it is."""

from wan_trainer.config import keys, trainer_root
from wan_trainer.config.document import default_text, key_tables, with_current_tables

PAGE = trainer_root().parent / "docs" / "configuration.md"


def test_the_page_is_current():
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_current_tables(page), (
        "run python -m wan_trainer.config.document docs/configuration.md"
    )


def test_the_tables_have_a_row_for_every_key():
    rows = [line for line in key_tables().splitlines() if line.startswith("| `")]
    assert len(rows) == len(keys())
    for row, (name, info) in zip(rows, keys().items(), strict=True):
        assert row.startswith(f"| `{name}` | {info.type_name} | ")
        assert default_text(info) in row and row.endswith(f" {info.meaning} |")


def test_every_meaning_is_a_sentence():
    for name, info in keys().items():
        assert info.meaning.endswith(".") and "|" not in info.meaning, name


def test_stale_tables_are_replaced_and_the_text_around_is_kept():
    page = PAGE.read_text(encoding="utf-8")
    stale = page.replace("Rollouts of one prompt", "Something old")
    assert stale != page and with_current_tables(stale) == page
