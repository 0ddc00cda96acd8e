"""clock MACHINE: no reading of the guest's clock is before an earlier one, on 4 CPUs that go offline and come back.

By kvmclock and by the TSC, threads on all CPUs read CLOCK_MONOTONIC, CPUs are taken offline and come back, and
the machine is stopped and continues.
"""

import re
import time

from rows.content import equal
from rows.qemu import Qemu

CPUS = 4
SECONDS = 20
CLOCKS = "/sys/devices/system/clocksource/clocksource0"
USED = ("kvm-clock", "tsc")


def _cpu(guest, cpu, online):
    guest.console.run(f"echo {int(online)} >/sys/devices/system/cpu/cpu{cpu}/online", 120)


def run(setting, machine):
    guest = Qemu(setting, machine, cpus=CPUS, cpu="host,migratable=off,+invtsc")
    guest.boot()
    available = guest.console.run(f"cat {CLOCKS}/available_clocksource").split()
    equal("the clocks that the guest lacks", sorted(set(USED) - set(available)), [])
    for clock in USED:
        guest.console.run(f"echo {clock} >{CLOCKS}/current_clocksource")
        guest.console.run(f"clock {SECONDS} >/tmp/clock & echo")
        # A CPU that comes back has a page that is written much later than the others'.
        for cpu in range(1, CPUS):
            _cpu(guest, cpu, False)
            time.sleep(1)
            _cpu(guest, cpu, True)
            guest.qmp.call("stop")
            guest.qmp.call("cont")
        said = guest.console.run("wait; cat /tmp/clock", 120)
        equal(f"the readings by {clock}: {said}", re.findall(r"(\d+) go back", said), ["0"])
        print(f"note: {clock}: {said}")
        equal("the clock that Linux uses", guest.console.run(f"cat {CLOCKS}/current_clocksource"), clock)
    guest.check_cpus()
    guest.power_off()
