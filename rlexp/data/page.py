"""A preview as one html file that opens from disk: no script, no network, and every text of a row escaped, so that no
row can become markup."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from string import Template

from rlexp.compare.page import asset, content_policy, utf8
from rlexp.data import tables
from rlexp.data.facts import Lengths, Piece, Preview, RowPart, ShownSample
from rlexp.data.tables import Table, one_line, share, visible

WIDE, HIGH, BELOW = 320, 110, 18  # of a histogram, and of the line under it


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(name: str, *children: str | None, **attributes: object) -> Markup:
    """Return an element. Children that are no markup are text; `class_` is the attribute `class`; None is left out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(utf8(str(value)))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{given}>{joined(*children)}</{name}>")


def joined(*children: str | None) -> Markup:
    return Markup("".join(
        child if isinstance(child, Markup) else html.escape(utf8(child)) for child in children if child is not None
    ))  # fmt: skip


def render(facts: Preview) -> str:
    """Return the whole page as text."""
    style = f"{asset('base.css')}\n{asset('preview.css', __package__)}"
    return Template(asset("preview.html", __package__)).substitute(
        policy=content_policy((), style), style=style, title=joined(_title(facts)), body=_body(facts)
    )


def _title(facts: Preview) -> str:
    return f"What training will see: {facts.data}, loss={facts.loss}"


def _body(facts: Preview) -> Markup:
    parts = [_header(facts), _tiles(facts), _section("Sources", *_sources(facts))]
    if facts.reasons:
        listed = [element("li", line) for line in tables.lists(facts)]
        about = [element("ul", *listed, class_="lines muted")] if listed else []
        parts.append(_section("Not taken as read", _table(tables.reasons(facts)), *about))
    if facts.lengths:
        graphs = element("div", *map(_histogram, facts.lengths), class_="graphs")
        note = element("p", tables.limits(facts), class_="muted note")
        parts.append(_section("Lengths", graphs, _table(tables.lengths(facts)), note))
    if facts.sharing is not None:
        parts.append(_section("Shared prompts", _tokens(facts), *_lines(tables.sharing(facts))))
    if facts.steps is not None:
        parts.append(_section("Steps", *_lines(tables.steps(facts))))
        parts.append(_section("Rings", _rings(facts), *_lines(tables.about_rings(facts), "muted note")))
    if facts.samples:
        parts.append(_section("Samples", _legend(), *map(_sample, range(1, 1 << 20), facts.samples)))
    return joined(*parts)


def _section(title: str, *inside: Markup) -> Markup:
    name = title.lower().replace(" ", "-")
    return element("section", element("h2", title, id=name), *inside, aria_labelledby=name, data_testid=name)


def _lines(lines: Sequence[str], kind: str | None = None) -> Iterator[Markup]:
    return (element("p", line, class_=kind) for line in lines)


def _header(facts: Preview) -> Markup:
    about = f"model {one_line(facts.model)}, data.max_length={facts.max_length:,}"
    head = element("div", element("h1", _title(facts)), element("p", about, class_="muted"), class_="masthead")
    word = element("span", "Training cannot start. " if facts.problems else "Ready. ", class_="word")
    tone = "apart" if facts.problems else "agree"
    verdict = element("div", element("p", word, one_line(facts.verdict), class_="headline"))
    return element("header", head, element("div", verdict, class_=f"verdict tone-{tone}", data_testid="verdict"))


