"""`fitune export t4` and `fitune import t4`: records as T4 files, the open format of autotuning results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fitune.cli import options
from fitune.cli.output import say
from fitune.errors import InputError

if TYPE_CHECKING:
    from fitune.cache.t4 import Contents

EXPORT_EXAMPLES = """\b
Examples:
  fitune export t4 --store tuned --out t4
  fitune export t4 --recording h200.fitrec --out t4 --force"""
IMPORT_EXAMPLE = "\b\nExample:\n  fitune import t4 t4 --store tuned"
NOT_HELD = "not in T4 files: the recording's name, note and target"


def register(exports: typer.Typer, imports: typer.Typer) -> None:
    exports.command("t4", short_help="Write T4 files, as Kernel Tuner and KTT do.", epilog=EXPORT_EXAMPLES)(export_t4)
    imports.command("t4", short_help="Read T4 files that fitune wrote.", epilog=IMPORT_EXAMPLE)(import_t4)


def export_t4(
    out: Annotated[
        Path,
        typer.Option(
            "--out", metavar="DIR", parser=options.some_path, help="The folder to write to; made where missing."
        ),
    ],
    store: options.StoreDir = None,
    recording: Annotated[
        Path | None, typer.Option("--recording", metavar="FILE", help="Write what a recording holds instead.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that are there.")] = False,
    json: options.Json = False,
) -> None:
    """Write every record as T4 results (schema 1.0.0): one file for each key and GEMM, one for its whole layers.

    The files hold all of it, failures and decisions too: `fitune import t4` makes the same records of them.
    """
    from fitune.cache.files import write_atomically
    from fitune.cache.t4 import t4_files

    if recording is not None and store is not None:
        raise InputError("--store and --recording both say what to write; leave one out")
    contents = _of_recording(recording) if recording is not None else _of_store(options.store_path(store))
    if not contents.records and not contents.decisions:
        source = recording or options.store_path(store)
        raise InputError(f"{source} holds no measurements; make some with `fitune search` or `fitune record`")
    files = t4_files(contents)
    _check_folder(out, files, force)
    out.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        write_atomically(out / name, data)
    if json:
        from fitune.cli.output import emit_json

        counts = {"records": len(contents.records), "decisions": len(contents.decisions)}
        emit_json({"out": str(out), "files": list(files), **counts})
        return
    print(f"{out}: {len(contents.records)} records and {len(contents.decisions)} decisions in {len(files)} files")
    if recording is not None:
        say(NOT_HELD)


def _of_recording(path: Path) -> Contents:
    from fitune.cache import load_recording
    from fitune.cache.t4 import Contents

    found = load_recording(path)
    return Contents(found.records, found.decisions, found.environments)


def _of_store(path: Path) -> Contents:
    from fitune.cache import open_store
    from fitune.cache.t4 import Contents

    opened = open_store(path)
    return Contents(tuple(opened.records()), tuple(opened.all_decisions()), opened.environments())


def _check_folder(out: Path, names: dict[str, bytes], force: bool) -> None:
    """Raises InputError before anything is written, where `out` is no folder or would lose files."""
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file; name a folder")
    there = [name for name in names if (out / name).exists()]
    if there and not force:
        raise InputError(
            f"--out {out} holds {there[0]} already{f' and {len(there) - 1} more' if there[1:] else ''}; "
            "name another folder, or overwrite with --force"
        )


def _files_of(path: Path) -> list[Path]:
    """The T4 files of a folder, in order, or the file itself. Raises InputError for a folder without any."""
    if not path.is_dir():
        return [path]
    from fitune.cache.t4 import SUFFIX

    found = sorted(path.glob(f"*{SUFFIX}"))
    if not found:
        raise InputError(f"{path} is a folder without a {SUFFIX} file; name one that `fitune export t4` wrote")
    return found


def import_t4(
    files: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="T4 files of `fitune export t4`, or folders of them.")
    ],
    store: options.StoreDir = None,
    json: options.Json = False,
) -> None:
    """Read T4 files back into a store, which is made where missing; nothing stands there twice.

    All files are read before anything is stored. Files of other programs are refused: they do not say the problem, the
    versions and the tactic that a record is made of.
    """
    from fitune.cache import Store
    from fitune.cache.t4_reader import read_t4

    contents = [read_t4(path) for given in files for path in _files_of(given)]
    path = options.store_path(store)
    into = Store.open(path, create=True)
    report = into.add(
        item
        for found in contents
        for items in (found.environments.values(), found.records, found.decisions)
        for item in items
    )
    if report.decisions:
        into.write_table()
    if json:
        from fitune.cli.output import emit_json

        counts = {"records": report.records, "decisions": report.decisions, "duplicates": report.duplicates}
        emit_json({"store": str(path), "files": len(contents), **counts})
        return
    print(
        f"{path}: {report.records} records and {report.decisions} decisions added, "
        f"{report.duplicates} were there already"
    )
