"""Certification: the settings meet what they must, a flipped bit and a planted fault show, certificates are current."""

from __future__ import annotations

import itertools
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import planted_faults
import pytest

from boundary_bundle.cli import main
from boundary_bundle.families import certificates, models
from boundary_bundle.families.certify import Certificate, Limits, Programs, certify, describe
from boundary_bundle.families.contracts import declared, with_symbols
from boundary_bundle.families.settings import (
    ALL_PAIRS,
    ALL_SETTINGS,
    DECODE_STEPS,
    FACTORS,
    Covering,
    Setting,
    Traits,
    combination,
    make_run,
    pairs,
    plan_text,
    rules,
)
from boundary_bundle.native import NativeBuild
from boundary_bundle.native.build import CERTIFY

ROOT = Path(__file__).resolve().parents[1]
PLAIN = Traits(memory=True, n_vocab=320, n_ctx_train=2048)
LATENT = Traits(memory=True, n_vocab=320, n_ctx_train=2048, latent=True)
WINDOW = Traits(memory=True, n_vocab=320, n_ctx_train=2048, window=True)
WITHOUT_MEMORY = Traits(memory=False, n_vocab=320, n_ctx_train=2048, whole=True)


# -- settings


@pytest.mark.parametrize(
    "traits", [PLAIN, LATENT, WINDOW, WITHOUT_MEMORY], ids=["memory", "latent", "window", "without"]
)
def test_every_legal_pair_of_values_is_met(traits: Traits) -> None:
    """By the definition, from all settings, and not by what the covering array says of itself."""
    ruled = rules(traits)
    legal = [one for one in ALL_SETTINGS if not any(one.meets(entry.combination) for entry in ruled)]
    wanted = {frozenset(pair) for one in legal for pair in itertools.combinations(one.values(), 2)}
    covering = Covering(ruled)
    array = covering.next_round()
    assert set(array) <= set(legal)
    met = {frozenset(pair) for one in array for pair in itertools.combinations(one.values(), 2)}
    assert met == wanted
    for one in array:
        covering.ran(one)
    assert covering.next_round() == []
    assert covering.unmet() == []
    assert covering.met() == len(wanted)


def test_only_quantised_values_without_flash_attention_are_ruled_out() -> None:
    plain = {entry.combination for entry in rules(PLAIN)}
    assert plain == {combination(types="q8_0-q8_0", flash="off"), combination(window="moving")}
    assert plain - {entry.combination for entry in rules(WINDOW)} == {combination(window="moving")}
    latent = {entry.combination for entry in rules(LATENT)} - {entry.combination for entry in rules(PLAIN)}
    assert latent == {combination(types="q8_0-f16", flash="off")}
    left = [one for one in ALL_SETTINGS if not any(one.meets(entry) for entry in plain)]
    assert left == list(Covering(rules(PLAIN))._legal)


def run_against(refused: tuple[tuple[str, str], ...]) -> Covering:
    """A library that refuses every setting that has all of these values."""
    covering = Covering(rules(PLAIN))
    for _ in range(20):
        settings = covering.next_round()
        if not settings:
            return covering
        for one in settings:
            if one.meets(refused):
                covering.refused(one, "because")
            else:
                covering.ran(one)
    raise AssertionError("no end")


@pytest.mark.parametrize(
    "refused",
    [
        combination(flash="on"),
        combination(context="long"),
        combination(kv="split", sequences="3"),
        combination(types="q8_0-f16", flash="off"),
    ],
    ids=str,
)
def test_what_the_library_refuses_is_found_and_the_rest_is_met(refused: tuple[tuple[str, str], ...]) -> None:
    """A refused setting's other pairs would be lost without a further round."""
    covering = run_against(refused)
    legal = [
        one
        for one in ALL_SETTINGS
        if not one.meets(refused) and not any(one.meets(entry.combination) for entry in rules(PLAIN))
    ]
    wanted = set().union(*(pairs(one) for one in legal))
    found = [entry for entry in covering.illegal() if entry not in rules(PLAIN)]
    assert any(set(entry.combination) <= set(refused) or set(refused) <= set(entry.combination) for entry in found)
    assert covering.unmet() == []
    met = set().union(*(pairs(one) for one in covering.enough()))
    assert met == wanted


