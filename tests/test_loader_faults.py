"""Model files that are damaged, absent or something else: each is refused in one sentence, or is right by bits.

Catches: a signal, a traceback, a hang or gigabytes of memory from a file; a worker that stands and dies at its first
request; a sentence without the file's name or over several lines; a socket file that stays; and weights that are read
from where they do not lie. The kinds are those of tests/gguf_faults.py, and drawn ones of fuzz/loader.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf_faults
import pytest
from gguf_faults import KINDS, MIDDLE, RANGES, Gguf, Key, split, split_name, stripped
from loader_drive import Start, start

from boundary_bundle.cli import main
from boundary_bundle.native import NativeBuild
from boundary_bundle.shards import tiny_models
from boundary_bundle.shards.plan import MAX_ENTRIES, PlanError, read_model_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "fuzz"))

import loader as fuzz  # noqa: E402

pytestmark = pytest.mark.shards

SMALL = ["--threads", "1", "--ctx", "64", "--batch", "16", "--ubatch", "8"]
WHOLE = (0, gguf_faults.SHAPE.n_layer)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write(tmp_path_factory.mktemp("loader") / "sound.gguf", "untied", shape=gguf_faults.SHAPE)


@pytest.fixture(scope="module")
def parts(model: Path) -> Gguf:
    found = Gguf.parse(model.read_bytes())
    assert found.pack() == model.read_bytes()
    return found


@pytest.fixture(scope="module")
def sound(patched_build: NativeBuild, model: Path, parts: Gguf) -> fuzz.Sound:
    """What every range makes of the batch, and the whole model the same logits."""
    found = fuzz.Sound("sound", parts, [*RANGES, WHOLE])
    given = None
    for layers in found.ranges:
        begun = start(patched_build.worker, model, layers, given=given)
        assert begun.status == 0
        assert begun.payloads is not None
        assert begun.fingerprint is not None
        found.given[layers], found.bits[layers], found.fingerprint = given, begun.payloads, begun.fingerprint
        given = begun.output
    assert found.bits[WHOLE] == found.bits[RANGES[-1]]
    return found


def is_refused(begun: Start, folder: Path, says: str) -> None:
    sentence = begun.sentence
    assert sentence is not None, (begun.status, begun.errors)
    assert str(folder) in sentence or "/dev/zero" in sentence
    assert re.search(says, sentence, re.IGNORECASE), sentence
    assert begun.peak < resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + fuzz.MEMORY


@pytest.mark.parametrize("name", KINDS)
def test_a_worker_refuses_what_is_damaged_or_is_right(
    patched_build: NativeBuild, parts: Gguf, sound: fuzz.Sound, tmp_path: Path, name: str
) -> None:
    """Every kind for every range, mapped and read, on a socket and on its standard streams."""
    kind = KINDS[name]
    path = kind.make(parts, tmp_path)

    def one(layers: tuple[int, int], mmap: bool) -> None:
        spared = layers in kind.spares
        socket = tmp_path / f"socket-{layers[0]}"
        more = () if spared or mmap else ("--socket", str(socket))
        begun = start(patched_build.worker, path, layers, mmap=mmap, given=sound.given[layers], more=more)
        if spared:
            assert begun.status == 0, begun.errors
            assert begun.payloads == sound.bits[layers]
        else:
            is_refused(begun, tmp_path, kind.says)
        assert not (more and socket.exists())

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(one, layers, mmap) for layers in RANGES for mmap in (True, False)]:
            done.result()


def command(name: str, build: NativeBuild, model: Path, target: Path) -> list[str]:
    words = {
        "describe": ["describe", *SMALL],
        "describe a range": ["describe", *SMALL, "--range", "2:4", "--json", "--no-mmap"],
        "strip": ["strip", "--range", "2:4", "-o", str(target)],
        "run": ["run", *SMALL, "--cuts", "2,4", "--prompt", "split this", "--tokens", "2"],
    }[name]
    return [*words, "--worker", str(build.worker), "--model", str(model)]


@pytest.mark.parametrize("name", KINDS)
def test_a_command_says_what_is_damaged(
    patched_build: NativeBuild,
    parts: Gguf,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    recwarn: pytest.WarningsRecorder,
    name: str,
) -> None:
    """One line on standard error, nothing on standard output and no file, whichever part of the program finds it."""
    kind = KINDS[name]
    path = kind.make(parts, tmp_path)
    files = sorted(os.listdir(tmp_path))
    for doing in ("describe", "describe a range", "strip", "run"):
        layers = MIDDLE if doing in ("describe a range", "strip") else WHOLE
        good = layers in kind.spares or (kind.late and doing != "run")
        target = tmp_path / "out.gguf"
        status = main(command(doing, patched_build, path, target))
        out, err = capsys.readouterr()
        if good:
            assert (status, err) == (0, ""), doing
            target.unlink(missing_ok=True)
            continue
        assert (status, out) == (2, ""), (doing, err)
        assert re.fullmatch("error: .*\n", err), (doing, err)
        assert err[:-1].isprintable()
        assert "unforeseen" not in err
        assert str(tmp_path) in err or "/dev/zero" in err
        assert re.search(kind.says, err, re.IGNORECASE), (doing, err)
        assert sorted(os.listdir(tmp_path)) == files
    assert [str(warning.message) for warning in recwarn] == []


def test_a_dimension_of_0_is_named_before_the_library_divides_by_it(parts: Gguf, tmp_path: Path) -> None:
    """Catches a planner that leaves it to the worker, which can say no more than the signal."""
    for name in ("a dimension of 0", "a dimension of 0 and no bytes"):
        with pytest.raises(PlanError, match="its tensor 'blk.3.attn_q.weight' has a dimension of 0"):
            read_model_file(KINDS[name].make(parts, tmp_path))


def test_a_file_that_is_cut_is_refused_wherever_it_is_cut(
    patched_build: NativeBuild, parts: Gguf, sound: fuzz.Sound, tmp_path: Path
) -> None:
    """At every part of its structure, and at drawn bytes."""
    data = parts.pack()
    drawn = fuzz.random.Random(7)
    places = sorted({*parts.places, *(drawn.randrange(len(data)) for _ in range(40))} - {len(data)})
    assert len(places) > 400

    def one(number: int) -> None:
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(data[: places[number]])
        layers = RANGES[number % 3]
        is_refused(start(patched_build.worker, path, layers, mmap=number % 2 == 0), tmp_path, ": ")
        path.unlink()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, range(len(places))))


LEGAL: dict[str, Callable[[Gguf], object]] = {
    "version 2": lambda g: setattr(g, "version", 2),
    "a larger alignment": lambda g: (g.set("general.alignment", 4096), setattr(g, "alignment", 4096)),
    "tensors in another order": lambda g: g.tensors.reverse(),
    "a key that nobody reads": lambda g: g.keys.append(Key(b"x", gguf_faults.BOOL, 1)),
}


@pytest.mark.parametrize("name", LEGAL)
def test_what_is_unusual_but_sound_is_loaded(
    patched_build: NativeBuild, parts: Gguf, sound: fuzz.Sound, tmp_path: Path, name: str
) -> None:
    """Catches a check that refuses more than it has to."""
    path, changed = tmp_path / "legal.gguf", parts.copy()
    LEGAL[name](changed)
    path.write_bytes(changed.pack())
    for mmap in (True, False):
        begun = start(patched_build.worker, path, MIDDLE, mmap=mmap, given=sound.given[MIDDLE])
        assert begun.status == 0, begun.errors
        assert begun.payloads == sound.bits[MIDDLE]


def test_a_small_alignment_is_read_and_not_mapped(
    patched_build: NativeBuild, parts: Gguf, sound: fuzz.Sound, tmp_path: Path
) -> None:
    """Catches an assertion in the place of the advice, and a range that is mapped because its first tensor fits."""
    changed = parts.copy()
    changed.set("general.alignment", 8)
    changed.alignment = 8
    path = tmp_path / "eight.gguf"
    path.write_bytes(changed.pack())
    for layers in RANGES:
        begun = start(patched_build.worker, path, layers, given=sound.given[layers])
        is_refused(begun, tmp_path, "aligns its tensors to 8 bytes, .* multiples of 32 .*--no-mmap")
        begun = start(patched_build.worker, path, layers, mmap=False, given=sound.given[layers])
        assert begun.payloads == sound.bits[layers]


def test_the_sound_files_of_the_kinds_are_sound(
    patched_build: NativeBuild, parts: Gguf, sound: fuzz.Sound, tmp_path: Path
) -> None:
    """Files in several and of one range, undamaged: else a kind could be refused for another reason than its own."""
    for number, part in enumerate(split(parts.copy()), 1):
        (tmp_path / split_name(number)).write_bytes(part.pack())
    for layers in RANGES:
        (tmp_path / "part.gguf").write_bytes(stripped(parts, layers).pack())
        for path in (tmp_path / split_name(1), tmp_path / "part.gguf"):
            begun = start(patched_build.worker, path, layers, given=sound.given[layers])
            assert begun.payloads == sound.bits[layers], begun.errors
            assert begun.fingerprint == sound.fingerprint


# -- files that change while a worker has them


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def cut_a_little(path: Path) -> None:
    """Within the last page, whose rest then reads as zeros: no fault, other logits."""
    os.truncate(path, path.stat().st_size - 64)


def overwrite(path: Path) -> None:
    with open(path, "r+b") as stream:
        stream.seek(-4096, os.SEEK_END)
        stream.write(bytes(4096))


CHANGES: dict[str, Callable[[Path], object]] = {"cut": cut, "cut a little": cut_a_little, "overwritten": overwrite}


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_that_changes_under_a_worker(
    patched_build: NativeBuild, parts: Gguf, sound: fuzz.Sound, tmp_path: Path, name: str
) -> None:
    """What is mapped is refused from then on; what was read at the start goes on."""
    layers = RANGES[-1]
    for mmap in (True, False):
        path = tmp_path / "model.gguf"
        path.write_bytes(parts.pack())
        begun = start(
            patched_build.worker,
            path,
            layers,
            mmap=mmap,
            given=sound.given[layers],
            meanwhile=lambda path=path: CHANGES[name](path),
        )
        assert (begun.status, begun.errors) == (0, "")
        if mmap:
            assert begun.told["decode"]["name"] == "compute"
            assert f"{path} was written to after its weights were mapped" in begun.told["decode"]["message"]
            assert begun.output is None
        else:
            assert begun.payloads == sound.bits[layers]


def test_a_file_that_is_replaced_under_a_worker(
    patched_build: NativeBuild, parts: Gguf, sound: fuzz.Sound, tmp_path: Path
) -> None:
    """Another file takes the name, or none does: what is mapped stays what it was."""
    path = tmp_path / "model.gguf"

    def replace() -> None:
        (tmp_path / "new").write_bytes(b"another file")
        os.replace(tmp_path / "new", path)

    for change in (replace, path.unlink):
        path.write_bytes(parts.pack())
        begun = start(patched_build.worker, path, MIDDLE, given=sound.given[MIDDLE], meanwhile=change)
        assert begun.payloads == sound.bits[MIDDLE]


# -- what takes time or memory


def test_as_many_entries_as_are_possible(
    patched_build: NativeBuild, parts: Gguf, sound: fuzz.Sound, tmp_path: Path
) -> None:
    """The library compares each name with all before it, which would be hours for a million: a limit, of worker and
    planner alike, that a sound file can reach within the patience of these tests."""
    changed, path = parts.copy(), tmp_path / "many.gguf"
    changed.keys += [Key(b"%d" % number, gguf_faults.U8, 1) for number in range(MAX_ENTRIES - len(parts.keys))]
    path.write_bytes(changed.pack())
    begun = start(patched_build.worker, path, MIDDLE, given=sound.given[MIDDLE])
    assert begun.payloads == sound.bits[MIDDLE], begun.errors
    header = (ROOT / "native_shim" / "worker_file.h").read_text()
    assert f"MAX_ENTRIES = {MAX_ENTRIES};" in header


def test_the_first_token_is_computed_before_a_worker_is_ready(
    patched_build: NativeBuild, parts: Gguf, sound: fuzz.Sound, tmp_path: Path
) -> None:
    """Without that, --no-warmup, a file that cannot be computed with ends the worker at its first request; and what was
    computed leaves nothing behind."""
    path = KINDS["a weight of integers"].make(parts, tmp_path)
    given = sound.given[MIDDLE]
    begun = start(patched_build.worker, path, MIDDLE, given=given, more=("--no-warmup",))
    assert begun.status == -11
    assert begun.errors == "shard_worker: stopped by a fault: signal 11\n"
    path.write_bytes(parts.pack())
    warm, cold = (start(patched_build.worker, path, MIDDLE, given=given, more=more) for more in ((), ("--no-warmup",)))
    assert warm.payloads == cold.payloads == sound.bits[MIDDLE]


def test_threads_that_fault_together_say_one_cause(patched_build: NativeBuild, parts: Gguf, tmp_path: Path) -> None:
    """Catches a thread that ends the process while another has not yet said why: here it cannot, for want of room."""
    path = KINDS["a weight of integers"].make(parts, tmp_path)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    filler = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            filler += os.write(writer, b" ")
    os.set_blocking(writer, True)
    command = [str(patched_build.worker), "--model", str(path), "--range", "2:4", "--threads", "2"]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=writer)
    os.close(writer)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            worker.wait(2)
        with os.fdopen(reader, "rb") as stream:
            said = stream.read()[filler:].decode()
        assert re.fullmatch("(shard_worker: warning: .*\n)?shard_worker: error 4 load: computing .* signal 11\n", said)
        assert worker.wait(10) == 2
    finally:
        worker.kill()
        worker.wait()
        assert worker.stdin is not None
        worker.stdin.close()


# -- drawn damage


def test_drawn_damage_is_refused_or_right(patched_build: NativeBuild) -> None:
    """A few hundred files; `make fuzz-loader` draws more."""
    tally = fuzz.run(patched_build.worker, 240, 1, None)
    assert tally.findings == []
    assert min(tally.outcomes[outcome] for outcome in (fuzz.REFUSED, fuzz.EQUAL, fuzz.RENAMED)) > 5


@pytest.mark.parametrize(
    ("begun", "why"),
    [
        (Start(status=-11, errors="shard_worker: stopped by a fault: signal 11\n"), "status -11"),
        (Start(status=2, errors="shard_worker: error 4 load: a\nb\n"), "status 2"),
        (Start(status=2, errors="shard_worker: error 4 load: \x1b[31m\n"), "status 2"),
        (Start(status=2, errors="shard_worker: error 4 load: a\n", answered=32), "status 2"),
        (Start(status=1, errors="shard_worker: error 4 load: a\n"), "status 1"),
        (Start(status=0), "status 0"),
        (Start(status=None), "no end in 10 s"),
        (Start(status=2, errors="shard_worker: error 4 load: a\n", peak=1 << 40), "MiB of memory"),
        (Start(status=0, told={"hello": {}, "describe": {"fingerprint": "f"}}), "other bits"),
    ],
)
def test_the_verdict_notices(begun: Start, why: str) -> None:
    """Catches a fuzzer that takes what it is there to find for a refusal."""
    sound = fuzz.Sound("x", Gguf([], []), [MIDDLE], bits={MIDDLE: {"residual": b"1"}}, fingerprint="f")
    verdict = fuzz.judge(begun, sound, MIDDLE)
    assert verdict.outcome == fuzz.FINDING
    assert why in verdict.why
