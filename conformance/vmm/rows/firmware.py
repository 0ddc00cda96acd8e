"""firmware memtest|grub: programs that run without an operating system.

    memtest   memtest86+ tests the memory for 20 seconds, with 2 CPUs
    grub      GRUB's rescue CD starts from SeaBIOS, is told by keys to use the serial port, reads the CD and switches the machine off
"""

import re
import time

from rows.console import Failure
from rows.qemu import BOOT, Qemu

SECONDS = 20
# The VGA's text: 25 lines of 80 characters, each with a byte of attributes.
SCREEN, SCREEN_BYTES = 0xB8000, 25 * 80 * 2
# What a key is called that is not named by its character.
KEYS = {" ": ["spc"], "\n": ["ret"], "_": ["shift", "minus"], ";": ["semicolon"]}


def _memtest(setting):
    payload = ["-kernel", setting.material("memtest/memtest.bin"), "-append", "console=ttyS0,115200"]
    guest = Qemu(setting, "pc", payload=payload)
    guest.console.expect(rb"Memtest86\+", BOOT)
    guest.console.expect(rb"Using: All Cores", BOOT)
    time.sleep(SECONDS)
    tests = {int(number) for number in re.findall(rb"#(\d+)  \[", guest.console.text)}
    errors = max(int(number) for number in re.findall(rb"Errors: *(\d+)", guest.console.text))
    print(f"note: tests {sorted(tests)}, {errors} errors")
    if errors != 0 or len(tests) < 2:
        raise Failure("the memory test did not go well")
    guest.qmp.call("quit")
    if guest.process.wait(60) != 0:
        raise Failure("QEMU does not end well")


def _wait_for_screen(setting, guest, text, seconds):
    path = setting.path("screen")
    end = time.monotonic() + seconds
    while True:
        guest.qmp.call("pmemsave", val=SCREEN, size=SCREEN_BYTES, filename=path)
        with open(path, "rb") as file:
            screen = file.read()[::2]
        if text in screen:
            return
        if time.monotonic() > end:
            lines = [screen[at : at + 80].decode("cp437").rstrip() for at in range(0, len(screen), 80)]
            raise Failure("\n".join([f"no {text} on the screen within {seconds} s", *lines]))
        time.sleep(0.1)


def _press(guest, character):
    keys = KEYS.get(character, [character])
    guest.qmp.call("send-key", keys=[{"type": "qcode", "data": key} for key in keys])


def _grub(setting):
    guest = Qemu(setting, "pc", payload=["-cdrom", setting.material("grub/cdrom.iso"), "-vga", "std"])
    _wait_for_screen(setting, guest, b"GNU GRUB", BOOT)
    _wait_for_screen(setting, guest, b"a command-line", 60)
    _press(guest, "c")
    _wait_for_screen(setting, guest, b"grub>", 60)
    line = "serial; terminal_input serial; terminal_output serial"
    for at, character in enumerate(line):
        _press(guest, character)
        _wait_for_screen(setting, guest, f"grub> {line[: at + 1]}".encode(), 60)
    _press(guest, "\n")
    guest.console.expect(rb"grub>", 60)
    guest.console.write("ls\r")
    guest.console.expect(rb"\(cd0?\)", 60)
    guest.console.write("ls (cd)/boot/grub/i386-pc/linux.mod\r")
    guest.console.expect(rb"[\r\n]linux\.mod", 60)
    guest.console.write("halt\r")
    if guest.qmp.event("SHUTDOWN", 60)["reason"] != "guest-shutdown":
        raise Failure("GRUB did not switch the machine off")
    if guest.process.wait(60) != 0:
        raise Failure("QEMU does not end well")


def run(setting, what):
    {"memtest": _memtest, "grub": _grub}[what](setting)
