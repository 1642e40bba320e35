"""What this project uses that is not its own, and whether anything known is wrong with it.

    python tests/run_audit.py [--offline]     the list, against THIRD_PARTY.md, and the advisories
    python tests/run_audit.py --write         write THIRD_PARTY.md

`make audit` runs the first, `make lock` ends with the second. The list is made of what pins: .requirements/,
boundary_bundle/native/pin.py, spec/testees/kaitai. Advisories are looked up by pip-audit, in the package index's own
database; where that cannot be reached the result is *not known*, and the exit status 3 says so.

Exit status: 0 the list is right and no advisory is known, 1 not so, 2 it could not be done, 3 the list is right and
advisories could not be looked up.
"""

from __future__ import annotations

import argparse
import email
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".requirements"
KAITAI = ROOT / "spec" / "testees" / "kaitai"
TARGET = ROOT / "THIRD_PARTY.md"
sys.path.insert(0, str(ROOT))

from boundary_bundle.native import pin  # noqa: E402

#: File of .requirements/ -> what it is used for. The first that names a package says it.
USES = {
    "runtime": "the package",
    "codec": "tests",
    "test": "tests, `run`, `convert`",
    "ray": "tests, `run --engine ray`",
    "bench": "`make bench`",
    "fuzz": "`make fuzz`",
    "check": "`make check`",
    "static": "`make static`",
    "audit": "`make audit`",
    "lock": "`make lock`",
}
BUILD = ("pip", "setuptools")


class Refusal(Exception):
    """It cannot be done; one sentence for the user."""


@dataclass
class Package:
    """One version of a package of the Python index."""

    name: str
    version: str
    use: str
    #: Files of .requirements/, or the one of spec/testees/kaitai.
    locks: list[str] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)


_ROW = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;\\]+)(?P<rest>.*(?:\n    --hash=.*)*)", re.MULTILINE)


