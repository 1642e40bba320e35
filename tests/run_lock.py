"""Write .requirements/ anew: the newest versions that go together, with the hashes of all their files.

    python tests/run_lock.py

`make lock` runs this with the uv that .requirements/lock.txt names. Each file is complete: it holds what one kind of
environment installs beside the standard library, for every Python from 3.10 on and every platform. All of them name the
same versions, so that one can be installed on top of another. No address of an index is written: whichever is
configured gives the files, and the hashes say whether they are the ones meant.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".requirements"
OLDEST_PYTHON = "3.10"
PROJECT = "pyproject.toml"
#: Files of .requirements/ -> what of pyproject.toml they hold.
LOCKS: dict[str, tuple[str, ...]] = {
    "runtime": (PROJECT, "--group", "build"),
    "codec": (PROJECT, "--group", "build", "--group", "codec"),
    "test": (PROJECT, "--extra", "test", "--group", "build"),
    "ray": (PROJECT, "--extra", "ray"),
    "check": ("--group", "check"),
    "bench": (PROJECT, "--extra", "bench"),
    "fuzz": ("--group", "fuzz"),
    "static": ("--group", "static"),
    "audit": ("--group", "audit"),
    "lock": ("--group", "lock"),
}
#: Goes into the wheel: requirements.txt, and npm's lock for what package.json names.
KAITAI = ROOT / "spec" / "testees" / "kaitai"


def compile_lock(target: Path, what: tuple[str, ...], *more: str) -> None:
    command = ["uv", "pip", "compile", "--quiet", "--universal", "--python-version", OLDEST_PYTHON]
    command += ["--generate-hashes", "--no-emit-index-url", "--no-emit-find-links"]
    command += ["--custom-compile-command", "make lock", "--output-file", str(target), *more, *what]
    subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def lock_npm(folder: Path) -> None:
    """npm's lock without addresses, whose sha512 npm checks."""
    shutil.copy(KAITAI / "package.json", folder)
    command = ["npm", "install", "--package-lock-only", "--omit-lockfile-registry-resolved", "--ignore-scripts"]
    subprocess.run([*command, "--no-audit", "--no-fund"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    lock = json.loads((folder / "package-lock.json").read_text("utf-8"))
    for row in lock["packages"].values():
        row.pop("funding", None)
    (KAITAI / "package-lock.json").write_text(json.dumps(lock, indent=2) + "\n", "utf-8")


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="boundary-bundle-lock-") as folder:
        together = Path(folder, "together.txt")
        try:
            everything = [word for what in LOCKS.values() for word in what if word != PROJECT]
            compile_lock(together, (PROJECT, *everything, "--group", "kaitai"))
            made = {}
            for name, what in {**LOCKS, "kaitai": ("--group", "kaitai")}.items():
                made[name] = Path(folder, f"{name}.txt")
                compile_lock(made[name], what, "--constraint", str(together))
            if shutil.which("npm") is None:
                print("npm is not here: the lock of spec/testees/kaitai stays as it is", file=sys.stderr)
            else:
                lock_npm(Path(folder))
        except subprocess.CalledProcessError as error:
            print(f"error: {shlex.join(error.cmd)} ended with status {error.returncode}", file=sys.stderr)
            return 2
        for name, path in made.items():
            text = path.read_text("utf-8").replace(f"    #   -c {together}\n", "").replace(f" -c {together}", "")
            (KAITAI / "requirements.txt" if name == "kaitai" else FOLDER / f"{name}.txt").write_text(text, "utf-8")
    print(f"written: .requirements/ and {KAITAI.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
