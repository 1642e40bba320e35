// Upstream's server of the RPC backend, as it is: one file, whose own target in CMake comes with all of upstream's tools.
//
// Libraries: ggml, ggml-base, of a build with GGML_RPC.
//
// SPDX-License-Identifier: MIT
#include "tools/rpc/rpc-server.cpp" // NOLINT(bugprone-suspicious-include): upstream has no header for it

#ifdef __linux__
#include <csignal>
#include <sys/prctl.h>

// It asks nobody who they are, so it must not go on listening when the benchmark that has started it was killed.
[[maybe_unused]] static const int ends_with_parent = prctl(PR_SET_PDEATHSIG, SIGKILL);
#endif
