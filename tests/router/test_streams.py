"""Streams on their way through: bytes as they came, whole events, and the footprint at the end."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.streams import Footprint, StreamReader

FOOTPRINT = Footprint(7.2, 0.25, "here")
COMMENT = b": x-wattshift-gco2=0.25 x-wattshift-wh=0.002 x-wattshift-location=here\n\n"
DONE = b"data: [DONE]\n\n"


def token(text: str, **more: object) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}], **more}).encode() + b"\n\n"


USAGE = (
    b"data: " + json.dumps({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}).encode() + b"\n\n"
)


def through(pieces: list[bytes], *, wants_usage: bool = False) -> tuple[bytes, StreamReader]:
    reader = StreamReader(lambda: FOOTPRINT, wants_usage=wants_usage)
    return b"".join([*(reader.feed(piece) for piece in pieces), reader.close()]), reader


def test_events_pass_as_they_came_and_the_comment_comes_before_the_end() -> None:
    events = token("a") + token("data: b\n\n") + token("c")
    out, reader = through([events + DONE])
    assert out == events + COMMENT + DONE
    assert (reader.events, reader.is_complete) == (3, True)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.booleans(), st.booleans())
def test_however_a_stream_is_cut_the_same_comes_out(cuts: list[int], crlf: bool, wants_usage: bool) -> None:
    whole = token("a") + b": a comment\n\n" + token("b", usage=None) + USAGE + DONE
    whole = whole.replace(b"\n", b"\r\n") if crlf else whole
    pieces, at = [], 0
    for cut in cuts:
        pieces.append(whole[at : at + cut])
        at += cut
    pieces.append(whole[at:])
    out, reader = through([piece for piece in pieces if piece], wants_usage=wants_usage)
    expected, once = through([whole], wants_usage=wants_usage)
    assert out == expected
    assert (reader.events, reader.output_tokens) == (once.events, once.output_tokens)


def test_usage_states_the_footprint_if_it_was_asked_for() -> None:
    out, reader = through([token("a"), USAGE, DONE], wants_usage=True)
    events = [json.loads(event[6:]) for event in out.split(b"\n\n") if event.startswith(b"data: {")]
    assert events[-1]["wattshift"] == {"gco2": 0.25, "wh": 0.002, "location": "here"}
    assert events[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 2}
    assert COMMENT not in out
    assert (reader.input_tokens, reader.output_tokens, reader.events) == (3, 2, 1)


def test_usage_that_was_not_asked_for_is_learned_from_and_passes_unchanged() -> None:
    out, reader = through([token("a") + USAGE + DONE])
    assert out == token("a") + USAGE + COMMENT + DONE
    assert reader.output_tokens == 2


def test_a_stream_without_its_usual_end_gets_the_comment_too() -> None:
    out, reader = through([token("a")])
    assert out == token("a") + COMMENT
    assert reader.is_complete


@pytest.mark.parametrize("lie", [-5, 10**12, "many", True, None, 1.5])
def test_a_count_that_cannot_be_is_not_believed(lie: object) -> None:
    usage = b"data: " + json.dumps({"choices": [], "usage": {"completion_tokens": lie}}).encode() + b"\n\n"
    _, reader = through([usage + DONE], wants_usage=True)
    assert reader.output_tokens is None


def test_broken_json_passes_as_it_is() -> None:
    broken = b'data: {"usage": {\n\n'
    out, _ = through([broken + DONE], wants_usage=True)
    assert out == broken + COMMENT + DONE


def test_what_is_unknown_is_left_out() -> None:
    assert Footprint(None, None, "here").comment() == b": x-wattshift-location=here\n\n"
    assert Footprint(None, None, "here").headers() == []
    assert Footprint(float("nan"), float("inf"), "here").headers() == []
