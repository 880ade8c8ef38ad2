"""The measuring child: owns the GPU, answers one request at a time, and may die without anybody being surprised.

Requests are maps with `op`; each is answered by any number of progress maps (`running`, `candidate`) and one `done`
or `error`. `broken` in an answer says that the GPU context of this process is lost; the process then ends.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from fitune.errors import FituneError
from fitune.measure.bench import Bench
from fitune.measure.build import error_text
from fitune.measure.device import Gauge, device_environment, device_target
from fitune.measure.inputs import ProblemInputs, WeightBank
from fitune.measure.timing import GraphTimer, HostTimer, Timer
from fitune.measure.wire import (
    ChildPort,
    environment_to_wire,
    outcome_to_wire,
    problem_from_wire,
    target_to_wire,
)
from fitune.problem import Problem
from fitune.tactic import parse_stage, parse_tactic


class Worker:
    """State of one measuring process: weights of one shape and at most one open problem."""

    def __init__(self, port: ChildPort, device: str) -> None:
        self._port = port
        self._device = device
        self._timer: Timer = GraphTimer(device) if device.startswith("cuda") else HostTimer()
        self._gauge = Gauge(device)
        self._target = device_target(device)
        self._bank: WeightBank | None = None
        self._bench: Bench | None = None
        self._opened: tuple[Problem, int] | None = None

    def serve(self) -> None:
        """Answer until the parent closes the pipe or the GPU is lost."""
        while True:
            request = self._port.receive()
            if request is None:
                return
            try:
                answer = {"kind": "done", **self._answer(request)}
            except Exception as error:  # noqa: BLE001 - the measuring border
                known = isinstance(error, FituneError)
                text = str(error) if known else error_text(error)
                answer = {"kind": "error", "text": text, "user": known, "broken": not known}
            self._port.send(answer)
            if answer.get("broken"):
                return

    def _answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        op = request["op"]
        if op == "hello":
            environment = device_environment(self._target, self._gauge)
            return {"target": target_to_wire(self._target), "environment": environment_to_wire(environment)}
        if op == "open":
            return self._open(request)
        if op == "check":
            return self._check(request)
        bench = self._bench
        assert bench is not None, "no problem is open"
        if op == "stage":
            outcome = bench.stage(parse_stage(request["tactic"]), request["hopeless_us"])
            return {"outcome": outcome_to_wire(outcome), "broken": bench.broken}
        if op == "finals":
            tactics = [parse_tactic(text) for text in request["tactics"]]
            outcomes = bench.finals(tactics, request["rounds"], request["careful"])
            return {"outcomes": [outcome_to_wire(outcome) for outcome in outcomes], "broken": bench.broken}
        assert op == "noise", op
        return {"noise": bench.noise(parse_tactic(request["tactic"]))}

    def _open(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Make the tensors of a problem, unless it is the open one."""
        problem = problem_from_wire(request["problem"])
        seed = int(request["seed"])
        if self._opened != (problem, seed) or self._bench is None:
            self._close()
            self._bench = Bench(self._inputs(request, problem, seed), self._timer, self._gauge, seed, self._port.send)
            self._opened = (problem, seed)
        load = self._bench.inputs.load
        return {"rows": load.rows, "active": len(load.active), "slices": len(self._bench.inputs.args)}

    def _check(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Whole layers against a pure float32 reference on inputs of the seed asked for."""
        problem = problem_from_wire(request["problem"])
        seed = int(request["seed"])
        self._close()
        inputs = self._inputs(
            request, problem, seed, round_hidden=False, representative=False, drop_slots=bool(request["foreign"])
        )
        bench = Bench(inputs, self._timer, self._gauge, seed, self._port.send)
        outcomes = []
        for index, text in enumerate(request["tactics"]):
            self._port.send({"kind": "candidate", "index": index})
            outcomes.append(outcome_to_wire(bench.check(parse_tactic(text))))
            if bench.broken:
                break
        bench.forget()
        return {"outcomes": outcomes, "broken": bench.broken}

    def _inputs(self, request: Mapping[str, Any], problem: Problem, seed: int, **how: bool) -> ProblemInputs:
        histogram = request["histogram"]
        if self._bank is None:
            self._bank = WeightBank(self._device, seed)
        return ProblemInputs(
            problem,
            self._target,
            self._bank,
            self._device,
            seed,
            min_experts=int(request["experts"]),
            histogram=None if histogram is None else np.array(histogram, dtype=np.float64),
            **how,
        )

    def _close(self) -> None:
        if self._bench is not None:
            self._bench.forget()
        self._bench = self._opened = None


def main() -> None:
    """Entry of `python -m fitune.measure.worker`."""
    parser = argparse.ArgumentParser(prog="python -m fitune.measure.worker")
    parser.add_argument("--device", default="cuda:0")
    device = parser.parse_args().device
    port = ChildPort()
    try:
        worker = Worker(port, device)
    except (RuntimeError, AssertionError) as error:
        port.send({"kind": "error", "text": error_text(error), "user": True, "broken": True})
        return
    worker.serve()
    os._exit(0)


if __name__ == "__main__":
    main()
