"""secureboot CPUS [open]: OVMF's secure-boot build keeps its variables in flash that only system management mode can write.

Linux writes a variable, which the firmware stores in its SMI handler; it is there after a reset, and in another machine with the same
flash. What Linux itself writes to the flash changes nothing. "open": the same machine without the guard, where it changes it.
"""

import os
import shutil

from rows.console import Failure
from rows.qemu import Qemu, host_cpu, linux

GUID = "7a1de1b0-51a7-4b0f-9d5e-0c0ffee0c0de"
# Attributes: non-volatile, for boot and runtime services.
VALUE = "\\007\\000\\000\\000kept"


def run(setting, cpus, *words):
    is_open = words == ("open",)
    if words and not is_open:
        raise SystemExit(f"secureboot: unknown words {words}")
    code, variables = setting.material("OVMF_CODE.secboot.fd"), setting.path("variables")
    shutil.copy(setting.material("OVMF_VARS.fd"), variables)
    # The code is below 4 GiB, the variables below the code.
    flash = (4 << 30) - os.path.getsize(code) - os.path.getsize(variables)

    def machine(name):
        drive = "if=pflash,format=raw"
        options = ["-drive", f"{drive},unit=0,readonly=on,file={code}", "-drive", f"{drive},unit=1,file={variables}"]
        options += ["-global", f"driver=cfi.pflash01,property=secure,value={'off' if is_open else 'on'}"]
        # The firmware's script for waking up is in memory that the operating system can write.
        options += ["-global", "ICH9-LPC.disable_s3=1"]
        # See boot.py.
        cpu = host_cpu(setting) + ",host-phys-bits-limit=40"
        qemu = Qemu(setting, "q35,smm=on", "on", int(cpus), linux(setting, "vmlinuz"), options, name=name, cpu=cpu)
        qemu.boot()
        qemu.console.run("mount -t efivarfs efivarfs /sys/firmware/efi/efivars")
        return qemu

    def check(qemu):
        path = f"/sys/firmware/efi/efivars/slat-{GUID}"
        found = qemu.console.run(f"tail -c +5 {path}")
        if found != "kept":
            raise Failure(f"{qemu.name}: the variable is {found!r}")

    qemu = machine("first")
    result = qemu.console.run(f"flash {flash:x}")
    if result != ("changed" if is_open else "unchanged"):
        raise Failure(f"what Linux wrote to the flash: {result}")
    if is_open:
        qemu.power_off()
        return
    qemu.console.run(f"printf '{VALUE}' >/sys/firmware/efi/efivars/slat-{GUID}")
    check(qemu)
    # A reset: the CPUs begin again outside system management mode, and the firmware moves its memory again.
    qemu.qmp.call("set-action", reboot="reset")
    qemu.console.write("reboot -f\n")
    qemu.boot()
    qemu.console.run("mount -t efivarfs efivarfs /sys/firmware/efi/efivars")
    check(qemu)
    qemu.power_off()
    qemu = machine("second")
    check(qemu)
    qemu.power_off()
