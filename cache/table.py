"""The table: what dispatch reads. Per layer the tuned token points in order, each with its tactic and evidence."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Self, get_args

from fitune.bucket import BUCKET_RULE, Bucket, buckets
from fitune.cache.checks import FieldError, array, corrupt, pack, text, unpack
from fitune.cache.codec import (
    LAYER_FIELDS,
    MAX_TOKENS,
    decode_environment,
    decode_layer_key,
    decode_tactic,
    encode_environment,
    encode_key,
)
from fitune.cache.columns import (
    Pool,
    pack_blobs,
    pack_numbers,
    pack_texts,
    unpack_blobs,
    unpack_numbered,
    unpack_numbers,
    unpack_texts,
)
from fitune.cache.files import read_file
from fitune.cache.frames import MAX_FILE_BYTES, Kind, frame, header_frame, migrated, read_single
from fitune.errors import CorruptStoreError, StoreError
from fitune.problem import Key, LayerKey
from fitune.record import Decision
from fitune.tactic import Tactic
from fitune.target import Environment

State = Literal["tuned", "tie", "default"]
STATES: Final[tuple[State, ...]] = get_args(State)
_TIMES: Final = ("median_us", "ci_low_us", "ci_high_us", "default_us")


@dataclass(frozen=True, slots=True)
class Entry:
    """What is used for the token counts of one bucket of a layer.

    The times are evidence, in µs: the tactic's interleaved median with its 95 % interval, and the default tactic's
    median from the same run; 0 where a decision came without.
    """

    key: Key
    bucket: Bucket
    tactic: Tactic
    state: State
    median_us: float
    ci_low_us: float
    ci_high_us: float
    default_us: float
    environment: Environment


@dataclass(frozen=True, slots=True)
class Table:
    """All layers' entries, each layer's sorted by token point.

    `hash` depends on which tactic each key got and on nothing else: not on order, times, µs or versions.
    """

    layers: Mapping[LayerKey, tuple[Entry, ...]]
    hash: str = field(init=False)
    bucket_rule: str = BUCKET_RULE

    def __post_init__(self) -> None:
        object.__setattr__(self, "hash", _hash(self.bucket_rule, self.layers))

    def __len__(self) -> int:
        """Number of entries, all layers together."""
        return sum(map(len, self.layers.values()))

    def entries(self) -> Iterable[Entry]:
        """All entries, layer by layer."""
        return (entry for entries in self.layers.values() for entry in entries)

    def to_bytes(self) -> bytes:
        """The table as a file's bytes."""
        layers: Pool[LayerKey] = Pool()
        tactics: Pool[Tactic] = Pool()
        environments: Pool[Environment] = Pool()
        entries = list(self.entries())
        columns = [
            pack_numbers("I", [layers.number(entry.key.layer) for entry in entries]),
            pack_numbers("q", [entry.key.num_tokens for entry in entries]),
            pack_numbers("I", [tactics.number(entry.tactic) for entry in entries]),
            pack_numbers("I", [environments.number(entry.environment) for entry in entries]),
            pack_numbers("I", [STATES.index(entry.state) for entry in entries]),
            *(pack_numbers("d", [getattr(entry, name) for entry in entries]) for name in _TIMES),
        ]
        pools = [
            pack_blobs([pack(encode_key(Key(layer, 1))[:LAYER_FIELDS]) for layer in layers.values()]),
            pack_texts([str(tactic) for tactic in tactics.values()]),
            pack_blobs([pack(encode_environment(environment)) for environment in environments.values()]),
        ]
        payload = pack([self.bucket_rule, self.hash, pools, columns])
        return header_frame("table") + frame(Kind.TABLE, payload, MAX_FILE_BYTES)

    @classmethod
    def from_bytes(cls, data: bytes, path: Path = Path("table")) -> Self:
        """The inverse of to_bytes; `path` is named in errors. Raises CorruptStoreError, NewerStoreError, StoreError."""
        header, found = read_single(path, data, "table", Kind.TABLE)
        try:
            values = array(migrated(Kind.TABLE, unpack(found.payload, "table"), header.format), "table", 4)
            rule = text(values[0], "table.bucket_rule")
            if rule != BUCKET_RULE:
                raise StoreError(f"{path}: made for buckets by {rule}, not {BUCKET_RULE}; write it anew from its store")
            table = cls(_read_layers(array(values[2], "table.pools", 3), array(values[3], "table.columns", 9)))
            if values[1] != table.hash:
                raise FieldError("table.hash", "it does not fit the entries; write the table anew from its store")
        except FieldError as error:
            raise corrupt(path, found.offset, error) from error
        return table


