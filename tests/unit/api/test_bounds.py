"""The table of bounds and prices in docs/access.md is the one that the checks read."""

from __future__ import annotations

from pathlib import Path

from mooncake.api.bounds import PRICES, Price

PAGE = Path(__file__).parents[3] / "docs" / "access.md"


def row(field: str, price: Price) -> str:
    """Return a field's line of the table."""
    bounds = "; ".join(f"{bound.limit:,} {bound.unit}" for bound in price.bounds)
    return f"| `{field}` | {bounds} | {price.pays} |"


def test_the_page_shows_every_bound_and_price() -> None:
    lines = PAGE.read_text().splitlines()
    shown = [line for line in lines if line.startswith("| `")]
    assert shown == [row(*each) for each in PRICES.items()]
