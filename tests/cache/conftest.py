"""A small made-up world of keys, environments, records and decisions."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fitune.cache import Store
from fitune.problem import Key, LayerShape, Problem, key_of
from fitune.record import Accuracy, Decision, Measurement, Member, Record, Regime, Status
from fitune.tactic import GemmTactic, Tactic
from fitune.target import Environment

sys.path.insert(0, str(Path(__file__).parent))  # for strategies.py, which several test modules share

SHAPE = LayerShape(7168, 2048, 256, 8)
ENVIRONMENT = Environment("NVIDIA H200", "sm_90", 132, "0.1.0", "0123456789abcdef", torch="2.13.0", power_cap_w=700.0)


class World:
    """Makes items; the same arguments make equal ones."""

    environment = ENVIRONMENT
    old_environment = replace(ENVIRONMENT, kernels="fedcba9876543210")
    shape = SHAPE

    def key(self, num_tokens: int = 16, local_experts: int = 32) -> Key:
        return key_of(Problem(self.shape, local_experts, num_tokens), "NVIDIA H200")

    def tactic(self, tile_size: int = 64, block_n: int = 128) -> Tactic:
        first = GemmTactic(block_n, 64, 8, 4, 5, "persistent", 1, True, "tma", True)
        return Tactic("tile", tile_size, first, GemmTactic(128, 32), "permute", "separate", "reduce")

    def measurement(self, median_us: float = 100.0) -> Measurement:
        parts = (("sort", 2.0), ("gemm1", 60.5))
        return Measurement(median_us, median_us - 0.5, median_us + 0.25, 12, Regime(seed=3), parts, 1980.0, 650.5)

    def record(self, number: int = 0, key: Key | None = None, environment: Environment = ENVIRONMENT) -> Record:
        """Records with different numbers differ in time."""
        stage = self.tactic(block_n=64 + number % 3).stage("gemm1" if number % 2 else "gemm2")
        return Record(
            key or self.key(),
            stage.stage,
            stage,
            Status.OK,
            environment.id,
            "run-1",
            1000.0 + number,
            measurement=self.measurement(100.0 + number),
            accuracy=Accuracy(0.25, 0.5),
            binary="b1nary",
        )

    def failure(self, number: int = 0) -> Record:
        return Record(
            self.key(),
            "layer",
            self.tactic(),
            Status.COMPILE_ERROR,
            ENVIRONMENT.id,
            "run-1",
            2000.0 + number,
            origin="neighbour:N=32",
            phase="final",
            error="ptxas said:\n\tno",
        )

    def decision(self, key: Key | None = None, tile_size: int = 32, time_s: float = 3000.0, run: str = "r") -> Decision:
        default = self.tactic()
        members = (
            Member(self.tactic(tile_size), self.measurement(90.0), True),
            Member(default, self.measurement(120.0), False),
        )
        return Decision(
            key or self.key(),
            self.tactic(tile_size),
            members,
            default,
            120.0,
            0.01,
            "20.0% less time than the default (noise 0.5%)",
            ENVIRONMENT.id,
            run,
            time_s,
        )

    def fill(self, store: Store, num_records: int = 5) -> Path:
        """Write an environment, records, a failure and a decision through one writer; the segment's path."""
        with store.writer() as writer:
            writer.append(self.environment)
            for number in range(num_records):
                writer.append(self.record(number))
            writer.append(self.failure())
            writer.append(self.decision())
        return writer.path


@pytest.fixture(scope="session")
def world() -> World:
    return World()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store", create=True)
