"""arm64 GIC CPUS [disk] [kvmtool]: a VMM for 64-bit Arm boots Linux to a shell with all CPUs, and powers off.

    gic2, gic3   the interrupt controller
    disk         the guest reads a virtio disk; GICv3 has an ITS for its messages
    kvmtool      the VMM is kvmtool's lkvm, not QEMU

With `--on board` the guest has slat-a64's and slat-gic's own board (crates/slat-a64/examples/linux), which `--qemu` names.
"""

import hashlib
import os
import subprocess

from rows.console import Console, Failure
from rows.content import MIB, equal
from rows.process import Process
from rows.qemu import Qemu

# Self-tests of cryptography are two thirds of the instructions of a boot, and each character on the console is an exit or two.
COMMAND_LINE = "panic=-1 loglevel=4 cryptomgr.notests"
MEMORY = 256
# Seconds until the shell must be there.
BOOT = 1500
COMMAND = 300
DISK = 2 * MIB


class Program:
    """A guest of a program whose standard input and output are the console, and which ends when the guest powers off."""

    def __init__(self, setting, command):
        self.name = os.path.basename(command[0])
        self.process = Process(setting, self.name, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.console = Console(self.name, self.process.stdout.fileno(), self.process.stdin.fileno())
        setting.consoles.append(self.console)

    def power_off(self, seconds):
        self.console.check()
        self.console.write("poweroff -f\n")
        status = self.process.wait(seconds)
        if status != 0:
            raise Failure(f"{self.name}: exit status {status}")
        self.console.check()
        for line in self.process.stderr().splitlines():
            print(f"note: {self.name}: {line}")


def _kvmtool(setting, gic, cpus):
    command = [os.environ["KVMTOOL_BIN"], "run", "--name", os.path.basename(setting.scratch), "--cpus", cpus]
    command += ["--mem", str(MEMORY), "--irqchip", gic.replace("gic", "gicv"), "--console", "serial"]
    command += ["--kernel", setting.material("vmlinuz"), "--initrd", setting.material("initrd")]
    command += ["--params", f"console=ttyS0 {COMMAND_LINE}", "--network", "mode=none"]
    return Program(setting, command)


def _board(setting):
    files = [setting.material("vmlinuz"), setting.material("initrd")]
    return Program(setting, [setting.qemu] + files + [f"console=ttyAMA0 {COMMAND_LINE}"])


def _qemu(setting, gic, cpus, options):
    payload = ["-kernel", setting.material("vmlinuz"), "-initrd", setting.material("initrd")]
    payload += ["-append", f"console=ttyAMA0 {COMMAND_LINE}", "-m", str(MEMORY)]
    machine = f"virt,gic-version={gic.removeprefix('gic')}"
    return Qemu(setting, machine, cpus=int(cpus), payload=payload, options=options, cpu="host")


def _disk(setting):
    """Makes a disk. Returns its sum and QEMU's options."""
    data = os.urandom(DISK)
    with open(setting.path("disk"), "wb") as file:
        file.write(data)
    drive = f"if=none,id=disk,format=raw,file={setting.path('disk')}"
    return hashlib.sha256(data).hexdigest(), ["-drive", drive, "-device", "virtio-blk-pci,drive=disk"]


def run(setting, gic, cpus, *words):
    expected, options = _disk(setting) if "disk" in words else (None, [])
    if setting.on == "board":
        guest = _board(setting)
    elif "kvmtool" in words:
        guest = _kvmtool(setting, gic, cpus)
    else:
        guest = _qemu(setting, gic, cpus, options)
    console = guest.console
    console.ready(BOOT)
    online = console.run("nproc", COMMAND)
    equal("the guest's CPUs", online, cpus)
    for cpu in range(int(cpus)):
        console.run(f"taskset -c {cpu} true", COMMAND)
    equal("the guest's machine", console.run("uname -m", COMMAND), "aarch64")
    interrupts = console.run("cat /proc/interrupts", COMMAND)
    if gic.replace("gic", "GICv") not in interrupts.replace("GIC-0", "GICv2"):
        raise Failure(f"another interrupt controller than {gic}\n{interrupts}")
    if expected:
        equal("the guest's sum of the disk", console.run("sha256sum </dev/vda", COMMAND).split()[0], expected)
    guest.power_off(COMMAND)
