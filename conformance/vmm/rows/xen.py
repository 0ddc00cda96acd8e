"""xen MACHINE CPUS: Xen boots on QEMU's CPUs, and on it Linux as a paravirtual dom0, to a shell and to power-off."""

from rows.console import Failure
from rows.content import equal
from rows.qemu import BOOT, COMMAND_LINE, Qemu


def run(setting, machine, cpus):
    dom0 = COMMAND_LINE.replace("console=ttyS0 earlyprintk=ttyS0", "console=hvc0")
    payload = ["-kernel", setting.material("xen/xen"), "-append", "console=com1 com1=115200,8n1 dom0_mem=512M loglvl=info"]
    payload += ["-initrd", f"{setting.material('generic/vmlinuz')} {dom0},{setting.material('generic/initrd')}", "-m", "1024"]
    guest = Qemu(setting, machine, cpus=int(cpus), payload=payload)
    guest.console.ready(2 * BOOT)
    # One line, because dom0 stops taking what is typed after a command or two; why is not known.
    on_each = "; ".join(f"taskset -c {cpu} true || exit" for cpu in range(int(cpus)))
    command = f"cd /sys/hypervisor; cat type guest_type; nproc; {on_each}; pattern 64 2 && poweroff -f"
    guest.console.write(f"echo '<''<<'; {command}\n")
    found = guest.console.expect(rb"(?s)<<<\r*\n(.*? wrong words)", 240)[1].decode().split()
    equal("what Linux runs on, and its CPUs", found[:3], ["xen", "PV", cpus])
    equal("the pattern's wrong words", found[-3], "0")
    reason = guest.qmp.event("SHUTDOWN", 120)["reason"]
    if reason != "guest-shutdown" or guest.process.wait(60) != 0:
        raise Failure(f"ended by {reason}")
    guest.console.check()
