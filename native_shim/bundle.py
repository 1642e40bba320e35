#!/usr/bin/env python3
"""Write the C codec's two files for vendoring: every public symbol prefixed, file names of choice.

    python native_shim/bundle.py --prefix myproj_ --name myproj-boundary -o DIR

writes DIR/myproj-boundary.h and DIR/myproj-boundary.c. A caller goes on writing bb_decode(); the header maps the
names. Two copies with different prefixes can live in one program.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = "boundary_bundle"


def bundle(prefix: str, name: str) -> dict[str, str]:
    """The vendored files by name. `prefix` must be a C identifier or empty."""
    if prefix and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", prefix):
        raise ValueError(f"prefix {prefix!r} is not a C identifier")
    header = (HERE / f"{SOURCE}.h").read_text()
    source = (HERE / f"{SOURCE}.c").read_text()

    guard = re.search(r"^#ifndef (\w+)\n#define \1\n", header, re.M)
    include = f'#include "{SOURCE}.h"'
    if guard is None or include not in source:
        raise ValueError(f"{SOURCE}.h has no include guard or {SOURCE}.c does not include it")
    note = f"/* Vendored by native_shim/bundle.py of boundary-bundle, prefix {prefix or 'none'}. Do not edit here. */\n"
    define = f"\n#ifndef BB_PREFIX\n#define BB_PREFIX {prefix}\n#endif\n" if prefix else ""
    own_guard = re.sub(r"\W", "_", f"{prefix}{name}_h").upper()
    header = header.replace(guard.group(0), f"#ifndef {own_guard}\n#define {own_guard}\n{define}", 1)
    header = re.sub(rf"#endif /\* {guard.group(1)} \*/", f"#endif /* {own_guard} */", header)
    return {
        f"{name}.h": note + header,
        f"{name}.c": note + source.replace(include, f'#include "{name}.h"', 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", default="", help="put before every public symbol")
    parser.add_argument("--name", default=SOURCE, help="file name without its ending")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder for the two files")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    for file, text in bundle(args.prefix, args.name).items():
        (args.output / file).write_text(text)
        print(args.output / file)


if __name__ == "__main__":
    main()
