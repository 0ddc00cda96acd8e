"""boot MACHINE IRQCHIP CPUS [bzImage|i386|i386-pae] [uefi] [qemu64]: QEMU boots Linux to a shell with all CPUs, and powers off.

Without more words the kernel is an ELF file, which is started at its PVH entry; a bzImage is started by SeaBIOS, or by UEFI firmware,
which is in flash. Of the 32-bit kernels the one whose page tables have two levels is a bzImage, that with three starts at its PVH entry.
The CPU is the host's, or QEMU's own default.
"""

import re
import shutil

from rows.architecture import X86_64
from rows.console import Failure
from rows.qemu import BOOT, Qemu, host_cpu, linux

CR4_PAE = 1 << 5


def _check_i386(qemu, pae):
    """Checks that Linux is a 32-bit one, and which page tables the CPU uses."""
    if qemu.console.run("uname -m") != "i686":
        raise Failure("this is no 32-bit Linux")
    registers = qemu.qmp.call("human-monitor-command", command_line="info registers")
    if bool(int(re.search(r"CR4=([0-9a-f]+)", registers)[1], 16) & CR4_PAE) != pae:
        raise Failure(f"page tables of another kind than expected\n{registers}")


def run(setting, machine, irqchip, cpus, *words):
    payload, cpu, options, seconds = None, None, [], BOOT
    for word in words:
        if word == "bzImage":
            payload = linux(setting, "vmlinuz")
        elif word == "i386":
            payload = linux(setting, "i386/vmlinuz", "i386/initrd")
            # It decompresses itself by 32-bit code, which slat interprets.
            seconds = 3 * BOOT
        elif word == "i386-pae":
            payload = linux(setting, "i386-pae/vmlinux", "i386-pae/initrd")
        elif word == "uefi":
            # Both are flash: memory that is read as such, where every write is a command to the device. The code never
            # accepts any; of the variables this guest has a copy.
            variables = setting.path("variables")
            code, original = map(setting.material, setting.architecture.firmware)
            shutil.copy(original, variables)
            flash = "if=pflash,format=raw"
            options += ["-drive", f"{flash},unit=0,readonly=on,file={code}"]
            options += ["-drive", f"{flash},unit=1,file={variables}"]
            if setting.architecture is X86_64:
                # This OVMF maps all physical addresses of the CPU by pages of 2 MiB: 48 bits need 1 GiB of tables, more than there is.
                cpu = host_cpu(setting) + ",host-phys-bits-limit=40"
        elif word == "qemu64":
            cpu = word
        else:
            raise SystemExit(f"boot: unknown word {word}")
    if machine == "microvm":
        # Newer firmware of this machine lets the 8259 interrupt, but does not set its vectors, and Linux, told that there is none,
        # does not mask it. A tick of the 8254 after the firmware, 55 ms after the start, is vector 0: a divide error.
        machine += ",pit=off"
    qemu = Qemu(setting, machine, irqchip, int(cpus), payload, options, cpu=cpu)
    qemu.boot(seconds)
    for word in words:
        if word.startswith("i386"):
            _check_i386(qemu, pae=word == "i386-pae")
    if "uefi" in words:
        qemu.console.run("test -d /sys/firmware/efi")
    qemu.power_off()
