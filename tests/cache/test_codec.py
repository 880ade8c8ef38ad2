"""Values to msgpack and back; and whatever stands in a file, either a sound value or a FieldError."""

import math
import random
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import ENVIRONMENTS, decisions, records

from fitune.cache.checks import MAX_ITEMS, FieldError, cleaned_prose, pack, prose, unpack
from fitune.cache.codec import (
    Named,
    Names,
    decode_choice,
    decode_decision,
    decode_environment,
    decode_key,
    decode_record,
    decode_target,
    define,
    encode_accuracy,
    encode_decision,
    encode_environment,
    encode_key,
    encode_named,
    encode_record,
    encode_target,
)
from fitune.record import Accuracy
from fitune.target import KNOWN_TARGETS, Environment


class Book:
    """Definitions written and read like a segment's."""

    def __init__(self, *environments: Environment) -> None:
        self.names = Names()
        self.numbers: dict[tuple[Named, Any], int] = {}
        self.environments = {environment.id: environment for environment in environments}

    def refer(self, what: Named, value: Any) -> int:
        if (what, value) not in self.numbers:
            number = self.numbers[what, value] = len(self.numbers)
            body = encode_named(what, self.environments[value] if what is Named.ENVIRONMENT else value)
            define(self.names, what, number, unpack(pack(body), "definition"))
        return self.numbers[what, value]


@settings(max_examples=80, deadline=None)
@given(st.data(), ENVIRONMENTS)
def test_records_come_back(data: st.DataObject, environment: Environment) -> None:
    record = data.draw(records(environment.id))
    book = Book(environment)
    assert decode_record(unpack(pack(encode_record(record, book.refer)), "record"), book.names) == record


@settings(max_examples=50, deadline=None)
@given(st.data(), ENVIRONMENTS)
def test_decisions_come_back(data: st.DataObject, environment: Environment) -> None:
    decision = data.draw(decisions(environment.id))
    book = Book(environment)
    assert decode_decision(unpack(pack(encode_decision(decision, book.refer)), "decision"), book.names) == decision


