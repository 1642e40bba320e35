"""Static analysis of the C, C++ and Python sources, and a table of what it found.

    python tests/run_static.py [--only TOOLS] [--jobs N]

`make static` runs this with the tools that .requirements/static.txt pins. What a tool finds is mended, or excused on
its line with the reason: NOLINT for clang-tidy, cppcheck-suppress for cppcheck, nosec for bandit. boundary_bundle.c and
.h are copied into the patch series as they are, so that what is wrongly found there is excused below; an excuse that
excuses nothing is a finding too.

Exit status: 0 nothing was found, 1 something was, 2 it could not be done.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHIM = ROOT / "native_shim"
sys.path.insert(0, str(ROOT))

from boundary_bundle.native import NativeError, ensure_source  # noqa: E402
from boundary_bundle.native.apply import apply_series, series  # noqa: E402
from boundary_bundle.native.build import INCLUDE_DIRS, series_dir  # noqa: E402
from boundary_bundle.native.paths import cache_dir, prepare_cache  # noqa: E402
from boundary_bundle.native.process import Runner  # noqa: E402
from boundary_bundle.native.source import copy_tree  # noqa: E402

#: What runs where others send the bytes, and what they copy. The programs of the tests are compiled with every warning
#: and run under sanitizers, and are in nobody's hands.
SOURCES = (
    *sorted(SHIM.glob("*.c")),
    *sorted(SHIM.glob("*.cpp")),
    *sorted((SHIM / "examples").glob("*.c")),
    ROOT / "boundary_bundle" / "shards" / "data" / "check_fixtures.c",
    ROOT / "spec" / "testees" / "template.c",
)
#: For gcc's analyzer, which is quick.
TEST_SOURCES = (
    *sorted((SHIM / "tests").glob("*.c")),
    *sorted((ROOT / "fuzz").glob("*.c")),
    *sorted((ROOT / "tests").glob("*.c")),
)
#: Tests plant faults and start what they like; what they install, the runners, is looked at.
PYTHON = ("boundary_bundle", "fuzz", "native_shim", "patches", "spec", *sorted(map(str, ROOT.glob("tests/run_*.py"))))
TOOLS = ("clang-tidy", "cppcheck", "gcc", "bandit")


class Refusal(Exception):
    """It cannot be done; one sentence for the user."""


@dataclass(frozen=True)
class Excuse:
    """A finding in a file whose lines cannot say so themselves; ``text`` is the line that it is found on."""

    tool: str
    check: str
    text: str
    reason: str
    file: str = "native_shim/boundary_bundle.c"


_WIDENING = "bugprone-implicit-widening-of-multiplication-result"
_NULL = "clang-analyzer-core.NullDereference"
_RANK = "rank and axis are at most 8 and checked before: the product is at most 64"
_FEW = "a product of constants below 2^15"
_ASSEMBLER = "one instruction where gcc 8 has no header for it; without it a table is used"

EXCUSES: tuple[Excuse, ...] = (
    *(
        Excuse("clang-tidy", "portability-no-assembler", text, _ASSEMBLER)
        for text in (
            '__asm__("crc32q %1, %0" : "+r"(c) : "rm"(v));',
            '__asm__("crc32l %1, %0" : "+r"(low) : "rm"(v));',
            '__asm__("crc32b %1, %0" : "+r"(low) : "rm"(v));',
        )
    ),
    *(
        Excuse("clang-tidy", _WIDENING, text, _FEW)
        for text in (
            "for (; n >= 3 * 4096; n -= 3 * 4096, p += 3 * 4096) {",
            "for (; n >= 3 * 512; n -= 3 * 512, p += 3 * 512) {",
            "size_t piece = (size_t)smaller(n, COPY_BYTES);",
            "uint64_t room = smaller(smaller(s->need - s->have, size - *taken), COPY_BYTES);",
        )
    ),
    *(
        Excuse("clang-tidy", _WIDENING, text, _RANK)
        for text in (
            "uint64_t dim = load64(r + RECORD_FIXED + 8 * i);",
            "name = r + RECORD_FIXED + 8 * rank;",
            "if (load64(r + 8 * rank) % d->block_elements != 0) {",
            'BB_FAIL(BB_TENSOR_BLOCK, at + 8 * (uint64_t)rank, "dims", d->block_elements, load64(r + 8 * rank));',
            "uint64_t dim = load64(r + RECORD_FIXED + 8 * axis);",
            "out->dims[i] = load64(r + RECORD_FIXED + 8 * i);",
            "store64(r + RECORD_FIXED + 8 * i, t->dims[i]);",
            "memcpy(r + RECORD_FIXED + 8 * rank, t->name, name_length);",
            "if (t->dims[k] != load64(dims + 8 * k)) {",
        )
    ),
    Excuse(
        "clang-tidy",
        _NULL,
        "dst[w.length < w.cap ? w.length : w.cap - 1] = '\\0';",
        "cap is 0 where dst is NULL; the analyzer forgets it in the calls between",
    ),
    Excuse(
        "clang-tidy",
        _NULL,
        "crc = rd->config->crc32c(0, p + BB_HEADER_BYTES, (size_t)f->length);",
        "check_config has refused a config that is NULL",
    ),
    Excuse(
        "clang-tidy",
        _NULL,
        "o->body = known->body_bytes;",
        "is_prepared is false where known is NULL",
    ),
    Excuse(
        "clang-tidy",
        "clang-analyzer-core.DivideZero",
        ": elements / d->block_elements + (elements % d->block_elements != 0);",
        "a constant table's column, of which tests/test_c_codec_registry.py holds that it is 1 or more",
    ),
    Excuse(
        "clang-tidy",
        "clang-analyzer-core.UndefinedBinaryOperatorResult",
        "sum = s->value[n] > UINT64_MAX - sum ? UINT64_MAX : sum + s->value[n];",
        "symbols without a value are not in known, and the line before returns for them",
    ),
    Excuse(
        "gcc",
        "-Wanalyzer-null-dereference",
        "return d->block_elements == 1 ? n * d->block_bytes : n / d->block_elements * d->block_bytes;",
        "only for records that passed D15, which refuses a dtype that is not in the table",
    ),
    Excuse(
        "cppcheck",
        "arrayIndexThenCheck",
        "for (n = 0; k->name[n] != '\\0' && n < sizeof h->error->name - 1; n++) {",
        "a constant of the registry, which ends with a NUL before the limit",
    ),
    Excuse(
        "cppcheck",
        "constParameterPointer",
        "void *bb_reserve_fixed(void *user, uint32_t slot, void *old, size_t used, size_t need, size_t *capacity) {",
        "the type of a function that others write, bb_reserve_fn",
    ),
)


@dataclass(frozen=True)
class Finding:
    file: str
    line: int
    check: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message} [{self.check}]"


@dataclass
class Result:
    tool: str
    version: str
    files: int = 0
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)
    excused: int = 0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def place(name: str) -> str:
    """A file's name from the checkout's folder, if it lies there."""
    path = Path(os.path.normpath(ROOT / name))
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


def run(command: Sequence[str | Path], cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False)


def beside(name: str) -> Path:
    """A program of this environment."""
    found = Path(sys.executable).parent / name
    if not found.exists():
        raise Refusal(f"{name} is missing: make static installs it (.requirements/static.txt)")
    return found


def need_gcc() -> str:
    found = shutil.which("gcc")
    if found is None and shutil.which("apt-get") and os.geteuid() == 0:
        say("installing gcc ...")
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        command = ["apt-get", "install", "-q", "-y", "--no-install-recommends", "gcc", "libc6-dev"]
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
        found = shutil.which("gcc")
    # Apple's gcc is clang.
    if found is None or "Free Software Foundation" not in run([found, "--version"]).stdout:
        raise Refusal("gcc is missing, whose analyzer is wanted: apt-get install gcc, or dnf install gcc")
    return found


# ---- the tools -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """Where llama.cpp with the series lies, and how many processes may run."""

    tree: Path
    jobs: int

    def flags(self, source: Path) -> list[str]:
        standard = "-std=c11" if source.suffix == ".c" else "-std=c++17"
        folders = [self.tree / name for name in (*INCLUDE_DIRS, "common", ".")]
        return [standard, f"-I{SHIM}", *(f"-isystem{folder}" for folder in folders)]

    def each(self, work: Callable[[Path], list[Finding]], sources: Sequence[Path]) -> list[Finding]:
        """What was found in any of them, each finding once: headers are read with every source that has them."""
        # The largest first, so that no core is left with it at the end.
        ordered = sorted(sources, key=lambda path: -path.stat().st_size)
        with ThreadPoolExecutor(self.jobs) as pool:
            found = {finding for findings in pool.map(work, ordered) for finding in findings}
        return sorted(found, key=lambda finding: (finding.file, finding.line, finding.check))


def lines_of(text: str, pattern: re.Pattern[str]) -> list[Finding]:
    found = []
    for match in pattern.finditer(text):
        found.append(Finding(place(match["file"]), int(match["line"]), match["check"], match["message"]))
    return found


_CLANG = re.compile(
    r"^(?P<file>[^:\n]+):(?P<line>\d+):\d+: (?:warning|error): (?P<message>.*) \[(?P<check>[\w.,-]+)\]$", re.MULTILINE
)


def clang_tidy(job: Job, sources: Sequence[Path] = SOURCES) -> Result:
    program = beside("clang-tidy")
    version = re.search(r"version ([\d.]+)", run([program, "--version"]).stdout)
    result = Result("clang-tidy", version[1] if version else "?", len(sources))

    def work(source: Path) -> list[Finding]:
        command = [program, "--quiet", f"--config-file={SHIM / '.clang-tidy'}", source, "--", *job.flags(source)]
        done = run(command)
        found = lines_of(done.stdout, _CLANG)
        if done.returncode != 0 and not found:
            raise Refusal(f"clang-tidy could not read {place(str(source))}:\n{done.stderr[-2000:]}")
        return found

    result.findings = job.each(work, sources)
    return result


_CPPCHECK = re.compile(r"^(?P<file>[^:\n]+):(?P<line>\d+): (?P<check>\w+): (?P<message>.*)$", re.MULTILINE)
#: Matters of taste: variables at the head of a block, loops instead of algorithms, casts as C writes them (POSIX's
#: addresses, ggml's data pointers). And const on what a callback's type, which is others', has without it.
_CPPCHECK_LEFT_OUT = (
    *("variableScope", "useStlAlgorithm", "functionStatic"),
    *("cstyleCast", "dangerousTypeCast", "constParameterCallback"),
)


def cppcheck(job: Job, sources: Sequence[Path] = SOURCES) -> Result:
    program = beside("cppcheck")
    version = re.search(r"[\d.]+", run([program, "--version"]).stdout)
    result = Result("cppcheck", version[0] if version else "?", len(sources))
    options = ["--enable=warning,style,performance,portability", "--inline-suppr", "--quiet", "--library=posix"]
    options += [f"--suppress={name}" for name in _CPPCHECK_LEFT_OUT]
    options += ["--template={file}:{line}: {id}: {message}", f"-I{SHIM}"]

    def work(source: Path) -> list[Finding]:
        done = run([program, *options, "--std=c11" if source.suffix == ".c" else "--std=c++17", source])
        if done.returncode != 0:
            raise Refusal(f"cppcheck could not read {place(str(source))}:\n{done.stderr[-2000:]}")
        return lines_of(done.stderr, _CPPCHECK)

    result.findings = job.each(work, sources)
    return result


def gcc(job: Job, sources: Sequence[Path] = (*SOURCES, *TEST_SOURCES)) -> Result:
    """C alone: gcc's analyzer does not know C++ (gcc 12's manual says so, and so does the newest)."""
    program = need_gcc()
    sources = [source for source in sources if source.suffix == ".c"]
    result = Result("gcc", run([program, "-dumpfullversion"]).stdout.strip(), len(sources))

    def work(source: Path) -> list[Finding]:
        # -O0: what the optimizer has removed cannot be found.
        options = ["-O0", "-Wall", "-Wextra", "-fanalyzer", "-c", "-o", os.devnull]
        done = run([program, *job.flags(source), *options, source])
        found = lines_of(done.stderr, _CLANG)
        if done.returncode != 0 and not found:
            raise Refusal(f"gcc could not compile {place(str(source))}:\n{done.stderr[-2000:]}")
        return found

    result.findings = job.each(work, sources)
    return result


def bandit(places: Sequence[str] = PYTHON) -> Result:
    beside("bandit")
    command = [sys.executable, "-m", "bandit", "--quiet", "-c", "pyproject.toml", "-f", "json", "-r", *places]
    done = run(command)
    try:
        told = json.loads(done.stdout)
    except ValueError:
        raise Refusal(f"bandit gave no result:\n{done.stderr[-2000:]}") from None
    version = run([sys.executable, "-c", "import importlib.metadata as m; print(m.version('bandit'))"]).stdout.strip()
    result = Result("bandit", version, len(told["metrics"]) - 1)
    for row in told["results"]:
        result.findings.append(Finding(place(row["filename"]), row["line_number"], row["test_id"], row["issue_text"]))
    for row in told["errors"]:
        result.findings.append(Finding(place(row["filename"]), 0, "unreadable", row["reason"]))
    return result


# ---- what is excused -------------------------------------------------------------------------


def excuse(result: Result, excuses: Sequence[Excuse] = EXCUSES) -> None:
    """Take out of the findings what is excused; an excuse of this tool that is not used becomes one."""
    texts: dict[str, list[str]] = {}
    unused = [one for one in excuses if one.tool == result.tool]
    kept = []
    for finding in result.findings:
        if finding.file not in texts:
            path = ROOT / finding.file
            texts[finding.file] = path.read_text("utf-8").splitlines() if path.is_file() else []
        lines = texts[finding.file]
        text = lines[finding.line - 1].strip() if 0 < finding.line <= len(lines) else ""
        fitting = [
            one
            for one in excuses
            if (one.tool, one.file, one.check, one.text) == (result.tool, finding.file, finding.check, text)
        ]
        if fitting:
            result.excused += 1
            unused = [one for one in unused if one not in fitting]
        else:
            kept.append(finding)
    for one in unused:
        kept.append(Finding(one.file, 0, one.check, f"excused, but not found: {one.text}"))
    result.findings = kept


def table(results: Sequence[Result]) -> str:
    rows = [("tool", "version", "files", "seconds", "excused", "findings")]
    for r in results:
        rows.append((r.tool, r.version, str(r.files), f"{r.seconds:.1f}", str(r.excused), str(len(r.findings))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)


# ---- the command -----------------------------------------------------------------------------


def patched_tree(folder: Path) -> Path:
    """Sources of llama.cpp with the series applied; nothing is built."""
    say("preparing llama.cpp's headers ...")
    source = ensure_source(prepare_cache(cache_dir()))
    copy_tree(source, folder / "tree")
    apply_series(series(series_dir()), folder / "tree", Runner())
    return folder / "tree"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="run_static.py", description="Static analysis.")
    parser.add_argument("--only", default=",".join(TOOLS), metavar="TOOLS", help="some of: %(default)s")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time (%(default)s)")
    options = parser.parse_args(arguments)
    wanted = [name for name in options.only.split(",") if name]
    if not wanted or set(wanted) - set(TOOLS) or options.jobs < 1:
        parser.error(f"--only takes some of {', '.join(TOOLS)}, and --jobs is above 0")
    results = []
    try:
        with tempfile.TemporaryDirectory(prefix="boundary-bundle-static-") as folder:
            job = Job(Path(folder), options.jobs)
            if set(wanted) - {"bandit", "cppcheck"}:
                job = Job(patched_tree(Path(folder)), options.jobs)
            work: dict[str, Callable[[], Result]] = {
                "clang-tidy": lambda: clang_tidy(job),
                "cppcheck": lambda: cppcheck(job),
                "gcc": lambda: gcc(job),
                "bandit": bandit,
            }
            for name in TOOLS:
                if name in wanted:
                    say(f"{name} ...")
                    begin = time.monotonic()
                    result = work[name]()
                    excuse(result)
                    result.seconds = time.monotonic() - begin
                    results.append(result)
    except (Refusal, NativeError) as error:
        say(f"error: {error}")
        return 2
    for result in results:
        for finding in result.findings:
            print(f"{result.tool}: {finding}")
    print(table(results))
    return 1 if any(result.findings for result in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
