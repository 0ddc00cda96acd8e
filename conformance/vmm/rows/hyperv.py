"""hyperv FEATURES: a guest sees Hyper-V's interface, as far as FEATURES ask for it: all of KVM's, or what is usual for Windows.

    passthrough   hv-passthrough
    windows       hv_relaxed, hv_vapic, hv_spinlocks, hv_time: what virt-manager asks for

Linux takes Hyper-V's interface where it does not see KVM's, under Microsoft's name, and with the number of the virtual processor: its clock
is the reference TSC page's.
"""

import re
import time

from rows.console import Failure
from rows.qemu import Qemu

FEATURES = {
    "passthrough": "hv-passthrough",
    "windows": "hv_relaxed,hv_vapic,hv_spinlocks=0x1fff,hv_time,hv_vpindex",
}
SECONDS = 5
CLOCKS = "/sys/devices/system/clocksource/clocksource0"


def run(setting, words):
    guest = Qemu(setting, "q35", cpu=f"host,kvm=off,hv-vendor-id=Microsoft Hv,{FEATURES[words]}")
    guest.boot()
    log = guest.console.run("dmesg")
    if "Hypervisor detected: Microsoft Hyper-V" not in log:
        raise Failure("Linux has not found Hyper-V")
    for line in re.findall(r"Hyper-V: (.*)", log):
        print(f"note: {line}")
    clocks = guest.console.run(f"cat {CLOCKS}/available_clocksource")
    if "hyperv_clocksource" not in clocks:
        raise Failure(f"no clock of Hyper-V: {clocks}")
    clock = next(clock for clock in clocks.split() if clock.startswith("hyperv_clocksource"))
    guest.console.run(f"echo {clock} >{CLOCKS}/current_clocksource")
    before = float(guest.console.run("cut -d' ' -f1 /proc/uptime"))
    begin = time.monotonic()
    time.sleep(SECONDS)
    passed = float(guest.console.run("cut -d' ' -f1 /proc/uptime")) - before
    # The console's answers take a while at both ends.
    if not SECONDS - 1 < passed < time.monotonic() - begin + 1:
        raise Failure(f"{passed} s passed in the guest by {clock}, {time.monotonic() - begin:.1f} s here")
    guest.check_cpus()
    guest.power_off()
