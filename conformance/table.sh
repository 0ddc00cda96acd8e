# shellcheck shell=bash disable=SC2034 # the scripts that source this file use its variables
# What the conformance tables have in common: reading one, choosing entries, running them, counting.
#
#   source table.sh
#   table_option WORDS...    takes one of the options that all tables have: $taken words; sets on, times, only, list, subset, mmu, cpu
#   table_read FILE          one `key = value` per line below each [[test]]; see expected.toml
#   table_choose [VERSION]   the indices of the entries that the options ask for, and that programs of this version have: chosen
#   table_list               prints the chosen entries
#   find_slat ROOT           the slat command to test: $slat
#   table_run                runs the chosen entries; calls what the script defines:
#     requires NEED          whether this machine has one of the things that an entry needs
#     prepare INDEX          fills the array `command`; or fills `missing` with the reason why the entry fails
#     confirm LOG            optional: prints why an exit status that says pass is not to be believed
#   table_count              prints "N passed, N failed, N skipped"; false when an entry failed
#
# An entry's `expect` is "pass" (exit status $pass_status), "skip" (not run) or "skips" (run: must say that it does not apply,
# by the exit status $skip_status); both skips need a reason. Of one that passes the lines that begin with "note: " are shown.
# `needs` and `subset` are lists of words.
# An entry with `since` is of programs of that version and later, one with `before` of earlier ones.

die() { echo "conformance: $*" >&2; exit 2; }

# The values of --on that this table accepts. The first is the default.
on_values=(slat kvm) on='' times=1 list='' subset='' mmu=tdp cpu=host
only=()
table_option() {
    taken=2
    case $1 in
    --on) on=${2:?--on needs one of: ${on_values[*]}} ;;
    --times) times=${2:?--times needs a number} ;;
    --only) only+=("${2:?--only needs a text}") ;;
    --cpu) cpu=${2:?--cpu needs host, amd, intel or other} ;;
    --mmu) mmu=${2:?--mmu needs a name that slat run --mmu takes} ;;
    --ci | --landing) subset=${1#--} taken=1 ;;
    --list) list=yes taken=1 ;;
    -h | --help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    *) die "unknown option $1 (see --help)" ;;
    esac
    [[ -z $on || " ${on_values[*]} " = *" $on "* ]] || die "--on takes one of: ${on_values[*]}; not '$on'"
    if [ "$cpu" = other ]; then
        if grep -q GenuineIntel /proc/cpuinfo; then cpu=amd; else cpu=intel; fi
    fi
    [[ $cpu =~ ^(host|amd|intel)$ ]] || die "--cpu takes host, amd, intel or other; not '$cpu'"
    [[ $times =~ ^[1-9][0-9]*$ ]] || die "--times takes a number, not '$times'"
}

names=() args=() expects=() needs=() timeouts=() reasons=() tries=() subsets=() since=() before=()
table_read() {
    local line value line_number=0 file
    file=$(basename "$1")
    while IFS= read -r line || [ -n "$line" ]; do
        line_number=$((line_number + 1))
        if [[ $line =~ ^[[:space:]]*(#.*)?$ ]]; then
            continue
        elif [[ $line = '[[test]]' ]]; then
            names+=('') args+=('') expects+=(pass) needs+=('') timeouts+=(120) reasons+=('') tries+=(1) subsets+=('') since+=('') before+=('')
        elif [[ ${#names[@]} -gt 0 && $line =~ ^([a-z]+)\ =\ (\"([^\"\\]*)\"|([0-9]+))$ ]]; then
            value=${BASH_REMATCH[3]}${BASH_REMATCH[4]}
            case ${BASH_REMATCH[1]} in
            name) names[-1]=$value ;;
            args) args[-1]=$value ;;
            expect) expects[-1]=$value ;;
            needs) needs[-1]=$value ;;
            timeout) timeouts[-1]=$value ;;
            reason) reasons[-1]=$value ;;
            tries) tries[-1]=$value ;;
            subset) subsets[-1]=$value ;;
            since) since[-1]=$value ;;
            before) before[-1]=$value ;;
            *) die "$file:$line_number: unknown key ${BASH_REMATCH[1]}" ;;
            esac
        else
            die "$file:$line_number: not understood: $line"
        fi
    done <"$1"
    local i
    for i in "${!names[@]}"; do
        case ${expects[i]} in
        pass) ;;
        skip | skips) [ -n "${reasons[i]}" ] || die "${names[i]} ${args[i]}: a skip needs a reason" ;;
        *) die "${names[i]} ${args[i]}: expect must be pass, or skip or skips with a reason" ;;
        esac
    done
}

# Whether version `$1` is not later than version `$2`.
not_later() { printf '%s\n%s\n' "$1" "$2" | sort --version-sort --check=quiet; }