ODD = st.recursive(
    st.sampled_from(
        [None, True, -1, 0, 1, 2**63, -(2**62), math.nan, math.inf, -0.5, "", "ok", "t64", b"", b"x", "\x1b[2J"]
    )
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


def changed(value: Any, odd: Any, rng: random.Random) -> Any:
    """`value` with one thing in it, at any depth, replaced by `odd`, taken out, or doubled."""
    if not isinstance(value, list) or not value or rng.random() < 0.15:
        return odd
    position = rng.randrange(len(value))
    how = rng.random()
    if how < 0.1:
        return value[:position] + value[position + 1 :]
    if how < 0.2:
        return [*value, value[position]]
    return [*value[:position], changed(value[position], odd, rng), *value[position + 1 :]]


@settings(max_examples=250, deadline=None)
@given(ODD, st.randoms(use_true_random=False), st.booleans())
def test_changed_values_are_sound_or_refused(world: Any, odd: Any, rng: random.Random, decide: bool) -> None:
    book = Book(world.environment)
    if decide:
        value = changed(encode_decision(world.decision(), book.refer), odd, rng)
    else:
        value = changed(encode_record(world.record(), book.refer), odd, rng)
    decode = decode_decision if decide else decode_record
    try:
        item = decode(unpack(pack(value), "value"), book.names)
    except FieldError as error:
        refusal = str(error)
    else:
        # What is taken for sound must be storable and come back equal.
        encode = encode_decision if decide else encode_record
        again = decode(unpack(pack(encode(item, book.refer)), "value"), book.names)  # type: ignore[arg-type]
        assert again == item
        return
    assert refusal.startswith("field ")
    assert len(refusal) < 600
    assert refusal.isprintable()


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_unpack_or_are_refused(payload: bytes) -> None:
    book = Book()
    for decode in (decode_record, decode_decision):
        with pytest.raises(FieldError):
            decode(unpack(payload, "value"), book.names)
    for what in (1, 2, 3, 4, 9):
        try:
            define(book.names, what, 0, unpack(payload, "value"))
        except FieldError:
            continue
        assert what == Named.RUN


@pytest.mark.parametrize(
    "payload",
    [
        b"\x91" * 100_000 + b"\x01",  # arrays in arrays, 100,000 deep
        b"\x81\xa1a" * 5_000 + b"\x01",  # maps in maps
        b"\xdd\xff\xff\xff\xff",  # an array that says it has 4 billion values
        (b"\xdd" + (400_000).to_bytes(4, "big")) * 1000 + bytes(400_000),  # nested arrays, each as large as the input
        b"\xdf\xff\xff\xff\xff",  # a map of 4 billion
        b"\xdb\xff\xff\xff\xff",  # a text of 4 GB
        b"\xc6\xff\xff\xff\xff",  # 4 GB of bytes
        b"\xc9\xff\xff\xff\xff\x01",  # an extension of 4 GB
        b"\xd4\x05\x00",  # an extension type
        b"\xd6\xff\x00\x00\x00\x00",  # a timestamp
        b"\x82\xa1a\x01\xa1a\x02",  # the same key twice
        b"\x81\x01\x02",  # a key that is no text
        b"\x81\x90\x02",  # a key that is an array
        b"\xc1",  # not msgpack at all
        b"\xa2\xff\xfe",  # a text that is no UTF-8
        b"\x01\x02",  # two values
        b"",
        msgpack.packb(list(range(MAX_ITEMS + 1))),
    ],
)
def test_hostile_msgpack_is_refused(payload: bytes) -> None:
    with pytest.raises(FieldError, match="field payload: no valid msgpack"):
        unpack(payload, "payload")


RECORD_VALUES = ("key", "environment", "run", "tactic", "status", "time_s", "origin", "phase", "binary", "error")
RECORD_VALUES += ("measurement", "accuracy")
MEASUREMENT_VALUES = ("median_us", "ci_low_us", "ci_high_us", "samples", "regime", "parts_us", "sm_mhz", "power_w")


def record_with(world: Any, **changes: Any) -> Any:
    """A record's encoded values with some replaced, by name."""
    book = Book(world.environment)
    values = dict(zip(RECORD_VALUES, encode_record(world.record(), book.refer), strict=True))
    measurement = dict(zip(MEASUREMENT_VALUES, values["measurement"], strict=True))
    for name, value in changes.items():
        (measurement if name in measurement else values)[name] = value
    if "measurement" not in changes:
        values["measurement"] = list(measurement.values())
    return decode_record(unpack(pack(list(values.values())), "record"), book.names)


GOOD = "t64 gather:permute act:separate g1:64x64/g8/w4/s5/p1f/tma/swap"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"time_s": math.nan}, "field record.time_s: nan"),
        ({"time_s": -1.0}, r"field record.time_s: -1\.0"),
        ({"time_s": math.inf}, "field record.time_s: inf"),
        ({"time_s": "1"}, "field record.time_s: '1' is no number"),
        ({"median_us": math.nan}, "field measurement.median_us"),
        ({"median_us": 0.0}, "field measurement.median_us"),
        ({"median_us": -3.0}, "field measurement.median_us"),
        ({"ci_low_us": 5000.0}, "outside its own interval"),
        ({"samples": 0}, "field measurement.samples"),
        ({"samples": 2**80 % 2**64}, "field measurement.samples"),
        ({"samples": True}, "field measurement.samples"),
        ({"regime": 77}, "field measurement.regime: 77 was not defined"),
        ({"parts_us": [["sort"]]}, "field measurement.parts_us"),
        ({"parts_us": [["sort", -1.0]]}, "field measurement.parts_us.us"),
        ({"key": 99}, "field record.key: 99 was not defined"),
        ({"key": [1]}, "field record.key: a tuple"),
        ({"environment": -1}, "field record.environment"),
        ({"status": "excellent"}, "field record.status: 'excellent' is not one of ok, rejected"),
        ({"status": ["ok"]}, "field record.status"),
        ({"status": "crashed"}, "status crashed holds a measurement"),
        ({"measurement": None}, "status ok lacks its measurement"),
        ({"phase": "endgame"}, "field record.phase"),
        ({"origin": ""}, "field record.origin: the text is empty"),
        ({"binary": "a\nb"}, "field record.binary"),
        ({"error": "\x1b[31mred"}, "field record.error"),
        ({"accuracy": [0.1]}, "field accuracy: an array of 1 values stands where 2 belong"),
        ({"accuracy": [math.nan, 0.1]}, "field accuracy.max_abs"),
        ({"accuracy": [0.1, -0.1]}, "field accuracy.rms_relative"),
        ({"tactic": "t64"}, "field record.tactic"),
        ({"tactic": GOOD + " "}, "is written"),
        ({"tactic": GOOD.replace("t64", "t064")}, "is written"),
        ({"tactic": GOOD.replace("t64", "t0")}, "numbers must be from 1"),
        ({"tactic": GOOD.replace("/s5", "/s0")}, "numbers must be from 1"),
        ({"tactic": GOOD.replace("g8", "g" + "9" * 300)}, "numbers must be from 1"),
        ({"tactic": "t" + "9" * 10_000}, "too long"),
        ({"tactic": GOOD.replace("tma", "dma")}, "is no GEMM"),
        ({"tactic": GOOD.replace("64x64", "\u0666\u0664x64")}, "is written"),
    ],
)
def test_a_bad_field_is_named(world: Any, changes: dict[str, Any], message: str) -> None:
    assert record_with(world) == world.record()
    with pytest.raises(FieldError, match=message):
        record_with(world, **changes)


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, 0, "key.hidden_size: 0 is not"),
        (0, 2.0, "key.hidden_size"),
        (3, 257, "top_k 257 is larger than num_experts 256"),
        (4, "int3", "dtype 'int3' is not known"),
        (5, "relu", "activation 'relu' is not known"),
        (6, 257, "do not fit"),
        (7, "carrier pigeon", "dispatch 'carrier pigeon' is not known"),
        (8, "", "key.routing: the text is empty"),
        (9, None, "key.device"),
        (10, 0, "key.num_tokens"),
        (10, 2**41, "key.num_tokens"),
    ],
)
def test_an_impossible_key_is_refused(world: Any, position: int, value: object, message: str) -> None:
    values = encode_key(world.key())
    assert decode_key(tuple(values)) == world.key()
    values[position] = value
    with pytest.raises(FieldError, match=message):
        decode_key(tuple(values))


