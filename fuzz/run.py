"""Fuzzes both codecs: builds what it needs, runs the targets in turn, tells what they found.

    run.py --seconds 60                 all targets, a share of the time each
    run.py --hours 8 --report           the same for long, with coverage and a dated report in fuzz/reports
    run.py --replay core FILE           one input again

Everything made lies in fuzz/build: programs, seeds, corpora, findings. Exit status: 0 nothing was
found, 1 something was, 2 it could not be done.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FUZZ = Path(__file__).resolve().parent
ROOT = FUZZ.parent
SHIM = ROOT / "native_shim"
C_TARGETS = ("core", "stream", "roundtrip", "encode")
#: In C++, with the patched libllama and a tiny model.
MODEL_TARGETS = ("boundary", "worker")
PYTHON_TARGETS = ("decoder", "stream", "inspector", "differential")
NAMES = (*(f"c-{name}" for name in (*C_TARGETS, *MODEL_TARGETS)), *(f"py-{name}" for name in PYTHON_TARGETS))
MAX_INPUT = 8192
#: The part of a target's time that is spent with feedback from coverage, which makes its corpus; the rest goes into
#: mutations of that corpus, several times as many a second.
GUIDED = 0.3
#: Shares of the whole time; 1 for others. So that an hour and a half on two processors is a thousand million executions
#: of the C decoders, and twenty million each of the Python targets and of both codecs side by side.
WEIGHTS = {"c-core": 8.0, "c-roundtrip": 8.0, "py-decoder": 3.0, "py-differential": 8.0}
#: More than one finding of a kind teaches little; more than so many runs of one target neither.
MAX_FINDINGS = 8
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
#: Without the comparisons, which double the time: mutator and dictionary know what is compared with.
FEEDBACK = ["-fsanitize-coverage=inline-8bit-counters,pc-table"]


class Refusal(Exception):
    """It cannot be done; one sentence for the user."""


@dataclass
class Finding:
    target: str
    kind: str
    file: str
    input_hex: str
    #: How many of three runs of the input alone found it again.
    repeated: int


@dataclass
class Result:
    target: str
    seconds: float = 0.0
    executions: int = 0
    #: Of them with feedback from coverage.
    guided: int = 0
    reached: int = 0
    accepted: int = 0
    corpus: int = 0
    findings: list[Finding] = field(default_factory=list)
    error: str | None = None

    @property
    def per_second(self) -> float:
        return self.executions / self.seconds if self.seconds else 0.0

    @property
    def share(self) -> float:
        return self.reached / self.executions if self.executions else 0.0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- what is needed -------------------------------------------------------------------


def _fuzzes(clang: str, folder: Path) -> bool:
    """Whether a compiler builds libFuzzer targets with sanitizers."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "probe.c"
    source.write_text(
        "#include <stddef.h>\n#include <stdint.h>\nint LLVMFuzzerTestOneInput(const uint8_t *d, size_t n);\n"
        "int LLVMFuzzerTestOneInput(const uint8_t *d, size_t n) { return d == NULL && n > 0; }\n",
        encoding="ascii",
    )
    command = [clang, "-fsanitize=fuzzer,address,undefined", str(source), "-o", str(folder / "probe")]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _version(clang: str) -> int:
    said = subprocess.run([clang, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"clang version (\d+)", said)
    return int(found.group(1)) if found else 0


def find_clang(folder: Path) -> str | None:
    """$CLANG, else the newest clang from 14 on that builds libFuzzer targets."""
    names = [os.environ["CLANG"]] if os.environ.get("CLANG") else ["clang", *(f"clang-{n}" for n in range(22, 13, -1))]
    there = [path for name in names if (path := shutil.which(name)) is not None and _version(path) >= 14]
    return next((path for path in there if _fuzzes(path, folder)), None)


def need_clang(folder: Path) -> str:
    clang = find_clang(folder)
    packages = ["clang", "libclang-rt-dev", "llvm"]
    if clang is None and shutil.which("apt-get") and os.geteuid() == 0:
        say(f"installing {', '.join(packages)} ...")
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "check": False}
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["apt-get", "update", "-q"], env=environment, **quiet)
        command = ["apt-get", "install", "-q", "-y", "--no-install-recommends", *packages]
        subprocess.run(command, env=environment, **quiet)
        clang = find_clang(folder)
    if clang is None:
        raise Refusal(
            "clang 14 or newer with libFuzzer and the sanitizers (compiler-rt) is missing: "
            f"apt-get install {' '.join(packages)}, or dnf install clang compiler-rt llvm; CLANG=... names another one"
        )
    return clang


