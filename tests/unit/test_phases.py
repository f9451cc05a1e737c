"""Marks and spans: what a worker tells of a verb."""

from hybridflow.observability.phases import SpanTimer, note_in_span
from hybridflow.types import Call, Mark, total


def test_notes_belong_to_the_verb_that_runs() -> None:
    call = Call("actor", "update", Mark(3, "update"))
    note_in_span({"hybrid/bytes_moved": total(1.0)})
    with SpanTimer(call, rank=1) as outer:
        note_in_span({"hybrid/bytes_moved": total(8.0)})
        with SpanTimer(call) as inner:
            note_in_span({"hybrid/bytes_moved": total(5.0)})
        note_in_span({"hybrid/bytes_moved": total(9.0)})
    assert outer.span.notes == {"hybrid/bytes_moved": 9.0}
    assert inner.span.notes == {"hybrid/bytes_moved": 5.0}
    with SpanTimer(call) as later:
        pass
    assert later.span.notes == {}
