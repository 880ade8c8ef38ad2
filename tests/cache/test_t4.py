"""T4 files: what fitune writes comes back exactly; everything else is refused in one line."""

import copy
import json
import math
import random
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import ENVIRONMENTS, decisions, records

from fitune.cache import Store, embedded_recordings, load_recording, t4
from fitune.cache.t4 import INVALIDITY, Contents, t4_files
from fitune.cache.t4_reader import read_t4
from fitune.errors import NewerStoreError, StoreError
from fitune.record import Accuracy, Decision, Record, Status
from fitune.tactic import parse_stage
from fitune.target import Environment


def failed(record: Record, status: Status) -> Record:
    """The same trial with another end; a wrong result has errors, one of them infinite."""
    wrong = Accuracy(math.inf, 0.5) if status is Status.WRONG_RESULT else None
    time_s = record.time_s + list(Status).index(status)
    return replace(record, status=status, measurement=None, accuracy=wrong, error=f"{status}:\n\tno", time_s=time_s)


@pytest.fixture(scope="module")
def contents() -> Contents:
    """Two keys of the shipped recording, with one record of each status added to every file."""
    path = next(path for path in embedded_recordings() if "fp8_block128" in path.name)
    found = load_recording(path)
    keys = sorted({record.key for record in found.records})[:2]
    kept = [record for record in found.records if record.key in keys]
    parts = {(record.key, record.part): record for record in kept}
    failures = [failed(record, status) for record in parts.values() for status in Status if status is not Status.OK]
    library = replace(
        next(record for record in kept if record.part == "gemm1"),
        tactic=parse_stage("grouped_mm t1 gather:permute act:separate g1:align=128,mode=fast"),
        origin="neighbour:L16/N32",
    )
    decided = tuple(decision for decision in found.decisions if decision.key in keys)
    return Contents((*kept, *failures, library), decided, found.environments)


def write(folder: Path, files: dict[str, bytes]) -> list[Path]:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return [folder / name for name in files]


def read(paths: Iterable[Path]) -> Contents:
    found = [read_t4(path) for path in paths]
    environments = {identity: each for item in found for identity, each in item.environments.items()}
    all_records = tuple(record for item in found for record in item.records)
    return Contents(all_records, tuple(each for item in found for each in item.decisions), environments)


def test_a_slice_of_a_recording_comes_back(tmp_path: Path, contents: Contents) -> None:
    files = t4_files(contents)
    assert len(files) == 6
    again = read(write(tmp_path / "a", files))
    assert set(again.records) == set(contents.records)
    assert len(again.records) == len(contents.records)
    assert set(again.decisions) == set(contents.decisions)
    assert again.environments == contents.environments
    assert t4_files(again) == files
    mixed = random.Random(1).sample(contents.records * 2, 2 * len(contents.records))
    assert t4_files(replace(contents, records=tuple(mixed))) == files


def test_through_a_store_and_back(tmp_path: Path, contents: Contents, store: Store) -> None:
    files = t4_files(contents)
    again = read(write(tmp_path / "a", files))
    items = [*again.environments.values(), *again.records, *again.decisions]
    assert store.add(items).records == len(contents.records)
    report = store.add(items)
    assert (report.records, report.decisions) == (0, 0)
    assert report.duplicates == len(again.records) + len(again.decisions)
    held = Contents(tuple(store.records()), tuple(store.all_decisions()), store.environments())
    assert t4_files(held) == files


def test_every_status_is_a_word_of_t4(tmp_path: Path, world: Any) -> None:
    assert set(INVALIDITY) == set(Status)
    assert set(INVALIDITY.values()) == {"correct", "timeout", "compile", "runtime", "correctness", "constraints"}
    tried = [world.record() if status is Status.OK else failed(world.record(), status) for status in Status]
    environments = {world.environment.id: world.environment}
    (path,) = write(tmp_path / "a", t4_files(Contents(tuple(tried), (), environments)))
    results = json.loads(path.read_bytes())["results"]
    for result in results:
        status = Status(result["fitune"]["status"])
        assert result["invalidity"] == INVALIDITY[status]
        assert result["correctness"] == (0 if status is Status.WRONG_RESULT else 1)
    again = read_t4(path).records
    assert {record.status for record in again} == set(Status)
    assert set(again) == set(tried)