def need_atheris() -> None:
    wanted = ["atheris", "coverage"]
    check = [sys.executable, "-c", "import atheris, coverage"]
    if subprocess.run(check, capture_output=True, check=False).returncode == 0:
        return
    say(f"installing {' and '.join(wanted)} ...")
    # What is pinned, and its wheels alone: built from source it would want a clang of its own.
    command = [sys.executable, "-m", "pip", "install", "--progress-bar", "off", "-q", "--require-hashes"]
    command += ["--only-binary", ":all:", "-r", str(ROOT / ".requirements" / "fuzz.txt")]
    subprocess.run(command, stdout=sys.stderr, check=False)
    if subprocess.run(check, capture_output=True, check=False).returncode != 0:
        raise Refusal(
            f"atheris cannot be had for Python {sys.version_info[0]}.{sys.version_info[1]} from the package index: "
            "run with a Python that it has wheels for (PYTHON=python3.11 make fuzz), or the C targets alone "
            "(--only c-core,c-stream,c-roundtrip,c-encode)"
        )


# ---- building ---------------------------------------------------------------------------


def _compile(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Refusal(f"{' '.join(command)} failed:\n{done.stderr}")


def _stale(product: Path, sources: Sequence[Path]) -> bool:
    return not product.exists() or any(source.stat().st_mtime > product.stat().st_mtime for source in sources)


@dataclass
class Tools:
    """Programs and folders of a run."""

    build: Path
    clang: str
    #: Seconds that a run takes beyond what libFuzzer is told, of C and of Python targets. libFuzzer looks at its
    #: clock once a second, and Python needs a moment to begin; what the last run took is the best guess.
    overhead: dict[str, float] = field(default_factory=lambda: {"c": 1.0, "p": 2.0})

    @property
    def mutator(self) -> Path:
        return self.build / "libmutate.so"

    @property
    def library(self) -> Path:
        return self.build / "libcross_codec.so"

    @property
    def model(self) -> Path:
        return self.build / "tiny.gguf"

    @property
    def seeds(self) -> Path:
        return self.build / "seeds"

    def program(self, name: str, what: str = "fuzz") -> Path:
        return self.build / f"{what}-{name}"

    def corpus(self, name: str) -> Path:
        return self.build / "corpus" / name

    def findings(self, name: str) -> Path:
        return self.build / "findings" / name

    def counts(self, name: str) -> Path:
        """Where atheris leaves its counts."""
        return self.build / f"counts-{name}"

    def beside(self, tool: str) -> str:
        """A tool of the compiler's own version."""
        own = Path(self.clang).resolve().parent / tool
        found = str(own) if own.exists() else shutil.which(f"{tool}-{_version(self.clang)}") or shutil.which(tool)
        if found is None:
            raise Refusal(f"{tool} is missing: apt-get install llvm, or dnf install llvm")
        return found


def build_c(tools: Tools, names: Sequence[str], codec: Path = SHIM / "boundary_bundle.c", what: str = "fuzz") -> None:
    """The C targets: ``what`` is "fuzz" (libFuzzer), "bulk" (standalone.c), or "cover" (without sanitizers, counting
    what runs)."""
    tools.build.mkdir(parents=True, exist_ok=True)
    flags = {
        "fuzz": ["-O2", *SANITIZE, *FEEDBACK],
        "bulk": ["-O2", *SANITIZE],
        "cover": ["-O0", "-fprofile-instr-generate", "-fcoverage-mapping"],
    }[what]
    # Neither gives feedback: their branches are not those that are looked for.
    beside = [tools.build / "mutate.o", *([tools.build / "standalone.o"] if what == "bulk" else [])]
    for made in beside:
        if _stale(made, [FUZZ / f"{made.stem}.c", FUZZ / "mutate.h"]):
            _compile([tools.clang, "-std=c11", "-O2", "-c", str(FUZZ / f"{made.stem}.c"), "-o", str(made)])
    headers = [FUZZ / "mutate.h", FUZZ / "target.h", SHIM / "boundary_bundle.h"]
    todo = [name for name in names if _stale(tools.program(name, what), [FUZZ / f"{name}.c", codec, *beside, *headers])]
    if not todo:
        return
    say(f"building {', '.join(tools.program(name, what).name for name in todo)} ...")

    def compiled(source: Path) -> str:
        made = str(tools.build / f"{what}-{source.name}.o")
        warnings = ["-std=c11", "-g", "-Wall", "-Wextra", f"-I{SHIM}"]
        _compile([*launcher(), tools.clang, *warnings, *flags, "-c", str(source), "-o", made])
        return made

    with ThreadPoolExecutor(processors()) as pool:
        *objects, of_codec = pool.map(compiled, [*(FUZZ / f"{name}.c" for name in todo), codec])
    linked = ["-fsanitize=address,undefined" if what == "bulk" else "-fsanitize=fuzzer"]
    linked += SANITIZE if what == "fuzz" else flags if what == "cover" else []
    for name, made in zip(todo, objects, strict=True):
        _compile([tools.clang, *linked, made, of_codec, *map(str, beside), "-o", str(tools.program(name, what))])


#: What the targets with a model instrument: of the patched library what reads a bundle, and of the worker everything
#: but its main file. The rest is the library of the cache; what is linked here goes before its own.
INSTRUMENTED = {
    "boundary": (),
    "worker": tuple(path.name for path in sorted(SHIM.glob("worker_*.cpp"))),
}
IN_THE_LIBRARY = ("llama-boundary.cpp", "llama-boundary-arch.cpp", "llama-session.cpp", "llama-session-memory.cpp")


def native_build() -> dict[str, Any]:
    """The patched build of boundary_bundle.native, made if it is not in the cache."""
    script = (
        "import json, sys; from boundary_bundle.native import build; json.dump(build('patched').as_json(), sys.stdout)"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=python_environment(), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise Refusal("the patched libllama cannot be built, which c-boundary and c-worker need")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def build_with_model(tools: Tools, names: Sequence[str]) -> None:
    """The targets that run a tiny model, both ways, and the model."""
    if not names:
        return
    native = native_build()
    tools.build.mkdir(parents=True, exist_ok=True)
    if not tools.model.exists():
        script = (
            "from boundary_bundle.shards.tiny_models import Shape, write; "
            "shape = Shape(n_layer=3, n_head=2, n_head_kv=1, n_ff=64); "
            f"write({str(tools.model)!r}, shape=shape)"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], env=python_environment(), capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise Refusal(f"the tiny model cannot be written:\n{done.stderr}")
    source_dir = Path(native["source_dir"])
    include = [f"-I{path}" for path in (SHIM, *native["include_dirs"])]
    library = [source_dir / "src" / name for name in IN_THE_LIBRARY]
    headers = [FUZZ / name for name in ("mutate.h", "target.h", "model.h")]
    headers += SHIM.glob("*.h")
    build_c(tools, (), what="bulk")  # standalone.o, mutate.o
    libraries = [str(path) for path in sorted(Path(native["lib_dir"]).glob("lib*.so"))]
    sources = {
        name: [FUZZ / f"{name}.cpp", *(SHIM / part for part in INSTRUMENTED[name]), *library]
        + [SHIM / "boundary_bundle.c", source_dir / "src" / "boundary-bundle.c"]
        for name in names
    }
    for what, flags in (("fuzz", [*SANITIZE, *FEEDBACK]), ("bulk", SANITIZE)):
        beside = [tools.build / "mutate.o", *([tools.build / "standalone.o"] if what == "bulk" else [])]
        todo = [
            name
            for name in names
            if _stale(tools.program(name, what), [*sources[name], *beside, *headers, Path(native["library"])])
        ]
        if not todo:
            continue
        say(f"building {' and '.join(tools.program(name, what).name for name in todo)} ...")
        objects: dict[Path, str] = {}
        jobs = []
        for source in {source: None for name in todo for source in sources[name]}:
            # boundary_bundle.c is there twice, by names that differ in one sign
            objects[source] = str(tools.build / f"model-{what}-{source.name}.o")
            in_c = source.suffix == ".c"
            compiler = [tools.clang, "-std=c11"] if in_c else [tools.beside("clang++"), "-std=c++17"]
            jobs.append([*launcher(), *compiler, "-g", "-O1", *flags, *include, "-c", str(source)])
            jobs[-1] += ["-o", objects[source]]
        with ThreadPoolExecutor(processors()) as pool:
            list(pool.map(_compile, jobs))
        for name in todo:
            linked = ["-fsanitize=fuzzer", *SANITIZE] if what == "fuzz" else SANITIZE
            linked = [*linked, *(objects[source] for source in sources[name]), *map(str, beside), *libraries]
            linked += [f"-Wl,-rpath,{native['lib_dir']}", "-lm", "-o", str(tools.program(name, what))]
            _compile([tools.beside("clang++"), "-pthread", *linked])


def launcher() -> list[str]:
    return [found] if (found := shutil.which("ccache")) is not None else []


def build_libraries(build: Path, compiler: str) -> None:
    """The mutator, and the C codec with what the tests ask of it, for Python."""
    build.mkdir(parents=True, exist_ok=True)
    shared = [compiler, "-std=c11", "-O2", "-fPIC", "-shared"]
    if _stale(build / "libmutate.so", [FUZZ / "mutate.c", FUZZ / "mutate.h"]):
        _compile([*shared, str(FUZZ / "mutate.c"), "-o", str(build / "libmutate.so")])
    sources = [SHIM / "boundary_bundle.c", SHIM / "tests" / "cross_codec.c"]
    used = [*sources, SHIM / "boundary_bundle.h", SHIM / "tests" / "transcript.h"]
    if _stale(build / "libcross_codec.so", used):
        _compile([*shared, *map(str, sources), "-o", str(build / "libcross_codec.so")])


def make_seeds(tools: Tools) -> None:
    """In a process of its own: what this one imports must not come from another installation."""
    script = f"import seeds, pathlib; print(seeds.write(pathlib.Path({str(tools.seeds)!r})))"
    shutil.rmtree(tools.seeds, ignore_errors=True)
    done = subprocess.run(
        [sys.executable, "-c", script], env=python_environment(), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise Refusal(f"the seeds cannot be made:\n{done.stderr}")


def python_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{FUZZ}", "PYTHONDONTWRITEBYTECODE": "1"}


# ---- running ----------------------------------------------------------------------------


def seed_folder(name: str) -> str:
    """Targets with a model make their own from sound inputs, and begin with the nearest others."""
    return "encode" if name == "c-encode" else "python" if name.startswith("py-") else "decode"


def command(tools: Tools, name: str) -> list[str]:
    """The program of a target, without libFuzzer's arguments."""
    kind, short = name.split("-", 1)
    if kind == "c":
        return [str(tools.program(short))]
    return [
        *(sys.executable, str(FUZZ / "atheris_main.py"), short),
        *(str(tools.mutator), str(tools.library), str(tools.counts(name))),
    ]


def environment(tools: Tools, name: str, fast: bool = False) -> dict[str, str]:
    """``fast``: a report that does not say where memory was asked for; :func:`repeat` makes the whole one."""
    if name.startswith("py-"):
        return python_environment()
    address = ["allocator_may_return_null=0", "max_allocation_size_mb=256", "hard_rss_limit_mb=1024"]
    address += ["malloc_context_size=0", "quarantine_size_mb=1"] if fast else ["quarantine_size_mb=16"]
    return {
        **os.environ,
        "ASAN_OPTIONS": ":".join(address),
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "FUZZ_MODEL": str(tools.model),
    }


_DONE = re.compile(r"^fuzz: executions (\d+) reached (\d+) accepted (\d+)$", re.MULTILINE)
_KINDS = (
    re.compile(r"^FINDING: (.*)$", re.MULTILINE),
    re.compile(r"Uncaught Python exception: ===\s*\n(.*)$", re.MULTILINE),
    re.compile(r"^SUMMARY: (.*)$", re.MULTILINE),
)


def kind_of(text: str) -> str:
    """The kind of a fault: our sentence, Python's exception, or the sanitizer's summary."""
    for pattern in _KINDS:
        found = pattern.search(text)
        if found is not None:
            return found.group(1)[:200]
    return text.strip().splitlines()[-1][:200] if text.strip() else "it ended without a word"


#: libFuzzer speaks on standard error, atheris tells of exceptions on standard output.
_TOGETHER: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}


def repeat(tools: Tools, name: str, file: Path) -> tuple[int, str]:
    """How many of three runs of one input fail, and what the last one that did said."""
    failed, said = 0, ""
    for _ in range(3):
        arguments = [*command(tools, name), "-timeout=1", "-rss_limit_mb=1024", "-malloc_limit_mb=256", str(file)]
        done = subprocess.run(arguments, env=environment(tools, name), **_TOGETHER, check=False)
        if done.returncode != 0:
            failed += 1
            said = done.stdout.decode("utf-8", "replace")
    return failed, said


def fuzz(tools: Tools, name: str, seconds: float, lock: threading.Lock) -> Result:
    """Run one target for so many seconds, again after each finding."""
    result = Result(name)
    tools.corpus(name).mkdir(parents=True, exist_ok=True)
    tools.findings(name).mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    for phase, end in ((_guided, begin + GUIDED * seconds), (_bulk, begin + seconds)):
        while (left := end - time.monotonic()) > 0 and result.error is None and len(result.findings) < MAX_FINDINGS:
            known = set(tools.findings(name).iterdir())
            ran = time.monotonic()
            status, said = phase(tools, name, left, lock, result)
            result.seconds += time.monotonic() - ran
            new = [path for path in tools.findings(name).iterdir() if path not in known]
            for path in new:
                _take(tools, name, path, said, result, lock)
            if status != 0 and not new:
                # One that is known already is in the way at each start, when a seed shows it.
                result.error = None if result.findings else kind_of(said)
                break
            if phase is _guided and status == 0:
                break
    result.corpus = sum(1 for _ in tools.corpus(name).iterdir())
    return result


def _take(tools: Tools, name: str, path: Path, said: str, result: Result, lock: threading.Lock) -> None:
    failed, text = repeat(tools, name, path)
    kind = kind_of(text or said)
    if failed == 0 and "timeout" in kind:
        # libFuzzer's second is one of the clock, and the machine may have been elsewhere.
        path.unlink()
        with lock:
            say(f"{name}: an input took over a second once and not again; not counted")
        return
    finding = Finding(name, kind, str(path.relative_to(tools.build)), path.read_bytes().hex(), failed)
    result.findings.append(finding)
    with lock:
        say(f"{name}: FOUND {kind} ({failed} of 3 again): {path}")


def _guided(tools: Tools, name: str, seconds: float, lock: threading.Lock, result: Result) -> tuple[int, str]:
    """libFuzzer or atheris. Returns status and what was said."""
    asked = max(1, round(seconds - tools.overhead[name[0]]))
    arguments = [
        *command(tools, name),
        f"-max_total_time={asked}",
        *(f"-max_len={MAX_INPUT}", "-timeout=1", "-rss_limit_mb=1024", "-malloc_limit_mb=256"),
        *(f"-dict={tools.seeds / 'dictionary'}", f"-artifact_prefix={tools.findings(name)}/", "-print_final_stats=0"),
        *(str(tools.corpus(name)), str(tools.seeds / seed_folder(name))),
    ]
    ran = time.monotonic()
    process = subprocess.Popen(arguments, env=environment(tools, name, fast=True), cwd=tools.build, **_TOGETHER)
    said = _follow(process, name, lock)
    if process.returncode == 0:
        tools.overhead[name[0]] = time.monotonic() - ran - asked
    before = result.executions
    _count(result, said, tools.counts(name))
    result.guided += result.executions - before
    return process.returncode, said


def _bulk(tools: Tools, name: str, seconds: float, lock: threading.Lock, result: Result) -> tuple[int, str]:
    """Mutations of the corpus, without feedback. Returns status and what was said."""
    with lock:
        say(f"{name}: {seconds:.0f} s without feedback")
    kind, short = name.split("-", 1)
    current = tools.build / f"current-{name}"
    places = [str(tools.corpus(name)), str(tools.seeds / seed_folder(name))]
    if kind == "c":
        arguments = [str(tools.program(short, "bulk")), f"-seconds={seconds}", f"-current={current}"]
    else:
        arguments = [sys.executable, str(FUZZ / "bulk.py"), short, str(tools.mutator), str(tools.library)]
        arguments += [str(seconds), str(current)]
    done = subprocess.run(
        [*arguments, *places], env=environment(tools, name, fast=True), cwd=tools.build, **_TOGETHER, check=False
    )
    said = done.stdout.decode("utf-8", "replace")
    _count(result, said, None)
    if done.returncode != 0 and current.exists():
        held = current.read_bytes()
        data = held[8 : 8 + int.from_bytes(held[:8], "little")]
        (tools.findings(name) / f"bulk-{hashlib.sha256(data).hexdigest()[:16]}").write_bytes(data)
    return done.returncode, said


def _follow(process: subprocess.Popen[bytes], name: str, lock: threading.Lock) -> str:
    """What it says to its end; the last lines of it, and a line of progress now and then."""
    kept: list[str] = []
    shown = time.monotonic()
    assert process.stdout is not None
    for raw in process.stdout:
        line = raw.decode("utf-8", "replace")
        progress = re.match(r"#(\d+)\s.*cov: (\d+) .*corp: (\d+)", line)
        if progress is None:
            kept.append(line)
            del kept[:-400]
        elif time.monotonic() - shown > 5:
            shown = time.monotonic()
            with lock:
                done, edges, corpus = progress.groups()
                say(f"{name}: {int(done):,} executions, {edges} edges, corpus {corpus}")
    process.wait()
    return "".join(kept)


def _count(result: Result, said: str, file: Path | None) -> None:
    """What a run says at its end, or, of atheris, what ``file`` has of it."""
    found = _DONE.findall(said)
    if found:
        numbers = tuple(map(int, found[-1]))
    else:
        try:
            numbers = struct.unpack("<3Q", file.read_bytes() if file is not None else b"")
        except (OSError, struct.error):
            return
    result.executions += numbers[0]
    result.reached += numbers[1]
    result.accepted += numbers[2]


# ---- coverage ---------------------------------------------------------------------------

#: Targets whose inputs are no control and datastream.
NO_STREAMS = ("c-encode", "c-worker")

#: Functions of the C codec through which input goes; the rest encodes, compares contracts, or is asked
#: by a caller about registries. A name that is gone from the source is an error, so that the list stays whole.
DECODING = (
    *("load16", "load32", "load64", "multiply", "first_nonzero", "first_not_bool", "name_byte", "name_is_plain"),
    *("reverse", "advance", "text_is", "dtype_of", "key_of", "record_bytes", "fragments_of", "frames_size", "seek"),
    *("tree_find", "tree_insert", "find_fragment", "check_magic", "bundle_of", "find_open", "find_free"),
    *("check_fragment_header", "check_header", "begin_head", "check_head_fixed", "seen_before", "check_tensor"),
    *("check_attr", "check_head", "is_known", "take_known", "checksum_counts", "check_frame", "next_frame"),
    *("reader_of_one", "decode_frames", "decode_one", "decode_head", "tensor_view", "attr_view", "stop", "take"),
    *("reserve", "finish_frame", "bb_decode", "bb_decode_head", "bb_prepared_decode", "bb_prepared_decode_head"),
    *("bb_tensor_at", "bb_tensor_find", "bb_tensor_read", "bb_attr_at", "bb_attr_find"),
    *("bb_stream_push", "bb_stream_finish"),
)


#: Why no input gets there, by function (C) and text.
EXPLAINED = {
    "multiply: `a != 0` never false": "elements begin at 1 and dimensions of 0 count as 1",
    "check_tensor: `i < zeros` never false": "name_is_plain said that something is wrong, and the name is not",
    "is_known: `memcmp(": "another head of the same length and checksum: a collision, which no target forges",
    "reserve: `need > BB_SPAN` never true": "more than half of the address space",
    '`if conformance not in ("core", "stream"):`': "an argument of the caller, no input",
}


@dataclass
class Cover:
    file: str
    lines: int = 0
    lines_covered: int = 0
    branches: int = 0
    branches_covered: int = 0
    #: "LINE FUNCTION: text (never true / never false / never to LINE)"
    uncovered: list[str] = field(default_factory=list)


def cover_c(tools: Tools, names: Sequence[str]) -> Cover:
    """Lines and branches of the C decoder that the corpora reach."""
    short = [name[2:] for name in names if name.startswith("c-")]
    build_c(tools, short, what="cover")
    profiles = []
    for name in short:
        raw = tools.build / f"cover-{name}.profraw"
        places = [str(tools.seeds / seed_folder(f"c-{name}"))]
        # Every corpus of datastreams is one to every decoder.
        others = [f"c-{name}"] if name == "encode" else [other for other in NAMES if other not in NO_STREAMS]
        if name != "encode":
            places.append(str(tools.seeds / "large"))
        places += [str(tools.corpus(other)) for other in others if tools.corpus(other).is_dir()]
        done = subprocess.run(
            [str(tools.program(name, "cover")), "-runs=0", f"-max_len={1 << 22}", "-rss_limit_mb=2048", *places],
            env={**os.environ, "LLVM_PROFILE_FILE": str(raw)},
            capture_output=True,
            check=False,
        )
        if done.returncode != 0:
            raise Refusal(
                f"cover-{name} ended with status {done.returncode}: {done.stderr[-300:].decode(errors='replace')}"
            )
        profiles.append(str(raw))
    data = tools.build / "cover.profdata"
    _compile([tools.beside("llvm-profdata"), "merge", "-sparse", *profiles, "-o", str(data)])
    programs = [str(tools.program(name, "cover")) for name in short]
    objects = [word for program in programs[1:] for word in ("-object", program)]
    exported = subprocess.run(
        [tools.beside("llvm-cov"), "export", f"-instr-profile={data}", programs[0], *objects],
        capture_output=True,
        check=True,
    )
    return _cover_c(json.loads(exported.stdout)["data"][0])


def _cover_c(data: dict[str, Any]) -> Cover:
    source = SHIM / "boundary_bundle.c"
    text = source.read_text(encoding="ascii").splitlines()
    lines: dict[int, bool] = {}
    branches: dict[tuple[int, int, int], list[Any]] = {}
    gone = [name for name in DECODING if not any(f"{name}(" in line for line in text)]
    if gone:
        raise Refusal(f"fuzz/run.py lists functions that boundary_bundle.c does not have: {', '.join(sorted(gone))}")
    for function in data["functions"]:
        name = function["name"].rsplit(":", 1)[-1]
        if not function["filenames"][0].endswith("boundary_bundle.c") or name not in DECODING:
            continue
        for first, _, last, _, count, in_file, _, kind in function["regions"]:
            if kind == 0 and in_file == 0:
                for line in (first, last):
                    lines[line] = lines.get(line, False) or count > 0
        for line, column, _, end, true, false, in_file, *_ in function["branches"]:
            if in_file == 0:
                row = branches.setdefault((line, column, end), [name, 0, 0])
                row[1] += true
                row[2] += false
    cover = Cover("native_shim/boundary_bundle.c (what decodes)", len(lines), sum(lines.values()))
    for (line, column, end), (name, true, false) in sorted(branches.items()):
        cover.branches += 2
        cover.branches_covered += (true > 0) + (false > 0)
        for count, word in ((true, "true"), (false, "false")):
            if not count:
                cover.uncovered.append(f"{line} {name}: `{text[line - 1][column - 1 : end - 1]}` never {word}")
    return cover


def cover_python(tools: Tools) -> Cover:
    """Lines and branches of the Python decoder that the corpora reach."""
    place = tools.build / "cover-python"
    place.mkdir(exist_ok=True)
    decoder = ROOT / "boundary_bundle" / "decoder.py"
    places = [
        tools.seeds / "decode",
        tools.seeds / "large",
        *(tools.corpus(name) for name in NAMES if name not in NO_STREAMS),
    ]
    setting = {**python_environment(), "COVERAGE_FILE": str(place / "data")}
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "coverage", "run", "--branch", f"--include={decoder}", str(FUZZ / "replay.py")),
            *(
                str(tools.library),
                "decoder,stream,differential",
                *(str(folder) for folder in places if folder.is_dir()),
            ),
        ],
        env=setting,
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode != 0:
        raise Refusal(f"the Python targets end over the corpora with status {ran.returncode}:\n{ran.stderr[-1000:]}")
    report = place / "report.json"
    as_json = [sys.executable, "-m", "coverage", "json", "-q", "-o", str(report)]
    subprocess.run(as_json, env=setting, cwd=place, check=True, stdout=sys.stderr)
    found = next(iter(json.loads(report.read_text("utf-8"))["files"].values()))
    summary = found["summary"]
    cover = Cover(
        "boundary_bundle/decoder.py",
        *(summary["num_statements"], summary["covered_lines"]),
        *(summary["num_branches"], summary["covered_branches"]),
    )
    text = decoder.read_text("utf-8").splitlines()
    for line, to in found["missing_branches"]:
        where = f"to line {to}" if to > 0 else "to the end"
        cover.uncovered.append(f"{line}: `{text[line - 1].strip()}` never {where}")
    return cover


