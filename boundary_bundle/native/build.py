"""Build libllama, patched or not or with upstream's RPC backend, and the programs that stand on it, in the cache.

One folder a build::

    builds/<kind>-<key>/
        tree/            copy of the clean sources plus the series, and nothing else
        build/bin/       libllama and the libggml* it was built with
        programs/<key>/  the shard worker and the other programs
        log.txt          every command and everything it said
        complete.json    written last; without it the build is unfinished and is continued

The key covers the sources, the series, the flags, the compiler and the processor (ggml is built for
the one it finds), so that a change of any makes a new build and none changes an old one. Programs
have a key of their own over native_shim/, so that a change of the worker does not rebuild libllama.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from .apply import apply_series, series
from .bootstrap import C_NAMES, CXX_NAMES, find_tool, missing_tools
from .download import sha256_file, stamp_now
from .paths import cache_dir, checkout_dir, prepare_cache
from .process import Lock, NativeError, Runner, build_environment
from .progress import Reporter, Step
from .source import Source, chosen_release, copy_tree, ensure_source

Kind = Literal["patched", "unpatched", "rpc"]
KINDS: tuple[Kind, ...] = ("patched", "unpatched", "rpc")

_DARWIN = sys.platform == "darwin"
_LIBRARY_SUFFIX = ".dylib" if _DARWIN else ".so"
# DT_RPATH instead of DT_RUNPATH: it goes before LD_LIBRARY_PATH, so that no other project's libggml
# is picked up.
_RPATH_FLAGS: tuple[str, ...] = () if _DARWIN else ("-Wl,--disable-new-dtags",)
_ORIGIN = "@loader_path" if _DARWIN else "$ORIGIN"

# Raise it when this file changes what a build holds.
_BUILDER_VERSION = 1


@dataclass(frozen=True)
class Program:
    """One program linked against libllama. Sources are relative to native_shim/, include folders to the tree."""

    name: str
    kind: Kind
    sources: tuple[str, ...]
    defines: tuple[str, ...] = ()
    include_dirs: tuple[str, ...] = ()


WORKER = "shard_worker"
TINY_MODELS = "tiny_models"
CERTIFY = "certify"
TESTEE = "testee"
RPC_SERVER = "rpc_server"
BENCH_RPC = "bench_rpc"

WORKER_SOURCES = (
    "shard_worker.cpp",
    "worker_service.cpp",
    "worker_sessions.cpp",
    "worker_links.cpp",
    "worker_flow.cpp",
    "worker_heads.cpp",
    "worker_ring.cpp",
    "worker_json.cpp",
    "worker_protocol.cpp",
    "worker_engine.cpp",
    "worker_file.cpp",
    "worker_range.cpp",
    "worker_whole.cpp",
)

# What is compiled. The unpatched worker is the tests' oracle: the same program, one range only.
PROGRAMS: tuple[Program, ...] = (
    # With the library's codec, which it runs in the same moment: of two copies the second would not be in the caches.
    Program(WORKER, "patched", WORKER_SOURCES, ("BB_PREFIX=llama_",)),
    Program(WORKER, "unpatched", (*WORKER_SOURCES, "boundary_bundle.c"), ("BB_UNPATCHED",)),
    Program("two_shards", "patched", ("examples/two_shards.c", "boundary_bundle.c")),
    Program("partial_model", "patched", ("tests/partial_model.c",)),
    # Includes a source file of upstream's tests, which names headers of common/.
    Program(TINY_MODELS, "unpatched", ("tiny_models.cpp",), include_dirs=(".", "common")),
    # The oracle, and what is compared with it.
    Program(CERTIFY, "unpatched", ("certify.cpp", "boundary_bundle.c"), ("BB_UNPATCHED",)),
    Program(CERTIFY, "patched", ("certify.cpp", "boundary_bundle.c")),
    # Without boundary_bundle.c: the codec is the library's.
    Program(TESTEE, "patched", ("testee.c",), ("BB_IN_LIBLLAMA",)),
    # What make bench-shards compares with. The server is upstream's, whose own target comes with all of its tools.
    Program(RPC_SERVER, "rpc", ("tests/rpc_server.cpp",), include_dirs=(".",)),
    Program(BENCH_RPC, "rpc", ("tests/bench_rpc.cpp",)),
)

# Relative to the tree. src/ is for llama-boundary.h, vendor/ for the JSON library that llama.cpp ships.
INCLUDE_DIRS = ("include", "ggml/include", "src", "vendor")

CMAKE_FLAGS: tuple[str, ...] = (
    "CMAKE_BUILD_TYPE=Release",
    "BUILD_SHARED_LIBS=ON",
    # As installed: the run path that CMake gives to a build otherwise ends in an empty entry, the working folder.
    "CMAKE_BUILD_WITH_INSTALL_RPATH=ON",
    f"CMAKE_INSTALL_RPATH={_ORIGIN}",
    "LLAMA_BUILD_COMMON=OFF",
    "LLAMA_BUILD_TESTS=OFF",
    "LLAMA_BUILD_TOOLS=OFF",
    "LLAMA_BUILD_EXAMPLES=OFF",
    "LLAMA_BUILD_SERVER=OFF",
    "LLAMA_BUILD_APP=OFF",
    "LLAMA_BUILD_UI=OFF",
    "LLAMA_CURL=OFF",
    "LLAMA_OPENSSL=OFF",
    "GGML_NATIVE=ON",
    # One backend, the CPU: exactness is claimed for it alone.
    "GGML_BLAS=OFF",
    "GGML_METAL=OFF",
    # Waiting OpenMP threads spin and take the cores from the worker that computes; the worker brings a thread pool
    # that does not.
    "GGML_OPENMP=OFF",
    "GGML_CUDA=OFF",
    # The launcher is set below, where it is known whether there is one.
    "GGML_CCACHE=OFF",
)
#: What a kind adds to them.
KIND_FLAGS: dict[Kind, tuple[str, ...]] = {"rpc": ("GGML_RPC=ON",)}
C_FLAGS = ("-std=c11", "-O2", "-Wall", "-Wextra", "-pthread")
CXX_FLAGS = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-pthread")


@dataclass(frozen=True)
class Recipe:
    """All that decides what a build holds. Tests give one for a small project of their own.

    ``target`` is a library: llama, or ggml, which has what llama stands on and no more.
    """

    kind: Kind
    source: Source
    patches: tuple[Path, ...]
    shim_dir: Path
    programs: tuple[Program, ...]
    cmake_flags: tuple[str, ...] = CMAKE_FLAGS
    target: str = "llama"
    include_dirs: tuple[str, ...] = INCLUDE_DIRS


@dataclass(frozen=True)
class NativeBuild:
    """A finished build. ``library`` is libllama; ``programs`` maps the names in :data:`PROGRAMS` to files."""

    kind: Kind
    key: str
    worker: Path
    library: Path
    lib_dir: Path
    source_dir: Path
    include_dirs: tuple[Path, ...]
    programs: dict[str, Path] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        def plain(value: Any) -> Any:
            if isinstance(value, Path):
                return str(value)
            if isinstance(value, dict):
                return {key: plain(item) for key, item in value.items()}
            if isinstance(value, (list, tuple)):
                return [plain(item) for item in value]
            return value

        result: dict[str, Any] = plain(asdict(self))
        return result


def build(
    kind: Kind,
    *,
    cache: Path | None = None,
    reporter: Reporter | None = None,
    runner: Runner | None = None,
) -> NativeBuild:
    """The build of ``kind`` from the pinned sources, made if it is not in the cache.

    With ``$BOUNDARY_BUNDLE_SOURCE`` a later release that has a series of its own (:data:`source.RELEASES`), that
    release and that series.

    :raises NativeError: with a text for the user; nothing half made is ever returned.
    """
    if kind not in KINDS:
        raise NativeError(f"there is no build {kind!r}; there are {', '.join(KINDS)}")
    checkout = checkout_dir()
    root = prepare_cache(cache_dir() if cache is None else cache)
    reporter = reporter or Reporter()
    runner = runner or Runner()
    _require_tools()

    recipe = Recipe(
        kind=kind,
        source=ensure_source(root, reporter=reporter, runner=runner),
        patches=_series(series_dir(chosen_release())) if kind == "patched" else (),
        shim_dir=checkout / "native_shim",
        programs=tuple(program for program in PROGRAMS if program.kind == kind),
        cmake_flags=(*CMAKE_FLAGS, *KIND_FLAGS.get(kind, ())),
    )
    return build_recipe(recipe, cache=root, reporter=reporter, runner=runner)


def series_dir(release: str | None = None) -> Path:
    """The folder of the series for the pin, or for a later release."""
    folder = checkout_dir() / "patches"
    return folder if release is None else folder / release


def _series(folder: Path) -> tuple[Path, ...]:
    patches = series(folder)
    if not patches:
        raise NativeError(f"{folder} holds no patches; a build without them is 'unpatched'")
    return patches


def _require_tools() -> None:
    sentences = missing_tools()
    if sentences:
        raise NativeError("\n".join(sentences))


def build_recipe(
    recipe: Recipe,
    *,
    cache: Path,
    reporter: Reporter | None = None,
    runner: Runner | None = None,
) -> NativeBuild:
    """Build ``recipe`` below ``cache``, or find it there. Safe when several processes do it at once."""
    reporter = reporter or Reporter()
    runner = runner or Runner()
    job = _Job(recipe, cache, reporter, runner)
    if (done := job.finished()) is not None:
        return done
    with Lock(cache / "locks" / f"{job.place.name}.lock").held(f"the {recipe.kind} build", reporter.note) as lock:
        if (done := job.finished()) is not None:
            return done
        if not job.library_finished():
            job.build_library(lock)
        if not job.programs_finished():
            job.build_programs(lock)
        done = job.finished()
    if done is None:
        raise NativeError(f"the build in {job.place} was removed while it was being made")
    return done


class _Job:
    """One recipe on its way through the cache."""

    def __init__(self, recipe: Recipe, cache: Path, reporter: Reporter, runner: Runner):
        self.recipe = recipe
        self.reporter = reporter
        self.runner = runner
        self.cc = _tool("CC", C_NAMES, "C compiler")
        self.cxx = _tool("CXX", CXX_NAMES, "C++ compiler")
        self.ingredients = self._ingredients()
        self.key = _digest(self.ingredients)
        self.place = cache / "builds" / f"{recipe.kind}-{self.key}"
        self.tree = self.place / "tree"
        self.build_dir = self.place / "build"
        self.lib_dir = self.build_dir / "bin"
        self.log = self.place / "log.txt"
        self.programs_key = self._programs_key()
        self.programs_dir = self.place / "programs" / self.programs_key

    # -- keys ----------------------------------------------------------------------------------

    def _ingredients(self) -> dict[str, Any]:
        recipe = self.recipe
        return {
            "builder": _BUILDER_VERSION,
            "kind": recipe.kind,
            "source": recipe.source.hash,
            "patches": [[path.name, sha256_file(path)] for path in recipe.patches],
            "flags": list(recipe.cmake_flags),
            "linker_flags": list(_RPATH_FLAGS),
            "target": recipe.target,
            "compilers": [self._compiler_version(self.cc), self._compiler_version(self.cxx)],
            "processor": _processor(),
        }

    def _compiler_version(self, compiler: str) -> str:
        status, text = self.runner.capture([compiler, "--version"], env=build_environment())
        if status != 0:
            raise NativeError(f"{compiler} --version ended with status {status}: {text.strip()}")
        return text.split("\n", 1)[0].strip()

    def _programs_key(self) -> str:
        files = {path.relative_to(self.recipe.shim_dir).as_posix(): sha256_file(path) for path in self._shim_files()}
        return _digest(
            {
                "library": self.key,
                "files": files,
                "programs": [asdict(program) for program in self.recipe.programs],
                "flags": [list(C_FLAGS), list(CXX_FLAGS), list(_RPATH_FLAGS), list(self.recipe.include_dirs)],
            }
        )

    def _shim_files(self) -> list[Path]:
        """The sources of the programs, and whatever else they may include."""
        shim = self.recipe.shim_dir
        found = set()
        for program in self.recipe.programs:
            for name in program.sources:
                if not (shim / name).is_file():
                    raise NativeError(f"{program.name} needs {shim / name}, which is not there")
                found.add(shim / name)
        for path in shim.rglob("*"):
            folder = path.relative_to(shim).parts[:-1]
            if path.suffix in {".c", ".h", ".cpp", ".hpp", ".inc"} and not {"tests", "build"} & set(folder):
                found.add(path)
        return sorted(found)

    # -- what is there -------------------------------------------------------------------------

    def finished(self) -> NativeBuild | None:
        if not (self.library_finished() and self.programs_finished()):
            return None
        recipe = self.recipe
        record = _read_json(self.place / "complete.json") or {}
        programs = {program.name: self.programs_dir / program.name for program in recipe.programs}
        return NativeBuild(
            kind=recipe.kind,
            key=f"{self.key}/{self.programs_key}",
            worker=programs.get(WORKER, next(iter(programs.values()), self.programs_dir)),
            library=self._library(),
            lib_dir=self.lib_dir,
            source_dir=self.tree,
            include_dirs=tuple(self.tree / name for name in recipe.include_dirs),
            programs=programs,
            provenance=record.get("provenance", {}),
        )

    def library_finished(self) -> bool:
        return _complete(self.place / "complete.json", self.build_dir)

    def programs_finished(self) -> bool:
        return not self.recipe.programs or _complete(self.programs_dir / "complete.json", self.programs_dir)

    # -- libllama ------------------------------------------------------------------------------

    def build_library(self, lock: Lock) -> None:
        """Configure and build, continuing what an earlier run left if that is safe."""
        _require_tools()
        started = time.monotonic()
        recipe = self.recipe
        generator = "Ninja" if shutil.which("ninja") else "Unix Makefiles"
        ccache = shutil.which("ccache")
        self.place.mkdir(parents=True, exist_ok=True)
        (self.place / "complete.json").unlink(missing_ok=True)
        self._prepare_tree()
        attempt = {"generator": generator, "ccache": ccache, "cc": self.cc, "cxx": self.cxx}
        marker = self.place / "unfinished.json"
        left = _read_json(marker)
        if left is not None:
            # make takes an object file that was cut short for a good one; ninja's log knows better.
            resume = generator == "Ninja" and left == attempt
            self.reporter.note(
                f"an earlier {recipe.kind} build was cut short; " + ("continuing it" if resume else "starting it again")
            )
            if not resume:
                shutil.rmtree(self.build_dir, ignore_errors=True)
        else:
            shutil.rmtree(self.build_dir, ignore_errors=True)
        _write_json(marker, attempt)
        env = build_environment(
            GIT_CEILING_DIRECTORIES=str(self.place),
            NINJA_STATUS="[%f/%t] ",
            # Paths relative to the build's folder, so that both kinds share what is equal in them.
            CCACHE_BASEDIR=str(self.place),
        )
        command = ["cmake", "-S", str(self.tree), "-B", str(self.build_dir), "-G", generator]
        command += [f"-DCMAKE_C_COMPILER={self.cc}", f"-DCMAKE_CXX_COMPILER={self.cxx}"]
        command += [f"-D{flag}" for flag in self._known_flags()]
        if _RPATH_FLAGS:
            command.append(f"-DCMAKE_SHARED_LINKER_FLAGS={' '.join(_RPATH_FLAGS)}")
        if ccache:
            command += [f"-DCMAKE_C_COMPILER_LAUNCHER={ccache}", f"-DCMAKE_CXX_COMPILER_LAUNCHER={ccache}"]
        title = f"the {recipe.kind} lib{recipe.target}"
        with self.reporter.step(f"configuring {title}"):
            self.runner.stream(f"configuring {title}", command, log=self.log, env=env, lock=lock)
        command = ["cmake", "--build", str(self.build_dir), "--target", recipe.target, "--parallel", str(_jobs())]
        with self.reporter.step(f"building {title}") as step:
            self.runner.stream(
                f"building {title}", command, log=self.log, env=env, on_line=_progress_lines(step), lock=lock
            )
        libraries = sorted(path for path in self.lib_dir.glob(f"lib*{_LIBRARY_SUFFIX}*") if path.is_file())
        if not self._library().is_file():
            raise NativeError(f"the build ended without a {self._library().name} in {self.lib_dir}")
        _write_json(
            self.place / "complete.json",
            {
                "files": {path.relative_to(self.build_dir).as_posix(): path.stat().st_size for path in libraries},
                "provenance": {
                    "source": recipe.source.provenance,
                    "ingredients": self.ingredients,
                    "generator": generator,
                    "ccache": ccache is not None,
                    "built": stamp_now(),
                    "seconds": round(time.monotonic() - started, 1),
                },
            },
        )
        marker.unlink(missing_ok=True)

    def _prepare_tree(self) -> None:
        """Clean sources plus the series; made aside and renamed, so that it is there whole or not at all."""
        for stale in self.place.glob(".tree-*"):
            shutil.rmtree(stale, ignore_errors=True)
        if self.tree.is_dir():
            return
        recipe = self.recipe
        what = f"applying {len(recipe.patches)} patches" if recipe.patches else "copying the sources"
        aside = Path(tempfile.mkdtemp(prefix=".tree-", dir=self.place))
        try:
            with self.reporter.step(what):
                copy_tree(recipe.source, aside / "tree")
                apply_series(recipe.patches, aside / "tree", self.runner)
            os.rename(aside / "tree", self.tree)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _known_flags(self) -> list[str]:
        """Without options of llama.cpp that this version of it does not have (they come and go)."""
        text = ""
        for path in [self.tree / "CMakeLists.txt", self.tree / "ggml" / "CMakeLists.txt"]:
            if path.is_file():
                text += path.read_text(encoding="utf-8", errors="replace")
        known = []
        for flag in self.recipe.cmake_flags:
            name = flag.split("=", 1)[0]
            if not name.startswith(("LLAMA_", "GGML_")) or re.search(rf"\b{re.escape(name)}\b", text):
                known.append(flag)
        return known

    # -- programs ------------------------------------------------------------------------------

    def build_programs(self, lock: Lock) -> None:
        """Compile and link every program of the recipe; the folder appears by one rename."""
        recipe = self.recipe
        before = self.programs_key
        parent = self.programs_dir.parent
        parent.mkdir(parents=True, exist_ok=True)
        for stale in parent.glob(".partial-*"):
            shutil.rmtree(stale, ignore_errors=True)
        aside = Path(tempfile.mkdtemp(prefix=".partial-", dir=parent))
        try:
            with self.reporter.step(f"building {', '.join(program.name for program in recipe.programs)}") as step:
                self._compile_and_link(aside, step, lock)
            shutil.rmtree(aside / "objects")
            sizes = {program.name: (aside / program.name).stat().st_size for program in recipe.programs}
            _write_json(aside / "complete.json", {"files": sizes, "built": stamp_now()})
            if self._programs_key() != before:
                raise NativeError(f"{recipe.shim_dir} changed while it was being compiled; run it again")
            shutil.rmtree(self.programs_dir, ignore_errors=True)
            os.rename(aside, self.programs_dir)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _compile_and_link(self, aside: Path, step: Step, lock: Lock) -> None:
        recipe = self.recipe
        ccache = shutil.which("ccache")
        launcher = [ccache] if ccache else []
        includes = [f"-I{recipe.shim_dir}", *(f"-I{self.tree / name}" for name in recipe.include_dirs)]
        compiles: list[tuple[str, list[str]]] = []
        links: list[tuple[str, list[str]]] = []
        for program in recipe.programs:
            objects = aside / "objects" / program.name
            objects.mkdir(parents=True)
            made = [str(objects / f"{index}.o") for index in range(len(program.sources))]
            for name, target in zip(program.sources, made, strict=True):
                compiler, flags = (self.cc, C_FLAGS) if name.endswith(".c") else (self.cxx, CXX_FLAGS)
                defines = [f"-D{define}" for define in program.defines]
                more = [f"-I{self.tree / name}" for name in program.include_dirs]
                command = [*launcher, compiler, *flags, *defines, *includes, *more]
                compiles.append((f"compiling {name}", [*command, "-c", str(recipe.shim_dir / name), "-o", target]))
            linker = self.cc if all(name.endswith(".c") for name in program.sources) else self.cxx
            # By their full names: no search path in which another project's library could come first.
            libraries = [str(path) for path in self._link_libraries()]
            rpath = f"-Wl,-rpath,{_ORIGIN}/{os.path.relpath(self.lib_dir, self.programs_dir)}"
            command = [linker, "-pthread", *made, *libraries, *_RPATH_FLAGS, rpath, "-lm"]
            links.append((f"linking {program.name}", [*command, "-o", str(aside / program.name)]))
        total = len(compiles) + len(links)
        env = build_environment()

        def run(job: tuple[str, list[str]]) -> None:
            self.runner.stream(job[0], job[1], log=self.log, env=env, lock=lock)

        with ThreadPoolExecutor(max_workers=_jobs()) as pool:
            pending = [pool.submit(run, job) for job in compiles]
            try:
                for done, future in enumerate(as_completed(pending), start=1):
                    future.result()
                    step.update(done, total)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        for done, job in enumerate(links, start=len(compiles) + 1):
            run(job)
            step.update(done, total)

    def _library(self) -> Path:
        return self.lib_dir / f"lib{self.recipe.target}{_LIBRARY_SUFFIX}"

    def _link_libraries(self) -> list[Path]:
        ggml = sorted(self.lib_dir.glob(f"libggml*{_LIBRARY_SUFFIX}"))
        return [self._library(), *(path for path in ggml if path != self._library())]


# -- small helpers ----------------------------------------------------------------------------


def _tool(variable: str, names: Sequence[str], what: str) -> str:
    found = find_tool(variable, names)
    if found is None:
        chosen = os.environ.get(variable)
        raise NativeError(f"no {what} was found" + (f" (${variable} is {chosen!r})" if chosen else ""))
    return found


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:20]


def _processor() -> str:
    """What -march=native depends on: a home folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = {"vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part", "isa"}
    found: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in wanted:
            found.setdefault(name.strip(), value.strip())
    return f"{platform.machine()} {_digest(found)}"


def _jobs() -> int:
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


_NINJA = re.compile(r"^\[(\d+)/(\d+)\] ")
_MAKE = re.compile(r"^\[ *(\d+)%\] ")


def _progress_lines(step: Step) -> Callable[[str], None]:
    def on_line(line: str) -> None:
        if match := _NINJA.match(line):
            step.update(int(match[1]), int(match[2]))
        elif match := _MAKE.match(line):
            step.update(int(match[1]), 100)

    return on_line


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _write_json(path: Path, value: dict[str, Any]) -> None:
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8") as sink:
        sink.write(json.dumps(value, indent=2, sort_keys=True) + "\n")
        sink.flush()
        os.fsync(sink.fileno())
    os.replace(partial, path)


def _complete(record: Path, folder: Path) -> bool:
    """True if the record is there and every file it names has the size it had then."""
    files = (_read_json(record) or {}).get("files")
    if not isinstance(files, dict):
        return False
    for name, size in files.items():
        try:
            if (folder / name).stat().st_size != size:
                return False
        except OSError:
            return False
    return True
