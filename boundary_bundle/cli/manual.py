"""What ``--help`` says beyond the options: examples, files, exit status, what else to look at."""

from __future__ import annotations

import argparse
import textwrap
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class Page:
    """A command's part of the manual. ``examples`` are (what it is for, the command)."""

    examples: tuple[tuple[str, str], ...]
    notes: tuple[tuple[str, str], ...] = ()
    see: tuple[str, ...] = ()


_CACHE: Final = (
    "environment",
    "BOUNDARY_BUNDLE_CACHE is the folder for what is downloaded and built; without it "
    "$XDG_CACHE_HOME/boundary-bundle or ~/.cache/boundary-bundle. The workers are built from a checkout of this "
    "project the first time that they are needed.",
)
_DRIVEN: Final = (
    "exit status",
    "0: done. 1: a logit differs from the unsplit worker's. 2: it could not be done, for the reason on standard "
    "error. 130: interrupted. With BOUNDARY_BUNDLE_TRACEBACK=1 a failure that nobody foresaw shows its traceback too.",
)

PAGES: Final[dict[str, Page]] = {
    "plan": Page(
        (
            ("three workers, alike", "boundary-bundle plan --model m.gguf --workers 3"),
            (
                "what each has and does, and the plan for run and serve",
                "boundary-bundle plan --model m.gguf --workers 3 --memory 8G,4G,4G --speeds 2,1,1 --json plan.json",
            ),
            (
                "times of this machine, and a picture",
                "boundary-bundle plan --model m.gguf --workers 3 --measure --picture plan.svg",
            ),
        ),
        (
            (
                "what is exact",
                "Of all legal cuts no others have a faster slowest stage. Weights and KV bytes are those that a worker "
                "reports; --ctx, --batch, --ubatch, --seqs, --type-k, --type-v, --swa-full and --flash-attn go into "
                "them. Times and what else a worker needs are estimates.",
            ),
            _CACHE,
        ),
        ("run", "serve", "describe"),
    ),
    "run": Page(
        (
            ("one model over three processes", "boundary-bundle run --model m.gguf --cuts 10,20 --prompt 'Once upon'"),
            (
                "the same, held against the unsplit model bit by bit",
                "boundary-bundle run --model m.gguf --cuts 10,20 --prompt 'Once upon' --check --json result.json",
            ),
            (
                "over the nodes of a Ray cluster",
                "boundary-bundle run --model m.gguf --cuts 10,20 --prompt Hi --engine ray --address 10.0.0.1:6379",
            ),
        ),
        (_DRIVEN, _CACHE),
        ("plan", "demo", "describe"),
    ),
    "demo": Page(
        (
            ("everything, from nothing", "boundary-bundle demo"),
            ("a model and a question of one's own", "boundary-bundle demo --model m.gguf --prompt 'What is a shard?'"),
        ),
        (_DRIVEN, _CACHE),
        ("run",),
    ),
    "describe": Page(
        (
            ("the middle third of a model", "boundary-bundle describe --model m.gguf --range 10:20"),
            ("every tensor of it, for programs", "boundary-bundle describe --model m.gguf --range 10:20 --json"),
        ),
        (_DRIVEN, _CACHE),
        ("run", "strip"),
    ),
    "strip": Page(
        (
            (
                "the middle third of a model as a file of its own",
                "boundary-bundle strip --model m.gguf --range 10:20 -o m-10-20.gguf",
            ),
        ),
        (
            (
                "the file",
                "It holds the tensors of the range and the metadata of the whole model, with the whole model's tensor "
                "table among it (boundary_bundle.tensors.*). A worker loads it for this range or a part of it.",
            ),
            _CACHE,
        ),
        ("describe",),
    ),
    "fixtures": Page(
        (
            ("what crosses two cuts of a model", "boundary-bundle fixtures --model m.gguf --cuts 10,20 -o fixtures"),
            ("tiny models of every family too", "boundary-bundle fixtures --family all -o fixtures"),
        ),
        (_CACHE,),
        ("run", "inspect"),
    ),
    "certify": Page(
        (
            ("every architecture, for spec/families", "boundary-bundle certify --family all --json result.json"),
            ("two of them, quickly", "boundary-bundle certify --family llama,gemma3n --reduced"),
            ("a model of one's own", "boundary-bundle certify --model m.gguf --reduced"),
            (
                "one setting again",
                "boundary-bundle certify --family llama --settings bu+1.s2.split.flash.q8_0-f16.last.short",
            ),
        ),
        (
            (
                "settings",
                "A name holds the batch in tokens (u is the micro-batch), sequences, unified or split cache, flash or "
                "plain attention, types of keys and values, tokens that give output, short or long context.",
            ),
            _CACHE,
        ),
        ("run", "fixtures"),
    ),
    "serve": Page(
        (
            ("one model over three processes, for clients", "boundary-bundle serve --model m.gguf --cuts 10,20"),
            (
                "sixteen sessions at once, on a socket of one's own",
                "boundary-bundle serve --model m.gguf --cuts 10,20 --seqs 16 --ctx 16384 --socket /tmp/mine/socket",
            ),
        ),
        (
            (
                "clients",
                "boundary_bundle.shards.client has one, for Python; spec/service-protocol.md says what it speaks. A "
                "client that goes away leaves its sessions for --grace seconds, and may open them again.",
            ),
            (
                "the socket",
                "Mode 0600. Without --socket it is boundary-bundle/serve.sock in $XDG_RUNTIME_DIR, else "
                "boundary-bundle-UID/serve.sock in the folder for temporary files. A dead server's is replaced, a "
                "live one's is not.",
            ),
            (
                "exit status",
                "0: it was told to end, and nothing is left of it. 2: it could not be started, for the reason on "
                "standard error. 130: interrupted before it served.",
            ),
            _CACHE,
        ),
        ("plan", "top", "run"),
    ),
    "top": Page(
        (
            ("live", "boundary-bundle top"),
            ("once, for a program", "boundary-bundle top --once --json"),
        ),
        (
            (
                "columns",
                "compute is the shard's share of the time that all shards compute, busy the part of the time in "
                "which it does. A session is hot while the shards hold it; a cold one is computed again when it is "
                "used. epoch is by how much it has risen since the session was opened: the shards had to begin anew.",
            ),
        ),
        ("serve",),
    ),
    "inspect": Page(
        (
            ("in the terminal", "boundary-bundle inspect step.bbdb"),
            ("as a page to click through", "boundary-bundle inspect step.bbdb --html -o step.html"),
        ),
        see=("validate", "diff"),
    ),
    "validate": Page(
        (
            ("some files", "boundary-bundle validate one.bbdb two.bbdb"),
            (
                "what an encoder wrote, for a script",
                "boundary-bundle validate --canonical --require-checksums --json one.bbdb",
            ),
        ),
        see=("inspect", "conformance"),
    ),
    "diff": Page(
        (
            ("two runs of one step", "boundary-bundle diff one.bbdb two.bbdb"),
            ("a bundle and what another program made of it", "boundary-bundle diff one.bbdb theirs.npz --json"),
        ),
        see=("inspect", "convert"),
    ),
    "convert": Page(
        (
            ("for numpy", "boundary-bundle convert step.bbdb step.npz"),
            ("and back", "boundary-bundle convert step.npz again.bbdb"),
        ),
        see=("diff",),
    ),
    "shim": Page(
        (
            ("the two files for a project of one's own", "boundary-bundle shim --prefix myproj_ -o vendor"),
            (
                "a newer version over an older one",
                "boundary-bundle shim --prefix myproj_ --name boundary -o vendor --force",
            ),
        ),
        (
            (
                "in a Makefile",
                "After the first rule: include vendor/boundary_bundle.mk. Then $(MYPROJ_BOUNDARY_BUNDLE) is the object "
                "file to link. Without make: cc -O2 -c vendor/boundary_bundle.c. A caller goes on writing bb_decode(); "
                "the header maps the names.",
            ),
        ),
        ("conformance",),
    ),
    "conformance": Page(
        (
            ("a codec behind a testee", "boundary-bundle conformance -- ./my-testee"),
            (
                "one part of the text, failures in full, a page to look at",
                "boundary-bundle conformance --only 3.1 --details 100 --html report.html -- ./my-testee",
            ),
            (
                "drawn input, and a list of what is known to fail",
                "boundary-bundle conformance --random 10000 --seed 1 --known-failures known.txt -- ./my-testee",
            ),
            (
                "this package's own codec",
                "boundary-bundle conformance -- python -m boundary_bundle.conformance.testee_python",
            ),
        ),
        (
            (
                "files",
                "The protocol of testees, templates to start from and the vectors lie in spec/ of a checkout, and in "
                "boundary_bundle/spec/ of an installed package.",
            ),
        ),
        ("shim", "validate"),
    ),
    "completion": Page(
        (
            ("bash, for this shell", "boundary-bundle completion bash"),
            ("zsh", "boundary-bundle completion zsh"),
            ("fish", "boundary-bundle completion fish"),
        ),
        (
            (
                "to keep it",
                "bash: write it to ~/.local/share/bash-completion/completions/boundary-bundle. zsh: to "
                "_boundary-bundle in a folder of $fpath. fish: to ~/.config/fish/completions/boundary-bundle.fish. "
                'For one shell only: eval "$(boundary-bundle completion bash)".',
            ),
        ),
    ),
}

