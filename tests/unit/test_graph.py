"""A step as a graph: columns by dependence, equal calls merged, a text and a picture that say the same."""

from __future__ import annotations

import random
from itertools import combinations, pairwise
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.observability.graph import (
    Box,
    Edge,
    Graph,
    Lane,
    Node,
    compute_columns,
    cut_next_step,
    drop_implied,
    format_svg,
    format_text,
    merge_equal,
    plan_layout,
)

SVG = "{http://www.w3.org/2000/svg}"
LANES = (Lane("actor", ("2 workers", "gpu:0-1")), Lane("reward", ("1 worker",)))


def diamond() -> Graph:
    """1 -> 2 -> 4, 1 -> 3 -> 4, and 1 -> 4 that skips a column."""
    nodes = (
        Node(1, "actor", "rollout", "rollout", 8),
        Node(2, "reward", "score", "score", 8),
        Node(3, "actor", "log_prob", "score", 8),
        Node(4, "actor", "update", "update", 8, "each of 2"),
    )
    return Graph(LANES, nodes, (Edge(1, 2), Edge(1, 3), Edge(2, 4), Edge(3, 4), Edge(1, 4)))


def chunked(chunks: int) -> Graph:
    """Rollouts of `chunks` chunks, each scored by itself, and an update that reads them all."""
    nodes, edges = [], []
    for chunk in range(chunks):
        first, second = 2 * chunk + 1, 2 * chunk + 2
        nodes += [Node(first, "actor", "rollout", "rollout", 16), Node(second, "reward", "score", "score", 16)]
        edges += [Edge(first, second), Edge(first, 2 * chunks + 1), Edge(second, 2 * chunks + 1)]
    return Graph(LANES, (*nodes, Node(2 * chunks + 1, "actor", "update", "update")), tuple(edges))


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    lanes = tuple(Lane(f"role{index}") for index in range(draw(st.integers(1, 4))))
    verbs = st.sampled_from(["rollout", "score", "a_verb_with_a_long_name"])
    nodes = tuple(
        Node(key, draw(st.sampled_from(lanes)).role, draw(verbs), "phase", draw(st.integers(0, 99)))
        for key in range(1, draw(st.integers(1, 12)) + 1)
    )
    pairs = [(one.key, other.key) for one, other in combinations(nodes, 2)]
    kinds = st.sampled_from(["data", "order"])
    chosen = draw(st.sets(st.sampled_from(pairs))) if pairs else set()
    return Graph(lanes, nodes, tuple(Edge(source, target, draw(kinds)) for source, target in sorted(chosen)))


def test_a_column_is_the_length_of_the_longest_path() -> None:
    assert compute_columns(diamond()) == {1: 0, 2: 1, 3: 1, 4: 2}


@given(graphs())
def test_every_edge_leads_to_a_later_column_and_none_is_skipped(graph: Graph) -> None:
    columns = compute_columns(graph)
    assert all(columns[edge.source] < columns[edge.target] for edge in graph.edges)
    for key, column in columns.items():
        before = {columns[edge.source] for edge in graph.edges if edge.target == key}
        assert column == (max(before) + 1 if before else 0)


def test_equal_calls_become_one_with_their_rows_and_edges() -> None:
    merged = merge_equal(chunked(4))
    assert [(node.title, node.num_rows) for node in merged.nodes] == [
        ("rollout ×4", 64),
        ("score ×4", 64),
        ("update", 0),
    ]
    assert merged.edges == (Edge(1, 2), Edge(1, 3), Edge(2, 3))


def test_calls_that_wait_for_each_other_stay_apart() -> None:
    nodes = tuple(Node(key, "actor", "update", "update", 4) for key in (1, 2, 3))
    merged = merge_equal(Graph(LANES, nodes, (Edge(1, 2, "order"), Edge(2, 3, "order"))))
    assert [node.title for node in merged.nodes] == ["update", "update", "update"]


@given(graphs())
def test_merging_loses_no_call_no_row_and_no_dependence(graph: Graph) -> None:
    merged = merge_equal(graph)
    assert sum(node.count for node in merged.nodes) == len(graph.nodes)
    assert sum(node.num_rows for node in merged.nodes) == sum(node.num_rows for node in graph.nodes)
    described = {node.key: (node.role, node.verb) for node in graph.nodes}
    kept = {node.key: (node.role, node.verb) for node in merged.nodes}
    pairs = {(described[edge.source], described[edge.target], edge.kind) for edge in graph.edges}
    assert {(kept[edge.source], kept[edge.target], edge.kind) for edge in merged.edges} == pairs
    assert sorted(set(compute_columns(merged).values())) == sorted(set(compute_columns(graph).values()))


def test_order_that_follows_from_data_is_left_out_and_data_never_is() -> None:
    graph = diamond()
    more = Graph(graph.lanes, graph.nodes, (*graph.edges, Edge(1, 4, "order"), Edge(3, 4, "order")))
    assert drop_implied(more).edges == graph.edges
    chain = Graph(LANES, graph.nodes[:3], (Edge(1, 2, "order"), Edge(2, 3, "order"), Edge(1, 3, "order")))
    assert drop_implied(chain).edges == (Edge(1, 2, "order"), Edge(2, 3, "order"))