def test_a_pair_that_was_neither_met_nor_refused_is_named() -> None:
    covering = Covering(rules(PLAIN))
    array = covering.next_round()
    for one in array[:-1]:
        covering.ran(one)
    missing = pairs(array[-1]) - set().union(*(pairs(one) for one in array[:-1]))
    assert missing
    assert set(covering.unmet()) == missing


@pytest.mark.parametrize("setting", Covering(rules(PLAIN)).next_round(), ids=lambda one: one.name)
def test_batches_are_what_the_setting_says(setting: Setting) -> None:
    run = make_run(setting, PLAIN)
    n_ubatch, count = run.n_ubatch, int(setting.sequences)
    assert n_ubatch == {"short": 8, "long": 64}[setting.context]
    size = {"1": 1, "2": 2, "u-1": n_ubatch - 1, "u": n_ubatch, "u+1": n_ubatch + 1, "3u+1": 3 * n_ubatch + 1}
    body = run.batches[:-DECODE_STEPS]
    # The last one holds what is left; in long contexts of small batches large ones come first.
    assert Counter(map(len, body[:-1])).most_common(1)[0][0] == size[setting.batch]
    assert max(map(len, run.batches)) <= run.n_batch
    following: dict[int, int] = {}
    for batch in run.batches:
        for token in batch:
            assert token.position == following.get(token.sequence, 0)
            following[token.sequence] = token.position + 1
    assert sorted(following) == list(range(count))
    lengths = list(following.values())
    assert len(set(lengths)) == count  # uneven
    assert (max(lengths) > 512 + DECODE_STEPS) == (setting.context == "long")
    for batch in run.batches[-DECODE_STEPS:]:
        assert [token.sequence for token in batch] == list(range(count))
    room = run.n_ctx if setting.kv == "unified" else run.n_ctx // count
    assert room >= (sum(lengths) if setting.kv == "unified" else max(lengths))
    flags = [token.output for batch in run.batches for token in batch]
    if setting.outputs == "all":
        assert all(flags)
    elif setting.outputs == "last":
        for batch in run.batches:
            last = {token.sequence: place for place, token in enumerate(batch)}
            assert [place for place, token in enumerate(batch) if token.output] == sorted(last.values())
    else:
        assert 0.2 < sum(flags) / len(flags) < 0.5


def test_sequences_meet_in_one_batch() -> None:
    """Rows in micro-batch order would not show in batches of one sequence each."""
    for setting in Covering(rules(PLAIN)).next_round():
        if setting.sequences != "1" and setting.batch not in ("1", "2"):
            body = make_run(setting, PLAIN).batches[:-DECODE_STEPS]
            mixed = [batch for batch in body if len({token.sequence for token in batch}) > 1]
            assert mixed
            turns = [sum(a.sequence != b.sequence for a, b in itertools.pairwise(batch)) for batch in mixed]
            assert max(turns) >= 2


def test_without_memory_every_batch_stands_alone() -> None:
    for setting in Covering(rules(WITHOUT_MEMORY)).next_round():
        run = make_run(setting, WITHOUT_MEMORY)
        assert max(run.sizes) <= run.n_ubatch
        for batch in run.batches:
            following: dict[int, int] = {}
            for token in batch:
                assert token.position == following.get(token.sequence, 0)
                following[token.sequence] = token.position + 1
                assert token.output
        if setting.context == "long" and setting.batch == "u" and setting.sequences == "1":
            assert max(token.position for batch in run.batches for token in batch) > 512


