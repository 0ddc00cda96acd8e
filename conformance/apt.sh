# shellcheck shell=bash
# Packages of apt (Debian, Ubuntu) for the scripts in this directory, as far as the user's rights go.
#
#   source apt.sh
#   apt_init DIR                as an ordinary user without sudo, apt's lists and cache are below DIR
#   apt_install PACKAGE...      installs, with the right to; false without it
#   apt_newest REGEX            the name with the highest version among the packages whose names match
#   apt_unpack PACKAGE DIR      downloads the package and unpacks it into DIR, without installing it; needs no rights
#   apt_mirror                  the mirror of Debian that is configured; false without one
#   apt_suite DIR SUITE...      the functions above and below look at these suites of Debian, the last first, not at the machine's own, with lists
#                               and cache below DIR. Call in a subshell. False where no Debian mirror is configured
#   apt_architecture            set this before apt_suite for packages that are not of the machine's architecture
#   apt_unpack_whole PACKAGE DIR  after apt_suite: unpacks the package and all that it depends on, the C library included

say() { printf '%s\n' "$*" >&2; }

apt_options=() as_root=() may_install=yes apt_updated='' apt_architecture=''

apt_init() {
    if [ "$(id -u)" = 0 ]; then return; fi
    if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
        as_root=(sudo -n)
    else
        may_install=''
        mkdir -p "$1/apt/lists/partial" "$1/apt/cache/archives/partial"
        apt_options=(-o "Dir::State::lists=$1/apt/lists" -o "Dir::Cache=$1/apt/cache" -o Debug::NoLocking=1)
    fi
}

apt_update() {
    [ -z "$apt_updated" ] || return 0
    say "apt-get update"
    "${as_root[@]}" apt-get "${apt_options[@]}" -qq update >&2
    apt_updated=yes
}

apt_install() {
    [ -n "$may_install" ] || return 1
    apt_update
    say "apt-get install $*"
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$@" >&2
}

apt_newest() {
    apt_update
    apt-cache "${apt_options[@]}" search --names-only "$1" | cut -d' ' -f1 | sort -V | tail -n1
}

apt_unpack() {
    local download="$2.download"
    apt_update
    say "fetching $1"
    rm -rf "$download" && mkdir -p "$download" "$2"
    # apt drops root's rights for a download, if the directory permits that. This directory belongs to the user.
    (cd "$download" && apt-get "${apt_options[@]}" -o APT::Sandbox::User="$(id -un)" -qq download "$1" >&2) &&
        dpkg -x "$download"/*.deb "$2" && rm -rf "$download"
}

apt_mirror() {
    apt-get indextargets --format '$(REPO_URI)' | grep -m1 -E '/debian/?$'
}

apt_suite() {
    local dir mirror suite keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    dir=$(mkdir -p "$1" && cd "$1" && pwd)
    shift
    mirror=$(apt_mirror) && [ -e "$keyring" ] || return 1
    mkdir -p "$dir"/{lists,cache/archives}/partial
    : >"$dir/status"
    for suite in "$@"; do
        echo "deb [signed-by=$keyring] $mirror $suite main"
    done >"$dir/sources.list"
    # A status file without packages makes apt treat no package as installed.
    apt_options=(-o "Dir::Etc::SourceList=$dir/sources.list" -o Dir::Etc::SourceParts=/dev/null -o "Dir::State::lists=$dir/lists"
        -o "Dir::State::status=$dir/status" -o "Dir::Cache=$dir/cache" -o Debug::NoLocking=1 -o "APT::Sandbox::User=$(id -un)" -o "APT::Default-Release=${*: -1}")
    if [ -n "$apt_architecture" ]; then
        apt_options+=(-o "APT::Architecture=$apt_architecture" -o "APT::Architectures=$apt_architecture")
    fi
    as_root=() may_install='' apt_updated='' apt_archives=$dir/cache/archives
}

apt_unpack_whole() {
    local package
    apt_update
    say "fetching $1 and what it depends on"
    rm -f "$apt_archives"/*.deb
    apt-get "${apt_options[@]}" -qq install -y --no-install-recommends --download-only "$1" >&2 || return 1
    mkdir -p "$2"
    for package in "$apt_archives"/*.deb; do
        dpkg -x "$package" "$2" || return 1
    done
    rm -f "$apt_archives"/*.deb
}
