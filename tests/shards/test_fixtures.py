"""Recorded runs: the same bytes each time, and a C program that passes on them and on nothing else.

Catches: fixtures that differ from run to run, a program that passes whatever is recorded, a message that
does not say where, and a folder that is half written or removed by mistake.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from boundary_bundle import decode, encode
from boundary_bundle.cli import main
from boundary_bundle.native import NativeBuild
from boundary_bundle.shards import fixtures, tiny_models

pytestmark = pytest.mark.shards

WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror")
#: Batches of the prompts, and greedy steps, of two sequences.
PROMPT_STEPS, STEPS = 3, 7


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def recorded(patched_build: NativeBuild, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every family, as the command writes them."""
    folder = tmp_path_factory.mktemp("fixtures") / "all"
    worker = str(patched_build.worker)
    assert main(["fixtures", "--family", "all", "--logits", "-o", str(folder), "--worker", worker]) == 0
    return folder


@pytest.fixture(scope="module")
def manifest(recorded: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((recorded / fixtures.MANIFEST).read_text("utf-8"))
    return content


@pytest.fixture(scope="module")
def compiled(patched_build: NativeBuild, recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded program, compiled with every warning an error."""
    program = tmp_path_factory.mktemp("program") / "check_fixtures"
    includes = [f"-I{path}" for path in patched_build.include_dirs]
    where = [f"-L{patched_build.lib_dir}", "-lllama", f"-Wl,-rpath,{patched_build.lib_dir}"]
    source = str(recorded / fixtures.PROGRAM)
    # The headers are upstream's: their warnings are not ours.
    subprocess.run(["cc", "-std=c11", "-O2", *WARNINGS, *includes, source, "-o", str(program), *where], check=True)
    return program


Check = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def check(compiled: Path) -> Check:
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [str(compiled), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    return run


@pytest.fixture
def one(recorded: Path, manifest: dict[str, Any], tmp_path: Path) -> Path:
    """A copy of the fixtures with one family in its lines, to be damaged."""
    copy = tmp_path / "copy"
    shutil.copytree(recorded, copy)
    kept = {**manifest, "fixtures": [entry for entry in manifest["fixtures"] if entry["name"] == "gqa"]}
    (copy / fixtures.LINES).write_text(fixtures.lines(kept), "ascii")
    return copy


def test_two_runs_give_the_same_bytes(patched_build: NativeBuild, recorded: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    settings = replace(fixtures.SETTINGS, seqs=2)
    fixtures.capture(again, fixtures.families("all"), patched_build.worker, settings=settings, logits=True)
    assert files(again) == files(recorded)
    assert sum(map(len, files(again).values())) < 10_000_000


def test_no_path_of_this_machine_is_recorded(
    patched_build: NativeBuild, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    # Without --worker, so that the manifest says which library it was.
    assert main(["fixtures", "--family", "moe", "-o", str(folder)]) == 0
    assert f"LIB={patched_build.lib_dir}" in capsys.readouterr().out
    text = (folder / fixtures.MANIFEST).read_text("utf-8")
    told = json.loads(text)["library"]
    assert [name for name, _ in told["patches"]] == sorted(
        path.name for path in (Path(__file__).parents[2] / "patches").glob("*.patch")
    )
    for place in (tmp_path, Path.home(), patched_build.lib_dir):
        assert str(place) not in text


def test_the_manifest_describes_the_files(recorded: Path, manifest: dict[str, Any]) -> None:
    assert manifest["schema"] == 1
    assert [entry["name"] for entry in manifest["fixtures"]] == list(tiny_models.VARIANTS)
    found = files(recorded)
    assert found.pop(fixtures.LINES) == fixtures.lines(manifest).encode()
    del found[fixtures.MANIFEST], found[fixtures.PROGRAM], found["Makefile"]
    layouts = set()
    for entry in manifest["fixtures"]:
        model = found.pop(entry["model"]["file"])
        assert (len(model), sha256(model).hexdigest()) == (entry["model"]["bytes"], entry["model"]["sha256"])
        assert len(entry["steps"]) == STEPS
        following: list[list[int]] = [list(prompt) for prompt in entry["prompts"]]
        for step in entry["steps"]:
            assert [row["layer"] for row in step["boundaries"]] == entry["cuts"]
            for row in (step["request"], *step["boundaries"], step["logits"]):
                data = found.pop(row["file"])
                assert (len(data), sha256(data).hexdigest()) == (row["bytes"], row["sha256"])
                if row is step["logits"]:
                    logits = np.frombuffer(data, "<f4").reshape(row["rows"], tiny_models.N_VOCAB)
                    continue
                bundle = decode(data)
                assert encode(bundle) == data
                assert (bundle.fragment_size, bundle.checksums) == (row["fragment_size"], row["checksums"])
                assert {t.byte_order for t in bundle if t.row.both_orders} == {row["byte_order"]}
                assert bundle.attributes["n_tokens"] == len(step["tokens"])
                assert bundle.attributes["model_fingerprint"] == bytes.fromhex(entry["model"]["fingerprint"])
                layouts.add((row["byte_order"], row["fragment_size"], row["checksums"]))
            assert step["tokens"] == [
                following[sequence][position]
                for sequence, position in zip(step["sequences"], step["positions"], strict=True)
            ]
            wanted = [sequence for sequence, output in zip(step["sequences"], step["outputs"], strict=True) if output]
            for sequence, row in zip(wanted, logits, strict=True):
                following[sequence].append(int(row.argmax()))
        assert [len(tokens) for tokens in following] == [len(entry["prompts"][0]) + 5] * 2
        assert following[0] != following[1]
    assert found == {}
    assert len(layouts) == 4


def test_the_program_passes(check: Check, recorded: Path) -> None:
    done = check(recorded)
    assert (done.returncode, done.stderr) == (0, "")
    count = len(tiny_models.VARIANTS)
    bundles, logits = count * STEPS * 2, count * 2 * (STEPS - PROMPT_STEPS + 1) * tiny_models.N_VOCAB
    assert f"{count} fixtures, {bundles} bundles and {logits} logits compared" in done.stdout
    assert done.stdout.count("passed ") == count


def test_here_the_program_compares_with_an_unsplit_run(check: Check, one: Path) -> None:
    assert check("--here", one).returncode == 0
    # Other recorded results do not matter.
    rewrite(one, one / "gqa/step-001-layer-2.bundle", lambda data: flipped(data, -200))
    assert check("--here", one).returncode == 0
    assert check(one).returncode == 1


def test_the_makefile(patched_build: NativeBuild, recorded: Path, tmp_path: Path) -> None:
    copy = tmp_path / "with its makefile"
    shutil.copytree(recorded, copy)
    where = [f"LLAMA={patched_build.source_dir}", f"LIB={patched_build.lib_dir}"]
    done = subprocess.run(["make", "-C", str(copy), "check", *where], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "0 failures" in done.stdout


def rewrite(folder: Path, path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change a file and its digest in the lines, so that only what it says is wrong."""
    before = path.read_bytes()
    after = change(before)
    assert after != before
    path.write_bytes(after)
    lines = (folder / fixtures.LINES).read_text("ascii")
    (folder / fixtures.LINES).write_text(lines.replace(sha256(before).hexdigest(), sha256(after).hexdigest()), "ascii")


def flipped(data: bytes, place: int) -> bytes:
    changed = bytearray(data)
    changed[place] ^= 1
    return bytes(changed)


@pytest.mark.parametrize("step", [0, STEPS - 1])
@pytest.mark.parametrize("kind", ["tokens", "layer-2", "layer-5"])
@pytest.mark.parametrize("place", [9, 77, -200, -1])
def test_one_flipped_byte_of_a_bundle_is_named(check: Check, one: Path, kind: str, step: int, place: int) -> None:
    name = f"gqa/step-{step:03}-{kind}.bundle"
    path = one / name
    path.write_bytes(flipped(path.read_bytes(), place))
    done = check(one)
    assert done.returncode == 1
    assert f"FAILED gqa: step {step}: {name}: its SHA-256 is" in done.stdout
    if kind != "tokens":
        assert f"FAILED gqa: step {step}: {name}: layers" in done.stdout
    assert set(re.findall(r"step (\d+)", done.stdout)) == {str(step)}


def test_a_flipped_byte_with_its_digest_is_named(check: Check, one: Path) -> None:
    """The comparison itself, not the digests of the files."""
    name = "gqa/step-004-layer-5.bundle"
    bundle = decode((one / name).read_bytes())
    array = np.array(bundle["residual"])
    array.view(np.uint32)[0, 0] ^= 1
    bundle.tensor("residual").array = array
    rewrite(one, one / name, lambda _: encode(bundle))
    done = check(one)
    assert done.returncode == 1
    assert re.search(rf"FAILED gqa: step 4: {name}: layers \[2,5\) wrote other bytes: \d+ of \d+ differ", done.stdout)
    # The last range got the changed row: its logits are others.
    assert "FAILED gqa: step 4: logits: their SHA-256 is" in done.stdout


@pytest.mark.parametrize("step", [2, STEPS - 1])
def test_one_flipped_digit_of_a_digest_is_named(check: Check, one: Path, manifest: dict[str, Any], step: int) -> None:
    entry = next(entry for entry in manifest["fixtures"] if entry["name"] == "gqa")
    digest = entry["steps"][step]["logits"]["sha256"]
    other = digest[:-1] + ("1" if digest[-1] == "0" else "0")
    path = one / fixtures.LINES
    path.write_text(path.read_text("ascii").replace(digest, other), "ascii")
    done = check(one)
    assert done.returncode == 1
    assert f"FAILED gqa: step {step}: logits: their SHA-256 is {digest}, the manifest has {other}" in done.stdout


def test_what_cannot_be_checked(check: Check, one: Path, tmp_path: Path) -> None:
    lines = (one / fixtures.LINES).read_text("ascii")

    def refused(text: str, sentence: str) -> None:
        (one / fixtures.LINES).write_text(text, "ascii")
        done = check(one)
        assert done.returncode == 2
        assert re.fullmatch(rf"check_fixtures: .*{sentence}.*\n+", done.stderr), done.stderr

    refused("", "does not begin with the line")
    refused("boundary-bundle fixtures 2\n", "does not begin with the line")
    refused("boundary-bundle fixtures 1\n", "holds no fixture")
    refused(lines[: lines.index("end gqa")], "ends inside a fixture")
    refused(lines.replace("range 0 2", "range 0 two"), "manifest.lines:5: cannot be understood")
    refused(lines.replace("range 2 5", "range 2 50"), "layers .2,50. of .*model.gguf")
    refused(lines.replace("step-001-tokens", "step-901-tokens"), "step 1: cannot read")
    refused(lines.replace("gqa/model.gguf", "-"), "give the file as the second argument")
    refused(lines.replace("gqa/model.gguf", "moe/model.gguf"), "is another model")
    assert check(tmp_path / "absent").returncode == 2
    assert check("--elsewhere").returncode == 2


def test_a_model_that_stays_where_it_is(
    patched_build: NativeBuild, check: Check, tiny: dict[str, Path], tmp_path: Path
) -> None:
    folder, worker = tmp_path / "out", str(patched_build.worker)
    more = ["--cuts", "1,4", "--tokens", "2", "--prompt", "some words", "--threads", "2", "--flash-attn", "off"]
    command = ["fixtures", "--model", str(tiny["tied"]), "-o", str(folder), "--worker", worker, *more]
    assert main(command) == 0
    content = json.loads((folder / fixtures.MANIFEST).read_text("utf-8"))
    entry = content["fixtures"][0]
    assert (entry["cuts"], entry["model"]["file"]) == ([1, 4], None)
    assert entry["model"]["name"] == tiny["tied"].name
    assert entry["settings"]["threads"] == 2
    assert not list(folder.rglob("*.gguf"))
    assert check(folder).returncode == 2
    done = check(folder, tiny["tied"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert check(folder, tiny["gqa"]).returncode == 2


def test_a_trained_model(patched_build: NativeBuild, check: Check, smollm2: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    more = ["--cuts", "10,20", "--tokens", "1", "-o", str(folder), "--worker", str(patched_build.worker)]
    assert main(["fixtures", "--model", str(smollm2), *more]) == 0
    done = check(folder, smollm2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 fixtures, 4 bundles and 98304 logits compared" in done.stdout


# -- the command and its folder


def one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["fixtures", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(r"error: [^\n]+\n", said.err)
    assert sentence in said.err


def test_bad_input(
    patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = str(tiny["tied"]), ["-o", str(tmp_path / "out"), "--worker", str(patched_build.worker)]
    for arguments, sentence in (
        (out, "one of the arguments --model --family is required"),
        (["--model", model, "--family", "all", *out], "not allowed with"),
        (["--model", model, *out], "needs --cuts"),
        (["--model", model, "--cuts", "3,3", *out], "twice"),
        (["--model", model, "--cuts", "7", *out], "out of range"),
        (["--model", str(tmp_path / "absent.gguf"), "--cuts", "1", *out], "cannot read"),
        (["--family", "mamba", *out], "no family 'mamba'"),
        (["--family", "gqa,gqa", *out], "given twice"),
        (["--family", "all", "--cuts", "6", *out], "out of range"),
        (["--family", "gqa", "--ctx", "20", *out], "positions a sequence, but a context of 20 has 10"),
        (["--family", "gqa", "--ctx", "1", *out], "2 sequences need batches of 2 tokens or more, but they have 1"),
        (["--family", "gqa", "--sequences", "65", *out], "1 to 64"),
        (["--family", "gqa", "--prompt", "x", "--tokens", "998", *out], "0 to 997"),
        (["--family", "gqa", "--worker", str(tmp_path / "none"), "-o", str(tmp_path / "out")], "cannot start"),
        (["--family", "gqa", *out[2:], "-o", str(tmp_path / "no" / "folder")], "there is no folder"),
        (["--family", "gqa", *out[2:], "-o", model], "not a folder"),
    ):
        one_sentence(arguments, sentence, capsys)
    assert list(tmp_path.iterdir()) == []


def test_force_replaces_fixtures_and_nothing_else(
    patched_build: NativeBuild, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    command = ["--family", "moe", "--tokens", "0", "-o", str(folder), "--worker", str(patched_build.worker)]
    # An empty folder is no obstacle.
    assert main(["fixtures", *command]) == 0
    first = files(folder)
    one_sentence(command, "not empty", capsys)
    (folder / "more").write_text("of mine")
    # Whatever fails leaves the old ones alone.
    one_sentence([*command, "--force", "--ctx", "8"], "positions a sequence", capsys)
    assert files(folder) == {**first, "more": b"of mine"}
    assert main(["fixtures", *command, "--force"]) == 0
    assert files(folder) == first
    (folder / fixtures.MANIFEST).unlink()
    one_sentence([*command, "--force"], "holds no fixtures", capsys)
    assert list(tmp_path.iterdir()) == [folder]


def test_an_interrupt_leaves_nothing(patched_build: NativeBuild, tiny: dict[str, Path], tmp_path: Path) -> None:
    more = ["--model", str(tiny["gqa"]), "--cuts", "2", "--tokens", "900", "--ctx", "1024", "-o", str(tmp_path / "out")]
    command = [sys.executable, "-m", "boundary_bundle.cli", "fixtures", *more, "--worker", str(patched_build.worker)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not list(tmp_path.glob(".fixtures-*/new/model/step-003-*")):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_a_family_keeps_its_layers_and_kinds() -> None:
    for name, shape in tiny_models.VARIANTS.items():
        small = fixtures.small_shape(name)
        assert (small.n_layer, small.n_head, small.n_head_kv) == (shape.n_layer, shape.n_head, shape.n_head_kv)
        assert small.n_embd == shape.n_embd // 2