def _tiles(facts: Preview) -> Markup:
    train = [each for each in facts.sources if not each.held_out]
    read, kept = sum(each.read for each in train), sum(each.kept for each in train)
    tiles = [(f"{kept:,}", f"of {read:,} rows kept")]
    if facts.lengths:
        whole = facts.lengths[-1]
        tiles.append((f"{whole.percentiles['50']:,}", f"tokens in the median {whole.part.removeprefix('whole ')}"))
    if facts.steps is not None:
        tiles.append((f"{facts.steps.per_epoch:,}", f"steps an epoch of {facts.steps.batch:,} samples"))
        tiles.append((f"{facts.steps.tokens_per_epoch:,}", "tokens an epoch"))
    own = next((ring for ring in facts.rings if ring.own and ring.packed is not None), None)
    if own is not None:
        used = own.packed if facts.packing else own.padded
        tiles.append((share(used or 0.0, 1), f"of a pack is real tokens, at ring {own.name}"))
    drawn = (element("div", element("dt", name), element("dd", value), class_="tile") for value, name in tiles)
    return element("dl", *drawn, class_="tiles", data_testid="tiles")


def _sources(facts: Preview) -> Iterator[Markup]:
    epoch = sum(each.per_epoch or 0 for each in facts.sources)
    several = sum(not each.held_out for each in facts.sources) > 1
    for each in facts.sources:
        name, shape, *rest = (line.strip() for line in tables.source_lines(each, epoch, several=several))
        shown = several and each.per_epoch is not None
        bar = _bar([("fill", (each.per_epoch or 0) / max(1, epoch), None)], "share of an epoch's samples")
        yield element(
            "div", element("h3", name, class_="name"), element("p", *_code(shape), class_="shape"),
            *_lines(rest, "muted"), bar if shown else None, class_="source",
        )  # fmt: skip


def _code(shape: str) -> Iterator[Markup]:
    """Write what stands between backticks as code."""
    for place, text in enumerate(shape.split("`")):
        yield element("code", text) if place % 2 else joined(text)


def _bar(parts: Sequence[tuple[str, float, str | None]], label: str) -> Markup:
    """Draw shares of a whole beside each other; each has a class, its size, and a text to point at."""
    drawn, start = [], 0.0
    for kind, size, text in parts:
        title = element("title", text) if text else None
        drawn.append(element("rect", title, class_=kind, x=f"{100 * start:.3f}%", y=0, width=f"{100 * size:.3f}%",
                             height=12))  # fmt: skip
        start += size
    return element("svg", *drawn, class_="bar", role="img", aria_label=label, width="100%", height=12)


def _tokens(facts: Preview) -> Markup:
    """Draw what the tokens of all sequences are: prompts, further copies of them, answers."""
    tally = facts.sharing
    assert tally is not None
    once = tally.prompt_tokens - tally.saved_across
    kinds = (("fill", once, "prompts, each different one once"), ("fill-copies", tally.saved_across, "further copies"),
             ("fill-answers", tally.tokens - tally.prompt_tokens, "answers"))  # fmt: skip
    shown = [(kind, count, f"{name}: {share(count, tally.tokens)}") for kind, count, name in kinds if count]
    bar = _bar([(kind, count / tally.tokens, text) for kind, count, text in shown], "tokens of all sequences")
    keys = [element("li", element("span", class_=f"key-{kind}"), text) for kind, _, text in shown]
    return element("div", bar, element("ul", *keys, class_="keys"), class_="tokens")


def _table(table: Table, bars: Sequence[Mapping[str, Markup]] = (), kind: str = "") -> Markup:
    """Draw a table, with `bars` under cells, by row and column."""

    def cells(row: Sequence[str], name: str, under: Mapping[str, Markup]) -> Iterator[Markup]:
        for place, (column, cell) in enumerate(zip(table.head, row, strict=True)):
            names = place == 0 and name == "td"
            yield element("th" if names else name, cell, under.get(column), scope="row" if names else None,
                          class_=None if place in table.text else "number")  # fmt: skip

    rows = [
        element("tr", *cells(row, "td", bars[place] if bars else {}), class_="own" if place == table.strong else None)
        for place, row in enumerate(table.rows)
    ]
    inside = element("table", element("thead", element("tr", *cells(table.head, "th", {}))), element("tbody", *rows))
    return element("div", inside, class_=f"scroll framed{kind}")


