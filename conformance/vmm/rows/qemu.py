"""QEMU: its command line, its monitor, and the guest's console on its standard input and output."""

import socket
import subprocess

from rows.console import Console, Failure
from rows.process import Process
from rows.qmp import Qmp

MEMORY = 512
# Seconds until the shell must be there. A boot takes about 25 seconds of CPU time on slat.
BOOT = 180


# What `-cpu host` takes from the CPUID instruction and not from KVM, for each processor that slat offers.
IDENTITIES = {
    "host": "",
    "amd": ",vendor=AuthenticAMD,family=25,model=1,stepping=1",
    "intel": ",vendor=GenuineIntel,family=6,model=175,stepping=3",
}


def host_cpu(setting):
    """Returns the CPU that has all that KVM offers, also what this QEMU has no name for."""
    if setting.on == "tcg":
        return "max"
    return f"{setting.architecture.cpu}{IDENTITIES[setting.cpu]}"


def linux(setting, kernel=None, initrd="initrd", more=""):
    """Returns the options that boot this kernel and this initrd of the materials, with more on its command line."""
    architecture = setting.architecture
    files = ["-kernel", setting.material(kernel or architecture.kernel), "-initrd", setting.material(initrd)]
    return files + ["-append", " ".join(filter(None, [architecture.command_line(), architecture.reset, more]))]


class Qemu:
    """A machine that boots `payload` (options), else Linux; its console is the first serial port."""

    def __init__(self, setting, machine, irqchip="on", cpus=2, payload=None, options=(), name="qemu", cpu=None, accel=""):
        self.name = name
        self.machine = machine
        self.cpus = cpus
        ours, theirs = socket.socketpair()
        accelerator = "tcg,thread=multi" if setting.on == "tcg" else "kvm" + accel
        if setting.on != "tcg":
            machine += f",kernel-irqchip={irqchip}"
        command = [setting.qemu, "-accel", accelerator, "-M", machine, "-smp", str(cpus)]
        command += ["-cpu", cpu or host_cpu(setting)]
        command += ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio"]
        command += ["-chardev", f"socket,id=qmp,fd={theirs.fileno()}", "-mon", "chardev=qmp,mode=control"]
        if not any(option == "-m" for option in options):
            command += ["-m", str(MEMORY)]
        command += payload or linux(setting)
        command += options
        self.process = Process(
            setting, name, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        self.console = Console(setting, name, self.process.stdout.fileno(), self.process.stdin.fileno())
        setting.consoles.append(self.console)
        self.qmp = Qmp(setting, name, ours)

    def boot(self, seconds=BOOT):
        """Waits for the shell and checks that all CPUs are online."""
        self.console.ready(seconds)
        self.check_cpus()

    def check_cpus(self):
        """Checks that the guest sees all CPUs, and has work done on each of them."""
        self.console.check_cpus(self.cpus)

    def job(self, command, **arguments):
        """Runs a command that is a job until it is done."""
        self.qmp.call(command, job_id=command, **arguments)

        def mine(jobs):
            return next(job for job in jobs if job["id"] == command)

        job = mine(self.qmp.poll("query-jobs", lambda jobs: mine(jobs)["status"] == "concluded", 120))
        if "error" in job:
            raise Failure(f"{self.name}: {command}: {job['error']}")
        self.qmp.call("job-dismiss", id=command)

    def power_off(self, seconds=60):
        """Has the guest power off; the machine must say so and QEMU's status must be 0."""
        self.console.check()
        self.console.write("poweroff -f\n")
        reason = self.qmp.event("SHUTDOWN", seconds)["reason"]
        if reason != "guest-shutdown":
            raise Failure(f"{self.name}: ended by {reason}")
        status = self.process.wait(seconds)
        if status != 0:
            raise Failure(f"{self.name}: exit status {status}")
        self.console.check()
