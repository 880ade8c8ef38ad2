"""fitune's store: bytes to records to tables, with neither torch nor Triton.

`Store` keeps everything measured and decided in a folder, `Table` is what dispatch reads of it, a `Recording` is a
measured space in one file. Nothing is ever executed from a file; every field is checked before it is believed.
"""

from fitune.cache.maintain import MergeReport, PruneReport
from fitune.cache.recording import Recording, embedded_recordings, load_recording, save_recording
from fitune.cache.segment import Finding, Item, KeyFilter, StoreWriter
from fitune.cache.store import Store, load_table, open_store
from fitune.cache.table import Entry, Table

__all__ = [
    "Entry",
    "Finding",
    "Item",
    "KeyFilter",
    "MergeReport",
    "PruneReport",
    "Recording",
    "Store",
    "StoreWriter",
    "Table",
    "embedded_recordings",
    "load_recording",
    "load_table",
    "open_store",
    "save_recording",
]
