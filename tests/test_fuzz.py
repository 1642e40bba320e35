"""The fuzzing harness: seeds that say what the vectors say, a mutator that gets past checksums, targets that notice.

With whatever C compiler there is: fuzz/standalone.c drives a target without libFuzzer, so that these tests need no
clang. Finding anything new is the work of `make fuzz`.
"""

from __future__ import annotations

import ctypes
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from boundary_bundle.bundle import LIMIT_MAXIMA
from boundary_bundle.conformance.vectors import load
from boundary_bundle.decoder import decode
from boundary_bundle.errors import BundleError

ROOT = Path(__file__).resolve().parent.parent
FUZZ = ROOT / "fuzz"
SHIM = ROOT / "native_shim"
CODEC = (SHIM / "boundary_bundle.c").read_text(encoding="ascii")
CC = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
sys.path.insert(0, str(FUZZ))

import run as runner  # noqa: E402
import seeds  # noqa: E402
import targets  # noqa: E402

pytestmark = pytest.mark.skipif(CC is None, reason="no C compiler: neither cc, gcc nor clang is on the PATH")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    seeds.write(folder / "seeds")
    runner.build_libraries(folder, CC or "cc")
    targets.library = targets.Library(folder / "libcross_codec.so")
    return folder


def compiled(folder: Path, source: Path, flags: list[str]) -> Path:
    product = folder / f"{source.stem}.o"
    if not product.exists():
        command = [CC or "cc", "-std=c11", "-O1", "-w", f"-I{SHIM}", *flags, "-c", str(source), "-o", str(product)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return product


def standalone(folder: Path, target: str, codec: Path) -> Path:
    """The target with this codec, under sanitizers."""
    program = folder / f"standalone-{target}-{codec.parent.name}"
    objects = [
        compiled(codec.parent if codec.parent != SHIM else folder, codec, ["-g", *runner.SANITIZE]),
        compiled(folder, FUZZ / f"{target}.c", ["-g", *runner.SANITIZE]),
        *(compiled(folder, FUZZ / f"{name}.c", []) for name in ("mutate", "standalone")),
    ]
    command = [CC or "cc", *runner.SANITIZE, *map(str, objects), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return program


def drive(program: Path, inputs: Path, runs: int) -> subprocess.CompletedProcess[str]:
    files = [str(path) for path in sorted(inputs.iterdir())]
    command = [str(program), f"-runs={runs}", "-seed=1", *files]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, errors="replace")


class Mutator:
    def __init__(self, folder: Path) -> None:
        self.lib = ctypes.CDLL(str(folder / "libmutate.so"))
        self.lib.fuzz_mutate.restype = ctypes.c_size_t
        self.lib.fuzz_mutate.argtypes = [ctypes.c_char_p, *[ctypes.c_size_t] * 2, ctypes.c_uint, ctypes.c_void_p]

    def __call__(self, data: bytes, seed: int) -> bytes:
        room = ctypes.create_string_buffer(data, 8192)
        size = self.lib.fuzz_mutate(room, len(data), 8192, seed, None)
        return room.raw[:size]


# ---- seeds ----------------------------------------------------------------------------


def test_seeds_are_the_vectors(folder: Path) -> None:
    """A control that changes what a vector says: its limits, or whether checksums are required."""
    checked = 0
    for vector in load():
        if len(vector.data) > seeds.MAX_SEED or vector.contract is not None or "one" not in vector.classes:
            continue
        data = next(iter(seeds._of_vector(vector, 0)))
        if any(253 < value < LIMIT_MAXIMA[name] // 2 for name, value in vector.limits.items()):
            continue  # a limit between those that a byte can say
        found = targets.decoder(data)
        error = vector.error
        if vector.result == "acceptable":
            continue
        assert found == (None if error is None else (error.number, error.offset)), vector.id
        checked += 1
    assert checked > 300


def test_control_means_the_same_in_both_languages(folder: Path) -> None:
    """Limits that Python and C read differently show as disagreements that are none, or hide one."""
    lib = ctypes.CDLL(str(folder / "libmutate.so"))
    for seed in range(200):
        data = random.Random(seed).randbytes(16)
        state = ctypes.c_uint32(int.from_bytes(data[12:], "little"))
        left, pieces = 500, []
        while left > 0:
            piece = min(lib.fuzz_piece(ctypes.byref(state), data[11]) & 0xFFFFFFFF, left)
            pieces.append(piece)
            left -= piece
        assert seeds.pieces_of(data, 500) == pieces


def test_dictionary_is_libfuzzers(folder: Path) -> None:
    """A word that libFuzzer cannot parse ends every run at once."""
    lines = (folder / "seeds" / "dictionary").read_text("ascii").splitlines()
    assert len(lines) > 50
    names = [line.split("=")[0] for line in lines]
    assert all(name.isidentifier() for name in names)
    assert len(set(names)) == len(names)
    assert 'magic="\\x89\\x42\\x44\\x42\\x0d\\x0a\\x1a\\x0a"' in lines


# ---- the mutator ----------------------------------------------------------------------


def test_mutated_inputs_reach_the_records(folder: Path) -> None:
    """A mutator whose inputs end at a checksum; one that always makes the same; targets that pass anything."""
    mutate = Mutator(folder)
    drawn = random.Random(7)
    population = [path.read_bytes() for path in sorted((folder / "seeds" / "decode").iterdir())]
    reached = accepted = 0
    seen: set[int] = set()
    count = 3000
    for _ in range(count):
        data = mutate(drawn.choice(population), drawn.randrange(2**32))
        if len(data) < targets.CONTROL:
            continue
        verdict = targets.decoder(data)
        reached += targets.reaches_records(verdict, data[targets.CONTROL :])
        accepted += verdict is None
        seen.add(0 if verdict is None else verdict[0])
    assert reached >= 0.3 * count
    assert accepted >= 0.02 * count
    assert len(seen) >= 40, sorted(seen)


def test_repaired_checksums_are_the_formats(folder: Path) -> None:
    """A repair with another polynomial, or over other bytes."""
    lib = ctypes.CDLL(str(folder / "libmutate.so"))
    lib.fuzz_repair.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    lib.fuzz_crc32c.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    assert lib.fuzz_crc32c(b"123456789", 9) & 0xFFFFFFFF == 0xE3069283
    repaired = 0
    for vector in load():
        if vector.result == "valid" and len(vector.data) < 4096 and "one" in vector.classes and not vector.limits:
            damaged = bytearray(vector.data)
            for at in range(0, len(damaged) - 63, 64):
                if damaged[at : at + 4] == b"\x89BDB":
                    damaged[at + 60] ^= 255
            room = ctypes.create_string_buffer(bytes(damaged), len(damaged))
            lib.fuzz_repair(room, len(damaged))
            assert room.raw == vector.data, vector.id
            repaired += 1
    assert repaired > 20


# ---- the targets ----------------------------------------------------------------------


def test_python_targets_hold(folder: Path) -> None:
    """A target that fails over sound codecs would hide what it is there for."""
    mutate = Mutator(folder)
    drawn = random.Random(11)
    population = [path.read_bytes() for path in sorted((folder / "seeds" / "python").iterdir())]
    for name in ("stream", "inspector", "differential"):
        for _ in range(150):
            data = mutate(drawn.choice(population), drawn.randrange(2**32))
            if len(data) >= targets.CONTROL:
                targets.TARGETS[name](data)


def test_a_disagreement_is_a_finding(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A differential target that compares nothing."""
    vector = next(vector for vector in load() if vector.result == "valid" and not vector.limits)
    data = seeds.control({}, seeds.CORE) + vector.data
    assert targets.differential(data) is None
    monkeypatch.setattr(targets.Library, "transcript", lambda *_: "error 205 24\n")
    with pytest.raises(targets.Finding, match="disagree"):
        targets.differential(data)


def test_another_exception_gets_through(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that swallows every exception finds nothing for years."""
    vector = next(vector for vector in load() if vector.result == "valid" and not vector.limits)

    def broken(*_: object, **__: object) -> None:
        raise IndexError("planted")

    monkeypatch.setattr(targets, "decode", broken)
    with pytest.raises(IndexError, match="planted"):
        targets.decoder(seeds.control({}) + vector.data)


@pytest.mark.parametrize("error", ["offset", "number"])
def test_an_error_that_is_not_declared_is_a_finding(error: str) -> None:
    wrong = BundleError("truncated", 10)
    if error == "offset":
        wrong.offset = 100
    else:
        wrong.number = 99
    with pytest.raises(targets.Finding):
        targets._declared(wrong, 10)


#: Steps whose check is a bound, and the target that has to find that it is gone.
FAULTS = {
    "D14": "core",  # a tensor record may end behind the tensor table
    "B30": "stream",  # a fragment's tensor index may be any number
}


#: Some six times what finding them takes, whatever is drawn; a minute of fuzzing has more.
RUNS = 1_000_000


def without(step: str) -> str:
    """The codec without the check of a step (the first condition behind its mark)."""
    begin = CODEC.index("if (", CODEC.index(f"/* {step}")) + len("if ")
    depth = 0
    for end in range(begin, len(CODEC)):
        depth += {"(": 1, ")": -1}.get(CODEC[end], 0)
        if depth == 0:
            return f"{CODEC[:begin]}(0 && {CODEC[begin : end + 1]}){CODEC[end + 1 :]}"
    raise AssertionError("a condition without an end")


@pytest.mark.parametrize(("step", "target"), FAULTS.items())
def test_a_removed_bound_check_is_found(folder: Path, step: str, target: str) -> None:
    """Targets without teeth. The sound codec passes the same inputs."""
    # Not the seeds that show it at once: the mutator has to make one.
    inputs = folder / f"inputs-{step}"
    inputs.mkdir()
    for vector in load():
        if vector.result == "valid" and len(vector.data) <= 2048:
            (inputs / vector.id.replace("/", "_")).write_bytes(seeds.control({}) + vector.data)
    sound = drive(standalone(folder, target, SHIM / "boundary_bundle.c"), inputs, RUNS)
    assert sound.returncode == 0, sound.stderr[-2000:]
    counted = runner._DONE.findall(sound.stderr)[-1]
    assert int(counted[0]) >= 0.99 * RUNS
    assert int(counted[1]) >= 0.3 * int(counted[0])
    copy = folder / step / "boundary_bundle.c"
    copy.parent.mkdir()
    copy.write_text(without(step), encoding="ascii")
    faulty = drive(standalone(folder, target, copy), inputs, RUNS)
    assert faulty.returncode != 0, f"{step} can be removed and {target} does not notice"
    assert "FINDING" in faulty.stderr or "Sanitizer" in faulty.stderr or "runtime error" in faulty.stderr


# ---- without feedback -----------------------------------------------------------------


def held(current: Path) -> bytes:
    content = current.read_bytes()
    return content[8 : 8 + int.from_bytes(content[:8], "little")]


@pytest.fixture(scope="module")
def faulty(folder: Path) -> Path:
    """The core target over a codec that has lost a bound."""
    copy = folder / "kept" / "boundary_bundle.c"
    copy.parent.mkdir()
    copy.write_text(without("D14"), encoding="ascii")
    return standalone(folder, "core", copy)


def test_the_input_of_a_crash_is_kept(folder: Path, faulty: Path) -> None:
    """A finding that nobody can run again."""
    inputs = folder / "inputs-kept"
    inputs.mkdir()
    for vector in load():
        if vector.result == "valid" and len(vector.data) <= 2048:
            (inputs / vector.id.replace("/", "_")).write_bytes(seeds.control({}) + vector.data)
    current = folder / "current"
    command = [str(faulty), "-seconds=60", "-seed=1", f"-current={current}", str(inputs)]
    assert subprocess.run(command, capture_output=True, check=False, timeout=120).returncode != 0
    again = folder / "again"
    again.write_bytes(held(current))
    done = subprocess.run([str(faulty), str(again)], capture_output=True, text=True, check=False, errors="replace")
    assert done.returncode != 0
    sound = standalone(folder, "core", SHIM / "boundary_bundle.c")
    assert subprocess.run([str(sound), str(again)], capture_output=True, check=False).returncode == 0


def test_an_input_that_never_ends_is_a_finding(folder: Path) -> None:
    """A hang that stops the run without a word, in both languages."""
    endless = folder / "endless.c"
    endless.write_text(
        "#include <stddef.h>\n#include <stdint.h>\nint LLVMFuzzerTestOneInput(const uint8_t *d, size_t n);\n"
        "int LLVMFuzzerTestOneInput(const uint8_t *d, size_t n) {\n"
        "    volatile int on = n > 3 && d[3] == 7;\n    while (on) {\n    }\n    return 0;\n}\n",
        encoding="ascii",
    )
    program = folder / "endless"
    objects = [str(compiled(folder, source, [])) for source in (endless, FUZZ / "standalone.c")]
    subprocess.run([CC or "cc", *objects, "-o", str(program)], check=True)
    seed = folder / "four"
    seed.write_bytes(bytes(4))
    current = folder / "current-endless"
    command = [str(program), "-seconds=60", "-seed=1", f"-current={current}", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode != 0
    assert "FINDING: one input takes over a second" in done.stderr
    assert held(current)[3] == 7
    done = in_python(folder, "lambda data: [None for _ in iter(int, 1)]")
    assert done.returncode != 0
    assert done.stderr.rstrip().endswith("targets.Finding: one input takes over a second")


def in_python(folder: Path, target: str) -> subprocess.CompletedProcess[str]:
    """bulk.py with another target in place of the decoder."""
    other = f"targets.TARGETS['decoder'] = {target}"
    script = f"import sys, targets; {other}; import bulk; sys.exit(bulk.main(sys.argv[1:]))"
    arguments = ["decoder", folder / "libmutate.so", folder / "libcross_codec.so", "20", folder / "current-python"]
    command = [sys.executable, "-c", script, *map(str, arguments), str(folder / "seeds" / "python")]
    environment = runner.python_environment()
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


def test_the_input_of_an_exception_is_kept(folder: Path) -> None:
    done = in_python(folder, "lambda data: 1 / 0 if data[11] == 3 else None")
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert held(folder / "current-python")[11] == 3
    assert int(runner._DONE.findall(done.stderr)[-1][0]) >= 1


def test_bulk_counts_and_makes_findings_into_files(folder: Path, faulty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Executions that are not counted, and a crash whose input lies nowhere."""
    tools = runner.Tools(folder / "build", CC or "cc")
    tools.corpus("c-core").mkdir(parents=True)
    tools.findings("c-core").mkdir(parents=True)
    monkeypatch.setattr(runner.Tools, "seeds", property(lambda _: folder / "seeds"))
    programs = {"sound": standalone(folder, "core", SHIM / "boundary_bundle.c"), "faulty": faulty}
    for name, program in programs.items():
        monkeypatch.setattr(runner.Tools, "program", lambda *_, program=program: program)
        result = runner.Result("c-core")
        seconds = 0.5 if name == "sound" else 60
        status, _ = runner._bulk(tools, "c-core", seconds, runner.threading.Lock(), result)
        if name == "sound":
            assert status == 0
            assert result.executions > 1000
            assert result.reached > 300
            assert list(tools.findings("c-core").iterdir()) == []
        else:
            assert status != 0
            (found,) = tools.findings("c-core").iterdir()
            assert runner.repeat(tools, "c-core", found)[0] == 3


# ---- the runner -----------------------------------------------------------------------


def test_kinds_are_told_apart() -> None:
    """Findings whose table cell says nothing."""
    assert runner.kind_of("x\nFINDING: the second encoding differs\nSUMMARY: libFuzzer: deadly signal\n") == (
        "the second encoding differs"
    )
    atheris = " === Uncaught Python exception: ===\nIndexError: planted\nTraceback\nSUMMARY: libFuzzer: exited\n"
    assert runner.kind_of(atheris) == "IndexError: planted"
    assert runner.kind_of("==1==ERROR\nSUMMARY: AddressSanitizer: heap-buffer-overflow a.c:1\n").startswith(
        "AddressSan"
    )


def test_a_missing_compiler_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CLANG", "no-such-clang")
    monkeypatch.setattr(runner.os, "geteuid", lambda: 1000)
    assert runner.main(["--seconds", "1", "--build", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: clang 14 or newer")
    assert "apt-get install" in said
    assert "Traceback" not in said


def test_a_report_says_what_was_measured() -> None:
    """A report that hides a finding or its input."""
    found = runner.Finding("c-core", "planted", "findings/c-core/crash-1", "00ff", 3)
    result = runner.Result("c-core", 2.0, 1000, 300, 400, 20, 7, [found])
    cover = runner.Cover("decoder.py", 10, 9, 4, 3, ["7: `if x` never to line 8"])
    about = {"commit": "abc", "compiler": "clang 14", "python": "3.11", "date": "2026-01-01 12:00"}
    text = runner.report([result], [cover], 60.0, about)
    for part in (
        "| c-core | 2 | 1,000 | 300 | 500 | 40.0% | 20 | 7 | 1 |",
        "planted",
        "00ff",
        "75.00% (3 of 4)",
        "7: `if x`",
    ):
        assert part in text
    assert runner.table([result]).splitlines()[1].split()[0] == "c-core"
    assert json.dumps(runner.asdict(result))


def test_a_report_is_written_without_coverage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hours of fuzzing that are lost because the corpora could not be run again afterwards."""

    def refused(*_: object) -> None:
        raise runner.Refusal("a slow machine")

    for name in ("need_clang", "need_atheris", "build_c", "build_with_model", "build_libraries", "make_seeds"):
        monkeypatch.setattr(runner, name, lambda *_, **__: "clang")
    monkeypatch.setattr(runner, "fuzz", lambda tools, name, *_: runner.Result(name, 2.0, 1000, 300, 400, 20, 7))
    monkeypatch.setattr(runner, "cover_c", refused)
    monkeypatch.setattr(runner, "_version", lambda clang: 14)
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(runner, "FUZZ", tmp_path)
    assert runner.main(["--hours", "1", "--report", "--only", "c-core", "--build", str(tmp_path / "build")]) == 2
    (written,) = (path for path in (tmp_path / "reports").glob("2*.md"))
    text = written.read_text("utf-8")
    assert "| c-core | 2 | 1,000 |" in text
    assert "coverage was not measured: a slow machine" in text
    assert "1,000" in (tmp_path / "reports" / "README.md").read_text("utf-8")
    assert "coverage was not measured: a slow machine" in capsys.readouterr().err


def test_reports_are_added_up(tmp_path: Path) -> None:
    """An overview that forgets a report, or counts the encoder as a decoder."""
    found = {"kind": "planted"}
    for stamp, core, encode in (("2026-01-01-0000", 1000, 10), ("2026-01-02-0000", 2000, 20)):
        targets_of = [
            {"target": "c-core", "executions": core, "findings": [found] if core == 2000 else []},
            {"target": "c-encode", "executions": encode, "findings": []},
            {"target": "py-differential", "executions": 7, "findings": []},
        ]
        runner.write_report("text\n", {"targets": targets_of}, stamp, tmp_path)
    text = (tmp_path / "README.md").read_text("utf-8")
    assert "| [2026-01-01-0000](2026-01-01-0000.md) | 1,000 | 10 | 0 | 7 | 0 |" in text
    assert "| all | 3,000 | 30 | 0 | 14 | 1 |" in text


def test_listed_functions_are_there() -> None:
    """Coverage that leaves out a decoder's function since it was renamed."""
    assert [name for name in runner.DECODING if f"{name}(" not in CODEC] == []


def test_decode_is_what_is_fuzzed() -> None:
    assert targets.decode is decode
