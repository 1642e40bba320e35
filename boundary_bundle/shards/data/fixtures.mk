# Check the recorded bundles with a patched libllama, without Python:
#
#   make check LLAMA=/path/to/llama.cpp [LIB=/path/to/its/libraries] [MODEL=/path/to/model.gguf]
#   make check-here ...      split and unsplit on this machine, nothing recorded but the token requests
#
# MODEL is for a model that is not in this folder.

CC ?= cc
LLAMA ?= ../llama.cpp
LIB ?= $(LLAMA)/build/bin

.PHONY: check check-here clean

check: check_fixtures
	./check_fixtures . $(MODEL)

check-here: check_fixtures
	./check_fixtures --here . $(MODEL)

check_fixtures: check_fixtures.c
	$(CC) -std=c11 -O2 -I$(LLAMA)/include -I$(LLAMA)/ggml/include -I$(LLAMA)/src check_fixtures.c \
		-o check_fixtures -L$(LIB) -lllama -Wl,-rpath,$(LIB)

clean:
	rm -f check_fixtures
