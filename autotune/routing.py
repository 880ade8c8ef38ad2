"""Which experts the tokens of a problem go to: seeded routing by profile, drawn over *all* experts of the layer.

Profiles, as texts: `balanced` (every expert gets the same number of slots), `random` (uniform), `zipf:S` (the expert
of popularity rank r drawn with probability proportional to 1/r^S) and `file:NAME:SHA8` (a recorded histogram; the
digits of its content keep two histograms from sharing a key).

`random` and `zipf` are a race: expert e arrives after an exponential time of rate `rates[e]`, and a token takes the
first `top_k` arrivals (Gumbel top-k). A histogram is a wheel: experts lie on a circle in an order shuffled for each
token, each as wide as its chance of being chosen, and `top_k` pointers at equal distances choose, so that every expert
is met exactly as often as it was recorded. Under all-to-all dispatch the rank only sees tokens that chose one of its
experts; that condition is drawn exactly, not by waiting for it to happen.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fitune.errors import InputError
from fitune.histogram import load_histogram, weights_digest
from fitune.problem import Problem

__all__ = [
    "check_histogram",
    "check_routing",
    "draw_topk_ids",
    "draw_topk_weights",
    "load_histogram",
    "local_rows",
    "read_routing",
    "representative_ids",
]

Ids = NDArray[np.int32]
Floats = NDArray[np.float64]

MAX_ZIPF: Final = 8.0
DRAWS_OF_SMALL_PROBLEMS: Final = 33
SMALL_PROBLEM_TOKENS: Final = 256
_BLOCK: Final = 1 << 20  # (token, expert) pairs drawn at once: bounds memory to some tens of MB
_FILE: Final = re.compile(r"file:[A-Za-z0-9._-]{1,64}:[0-9a-f]{8}")
_USAGE: Final = "use balanced, random, zipf:S (like zipf:1.2) or file:PATH"


def check_routing(text: str) -> str:
    """The canonical form of a routing text. Raises InputError where it is none."""
    text = text.strip()
    if text in ("balanced", "random") or _FILE.fullmatch(text):
        return text
    kind, _, value = text.partition(":")
    if kind != "zipf":
        raise InputError(f"routing {text!r} is not known; {_USAGE}")
    if re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,12})?", value) is None or not 0.0 < float(value) <= MAX_ZIPF:
        raise InputError(f"routing {text!r}: {value!r} is no exponent above 0 and up to {MAX_ZIPF:g}; {_USAGE}")
    canonical = f"{float(value):.6f}".rstrip("0").rstrip(".")
    if canonical == "0":
        raise InputError(f"routing {text!r}: {value} is too near to 0; use random")
    return f"zipf:{canonical}"


def read_routing(text: str) -> tuple[str, Floats | None]:
    """What a user wrote after `--routing`: the canonical text, and the weights where `file:PATH` names a histogram."""
    text = text.strip()
    if text.startswith("file:") and not _FILE.fullmatch(text):
        if text == "file:":
            raise InputError(f"routing {text!r} names no file; {_USAGE}")
        return load_histogram(text.removeprefix("file:"))
    return check_routing(text), None


def draw_topk_ids(problem: Problem, seed: int, histogram: Floats | None = None) -> Ids:
    """Expert ids int32 [num_tokens, top_k] over all experts of the layer, distinct within a token.

    Under `all_to_all` every token has at least one local slot. `histogram` (float64 [num_experts], relative counts
    of slots) belongs to a `file:` profile. The same arguments give the same ids. Raises InputError where the
    histogram is missing, is another one than the profile names, or cannot be drawn from.
    """
    shape = problem.shape
    routing = check_routing(problem.routing)
    rng = _generator(seed, 1)
    conditioned = problem.dispatch == "all_to_all" and problem.local_experts < shape.num_experts
    if routing == "balanced":
        return _deal_conditioned(problem, rng) if conditioned else _deal(problem, rng)
    draw: Callable[[int], Ids]
    if routing.startswith("file:"):
        chances = _chances(problem, routing, histogram)
        wheel = _wheel_conditioned if conditioned else _wheel
        draw = partial(wheel, rng, chances, problem)
    else:
        rates = _rates(shape.num_experts, routing, seed)
        race = _race_conditioned if conditioned else _race
        draw = partial(race, rng, rates, problem)
    block = max(1, _BLOCK // shape.num_experts)
    ids = np.empty((problem.num_tokens, shape.top_k), dtype=np.int32)
    filled = 0
    while filled < problem.num_tokens:
        drawn = draw(min(block, problem.num_tokens - filled))
        ids[filled : filled + len(drawn)] = drawn
        filled += len(drawn)
    return ids


def representative_ids(problem: Problem, seed: int, histogram: Floats | None = None) -> Ids:
    """The router choices [num_tokens, top_k] that a problem is measured with.

    One draw of a few tokens says little: under EP 16 most draws of one token choose no local expert at all. So small
    problems take, out of several seeded draws, the first whose number of local rows is their median, but at least 1.
    """
    first = draw_topk_ids(problem, seed, histogram)
    if not 0 < problem.num_tokens <= SMALL_PROBLEM_TOKENS:
        return first
    offset, local = problem.local_expert_offset, problem.local_experts
    draws = [first]
    draws += [draw_topk_ids(problem, seed + 1_000_003 * step, histogram) for step in range(1, DRAWS_OF_SMALL_PROBLEMS)]
    rows = [int(local_rows(ids, offset, local).sum()) for ids in draws]
    wanted = max(1, sorted(rows)[len(rows) // 2])
    return draws[
        min(range(len(draws)), key=lambda index: abs(rows[index] - wanted) + (wanted if not rows[index] else 0))
    ]


def draw_topk_weights(problem: Problem, seed: int) -> NDArray[np.float32]:
    """Router weights float32 [num_tokens, top_k]: positive, falling along a token, summing to 1."""
    logits = _generator(seed, 2).standard_normal((problem.num_tokens, problem.shape.top_k))
    weights: Floats = np.exp(-np.sort(-logits, axis=1))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True), dtype=np.float32)


def local_rows(ids: NDArray[np.integer], offset: int, local_experts: int) -> NDArray[np.int64]:
    """Rows of each local expert, int64 [local_experts]; ids of other ranks and -1 count for none."""
    local = np.asarray(ids, dtype=np.int64).ravel() - offset
    return np.bincount(local[(local >= 0) & (local < local_experts)], minlength=local_experts)


def _generator(seed: int, stream: int) -> np.random.Generator:
    if seed < 0:
        raise InputError(f"seed is {seed}; it must be 0 or more")
    return np.random.default_rng([seed, stream])


# ---- balanced ----------------------------------------------------------------------------------------------------


def _spread(rng: np.random.Generator, count: int) -> Ids:
    """All of 0..count-1 in an order whose every run is spread evenly over the range, turned by a random amount."""
    bits = max(1, (count - 1).bit_length())
    numbers = np.arange(1 << bits)
    mirrored = np.zeros_like(numbers)
    for bit in range(bits):
        mirrored |= ((numbers >> bit) & 1) << (bits - 1 - bit)
    order = mirrored[mirrored < count]
    return np.asarray((order + rng.integers(count)) % count, dtype=np.int32)


def _deal(problem: Problem, rng: np.random.Generator) -> Ids:
    """Deal experts to slots in turn: counts differ by one at most, at every number of tokens."""
    order = _spread(rng, problem.shape.num_experts)
    slots = np.arange(problem.num_slots).reshape(problem.num_tokens, problem.shape.top_k)
    return np.asarray(order[slots % len(order)], dtype=np.int32)


def _deal_conditioned(problem: Problem, rng: np.random.Generator) -> Ids:
    """The same under all-to-all: the expected number of local slots, one a token at least, dealt in turn."""
    tokens, top_k, local = problem.num_tokens, problem.shape.top_k, problem.local_experts
    foreign = problem.shape.num_experts - local
    least, most = max(1, top_k - foreign), min(top_k, local)
    total = min(max(round(problem.expected_routed_rows), tokens * least), tokens * most)
    ends = np.arange(tokens + 1) * total // max(tokens, 1)
    is_local = np.arange(top_k) < np.diff(ends)[:, None]
    ids = np.empty((tokens, top_k), dtype=np.int32)
    ids[is_local] = _spread(rng, local)[np.arange(total) % local] + problem.local_expert_offset
    others = _foreign_ids(problem)[_spread(rng, foreign)]
    ids[~is_local] = others[np.arange(tokens * top_k - total) % foreign]
    return rng.permuted(ids, axis=1)


def _foreign_ids(problem: Problem) -> Ids:
    first, last = problem.local_expert_offset, problem.local_expert_offset + problem.local_experts
    return np.concatenate(
        [np.arange(first, dtype=np.int32), np.arange(last, problem.shape.num_experts, dtype=np.int32)]
    )


# ---- random and zipf ---------------------------------------------------------------------------------------------


def _rates(num_experts: int, routing: str, seed: int) -> Floats:
    """Arrival rates float64 [num_experts] of the race, all above 0."""
    if routing == "random":
        return np.ones(num_experts)
    ranks = _generator(seed, 3).permutation(num_experts) + 1
    return np.asarray(ranks ** -float(routing.removeprefix("zipf:")), dtype=np.float64)


def _race(rng: np.random.Generator, rates: Floats, problem: Problem, num_tokens: int) -> Ids:
    return _winners(rng, rates, num_tokens, problem.shape.top_k)


def _winners(rng: np.random.Generator, rates: Floats, num_tokens: int, places: int) -> Ids:
    """Indices into `rates` of the first `places` to arrive, int32 [num_tokens, places], in order of arrival."""
    assert places <= len(rates)
    arrivals = rng.standard_exponential((num_tokens, len(rates)))
    arrivals /= rates
    winners = np.argpartition(arrivals, min(places, len(rates) - 1), axis=1)[:, :places]
    order = np.argsort(np.take_along_axis(arrivals, winners, axis=1), axis=1)
    return np.take_along_axis(winners, order, axis=1).astype(np.int32)


def _left(rates: Floats, order: Ids, length: int) -> Floats:
    """Rate still running before each of `length` arrivals, float64 [num_tokens, length]; 0 once all have arrived."""
    total = rates.sum()
    left = np.zeros((len(order), length))
    left[:, 0] = total
    arrived = np.cumsum(rates[order], axis=1)
    known = min(length - 1, order.shape[1])
    left[:, 1 : 1 + known] = np.maximum(total - arrived[:, :known], 0.0)
    if order.shape[1] == len(rates):
        left[:, len(rates) :] = 0.0
    return left


def _race_conditioned(rng: np.random.Generator, rates: Floats, problem: Problem, num_tokens: int) -> Ids:
    """Some (at most `num_tokens`) tokens of the race, given that a local expert is among their `top_k` winners.

    The foreign experts arrive in an order that does not depend on the local ones. Given that order, no local expert
    comes in time with probability prod(F_j / (F_j + P)): F_j the foreign rate left before the j-th arrival, P the
    local rate. So orders are kept in proportion to the chance of a hit (thinned against the largest chance any
    order has), then the place of the first local arrival is drawn given that there is one, then the rest as usual.
    """
    top_k = problem.shape.top_k
    foreign_ids = _foreign_ids(problem)
    foreign = rates[foreign_ids]
    local = rates[_local(problem)]
    order = _winners(rng, foreign, num_tokens, min(top_k, len(foreign)))
    with np.errstate(divide="ignore"):
        hit_by = -np.expm1(-np.cumsum(np.log1p(local.sum() / _left(foreign, order, top_k)), axis=1))
        heaviest = np.argsort(-foreign)[None, : order.shape[1]].astype(np.int32)
        bound = -np.expm1(-np.log1p(local.sum() / _left(foreign, heaviest, top_k)).sum())
    kept = rng.random(num_tokens) * bound < hit_by[:, -1]
    order, hit_by = order[kept], hit_by[kept]
    first_local = (hit_by <= (rng.random(len(order)) * hit_by[:, -1])[:, None]).sum(axis=1)
    first_local = np.minimum(first_local, top_k - 1)
    local_order = _winners(rng, local, len(order), min(top_k, len(local)))
    foreign_left = _left(foreign, order, top_k + 1)
    local_left = _left(local, local_order, top_k + 1)
    is_local = _merge(rng, first_local, foreign_left, local_left, order.shape[1], local_order.shape[1])
    ids = np.empty(is_local.shape, dtype=np.int32)
    taken = is_local.sum(axis=1, keepdims=True)
    ids[is_local] = local_order[np.arange(local_order.shape[1]) < taken] + problem.local_expert_offset
    ids[~is_local] = foreign_ids[order[np.arange(order.shape[1]) < top_k - taken]]
    return ids


def _merge(
    rng: np.random.Generator,
    first_local: NDArray[np.int64],
    foreign_left: Floats,
    local_left: Floats,
    num_foreign: int,
    num_local: int,
) -> NDArray[np.bool_]:
    """Which of the `top_k` arrivals are local, bool [num_tokens, top_k], given where the first of them is."""
    rows = np.arange(len(first_local))
    top_k = foreign_left.shape[1] - 1
    is_local = np.zeros((len(rows), top_k), dtype=np.bool_)
    taken = np.zeros(len(rows), dtype=np.int64)
    for place in range(top_k):
        local_rate = local_left[rows, taken]
        foreign_rate = foreign_left[rows, place - taken]
        by_chance = rng.random(len(rows)) * (local_rate + foreign_rate) < local_rate
        by_chance = (by_chance & (taken < num_local)) | (place - taken >= num_foreign)
        is_local[:, place] = (place == first_local) | ((place > first_local) & by_chance)
        taken += is_local[:, place]
    return is_local


# ---- histograms --------------------------------------------------------------------------------------------------


def check_histogram(problem: Problem, histogram: Floats) -> None:
    """Raises InputError where the problem's router choices cannot be drawn from this histogram."""
    _chances(problem, problem.routing, histogram)


