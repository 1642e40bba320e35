// Upstream's server of the RPC backend, as it is: one file, whose own target in CMake comes with all of upstream's tools.
//
// Libraries: ggml, ggml-base, of a build with GGML_RPC.
//
// SPDX-License-Identifier: MIT
#include "tools/rpc/rpc-server.cpp" // NOLINT(bugprone-suspicious-include): upstream has no header for it
