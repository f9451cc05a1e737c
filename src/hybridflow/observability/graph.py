"""A step as a graph: calls as boxes, what they read of each other as edges, as text and as a picture.

Everything here is pure. Columns follow dependence (longest path), lanes follow roles, in the order they are given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal
from xml.etree import ElementTree as ET


@dataclass(frozen=True)
class Lane:
    """A role and where it lives: `Lane("actor", ("2 workers", "gpu:0-1"))`."""

    role: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Node:
    """A call, or `count` equal calls that may run side by side: `Node(2, "reward", "score", "score", num_rows=512, count=4)`.

    key:      its number; smaller keys were called earlier.
    num_rows: rows of all its calls together; 0 where it is not about rows.
    workers:  who runs it, "any of 2", "each of 2", or together "2 of 4".
    later:    it belongs to the next step.
    """

    key: int
    role: str
    verb: str
    phase: str
    num_rows: int = 0
    workers: str = ""
    count: int = 1
    later: bool = False

    @property
    def title(self) -> str:
        """`score ×4`."""
        return f"{self.verb} ×{self.count}" if self.count > 1 else self.verb

    @property
    def size(self) -> str:
        """`512 rows`, or nothing."""
        return f"{self.num_rows} row{'s' * (self.num_rows != 1)}" if self.num_rows else ""


@dataclass(frozen=True)
class Edge:
    """`target` comes after `source`: it reads its result (`data`), or one of the two changes the state that both meet (`order`)."""

    source: int
    target: int
    kind: Literal["data", "order"] = "data"


@dataclass(frozen=True)
class Graph:
    """Calls and what they wait for. Edges go from smaller keys to larger ones, so there is no cycle."""

    lanes: tuple[Lane, ...]
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]

    def __post_init__(self) -> None:
        keys, roles = {node.key for node in self.nodes}, {lane.role for lane in self.lanes}
        for node in self.nodes:
            if node.role not in roles:
                raise ValueError(
                    f"node {node.key} is of role '{node.role}', which has no lane; there are {sorted(roles)}"
                )
        for edge in self.edges:
            if edge.source >= edge.target or not {edge.source, edge.target} <= keys:
                raise ValueError(
                    f"edge {edge.source} -> {edge.target} does not lead from an earlier node to a later one; there are {sorted(keys)}"
                )


def compute_columns(graph: Graph) -> dict[int, int]:
    """For each node the number of edges on the longest path that leads to it."""
    columns: dict[int, int] = {}
    sources = _sources(graph.edges)
    for key in sorted(node.key for node in graph.nodes):
        columns[key] = max((columns[source] + 1 for source in sources.get(key, ())), default=0)
    return columns


def merge_equal(graph: Graph) -> Graph:
    """One node for all calls of one verb that stand in one column of one phase, with the edges of them all.

    Nodes of one column never depend on each other, so no cycle comes of it.
    """
    columns = compute_columns(graph)
    groups: dict[tuple[object, ...], list[Node]] = {}
    for node in sorted(graph.nodes, key=lambda node: (node.later, columns[node.key], node.key)):
        groups.setdefault((node.later, columns[node.key], node.role, node.verb, node.phase), []).append(node)
    # Numbered column by column: two calls of one verb may enclose a call that waits for the first of them.
    numbers = {node.key: number for number, group in enumerate(groups.values(), 1) for node in group}
    nodes = tuple(_merged(number, group) for number, group in enumerate(groups.values(), 1))
    ends = dict.fromkeys((numbers[edge.source], numbers[edge.target], edge.kind) for edge in graph.edges)
    return replace(graph, nodes=nodes, edges=tuple(Edge(*end) for end in sorted(ends)))


def _merged(key: int, group: Sequence[Node]) -> Node:
    counts, rows = sum(node.count for node in group), sum(node.num_rows for node in group)
    return replace(group[0], key=key, count=counts, num_rows=rows)


def drop_implied(graph: Graph) -> Graph:
    """The graph without those `order` edges that follow from its other edges."""
    kept = list(graph.edges)
    for edge in graph.edges:
        others = [other for other in kept if other != edge]
        if edge.kind == "order" and edge.source in _ancestors(edge.target, others):
            kept = others
    return replace(graph, edges=tuple(kept))


def cut_next_step(graph: Graph) -> Graph:
    """The graph with only those nodes of the next step that wait for this one, and without what they lead to."""
    later = {node.key for node in graph.nodes if node.later}
    edges = tuple(edge for edge in graph.edges if edge.source not in later)
    reached = {edge.target for edge in edges}
    return replace(graph, nodes=tuple(n for n in graph.nodes if not n.later or n.key in reached), edges=edges)


def _ancestors(key: int, edges: Iterable[Edge]) -> set[int]:
    sources = _sources(edges)
    found: set[int] = set()
    left = [key]
    while left:
        new = sources.get(left.pop(), set()) - found
        found |= new
        left.extend(new)
    return found


def _sources(edges: Iterable[Edge]) -> dict[int, set[int]]:
    sources: dict[int, set[int]] = {}
    for edge in edges:
        sources.setdefault(edge.target, set()).add(edge.source)
    return sources


def format_text(graph: Graph) -> str:
    """The calls phase by phase, one a line: number, role and verb, rows, workers, and the numbers of what it waits for."""
    named = {node.key: f"{node.key} {node.role}.{node.verb}" for node in graph.nodes}
    rows = [
        (
            "" if node.later else str(node.key),
            f"{node.role}.{node.title}",
            node.size,
            node.workers,
            _waits(node, graph.edges, named),
        )
        for node in graph.nodes
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    section = None
    for node, cells in zip(graph.nodes, rows, strict=True):
        heading = "next step" if node.later else f"phase {node.phase}"
        if heading != section:
            lines.append(heading)
            section = heading
        number, *others = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        lines.append(f"  {cells[0].rjust(len(number))}  {'  '.join(others)}".rstrip())
    return "".join(line + "\n" for line in lines)


def _waits(node: Node, edges: Iterable[Edge], named: Mapping[int, str]) -> str:
    words = {"data": "reads", "order": "after"}
    parts = []
    for kind, word in words.items():
        found = sorted(edge.source for edge in edges if edge.target == node.key and edge.kind == kind)
        sources = [named[source] for source in found]
        if sources:
            parts.append(f"{word} {', '.join(sources)}")
    return "; ".join(parts)


PALETTE = ("#2563eb", "#d97706", "#059669", "#9333ea", "#e11d48", "#0891b2", "#4d7c0f", "#64748b")
"""Colours of lanes, in order; a graph with more lanes begins anew."""
INK, FAINT, PAPER = "#0f172a", "#64748b", "#ffffff"
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif"
WIDTH = 1200.0
MARGIN, TOP, LEGEND = 20.0, 56.0, 48.0
BOX_HEIGHT, BOX_GAP, LANE_PAD, LANE_GAP, LINE = 62.0, 26.0, 24.0, 10.0, 17.0
MIN_GAP, MAX_GAP, CLEARANCE = 36.0, 150.0, 9.0


@dataclass(frozen=True)
class Box:
    """Where a node is drawn; x, y is its upper left corner."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        """Its right side."""
        return self.x + self.width

    @property
    def middle(self) -> float:
        """Its middle from above."""
        return self.y + self.height / 2


@dataclass(frozen=True)
class Layout:
    """Where everything is drawn: boxes by node, bands by role (upper side and height), a path of points for each edge."""

    width: float
    height: float
    boxes: Mapping[int, Box]
    bands: Mapping[str, tuple[float, float]]
    paths: tuple[tuple[tuple[float, float], ...], ...]


def plan_layout(graph: Graph) -> Layout:
    """Lanes below each other, columns beside each other, and edges that pass between the boxes of the columns they cross.

    Invariants: no two boxes overlap; every box lies in the band of its lane; an edge goes from the right side of its source to the
    left side of its target and crosses no box between.
    """
    columns = compute_columns(graph)
    bands = _plan_bands(graph, columns)
    boxes = _plan_boxes(graph, columns, bands)
    ports = _plan_ports(graph.edges, boxes)
    width = max([WIDTH, *(box.right + MARGIN + LANE_PAD for box in boxes.values())])
    bottom = max((top + height for top, height in bands.values()), default=TOP)
    paths = tuple(_plan_paths(graph.edges, columns, boxes, ports))
    return Layout(width, bottom + LEGEND, boxes, bands, paths)


def _plan_bands(graph: Graph, columns: Mapping[int, int]) -> dict[str, tuple[float, float]]:
    bands: dict[str, tuple[float, float]] = {}
    top = TOP
    for lane in graph.lanes:
        at = [columns[node.key] for node in graph.nodes if node.role == lane.role]
        stacked = max((at.count(column) for column in at), default=1)
        needed = stacked * (BOX_HEIGHT + BOX_GAP) - BOX_GAP, LINE * (1 + len(lane.details))
        height = max(needed) + 2 * LANE_PAD
        bands[lane.role] = (top, height)
        top += height + LANE_GAP
    return bands


def _plan_boxes(graph: Graph, columns: Mapping[int, int], bands: Mapping[str, tuple[float, float]]) -> dict[int, Box]:
    lefts, widths = _plan_columns(graph, columns)
    boxes: dict[int, Box] = {}
    for role, (top, height) in bands.items():
        for column in sorted(set(columns.values())):
            stack = [node.key for node in graph.nodes if node.role == role and columns[node.key] == column]
            used = len(stack) * (BOX_HEIGHT + BOX_GAP) - BOX_GAP
            for place, key in enumerate(stack):
                y = top + (height - used) / 2 + place * (BOX_HEIGHT + BOX_GAP)
                boxes[key] = Box(lefts[column], y, widths[column], BOX_HEIGHT)
    return boxes


def _plan_columns(graph: Graph, columns: Mapping[int, int]) -> tuple[list[float], list[float]]:
    """Left side and width of each column: as wide as its text, and apart so far that the whole fills the picture."""
    widths = [0.0] * (max(columns.values(), default=-1) + 1)
    for node in graph.nodes:
        widths[columns[node.key]] = max(widths[columns[node.key]], _box_width(node))
    first = MARGIN + _gutter_width(graph.lanes)
    room = WIDTH - first - MARGIN - LANE_PAD - sum(widths)
    gap = min(MAX_GAP, max(MIN_GAP, room / max(len(widths) - 1, 1)))
    return [first + sum(widths[:column]) + column * gap for column in range(len(widths))], widths


# Letters differ between fonts; the widths below are those of wide ones.
def _gutter_width(lanes: Sequence[Lane]) -> float:
    return max(
        [
            120.0,
            *(40 + 9.2 * len(lane.role) for lane in lanes),
            *(40 + 6.2 * len(d) for lane in lanes for d in lane.details),
        ]
    )


def _box_width(node: Node) -> float:
    return max(92.0, 24 + 8.6 * len(node.title), 24 + 5.8 * max(len(line) for line in _small_lines(node)))


def _small_lines(node: Node) -> tuple[str, str]:
    return "next step" if node.later else node.phase, " · ".join(part for part in (node.size, node.workers) if part)


def _plan_ports(edges: Sequence[Edge], boxes: Mapping[int, Box]) -> list[tuple[float, float]]:
    """For each edge how high it leaves its source and reaches its target: in the order of the other ends, so that few cross."""

    def heights(near: Sequence[int], far: Sequence[int]) -> dict[int, float]:
        found: dict[int, float] = {}
        for key in set(near):
            mine = sorted((i for i in range(len(edges)) if near[i] == key), key=lambda i: boxes[far[i]].middle)
            step = min(14.0, (BOX_HEIGHT - 20) / len(mine))
            for place, index in enumerate(mine):
                found[index] = boxes[key].middle + (place - (len(mine) - 1) / 2) * step
        return found

    sources, targets = [edge.source for edge in edges], [edge.target for edge in edges]
    leave, reach = heights(sources, targets), heights(targets, sources)
    return [(leave[index], reach[index]) for index in range(len(edges))]


def _plan_paths(
    edges: Sequence[Edge],
    columns: Mapping[int, int],
    boxes: Mapping[int, Box],
    ports: Sequence[tuple[float, float]],
) -> Iterator[tuple[tuple[float, float], ...]]:
    taken: dict[int, list[tuple[float, float]]] = {}
    for key, box in boxes.items():
        taken.setdefault(columns[key], []).append((box.y - CLEARANCE, box.y + box.height + CLEARANCE))
    sides = {columns[key]: (box.x, box.right) for key, box in boxes.items()}
    for edge, (leave, reach) in zip(edges, ports, strict=True):
        start, end = boxes[edge.source].right, boxes[edge.target].x
        points = [(start, leave)]
        for column in range(columns[edge.source] + 1, columns[edge.target]):
            left, right = sides[column]
            straight = leave + (reach - leave) * ((left + right) / 2 - start) / (end - start)
            y = _nearest_free(straight, taken[column])
            taken[column].append((y - CLEARANCE, y + CLEARANCE))
            points += [(left, y), (right, y)]
        yield (*points, (end, reach))


def _nearest_free(wanted: float, taken: Sequence[tuple[float, float]]) -> float:
    """The height nearest to the wanted one that lies inside none of the ranges."""
    candidates = [wanted, *(end for span in taken for end in span)]
    free = [y for y in candidates if not any(low < y < high for low, high in taken)]
    return min(free, key=lambda y: abs(y - wanted))


def format_svg(graph: Graph, title: str = "") -> str:
    """The graph as an SVG of its own: no scripts, no fonts from elsewhere; what a box or an edge means is its tooltip."""
    layout = plan_layout(graph)
    width, height = f"{layout.width:.0f}", f"{layout.height:.0f}"
    root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {width} {height}"})
    root.attrib |= {"width": width, "height": height, "font-family": FONT}
    _add(root, "rect", x=0, y=0, width=layout.width, height=layout.height, fill=PAPER)
    _add_text(root, MARGIN, 34, title, size=17, weight="600")
    colours = {lane.role: PALETTE[index % len(PALETTE)] for index, lane in enumerate(graph.lanes)}
    _add_arrows(root, sorted(set(colours.values())))
    for lane in graph.lanes:
        _add_lane(root, lane, layout, colours[lane.role])
    nodes = {node.key: node for node in graph.nodes}
    for edge, path in zip(graph.edges, layout.paths, strict=True):
        _add_edge(root, edge, path, nodes, colours[nodes[edge.source].role])
    for node in graph.nodes:
        _add_node(root, node, layout.boxes[node.key], colours[node.role])
    _add_legend(root, layout.height - 16)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode") + "\n"


def _add(parent: ET.Element, tag: str, /, **attributes: str | float) -> ET.Element:
    """A child whose attributes are written `stroke_width` for `stroke-width`, numbers with a tenth at most."""
    texts = {
        name.replace("_", "-"): value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")
        for name, value in attributes.items()
    }
    return ET.SubElement(parent, tag, texts)


def _add_text(
    parent: ET.Element, x: float, y: float, text: str, *, size: float, weight: str = "400", fill: str = INK
) -> None:
    _add(parent, "text", x=x, y=y, font_size=size, font_weight=weight, fill=fill).text = text


def _add_arrows(root: ET.Element, colours: Sequence[str]) -> None:
    defs = _add(root, "defs")
    for colour in colours:
        marker = _add(
            defs, "marker", id=f"arrow-{colour[1:]}", viewBox="0 0 8 8", refX=7, refY=4, markerWidth=7, markerHeight=7
        )
        marker.set("orient", "auto")
        _add(marker, "path", d="M0,0.8 L8,4 L0,7.2 z", fill=colour)


def _add_lane(root: ET.Element, lane: Lane, layout: Layout, colour: str) -> None:
    top, height = layout.bands[lane.role]
    _add(
        root, "rect", x=MARGIN, y=top, width=layout.width - 2 * MARGIN, height=height, rx=12,
        fill=colour, fill_opacity="0.05",
    )  # fmt: skip
    _add(root, "rect", x=MARGIN, y=top, width=5, height=height, rx=2.5, fill=colour)
    first = top + height / 2 + 5 - LINE / 2 * len(lane.details)
    _add_text(root, MARGIN + 18, first, lane.role, size=15, weight="700", fill=colour)
    for number, line in enumerate(lane.details, 1):
        _add_text(root, MARGIN + 18, first + LINE * number, line, size=12, fill=FAINT)


def _add_node(root: ET.Element, node: Node, box: Box, colour: str) -> None:
    group = ET.SubElement(root, "g", {"class": "node"})
    _add(group, "title").text = _node_tooltip(node)
    for behind in (6.0, 3.0) if node.count > 1 else ():
        _add(
            group, "rect", x=box.x + behind, y=box.y + behind, width=box.width, height=box.height, rx=10, fill=PAPER,
            stroke=colour, stroke_opacity="0.55",
        )  # fmt: skip
    frame = _add(
        group, "rect", x=box.x, y=box.y, width=box.width, height=box.height, rx=10, fill=PAPER, stroke=colour,
        stroke_width=1.6,
    )  # fmt: skip
    if node.later:
        frame.set("stroke-dasharray", "4 3")
    phase, size = _small_lines(node)
    _add_text(group, box.x + 12, box.y + 17, phase, size=10.5, fill=colour)
    _add_text(group, box.x + 12, box.y + 35, node.title, size=14, weight="600", fill=FAINT if node.later else INK)
    _add_text(group, box.x + 12, box.y + 52, size, size=11, fill=FAINT)


def _node_tooltip(node: Node) -> str:
    when = "in the next step" if node.later else f"phase '{node.phase}', call {node.key}"
    told = [f"{node.role}.{node.title}", when, node.size, node.workers and f"run by {node.workers}"]
    return ", ".join(part for part in told if part)


def _add_edge(
    root: ET.Element, edge: Edge, path: Sequence[tuple[float, float]], nodes: Mapping[int, Node], colour: str
) -> None:
    source, target = nodes[edge.source], nodes[edge.target]
    curve = _add(
        root, "path", d=_curve(path), fill="none", stroke=colour, stroke_width=1.6, stroke_opacity="0.75",
        marker_end=f"url(#arrow-{colour[1:]})",
    )  # fmt: skip
    if edge.kind == "order":
        curve.set("stroke-dasharray", "5 4")
    names = f"{target.role}.{target.verb}", f"{source.role}.{source.verb}"
    told = "{} reads the result of {}" if edge.kind == "data" else "{} comes after {}, for the state of their workers"
    _add(curve, "title").text = told.format(*names)


def _curve(points: Sequence[tuple[float, float]]) -> str:
    """Level where it leaves and arrives, and straight beside the boxes that it passes."""
    (x, y), *_ = points
    parts = [f"M{x:.1f},{y:.1f}"]
    for number, ((x0, y0), (x1, y1)) in enumerate(pairwise(points)):
        bend = (x1 - x0) / 2
        curved = number % 2 == 0
        parts.append(
            f"C{x0 + bend:.1f},{y0:.1f} {x1 - bend:.1f},{y1:.1f} {x1:.1f},{y1:.1f}" if curved else f"L{x1:.1f},{y1:.1f}"
        )
    return " ".join(parts)


def _add_legend(root: ET.Element, y: float) -> None:
    x = MARGIN + 18
    entries = (("", "reads the result of"), ("5 4", "comes after it, for the state of the same workers"))
    for dashes, text in entries:
        line = _add(root, "path", d=f"M{x:.0f},{y - 4:.0f} h34", stroke=FAINT, stroke_width=1.6)
        if dashes:
            line.set("stroke-dasharray", dashes)
        _add_text(root, x + 42, y, text, size=12, fill=FAINT)
        x += 60 + 7 * len(text)
    _add_text(root, x, y, "stacked: equal calls that may run side by side", size=12, fill=FAINT)
