"""The whole MoE layer against torch's grouped GEMM, dense cuBLAS, the best peer and the floor, on this machine's GPU.

    python scripts/bench_layer.py --model deepseek-v3 --dtype bf16 --ep 1,8,16 --store DIR --csv OUT.csv --plot OUT.png
    python scripts/bench_layer.py ... --csv OUT.csv --resume --budget 240s     # goes on with the cells not in OUT.csv
    python scripts/bench_layer.py --from OUT.csv --plot OUT.png                # needs no GPU

Timed in each cell (token count x EP size), in one process: fitune with the store's tactic, fitune with its default
tactic, torch's grouped GEMMs with our sort, permute, SwiGLU and combine, and one dense GEMM pair with as many rows. All
but the last are compared with the float32 reference first, on poisoned buffers and on inputs of another seed; what is
wrong is said and not timed. Times are CUDA-graph replays with cold L2, the contenders in turns, another one starting
each round; median, fastest and slowest of the rounds are kept. From 2,048 tokens on, where the power cap sets the
clock, the cell runs its own load for `--sustain` seconds first. Where the store has nothing better than the default,
both columns time the same tactic: their difference is noise.

The floor is that of the peers' table: FLOPs at 790 TFLOP/s (fp8: 1,530) or bytes at 4.70 TB/s. `x floor`, TFLOP/s and
GB/s are fitune's; `ratio` is fitune's time over the best peer's, whose times come from another run.

A row is written as soon as its cell is done. Beside OUT.csv, OUT.env.json holds the environments by their id.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from layer_rows import (
    CONTENDERS,
    NOT_ASKED,
    OK,
    Row,
    RowFile,
    bytes_of,
    floor_us,
    flops_of,
    heading,
    is_fp8,
    line_of,
    means,
    peer_fields,
    read_rows,
    tensor_flops_per_us,
)
from results_data import PeerCell, read_peers

from fitune.bucket import find_bucket
from fitune.cache import Table
from fitune.cache.store import load_table
from fitune.cli.inputs import read_layer, seconds_of, token_counts, whole_numbers
from fitune.errors import FituneError, InputError, MeasureError, NoGpuError
from fitune.problem import LayerShape, Problem, layer_key, local_experts_of_ep
from fitune.space import default_tactic
from fitune.tactic import Tactic
from fitune.target import Environment, Target, kernel_source_hash

if TYPE_CHECKING:
    from layer_race import Machine

COMPUTE_BOUND_TOKENS: Final = 2048
PEERS_SHAPE: Final = (7168, 2048, 256, 8)
PEERS_FOLDER: Final = Path(__file__).resolve().parent.parent / "docs" / "data"
RIVALS: Final = CONTENDERS[2:]


@dataclass(frozen=True, slots=True)
class Cell:
    """One problem, its EP size, and the tactics that run it; a text stands for the reason why there is none."""

    ep: int
    problem: Problem
    tactics: Mapping[str, Tactic | str]
    tuned_tokens: int
    stale: bool


class Run:
    """One sweep: what was asked for, the machine, and the file that grows."""

    def __init__(self, given: argparse.Namespace, name: str, machine: Machine, file: RowFile, table: Table) -> None:
        self.given, self.name, self.machine, self.file, self.table = given, name, machine, file, table
        self._told: set[str] = set()

    def cells(self, shape: LayerShape) -> list[Cell]:
        """Every cell that is not in the file yet, EP by EP, tokens rising."""
        done = {row.cell for row in self.file.rows}
        return [
            cell_of(ep, Problem(shape, local, tokens), self.table, self.machine.target)
            for ep in whole_numbers(self.given.ep, "--ep")
            for local in local_experts_of_ep(shape.num_experts, ep)
            for tokens in token_counts(self.given.tokens)
            if (self.name, shape.dtype, ep, local, tokens) not in done
        ]

    def sweep(self, cells: Sequence[Cell], peers: Mapping[tuple[int, int], PeerCell]) -> str:
        """Measure cell after cell; the reason why it ended before the last one, or nothing."""
        began_s = time.monotonic()
        for cell in cells:
            tactics = [tactic for tactic in cell.tactics.values() if isinstance(tactic, Tactic)]
            self.machine.compile_ahead(cell.problem, tactics)
        print(heading())
        for left, cell in zip(range(len(cells), 0, -1), cells, strict=True):
            if self.given.budget is not None and time.monotonic() - began_s >= seconds_of(self.given.budget):
                return f"the budget of {self.given.budget} is spent with {left} cells left; go on with --resume"
            try:
                row, lost = self._measure(cell, peers.get((cell.ep, cell.problem.num_tokens)))
            except MeasureError as error:
                print(f"EP {cell.ep}, {cell.problem.num_tokens} tokens: left out: {error}", flush=True)
                continue
            self.file.append(row)
            print(line_of(row), flush=True)
            self._tell(cell, row)
            if lost:
                where = f"EP {cell.ep}, {cell.problem.num_tokens} tokens"
                return f"{lost} at {where}: nothing more can be measured in this process; go on with --resume"
        return ""

    def _measure(self, cell: Cell, peer: PeerCell | None) -> tuple[Row, str]:
        given, problem, machine = self.given, cell.problem, self.machine
        shape, tokens = problem.shape, problem.num_tokens
        sustain_s = given.sustain if tokens >= COMPUTE_BOUND_TOKENS else 0.0
        result = machine.measure(problem, cell.tactics, given.rounds, sustain_s, given.rivals)
        load = result.load
        row = Row(
            self.name, shape.dtype, machine.target.device, cell.ep, problem.local_experts, tokens,
            load.rows, load.active, flops_of(shape, load), bytes_of(shape, tokens, load), floor_us(shape, tokens, load),
            tensor_flops_per_us(shape.dtype), _text(cell.tactics["fitune"]), cell.tuned_tokens,
            _text(cell.tactics["default"]), given.rounds, sustain_s, machine.timer.name, result.l2,
            result.reading.sm_mhz, result.reading.power_w, machine.environment.id, self.table.hash,
            **peer_fields(peer), times=result.times,
        )  # fmt: skip
        return row, result.lost

    def _tell(self, cell: Cell, row: Row) -> None:
        """Say once each why something was not timed, and that a tactic was tuned for other kernels."""
        notes = [f"{name}: {timed.status}" for name, timed in row.times.items() if timed.status not in (OK, NOT_ASKED)]
        if cell.stale:
            notes.append("fitune: the store's tactics were tuned with other kernel sources")
        if row.l2 == "warm":
            notes.append(f"fitune: some weights may be in L2 at EP {row.ep}, {row.tokens} tokens")
        for note in notes:
            if note not in self._told:
                self._told.add(note)
                print(f"     {note}", flush=True)


def _text(tactic: Tactic | str) -> str:
    return str(tactic) if isinstance(tactic, Tactic) else ""


def cell_of(ep: int, problem: Problem, table: Table, target: Target) -> Cell:
    """The cell with the table's tactic for it: what dispatch would run."""
    default = default_tactic(problem, target)
    entries = table.layers.get(layer_key(problem, target.device), ())
    index = find_bucket([entry.bucket for entry in entries], problem.num_tokens)
    if index is None:
        missing = f"the store has no tactic for {problem.ep_label}, {problem.num_tokens} tokens on {target.device}"
        return Cell(ep, problem, {"fitune": missing, "default": default}, 0, False)
    entry = entries[index]
    stale = entry.environment.kernels != kernel_source_hash()
    return Cell(ep, problem, {"fitune": entry.tactic, "default": default}, entry.key.num_tokens, stale)


