"""xen MACHINE CPUS: Xen boots on QEMU's CPUs, and on it Linux as a paravirtual dom0, to a shell and to power-off."""

from rows.content import equal
from rows.qemu import BOOT, COMMAND_LINE, Qemu


def run(setting, machine, cpus):
    dom0 = COMMAND_LINE.replace("console=ttyS0 earlyprintk=ttyS0", "console=hvc0")
    payload = ["-kernel", setting.material("xen/xen"), "-append", "console=com1 com1=115200,8n1 dom0_mem=512M loglvl=info"]
    payload += ["-initrd", f"{setting.material('generic/vmlinuz')} {dom0},{setting.material('generic/initrd')}", "-m", "1024"]
    guest = Qemu(setting, machine, cpus=int(cpus), payload=payload)
    guest.boot(2 * BOOT)
    run = guest.console.run
    equal("what Linux runs on", run("cat /sys/hypervisor/type /sys/hypervisor/guest_type"), "xen\nPV")
    guest.check_cpus()
    run("pattern 64 2", 120)
    guest.power_off()
