"""Drawn bundles and drawn damage, with this package's codec as the reference.

What a testee answers differently is shrunk by hypothesis to the smallest input and
written down as a vector. The one module of the kit that needs hypothesis.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException

from ..bundle import Bundle
from ..decoder import decode
from ..encoder import encode
from ..testing import bundles, damaged
from .asks import Expected, Malformed, judge, unclaimed
from .runner import Runner, Unusable, write_text
from .testee import Trouble, shown
from .testee_python import PythonTestee, tell_bundle
from .vectors import Vector, shrink

#: Draws are dealt into so many shares, whatever the machine, so that a seed means the same everywhere.
_SHARES: Final = 4
#: Tries and seconds that shrinking one failure may take.
_TRIES: Final = 2000
_SECONDS: Final = 20.0
#: Different failures that are looked for.
_DIFFERENT: Final = 20


@dataclass
class Found:
    """A failure: the smallest input that shows it."""

    signature: tuple[str, ...]
    result: str
    detail: str
    mode: str
    data: bytes
    pieces: list[int] | None
    expected: Expected
    bundle: dict[str, Any] | None = None


@dataclass
class Share:
    """What one process did."""

    cases: int = 0
    restarts: int = 0
    found: list[Found] = field(default_factory=list)
    could_not: str = ""


_TENTHS: Final = st.integers(0, 9)
_BUNDLES: Final = bundles()
_DAMAGED: Final = damaged()
_PIECES: Final = st.none() | st.lists(st.integers(1, 130), min_size=1, max_size=4)


class _Enough(BaseException):
    """Ends hypothesis at once. Not an Exception: it would be taken for a failure."""


@st.composite
def _inputs(draw: st.DrawFn) -> tuple[bytes, bool, list[int] | None]:
    """An input, whether it is what an encoder writes, and sizes of pieces."""
    # An input that is shrunk becomes a sound one if it can: those are smaller.
    sound = draw(_TENTHS) < 3
    data = encode(draw(_BUNDLES)) if sound else draw(_DAMAGED)
    return data, sound, draw(_PIECES)


def _request(mode: str, data: bytes, pieces: list[int] | None) -> dict[str, Any]:
    if mode == "encode":
        return {"cmd": "encode", "bundle": tell_bundle(decode(data))}
    request = {"cmd": "decode", "class": mode, "data": data.hex()}
    return request if pieces is None else {**request, "cmd": "stream", "pieces": pieces}


def _expected(reference: PythonTestee, request: dict[str, Any]) -> Expected:
    if request["cmd"] == "encode":
        answer = reference.encode(request)
        return Expected(data=answer.get("data"), error=answer.get("error"), encode=True)
    answer = reference.decode(request)
    return Expected(tuple(answer["bundles"]), answer.get("error"))


def _signature(mode: str, result: str, expected: Expected, answer: Any, details: Sequence[str]) -> tuple[str, ...]:
    """What makes two failures the same one: verdicts and names, no values."""
    wanted = expected.error["name"] if expected.error else "accepted"
    if isinstance(answer, Trouble):
        return (result, answer.kind)
    if result != "wrong":
        return (result,)
    error = answer.get("error")
    got = shown(str(error.get("name")).encode()) if isinstance(error, dict) else "accepted"
    # Of a difference in content the field, without its indices.
    where = "".join(char for char in details[0].split(":")[0] if not char.isdigit()) if got == wanted else ""
    return (result, "encode" if mode == "encode" else "decode", wanted, got, where)


def run_share(command: Sequence[str], count: int, number: int, time_limit: float) -> Share:
    """Put ``count`` drawn cases to a testee; ``number`` seeds the draws.

    A drawn input is a case for each mode in which it is put.
    """
    share = Share()
    reference = PythonTestee()
    seen: set[tuple[str, ...]] = set()
    with Runner(command, time_limit=time_limit) as runner:
        try:
            hello = runner.start()
        except Unusable as error:
            share.could_not = str(error)
            return share
        modes = [mode for mode in ("core", "stream", "one") if mode in hello["classes"]]
        dtypes = set(hello["dtypes"])
        by_content = hello.get("judged") == "content"

        def judged(asked: Sequence[str], data: bytes, pieces: list[int] | None) -> Iterator[Found | None]:
            """What is wrong with the answers to an input in each of the modes that are asked."""
            requests = [_request(mode, data, pieces if mode in ("core", "stream") else None) for mode in asked]
            expected: list[Expected] = []

            def line(request: dict[str, Any]) -> Callable[[int], bytes]:
                body = json.dumps(request, separators=(",", ":"))[1:]
                return lambda seq: f'{{"seq":{seq},{body}\n'.encode("ascii")

            answers = runner.ask_together(
                [line(request) for request in requests],
                lambda: expected.extend(_expected(reference, request) for request in requests),
            )
            for mode, request, wanted, answer in zip(asked, requests, expected, answers, strict=True):
                yield verdict(mode, data, request, wanted, answer)

        def verdict(
            mode: str, data: bytes, request: dict[str, Any], expected: Expected, answer: dict[str, Any] | Trouble
        ) -> Found | None:
            if any(t["dtype"] not in dtypes for bundle in expected.bundles for t in bundle["tensors"]):
                return None
            if isinstance(answer, dict):
                if "skipped" in answer or unclaimed(expected, answer, hello):
                    return None
                if "failed" in answer:
                    answer = Trouble("failed", shown(str(answer["failed"]).encode("utf-8", "replace")))
            if isinstance(answer, Trouble):
                result, details = answer.result, [str(answer)]
            else:
                try:
                    result, details = "wrong", judge(expected, answer, by_content)
                except Malformed as error:
                    answer, result, details = {}, "error", [str(error)]
            if not details:
                return None
            signature = _signature(mode, result, expected, answer, details)
            pieces = request.get("pieces")
            return Found(signature, result, details[0], mode, data, pieces, expected, request.get("bundle"))

        round_number = 0
        while share.cases < count and len(seen) < _DIFFERENT:
            target: Found | None = None
            smallest: Found | None = None
            tries = 0
            begun = 0.0

            def check(drawn: tuple[bytes, bool, list[int] | None]) -> None:
                nonlocal target, smallest, tries, begun
                data, sound, pieces = drawn
                if target is None:
                    if share.cases >= count:
                        raise _Enough
                    asked = [*modes, *(("encode",) if sound else ())]
                else:
                    tries += 1
                    if tries > _TRIES or time.monotonic() - begun > _SECONDS:
                        raise _Enough
                    if target.mode == "encode" and not sound:
                        return
                    asked = [target.mode]
                if target is None:
                    share.cases += len(asked)
                for found in judged(asked, data, pieces):
                    if found is None or found.signature in seen:
                        continue
                    if target is None:
                        target, begun = found, time.monotonic()
                    elif found.signature != target.signature:
                        continue
                    if smallest is None or _weight(found) <= _weight(smallest):
                        smallest = found
                    raise AssertionError(found.detail)

            test = given(_inputs())(check)
            test = settings(
                max_examples=count,
                database=None,
                deadline=None,
                phases=(Phase.generate, Phase.shrink),
                suppress_health_check=list(HealthCheck),
                report_multiple_bugs=False,
                print_blob=False,
            )(test)
            try:
                seed(number * 1000 + round_number)(test)()
            except (_Enough, AssertionError, HypothesisException, Unusable):
                pass
            except Malformed as error:
                share.could_not = str(error)
            if smallest is None:
                break
            seen.add(smallest.signature)
            share.found.append(smallest)
            round_number += 1
        share.restarts = runner.restarts
    return share


def _weight(found: Found) -> tuple[int, int]:
    return len(found.data), len(found.pieces or ())


def _content(told: dict[str, Any], payloads: Sequence[bytes], raws: Sequence[bytes]) -> dict[str, Any]:
    """A bundle as the files of vectors tell it."""
    tensors = []
    for tensor, payload in zip(told["tensors"], payloads, strict=True):
        kept = {key: tensor[key] for key in ("name", "dtype", "byte_order", "shape", "token_axis")}
        tensors.append({**kept, "payload": shrink(payload)})
    attributes = [
        {"key": item["key"], "type": item["type"], "raw": shrink(raw)}
        for item, raw in zip(told["attributes"], raws, strict=True)
    ]
    fixed = {key: told[key] for key in ("number", "minor", "fragment_size", "checksums")}
    return {**fixed, "tensors": tensors, "attributes": attributes}


def _told_of(told: dict[str, Any]) -> dict[str, Any]:
    from .asks import attribute_raw, payload_of

    return _content(
        told,
        [payload_of(t["elements"], t["dtype"], t["byte_order"]) for t in told["tensors"]],
        [attribute_raw(a["type"], a["value"]) for a in told["attributes"]],
    )


def as_vector(found: Found, name: str, comment: str) -> dict[str, Any]:
    """A failure as a vector, with the reference's verdict."""
    error = found.expected.error
    told_bundles = list(found.expected.bundles) if found.bundle is None else [found.bundle]
    section = "9" if found.bundle is not None else "11" if error is None else f"6:{error['name']}"
    flags = []
    if found.mode == "one":
        flags.append("one")
    elif len(told_bundles) != 1 and found.bundle is None:
        flags.append("many")
    vector: dict[str, Any] = {
        "id": name,
        "comment": comment,
        "section": section,
        "class": found.mode if found.mode in ("core", "stream") else "both",
        "flags": flags,
        "input": shrink(found.data),
    }
    if found.pieces is not None and found.data:
        sizes: list[int] = []
        left = len(found.data)
        for size in cycle(found.pieces):
            sizes.append(min(size, left))
            left -= sizes[-1]
            if not left:
                break
        vector["pieces"] = sizes
    vector["result"] = "valid" if error is None else "invalid"
    if error is not None:
        vector["error"] = {key: error.get(key) for key in ("name", "number", "offset")}
    if told_bundles or error is None:
        vector["bundles"] = [_told_of(told) for told in told_bundles]
    if error is None:
        again = found.data if found.bundle is not None else b"".join(map(_encoded, told_bundles))
        vector["reencoded"] = "same" if again == found.data else shrink(again)
    return vector