def test_files_have_the_structure_of_the_schema(contents: Contents) -> None:
    """The two schemas of T4 1.0.0 (results and metadata), by hand."""
    for name, data in t4_files(contents).items():
        assert re.fullmatch(r"deepseek-v3_fp8_block128_NVIDIA-H200_L\d+_N\d+_(gemm1|gemm2|layer)\.t4\.json", name)
        value = json.loads(data)
        assert re.fullmatch(r"\d+\.\d+\.\d+", value["schema_version"])
        assert type(value["metadata"]["hardware"]["hardware_description"]) is list
        assert type(value["metadata"]["environment"]["requirements"]) is list
        for result in value["results"]:
            assert {"configuration", "times", "invalidity", "correctness"} <= set(result)
            assert type(result["timestamp"]) is str
            assert all(type(axis) in (str, int, bool) for axis in result["configuration"].values())
            assert type(result["times"]["runtimes"]) is list
            assert result["invalidity"] in INVALIDITY.values()
            assert type(result["correctness"]) is int
            names = []
            for measurement in result["measurements"]:
                assert set(measurement) == {"name", "value", "unit"}
                assert type(measurement["value"]) in (int, float)
                assert type(measurement["unit"]) is str
                names.append(measurement["name"])
            assert set(result["objectives"]) <= set(names) or result["invalidity"] != "correct"


def test_times_and_axes(contents: Contents, world: Any) -> None:
    (data,) = t4_files(Contents((world.record(1),), (), {world.environment.id: world.environment})).values()
    (result,) = json.loads(data)["results"]
    assert result["timestamp"] == "1970-01-01 00:16:41+00:00"
    assert result["times"] == {"runtimes": [0.101]}
    assert result["measurements"][0] == {"name": "time", "value": 101.0, "unit": "us"}
    assert {"name": "time.gemm1", "value": 60.5, "unit": "us"} in result["measurements"]
    axes = result["configuration"]
    assert axes["tactic"] == str(world.record(1).tactic)
    assert (axes["tile_size"], axes["block_n"], axes["schedule"], axes["flatten"]) == (64, 65, "persistent", True)
    named = [result["configuration"] for data in t4_files(contents).values() for result in json.loads(data)["results"]]
    assert any(axes.get("option_align") == 128 and axes["option_mode"] == "fast" for axes in named)
    assert any("gemm1_block_n" in axes and "gemm2_block_k" in axes for axes in named)


def test_names_tell_keys_apart(world: Any) -> None:
    key = world.key()
    layers = [replace(key.layer, device=device) for device in ("GPU one", "GPU/one", "gpu one", "x" * 300)]
    layers += [replace(key.layer, routing="zipf:1.2"), replace(key.layer, dispatch="all_to_all", hidden_size=4096)]
    tried = tuple(replace(world.record(), key=replace(key, layer=layer)) for layer in layers)
    names = list(t4_files(Contents(tried, (), {world.environment.id: world.environment})))
    assert len({name.lower() for name in names}) == len(layers)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]{1,200}", name) for name in names)
    assert sum("GPU-one" in name for name in names) == 2
    assert any("zipf-1.2" in name for name in names)
    assert any("h4096-i2048-e256-k8" in name and "all_to_all" in name for name in names)


def following(decision: Decision) -> Decision:
    """The decision with a choice and a default that follow from its members."""
    default = decision.member(decision.default)
    default_us = 0.0 if default is None else default.measurement.median_us
    return replace(decision, chosen=decision.members[-1].tactic, default_us=default_us)


@settings(max_examples=60, deadline=None)
@given(st.data(), ENVIRONMENTS)
def test_generated_records_come_back(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, environment: Environment
) -> None:
    tried = data.draw(st.lists(records(environment.id), max_size=4))
    drawn = data.draw(st.lists(decisions(environment.id), max_size=2))
    decided = [following(decision) for decision in drawn if decision.members]
    files = t4_files(Contents(tuple(tried), tuple(decided), {environment.id: environment}))
    again = read(write(tmp_path_factory.mktemp("t4"), files))
    assert set(again.records) == set(tried)
    assert set(again.decisions) == set(decided)
    assert t4_files(again) == files