def test_of_the_next_step_only_what_waits_for_this_one_is_kept() -> None:
    later = (Node(5, "actor", "rollout", "rollout", later=True), Node(6, "reward", "score", "score", later=True))
    graph = Graph(LANES, (*diamond().nodes, *later), (*diamond().edges, Edge(4, 5, "order"), Edge(5, 6)))
    cut = cut_next_step(graph)
    assert cut.nodes == (*diamond().nodes, later[0]) and cut.edges == (*diamond().edges, Edge(4, 5, "order"))


def test_edges_that_lead_back_or_nowhere_and_unknown_roles_are_refused() -> None:
    nodes = diamond().nodes
    with pytest.raises(
        ValueError, match=r"edge 2 -> 1 does not lead from an earlier node to a later one; there are \[1, 2"
    ):
        Graph(LANES, nodes, (Edge(2, 1),))
    with pytest.raises(ValueError, match="edge 4 -> 5"):
        Graph(LANES, nodes, (Edge(4, 5),))
    with pytest.raises(
        ValueError, match=r"node 1 is of role 'critic', which has no lane; there are \['actor', 'reward'\]"
    ):
        Graph(LANES, (Node(1, "critic", "score", "score"),), ())


def test_the_text_says_who_waits_for_whom() -> None:
    nodes = (*diamond().nodes, Node(5, "actor", "rollout", "rollout", 8, count=2, later=True))
    graph = Graph(LANES, nodes, (*diamond().edges, Edge(4, 5, "order")))
    assert format_text(graph) == (
        "phase rollout\n"
        "  1  actor.rollout     8 rows\n"
        "phase score\n"
        "  2  reward.score      8 rows             reads 1 actor.rollout\n"
        "  3  actor.log_prob    8 rows             reads 1 actor.rollout\n"
        "phase update\n"
        "  4  actor.update      8 rows  each of 2  reads 1 actor.rollout, 2 reward.score, 3 actor.log_prob\n"
        "next step\n"
        "     actor.rollout ×2  8 rows             after 4 actor.update\n"
    )


def test_the_svg_parses_and_has_one_box_a_node_and_one_path_an_edge() -> None:
    nodes = (*diamond().nodes[:3], Node(4, "actor", 'up<date> & "more"', "update"))
    root = ET.fromstring(format_svg(Graph(LANES, nodes, diamond().edges), "a < b & c"))
    boxes = root.findall(f"{SVG}g[@class='node']")
    assert [box.findtext(f"{SVG}title") for box in boxes] == [
        "actor.rollout, phase 'rollout', call 1, 8 rows",
        "reward.score, phase 'score', call 2, 8 rows",
        "actor.log_prob, phase 'score', call 3, 8 rows",
        "actor.up<date> & \"more\", phase 'update', call 4",
    ]
    told = [path.findtext(f"{SVG}title") for path in root.findall(f"{SVG}path[@marker-end]")]
    assert len(told) == 5 and told[0] == "reward.score reads the result of actor.rollout"
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[0] == "a < b & c" and {"actor", "2 workers", "gpu:0-1", "reward"} <= set(texts)


def test_the_svg_brings_all_it_needs() -> None:
    text = format_svg(chunked(3))
    assert "<script" not in text and "href" not in text and "@import" not in text
    assert text.count("http") == 1  # the name of the format


def overlap(one: Box, other: Box) -> bool:
    return (
        one.x < other.right and other.x < one.right and one.y < other.y + other.height and other.y < one.y + one.height
    )


@given(graphs())
def test_boxes_stay_apart_and_in_their_lanes_and_edges_pass_between_them(graph: Graph) -> None:
    layout = plan_layout(graph)
    assert not any(overlap(one, other) for one, other in combinations(layout.boxes.values(), 2))
    for node in graph.nodes:
        box, (top, height) = layout.boxes[node.key], layout.bands[node.role]
        assert top < box.y and box.y + box.height < top + height and box.right < layout.width
    for edge, path in zip(graph.edges, layout.paths, strict=True):
        source, target = layout.boxes[edge.source], layout.boxes[edge.target]
        assert path[0][0] == source.right and source.y < path[0][1] < source.y + source.height
        assert path[-1][0] == target.x and target.y < path[-1][1] < target.y + target.height
        for (left, y), (right, end) in list(pairwise(path))[1::2]:
            assert y == end
            assert not any(
                box.x < right and left < box.right and box.y < y < box.y + box.height for box in layout.boxes.values()
            )


def test_the_same_graph_gives_the_same_picture() -> None:
    graph = chunked(5)
    shuffled = list(graph.nodes)
    random.Random(0).shuffle(shuffled)
    assert format_svg(merge_equal(graph)) == format_svg(merge_equal(Graph(graph.lanes, tuple(shuffled), graph.edges)))


def test_a_lane_is_as_high_as_what_is_written_in_it() -> None:
    lanes = (Lane("actor", tuple(f"gpu:0-7 of 10.0.0.{node}" for node in range(20))), Lane("reward"))
    graph = Graph(lanes, (Node(1, "actor", "update", "update"), Node(2, "reward", "score", "score")), (Edge(1, 2),))
    top, height = plan_layout(graph).bands["actor"]
    texts = {text.text: float(text.attrib["y"]) for text in ET.fromstring(format_svg(graph)).iter(f"{SVG}text")}
    assert top < texts["actor"] < texts["gpu:0-7 of 10.0.0.0"] < texts["gpu:0-7 of 10.0.0.19"] < top + height
