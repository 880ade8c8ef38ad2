"""`fitune grid`: which token points to tune for a number of buckets, and what that is expected to cost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fitune.cli import options
from fitune.cli.output import say
from fitune.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from fitune.measure.protocol import Measurer
    from fitune.problem import Problem
    from fitune.search.grid import Expected, TokenGrid
    from fitune.target import Target

EXAMPLES = """\b
Examples:
  fitune grid --model deepseek-v3 --ep 8 --buckets 12
  fitune grid --model deepseek-v3 --ep 1,8,16 --buckets 8 --range 1-4096 --json
  fitune grid --model qwen3-30b-a3b --buckets 10 --target sm_100

\b
Without a recording of the layer and chip every number is the cost model's."""

DEFAULT_RANGE: Final = "1-16384"
AUTO: Final = "auto"


def register(app: typer.Typer) -> None:
    app.command("grid", short_help="Choose the token points to tune for a number of buckets.", epilog=EXAMPLES)(grid)


def grid(
    model: options.Model = None,
    model_config: options.ModelConfig = None,
    shape: options.Shape = None,
    dtype: options.DTypeName = "bf16",
    ep: options.Ep = None,
    local_experts: options.LocalExperts = None,
    redundant: options.Redundant = 0,
    buckets: Annotated[
        int, typer.Option("--buckets", metavar="B", parser=options.whole_number(0), help="How many points to tune.")
    ] = 15,
    range: Annotated[
        str, typer.Option("--range", metavar="LOW-HIGH", help="The token counts that shall be served.")
    ] = DEFAULT_RANGE,
    routing: options.Routing = "random",
    dispatch: options.DispatchKind = "all_gather",
    recording: Annotated[
        Path | None,
        typer.Option("--recording", metavar="FILE", help="Measured times.  [default: the shipped ones]"),
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", metavar="ARCH", help="The chip.  [default: the recorded one]")
    ] = None,
    json: options.Json = False,
) -> None:
    """Choose the token points to tune, given how many they may be, so that what they serve loses least.

    A count that was not tuned runs the tactic of a point near it. What that costs is taken from a recording where it
    holds the times, and from the cost model elsewhere. Each EP size gets a grid of its own. Nothing is searched.
    """
    from fitune.cli.inputs import check_chip
    from fitune.cli.search import read_grid
    from fitune.measure.choose import choose_measurer
    from fitune.measure.recording import RecordingMeasurer
    from fitune.search.grid import candidate_points, choose_grid, recorded_points, transfer_of
    from fitune.target import target_named

    low, high = read_range(range, "--range")
    points = candidate_points(low, high)
    texts = ",".join(map(str, points))
    problems = read_grid(
        model, model_config, shape, dtype, redundant, ep, local_experts, texts, routing, dispatch
    ).problems
    player = choose_measurer("recording" if recording is None else f"recording:{recording}", problems).measurer
    assert isinstance(player, RecordingMeasurer)
    chip = player.target if target is None else target_named(target)
    check_chip(problems, chip)
    chosen = []
    for layer in _layers(problems):
        found = choose_grid(transfer_of([layer], points, low, high, chip, player), buckets)
        known = player.target.device == chip.device and recorded_points(player, [layer], low, high)
        source = (player.recording.name, player.environment.kernels) if known else ("", "")
        chosen.append(LayerGrid(layer, chip, (low, high), *source, found))
    if json:
        from fitune.cli.output import emit_json

        emit_json({"grids": [_as_json(item) for item in chosen]})
        return
    from fitune.cli.output import console

    screen = console()
    for number, item in enumerate(chosen):
        if number:
            screen.print()
        _print(item, screen)


@dataclass(frozen=True, slots=True)
class LayerGrid:
    """A grid with what it was chosen for, and on which evidence.

    `recording` is the name of the recording, empty where it knows nothing of the layer on the chip; `kernels` the hash
    of the kernels it was made with.
    """

    layer: Problem
    target: Target
    range: tuple[int, int]
    recording: str
    kernels: str
    grid: TokenGrid


@dataclass(frozen=True, slots=True)
class Auto:
    """`auto:B:LOW-HIGH` of `--tokens`."""

    num_buckets: int
    low: int
    high: int

    @property
    def candidates(self) -> str:
        """The points to choose from, as `--tokens` takes them."""
        from fitune.search.grid import candidate_points

        return ",".join(map(str, candidate_points(self.low, self.high)))


def read_auto(text: str | None) -> Auto | None:
    """`auto:B` or `auto:B:LOW-HIGH`; None for any other text. Raises InputError."""
    if text is None or text.partition(":")[0].strip() != AUTO:
        return None
    _, _, rest = text.partition(":")
    number, colon, counts = rest.partition(":")
    if not re.fullmatch(r"[0-9]{1,9}", number) or int(number) < 1:
        raise InputError(
            f"--tokens {text!r}: {number!r} is no number of buckets of 1 or more; "
            "write it like auto:12 or auto:12:1-4096"
        )
    low, high = read_range(counts if colon else DEFAULT_RANGE, "--tokens")
    return Auto(int(number), low, high)