def test_plans_are_the_same_every_time() -> None:
    runs = [make_run(setting, PLAIN) for setting in Covering(rules(PLAIN)).next_round()]
    again = [make_run(setting, PLAIN) for setting in Covering(rules(PLAIN)).next_round()]
    assert plan_text(runs) == plan_text(again)


def test_names_are_unique() -> None:
    assert len({one.name for one in ALL_SETTINGS}) == len(ALL_SETTINGS)
    assert len(ALL_PAIRS) == sum(len(a) * len(b) for a, b in itertools.combinations(FACTORS.values(), 2))


# -- one model


@pytest.fixture(scope="module")
def programs(unpatched_build: NativeBuild, patched_build: NativeBuild) -> Programs:
    return Programs.of(unpatched_build, patched_build)


#: Short, with sequences that the library reorders within a batch.
QUICK = ("bu.s2.unified.flash.q8_0-f16.last.short", "b3u+1.s3.split.plain.f16-f16.all.short")


@pytest.mark.shards
def test_a_model_is_certified(tiny: dict[str, Path], programs: Programs) -> None:
    model = describe(tiny["untied"], programs.unpatched_build)
    found = certify(model, programs, Limits(only=QUICK))
    assert (found.verdict, found.reason) == ("certified", "")
    assert found.cuts == [1, 2, 3, 4, 5]
    assert found.settings == sorted(QUICK, key=[one.name for one in ALL_SETTINGS].index)
    runs = [make_run(one, Traits(True, model.n_vocab, 2048)) for one in ALL_SETTINGS if one.name in QUICK]
    rows = sum(token.output for run in runs for batch in run.batches for token in batch)
    tokens = sum(len(batch) for run in runs for batch in run.batches)
    assert found.tokens == tokens
    # Without a range, with the whole one, and at each cut.
    assert found.logits.compared == rows * model.n_vocab * (2 + 5)
    offsets = sum(len(run.batches) for run in runs)
    # residual, positions, seq_ids, outputs of each token, and an offset more than tokens in each batch
    assert found.boundary.compared == 10 * (tokens * (model.n_embd + 4) + offsets)
    assert found.logits.differing == found.boundary.differing == 0
    (contract,) = found.contracts
    assert contract.cuts == (1, 2, 3, 4, 5)
    assert [tensor.name for tensor in contract.tensors] == list(certificates.COMMON)
    assert contract.tensors[0].shape == ("tokens", "n_embd")
    assert found.sizes == {"n_embd": model.n_embd, "n_vocab": model.n_vocab}
    assert [(end.cuts, end.tensors[0].name) for end in found.ends] == [((0,), "token_ids"), ((6,), "logits")]
    (refusal,) = found.refusals
    assert refusal.unpatched == refusal.patched
    assert "V cache quantization requires flash_attn" in refusal.patched


@pytest.mark.shards
def test_one_flipped_bit_of_the_oracle_shows_at_every_cut(
    tiny: dict[str, Path], programs: Programs, tmp_path: Path
) -> None:
    """The comparison is of every bit of every value: the last bit of one logit in the middle, found seven times."""
    setting = next(one for one in ALL_SETTINGS if one.name == QUICK[1])
    plan = tmp_path / "plan"
    plan.write_text(plan_text([make_run(setting, PLAIN)]))
    rows = tmp_path / "rows"
    subprocess.run([programs.oracle, plan, tiny["untied"], rows], check=True, capture_output=True)
    command = [programs.patched, plan, tiny["untied"], rows]

    def compare() -> dict[str, object]:
        done = subprocess.run(command, check=True, capture_output=True)
        event: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
        return event

    assert compare()["logits_differing"] == 0
    data = bytearray(rows.read_bytes())
    batch, row, index = 1, 4, 17
    place = 16 + len(setting.name)
    for number in range(batch + 1):
        n_rows, width = struct.unpack_from("<QQ", data, place)
        place += 16
        if number < batch:
            place += 4 * n_rows * width
    data[place + 4 * (row * width + index)] ^= 1
    rows.write_bytes(data)
    event = compare()
    assert (event["logits_differing"], event["boundary_differing"]) == (2 + 5, 0)
    assert event["bad_cuts"] == [1, 2, 3, 4, 5]
    first = event["first"]
    assert isinstance(first, dict)
    assert (first["what"], first["batch"], first["row"], first["index"]) == ("no range", batch, row, index)


