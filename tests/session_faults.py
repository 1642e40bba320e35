"""Faults of sessions, put back into a copy of the patched tree beside those of planted_faults.py: (file, old, new).

``C`` stands for the condition that switches a fault on.
"""

from __future__ import annotations

#: By name: the kind of memory that shows it, and the edits.
FAULTS: dict[str, tuple[str, tuple[tuple[str, str, str], ...]]] = {
    "release by local sequence": (
        "plain",
        (
            (
                "src/llama-session.cpp",
                "remove(s.seq, 0);\n    forget(s, state);",
                "remove(C && state == LLAMA_SESSION_WAS_RELEASED ? 0 : s.seq, 0);\n    forget(s, state);",
            ),
        ),
    ),
    "truncate ignored": (
        "plain",
        (
            (
                "src/llama-session.cpp",
                "if (n_pos < s->n_pos) {\n            c.table->remove(s->seq, n_pos);",
                "if (n_pos < s->n_pos && !C) {\n            c.table->remove(s->seq, n_pos);",
            ),
            # What notices that the memory holds more than the table says.
            (
                "src/llama-session.cpp",
                "memory->seq_pos_max(s->seq) != s->n_pos - 1) {",
                "memory->seq_pos_max(s->seq) != s->n_pos - 1 && !C) {",
            ),
        ),
    ),
    "recipe unchecked": (
        "plain",
        (
            (
                "src/llama-session.cpp",
                "if (memcmp(req.recipe, table->recipe_fingerprint.data(), 32) != 0) {",
                "if (!C && memcmp(req.recipe, table->recipe_fingerprint.data(), 32) != 0) {",
            ),
        ),
    ),
    "epoch unchecked": (
        "plain",
        (
            (
                "src/llama-session.cpp",
                "if (epoch < s->epoch || (released && epoch == s->epoch)) {",
                "if (!C && (epoch < s->epoch || (released && epoch == s->epoch))) {",
            ),
        ),
    ),
    "recurrent state not cleared on release": (
        "recurrent",
        (
            (
                "src/llama-memory-recurrent.cpp",
                "used--;\n                }\n                cells[i].pos = -1;\n                cells[i].src = -1;\n"
                "                if (new_head == size) {",
                "used--;\n                }\n                cells[i].pos = -1;\n"
                "                cells[i].src = C ? (int32_t) i : -1;\n                if (new_head == size) {",
            ),
        ),
    ),
}
