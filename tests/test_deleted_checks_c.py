"""Whichever check is deleted from the C codec, a vector that names its section fails.

Each check stands in boundary_bundle.c behind a comment with its step (`/* D23 */`) or, in
the parts of section 6 without steps, its error (`/* contract_shape */`). Its condition is
made false, the codec compiled and run against the vectors of that section. A crash or a
program that does not end counts as noticed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from boundary_bundle.conformance.transcript import export

ROOT = Path(__file__).resolve().parent.parent
SHIM = ROOT / "native_shim"
SOURCE = (SHIM / "boundary_bundle.c").read_text(encoding="ascii")
CC = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")

pytestmark = pytest.mark.skipif(CC is None, reason="no C compiler: neither cc, gcc nor clang is on the PATH")

MARK = re.compile(r"/\* ([A-D]\d+|truncated|trailing_bytes|contract_[a-z_]+)(?: \*/|:)")


def marks() -> list[tuple[str, int]]:
    """Section and place of each check. The encoder repeats some; the decoder comes first."""
    found: list[tuple[str, int]] = []
    seen: set[str] = set()
    for match in MARK.finditer(SOURCE):
        name = match.group(1)
        if name.startswith("contract_") or name not in seen:
            found.append((name, match.end()))
        seen.add(name)
    return found


def without(place: int) -> str:
    """The source with the first condition behind ``place`` never true."""
    begin = SOURCE.index("if (", place) + len("if ")
    depth = 0
    for end in range(begin, len(SOURCE)):
        depth += {"(": 1, ")": -1}.get(SOURCE[end], 0)
        if depth == 0:
            return f"{SOURCE[:begin]}(0 && {SOURCE[begin : end + 1]}){SOURCE[end + 1 :]}"
    raise AssertionError("a condition without an end")


def steps_of_the_specification() -> set[str]:
    text = (ROOT / "spec" / "boundary-bundle.md").read_text(encoding="utf-8")
    return set(re.findall(r"^\| ([A-D]\d+) \|", text, re.MULTILINE))


def run(*command: str) -> tuple[int | None, str]:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20, errors="replace")
    except subprocess.TimeoutExpired:
        return None, "does not end"
    return result.returncode, result.stdout + result.stderr


def test_every_step_has_its_mark() -> None:
    """A step that the codec checks nowhere, or under another name."""
    assert {name for name, _ in marks() if name[1:].isdigit()} == steps_of_the_specification()


def test_every_deleted_check_is_noticed(tmp_path: Path) -> None:
    assert CC is not None
    vectors = tmp_path / "vectors.txt"
    with vectors.open("w", encoding="ascii") as out:
        export(out)
    runner = str(tmp_path / "run_vectors.o")
    code, text = run(CC, "-std=c11", "-O0", "-c", str(SHIM / "tests" / "run_vectors.c"), "-o", runner)
    assert code == 0, text

    def verdict(number: int, name: str | None, source: str) -> tuple[int | None, str]:
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "boundary_bundle.c").write_text(source, encoding="ascii")
        program = str(folder / "run_vectors")
        compiled = run(
            *(CC or "cc", "-std=c11", "-O0", "-w", f"-I{SHIM}"),
            *(str(folder / "boundary_bundle.c"), runner, "-o", program),
        )
        assert compiled[0] == 0, compiled[1]
        section = [] if name is None else ["-s", f"6:{name}"]
        return run(program, *section, str(vectors))

    code, text = verdict(0, None, SOURCE)
    assert code == 0, text
    todo = list(enumerate(marks(), 1))
    with ThreadPoolExecutor(2) as workers:
        verdicts = list(workers.map(lambda item: verdict(item[0], item[1][0], without(item[1][1])), todo))
    unnoticed = []
    for (_, (name, place)), (code, text) in zip(todo, verdicts, strict=True):
        if code in (0, 3):  # 3: there is no vector of that section
            unnoticed.append((name, SOURCE.count("\n", 0, place) + 1, text[-200:]))
    assert not unnoticed
