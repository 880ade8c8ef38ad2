"""The layer benchmark: floors, the file that survives a kill, means, and the whole path on interpreted kernels."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from fitune.cache.table import table_of
from fitune.errors import InputError
from fitune.problem import DTYPES, LayerShape, Problem, key_of
from fitune.record import Decision, Measurement, Member, Regime
from fitune.space import default_tactic
from fitune.tactic import GemmTactic, Tactic
from fitune.target import Environment, kernel_source_hash

ROOT = Path(__file__).resolve().parent.parent
DEEPSEEK = LayerShape(7168, 2048, 256, 8)
SMALL = LayerShape(32, 16, 4, 2, "fp32")
SIZES = "H=32,I=16,E=4,K=2"
# EP, tokens, rows, active experts and floor of lines of the peers' fp8 table.
FP8_FLOORS = [
    (1, 16, 128, 99, 927.8),
    (1, 2048, 16384, 256, 2423.0),
    (8, 16384, 16394, 32, 943.8),
    (16, 4096, 1999, 16, 166.8),
]


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    """The script and its modules, imported as Python imports them for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        names = ("bench_layer", "layer_rows", "layer_race", "layer_rivals", "layer_plot", "results_data")
        modules: dict[str, ModuleType] = {name: importlib.import_module(name) for name in names}
        yield SimpleNamespace(**modules)
        for name in names:
            sys.modules.pop(name, None)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table that has a tactic other than the default for two tokens and no other count."""
    from fitune.measure.device import device_target

    target, problem = device_target("cpu"), Problem(SMALL, 4, 2)
    here = Environment(target.device, target.arch, 4, "0.1.0", kernel_source_hash())
    gemm = GemmTactic(32, 32, 8, 4, 2)
    chosen, measured = Tactic("tile", 16, gemm, gemm), Measurement(1.0, 1.0, 1.0, 1, Regime())
    key, members = key_of(problem, target.device), (Member(chosen, measured, True),)
    decision = Decision(key, chosen, members, default_tactic(problem, target), 1.0, 0.0, "test", here.id, "test", 0.0)
    path = tmp_path / "table.fitable"
    path.write_bytes(table_of([decision], {here.id: here}).to_bytes())
    return path


@pytest.fixture
def row(scripts: SimpleNamespace) -> Any:
    timed = scripts.layer_rows.Timed
    times = {
        "fitune": timed("ok", 200.0, 190.0, 214.0, 0.002),
        "default": timed("ok", 220.0, 219.0, 221.0, 0.002),
        "grouped_mm": timed("wrong result: NaN, and a comma"),
        "cublas": timed("ok", 100.0, 99.0, 101.0),
    }
    return scripts.layer_rows.Row(
        "deepseek-v3", "bf16", "NVIDIA H200", 8, 32, 64, 512, 32, 4.5e10, 2.8e9, 160.0, 790e6, "t16", 64, "t32", 7,
        0.0, "graph", "cold", 1755.0, 640.0, "abc", "def", "some_peer", 250.0, 125.0, 510, times,
    )  # fmt: skip


def run(scripts: SimpleNamespace, *arguments: object) -> int:
    """The script on the CPU; tests of everything but the GPU go through its own command line."""
    given = ["--device", "cpu", "--shape", SIZES, "--dtype", "fp32", "--ep", "1", "--rounds", "2"]
    code: int = scripts.bench_layer.main([*given, *map(str, arguments)])
    return code


def test_floors_are_those_of_the_peers_tables(scripts: SimpleNamespace) -> None:
    peers = scripts.results_data.read_peers(ROOT / "docs" / "data" / "peers_h200_bf16.csv")
    for (_, tokens), peer in peers.items():
        assert scripts.layer_rows.floor_us(DEEPSEEK, tokens, peer.load) == pytest.approx(
            peer.floor_us, rel=2e-3, abs=0.1
        )
    fp8 = SimpleNamespace(hidden_size=7168, intermediate_size=2048, item_bytes=1, dtype="fp8_block128")
    for ep, tokens, rows, active, floor in FP8_FLOORS:
        load = scripts.results_data.Load(rows, active, tokens * (1.0 - (1.0 - 1.0 / ep) ** 8))
        assert scripts.layer_rows.floor_us(fp8, tokens, load) == pytest.approx(floor, rel=2e-4)


def test_rows_survive_the_file(scripts: SimpleNamespace, row: Any, tmp_path: Path) -> None:
    file = scripts.layer_rows.RowFile(tmp_path / "new" / "rows.csv", resume=False)
    file.append(row)
    assert scripts.layer_rows.read_rows(file.path) == [row]
    assert row.ratio == pytest.approx(0.8) and row.ratio_over_floor == pytest.approx(0.625)
    assert row.times["fitune"].spread == pytest.approx(0.06) and row.times["grouped_mm"].spread == 0.0
    assert (row.tflops, row.gb_s) == (pytest.approx(225.0), pytest.approx(14_000.0))


def test_a_line_cut_off_by_a_kill_is_measured_again(scripts: SimpleNamespace, row: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    file = scripts.layer_rows.RowFile(path, resume=False)
    file.append(row)
    file.append(replace(row, tokens=128))
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    assert [found.tokens for found in scripts.layer_rows.read_rows(path)] == [64]
    again = scripts.layer_rows.RowFile(path, resume=True)
    assert [found.tokens for found in again.rows] == [64]
    again.append(replace(row, tokens=128))
    assert path.read_bytes() == whole


def test_files_that_cannot_be_used_are_refused(scripts: SimpleNamespace, row: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    scripts.layer_rows.RowFile(path, resume=False).append(row)
    with pytest.raises(InputError, match="--resume"):
        scripts.layer_rows.RowFile(path, resume=False)
    text = path.read_text()
    path.write_text(text.replace("64,512", "many,512"))
    with pytest.raises(InputError, match="line 2"):
        scripts.layer_rows.RowFile(path, resume=True)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="columns"):
        scripts.layer_rows.RowFile(path, resume=True)
    with pytest.raises(InputError, match="cannot read"):
        scripts.layer_rows.read_rows(tmp_path / "missing.csv")


def test_means_are_geometric_and_leave_out_what_was_not_timed(scripts: SimpleNamespace, row: Any) -> None:
    failed = replace(row, ep=1, times=row.times | {"fitune": scripts.layer_rows.Timed("failed: no")})
    faster = replace(row, times=row.times | {"fitune": replace(row.times["fitune"], us=50.0)}, peer_us=0.0)
    *_, first, second, overall = (line.split() for line in scripts.layer_rows.means([row, faster, failed]))
    assert first == ["1", "0", *"-------"]
    assert second == ["8", "2", "0.625", "0.800", "0.625", "2.000", "2.200", "-", "1.000"]
    assert overall[1:] == second[1:]


def test_lines_are_aligned_and_say_what_is_wrong(scripts: SimpleNamespace, row: Any) -> None:
    line, heading = scripts.layer_rows.line_of(row), scripts.layer_rows.heading()
    assert len(line) == len(heading)
    assert line.split() == [
        "8", "64", "16", "200.0", "6.0%", "220.0", "wrong", "100.0", "160.0", "1.25", "225.0", "14000", "250.0",
        "0.800", "1755", "640",
    ]  # fmt: skip


def test_the_whole_path_on_interpreted_kernels(
    scripts: SimpleNamespace, table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, plot = tmp_path / "out.csv", tmp_path / "out.png"
    assert run(scripts, "--tokens", "2,8", "--store", table, "--csv", path, "--plot", plot) == 0
    tuned, untuned = scripts.layer_rows.read_rows(path)
    assert (tuned.tokens, tuned.tuned_tokens, tuned.timer, tuned.ep) == (2, 2, "host", 1)
    assert all(timed.ok and timed.min_us <= timed.us <= timed.max_us for timed in tuned.times.values())
    assert 0.0 < tuned.times["grouped_mm"].rms < 1e-4 and tuned.tactic.startswith("t16 ") and tuned.default_tactic
    assert untuned.times["fitune"].status.startswith("the store has no tactic") and untuned.us == 0.0
    assert untuned.times["default"].ok and untuned.times["grouped_mm"].ok
    assert plot.stat().st_size > 10_000 and tuned.environment in path.with_suffix(".env.json").read_text()
    assert "the store has no tactic for EP 1, 8 tokens" in capsys.readouterr().out
    before = path.read_bytes()
    assert run(scripts, "--tokens", "2,8", "--store", table, "--csv", path, "--resume") == 0
    assert path.read_bytes() == before and "0 cells" in capsys.readouterr().out
    assert scripts.bench_layer.main(["--from", str(path), "--plot", str(plot)]) == 0


def test_a_wrong_rival_is_said_and_not_timed(
    scripts: SimpleNamespace, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = scripts.layer_rivals.Grouped._second
    monkeypatch.setattr(scripts.layer_rivals.Grouped, "_second", lambda *given: 1.5 * right(*given))
    path = tmp_path / "out.csv"
    assert run(scripts, "--tokens", "2", "--store", table, "--csv", path, "--rivals", "grouped_mm") == 0
    (row,) = scripts.layer_rows.read_rows(path)
    assert row.times["grouped_mm"].status.startswith("wrong result") and row.times["grouped_mm"].us == 0.0
    assert row.times["fitune"].ok and row.times["cublas"].status == "not asked for"


def test_a_rival_that_raises_costs_its_column_only(
    scripts: SimpleNamespace, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object) -> None:
        raise RuntimeError("not on this chip")

    monkeypatch.setattr(scripts.layer_rivals.Dense, "__call__", refuse)
    path = tmp_path / "out.csv"
    assert run(scripts, "--tokens", "2", "--store", table, "--csv", path, "--rivals", "cublas") == 0
    (row,) = scripts.layer_rows.read_rows(path)
    assert "not on this chip" in row.times["cublas"].status and row.times["fitune"].ok


def test_a_spent_budget_begins_no_cell(
    scripts: SimpleNamespace, table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.csv"
    assert run(scripts, "--tokens", "2", "--store", table, "--csv", path, "--budget", "0.000001s") == 2
    captured = capsys.readouterr()
    assert "go on with --resume" in captured.out and "holds no rows" in captured.err
    assert scripts.layer_rows.read_rows(path) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--csv", "x.csv"], "--store DIR is missing"),
        (["--store", "x"], "--csv OUT.csv is missing"),
        (["--from", "missing.csv"], "cannot read missing.csv"),
        (["--store", "missing", "--csv", "x.csv"], "missing"),
        (["--store", "x", "--csv", "x.csv", "--dtype", "int3"], "'int3'"),
        (["--store", "x", "--csv", "x.csv", "--budget", "soon"], "'soon'"),
        (["--store", "x", "--csv", "x.csv", "--shape", SIZES, "--peers", "p.csv"], "leave it out"),
    ],
)
def test_mistakes_cost_one_line(
    scripts: SimpleNamespace, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scripts.bench_layer.main(arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1 and not captured.out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_one_line(
    scripts: SimpleNamespace,
    table: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert scripts.bench_layer.main(["--store", str(table), "--csv", str(tmp_path / "x.csv")]) == 3
    assert "no usable GPU" in capsys.readouterr().err and not (tmp_path / "x.csv").exists()


class TurnTimer:
    """A timer that notes the order of what it is given."""

    name, lost = "host", False

    def __init__(self) -> None:
        self.lines: list[str] = []

    def samples(self, regions: list[Any]) -> list[float]:
        self.lines.append("".join(region.label for region in regions))
        return [float(len(self.lines))] * len(regions)


def test_contenders_take_turns_and_the_start_rotates(scripts: SimpleNamespace) -> None:
    machine = object.__new__(scripts.layer_race.Machine)
    machine.timer, machine.gauge = TurnTimer(), scripts.layer_race.Gauge("cpu")
    regions = {label: SimpleNamespace(label=label, calls=1) for label in "abc"}
    series, _ = machine._race(regions, 4, 0.0)
    assert machine.timer.lines == ["abc", "abc", "bca", "cab", "abc"]  # the first one warms up
    assert series == {label: [2.0, 3.0, 4.0, 5.0] for label in "abc"}


def test_dense_weights_take_turns_until_l2_is_cold(scripts: SimpleNamespace) -> None:
    l2_bytes = 60 << 20
    turns = scripts.layer_race.dense_turns(DEEPSEEK, 16, l2_bytes)
    assert turns * DEEPSEEK.expert_bytes >= 4 * l2_bytes > (turns - 1) * DEEPSEEK.expert_bytes
    assert scripts.layer_race.dense_turns(DEEPSEEK, 2, l2_bytes) == 2
    assert scripts.layer_race.dense_calls(DEEPSEEK, 1, turns) % turns == 0
    assert scripts.layer_race.dense_calls(DEEPSEEK, 1, turns) >= 200.0 / 19.0
    assert scripts.layer_race.dense_calls(DEEPSEEK, 16384, 3) == 3


def rounded_by_torch(
    source: torch.Tensor, out: torch.Tensor, scales: torch.Tensor, slots: torch.Tensor | None = None, top_k: int = 1
) -> None:
    """What layer_rivals.quantize_rows does."""
    tokens = slice(None) if slots is None else slots[: out.shape[0]].long() // top_k
    values = source[tokens].float()
    scales.copy_(values.abs().amax(1) / 448.0)
    out.copy_((values / scales[:, None]).to(torch.float8_e4m3fn))


@pytest.mark.parametrize("gather", [False, True])
def test_rows_are_quantised_with_scales_of_their_own(scripts: SimpleNamespace, gather: bool) -> None:
    source = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    slots = torch.tensor([5, 0, 7, 2], dtype=torch.int32) if gather else None
    results = []
    for quantize in (scripts.layer_rivals.quantize_rows, rounded_by_torch):
        out, scales = torch.empty(4, 300, dtype=torch.float8_e4m3fn), torch.empty(4)
        quantize(source, out, scales, slots, 2)
        results.append((out.view(torch.uint8), scales))
    (actual, scales), (expected, expected_scales) = results
    assert torch.equal(scales, expected_scales)
    assert (actual == expected).float().mean() > 0.95  # the interpreter rounds some values to a neighbour


@pytest.mark.skipif("fp8_channel" not in DTYPES, reason="no fp8 layers")
@pytest.mark.parametrize("dtype", [name for name in DTYPES if name.startswith("fp8")])
def test_the_fp8_chain_computes_the_layer(
    scripts: SimpleNamespace, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a product that does in float32 what the row-wise grouped GEMM does; the interpreter's cast to e4m3 is off."""

    def product(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, **how: Any) -> Any:
        rows, begin = [], 0
        for expert, end in enumerate(how["offs"].tolist()):
            part = a[begin:end].float() * scale_a[begin:end, None]
            rows.append(part @ (b[expert].float() * scale_b[expert]))
            begin = end
        return torch.cat(rows).to(how["out_dtype"])

    from fitune.measure.device import device_target
    from fitune.measure.inputs import ProblemInputs, WeightBank

    monkeypatch.setattr(torch, "_scaled_grouped_mm", product)
    monkeypatch.setattr(scripts.layer_rivals, "quantize_rows", rounded_by_torch)
    problem = Problem(LayerShape(128, 64, 4, 2, dtype), 3, 9)
    inputs = ProblemInputs(problem, device_target("cpu"), WeightBank("cpu", 0), "cpu", 0)
    chain = scripts.layer_rivals.grouped_chain(inputs)
    assert 0.02 < chain.check() < 0.06
    monkeypatch.setattr(torch, "_scaled_grouped_mm", lambda *given, **how: 1.5 * product(*given, **how))
    with pytest.raises(scripts.layer_rivals.WrongResultError):
        chain.check()
    dense = scripts.layer_rivals.Dense(inputs)
    dense(1)


def test_a_lost_context_ends_the_run_with_its_row_written(
    scripts: SimpleNamespace,
    table: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def lose(chain: object) -> float:
        raise RuntimeError("an illegal memory access was encountered")

    def wait_in_vain(*given: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(scripts.layer_rivals.Grouped, "check", lose)
    monkeypatch.setattr(scripts.layer_race.HostTimer, "wait", wait_in_vain)
    path = tmp_path / "out.csv"
    assert run(scripts, "--tokens", "2,8", "--store", table, "--csv", path) == 1
    (row,) = scripts.layer_rows.read_rows(path)
    assert row.tokens == 2 and not any(timed.us for timed in row.times.values())
    assert "the GPU context was lost at EP 1, 2 tokens" in capsys.readouterr().out
