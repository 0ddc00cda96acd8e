"""debug MACHINE: QEMU's GDB stub stops a Linux guest with 2 CPUs where it is told to, and sees its registers and memory there.

    a break point in memory (an instruction is overwritten) and one in a debug register, at a system call that the guest's shell makes
    single steps
    a watch point for writes, and one for all accesses, at a variable of the kernel
"""

import struct
from dataclasses import dataclass

from rows.architecture import ARM64, X86_64
from rows.console import Failure
from rows.content import equal
from rows.gdb import ACCESS, HARDWARE, SOFTWARE, WATCHES, WRITE, Gdb
from rows.qemu import Qemu, linux


@dataclass(frozen=True)
class Processor:
    """What the architecture's debugging, and Linux on it, are like."""

    system_call: str
    # The instruction that is a break point in memory.
    trap: bytes
    # The register of a function's first argument, and the program counter: their numbers in words of 8 bytes in GDB's packet g.
    argument: int
    pc: int
    # Where a system call's first argument is among the registers that the kernel has saved, the function's argument (struct pt_regs).
    saved_argument: int
    # Whether a watch point stops the CPU after the access, not before.
    stops_after: bool


PROCESSORS = {
    X86_64: Processor("__x64_sys_sethostname", b"\xcc", argument=5, pc=16, saved_argument=14 * 8, stops_after=True),
    ARM64: Processor("__arm64_sys_sethostname", b"\x00\x00\x20\xd4", argument=0, pc=32, saved_argument=0, stops_after=False),
}
# What the kernel's command line has set it to.
VARIABLE, FILE, VALUE = "panic_timeout", "/proc/sys/kernel/panic", -1


def symbols(guest, *names):
    lines = guest.console.run(f"grep -w -e {' -e '.join(names)} /proc/kallsyms").splitlines()
    found = {line.split()[2]: int(line.split()[0], 16) for line in lines}
    return [found[name] for name in names]


def _break(guest, processor, gdb, kind, address):
    """Has the guest come by a break point, looks at it there, and lets it go on."""
    name = f"name{kind}"
    length = len(processor.trap)
    original = gdb.memory(address, length)
    gdb.insert(kind, address, length)
    equal("the instruction at the break point", gdb.memory(address, length), processor.trap if kind == SOFTWARE else original)
    gdb.resume()
    command = f"hostname {name}"
    guest.console.begin(command)
    gdb.stopped()
    equal("where the guest stopped", hex(gdb.register(processor.pc)), hex(address))
    argument = gdb.word(gdb.register(processor.argument) + processor.saved_argument)
    equal("the system call's argument", gdb.memory(argument, len(name)), name.encode())
    gdb.remove(kind, address, length)
    equal("the instruction after the break point", gdb.memory(address, length), original)
    places = {address}
    for _ in range(4):
        gdb.step()
        places.add(gdb.register(processor.pc))
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
    processor = PROCESSORS[setting.architecture]
    call, variable = symbols(guest, processor.system_call, VARIABLE)
    gdb = Gdb(setting, "gdb", path)
    for kind in (SOFTWARE, HARDWARE):
        _break(guest, processor, gdb, kind, call)
        gdb.interrupt()
    written = _watch(guest, gdb, WRITE, variable, f"echo 7 >{FILE}")
    equal("the variable when it is written", written, 7 if processor.stops_after else VALUE)
    gdb.interrupt()
    equal("the variable when it is read", _watch(guest, gdb, ACCESS, variable, f"cat {FILE}"), 7)
    guest.check_cpus()
    guest.power_off()