def _chances(problem: Problem, routing: str, histogram: Floats | None) -> Floats:
    """How likely a token chooses each expert, float64 [num_experts], summing to top_k. Raises InputError."""
    num_experts, top_k = problem.shape.num_experts, problem.shape.top_k
    if histogram is None:
        raise InputError(f"routing {routing!r}: the histogram itself is needed; give it as --routing file:PATH")
    if histogram.shape != (num_experts,):
        raise InputError(f"routing {routing!r}: {histogram.size} numbers for {num_experts} experts; give one each")
    digest = weights_digest(histogram)
    if not routing.endswith(digest):
        raise InputError(f"routing {routing!r}: the histogram given is another one ({digest}); give the one recorded")
    chances: Floats = histogram / histogram.sum() * top_k
    hottest = int(chances.argmax())
    if chances[hottest] > 1.0 + 1e-6:
        raise InputError(
            f"routing {routing!r}: expert {hottest} has {chances[hottest] / top_k:.1%} of the slots, but with top_k "
            f"{top_k} none can have more than {1 / top_k:.1%}; was it recorded with another top_k?"
        )
    local = _local(problem)
    if problem.dispatch == "all_to_all" and not chances[local].any():
        raise InputError(
            f"routing {routing!r}: no token chose experts {local.start} to {local.stop - 1}, so none reaches this rank"
        )
    return np.minimum(chances, 1.0)


