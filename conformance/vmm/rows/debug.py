"""debug MACHINE: QEMU's GDB stub stops a Linux guest with 2 CPUs where it is told to, and sees its registers and memory there.

    a break point in memory (an instruction is overwritten) and one in a debug register, at a system call that the guest's shell makes
    single steps
    a watch point for writes, and one for all accesses, at a variable of the kernel
"""

import struct
import time
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
    # Where a system call's first and second argument are among the registers that the kernel has saved, which are the function's
    # argument (struct pt_regs).
    saved: tuple
    # Whether QEMU 7.2 reads a program's memory while the kernel executes. On arm64 it obeys PSTATE.PAN.
    reads_programs: bool
    # Whether a watch point stops the CPU after the access, not before.
    stops_after: bool


PROCESSORS = {
    X86_64: Processor("__x64_sys_sethostname", b"\xcc", argument=5, pc=16, saved=(14 * 8, 13 * 8), reads_programs=True, stops_after=True),
    ARM64: Processor("__arm64_sys_sethostname", b"\x00\x00\x20\xd4", argument=0, pc=32, saved=(0, 8), reads_programs=False, stops_after=False),
}
# Where the guest sets a variable of the kernel, what the command line has set it to, and what no other word is.
FILE, VALUE, MARK = "/proc/sys/kernel/panic", -1, 0x5A17C0DE


def symbol(guest, name):
    """Returns the address of a function of the kernel."""
    return int(guest.console.run(f"grep -w {name} /proc/kallsyms").split()[0], 16)


def _resource(guest, name):
    """Returns the first and the last physical address of some part of the kernel, or of several."""
    lines = guest.console.run(f"grep '{name}' /proc/iomem").splitlines()
    return int(lines[0].split("-")[0], 16), int(lines[-1].split("-")[1].split()[0], 16)


def locate(setting, guest):
    """Returns the virtual and the physical address of the variable, which not all kernels tell: sets it and searches for it."""
    guest.console.run(f"echo {MARK} >{FILE}")
    first, last = _resource(guest, "Kernel data\\|Kernel bss")
    path = setting.path("data")
    guest.qmp.call("pmemsave", val=first, size=last + 1 - first, filename=path)
    guest.console.run(f"echo {VALUE} >{FILE}")
    with open(path, "rb") as file:
        data = file.read()
    mark = struct.pack("<I", MARK)
    if data.count(mark) != 1:
        raise Failure(f"{data.count(mark)} words of the kernel's data are {MARK:#x}")
    physical = first + data.index(mark)
    return physical - _resource(guest, "Kernel code")[0] + symbol(guest, "_stext"), physical


def _enter_kernel(gdb, address):
    """Has a stopped guest go on until the stub can read memory of the kernel. On arm64 QEMU 7.2 cannot while a program executes."""
    while not gdb.reads(address):
        gdb.resume()
        time.sleep(0.5)
        gdb.interrupt()


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
    text, size = (gdb.word(gdb.register(processor.argument) + offset) for offset in processor.saved)
    equal("the system call's second argument", size, len(name))
    if processor.reads_programs:
        equal("the system call's first argument", gdb.memory(text, size), name.encode())
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
    call = symbol(guest, processor.system_call)
    variable, _ = locate(setting, guest)
    gdb = Gdb(setting, "gdb", path)
    _enter_kernel(gdb, call)
    for kind in (SOFTWARE, HARDWARE):
        _break(guest, processor, gdb, kind, call)
        gdb.interrupt()
        _enter_kernel(gdb, call)
    written = _watch(guest, gdb, WRITE, variable, f"echo 7 >{FILE}")
    equal("the variable when it is written", written, 7 if processor.stops_after else VALUE)
    gdb.interrupt()
    _enter_kernel(gdb, call)
    equal("the variable when it is read", _watch(guest, gdb, ACCESS, variable, f"cat {FILE}"), 7)
    guest.check_cpus()
    guest.power_off()
