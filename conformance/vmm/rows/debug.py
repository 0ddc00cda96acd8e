"""debug MACHINE: QEMU's GDB stub stops a Linux guest with 2 CPUs where it is told to, and sees its registers and memory there.

    a break point in memory (an instruction is overwritten) and one in a debug register, at a system call that the guest's shell makes
    single steps
    a watch point for writes, and one for all accesses, at a variable of the kernel
"""

import struct

from rows.console import Failure
from rows.content import equal
from rows.gdb import ACCESS, HARDWARE, RDI, RIP, SOFTWARE, WATCHES, WRITE, Gdb
from rows.qemu import Qemu, linux

INT3 = b"\xcc"
# Where a system call's first argument is among the registers that the kernel has saved (struct pt_regs: r15 is first).
SAVED_RDI = 14 * 8
SYSTEM_CALL = "__x64_sys_sethostname"
VARIABLE, FILE = "panic_timeout", "/proc/sys/kernel/panic"


def symbols(guest, *names):
    lines = guest.console.run(f"grep -w -e {' -e '.join(names)} /proc/kallsyms").splitlines()
    found = {line.split()[2]: int(line.split()[0], 16) for line in lines}
    return [found[name] for name in names]


def _break(guest, gdb, kind, address):
    """Has the guest come by a break point, looks at it there, and lets it go on."""
    name = f"name{kind}"
    original = gdb.memory(address, 1)
    gdb.insert(kind, address)
    equal("the byte at the break point", gdb.memory(address, 1), INT3 if kind == SOFTWARE else original)
    gdb.resume()
    command = f"hostname {name}"
    guest.console.begin(command)
    gdb.stopped()
    equal("where the guest stopped", hex(gdb.register(RIP)), hex(address))
    argument = gdb.word(gdb.register(RDI) + SAVED_RDI)
    equal("the system call's argument", gdb.memory(argument, len(name)), name.encode())
    gdb.remove(kind, address)
    equal("the byte after the break point", gdb.memory(address, 1), original)
    places = {address}
    for _ in range(4):
        gdb.step()
        places.add(gdb.register(RIP))
    if len(places) != 5:
        raise Failure(f"four steps went to {sorted(map(hex, places))}")
    gdb.resume()
    guest.console.finish(command)
    equal("the name that was set", guest.console.run("hostname"), name)


def _watch(guest, gdb, kind, address, command):
    """Has the guest access a variable, and returns the value that it has then."""
    gdb.insert(kind, address, 4)
    gdb.resume()
    guest.console.begin(command)
    reason = gdb.stopped()
    if f"{WATCHES[kind]}:{address:x};" not in reason:
        raise Failure(f"stopped for another reason: {reason}")
    value = struct.unpack("<i", gdb.memory(address, 4))[0]
    gdb.remove(kind, address, 4)
    gdb.resume()
    guest.console.finish(command)
    return value


def run(setting, machine):
    path = setting.path("gdb")
    options = ["-gdb", f"unix:{path},server=on,wait=off"]
    guest = Qemu(setting, machine, payload=linux(setting, more="nokaslr"), options=options)
    guest.boot()
    call, variable = symbols(guest, SYSTEM_CALL, VARIABLE)
    gdb = Gdb("gdb", path)
    for kind in (SOFTWARE, HARDWARE):
        _break(guest, gdb, kind, call)
        gdb.interrupt()
    equal("the variable when it is written", _watch(guest, gdb, WRITE, variable, f"echo 7 >{FILE}"), 7)
    gdb.interrupt()
    equal("the variable when it is read", _watch(guest, gdb, ACCESS, variable, f"cat {FILE}"), 7)
    guest.check_cpus()
    guest.power_off()