def pinned(lock: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Name, version and sha256 hashes of each row of a requirements file."""
    for match in _ROW.finditer(lock.read_text("utf-8")):
        yield match["name"], match["version"], re.findall(r"--hash=sha256:([0-9a-f]{64})", match["rest"])


def packages() -> list[Package]:
    found: dict[tuple[str, str], Package] = {}
    places = {name: FOLDER / f"{name}.txt" for name in USES}
    places["kaitai"] = KAITAI / "requirements.txt"
    for place, path in places.items():
        for name, version, hashes in pinned(path):
            use = "building the package" if name in BUILD else USES.get(place, "Kaitai testees")
            package = found.setdefault((name, version), Package(name, version, use))
            package.locks.append(place)
            package.hashes = hashes
    return sorted(found.values(), key=lambda package: (package.name, package.version))


# ---- licences --------------------------------------------------------------------------------

#: Classifiers that say less than an SPDX identifier -> what they mean.
_CLASSIFIED = {
    "MIT License": "MIT",
    "BSD License": "BSD",
    "Apache Software License": "Apache-2.0",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "ISC License (ISCL)": "ISC",
}


def licence(metadata: email.message.Message, file: str) -> str:
    """What a package's metadata say, an SPDX expression where they have one. ``file`` is the text of its licence."""
    if said := metadata.get("License-Expression"):
        return str(said)
    classified = [
        _CLASSIFIED.get(last, last)
        for row in metadata.get_all("Classifier") or []
        if row.startswith("License ::") and (last := row.split(" :: ")[-1]) != "OSI Approved"
    ]
    said = str(metadata.get("License") or "").strip()
    # Some put the licence's whole text there.
    if said and "\n" not in said and len(said) < 60:
        return said
    if not classified and "Apache License" in file and "Version 2.0" in file:
        return "Apache-2.0, by its licence file"
    return " AND ".join(classified) or "not said"


def is_licence(name: str) -> bool:
    return ".dist-info/" in name and name.rsplit("/", 1)[-1].upper().startswith("LICENSE")


def from_wheel(package: Package) -> str:
    """Downloads the wheel, with its hash checked, and reads its metadata."""
    with tempfile.TemporaryDirectory(prefix="boundary-bundle-audit-") as folder:
        wanted = Path(folder, "wanted.txt")
        hashes = " ".join(f"--hash=sha256:{digest}" for digest in package.hashes)
        wanted.write_text(f"{package.name}=={package.version} {hashes}\n", "utf-8")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--require-hashes", "--only-binary", ":all:", "--dest", folder, "-r", str(wanted)]
        for python in ("3.10", "3.11", "3.13"):
            done = subprocess.run([*command, "--python-version", python], capture_output=True, text=True, check=False)
            for wheel in Path(folder).glob("*.whl"):
                with zipfile.ZipFile(wheel) as archive:
                    names = archive.namelist()
                    metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
                    file = "".join(archive.read(name).decode("utf-8", "replace") for name in names if is_licence(name))
                    return licence(email.message_from_bytes(archive.read(metadata)), file)
    raise Refusal(f"{package.name} {package.version} cannot be downloaded for its licence:\n{done.stderr[-1000:]}")


def installed(package: Package) -> str | None:
    """The licence that the installed package states, or None if another version is installed, or none."""
    try:
        distribution = importlib.metadata.distribution(package.name)
    except importlib.metadata.PackageNotFoundError:
        return None
    if distribution.version != package.version:
        return None
    files = [path.read_text("utf-8") for path in distribution.files or () if is_licence(path.as_posix())]
    return licence(email.message_from_string(distribution.read_text("METADATA") or ""), "".join(files))


def known_licences() -> dict[tuple[str, str], str]:
    """What THIRD_PARTY.md has: a version does not change its licence."""
    if not TARGET.exists():
        return {}
    rows = re.findall(r"^\| ([\w.-]+) \| ([\w.]+) \| ([^|]+) \|", TARGET.read_text("utf-8"), re.MULTILINE)
    return {(name, version): said for name, version, said in rows if said != "not said"}


# ---- the document ----------------------------------------------------------------------------

_HEAD = (
    "# What is used here that others made\n\n"
    "Written by `make lock` (`tests/run_audit.py --write`) from what pins it; a test compares. This project's own "
    "licence is MIT ([LICENSE](LICENSE)), and its packages hold no file of anybody else: what stands here is "
    "downloaded, each file checked against its hash before it is used, and none of it is passed on.\n\n"
    "`make audit` looks up whether an advisory is known for any of the Python packages.\n\n"
    "## llama.cpp and the model\n\n"
    "| what | version | licence | sha256 | for |\n|---|---|---|---|---|"
)


def document(licences: dict[tuple[str, str], str]) -> str:
    out = [_HEAD]
    out.append(f"| llama.cpp, by git | commit {pin.UPSTREAM_COMMIT} | MIT | the commit's own | builds |")
    for item in (*pin.ARCHIVES.values(), *pin.LATER_ARCHIVES.values()):
        use = (
            "builds, where git cannot fetch the commit"
            if item is pin.DEFAULT_ARCHIVE
            else "`make patches-check`, tests"
        )
        told = f"{item.project}, its folder llama.cpp/"
        out.append(
            f"| {told} | {item.version} | MIT; the package around it AGPL-3.0-or-later | {item.sha256} | {use} |"
        )
    wheel = pin.MODEL_WHEEL
    out.append(f"| {wheel.project}, the model in it | {wheel.version} | Apache-2.0 | {wheel.sha256} | demo, tests |")
    model = pin.MODEL_MEMBER.split("/")[-1]
    out.append(f"| SmolLM2-135M-Instruct, {model} | - | Apache-2.0 | {pin.MODEL_SHA256} | demo, tests |")
    out.append(
        "\nOf the package around an archive nothing is unpacked and nothing is run; of the one around the model only "
        "the model is unpacked.\n\nWhat llama.cpp's tree holds of others, as the pin has it:\n\n"
        "| folder or file | version | licence | in our builds |\n|---|---|---|---|"
    )
    out += [f"| {place} | {version} | {said} | {use} |" for place, version, said, use in VENDORED]
    out.append("\n## Python packages\n")
    out.append(
        "Hashes of every file of a version are in the files of [.requirements](.requirements) that are named; which of "
        "several versions is installed is a matter of the Python.\n"
    )
    out.append("| package | version | licence | files with hashes | in | for |\n|---|---|---|---|---|---|")
    for package in packages():
        said = licences[package.name, package.version]
        places = ", ".join(package.locks)
        count = len(package.hashes)
        out.append(f"| {package.name} | {package.version} | {said} | {count} | {places} | {package.use} |")
    out.append("\n## npm packages\n\nFor the Kaitai testees; pinned by spec/testees/kaitai/package-lock.json.\n")
    out.append("| package | version | licence | integrity |\n|---|---|---|---|")
    lock = json.loads((KAITAI / "package-lock.json").read_text("utf-8"))
    for place, row in sorted(lock["packages"].items()):
        if place:
            name = place.removeprefix("node_modules/")
            out.append(f"| {name} | {row['version']} | {row['license']} | {row['integrity']} |")
    out.append(_TAIL)
    return "\n".join(out) + "\n"


#: Folder or file below llama.cpp/, version, licence, whether a build of ours compiles it. The test compares the
#: folders with those of the tree.
VENDORED = (
    ("vendor/nlohmann", "3.12.0", "MIT", "the worker, `certify`, tiny models"),
    ("vendor/cpp-httplib", "0.50.1", "MIT", "no"),
    ("vendor/miniaudio", "0.11.25", "Unlicense OR MIT-0", "no"),
    ("vendor/sheredom", "-", "Unlicense", "no"),
    ("vendor/stb", "2.30", "MIT OR Unlicense", "no"),
    ("ggml/src/ggml-cpu/llamafile/sgemm.cpp", "-", "MIT (Mozilla Foundation)", "libggml-cpu"),
    ("ggml/src/ggml-cpu/kleidiai", "-", "MIT (Arm)", "no"),
)

_TAIL = (
    "\n## From the operating system\n\n"
    "Compilers, CMake, git, make or ninja, and where they are there ccache, valgrind, qemu and cross compilers are "
    "those of the machine, whose maker signs its packages; .ci/run lists Debian's. Their versions are not pinned: a "
    "build records its compilers and what it was made from.\n\n"
    "## Not pinned\n\n"
    "- The template of a testee in Rust, which one test compiles where cargo is there, lets cargo choose serde_json "
    "(MIT OR Apache-2.0); cargo checks each file against its own index.\n"
    "- Who installs this project with pip gets the versions that pip chooses within pyproject.toml."
)


# ---- advisories ------------------------------------------------------------------------------


def advisories() -> tuple[int, str]:
    """0, 1 or 3 as the program ends, and what is to be said."""
    locks = [*(FOLDER / f"{name}.txt" for name in USES), KAITAI / "requirements.txt"]
    with tempfile.TemporaryDirectory(prefix="boundary-bundle-audit-") as folder:
        # One file a version, without markers: what another Python would install is looked up as well.
        answers = []
        rows = {f"{name}=={version}" for lock in locks for name, version, _ in pinned(lock)}
        todo = sorted(rows)
        while todo:
            taken: dict[str, str] = {}
            for row in todo:
                taken.setdefault(row.split("==")[0], row)
            todo = [row for row in todo if row not in taken.values()]
            wanted = Path(folder, "wanted.txt")
            wanted.write_text("".join(f"{row}\n" for row in taken.values()), "utf-8")
            command = [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "--progress-spinner", "off"]
            command += ["--format", "json", "--requirement", str(wanted)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            try:
                answers += json.loads(done.stdout)["dependencies"]
            except (ValueError, KeyError):
                last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
                return 3, f"NOT KNOWN: the advisory database could not be reached ({last[0][:300]})"
    skipped = [row["name"] for row in answers if "skip_reason" in row]
    found = [
        f"{row['name']} {row['version']}: {fault['id']}, mended in {', '.join(fault['fix_versions']) or 'no version'}"
        for row in answers
        for fault in row.get("vulns", ())
    ]
    if found:
        return 1, "\n".join(found)
    if skipped or len(answers) < len(rows):
        return 3, f"NOT KNOWN: of {len(rows)} versions {len(answers) - len(skipped)} could be looked up"
    return 0, f"no advisory is known for any of {len(rows)} versions"


# ---- the command -----------------------------------------------------------------------------


def licences_of_all(download: bool) -> dict[tuple[str, str], str]:
    known = known_licences()
    found = {}
    for package in packages():
        key = package.name, package.version
        said = installed(package) or known.get(key) or (from_wheel(package) if download else None)
        found[key] = said or "not known"
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="run_audit.py", description="What is used that others made.")
    parser.add_argument("--write", action="store_true", help="write THIRD_PARTY.md")
    parser.add_argument("--offline", action="store_true", help="look no advisory up")
    options = parser.parse_args(arguments)
    try:
        text = document(licences_of_all(download=options.write))
    except Refusal as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.write:
        TARGET.write_text(text, "utf-8")
        print(f"written: {TARGET.name}")
        return 0
    if not TARGET.exists() or TARGET.read_text("utf-8") != text:
        print(f"{TARGET.name} is not what is pinned: make lock")
        return 1
    print(f"{TARGET.name}: {len(packages())} versions of Python packages, as they are pinned and say of themselves")
    if options.offline:
        print("advisories: not looked up")
        return 0
    status, told = advisories()
    print(f"advisories: {told}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