# Whether programs of version `$2` have entry `$1`. Without a version, programs have every entry.
in_version() {
    [ -z "$2" ] ||
        { [ -z "${since[$1]}" ] || not_later "${since[$1]}" "$2"; } && { [ -z "${before[$1]}" ] || ! not_later "${before[$1]}" "$2"; }
}

chosen=()
table_choose() {
    local i text version=${1:-}
    on=${on:-${on_values[0]}}
    chosen=()
    for i in "${!names[@]}"; do
        if ! in_version "$i" "$version"; then continue; fi
        case $subset in
        '') ;;
        landing) if [[ " ${subsets[i]} " = *' full '* ]]; then continue; fi ;;
        *) if [[ " ${subsets[i]} " != *" $subset "* ]]; then continue; fi ;;
        esac
        if [ ${#only[@]} = 0 ]; then chosen+=("$i"); fi
        for text in "${only[@]}"; do
            if [[ "${names[i]} ${args[i]}" = *"$text"* ]]; then chosen+=("$i"); break; fi
        done
    done
    [ ${#chosen[@]} -gt 0 ] || [ -n "$version" ] || die "nothing in the table matches${subset:+ --$subset}${only:+ --only ${only[*]}}"
}

table_list() {
    local i
    for i in "${chosen[@]}"; do
        printf '%-5s  %s%s%s%s%s\n' "${expects[i]}" "${names[i]}" "${args[i]:+ ${args[i]}}" "${needs[i]:+  (needs ${needs[i]})}" \
            "${since[i]:+  (since ${since[i]})}" "${before[i]:+  (before ${before[i]})}"
    done
}

find_slat() { # the repository
    slat=${SLAT_BIN:-}
    if [ -z "$slat" ]; then
        (cd "$1" && cargo build --release -q --bin slat)
        slat=${CARGO_TARGET_DIR:-$1/target}/release/slat
    fi
    [ -x "$slat" ] || die "no slat command at $slat"
    slat=$(realpath "$slat")
}

passed=0 failed=0 skipped=0 pass_status=0 skip_status=4
confirm() { :; }
verdict() { printf '%-7s %8s  %s\n' "$1" "$2" "$3"; }

# Seconds since `$1`, a value of EPOCHREALTIME.
seconds_since() {
    LC_ALL=C awk -v a="$1" -v b="$EPOCHREALTIME" 'BEGIN { sub(",", ".", a); sub(",", ".", b); printf "%.2f s", b - a }'
}

table_run() { # a directory for the log; what runs each command, for example "timeout --foreground"
    local log="$1/log" i title begin status seconds why try signal need command missing # hooks fill the last two
    shift
    for i in "${chosen[@]}"; do
        title="${names[i]}${args[i]:+ ${args[i]}}"
        if [ "${expects[i]}" = skip ]; then
            verdict skipped - "$title: ${reasons[i]}"
            skipped=$((skipped + 1))
            continue
        fi
        for need in ${needs[i]}; do
            requires "$need" && continue
            verdict skipped - "$title: needs $need, which is not there (for this user)"
            skipped=$((skipped + 1))
            continue 2
        done
        command=() missing=''
        prepare "$i"
        if [ -n "$missing" ]; then
            verdict FAILED - "$title: $missing"
            failed=$((failed + 1))
            continue
        fi
        for ((try = 1; ; try++)); do
            begin=$EPOCHREALTIME
            status=0
            # The program runs in the foreground, so that a time-out ends only this program, and ^C reaches it.
            "$@" timeout --foreground --kill-after=5 "${timeouts[i]}" "${command[@]}" >"$log" 2>&1 </dev/null || status=$?
            seconds=$(seconds_since "$begin")
            if [ "$status" = "$pass_status" ] || [ "$try" -ge "${tries[i]}" ]; then break; fi
            verdict again "$seconds" "$title: exit status $status; ${reasons[i]}"
        done
        why=''
        case $status in
        "$pass_status")
            if [ "${expects[i]}" = skips ]; then why='passes, where a skip is expected'; else why=$(confirm "$log"); fi
            if [ -z "$why" ]; then
                verdict ok "$seconds" "$title"
                sed -n 's/^note: /            | /p' "$log"
                passed=$((passed + 1))
                continue
            fi
            ;;
        "$skip_status")
            if [ "${expects[i]}" = skips ]; then
                verdict skipped "$seconds" "$title: ${reasons[i]}"
                skipped=$((skipped + 1))
                continue
            fi
            why='the program skipped itself'
            ;;
        124 | 137) why="ended after ${timeouts[i]} s, or killed" ;;
        *) if [ "$status" -gt 128 ] && signal=$(kill -l "$status" 2>/dev/null); then why="SIG$signal"; else why="exit status $status"; fi ;;
        esac
        verdict FAILED "$seconds" "$title: $why"
        failed=$((failed + 1))
        tail -n "${LOG_LINES:-12}" "$log" | sed 's/^/            | /'
    done
}

table_count() {
    echo "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" = 0 ]
}
