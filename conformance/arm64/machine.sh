# shellcheck shell=bash disable=SC2154,SC2034 # variables of the script that sources this file, and of table.sh
# The programs of the table in a machine of QEMU's: all chosen ones run in it one after another, and the table then shows what each
# has printed, and how it ended.
#
#   source machine.sh       from conformance/arm64/run
#   machine_run             runs the machine. Then `prepare` gives commands that show what a program did.

# shellcheck source=.ci/arm64-boot.sh
source "$root/.ci/arm64-boot.sh"

machine=$work/arm64-machine
mkdir -p "$machine"
if ! machine_kernel "$machine"; then
    echo 'skipped: no mirror of Debian is configured'
    exit 0
fi
cargo build --release -q --target "$gnu" -p slat-cli
slat=${CARGO_TARGET_DIR:-$root/target}/$gnu/release/slat

# The seconds after which the machine ends: it is about 20 times slower than this one.
machine_timeout=7200

machine_run() {
    local i file tree=$machine/tree status seconds
    machine_tree "$machine"
    mkdir -p "$tree/programs"
    cp "$slat" "$tree/bin/slat"
    machine_libraries "$machine"
    : >"$tree/rows"
    for i in "${chosen[@]}"; do
        file=$(program "${names[i]}")
        if [ "${expects[i]}" = skip ] || [ -z "$file" ]; then continue; fi
        cp "$file" "$tree/programs/"
        # Four times the time that qemu-user has.
        echo "$i $((timeouts[i] * 4)) /programs/$(basename "$file") ${args[i]}" >>"$tree/rows"
    done
    cat >>"$tree/init" <<'INIT'
while read -r row seconds command; do
    echo "row $row begins"
    timeout "$seconds" slat run -- $command </dev/null
    echo "row $row ends with $?"
done </rows
poweroff -f
INIT
    machine_boot "$machine" "$machine_timeout" >/dev/null || die 'the machine has not ended by itself'
    awk -v directory="$scratch" '
        $1 == "row" && $3 == "begins" { file = directory "/" $2 ".log"; printf "" >file; next }
        $1 == "row" && $3 == "ends" { print $NF >(directory "/" $2 ".status"); file = ""; next }
        file { print >file }' "$machine/console"
}

# Shows what a program of the machine has printed, and ends as the program did.
launcher=()
prepare() {
    local log="$scratch/$1.log" status="$scratch/$1.status"
    if [ ! -e "$status" ]; then
        missing="the machine has not run the program"
        return
    fi
    command=(bash -c 'cat "$1"; exit "$2"' replay "$log" "$(<"$status")")
}
