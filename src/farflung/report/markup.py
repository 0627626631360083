"""Small pieces of HTML, and the one style sheet of the page."""

from collections.abc import Iterable, Sequence
from html import escape

from farflung.report.canvas import DARK, FONT, LIGHT

Cell = str | int | float


class Html(str):
    """Text that is markup already and must not be escaped again."""


def text(value: object) -> str:
    return value if isinstance(value, Html) else escape(str(value))


def tag(name: str, *children: object, cls: str = "") -> Html:
    """`<name class="cls">children</name>`; plain strings are escaped.

    >>> tag("p", "a < b", cls="note")
    '<p class="note">a &lt; b</p>'
    """
    attribute = f' class="{cls}"' if cls else ""
    return Html(f"<{name}{attribute}>{''.join(map(text, children))}</{name}>")


def section(title: str, *children: object, cls: str = "") -> Html:
    return tag("section", tag("h2", title), *children, cls=cls)


def table(head: Sequence[object], rows: Iterable[Sequence[object]], cls: str = "") -> Html:
    """The first column names the row; cells that are not its names are set right in tabular figures."""
    top = tag("tr", *(tag("th", cell) for cell in head))
    body = [tag("tr", tag("th", row[0]), *(tag("td", cell) for cell in row[1:])) for row in rows]
    return Html(f'<div class="scroll">{tag("table", tag("thead", top), tag("tbody", *body), cls=cls)}</div>')


def tile(name: str, value: str, explanation: str) -> Html:
    return tag("div", tag("b", value), tag("span", name), tag("small", explanation), cls="tile")


def figure(svg: str, caption: str, cls: str = "") -> Html:
    return tag("figure", Html(svg), tag("figcaption", caption), cls=cls)


def bar(fraction: float, label: str, tone: str = "") -> Html:
    """A number with a bar behind it whose length is the fraction 0..1."""
    width = f"{100 * min(1.0, max(0.0, fraction)):.1f}%"
    return Html(f'<span class="bar {tone}"><i style="width:{width}"></i>{text(label)}</span>')


def details(title: str, *children: object) -> Html:
    return tag("details", tag("summary", title), *children)


def document(title: str, *children: object) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head><body><main>"
        f"{''.join(map(text, children))}</main></body></html>\n"
    )


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{word}:{colour};" for word, colour in colours.items())


CSS = f"""
:root {{ color-scheme: light dark; {_variables(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 {FONT}; }}
main {{ max-width: 1120px; margin: 0 auto; padding: 40px 28px 64px; }}
h1 {{ font-size: 26px; line-height: 1.2; margin: 0 0 6px; font-weight: 650; }}
h2 {{ font-size: 17px; margin: 44px 0 12px; font-weight: 650; }}
h3 {{ font-size: 15px; margin: 20px 0 8px; font-weight: 650; }}
p {{ margin: 0 0 8px; max-width: 76ch; }}
.lead, .note, figcaption, small, .muted {{ color: var(--muted); }}
.note, figcaption {{ font-size: 13px; }}
.tiles {{
  display: grid; grid-template-columns: repeat(auto-fill, minmax(196px, 1fr));
  gap: 22px 26px; margin: 28px 0 8px;
}}
.tile {{ border-top: 2px solid var(--grid); padding-top: 10px; display: flex; flex-direction: column; }}
.tile b {{ font-size: 22px; font-weight: 650; line-height: 1.2; font-variant-numeric: tabular-nums; }}
.tile span {{ font-weight: 550; margin-top: 3px; }}
.tile small {{ font-size: 12.5px; line-height: 1.4; margin-top: 2px; }}
figure {{ margin: 0 0 14px; min-width: 0; }}
figure svg {{ width: 100%; height: auto; display: block; }}
.pair {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(430px, 1fr)); gap: 18px 30px; }}
.runs {{
  display: grid; grid-auto-flow: column;
  grid-auto-columns: minmax(320px, 1fr); gap: 30px; overflow-x: auto;
}}
.runs svg {{ max-width: 640px; }}
.runs figure {{ display: flex; flex-direction: column-reverse; justify-content: flex-end; }}
.runs figcaption {{ color: var(--ink); font-weight: 600; }}
.scroll {{ overflow-x: auto; }}
.scroll + p {{ margin-top: 10px; }}
table {{ border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }}
th, td {{
  padding: 6px 14px 6px 0; text-align: right;
  border-bottom: 1px solid var(--grid); vertical-align: top;
}}
th:first-child, table.words th, table.words td {{ text-align: left; }}
thead th {{ color: var(--muted); font-weight: 500; font-size: 13px; }}
tbody th {{ font-weight: 500; white-space: nowrap; }}
table.compare td, table.compare thead th:not(:first-child) {{ text-align: left; }}
table.compare thead th:first-child {{ width: 28%; min-width: 200px; }}
table.compare tbody th {{ white-space: normal; }}
table tbody th small {{ color: var(--muted); }}
table.against tbody th small {{ display: block; font-weight: 400; font-size: 12.5px; }}
table.compare tbody th small {{ display: block; font-weight: 400; font-size: 12.5px; }}
table.compare tr:has(.bar) td {{ font-weight: 650; }}
.bar {{ position: relative; display: block; padding: 1px 7px; z-index: 0; }}
.bar i {{
  position: absolute; inset: 0 auto 0 0; background: var(--sky);
  z-index: -1; border-radius: 3px; min-width: 3px;
}}
.bar.bad i {{ background: var(--red); opacity: .38; }}
ol.story {{ list-style: none; margin: 0; padding: 0; max-width: 96ch; }}
ol.story li {{
  display: grid; grid-template-columns: 72px 1fr;
  gap: 12px; padding: 3px 0 3px 12px; border-left: 3px solid var(--grid);
}}
ol.story li.bad {{ border-color: var(--red); }} ol.story li.good {{ border-color: var(--green); }}
ol.story li.warn {{ border-color: var(--amber); }}
ol.story time {{ color: var(--muted); text-align: right; font-variant-numeric: tabular-nums; }}
.ok {{ color: var(--green); font-weight: 600; }} .wrong {{ color: var(--red); font-weight: 600; }}
details {{ margin: 10px 0; }} summary {{ cursor: pointer; font-weight: 550; }}
code {{ font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, monospace; overflow-wrap: anywhere; }}
"""