_MAIN: Final = """\
commands on models:  plan, run, demo, describe, strip, fixtures, certify
for many clients:    serve, top
commands on files:   inspect, validate, diff, convert
for implementers:    conformance, shim
for shells:          completion

Each has a manual: boundary-bundle COMMAND --help

exit status:
  0: done, or yes. 1: no, such as an invalid file, a logit that differs, a
  case that failed. 2: it could not be done, for the reason on standard
  error. 130: interrupted.
"""


class Formatter(argparse.HelpFormatter):
    """Wraps a paragraph, and leaves text that has lines of its own as it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return "".join(indent + line for line in text.splitlines(keepends=True))
        return super()._fill_text(text, width, indent)


def _epilog(page: Page) -> str:
    lines = ["examples:"]
    for purpose, command in page.examples:
        lines += [f"  {purpose}:", f"      {command}"]
    for title, text in page.notes:
        lines += ["", f"{title}:", *textwrap.wrap(text, 78, initial_indent="  ", subsequent_indent="  ")]
    if page.see:
        lines += ["", "see also:", "  " + ", ".join(f"boundary-bundle {name}" for name in page.see)]
    return "\n".join(lines) + "\n"


def complete(parser: argparse.ArgumentParser, commands: Any) -> None:
    """Give the parser and those of its commands their manual."""
    parser.formatter_class = Formatter
    parser.epilog = _MAIN
    for name, command in commands.choices.items():
        if name in PAGES:
            command.formatter_class = Formatter
            command.epilog = _epilog(PAGES[name])