# ---- telling ----------------------------------------------------------------------------


def table(results: Sequence[Result]) -> str:
    rows = [
        ("target", "seconds", "executions", "guided", "per second", "reach records", "bundles", "corpus", "findings")
    ]
    for r in results:
        share = f"{100 * r.share:.1f}%"
        rows.append(
            (
                *(r.target, f"{r.seconds:.1f}", f"{r.executions:,}", f"{r.guided:,}", f"{r.per_second:,.0f}", share),
                *(f"{r.accepted:,}", f"{r.corpus:,}", str(len(r.findings)) if r.error is None else "FAILED"),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            f"{cell:<{w}}" if i == 0 else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def explanation(line: str) -> str | None:
    return next((reason for text, reason in EXPLAINED.items() if text in line), None)


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f}%" if whole else "-"


def report(
    results: Sequence[Result],
    covers: Sequence[Cover],
    seconds: float,
    about: dict[str, str],
    uncovered: str | None = None,
) -> str:
    """The dated report, in Markdown. ``about``: commit, compiler, python, date. ``uncovered``: why there are no
    covers."""
    out = [f"# Fuzzing, {about['date']} UTC\n"]
    out.append(
        f"Commit {about['commit']}, {seconds / 3600:.2f} hours, {about['compiler']}, Python {about['python']}. "
        "`make fuzz-long` makes such a report; seconds are those of the target's own processes, guided are the "
        "executions with feedback from coverage.\n"
    )
    columns = ("target", "seconds", "executions", "guided", "per second", "reach the records", "bundles", "corpus")
    out.append(f"| {' | '.join((*columns, 'findings'))} |")
    out.append("|---|---|---|---|---|---|---|---|---|")
    for r in results:
        out.append(
            f"| {r.target} | {r.seconds:.0f} | {r.executions:,} | {r.guided:,} | {r.per_second:,.0f} | "
            f"{100 * r.share:.1f}% | {r.accepted:,} | {r.corpus:,} | "
            f"{len(r.findings) if r.error is None else r.error} |"
        )
    out.append("\n## Coverage by the corpora alone\n")
    if uncovered:
        out.append(f"{uncovered}\n")
    for cover in covers:
        out.append(
            f"{cover.file}: lines {percent(cover.lines_covered, cover.lines)} "
            f"({cover.lines_covered} of {cover.lines}), branches "
            f"{percent(cover.branches_covered, cover.branches)} ({cover.branches_covered} of {cover.branches}). "
            "Not covered:\n"
        )
        out += [f"- {line}; {explanation(line) or '**not explained**'}" for line in cover.uncovered] or ["- nothing"]
        out.append("")
    out.append("## Findings\n")
    findings = [finding for r in results for finding in r.findings]
    for finding in findings:
        out.append(f"- {finding.target}: {finding.kind}; {finding.repeated} of 3 runs alone; `{finding.input_hex}`")
    if not findings:
        out.append("None.")
    return "\n".join(out) + "\n"


#: What the executions of all reports are added up to.
SUMS = {
    "C decoder": ("c-core", "c-stream", "c-roundtrip"),
    "C encoder": ("c-encode",),
    "Python": ("py-decoder", "py-stream", "py-inspector"),
    "both codecs side by side": ("py-differential",),
}


def overview(reports: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """fuzz/reports/README.md: the reports, by name and content, and their sums."""
    out = [
        "Reports of `make fuzz-long` and, with `-loader`, `-soak`, `-mutants` or `-planted` in their names, of "
        "`make fuzz-loader`, `make soak`, `make mutants` and `fuzz/planted.py`, by date. Executions of the first, and "
        "findings:\n"
    ]
    out.append(f"| report | {' | '.join(SUMS)} | findings |")
    out.append("|---|" + "---|" * (len(SUMS) + 1))
    total = [0] * (len(SUMS) + 1)
    for name, content in reports:
        row = [
            sum(target["executions"] for target in content["targets"] if target["target"] in names)
            for names in SUMS.values()
        ]
        row.append(sum(len(target["findings"]) for target in content["targets"]))
        total = [a + b for a, b in zip(total, row, strict=True)]
        out.append(f"| [{name}]({name}.md) | {' | '.join(f'{n:,}' for n in row)} |")
    out.append(f"| all | {' | '.join(f'{n:,}' for n in total)} |")
    return "\n".join(out) + "\n"


def write_report(text: str, content: dict[str, Any], stamp: str, folder: Path) -> Path:
    """The report and its numbers, and the overview of all of them anew."""
    folder.mkdir(exist_ok=True)
    file = folder / f"{stamp}.md"
    file.write_text(text, encoding="utf-8")
    file.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    reports = [(path.stem, json.loads(path.read_text("utf-8"))) for path in sorted(folder.glob("*.json"))]
    (folder / "README.md").write_text(overview(reports), encoding="utf-8")
    return file


# ---- the command ------------------------------------------------------------------------


def processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fuzz/run.py", description="Fuzz the codecs.")
    parser.add_argument("--seconds", type=float, default=60, help="for all targets together (60)")
    parser.add_argument("--hours", type=float, help="in place of --seconds")
    parser.add_argument("--only", default=",".join(NAMES), metavar="TARGETS", help="some of: %(default)s")
    parser.add_argument("--jobs", type=int, default=processors(), help="targets at a time (one a processor)")
    parser.add_argument("--coverage", action="store_true", help="measure what of both decoders the corpora reach")
    parser.add_argument("--report", action="store_true", help="write fuzz/reports/DATE.md; implies --coverage")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results there too")
    parser.add_argument("--build", type=Path, default=FUZZ / "build", help="folder of everything made (fuzz/build)")
    parser.add_argument("--replay", nargs=2, metavar=("TARGET", "FILE"), help="run one input and end with its status")
    options = parser.parse_args(arguments)
    options.names = [name for name in options.only.split(",") if name]
    unknown = sorted(set(options.names) - set(NAMES))
    if unknown or not options.names:
        parser.error(f"--only: {', '.join(unknown) or 'nothing'} is none of {', '.join(NAMES)}")
    if options.replay is not None:
        if options.replay[0] not in NAMES:
            parser.error(f"--replay: {options.replay[0]} is none of {', '.join(NAMES)}")
        options.names = [options.replay[0]]
    for number in (options.seconds, options.hours or 1.0, options.jobs):
        if not number > 0:
            parser.error("--seconds, --hours and --jobs are above 0")
    return options


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    try:
        return _main(options)
    except Refusal as error:
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        say("interrupted; corpora and findings are kept")
        return 130


def _main(options: argparse.Namespace) -> int:
    build = options.build.resolve()
    tools = Tools(build, need_clang(build))
    covering = options.coverage or options.report
    if covering or any(name.startswith("py-") for name in options.names):
        need_atheris()
    in_c = [name[2:] for name in options.names if name.startswith("c-")]
    for what in ("fuzz", "bulk"):
        build_c(tools, [name for name in in_c if name in C_TARGETS], what=what)
    build_with_model(tools, [name for name in in_c if name in MODEL_TARGETS])
    build_libraries(build, tools.clang)
    if options.replay is not None:
        name, file = options.replay
        return subprocess.run([*command(tools, name), file], env=environment(tools, name), check=False).returncode and 1
    make_seeds(tools)

    seconds = options.hours * 3600 if options.hours is not None else options.seconds
    shares = {name: WEIGHTS.get(name, 1.0) for name in options.names}
    unit = seconds / sum(shares.values()) * min(options.jobs, len(options.names))
    lock = threading.Lock()
    with ThreadPoolExecutor(options.jobs) as pool:
        # The longest first, so that no processor is left alone with it. None is longer than the whole.
        order = sorted(options.names, key=lambda name: -shares[name])
        done = pool.map(lambda name: fuzz(tools, name, min(seconds, unit * shares[name]), lock), order)
        results = sorted(done, key=lambda result: options.names.index(result.target))
    print(table(results), flush=True)
    covers: list[Cover] = []
    uncovered: str | None = None
    if covering:
        say("measuring coverage ...")
        try:
            covers = [cover_c(tools, [f"c-{name}" for name in ("core", "stream", "encode")]), cover_python(tools)]
        except Refusal as error:  # hours of fuzzing are not lost with it
            uncovered = f"coverage was not measured: {error}"
            say(f"error: {uncovered}")
    for cover in covers:
        lines, branches = percent(cover.lines_covered, cover.lines), percent(cover.branches_covered, cover.branches)
        print(f"{cover.file}: lines {lines}, branches {branches}, not covered:")
        for line in cover.uncovered:
            print(f"  {line}; {explanation(line) or 'not explained'}")
    findings = [finding for result in results for finding in result.findings]
    for finding in findings:
        print(f"{finding.target}: {finding.kind}; {finding.repeated} of 3 runs alone; {build / finding.file}")
    errors = [f"{result.target} did not run: {result.error}" for result in results if result.error is not None]
    for error in errors:
        print(error)
    content = {
        "seconds": seconds,
        "targets": [{**asdict(r), "per_second": r.per_second, "reach_share": r.share} for r in results],
        "coverage": [asdict(cover) for cover in covers],
    }
    if options.json is not None:
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if options.report:
        now = datetime.datetime.now(datetime.timezone.utc)
        describe = ["git", "describe", "--always", "--dirty"]
        about = {
            # The commit is of use only if the tree is that commit.
            "commit": subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
            or "unknown",
            "compiler": f"clang {_version(tools.clang)}",
            "python": sys.version.split()[0],
            "date": f"{now:%Y-%m-%d %H:%M}",
        }
        text = report(results, covers, seconds, about, uncovered)
        file = write_report(text, {**about, **content}, f"{now:%Y-%m-%d-%H%M}", FUZZ / "reports")
        print(f"report: {file.relative_to(ROOT)}")
    return 1 if findings else 2 if errors or uncovered else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
