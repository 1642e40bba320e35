"""One hash-checked download through pip, which brings its own configuration (index, proxy, certificates)."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

from .pin import Download
from .process import NativeError, Runner, build_environment, stop
from .progress import Reporter, Step


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def verify_sha256(path: Path, expected: str, what: str) -> None:
    """:raises NativeError: with the expected and the found hash."""
    found = sha256_file(path)
    if found != expected:
        raise NativeError(f"{what} is not the pinned file: expected sha256 {expected}, found {found} ({path})")


# pip asks each source archive for its metadata before it keeps it, by running the archive's own build code with tools
# that it downloads for that, of whatever version is the newest. This stands in for setuptools and answers in their
# place, from the pin: neither those tools nor a line of the archive are run.
_STAND_IN = """\
import pathlib


def prepare_metadata_for_build_wheel(folder, settings=None):
    place = pathlib.Path(folder, "{folder}.dist-info")
    place.mkdir()
    (place / "METADATA").write_text("Metadata-Version: 2.1\\nName: {project}\\nVersion: {version}\\n")
    return place.name
"""


def _write_stand_in(item: Download, place: Path) -> None:
    package = place / "setuptools"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    folder = f"{item.project.replace('-', '_')}-{item.version}"
    text = _STAND_IN.format(folder=folder, project=item.project, version=item.version)
    (package / "build_meta.py").write_text(text, encoding="ascii")


def pip_download(item: Download, into: Path, reporter: Reporter, runner: Runner) -> Path:
    """Download ``item`` into the existing empty folder ``into`` and return the verified file.

    The hash is checked by pip and again here. Nothing out of the file is run, and nothing else is downloaded.
    """
    requirement = into / "requirement.txt"
    requirement.write_text(f"{item.project}=={item.version} --hash=sha256:{item.sha256}\n", encoding="utf-8")
    target, scratch, stand_in = into / "file", into / "tmp", into / "stand-in"
    target.mkdir()
    scratch.mkdir()
    _write_stand_in(item, stand_in)
    command = [sys.executable, "-m", "pip", "download", "--require-hashes", "--no-deps", "--progress-bar", "off"]
    command += ["--no-build-isolation", "--no-binary" if item.suffix == ".tar.gz" else "--only-binary", item.project]
    command += ["--dest", str(target), "--requirement", str(requirement)]
    runner.commands.append(command)
    log = into / "pip.log"
    with reporter.step(f"downloading {item.label}") as step, open(log, "w+", encoding="utf-8") as sink:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            # pip writes the file it is receiving under TMPDIR, which makes its growth visible.
            env=build_environment(TMPDIR=str(scratch), PYTHONUNBUFFERED="1", PYTHONPATH=str(stand_in)),
            text=True,
            start_new_session=True,
        )
        try:
            status = _watch(child, scratch, item, step)
        finally:
            stop(child)
    if status != 0:
        text = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        if any("No module named pip" in line for line in text):
            raise NativeError(f"{sys.executable} has no pip, which downloads {item.label}: python -m ensurepip")
        raise NativeError(
            f"pip could not download {item.label} (status {status}); it said:\n    " + "\n    ".join(text[-30:])
        )
    files = [path for path in target.iterdir() if path.name.endswith(item.suffix)]
    if len(files) != 1:
        raise NativeError(f"pip left {len(files)} {item.suffix} files for {item.label}; one was expected")
    verify_sha256(files[0], item.sha256, item.label)
    return files[0]


def _watch(child: subprocess.Popen[str], scratch: Path, item: Download, step: Step) -> int:
    while True:
        try:
            return child.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            if item.size:
                step.update(min(_received(scratch, item.suffix), item.size), item.size)


def _received(scratch: Path, suffix: str) -> int:
    largest = 0
    for folder in scratch.glob("pip-*"):
        for path in folder.glob(f"*{suffix}"):
            try:
                largest = max(largest, path.stat().st_size)
            except OSError:  # gone again
                continue
    return largest


def stamp_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def fsync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
