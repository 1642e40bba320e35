"""``boundary-bundle shim``: the C codec's two files, to be copied into another project."""

from __future__ import annotations

import argparse
import importlib.util
import re
from pathlib import Path
from typing import Any, cast

from ..places import shim_folder
from .common import CommandError, check_target, file_name
from .files import shown, write_file

# Paths count from the place of the rule itself, so that it can be included from any folder.
_RULE = """\
# In a Makefile, after its first rule: include {folder}/{name}.mk
# Then link $({variable}). CC and CFLAGS are those of the Makefile that includes this.
{variable}_DIR := $(dir $(lastword $(MAKEFILE_LIST)))
{variable} := $({variable}_DIR){name}.o
$({variable}): $({variable}_DIR){name}.c $({variable}_DIR){name}.h ; $(CC) -std=c11 $(CPPFLAGS) $(CFLAGS) -c -o $@ $<
"""


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "shim",
        help="write the C codec's two files, prefixed, and a Makefile line",
        description="Write the C codec into DIR: one header, one source file, and a .mk file with the line that "
        "compiles it. It needs C11 and nothing else. Exit status 0: written. 2: it could not be.",
    )
    parser.add_argument(
        "--prefix",
        default="",
        metavar="PREFIX",
        help="put before every public symbol, so that two copies can live in one program (none)",
    )
    parser.add_argument("--name", metavar="NAME", help="name of the files, without their endings (boundary_bundle)")
    parser.add_argument(
        "-o",
        "--output",
        type=file_name,
        required=True,
        metavar="DIR",
        help="where to write them; made if it is not there",
    )
    parser.add_argument("--force", action="store_true", help="replace files that are there")
    parser.set_defaults(function=shim)


def _bundled(prefix: str, name: str) -> dict[str, str]:
    """native_shim/bundle.py decides what a vendored copy looks like."""
    place = importlib.util.spec_from_file_location("boundary_bundle_shim_writer", shim_folder() / "bundle.py")
    assert place is not None
    assert place.loader is not None
    writer = importlib.util.module_from_spec(place)
    place.loader.exec_module(writer)
    return cast("dict[str, str]", writer.bundle(prefix, name))


def shim(options: argparse.Namespace) -> int:
    """The command."""
    name = options.name or "boundary_bundle"
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name):
        raise CommandError(f"--name is {shown(name)}, not a file name of letters, digits, '.', '_' and '-'")
    if options.prefix and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", options.prefix):
        raise CommandError(f"--prefix is {shown(options.prefix)}, not a C identifier")
    folder: Path = options.output
    files = _bundled(options.prefix, name)
    variable = re.sub(r"\W", "_", f"{options.prefix}{name}").upper()
    files[f"{name}.mk"] = _RULE.format(folder=folder.name or ".", name=name, variable=variable)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"cannot make the folder {shown(folder)}: {error.strerror}") from None
    if not options.force:
        for file in files:
            if (folder / file).exists():
                raise CommandError(f"cannot write {shown(folder / file)}: it is there already (--force replaces it)")
    for file in files:
        check_target(folder / file)
    for file, text in files.items():
        write_file(folder / file, [text.encode("utf-8")], replace=options.force)
        print(shown(folder / file))
    return 0
