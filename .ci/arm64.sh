# shellcheck shell=bash
# What is needed to build for 64-bit Arm. On another machine, installs what is missing, and names the linkers and qemu-user to cargo.
#
#   source .ci/arm64.sh
#   $gnu, $musl        the targets
#   $native            not empty on a machine of that architecture, where nothing is emulated
#   executes           whether this kernel executes Arm's programs (.ci/arm64-programs)
#   rows FILE          the rows of slat-peers' output in FILE, as `EXPERIMENT/CASE VARIANT`
#   clients DIR        compiles .ci/arm64-client.rs: DIR/dynamic and DIR/static with glibc, DIR/musl static with musl

gnu=aarch64-unknown-linux-gnu musl=aarch64-unknown-linux-musl native=
[ "$(uname -m)" != aarch64 ] || native=yes

install() { # Debian package
    if [ "$(id -u)" = 0 ]; then root=(); else root=(sudo -n); fi
    "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$1"
}

executes() { [ -n "$native" ] || /lib/ld-linux-aarch64.so.1 --version >/dev/null 2>&1; }

for target in "$gnu" "$musl"; do
    [ -d "$(rustc --print sysroot)/lib/rustlib/$target" ] || rustup -q target add "$target" >/dev/null 2>&1 ||
        { echo "arm64: rustup cannot add the target $target" >&2; exit 1; }
done

# rustup's target has musl itself.
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_LINKER=rust-lld
if [ -z "$native" ]; then
    command -v aarch64-linux-gnu-gcc >/dev/null || install gcc-aarch64-linux-gnu
    [ -e /usr/aarch64-linux-gnu/include/stdio.h ] || install libc6-dev-arm64-cross
    # The static one starts Arm's programs for this kernel (.ci/arm64-programs); slat-a64's oracle is the other one.
    command -v qemu-aarch64 >/dev/null || install qemu-user
    command -v qemu-aarch64-static >/dev/null || install qemu-user-static
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
    if executes; then
        # A shell outside .ci/arm64-programs has set them.
        unset CARGO_TARGET_AARCH64_UNKNOWN_LINUX_{GNU,MUSL}_RUNNER
    else
        export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER='qemu-aarch64-static -L /usr/aarch64-linux-gnu'
        export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_RUNNER=qemu-aarch64-static
    fi
fi

rows() {
    awk '/^[a-z]+\/[^ ]+ \(/ { row = $1; next } row && /^  / { print row, $1; next } { row = "" }' "$1"
}

clients() {
    local compile=(rustc --edition 2024 .ci/arm64-client.rs)
    local gcc=${CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER:-cc}
    mkdir -p "$1"
    "${compile[@]}" --target "$gnu" -C linker="$gcc" -o "$1/dynamic"
    "${compile[@]}" --target "$gnu" -C linker="$gcc" -C target-feature=+crt-static -o "$1/static"
    "${compile[@]}" --target "$musl" -C linker=rust-lld -o "$1/musl"
}
