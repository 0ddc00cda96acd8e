"""board: slat-a64's and slat-gic's own board (crates/slat-a64/examples/linux), which `--qemu` names, boots Linux to a shell, and powers off.

The board has one CPU and a GICv3, and runs on this machine itself.
"""

from rows.content import equal
from rows.qemu import BOOT
from rows.terminal import Terminal


def run(setting):
    files = [setting.material("vmlinuz"), setting.material("initrd")]
    board = Terminal(setting, "board", [setting.qemu, *files, setting.architecture.command_line()])
    board.console.ready(BOOT)
    board.console.check_cpus(1)
    equal("the guest's machine", board.console.run("uname -m"), setting.architecture.machine)
    board.end("poweroff -f")
    for line in board.process.stderr().splitlines():
        print(f"note: {line}")
