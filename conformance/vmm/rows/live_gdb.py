"""live-gdb MACHINE: GDB itself debugs a Linux guest with 2 CPUs by `slat gdb`, of which QEMU knows nothing.

    both CPUs are threads; memory by linear and by physical address is the same
    a break point at a system call that the guest's shell makes, steps, and on
    a watch point at a variable of the kernel
    GDB detaches, and is killed, and so is `slat gdb`: the guest goes on each time
"""

import os
import re
import shutil
import subprocess
import time

from rows.console import Failure, Skip
from rows.content import equal
from rows.debug import FILE, PROCESSORS, locate, symbol
from rows.qemu import Qemu, linux


class Session:
    """GDB, and the `slat gdb` that serves it."""

    def __init__(self, setting, guest):
        self.path = setting.path("live-gdb")
        self.mark = setting.path("live-gdb-mark")
        command = [setting.slat, "gdb", str(guest.process.pid), "--listen", self.path]
        self.server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while not os.path.exists(self.path):
            if time.monotonic() > deadline or self.server.poll() is not None:
                raise Failure("slat gdb does not listen")
            time.sleep(0.05)

    def begin(self, *commands):
        """Starts GDB with these commands after it has connected."""
        command = ["gdb", "-nx", "-q", "-batch", "-ex", "set pagination off", "-ex", f"target remote {self.path}"]
        with open(self.mark, "w"):
            pass
        for line in commands:
            if line == "continue":
                command += ["-ex", f"shell rm {self.mark}"]
            command += ["-ex", line]
        self.gdb = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def continues(self):
        """Waits until GDB lets the guest go on, before which it has removed this file. (It says so, too, but into a buffer.)"""
        deadline = time.monotonic() + 60
        while os.path.exists(self.mark):
            if time.monotonic() > deadline or self.gdb.poll() is not None:
                raise Failure("gdb does not continue")
            time.sleep(0.05)
        time.sleep(1)

    def end(self):
        """Waits until both have ended; returns what GDB has said since."""
        said, _ = self.gdb.communicate(timeout=120)
        equal("the status of slat gdb", self.server.wait(20), 0)
        return said


def _expect(said, *patterns):
    for pattern in patterns:
        if not re.search(pattern, said):
            raise Failure(f"gdb does not say {pattern}:\n{said}")


def run(setting, machine):
    if shutil.which("gdb") is None:
        raise Skip("needs gdb")
    guest = Qemu(setting, machine, payload=linux(setting, more="nokaslr"))
    guest.boot()
    call = symbol(guest, PROCESSORS[setting.architecture].system_call)
    variable, physical = locate(setting, guest)

    session = Session(setting, guest)
    session.begin("info threads", f"x/wx {variable:#x}", "monitor phys on", f"x/wx {physical:#x}", "monitor info", "detach")
    said = session.end()
    _expect(said, r"vCPU 0", r"vCPU 1", r"vCPU 0: long mode")
    words = re.findall(r":\t(0x[0-9a-f]{8})", said)
    if len(words) != 2 or words[0] != words[1]:
        raise Failure(f"the variable by its two addresses:\n{said}")
    guest.check_cpus()

    session = Session(setting, guest)
    session.begin(f"break *{call:#x}", "continue", "stepi", "stepi", "p $rip", "delete", "detach")
    session.continues()
    command = "hostname stopped"
    guest.console.begin(command)
    said = session.end()
    guest.console.finish(command)
    _expect(said, rf"Breakpoint 1, {call:#018x}")
    equal("the name that was set", guest.console.run("hostname"), "stopped")

    session = Session(setting, guest)
    session.begin(f"watch *(int *){variable:#x}", "continue", f"p *(int *){variable:#x}")
    session.continues()
    command = f"echo 7 >{FILE}"
    guest.console.begin(command)
    said = session.end()
    guest.console.finish(command)
    _expect(said, r"New value = 7")

    for name in ("gdb", "server"):
        session = Session(setting, guest)
        session.begin(f"break *{call:#x}", "continue")
        session.continues()
        guest.console.begin("hostname killed")
        # The guest has come to the break point by then, or comes to it later, and passes it.
        time.sleep(2)
        getattr(session, name).kill()
        guest.console.finish("hostname killed")
        for process in (session.gdb, session.server):
            process.kill()
            process.wait(20)
        session.gdb.stdout.close()
        if os.path.exists(session.path):
            os.unlink(session.path)
        guest.check_cpus()
    guest.power_off()
