"""xen MACHINE CPUS: Xen boots on QEMU's CPUs, and on it Linux as a paravirtual dom0, to a shell and to power-off."""

from rows.console import Failure
from rows.content import equal
from rows.qemu import BOOT, Qemu


def run(setting, machine, cpus):
    dom0 = "console=hvc0 panic=-1 reboot=t"
    payload = ["-kernel", setting.material("xen/xen"), "-append", "console=com1 com1=115200,8n1 dom0_mem=512M loglvl=info"]
    payload += ["-initrd", f"{setting.material('generic/vmlinuz')} {dom0},{setting.material('generic/initrd')}", "-m", "1024"]
    guest = Qemu(setting, machine, cpus=int(cpus), payload=payload)
    guest.console.ready(2 * BOOT)
    equal("what Linux runs on", guest.console.run("cd /sys/hypervisor; cat type guest_type").split(), ["xen", "PV"])
    guest.console.check_cpus(int(cpus))
    equal("the pattern's wrong words", guest.console.run("pattern 64 2", 240).split()[-3], "0")
    guest.console.begin("poweroff -f")
    reason = guest.qmp.event("SHUTDOWN", 120)["reason"]
    if reason != "guest-shutdown" or guest.process.wait(60) != 0:
        raise Failure(f"ended by {reason}")
    guest.console.check()
