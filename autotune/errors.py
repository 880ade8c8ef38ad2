"""The errors fitune raises for a user's mistakes.

    FituneError                 exit code 2
    ├── InputError              a value that cannot be: says what, which value, what to do
    │   ├── ShapeError          an impossible layer or problem
    │   └── TacticSyntaxError   a tactic text that does not parse
    ├── StoreError              a store or recording that cannot be used
    │   ├── CorruptStoreError   broken or hostile bytes: names file, offset and field
    │   └── NewerStoreError     written by a newer fitune: names the version needed
    ├── DispatchError           wrong tensors at dispatch, or a miss in frozen mode
    ├── MeasureError            the measuring side cannot go on
    └── NoGpuError              a GPU was asked for and there is none usable; exit code 3

Our own mistakes are assertions, not members of this tree.
"""

from __future__ import annotations


class FituneError(Exception):
    """Base of every error a user can cause; its text is one line fit for a terminal."""

    exit_code = 2


class InputError(FituneError, ValueError):
    """A value that cannot be used."""


class ShapeError(InputError):
    """A layer shape or problem that cannot exist."""


class TacticSyntaxError(InputError):
    """A tactic text that does not parse."""


class StoreError(FituneError):
    """A store, table or recording that cannot be used."""


class CorruptStoreError(StoreError):
    """Bytes that are not what the format promises."""


class NewerStoreError(StoreError):
    """A file written by a newer fitune."""


class DispatchError(FituneError):
    """A call the dispatcher refuses: wrong tensors, or a miss in frozen mode."""


class MeasureError(FituneError):
    """Measuring cannot go on."""


class NoGpuError(FituneError):
    """A GPU was asked for and none is usable."""

    exit_code = 3