def _histogram(each: Lengths) -> Markup:
    """Draw a histogram; a dashed line stands at the median."""
    most, count = max(each.bars), len(each.bars)
    width = WIDE / count
    bars = []
    for place, bar in enumerate(each.bars):
        high = max(HIGH * bar / most, 1.5) if bar else 0.0
        last = place + 1 == count and each.longer
        upto = "and more" if last else f"– {each.edges[place + 1] - 1:,}"
        title = element("title", f"{each.edges[place]:,} {upto} tokens: {bar:,}")
        bars.append(element("rect", title, class_="fill", x=f"{place * width + 0.5:.2f}", y=f"{HIGH - high:.2f}",
                            width=f"{max(width - 1, 0.5):.2f}", height=f"{high:.2f}"))  # fmt: skip
    span = each.edges[-1] - each.edges[0]
    middle = WIDE * min(1.0, (each.percentiles["50"] + 0.5 - each.edges[0]) / span)
    line = element("line", element("title", f"median: {each.percentiles['50']:,}"), class_="median", x1=f"{middle:.2f}",
                   x2=f"{middle:.2f}", y1=0, y2=HIGH)  # fmt: skip
    ground = element("line", class_="ground", x1=0, x2=WIDE, y1=HIGH, y2=HIGH)
    low = element("text", f"{each.edges[0]:,}", x=0, y=HIGH + BELOW - 4)
    high_ = element("text", each.end, x=WIDE, y=HIGH + BELOW - 4, text_anchor="end")
    drawing = element("svg", *bars, line, ground, low, high_, viewBox=f"0 0 {WIDE} {HIGH + BELOW}", role="img",
                      aria_label=f"histogram of the tokens of {each.part}")  # fmt: skip
    half = element("span", f"median {each.percentiles['50']:,}", class_="muted")
    caption = element("figcaption", element("strong", each.part), half)
    return element("figure", caption, drawing, class_="graph")


def _rings(facts: Preview) -> Markup:
    """Draw the table of rings, with a bar under each share of real tokens: of the run's own way, or of the other."""
    own, other = ("packed", "padded") if facts.packing else ("padded", "packed")
    bars = [{name: _bar([(fill, share, None)], name) for name, fill in ((own, "fill"), (other, "fill-copies"))
             if (share := getattr(ring, name))} for ring in facts.rings]  # fmt: skip
    return _table(tables.rings(facts), bars, " rings")


# ---- samples ----


def _legend() -> Markup:
    texts = (("trained on", "t on"), ("special token", "t special"), ("not trained on", "t"),
             ("Point at a token to see its id; shades show where one ends.", "muted"))  # fmt: skip
    spans = [part for text, kind in texts for part in (" ", element("span", text, class_=kind))]
    return element("p", *spans[1:], class_="legend")


def _sample(number: int, sample: ShownSample) -> Markup:
    about = [] if sample.label is None else [f"label: {str(sample.label).lower()}"]
    about += [] if sample.expected is None else [f"expected answer: {one_line(sample.expected)}"]
    about += [] if sample.margin is None else [f"margin: {sample.margin:g}"]
    name = element("h3", f"{number}. {one_line(sample.origin)}", class_="name")
    return element(
        "article", name, *_lines(about, "muted"), *map(_part, sample.parts), class_="sample", data_testid="sample"
    )


def _part(part: RowPart) -> Markup:
    trained = f", {part.trained:,} trained on" if part.name != "prompt" else ""
    head = element("p", element("strong", part.name), f" {part.tokens:,} tokens{trained}", class_="part")
    return element("div", head, element("div", *map(_token, part.pieces), class_="text", dir="auto", tabindex=0,
                                        role="group", aria_label=part.name))  # fmt: skip


def _token(piece: Piece) -> Markup:
    if piece.hidden:
        return element("span", f"… {piece.hidden:,} tokens …", class_="gap")
    kind = "t" + " on" * piece.trained + " special" * piece.special
    ids = f"id{'s' * (len(piece.ids) != 1)} {', '.join(map(str, piece.ids))}"
    return element("span", visible(piece.text), class_=kind, title=ids)
