# shellcheck shell=bash disable=SC2034,SC2154 # variables of the script that sources this file, and of table.sh
# The configuration of kvm-unit-tests: which program a test is, and what it runs with.
#
#   source settings.sh
#   settings_read FILE    fills the array `setting` from an unittests.cfg: setting[TEST.KEY]. Each test has to be a name of the table
#                         (`names`): a test without a row ends the script

declare -A setting
settings_read() {
    local line name section=''
    declare -A known
    for name in "${names[@]}"; do known[$name]=yes; done
    while IFS= read -r line; do
        if [[ $line =~ ^\[(.*)\]$ ]]; then
            section=${BASH_REMATCH[1]}
            [ -n "${known[$section]:-}" ] || die "unittests.cfg has $section, which is not in the table"
        elif [[ -n $section && $line =~ ^([a-z_]+)\ *=\ *(.*)$ ]]; then
            setting[$section.${BASH_REMATCH[1]}]=${BASH_REMATCH[2]}
        fi
    done <"$1"
}
