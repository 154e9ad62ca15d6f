"""Texts: which braces are placeholders, what they are filled with, and what is never looked up."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.workflow.placeholders import (
    EnvPlaceholder,
    FilledBytes,
    IndexPlaceholder,
    ItemPlaceholder,
    PlaceholderError,
    RunPlaceholder,
    StepPlaceholder,
    Text,
    UnfilledError,
    as_string,
    fill,
    fill_template,
    parsed_placeholder,
    parsed_template,
    parsed_text,
    placeholder_text,
    references,
    with_variables,
)
from workflow.views import SimpleView

ITEM = ItemPlaceholder()

PARTS: list[tuple[str, tuple[Any, ...]]] = [
    ("", ()),
    ("a", ("a",)),
    ("{item}", (ITEM,)),
    ("a{item}b", ("a", ITEM, "b")),
    ("{item}{index}", (ITEM, IndexPlaceholder())),
    ("{item.a.b}", (ItemPlaceholder(path=("a", "b")),)),
    ("{item.a-b[0][-1]}", (ItemPlaceholder(path=("a-b", 0, -1)),)),
    ('{item[\'a b\']["c\\"d"]}', (ItemPlaceholder(path=("a b", 'c"d')),)),
    ("{item.0}", (ItemPlaceholder(path=("0",)),)),
    ("{steps.a.output}", (StepPlaceholder(step="a", field="output"),)),
    ("{steps.a-b.output.x[1]}", (StepPlaceholder(step="a-b", field="output", path=("x", 1)),)),
    ("{run.id} {run.name}", (RunPlaceholder(field="id"), " ", RunPlaceholder(field="name"))),
    ("{env.HOME}", (EnvPlaceholder(name="HOME"),)),
    # Pairs of braces around a name are braces, as in Python's formats.
    ("{{item}}", ("{item}",)),
    ("{{itm}}", ("{itm}",)),
    ("{{{item}}}", ("{", ITEM, "}")),
    ("{{{{item}}}}", ("{{item}}",)),
    ("{{item}", ("{", ITEM)),
    ("{item}}", (ITEM, "}")),
    ('{"a": {item}}', ('{"a": ', ITEM, "}")),
    # All other braces are text.
    ("{}", ("{}",)),
    ("{{}}", ("{{}}",)),
    ('{"a": {"b": 1}}', ('{"a": {"b": 1}}',)),
    ("{0} {a b} {a|b} { a }", ("{0} {a b} {a|b} { a }",)),
    ("{ {item} }", ("{ ", ITEM, " }")),
    ("f() { return 1; }", ("f() { return 1; }",)),
    ("{{ thing }}", ("{{ thing }}",)),
    ("}{", ("}{",)),
]


@pytest.mark.parametrize(("source", "parts"), PARTS, ids=[source for source, _ in PARTS])
def test_braces_around_a_name_are_places_and_others_are_text(
    source: str, parts: tuple[Any, ...]
) -> None:
    assert parsed_text(source) == Text(parts=parts)


NO_PLACES = [
    "{itm}",
    "{name}",
    "{item.}",
    "{ item }",
    "{item .a}",
    "{item[x]}",
    "{steps}",
    "{env.}",
]


@pytest.mark.parametrize("source", NO_PLACES)
def test_what_looks_like_a_place_and_is_none_is_refused(source: str) -> None:
    with pytest.raises(PlaceholderError):
        parsed_text(source)


VIEW = SimpleView(
    {"q": "Why?", "n": 5, "list": [1, {"a": None}], "braces": "{env.KEY} {item.n}"},
    index=3,
    fields={("s", "output"): {"score": 0.5}, ("s", "status"): "done", ("none", "output"): None},
)
FILLED: list[tuple[str, str, Any]] = [
    # As a text, and as a value of a template.
    ("{item.q}", "Why?", "Why?"),
    ("{item.n}", "5", 5),
    ("{item.list}", '[1,{"a":null}]', [1, {"a": None}]),
    ("{item.list[1].a}", "null", None),
    ("{item.list[-1]}", '{"a":null}', {"a": None}),
    ("{item.list[1].a.b.c}", "null", None),
    ("n={item.n}", "n=5", "n=5"),
    ("{item.q}{item.n}", "Why?5", "Why?5"),
    ("{index}", "3", 3),
    ("{run.name}/{run.id}", "eval/20261115-200917-3fa2", "eval/20261115-200917-3fa2"),
    ("{steps.s.output.score}", "0.5", 0.5),
    ("{steps.s.status}!", "done!", "done!"),
    ("{steps.none.output.x}", "null", None),
    ("{item.braces}", "{env.KEY} {item.n}", "{env.KEY} {item.n}"),
    ("<{item.braces}>", "<{env.KEY} {item.n}>", "<{env.KEY} {item.n}>"),
    ("{{item}} é", "{item} é", "{item} é"),
    ("", "", ""),
]


@pytest.mark.parametrize(("source", "text", "value"), FILLED, ids=[one[0] for one in FILLED])
def test_a_place_alone_gives_its_value_and_within_a_text_its_json(
    source: str, text: str, value: Any
) -> None:
    assert fill(parsed_text(source), VIEW) == text
    assert fill_template(parsed_template({"a": [source]}), VIEW) == {"a": [value]}


@pytest.mark.parametrize("source", ["{item.x}", "{item.q.x}", "{item.list[2]}", "{item[0]}"])
def test_a_place_in_nothing_is_not_filled_and_says_what_is_missing(source: str) -> None:
    with pytest.raises(UnfilledError) as caught:
        fill(parsed_text(source), VIEW)
    assert str(caught.value).startswith(f"{source} has nothing to be filled with: there is no ")


def test_a_variable_stays_a_name_until_somebody_puts_it_in() -> None:
    filled = fill(parsed_text("Bearer {env.KEY}-{item.n}"), VIEW)
    assert filled == ("Bearer ", EnvPlaceholder(name="KEY"), "-", "5")
    assert with_variables(filled, lambda placeholder: f"<{placeholder.name}>") == "Bearer <KEY>-5"


def test_a_text_that_must_be_a_string_is_one() -> None:
    template = parsed_template("{item.n}")
    assert fill_template(template, VIEW) == 5
    text = as_string(template.value)
    assert fill_template(msgspec.structs.replace(template, value=text), VIEW) == "5"


def test_what_is_filled_into_a_url_stays_one_part_of_it() -> None:
    view = SimpleView({"host": "http://h:1/a", "q": "a b/&?#é"})
    text = msgspec.structs.replace(parsed_text("{item.host}/x/{item.q}"), is_url=True)
    assert fill(text, view) == "http://h:1/a/x/a%20b%2F%26%3F%23%C3%A9"


def test_references_are_all_places_of_a_text_or_a_template() -> None:
    template = parsed_template({"a": ["{item}", {"b": "x{index}"}], "c": 1})
    assert set(references(template)) == {ITEM, IndexPlaceholder()}
    assert list(references(parsed_text("{item}{env.A}"))) == [ITEM, EnvPlaceholder(name="A")]
    assert list(references(None)) == []


names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,8}", fullmatch=True)
keys = st.text(st.characters(codec="utf-8", exclude_characters="{}\\'\"\0"), max_size=6)
paths = st.lists(st.one_of(names, keys, st.integers(-99, 99)), max_size=4).map(tuple)
placeholders = st.one_of(
    st.builds(ItemPlaceholder, path=paths),
    st.just(IndexPlaceholder()),
    st.builds(
        StepPlaceholder, step=names, field=st.sampled_from(["output", "results"]), path=paths
    ),
    st.builds(RunPlaceholder, field=st.sampled_from(["id", "name"])),
    st.builds(EnvPlaceholder, name=st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True)),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(placeholders)
def test_a_place_is_read_as_it_is_written(placeholder: Any) -> None:
    assert parsed_placeholder(placeholder_text(placeholder)[1:-1]) == placeholder


@given(st.lists(st.text() | placeholders, max_size=5))
def test_a_text_is_parsed_or_refused_and_never_fails_otherwise(parts: list[Any]) -> None:
    source = "".join([part if isinstance(part, str) else placeholder_text(part) for part in parts])
    with suppress(PlaceholderError):
        assert "" not in parsed_text(source).parts


@given(json_values, st.text(alphabet="{}itemenv.KEY ", max_size=20))
def test_filling_never_looks_into_what_was_filled_in(item: Any, trap: str) -> None:
    view = SimpleView({"a": item, "b": trap})
    assert fill_template(parsed_template("{item.a}"), view) == item
    assert fill_template(parsed_template(["{item.b}"]), view) == [trap]
    assert fill(parsed_text("<{item.b}>{item.b}"), view) == f"<{trap}>{trap}"
    filled = fill(parsed_text("{env.A}{item.b}"), view)
    assert filled == ((EnvPlaceholder(name="A"), trap) if trap else (EnvPlaceholder(name="A"),))


@given(json_values)
def test_a_template_without_places_is_filled_with_itself(value: Any) -> None:
    try:
        template = parsed_template(value)
    except PlaceholderError:
        return
    if not list(references(template)) and "{" not in msgspec.json.encode(value).decode():
        assert fill_template(template, SimpleView()) == value


@pytest.mark.parametrize(
    "unit", ["{", "{{", "}", "{}", "{a", "{item", "{item.", '{item["', "{item[0]", "{x.y} ", "}{"]
)
def test_texts_of_braces_are_read_in_linear_time(unit: str) -> None:
    """Twenty thousand braces took five seconds, and twice as many four times as long."""

    def seconds(characters: int) -> float:
        source, best = unit * (characters // len(unit)), float("inf")
        for _ in range(3):
            began = time.process_time()
            with suppress(PlaceholderError):
                parsed_text(source)
            best = min(best, time.process_time() - began)
        return best

    # The quadratic reader needs 100 times as long for ten times the text, and above a minute.
    assert seconds(100_000) < 0.5 + 30 * seconds(10_000)


def test_what_one_run_of_a_step_is_filled_to_has_a_limit_in_sum() -> None:
    view, room = SimpleView("x" * 600), FilledBytes(1_000)
    assert fill(parsed_text("<{item}>"), view, room) == f"<{'x' * 600}>"
    with pytest.raises(UnfilledError, match=r"more than 1,000 bytes at \{item\}"):
        fill_template(parsed_template({"a": ["{item}"]}), view, room)


def test_values_that_are_no_texts_count_as_their_json() -> None:
    template = parsed_template(["{item}", "{item}"])
    with pytest.raises(UnfilledError, match="more than 150 bytes"):
        fill_template(template, SimpleView([1] * 50), FilledBytes(150))


def test_a_short_text_cannot_be_filled_without_end() -> None:
    source = "{item}" * 10_000
    with pytest.raises(UnfilledError, match="8,388,608 bytes"):
        fill(parsed_text(source), SimpleView("x" * 1_000_000))
