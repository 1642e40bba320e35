# Each target does all of its own set-up. Whatever is downloaded or built lies in the cache folder
# ($BOUNDARY_BUNDLE_CACHE, else $XDG_CACHE_HOME/boundary-bundle, else ~/.cache/boundary-bundle).
#
#   make demo         a real model over three processes
#   make test         every test, with both builds of llama.cpp
#   make test-long    each byte of each small vector set to all its other values, by both codecs, and to one other
#                     by the other decoders; each of them cut short (twenty minutes)
#   make test-sessions  the state machines of sessions: 2,000 examples, 10,000 mixed operations (twenty minutes)
#   make check        ruff and mypy
#   make static       clang-tidy, cppcheck, gcc's analyzer and bandit, and a table (STATIC_ARGS="--only bandit,gcc")
#   make audit        known vulnerabilities of what is pinned, where they can be looked up; THIRD_PARTY.md
#   make lock         pin the newest Python packages, with hashes, in .requirements/
#   make patches-check where the patches apply, what later releases changed, what builds (PATCHES_ARGS="--quick --json")
#   make bench        the codecs against their peers, side by side (BENCH_ARGS="--plot FILE --json FILE")
#   make bench-sessions  what the session table costs, and a worker that is killed (BENCH_ARGS="--json FILE")
#   make bench-shards  a split model against an unsplit one and upstream's RPC backend, in twenty minutes
#                     (BENCH_ARGS="--plots FOLDER --json FILE", "--quick" for a short look)
#   make fuzz         fuzz both codecs, all targets in TIME seconds (TIME=60, FUZZ_ARGS="--coverage --json FILE")
#   make fuzz-long    the same for HOURS hours (HOURS=8), with coverage and a dated report in fuzz/reports
#   make fuzz-loader  damage COUNT model files and start workers on them, with a dated report in fuzz/reports (COUNT=5000)
#   make soak         a service under traffic and a fault every second for MINUTES minutes (MINUTES=60,
#                     SOAK_ARGS="--seed N --rate N --json FILE"), with a dated report in fuzz/reports
#   make mutants      each check of both decoders flipped or removed: a vector notices, or a note says why none can
#   make clean-cache  remove everything that this project put into its cache folder

.PHONY: help demo test test-long test-sessions check static audit lock patches-check bench bench-sessions bench-shards fuzz fuzz-long fuzz-loader soak mutants clean-cache
.DEFAULT_GOAL := help
# One build at a time; each uses every core by itself.
.NOTPARALLEL:

BOOTSTRAP := boundary_bundle/native/bootstrap.py

# The first Python that is new enough. PYTHON=... overrides the search.
FIND_PYTHON = \
	for candidate in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do \
		if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then \
			base=$$candidate; break; \
		fi; \
	done; \
	if [ -z "$$base" ]; then \
		echo "error: Python 3.10 or newer is missing: apt-get install python3 python3-venv, dnf install python3, or brew install python." >&2; \
		exit 2; \
	fi

# Sets $$venv to the interpreter of the virtual environment, made first if it is not there, $(1) being further options.
# The second does without what only builds of llama.cpp need.
SET_UP = base=; $(FIND_PYTHON); venv=$$("$$base" -I $(BOOTSTRAP) python $(1)) || exit $$?
SET_UP_PYTHON = base=; $(FIND_PYTHON); venv=$$("$$base" -I $(BOOTSTRAP) python --no-build $(1)) || exit $$?

help:
	@sed -n 's/^#   //p' Makefile

demo:
	@$(SET_UP); exec "$$venv" -m boundary_bundle.cli demo

test:
	@$(call SET_UP,--with static --with ray --with bench); set -e; \
	"$$venv" -m boundary_bundle.native build patched unpatched rpc; \
	"$$venv" -m boundary_bundle.native model; \
	MAKE="$(MAKE)" exec "$$venv" tests/run_all.py $(PYTEST_ARGS)

test-long:
	@$(SET_UP); BOUNDARY_BUNDLE_EVERY_BYTE=1 exec "$$venv" -m pytest \
		tests/test_cross_codec.py tests/conformance/test_damage.py -k "every_byte or damage"

test-sessions:
	@$(SET_UP); BOUNDARY_BUNDLE_SESSION_EXAMPLES=2000 BOUNDARY_BUNDLE_SESSION_OPERATIONS=10000 \
		exec "$$venv" -m pytest tests/test_hot_kv_state.py tests/test_kv_cache_distributed.py

check:
	@$(call SET_UP_PYTHON,--with check); set -e; \
	"$$venv" -m ruff check .; \
	"$$venv" -m ruff format --check .; \
	"$$venv" -m mypy --strict boundary_bundle

static:
	@$(call SET_UP_PYTHON,--with static); exec "$$venv" tests/run_static.py $(STATIC_ARGS)

audit:
	@$(call SET_UP_PYTHON,--with audit); exec "$$venv" tests/run_audit.py $(AUDIT_ARGS)

lock:
	@$(call SET_UP_PYTHON,--with lock); set -e; \
	"$$venv" tests/run_lock.py; \
	exec "$$venv" tests/run_audit.py --write

patches-check:
	@$(SET_UP); exec "$$venv" -m boundary_bundle.native.patches_check $(PATCHES_ARGS)

bench:
	@$(call SET_UP_PYTHON,--with bench); exec "$$venv" tests/bench/bench_codec.py $(BENCH_ARGS)

bench-sessions:
	@$(SET_UP); exec "$$venv" tests/bench/bench_sessions.py $(BENCH_ARGS)

bench-shards:
	@$(call SET_UP,--with bench --with ray); exec "$$venv" tests/bench/bench_shards.py $(BENCH_ARGS)

TIME ?= 60
HOURS ?= 8

fuzz:
	@$(call SET_UP_PYTHON); exec "$$venv" fuzz/run.py --seconds "$(TIME)" $(FUZZ_ARGS)

fuzz-long:
	@$(call SET_UP_PYTHON); exec "$$venv" fuzz/run.py --hours "$(HOURS)" --report $(FUZZ_ARGS)

COUNT ?= 5000

fuzz-loader:
	@$(SET_UP); exec "$$venv" fuzz/loader.py --count "$(COUNT)" --report $(FUZZ_ARGS)

MINUTES ?= 60

soak:
	@$(SET_UP); exec "$$venv" tests/soak.py --minutes "$(MINUTES)" --report $(SOAK_ARGS)

mutants:
	@$(call SET_UP_PYTHON); exec "$$venv" fuzz/mutants.py --report $(MUTANTS_ARGS)

clean-cache:
	@base=; $(FIND_PYTHON); "$$base" -I $(BOOTSTRAP) clean