@pytest.fixture
def value(world: Any) -> Any:
    """One file as JSON: two records, a wrong result and a failure, and a decision, of a whole layer."""
    tried = [
        replace(world.record(number), part="layer", tactic=world.tactic(), origin="default") for number in range(2)
    ]
    tried += [failed(tried[0], Status.WRONG_RESULT), world.failure()]
    contents = Contents(tuple(tried), (world.decision(),), {world.environment.id: world.environment})
    (data,) = t4_files(contents).values()
    return json.loads(data)


def refusal(path: Path, content: object) -> str:
    """The one line that says why a file is no good."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    path.write_bytes(data)
    with pytest.raises(StoreError) as error:
        read_t4(path)
    line = str(error.value)
    assert str(path) in line
    assert "\n" not in line
    assert len(line) < 600
    return line


def test_records_without_an_origin(tmp_path: Path, value: Any) -> None:
    del value["results"][0]["fitune"]["origin"]
    path = tmp_path / "a.t4.json"
    path.write_text(json.dumps(value))
    assert [record.origin for record in read_t4(path).records] == ["import:t4", "default", "default", "neighbour:N=32"]


def test_what_others_add_is_passed_over(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "a.t4.json"
    path.write_text(json.dumps(value))
    before = read_t4(path)
    value["metadata"]["zenodo"] = {"doi": "10.5281/zenodo.1"}
    value["metadata"]["hardware"] = {"operating_system": "Linux"}
    value["results"][0]["comment"] = "an outlier"
    path.write_text(json.dumps(value))
    assert read_t4(path) == before


def test_files_of_kernel_tuner_are_refused(tmp_path: Path) -> None:
    foreign = {
        "results": [
            {
                "timestamp": "2022-11-17 12:44:42.156000+00:00",
                "configuration": {"block_size_x": 128, "tile_size_x": 2},
                "times": {"compilation": 440.9, "benchmark": 1.0, "framework": 1.8, "runtimes": [0.8, 0.9]},
                "invalidity": "correct",
                "correctness": 1,
                "measurements": [{"name": "time", "value": 0.85, "unit": "ms"}],
                "objectives": ["time"],
            }
        ],
        "schema_version": "1.0.0",
    }
    line = refusal(tmp_path / "a.json", foreign)
    for word in ("another program's results", "block_size_x, tile_size_x", "metadata.fitune", "configuration.tactic"):
        assert word in line
    assert "another program's results" in refusal(tmp_path / "a.json", {**foreign, "results": [17]})
    assert "holds no results" in refusal(tmp_path / "a.json", {"metadata": {}, "schema_version": "1.0.0"})


WHOLE = "field (whole file): "


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", WHOLE + "no valid JSON"),
        (b"\xff\xfe{", WHOLE + "no valid JSON"),
        (b"[" * 200_000, WHOLE + "no valid JSON"),
        (b'{"a":' * 200_000, WHOLE + "no valid JSON"),
        (b'{"results": [NaN]}', "NaN is no number"),
        (b'{"results": [-Infinity]}', "-Infinity is no number"),
        (b'{"results": [1e999]}', "'1e999' is too large"),
        (b'{"results": [' + b"9" * 6000 + b"]}", WHOLE + "no valid JSON"),
        (b'{"results": [], "results": []}', "'results' stands there twice"),
        (b'{"results": []} {}', WHOLE + "no valid JSON"),
        (b"[]", WHOLE + "a list is no map"),
        (b'{"results": {}, "schema_version": "1.0.0"}', "field results: a dict is no array"),
        (b'{"results": []}', "field schema_version: it is missing"),
        (b'{"results": [], "schema_version": 1}', "field schema_version: 1 is no text"),
        (b'{"results": [], "schema_version": "2.0.0"}', "T4 schema version '2.0.0'; this fitune reads 1.0.0"),
        (b'{"results": [], "schema_version": "1.0.0", "metadata": 3}', "field metadata: 3 is no map"),
    ],
)
def test_what_is_no_such_file(tmp_path: Path, content: bytes, words: str) -> None:
    assert words in refusal(tmp_path / "a.json", content)


DEEP: Any = []
for _ in range(300):
    DEEP = [DEEP]
OWN = ("metadata", "fitune")
FIRST = ("results", 0)


@pytest.mark.parametrize(
    ("place", "odd", "words"),
    [
        ((*OWN, "part"), "gemm3", "metadata.fitune.part: 'gemm3' is not one of"),
        ((*OWN, "part"), "gemm1", "results[0].configuration.tactic: "),
        ((*OWN, "surprise"), 1, "metadata.fitune: 'surprise' is no field"),
        ((*OWN, "key"), None, "metadata.fitune.key: None is no map"),
        ((*OWN, "key", "top_k"), 10**30, "metadata.fitune.key.top_k: a huge number"),
        ((*OWN, "key", "top_k"), 1000, "metadata.fitune.key: "),
        ((*OWN, "key", "num_tokens"), 1.5, "metadata.fitune.key.num_tokens: 1.5"),
        ((*OWN, "environments"), {}, "metadata.fitune.environments: a dict is no array"),
        ((*OWN, "environments", 0, "num_sms"), True, "metadata.fitune.environments[0].num_sms: True"),
        ((*OWN, "environments", 0, "device"), "a\u0007b", "metadata.fitune.environments[0].device: "),
        ((*OWN, "regimes", 0, "interleaved"), 1, "metadata.fitune.regimes[0].interleaved: 1 is neither"),
        ((*OWN, "decisions", 0, "chosen"), "t64", "metadata.fitune.decisions[0].chosen: "),
        ((*OWN, "decisions", 0, "noise"), -1, "metadata.fitune.decisions[0].noise: "),
        ((*OWN, "decisions", 0, "members", 1, "tied"), "no", "metadata.fitune.decisions[0].members[1].tied: 'no'"),
        (
            (*OWN, "decisions", 0, "members", 0, "regime"),
            7,
            "metadata.fitune.decisions[0].members[0].measurement.regime",
        ),
        (FIRST, DEEP, "results[0]: a list is no map"),
        ((*FIRST, "fitune"), [], "results[0].fitune: a list is no map"),
        ((*FIRST, "fitune", "status"), "fine", "results[0].status: 'fine' is not one of"),
        ((*FIRST, "fitune", "status"), ["ok"], "results[0].status: a list is not one of"),
        ((*FIRST, "fitune", "status"), "timeout", "results[0].measurement: a record with status timeout holds a"),
        ((*FIRST, "fitune", "time_s"), 10**400, "results[0].time_s: a huge number is no number"),
        ((*FIRST, "fitune", "time_s"), 5.0, "results[0].timestamp: '1970-01-01 00:16:40+00:00' contradicts"),
        ((*FIRST, "fitune", "environment"), 1, "results[0].environment: 1 was not defined"),
        ((*FIRST, "fitune", "run_id"), "", "results[0].fitune.run_id: the text is empty"),
        ((*FIRST, "fitune", "origin"), 3, "results[0].origin: 3 is no text"),
        ((*FIRST, "fitune", "error"), "x" * 5000, "results[0].error: "),
        ((*FIRST, "fitune", "infinite"), ["time"], "results[0].fitune.infinite: 'time' is not one of"),
        ((*FIRST, "fitune", "infinite"), ["max_abs_error"], "results[0].measurements: a list does not hold"),
        ((*FIRST, "configuration"), 1, "results[0].configuration: 1 is no map"),
        ((*FIRST, "configuration", "tactic"), DEEP, "results[0].tactic: a list is no text"),
        ((*FIRST, "configuration", "tactic"), "t64 g1:auto", "results[0].tactic: "),
        ((*FIRST, "configuration", "tile_size"), 128, "results[0].configuration.tile_size: 128 contradicts"),
        ((*FIRST, "configuration", "gemm1_flatten"), 1, "results[0].configuration.gemm1_flatten: 1 contradicts"),
        ((*FIRST, "configuration", "more"), 1, "results[0].configuration: a dict does not hold"),
        ((*FIRST, "invalidity"), "compile", "results[0].invalidity: 'compile' contradicts"),
        ((*FIRST, "correctness"), 0, "results[0].correctness: 0 contradicts"),
        ((*FIRST, "times"), None, "results[0].times: None does not hold"),
        ((*FIRST, "times", "runtimes", 0), 3, "results[0].times.runtimes[0]: 3 contradicts"),
        ((*FIRST, "measurements"), "many", "results[0].measurements: 'many' is no array"),
        ((*FIRST, "measurements", 0), {}, "results[0].measurements[0].name: it is missing"),
        ((*FIRST, "measurements", 0, "value"), 0, "results[0].measurement.median_us: 0.0 is not a finite number above"),
        ((*FIRST, "measurements", 0, "value"), 1e9, "results[0].measurement.median_us: 1000000000.0 lies outside"),
        ((*FIRST, "measurements", 0, "unit"), "ms", "results[0].measurements[0].unit: 'ms' stands where 'us' belongs"),
        ((*FIRST, "measurements", 0, "name"), "gflops", "results[0].measurements[0].name: 'gflops' is no measurement"),
        ((*FIRST, "measurements", 1, "name"), "time", "results[0].measurements[1].name: 'time' is no measurement"),
        ((*FIRST, "measurements", 3, "value"), 0.5, "results[0].measurement.samples: 0.5"),
    ],
)
def test_odd_values(tmp_path: Path, value: Any, place: tuple[str | int, ...], odd: object, words: str) -> None:
    *path, last = place
    inner = value
    for step in path:
        inner = inner[step]
    inner[last] = odd
    assert f"field {words}" in refusal(tmp_path / "a.json", value)


def test_missing_fields(tmp_path: Path, value: Any) -> None:
    for path, words in [
        ((*OWN, "key"), "metadata.fitune.key: it is missing"),
        ((*OWN, "key", "device"), "metadata.fitune.key.device: it is missing"),
        ((*OWN, "environments", 0, "arch"), "metadata.fitune.environments[0].arch: it is missing"),
        ((*OWN, "decisions", 0, "members"), "metadata.fitune.decisions[0].members: it is missing"),
        ((*FIRST, "fitune"), "results[0].fitune: it is missing"),
        ((*FIRST, "fitune", "time_s"), "results[0].fitune.time_s: it is missing"),
        ((*FIRST, "configuration", "tactic"), "results[0].configuration.tactic: it is missing"),
        ((*FIRST, "measurements"), "results[0].measurements: it is missing"),
        ((*FIRST, "measurements", 0), "results[0].measurement.median_us: None is no number"),
        ((*FIRST, "correctness"), "results[0].correctness: None contradicts"),
    ]:
        changed = inner = copy.deepcopy(value)
        for step in path[:-1]:
            inner = inner[step]
        del inner[path[-1]]
        assert f"field {words}" in refusal(tmp_path / "a.json", changed)


def test_newer_and_larger_files(tmp_path: Path, value: Any, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    value["metadata"]["fitune"] = {"format": 2}
    path.write_text(json.dumps(value))
    with pytest.raises(NewerStoreError, match="format 2, this fitune reads 1"):
        read_t4(path)
    with open(path, "wb") as file:
        file.truncate(1 << 30)  # a file that claims to be large and takes no room
    with pytest.raises(StoreError, match="1073741824 bytes are more than"):
        read_t4(path)
    with pytest.raises(StoreError, match=r"no T4 file at .*none\.json"):
        read_t4(tmp_path / "none.json")
    with pytest.raises(StoreError, match="it is a folder, not a file"):
        read_t4(tmp_path)
    monkeypatch.setattr(t4, "MAX_T4_BYTES", 1000)
    with pytest.raises(StoreError, match="1 results need more than 1000 bytes"):
        t4_files(Contents((world.record(),), (), {world.environment.id: world.environment}))


ODD = st.none() | st.booleans() | st.integers(-9, 2**70) | st.text(max_size=5) | st.just([]) | st.just({}) | st.floats()


@settings(max_examples=200, deadline=None)
@given(rng=st.randoms(use_true_random=False), odd=ODD)
def test_changed_files_are_sound_or_refused(
    tmp_path_factory: pytest.TempPathFactory, world: Any, rng: random.Random, odd: Any
) -> None:
    tried = (world.record(), world.record(1), failed(world.record(3), Status.WRONG_RESULT))
    environments = {world.environment.id: world.environment}
    content = json.loads(next(iter(t4_files(Contents(tried, (world.decision(),), environments)).values())))
    place: Any = content
    while True:
        position = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
        inner = place[position]
        if not isinstance(inner, list | dict) or not inner or rng.random() < 0.05:
            break
        place = inner
    place[position] = odd
    path = tmp_path_factory.mktemp("t4") / "a.t4.json"
    path.write_text(json.dumps(content))
    try:
        found = read_t4(path)
    except StoreError as error:
        line = str(error)
    else:
        assert set(read(write(path.parent, t4_files(found))).records) == set(found.records)
        return
    assert str(path) in line
    assert "\n" not in line
