"""dirty-rate page-sampling|dirty-ring|dirty-bitmap: QEMU measures how fast a guest dirties memory (calc-dirty-rate).

The guest rewrites 64 MiB on its second CPU, over and over; then it is idle. By dirty rings QEMU says which CPU it was.
"""

from rows.console import Failure
from rows.qemu import Qemu

MEBIBYTES = 64
# Of a second's measurement: a part of the pattern may be missed, and the kernel writes, too. Pages that are dirtied again after
# their ring entry was harvested count again, as often as that happens.
LEAST = 40
MOST = {"page-sampling": 96, "dirty-bitmap": 96, "dirty-ring": 4096}
IDLE = 24


def _measure(guest, mode):
    """Returns QEMU's result: MiB in each second."""
    options = {"sample_pages": 4096} if mode == "page-sampling" else {}
    guest.qmp.call("calc-dirty-rate", calc_time=1, mode=mode, **options)
    result = guest.qmp.poll("query-dirty-rate", lambda result: result["status"] == "measured", 60)
    if result["mode"] != mode:
        raise Failure(f"measured by {result['mode']}")
    return result


def run(setting, mode):
    guest = Qemu(setting, "q35", accel=",dirty-ring-size=4096" if mode == "dirty-ring" else "")
    guest.boot()
    pid = guest.console.run(f"taskset -c 1 pattern {MEBIBYTES} >/tmp/pattern 2>&1 & echo $!")
    guest.console.run("until grep -q written /tmp/pattern; do usleep 100000; done", 60)
    busy = _measure(guest, mode)
    check = f"kill -USR1 {pid}; while kill -0 {pid} 2>/dev/null; do usleep 100000; done; grep ' 0 wrong words' /tmp/pattern"
    pattern = guest.console.run(check, 60)
    idle = _measure(guest, mode)
    print(f"note: {busy['dirty-rate']} MiB/s, idle {idle['dirty-rate']} MiB/s; {pattern}")
    if not LEAST <= busy["dirty-rate"] <= MOST[mode] or idle["dirty-rate"] > IDLE:
        raise Failure(f"not plausible: {busy}, idle {idle}")
    if mode == "dirty-ring":
        rates = {entry["id"]: entry["dirty-rate"] for entry in busy["vcpu-dirty-rate"]}
        if rates[1] < LEAST or rates[0] > IDLE:
            raise Failure(f"the wrong CPU: {busy}")
    guest.power_off()