def read_range(text: str, option: str) -> tuple[int, int]:
    """`LOW-HIGH`, both included. Raises InputError."""
    from fitune.cli.inputs import MAX_TOKENS

    match = re.fullmatch(r"([0-9]{1,12})-([0-9]{1,12})", text.strip())
    low, high = (int(part) for part in match.groups()) if match else (0, 0)
    if not match or not 1 <= low <= MAX_TOKENS or not 1 <= high <= MAX_TOKENS:
        raise InputError(
            f"{option}: {text!r} is no range of token counts from 1 to {MAX_TOKENS}; write LOW-HIGH, such as 1-4096"
        )
    if high < low:
        raise InputError(f"{option}: the range {text!r} runs backwards; write LOW-HIGH, such as {high}-{low}")
    return low, high


def choose_problems(auto: Auto, problems: Sequence[Problem], measurer: Measurer) -> tuple[Problem, ...]:
    """The problems of the one grid that serves all layers of `problems` best, said in one line on stderr.

    A recording can only be searched at the points it holds. Raises StoreError where it holds none of a layer, and
    InputError where it holds too few.
    """
    from fitune.cli.inputs import MAX_TOKENS, check_chip
    from fitune.measure.choose import choose_measurer
    from fitune.measure.recording import RecordingMeasurer
    from fitune.search.grid import candidate_points, choose_grid, recorded_points, transfer_of

    check_chip(problems, measurer.target)
    layers = _layers(problems)
    if isinstance(measurer, RecordingMeasurer):
        player = measurer
        points = recorded_points(player, layers, auto.low, auto.high)
        if len(points) < auto.num_buckets:
            held = recorded_points(player, layers, 1, MAX_TOKENS)
            if not held:
                for layer in layers:
                    player.require(replace(layer, num_tokens=auto.low))
            raise InputError(
                f"{auto.num_buckets} buckets are more than the {len(points)} token counts from {auto.low} to "
                f"{auto.high} that recording {player.recording.name!r} holds (it has {', '.join(map(str, held))}); "
                "only those can be played back"
            )
        say(f"only the {len(points)} recorded token counts of the range can be chosen; `fitune grid` chooses among all")
    else:
        shipped = choose_measurer("recording", problems).measurer
        assert isinstance(shipped, RecordingMeasurer)
        player, points = shipped, candidate_points(auto.low, auto.high)
    found = choose_grid(transfer_of(layers, points, auto.low, auto.high, measurer.target, player), auto.num_buckets)
    say(f"tokens {','.join(map(str, found.points))}: {_summary(found)}")
    return tuple(replace(layer, num_tokens=point) for layer in layers for point in found.points)


def _layers(problems: Sequence[Problem]) -> list[Problem]:
    """The problems without their token counts, each once."""
    return list(dict.fromkeys(replace(problem, num_tokens=1) for problem in problems))


def _summary(grid: TokenGrid) -> str:
    """A grid's expected regret in one line."""
    text = f"expected regret {_percent(grid.expected.mean)} mean, {_percent(grid.expected.worst)} worst"
    parts = [
        f"{name} {_percent(part.mean)} and {_percent(part.worst)} for {100 * part.share:.0f}% of the range"
        for name, part in (("measured", grid.measured), ("predicted", grid.predicted))
        if part.num
    ]
    text += f" ({', '.join(parts)})"
    if grid.unserved.num:
        text += f"; no point serves {100 * grid.unserved.share:.1f}% of the range, the default runs there"
    return text


def _evidence(item: LayerGrid) -> str:
    """Where the measured numbers of a grid are from, in one line."""
    from fitune.target import kernel_source_hash

    if not item.recording:
        return "not recorded: all is predicted"
    here = kernel_source_hash()
    aged = "" if item.kernels == here else f" of kernels {item.kernels or 'unknown'}, this fitune has {here}"
    return f"measured: recording {item.recording!r}{aged}"


def _print(item: LayerGrid, screen: Console) -> None:
    from rich.text import Text

    from fitune.cells import layer_facts, layer_name
    from fitune.problem import layer_key
    from fitune.render import plain_table, print_table

    key = layer_key(item.layer, item.target.device)
    low, high = item.range
    head = f"{layer_name(key)} {key.ep_label}, {low}..{high} tokens: {', '.join(layer_facts(key))}"
    screen.print(Text(head, style="bold"), soft_wrap=True)
    screen.print(Text(_evidence(item)), soft_wrap=True)
    table = plain_table(
        ("point", "right"), ("serves", "right"), ("mean", "right"), ("worst", "right"), ("measured", "right")
    )
    for each in item.grid.served:
        bucket, expected = each.bucket, each.expected
        evidence = f"{each.num_measured} of {expected.num}"
        counts = f"{bucket.low}..{bucket.high}"
        table.add_row(str(bucket.point), counts, _percent(expected.mean), _percent(expected.worst), evidence)
    print_table(table, screen)
    screen.print(Text(_summary(item.grid)), soft_wrap=True)


def _percent(ratio: float) -> str:
    return f"{100.0 * ratio:.2f}%"


def _as_json(item: LayerGrid) -> dict[str, Any]:
    from fitune.problem import layer_key

    grid = item.grid
    return {
        "layer": asdict(layer_key(item.layer, item.target.device)),
        "ep": item.layer.ep_label,
        "range": list(item.range),
        "recording": item.recording,
        "kernels": item.kernels,
        "points": list(grid.points),
        "buckets": [
            {**asdict(each.bucket), **_regret(each.expected), "measured": each.num_measured} for each in grid.served
        ],
        **{name: _regret(getattr(grid, name)) for name in ("expected", "measured", "predicted", "unserved")},
    }


def _regret(part: Expected) -> dict[str, Any]:
    return {"share": part.share, "mean": part.mean, "worst": part.worst, "counts": part.num}
