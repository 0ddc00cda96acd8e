"""kvmtool gicv2|gicv3 CPUS: kvmtool boots Linux for 64-bit Arm to a shell with all CPUs, and powers off. KVMTOOL_BIN names its lkvm."""

import os

from rows.content import equal
from rows.qemu import BOOT, MEMORY
from rows.terminal import Terminal


def run(setting, gic, cpus):
    architecture = setting.architecture
    command = [os.environ["KVMTOOL_BIN"], "run", "--name", os.path.basename(setting.scratch), "--cpus", cpus]
    command += ["--mem", str(MEMORY), "--irqchip", gic, "--console", "serial", "--network", "mode=none"]
    command += ["--kernel", setting.material("vmlinuz"), "--initrd", setting.material("initrd")]
    command += ["--params", architecture.command_line("ttyS0")]
    vmm = Terminal(setting, "kvmtool", command)
    vmm.console.ready(BOOT)
    vmm.console.check_cpus(int(cpus))
    equal("the guest's machine", vmm.console.run("uname -m"), architecture.machine)
    vmm.end("poweroff -f")
