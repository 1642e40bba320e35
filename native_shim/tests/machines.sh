#!/bin/sh
# What `make test-machines` does: the other compiler and the other machines, as far as this one
# can. Says what it leaves out and why; with ALL=1, or CI in the environment, that is a failure.
make=${MAKE:-make}
demanded=${ALL:-${CI:-0}}
status=0
scratch=$(mktemp -d) || exit 2
trap 'rm -rf "$scratch"' EXIT
echo 'int main(void) { return 0; }' >"$scratch/probe.c"

# works COMPILER FLAGS EMULATOR: builds and runs a program.
works() {
    # shellcheck disable=SC2086 # flags and emulator may be several words or none
    $1 $2 -x c "$scratch/probe.c" -o "$scratch/probe" 2>/dev/null && $3 "$scratch/probe" 2>/dev/null
}

leave_out() {
    case $demanded in
    0 | '' | false) echo "skipped: native_shim $1: $2 (apt-get install $3)" ;;
    *)
        echo "error: native_shim $1: $2 (apt-get install $3)" >&2
        status=1
        ;;
    esac
}

run() {
    "$make" --no-print-directory "$@" || status=1
}

if ! works "${CLANG:-clang}" "" "" || ! command -v "${CLANGXX:-clang++}" >/dev/null; then
    leave_out test-clang "there is no clang" "clang"
elif ! works "${CLANG:-clang}" "-fsanitize=address,undefined" ""; then
    leave_out test-clang "clang has no sanitizers" "libclang-rt-dev"
else
    run test-clang
fi

cross=${CC_32:-i686-linux-gnu-gcc}
if ! command -v "$cross" >/dev/null || ! command -v "${CXX_32:-i686-linux-gnu-g++}" >/dev/null; then
    leave_out test-32 "there is no $cross" "g++-i686-linux-gnu"
elif works "$cross" -static ""; then
    run test-32 RUN_32=
elif works "$cross" -static qemu-i386; then
    run test-32 RUN_32=qemu-i386
else
    leave_out test-32 "32-bit programs run neither here nor under qemu-i386" "qemu-user"
fi

cross=${CC_S390X:-s390x-linux-gnu-gcc}
if ! command -v "$cross" >/dev/null || ! command -v "${CXX_S390X:-s390x-linux-gnu-g++}" >/dev/null; then
    leave_out test-s390x "there is no $cross" "g++-s390x-linux-gnu"
elif works "$cross" -static qemu-s390x; then
    run test-s390x RUN_S390X=qemu-s390x
else
    leave_out test-s390x "there is no qemu-s390x" "qemu-user"
fi
exit $status