def _wheel(rng: np.random.Generator, chances: Floats, problem: Problem, num_tokens: int) -> Ids:
    order, ends = _turned(rng, chances, problem, num_tokens)
    return _pointed(order, ends, rng.random((num_tokens, 1)))


def _wheel_conditioned(rng: np.random.Generator, chances: Floats, problem: Problem, num_tokens: int) -> Ids:
    """Some (at most `num_tokens`) tokens of the wheel, given that a local expert is chosen.

    The pointers are set within a local expert drawn by its width, which favours settings that meet several local
    experts by their number; keeping those with one over that number undoes it.
    """
    local = _local(problem)
    widths = chances[local] / chances[local].sum()
    order, ends = _turned(rng, chances, problem, num_tokens)
    aimed = rng.choice(len(widths), size=num_tokens, p=widths) + local.start
    at = np.argmax(order == aimed[:, None], axis=1)
    aim = ends[np.arange(num_tokens), at] - rng.random(num_tokens) * chances[aimed]
    ids = _pointed(order, ends, np.mod(aim, 1.0)[:, None])
    hits = ((ids >= local.start) & (ids < local.stop)).sum(axis=1)
    kept = np.flatnonzero((hits > 0) & (rng.random(len(ids)) * hits < 1.0))
    return np.take(ids, kept, axis=0)


def _turned(rng: np.random.Generator, chances: Floats, problem: Problem, num_tokens: int) -> tuple[Ids, Floats]:
    """Experts in shuffled order and where each ends on the wheel: [num_tokens, num_experts] both."""
    order = np.argsort(rng.random((num_tokens, len(chances)), dtype=np.float32), axis=1).astype(np.int32)
    ends = np.cumsum(chances[order], axis=1)
    ends *= problem.shape.top_k / ends[:, -1:]
    ends[:, -1] = problem.shape.top_k
    return order, ends


def _pointed(order: Ids, ends: Floats, pointer: Floats) -> Ids:
    """The experts under pointers at `pointer`, `pointer + 1` ...: one for each whole turn of the wheel."""
    turns = np.floor(ends - pointer)
    met = np.diff(turns, axis=1, prepend=np.floor(-pointer)) > 0.0
    chosen = met.sum(axis=1)
    places = int(ends[0, -1]) if len(ends) else 0
    met[chosen != places] = False
    return np.asarray(order[met], dtype=np.int32).reshape(-1, places)


def _local(problem: Problem) -> slice:
    return slice(problem.local_expert_offset, problem.local_expert_offset + problem.local_experts)
