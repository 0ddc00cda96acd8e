"""boot MACHINE IRQCHIP CPUS [bzImage] [ovmf] [qemu64]: QEMU boots Linux to a shell with all CPUs, and powers off.

Without more words the kernel is an ELF file, which is started at its PVH entry; a bzImage is started by SeaBIOS, or by OVMF, which
is in flash.
The CPU is the host's, or QEMU's own default.
"""

import shutil

from rows.qemu import Qemu


def run(setting, machine, irqchip, cpus, *words):
    kernel, cpu, options = "vmlinux", None, []
    for word in words:
        if word == "bzImage":
            kernel = "vmlinuz"
        elif word == "ovmf":
            # Both are flash: memory that is read as such, where every write is a command to the device. The code never
            # accepts any; of the variables this guest has a copy.
            variables = setting.path("variables")
            shutil.copy(setting.material("OVMF_VARS.fd"), variables)
            flash = "if=pflash,format=raw"
            options += ["-drive", f"{flash},unit=0,readonly=on,file={setting.material('OVMF_CODE.fd')}"]
            options += ["-drive", f"{flash},unit=1,file={variables}"]
            # This OVMF maps all physical addresses of the CPU by pages of 2 MiB: 48 bits need 1 GiB of tables, more than there is.
            cpu = ("max" if setting.on == "tcg" else "host") + ",host-phys-bits-limit=40"
        elif word == "qemu64":
            cpu = word
        else:
            raise SystemExit(f"boot: unknown word {word}")
    qemu = Qemu(setting, machine, irqchip, int(cpus), kernel, options, cpu=cpu)
    qemu.boot()
    if "ovmf" in words:
        qemu.console.run("test -d /sys/firmware/efi")
    qemu.power_off()
