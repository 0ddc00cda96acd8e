# shellcheck shell=bash
# What the landing run and the full one have in common: steps, a table of their times at the end, packages.
#
#   step WORDS...     runs a command. When it fails, the run goes on, and is red at its end
#   beside WORDS...   the same, beside the steps that follow until `join`: for what keeps one core busy and does not care how fast
#   join              waits for it
#   need COMMAND PACKAGE, install PACKAGE
#
# Each step's output is also kept in target/ci, and the end of what failed is printed once more: whoever reads only the end of the log
# finds the reason there.

logs=$PWD/target/ci
rm -rf "$logs"
mkdir -p "$logs"
titles=() spent=() failed=()

# Keeps the result of a step: number, status, seconds.
record() {
    spent[$1]=$3
    if [ "$2" = 0 ]; then
        printf '=== done in %d s\n' "$3"
    else
        failed+=("$1")
        printf '=== FAILED in %d s: %s\n' "$3" "${titles[$1]}"
    fi
}

step() {
    local number=${#titles[@]} begin=$SECONDS status=0
    titles+=("$*")
    printf '\n=== %s\n' "$*"
    "$@" 2>&1 | tee "$logs/$number" || status=$?
    record "$number" "$status" $((SECONDS - begin))
}

aside=
beside() {
    beside_number=${#titles[@]} beside_begin=$SECONDS
    titles+=("$*")
    printf '\n=== beside: %s\n' "$*"
    set -m # In a process group of its own, which can be ended.
    (
        trap - EXIT
        status=0
        "$@" || status=$?
        echo $((SECONDS - beside_begin)) >"$logs/$beside_number.seconds"
        exit $status
    ) </dev/null >"$logs/$beside_number" 2>&1 &
    aside=$!
    set +m
}

join() {
    local status=0
    wait "$aside" || status=$?
    aside=
    printf '\n=== %s (beside)\n' "${titles[$beside_number]}"
    cat "$logs/$beside_number"
    record "$beside_number" "$status" "$(cat "$logs/$beside_number.seconds")"
}

# Prints the table; the exit status is that of all steps.
report() {
    local status=$? number
    trap - EXIT
    [ -z "$aside" ] || kill -- "-$aside"
    for number in "${failed[@]}"; do
        printf '\n=== the end of what failed: %s\n' "${titles[$number]}"
        tail -n 40 "$logs/$number"
    done
    printf '\n%7s %6s  %s\n' seconds share step
    for number in "${!titles[@]}"; do
        printf '%7s %5s%%  %s\n' "${spent[$number]:--}" $((SECONDS ? 100 * ${spent[$number]:-0} / SECONDS : 0)) "${titles[$number]}"
    done
    printf '%7d %6s  altogether\n' "$SECONDS" ''
    if [ ${#failed[@]} -gt 0 ]; then
        printf '%d of %d steps failed\n' ${#failed[@]} ${#titles[@]}
        exit 1
    fi
    [ "$status" = 0 ] || printf 'the run ended before its end\n'
    exit "$status"
}
trap report EXIT

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

install() { # Debian package
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$1"
}

need() { # command, Debian package
    command -v "$1" >/dev/null || install "$2"
}

check_for_musl() {
    rustup target add x86_64-unknown-linux-musl
    CARGO_TARGET_DIR=target/musl cargo check --locked --target x86_64-unknown-linux-musl -p slat-bench
}

# Runs cargo of the oldest Rust that Cargo.toml promises.
with_oldest_rust() {
    local oldest
    oldest=$(sed -n 's/^rust-version = "\(.*\)"$/\1/p' Cargo.toml)
    cargo "+$oldest" --version >/dev/null 2>&1 || rustup toolchain install "$oldest" --profile minimal
    CARGO_TARGET_DIR=target/oldest cargo "+$oldest" "$@"
}
export -f with_oldest_rust

# What all steps need. metal/ and conformance/ fetch packages, too.
as_root apt-get -qq update || echo "apt-get update failed: the package lists stay as they are" >&2
need cc gcc
need setpriv util-linux
need tmux tmux
need python3 python3
cargo clippy --version >/dev/null 2>&1 || rustup component add clippy

# What they build with. Incremental state would only fill the disk of a machine that builds once. Debug information would take a third of
# the time: a panic says its line, and whoever wants a backtrace builds without this.
export CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=none CARGO_PROFILE_TEST_DEBUG=none
