# shellcheck shell=bash
# What is needed to build for 64-bit Arm. On another machine, installs what is missing, and names the linkers and qemu-user to cargo.
#
#   source .ci/arm64.sh
#   $gnu, $musl        the targets
#   $native            not empty on a machine of that architecture, where nothing is emulated
#   rows FILE          the rows of slat-peers' output in FILE, as `EXPERIMENT/CASE VARIANT`

gnu=aarch64-unknown-linux-gnu musl=aarch64-unknown-linux-musl native=
[ "$(uname -m)" != aarch64 ] || native=yes

install() { # Debian package
    if [ "$(id -u)" = 0 ]; then root=(); else root=(sudo -n); fi
    "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$1"
}

for target in "$gnu" "$musl"; do
    [ -d "$(rustc --print sysroot)/lib/rustlib/$target" ] || rustup -q target add "$target" >/dev/null 2>&1 ||
        { echo "arm64: rustup cannot add the target $target" >&2; exit 1; }
done

# rustup's target has musl itself.
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_LINKER=rust-lld
if [ -z "$native" ]; then
    command -v aarch64-linux-gnu-gcc >/dev/null || install gcc-aarch64-linux-gnu
    [ -e /usr/aarch64-linux-gnu/include/stdio.h ] || install libc6-dev-arm64-cross
    command -v qemu-aarch64 >/dev/null || install qemu-user
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER='qemu-aarch64 -L /usr/aarch64-linux-gnu'
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_RUNNER=qemu-aarch64
fi

rows() {
    awk '/^[a-z]+\/[^ ]+ \(/ { row = $1; next } row && /^  / { print row, $1; next } { row = "" }' "$1"
}
