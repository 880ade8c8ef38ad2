"""Why two sets of decisions differ, and whether it matters: `diff_sides` walks each differing row down the cascade.

report = diff_sides(side_of(store, local_experts=256, label="EP 1"), side_of(store, local_experts=16, label="EP 16"))
print(report.sentence())
"""

from fitune.diff.as_json import to_json
from fitune.diff.cascade import CASCADE, decide, diff_sides, differing_fields
from fitune.diff.cross import Regret
from fitune.diff.join import Align, join
from fitune.diff.not_enumerated import Missing, NotEnumerated
from fitune.diff.not_legal import Illegal, NotLegal
from fitune.diff.other_bucket import Load, OtherBucket
from fitune.diff.other_regime import OtherRegime
from fitune.diff.other_routing import OtherRouting
from fitune.diff.real import Real
from fitune.diff.report import DiffReport, DiffRow, Evidence, NoPartner, Same
from fitune.diff.sides import Side, side_of
from fitune.diff.stale import BinaryDifference, Stale
from fitune.diff.tie import Tie
from fitune.diff.undecided import Undecided
from fitune.diff.verdict import FieldDifference, Verdict

__all__ = [
    "CASCADE",
    "Align",
    "BinaryDifference",
    "DiffReport",
    "DiffRow",
    "Evidence",
    "FieldDifference",
    "Illegal",
    "Load",
    "Missing",
    "NoPartner",
    "NotEnumerated",
    "NotLegal",
    "OtherBucket",
    "OtherRegime",
    "OtherRouting",
    "Real",
    "Regret",
    "Same",
    "Side",
    "Stale",
    "Tie",
    "Undecided",
    "Verdict",
    "decide",
    "diff_sides",
    "differing_fields",
    "join",
    "side_of",
    "to_json",
]
