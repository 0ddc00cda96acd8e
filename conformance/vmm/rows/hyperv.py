"""hyperv passthrough|windows: a guest sees Hyper-V's interface, as far as QEMU is told to offer it.

    passthrough   hv-passthrough: all that KVM has. Linux does not look at it, because QEMU gives it KVM's name
    windows       hv_relaxed, hv_vapic, hv_spinlocks, hv_time: what virt-manager asks for. Without KVM's interface, and with the number of
                  the virtual processor besides, Linux takes Hyper-V's: its clock is the reference TSC page's
"""

import re
import time

from rows.console import Failure
from rows.content import equal
from rows.qemu import Qemu

CPUS = {
    "passthrough": "host,hv-passthrough",
    "windows": "host,kvm=off,hv_relaxed,hv_vapic,hv_spinlocks=0x1fff,hv_time,hv_vpindex",
}
# Leaf 0x40000001 of a hypervisor with this interface ("Hv#1"), and bits of leaf 0x40000003 EAX (Hypervisor Top Level Functional
# Specification, 2.4): reference counter, APIC registers, hypercalls, number of the virtual processor, reference TSC page.
INTERFACE = 0x31237648
PRIVILEGES = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 9
SECONDS = 5
CLOCKS = "/sys/devices/system/clocksource/clocksource0"


def _eax(guest, leaf):
    return int(guest.console.run(f"cpuid {leaf:x}").split()[0], 16)


def _check_linux(guest):
    """Checks that Linux has found Hyper-V and can tell the time by it."""
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
    begin = time.monotonic()
    before = float(guest.console.run("cut -d' ' -f1 /proc/uptime"))
    time.sleep(SECONDS)
    passed = float(guest.console.run("cut -d' ' -f1 /proc/uptime")) - before
    # The guest looks at its clock some time between question and answer.
    if not SECONDS - 0.1 < passed < time.monotonic() - begin + 0.1:
        raise Failure(f"{passed} s passed in the guest by {clock}, {time.monotonic() - begin:.1f} s here")


def run(setting, words):
    guest = Qemu(setting, "q35", cpu=CPUS[words])
    guest.boot()
    equal("the hypervisor's interface", hex(_eax(guest, 0x4000_0001)), hex(INTERFACE))
    equal("its privileges", hex(_eax(guest, 0x4000_0003) & PRIVILEGES), hex(PRIVILEGES))
    if words == "windows":
        _check_linux(guest)
    guest.check_cpus()
    guest.power_off()
