"""What the pages have in common: the style, the frame and its parts. It must not import Spark."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from html import escape

from . import svg

#: The tones of badges and tiles.
GOOD, BAD, SO_SO = "good", "bad", "so-so"
_DARK = "@media screen and (prefers-color-scheme:dark)"
#: A page is dark where its reader wants that, and never in print.
_COLOURS = f"{svg.rules(svg.COLOURS)}{_DARK}{{{svg.rules(svg.DARK_COLOURS)}}}"
_STYLE = """
:root{color-scheme:light;--ink:#1b1f24;--dim:#57606a;--ground:#f6f7f9;--card:#fff;--edge:#d8dee4;
--rule:#e4e8ec;--good:#1a7f37;--bad:#b42318;--so-so:#e69f00}
@media screen and (prefers-color-scheme:dark){
:root{color-scheme:dark;--ink:#e6e9ed;--dim:#a3abb5;--ground:#14171a;--card:#1b1f24;--edge:#363d45;
--rule:#2c3239;--good:#238c44;--bad:#cf3b2f}}
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--ground);margin:0}
main{max-width:1040px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:26px;line-height:1.25;margin:0 0 8px;overflow-wrap:anywhere}
h2{font-size:17px;margin:0 0 2px}
h3{font-size:13px;margin:8px 0 0;color:var(--dim)}
.lead{color:var(--dim);margin:0 0 6px}.lead:last-of-type{margin-bottom:18px}
.note{color:var(--dim);font-size:13px;margin:0 0 8px}
.verdicts{display:flex;flex-wrap:wrap;gap:6px;margin:0 0 10px}
.verdict{padding:2px 12px;border-radius:14px;color:#fff;font-weight:600}
.verdict.good{background:var(--good)}.verdict.bad{background:var(--bad)}
.verdict.so-so{background:var(--so-so);color:#1b1f24}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(128px,1fr));gap:10px;
margin:0 0 18px}
.tile{background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:10px 12px}
.tile b{display:block;font-size:22px;line-height:1.2}.tile span{color:var(--dim);font-size:13px}
.tile.good{border-left:4px solid var(--good)}.tile.bad{border-left:4px solid var(--bad)}
.tile.so-so{border-left:4px solid var(--so-so)}.tile.none{opacity:.6}
section{background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:16px 18px;
margin:0 0 16px}
svg{width:100%;height:auto;display:block}
.grid{stroke:var(--rule)}.tick{font:11px system-ui,sans-serif;fill:var(--dim)}
.legend{margin:4px 0 0;font-size:13px;color:var(--dim)}.legend span{display:inline-block;
margin-right:16px}
.legend i{display:inline-block;width:12px;height:12px;border-radius:2px;margin-right:5px;
vertical-align:-1px}
table{border-collapse:collapse;width:100%;font-size:13px}table.small{width:auto}
th,td{text-align:left;padding:3px 10px 3px 0;border-bottom:1px solid var(--rule)}
table.small td,table.small th{padding-right:28px}
th{font-weight:600}td.n,th.n{text-align:right}
tr.head:not(:first-child) th{padding-top:14px}
td.failed{color:var(--bad);font-weight:600}
code{font:12px ui-monospace,monospace}.option{white-space:nowrap}
.scroll{overflow-x:auto}
@media (max-width:700px){main{padding:18px 10px 40px}section{padding:12px}h1{font-size:21px}
.tiles{grid-template-columns:repeat(3,1fr)}.tile b{font-size:18px}
.scroll svg{min-width:680px}.tick{font-size:18px}.scroll .tick{font-size:13px}
td{white-space:nowrap}table.meaning td{white-space:normal}table.small td,table.small th{
padding-right:14px}}
@page{margin:12mm}
@media print{body{background:#fff;font-size:12px}main{max-width:none;padding:0 1px}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}
section,.tile,tr{break-inside:avoid}section,.tile{border-color:#bbb}
section.rows{break-inside:auto;border:0;padding:0}h2,.note,tr.head{break-after:avoid}
.tiles{grid-template-columns:repeat(7,1fr);gap:6px}.tile b{font-size:17px}.tick{font-size:11px}
.scroll{overflow:visible}.scroll svg{min-width:0}table,code{font-size:9px}
td{overflow-wrap:anywhere;white-space:normal}td.n,th,.whole{white-space:nowrap}}
"""


class TimeAxis(svg.Axis):
    """Seconds since the epoch, with ticks at round times of day."""

    def ticks(self, count: int = 6) -> list[float]:
        """Choose round times."""
        steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200)
        span = self.high - self.low
        days = 86400 * max(1, round(span / count / 86400))
        step = next((each for each in steps if span / each <= count), days)
        first = -(-self.low // step) * step
        return [first + step * n for n in range(int((self.high - first) // step) + 1)]


def document(title: str, parts: Iterable[str]) -> str:
    """Return a whole page: one file, which fetches nothing."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_COLOURS}{_STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def tile(value: str, label: str, tone: str, meaning: str = "") -> str:
    """Return a figure with its name."""
    hint = f' title="{meaning}"' if meaning else ""
    return f'<div class="tile {tone}"{hint}><b>{value}</b><span>{label}</span></div>'


def section(heading: str, note: str, body: str) -> str:
    """Return a part of the page under a heading."""
    kind = ' class="rows"' if "<table>" in body else ""
    return f'<section{kind}><h2>{heading}</h2><p class="note">{note}</p>{body}</section>'


def table(rows: str) -> str:
    """Return a table that scrolls where it is wider than the page."""
    return f'<div class="scroll"><table>{rows}</table></div>'


def clock(span: float) -> svg.Label:
    """Return how to write times within a span of seconds."""
    form = "%H:%M:%S" if span < 1800 else "%H:%M" if span < 2 * 86400 else "%d %b %H:%M"
    return lambda at: datetime.fromtimestamp(at, UTC).strftime(form)


def moment(at: float) -> str:
    """Return a time with its date, in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")