@pytest.mark.shards
def test_an_architecture_that_is_not_certified_is_refused_by_name(programs: Programs, tmp_path: Path) -> None:
    """And runs as before where no range is asked for."""
    model = models.make_model(("t5", "dense"), tmp_path / "model.gguf", build=programs.unpatched_build)
    found = certify(model, programs, Limits(reduced=True))
    assert found.verdict == "refused"
    assert "'t5' is not certified" in found.reason
    assert (found.cuts, found.boundary.compared, found.logits.differing) == ([], 0, 0)
    assert found.logits.compared > 0


@pytest.mark.shards
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--family", "lama"], "there is no architecture 'lama'"),
        (["--family", "llama", "--settings", "b1"], "there is no setting 'b1'"),
        (["--family", "all", "--reduced", "-o", "somewhere"], "so -o needs --family alone"),
        (["--model", "nothing.gguf"], "nothing.gguf"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["certify", *arguments]) == 2
    error = capsys.readouterr().err.strip().split("\n")[-1]
    assert error.startswith("error: ")
    assert said in error


@pytest.mark.shards
def test_the_command_on_one_file(tiny: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "result.json"
    command = ["certify", "--model", str(tiny["gqa"]), "--settings", ",".join(QUICK), "--json", str(target)]
    assert main(command) == 0
    (row,) = json.loads(target.read_text())["architectures"]
    assert (row["name"], row["verdict"], row["cuts"], row["reason"]) == ("llama", "certified", 7, "")
    assert (row["logits_differing"], row["boundary_values_differing"]) == (0, 0)
    assert row["logits_compared"] > 0
    assert f"{row['logits_compared']:,}" in capsys.readouterr().out


@pytest.mark.shards
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_everything(number: int, tmp_path: Path) -> None:
    """A thread that goes on with the next program would keep the command alive for minutes."""
    command = [sys.executable, "-m", "boundary_bundle.cli", "certify", "--family", "llama,gemma,phi2,qwen2"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    # A group of its own: what the command leaves behind would be found there.
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, start_new_session=True) as child:
        while not list(tmp_path.glob("boundary-bundle-certify-*/patched.plan")):
            assert child.poll() is None
            time.sleep(0.05)
        os.kill(child.pid, number)
        child.communicate(timeout=60)
    assert child.returncode == (130 if number == signal.SIGINT else 128 + number)
    with pytest.raises(ProcessLookupError):
        os.killpg(child.pid, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.shards
def test_a_program_that_is_too_slow_is_a_verdict(tiny: dict[str, Path], programs: Programs) -> None:
    model = describe(tiny["untied"], programs.unpatched_build)
    found = certify(model, programs, Limits(only=QUICK, seconds=0.001))
    assert found.verdict == "crashed"
    assert "no end within" in found.reason


# -- contracts


def contract(cut: int, layers: int, width: int = 8) -> tuple[int, str]:
    return cut, (
        "boundary-bundle contract 1\n"
        "attribute 0x8006 u64 *\n"
        f"tensor residual f32 [tokens,4,{width}] 0\n"
        f"tensor per_layer_inputs f32 [tokens,{layers},16] 0\n"
        "tensor seq_offsets u32 [tokens+1] -\n"
        "tensor other f32 [tokens,3] 0\n"
    )


def test_sizes_get_their_names() -> None:
    """Cuts of one contract become one, although what is left behind them differs."""
    texts = [contract(1, 5), contract(2, 4)]
    assert len(declared(texts)) == 2
    ((found,), sizes) = with_symbols(declared(texts), 6, {"n_embd": 8})
    assert found.cuts == (1, 2)
    assert [(tensor.name, tensor.shape, tensor.token_axis) for tensor in found.tensors] == [
        ("residual", ("tokens", "n_streams", "n_embd"), 0),
        ("per_layer_inputs", ("tokens", "layers_behind", "n_embd_per_layer"), 0),
        ("seq_offsets", ("tokens+1",), None),
        ("other", ("tokens", "3"), 0),
    ]
    assert sizes == {"n_streams": 4, "n_embd": 8, "n_embd_per_layer": 16}


@pytest.mark.parametrize("texts", [[contract(1, 4)], [contract(1, 5, 9)]], ids=["layers", "width"])
def test_a_size_that_is_not_what_its_name_says(texts: list[tuple[int, str]]) -> None:
    with pytest.raises(ValueError, match="layers_behind|n_embd"):
        with_symbols(declared(texts), 6, {"n_embd": 8})


# -- planted faults


@pytest.fixture(scope="module")
def faulty(
    unpatched_build: NativeBuild, patched_build: NativeBuild, tmp_path_factory: pytest.TempPathFactory
) -> Programs:
    build = planted_faults.build_faulty(patched_build, tmp_path_factory.mktemp("faults"))
    return Programs(unpatched_build.programs[CERTIFY], build.programs[CERTIFY], unpatched_build)


def certify_fault(model: str, tiny: dict[str, Path], faulty: Programs, folder: Path) -> Certificate:
    if model in tiny:
        return certify(describe(tiny[model], faulty.unpatched_build), faulty, Limits(reduced=True))
    made = models.make_model((model, "dense"), folder / "model.gguf", build=faulty.unpatched_build)
    return certify(made, faulty, Limits(reduced=True))


@pytest.mark.shards
@pytest.mark.parametrize("model", ["tied", "untied", "gemma"])
def test_the_library_with_faults_asleep_is_certified(
    model: str, tiny: dict[str, Path], faulty: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the tests of the faults would pass for another reason."""
    monkeypatch.delenv(planted_faults.VARIABLE, raising=False)
    found = certify_fault(model, tiny, faulty, tmp_path)
    assert (found.verdict, found.reason) == ("certified", "")


@pytest.mark.shards
@pytest.mark.parametrize("name", planted_faults.FAULTS)
def test_a_planted_fault_makes_certification_fail(
    name: str, tiny: dict[str, Path], faulty: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(planted_faults.VARIABLE, name)
    found = certify_fault(planted_faults.FAULTS[name][0], tiny, faulty, tmp_path)
    assert found.verdict in ("failed", "crashed")
    assert found.reason


# -- every architecture


@pytest.mark.shards
def test_reduced_grid(tmp_path: Path) -> None:
    """Each architecture once, the odd ones in full: what its certificate says is still so."""
    target = tmp_path / "result.json"
    command = [sys.executable, "-m", "boundary_bundle.cli", "certify", "--family", "all", "--reduced", "--json", target]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = {row["name"]: row["verdict"] for row in json.loads(target.read_text())["architectures"]}
    assert found == {row["architecture"]: row["verdict"] for row in certificates.read(ROOT / "spec" / "families")}


def test_certificates_are_of_this_series() -> None:
    """After a change of the patches: boundary-bundle certify --family all."""
    found = certificates.read(ROOT / "spec" / "families")
    assert {row["series_sha256"] for row in found} == {certificates.series_hash(ROOT / "patches")}
    certified = [row for row in found if row["verdict"] == "certified"]
    assert len(certified) >= 120
    for row in certified:
        for variant in row["variants"]:
            if variant["verdict"] == "certified":
                assert variant["logits_compared"] > 0
                assert variant["logits_differing"] == variant["boundary_values_differing"] == 0
    assert all(row["reason"] for row in found if row["verdict"] != "certified")
    assert (ROOT / "spec" / "families" / "README.md").read_text() == certificates.table(found)
