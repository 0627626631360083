"""The closing table of a run, for somebody who never saw one."""

from rich.table import Table
from rich.text import Text

from farflung.report.history import Data
from farflung.report.rows import rows_for


def result_table(summary: Data) -> Table:
    """Figures of summary.json with a short explanation each; figures that it lacks are left out."""
    title = f"{summary.get('method', 'run')}: {summary.get('outcome', 'finished')}"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    table.show_header = False
    table.add_column("figure")
    table.add_column("value", justify="right", style="bold", no_wrap=True)
    table.add_column("meaning", style="dim")
    for row, name, why in rows_for([summary]):
        if row.headline or row.key in ("wall_s", "ledger_exact"):
            try:
                table.add_row(name, row.value(summary), why)
            except KeyError:
                continue
    if digest := summary.get("digest"):
        table.add_row(
            "digest", Text(str(digest)[:16]), "of the final parameters: equal digests, equal models"
        )
    return table