def find_peers(path: Path | None, shape: LayerShape) -> dict[tuple[int, int], PeerCell]:
    """The peers' table at `path`, or the repository's for this dtype; nothing where there is none for this layer."""
    sizes = (shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.top_k)
    if path is None:
        path = PEERS_FOLDER / f"peers_h200_{'fp8' if is_fp8(shape.dtype) else shape.dtype}.csv"
        if sizes != PEERS_SHAPE or not path.exists():
            return {}
    elif sizes != PEERS_SHAPE:
        raise InputError(
            f"--peers {path}: the peers were measured on DeepSeek-V3's layer, not on {sizes}; leave it out"
        )
    try:
        return read_peers(path)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise InputError(
            f"--peers {path} is no table of peers ({error}); name one like docs/data/peers_h200_bf16.csv"
        ) from error


def write_environment(path: Path, environment: Environment, given: argparse.Namespace) -> None:
    """Add this run's environment and options to the file beside the CSV."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"environments": {}, "runs": []}
    known["environments"][environment.id] = asdict(environment)
    options = {name: getattr(given, name) for name in ("dtype", "ep", "tokens", "rounds", "sustain", "seed", "rivals")}
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    known["runs"].append({"environment": environment.id, "began": began, **options})
    path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def open_machine(given: argparse.Namespace, experts: int) -> Machine:
    """The device, if kernels can run on it. Raises NoGpuError and InputError."""
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    if given.device.startswith("cuda") == interpreted:
        value = "1" if not interpreted else "0"
        raise InputError(f"--device {given.device}: kernels cannot run there; set TRITON_INTERPRET={value}")
    from layer_race import Machine, has_gpu

    if given.device.startswith("cuda") and not has_gpu():
        raise NoGpuError("no usable GPU: this script times kernels; run it on a machine with one, or --from OUT.csv")
    return Machine(given.device, given.seed, experts, given.jobs)


def measure(given: argparse.Namespace) -> tuple[list[Row], str]:
    """The sweep that the options name: all rows of the file, and why it ended early if it did."""
    for option, value in (("--store DIR", given.store), ("--csv OUT.csv", given.csv)):
        if value is None:
            raise InputError(f"{option} is missing; give it, or --from OUT.csv to draw an earlier run")
    layer = read_layer(given.model, None, given.shape, given.dtype, 0)
    shape = layer.shape
    sizes = whole_numbers(given.ep, "--ep")
    token_counts(given.tokens)
    peers = find_peers(given.peers, shape)
    table = load_table(given.store)
    machine = open_machine(given, max(max(local_experts_of_ep(shape.num_experts, size)) for size in sizes))
    try:
        file = RowFile(given.csv, resume=given.resume)
        write_environment(given.csv.with_suffix(".env.json"), machine.environment, given)
        run = Run(given, layer.name, machine, file, table)
        cells = run.cells(shape)
        print(
            f"{layer.name}, {shape.dtype}, {machine.target.device}, {len(cells)} cells, {len(file.rows)} in {given.csv}"
        )
        return file.rows, run.sweep(cells, peers)
    finally:
        machine.close()


def report(rows: Sequence[Row], plot: Path | None) -> None:
    for line in means(rows):
        print(line)
    if plot is not None:
        try:
            from layer_plot import plot_roofline
        except ModuleNotFoundError as error:
            raise InputError(f"--plot needs {error.name}; install it and draw with --from") from error
        plot_roofline(rows, plot)
        print(f"plot: {plot}")


def rivals_of(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in RIVALS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(RIVALS)}; write a list, or '' for none")
    return names


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a known model; deepseek-v3 where no --shape is given")
    parser.add_argument("--shape", help="the layer's sizes, like H=7168,I=2048,E=256,K=8")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--ep", default="1,8,16")
    parser.add_argument("--tokens", help="like 1,2,4 or 64:1024; 1, 2, 4 ... 16384 when it is not given")
    parser.add_argument("--store", type=Path, help="a store's folder or a table file")
    parser.add_argument("--csv", type=Path, help="where the rows go")
    parser.add_argument("--plot", type=Path, help="draw the roofline into this PNG or SVG")
    parser.add_argument("--from", dest="source", type=Path, metavar="CSV", help="measure nothing, read these rows")
    parser.add_argument(
        "--peers",
        type=Path,
        help="the peers' CSV; by default the one in docs/data for this dtype (fp8: of 128x128 scales)",
    )
    parser.add_argument("--rivals", type=rivals_of, default=list(RIVALS), help="default: grouped_mm,cublas")
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument(
        "--sustain", type=float, default=2.0, help="seconds of load before cells of 2,048 tokens or more"
    )
    parser.add_argument("--budget", help="begin no cell after this long: 240s, 10m")
    parser.add_argument("--resume", action="store_true", help="go on with a CSV that has rows")
    parser.add_argument("--jobs", type=int, help="processes that compile ahead; 0 for none")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs that are timed")
    parser.add_argument("--device", default="cuda:0", help="`cpu` interprets the kernels: for trying the script out")
    given = parser.parse_args(arguments)
    if given.model is None and given.shape is None:
        given.model = "deepseek-v3"
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    try:
        if given.budget is not None:
            seconds_of(given.budget)
        rows, ended = (read_rows(given.source), "") if given.source else measure(given)
        if ended:
            print(ended)
        if not rows:
            raise InputError(f"{given.source or given.csv} holds no rows; measure some first")
        report(rows, given.plot)
    except FituneError as error:
        print(f"bench_layer: error: {error}", file=sys.stderr)
        return error.exit_code
    return 1 if ended.startswith(("the GPU", "a CUDA")) else 0


if __name__ == "__main__":
    sys.exit(main())
