#!/bin/sh
# falling_back.sh SLAT PROGRAM [WORD...]: runs PROGRAM under SLAT with falling_back.so, which is in this script's
# directory. The library is used by slat and PROGRAM, or by slat alone if PROGRAM is static. Fails if the library's
# functions were not called.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
slat=$1 program=$2
shift 2
FALLING_BACK=${TMPDIR:-/tmp}/falling_back.$$
export FALLING_BACK
head -c 8 /dev/zero >"$FALLING_BACK"
trap 'rm -f "$FALLING_BACK"' EXIT
case $program in
*static* | *musl*)
    # The kernel starts slat's library as the program. `slat run` is not used, because it would remove LD_PRELOAD.
    # shellcheck disable=SC2016
    library=$("$slat" run -- sh -c 'echo "${LD_PRELOAD%%:*}"')
    LD_PRELOAD=$here/falling_back.so SLAT_PROGRAM=$program "$library" "$@"
    ;;
*) LD_PRELOAD=$here/falling_back.so "$slat" run -- "$program" "$@" ;;
esac
calls=$(od -An -td8 "$FALLING_BACK")
echo "$((calls)) calls of falling_back.so"
[ "$calls" -gt 0 ]
