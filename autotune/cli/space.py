"""`fitune space`: what may be tried for a problem, what may not and why. Needs no GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fitune.cli import options
from fitune.cli.output import say
from fitune.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from fitune.measure.compile import CompileReport
    from fitune.problem import Problem
    from fitune.space import Candidate
    from fitune.tactic import Stage, StageName
    from fitune.target import Target

EXAMPLES = """\b
Examples:
  fitune space --model deepseek-v3 --ep 16 --tokens 8192 --target sm_90
  fitune space --model qwen3-30b-a3b --tokens 64 --target gfx942 --stage gemm2
  fitune space --model deepseek-v3 --ep 16 --tokens 8192 --compile --limit 20 --json"""

EXAMPLE = "for example"


def register(app: typer.Typer) -> None:
    app.command("space", short_help="Count what may be tried and why the rest may not.", epilog=EXAMPLES)(space)


@dataclass(frozen=True, slots=True)
class StageSpace:
    """The enumeration of one stage of one problem."""

    problem: Problem
    target: Target
    stage: StageName
    members: Sequence[Candidate]

    @property
    def legal(self) -> list[Stage]:
        return [member.stage for member in self.members if not member.reason]

    @property
    def rejected(self) -> list[tuple[str, int, str]]:
        """(rule, how many, one full reason as an example), most first."""
        counts = Counter(member.rule for member in self.members if member.reason)
        examples = {member.rule: member.reason for member in reversed(self.members) if member.reason}
        return [(rule, count, examples[rule]) for rule, count in counts.most_common()]

    @property
    def legal_per_tile(self) -> dict[int, int]:
        return dict(sorted(Counter(stage.tile_size for stage in self.legal).items()))


def space(
    model: options.Model = None,
    model_config: options.ModelConfig = None,
    shape: options.Shape = None,
    dtype: options.DTypeName = "bf16",
    ep: options.Ep = None,
    local_experts: options.LocalExperts = None,
    redundant: options.Redundant = 0,
    tokens: Annotated[str, typer.Option("--tokens", metavar="LIST", help="Token counts.")] = "8192",
    dispatch: options.DispatchKind = "all_gather",
    target: Annotated[
        str, typer.Option("--target", metavar="ARCH", help="The chip: sm_90, sm_100, gfx942 ...")
    ] = "sm_90",
    stage: Annotated[str | None, typer.Option("--stage", metavar="gemm1|gemm2", help="Only this GEMM.")] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Compile ahead of time and report resources.")] = False,
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", parser=options.whole_number(1), help="Compile at most N a GEMM.")
    ] = 24,
    json: options.Json = False,
) -> None:
    """Count the tactic space of a problem: candidates, rejected by which rule, legal per tile_size.

    With --compile the legal candidates the cost model likes best are compiled for the target, without a GPU, and
    their shared memory, registers and spills are read from the binaries.
    """
    from fitune.cli.inputs import grid, local_expert_counts, read_dispatch, read_layer, whole_numbers
    from fitune.problem import DEFAULT_ROUTING
    from fitune.space import candidates
    from fitune.target import target_named

    layer = read_layer(model, model_config, shape, dtype, redundant)
    chip = target_named(target)
    counts = local_expert_counts(layer.shape, ep, local_experts)
    problems = grid(layer.shape, counts, whole_numbers(tokens, "--tokens"), DEFAULT_ROUTING, read_dispatch(dispatch))
    spaces = [
        StageSpace(problem, chip, name, candidates(problem, chip, name))
        for problem in problems
        for name in _stages(stage)
    ]
    if compile:
        _require_compiler()
    reports = [_compile(item, limit) if compile else [] for item in spaces]
    if json:
        from fitune.cli.output import emit_json

        emit_json({"model": layer.name, "spaces": [_as_json(*pair) for pair in zip(spaces, reports, strict=True)]})
        return
    from fitune.cli.output import console

    screen = console()
    for number, (item, compiled) in enumerate(zip(spaces, reports, strict=True)):
        if number:
            screen.print()
        _print(item, layer.name, compiled, screen)


def _stages(text: str | None) -> tuple[StageName, ...]:
    from fitune.tactic import STAGES

    if text is None:
        return STAGES
    for name in STAGES:
        if text == name:
            return (name,)
    raise InputError(f"--stage {text!r} is not known; use one of {', '.join(STAGES)}")


def _print(item: StageSpace, name: str, compiled: Sequence[CompileReport], screen: Console) -> None:
    from rich.text import Text

    from fitune.render import cut, plain_table, print_table

    problem, legal = item.problem, item.legal
    head = (
        f"{name} {item.stage}, {problem.num_tokens} tokens, {problem.ep_label} ({problem.local_experts} local experts, "
        f"{problem.expected_rows_per_expert:.4g} rows per expert), {item.target.arch}"
    )
    screen.print(Text(head, style="bold"), soft_wrap=True)
    members = len(item.members)
    screen.print(Text(f"{members} candidates, {len(legal)} legal, {members - len(legal)} rejected"), soft_wrap=True)
    tiles = "  ".join(f"{tile}: {count}" for tile, count in item.legal_per_tile.items())
    screen.print(Text(f"legal per tile_size  {tiles or 'none'}"), soft_wrap=True)
    table = plain_table(("rejected", "right"), ("rule", "left"), (EXAMPLE, "left"), shrinking=(EXAMPLE,))
    for rule, count, example in item.rejected:
        table.add_row(str(count), rule, cut(example.removeprefix(f"{rule}:").strip()))
    print_table(table, screen)
    if compiled:
        _print_compiled(compiled, screen)


def _compile(item: StageSpace, limit: int) -> list[CompileReport]:
    """Reports on the `limit` legal stages with the lowest estimated time."""
    from fitune.cost import predict_many_us
    from fitune.measure.compile import compile_stages

    legal = item.legal
    if not legal:
        return []
    order = predict_many_us(legal, item.problem, item.target).argsort(kind="stable")
    likely = [legal[row] for row in order[:limit]]
    say(f"compiling {len(likely)} of {len(legal)} legal {item.stage} candidates for {item.target.arch}")
    return list(compile_stages(likely, item.problem, item.target))


def _require_compiler() -> None:
    """Raises ModuleNotFoundError where compiling cannot work, before any process is started for it."""
    from importlib.util import find_spec

    for name in ("torch", "triton"):
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _print_compiled(reports: Sequence[CompileReport], screen: Console) -> None:
    from fitune.render import compact_gemm, cut, plain_table, print_table

    table = plain_table(
        ("tile", "right"), ("gemm", "left"), ("around it", "left"), ("shared B", "right"), ("registers", "right"),
        ("spill B", "right"), ("wgmma", "left"), ("status", "left"), shrinking=("status",),
    )  # fmt: skip
    for report in reports:
        stage = report.stage
        places = (stage.gather, stage.activation, stage.finalize)
        numbers = [_number(value) for value in (report.shared_bytes, report.registers, report.spill_bytes)]
        status = str(report.status) if not report.error else f"{report.status}: {report.error.splitlines()[0]}"
        tile = str(stage.tile_size) if stage.family == "tile" else stage.family
        around = " ".join(place for place in places if place) + (" +q" if stage.quantize == "separate" else "")
        wgmma = "serialised" if report.serialized_wgmma else "-"
        table.add_row(tile, compact_gemm(stage.gemm), around, *numbers, wgmma, cut(status))
    print_table(table, screen)


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _report_json(report: CompileReport) -> dict[str, Any]:
    return {**{name: getattr(report, name) for name in report.__slots__}, "stage": str(report.stage)}


def _as_json(item: StageSpace, compiled: Sequence[CompileReport]) -> dict[str, Any]:
    problem = item.problem
    value: dict[str, Any] = {
        "stage": item.stage,
        "tokens": problem.num_tokens,
        "ep": problem.ep_label,
        "local_experts": problem.local_experts,
        "rows_per_expert": problem.expected_rows_per_expert,
        "target": asdict(item.target),
        "candidates": len(item.members),
        "legal": len(item.legal),
        "rejected": [{"rule": rule, "count": count, "example": example} for rule, count, example in item.rejected],
        "legal_per_tile_size": {str(tile): count for tile, count in item.legal_per_tile.items()},
    }
    if compiled:
        value["compiled"] = [_report_json(report) for report in compiled]
    return value
