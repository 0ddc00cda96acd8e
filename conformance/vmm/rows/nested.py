"""nested MACHINE CPUS [again]: Linux with KVM on slat's SVM runs guests of its own.

First a program that makes VMs and uses what KVM offers (../programs/ways.c), then QEMU, which boots Linux to a shell and to power-off.

    again    that Linux runs guests of its own, too: the same program
"""

import itertools
import re
import shlex

from rows.console import TROUBLE, Failure
from rows.qemu import BOOT, Qemu, linux

# Mebibytes.
HYPERVISOR, GUEST, GUEST_HYPERVISOR = 1536, 256, 400
# Each letter that the guest prints is some exits to QEMU in the hypervisor, so its kernel prints few.
COMMAND_LINE = "console=ttyS0 quiet panic=-1 reboot=t"
# SVM is AMD's: guests look for it by the vendor.
CPU = "EPYC,+svm"


def hypervisor(setting, machine, cpus, options=(), **more):
    """Returns a QEMU that boots Linux with KVM."""
    payload = linux(setting, initrd="nested/initrd")
    options = ["-m", str(HYPERVISOR), *options]
    return Qemu(setting, machine, cpus=cpus, payload=payload, options=options, cpu=CPU, **more)


def begin(console, memory=GUEST, initrd="initrd"):
    """Has the hypervisor's QEMU boot Linux to a shell, which is returned."""
    command = f"/usr/bin/qemu-system-x86_64 -accel kvm -cpu host -m {memory} -nodefaults -no-user-config -display none -no-reboot"
    command += f" -serial pipe:/tmp/guest -kernel /guest/vmlinuz -initrd /guest/{initrd} -append '{COMMAND_LINE}'"
    console.run("test -c /dev/kvm && mkfifo /tmp/guest.in /tmp/guest.out")
    qemu = console.run(f"{command} >/tmp/qemu 2>&1 & echo $!")
    console.run("cat /tmp/guest.out >/tmp/guest &")
    # A process that has ended has no program.
    lives = f"[ -e /proc/{qemu}/exe ] || {{ cat /tmp/qemu; exit 1; }}"
    console.run(f"(until grep -q 'slat: guest ready' /tmp/guest; do {lives}; usleep 100000; done)", 2 * BOOT)
    return Shell(console, qemu)


class Shell:
    """The shell of the hypervisor's guest."""

    _numbers = itertools.count()

    def __init__(self, console, qemu):
        self._console = console
        self._qemu = qemu

    def run(self, command, seconds=60):
        """Runs a command and returns what it printed. Fails when its status is not 0."""
        number = next(self._numbers)
        line = shlex.quote(f"echo begin-{number}-; {command}\necho end-{number}-$?")
        wait = f"until grep -q '^end-{number}-' /tmp/guest; do usleep 100000; done"
        show = f"sed -n '/^begin-{number}-/,/^end-{number}-/p' /tmp/guest"
        lines = self._console.run(f"echo {line} >/tmp/guest.in; {wait}; {show}", seconds).splitlines()
        if lines[-1] != f"end-{number}-0":
            raise Failure(f"the guest's guest: {command}: {lines[1:]}")
        return "\n".join(lines[1:-1])

    def moved(self, console):
        """Returns this shell, after the hypervisor has moved to where `console` is."""
        return Shell(console, self._qemu)

    def power_off(self, seconds=60):
        """Has it power off; QEMU's status must be 0, and its kernel must not have complained."""
        self._console.run(f"echo poweroff -f >/tmp/guest.in; wait {self._qemu}", seconds)
        trouble = re.search(TROUBLE, self._console.run("cat /tmp/guest").encode())
        if trouble:
            raise Failure(f"the guest's guest complains: {trouble[0].decode()}")


def run(setting, machine, cpus, *words):
    outer = hypervisor(setting, machine, int(cpus))
    outer.boot(2 * BOOT)
    outer.console.run("ways", 300)
    if "again" in words:
        guest = begin(outer.console, GUEST_HYPERVISOR, "hypervisor")
        guest.run("ways", 300)
    else:
        guest = begin(outer.console)
        guest.run("pattern 32 2", 120)
    guest.power_off()
    outer.power_off()