def _hash(rule: str, layers: Mapping[LayerKey, tuple[Entry, ...]]) -> str:
    """32 hex digits."""
    texts: dict[int, str] = {}  # by identity: entries share tactics, and hashing one takes longer than writing it
    digest = hashlib.sha256(rule.encode())
    for layer in sorted(layers):
        digest.update(pack(encode_key(Key(layer, 1))[:LAYER_FIELDS]))
        lines = []
        for entry in layers[layer]:
            written = texts.get(id(entry.tactic)) or texts.setdefault(id(entry.tactic), str(entry.tactic))
            lines.append(f"{entry.key.num_tokens} {written}\n")
        digest.update("".join(lines).encode())
    return digest.hexdigest()[:32]


def table_of(decisions: Iterable[Decision], environments: Mapping[str, Environment]) -> Table:
    """The table of decisions, one per key. Raises StoreError where an environment is unknown."""
    by_layer: dict[LayerKey, dict[int, Decision]] = {}
    for decision in decisions:
        points = by_layer.setdefault(decision.key.layer, {})
        assert decision.key.num_tokens not in points, f"two decisions for {decision.key}"
        points[decision.key.num_tokens] = decision
    layers = {}
    for layer in sorted(by_layer):
        points = by_layer[layer]
        layers[layer] = tuple(
            _entry(points[bucket.point], bucket, environments[points[bucket.point].environment_id])
            for bucket in buckets(tuple(points))
        )
    return Table(layers)


def _entry(decision: Decision, bucket: Bucket, environment: Environment) -> Entry:
    member = decision.member(decision.chosen)
    if member is not None:
        found = member.measurement
        times = (found.median_us, found.ci_low_us, found.ci_high_us)
    else:
        alone = decision.default_us if decision.chosen == decision.default else 0.0
        times = (alone, alone, alone)
    return Entry(decision.key, bucket, decision.chosen, decision.state, *times, decision.default_us, environment)


def _read_layers(pools: tuple[object, ...], columns: tuple[object, ...]) -> Mapping[LayerKey, tuple[Entry, ...]]:
    layers = [
        decode_layer_key(array(unpack(blob, "table.layers"), "table.layers", LAYER_FIELDS), "table.layers")
        for blob in unpack_blobs(pools[0], "table.layers")
    ]
    tactics = [decode_tactic(written, "table.tactics") for written in unpack_texts(pools[1], "table.tactics")]
    environments = [
        decode_environment(unpack(blob, "table.environments"), "table.environments")
        for blob in unpack_blobs(pools[2], "table.environments")
    ]
    tokens = unpack_numbers("q", columns[1], "table.tokens")
    count = len(tokens)
    if count and not 1 <= min(tokens) <= max(tokens) <= MAX_TOKENS:
        raise FieldError("table.tokens", f"token points must be from 1 to {MAX_TOKENS}")
    rows = zip(
        unpack_numbered(columns[0], "table.layer", count, len(layers)),
        tokens,
        unpack_numbered(columns[2], "table.tactic", count, len(tactics)),
        unpack_numbered(columns[3], "table.environment", count, len(environments)),
        unpack_numbered(columns[4], "table.state", count, len(STATES)),
        *(_read_times(column, f"table.{name}", count) for column, name in zip(columns[5:], _TIMES, strict=True)),
        strict=True,
    )
    by_layer: dict[int, dict[int, tuple[Any, ...]]] = {}
    for row in rows:
        if by_layer.setdefault(row[0], {}).setdefault(row[1], row) is not row:
            raise FieldError("table.tokens", f"point {row[1]} stands twice in a layer")
    result: dict[LayerKey, tuple[Entry, ...]] = {}
    for index in sorted(by_layer, key=lambda position: layers[position]):
        layer, points = layers[index], by_layer[index]
        if layer in result:
            raise FieldError("table.layers", "a layer stands there twice")
        entries = []
        for bucket in buckets(tuple(points)):
            _, point, tactic, environment, state, *times = points[bucket.point]
            evidence = (STATES[state], *times, environments[environment])
            entries.append(Entry(Key(layer, point), bucket, tactics[tactic], *evidence))
        result[layer] = tuple(entries)
    return result


def _read_times(value: object, where: str, count: int) -> list[float]:
    times_us: list[float] = list(unpack_numbers("d", value, where, count))
    if not all(0.0 <= time_us < math.inf for time_us in times_us):
        raise FieldError(where, "its values must be finite numbers of 0 or more")
    return times_us


def read_table(path: Path) -> Table:
    """The table in a file. Raises StoreError where it is missing, unreadable, foreign, broken or newer."""
    try:
        data = read_file(path, MAX_FILE_BYTES)
    except FileNotFoundError as error:
        raise StoreError(f"no table at {path}; name a table file or a store folder") from error
    if not data:
        raise CorruptStoreError(f"{path}: at byte 0: the file is empty; write the table anew from its store")
    return Table.from_bytes(data, path)