def test_environment_fields_are_known_or_refused(world: Any) -> None:
    values = encode_environment(world.environment)
    assert decode_environment(values).id == world.environment.id
    with pytest.raises(FieldError, match="'more' is no field"):
        decode_environment({**values, "more": 1})
    with pytest.raises(FieldError, match=r"environment\.kernels: it is missing"):
        decode_environment({name: value for name, value in values.items() if name != "kernels"})
    without_driver = {name: value for name, value in values.items() if name != "driver"}
    assert decode_environment(without_driver).driver == ""


def test_targets_come_back() -> None:
    for target in KNOWN_TARGETS.values():
        assert decode_target(unpack(pack(encode_target(target)), "target")) == target
    with pytest.raises(FieldError, match=r"target\.arch"):
        decode_target({**encode_target(KNOWN_TARGETS["sm_90"]), "arch": "sm_ninety"})


def test_an_output_never_written_has_an_infinite_error() -> None:
    assert encode_accuracy(Accuracy(math.nan, 0.5)) == [math.inf, 0.5]


def test_every_stage_of_a_tactic_is_a_choice(world: Any) -> None:
    tactic = world.tactic()
    for choice in (tactic, tactic.stage("gemm1"), tactic.stage("gemm2")):
        assert decode_choice(str(choice), "tactic") == choice


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(codec=None), max_size=50) | st.text("a\x00\ud800", min_size=3990, max_size=4100))
def test_any_error_text_can_be_stored(text: str) -> None:
    cleaned = cleaned_prose(text)
    assert prose(unpack(pack(cleaned), "error"), "error") == cleaned
    assert cleaned_prose(cleaned) == cleaned