def _encoded(told: dict[str, Any]) -> bytes:
    from .testee_python import read_bundle

    bundle: Bundle = read_bundle(told)
    return encode(bundle)


def save(found: Found, name: str, folder: Path) -> Path:
    """Write the vector of a failure as a file of its own. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    content = {
        "format": "1.0",
        "title": "found by random inputs; the verdict is that of the Python codec",
        "vectors": [as_vector(found, name, f"a drawn input that a testee answered otherwise: {found.detail}")],
    }
    # Read back before it is written: what is saved can be run.
    Vector(name, json.loads(json.dumps(content))["vectors"][0]).data  # noqa: B018
    write_text(path, json.dumps(content, indent=1) + "\n")
    return path


def _ends_when_told() -> None:
    """In a process of the pool: end by way of an exception, so that the testee ends too."""

    def told(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, told)


def run_random(
    command: Sequence[str],
    count: int,
    number: int,
    *,
    time_limit: float = 10.0,
    folder: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Put ``count`` drawn cases to a testee. Returns what the reports show; raises Unusable and OSError."""
    started = time.monotonic()
    shares = min(_SHARES, max(1, count // 250))
    counts = [count // shares + (index < count % shares) for index in range(shares)]
    numbers = [number * _SHARES + index for index in range(shares)]
    done: list[Share] = []
    processes = min(shares, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    if shares == 1:
        done.append(run_share(command, count, numbers[0], time_limit))
    else:
        context = multiprocessing.get_context("spawn")
        before = set(multiprocessing.active_children())
        with ProcessPoolExecutor(processes, context, _ends_when_told) as pool:
            waiting = {
                pool.submit(run_share, list(command), some, each, time_limit)
                for some, each in zip(counts, numbers, strict=True)
            }
            try:
                while waiting:
                    ended, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                    done += [future.result() for future in ended]
                    if progress is not None:
                        progress(sum(share.cases for share in done), count)
            except BaseException:
                # Nobody waits for the rest: the processes end, and each ends its testee.
                pool.shutdown(wait=False, cancel_futures=True)
                for child in set(multiprocessing.active_children()) - before:
                    child.terminate()
                raise
    for share in done:
        if share.could_not:
            raise Unusable(share.could_not)
    by_signature: dict[tuple[str, ...], Found] = {}
    for share in done:
        for found in share.found:
            other = by_signature.get(found.signature)
            if other is None or _weight(found) < _weight(other):
                by_signature[found.signature] = found
    failures = []
    for index, signature in enumerate(sorted(by_signature)):
        found = by_signature[signature]
        name = f"random-{number}-{index}"
        path = None if folder is None else save(found, name, folder)
        failures.append(
            {
                "id": name,
                "result": found.result,
                "mode": found.mode,
                "detail": found.detail,
                "input": found.data.hex(),
                "bytes": len(found.data),
                "pieces": found.pieces,
                "file": None if path is None else str(path),
            }
        )
    return {
        "cases": sum(share.cases for share in done),
        "seed": number,
        "seconds": round(time.monotonic() - started, 3),
        "restarts": sum(share.restarts for share in done),
        "failures": failures,
    }
