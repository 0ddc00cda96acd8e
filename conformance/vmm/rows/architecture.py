"""What rows have to know of the architecture of their guests."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """One architecture; a `Setting` has that of its guests."""

    # What `uname -m` says.
    machine: str
    # The material that VMMs start without firmware.
    kernel: str
    # The kernel's name of QEMU's first serial port, what its command line has besides, and how it resets QEMU.
    serial: str
    options: str
    reset: str
    # The CPU that has all that KVM offers.
    cpu: str
    # The files of the UEFI firmware's flash: its code, and its variables.
    firmware: tuple
    # How much slower than on x86-64 everything is: rows wait so many times longer, and move so many times fewer bytes.
    slowness: int = 1

    def command_line(self, serial=None):
        """Returns the kernel's command line for a VMM whose serial port is of this name, if not QEMU's."""
        return f"console={serial or self.serial} {self.options}"


X86_64 = Architecture(
    machine="x86_64",
    kernel="vmlinux",
    serial="ttyS0",
    options="earlyprintk=ttyS0 panic=-1",
    reset="reboot=t",
    cpu="host,migratable=off,-invtsc",
    firmware=("OVMF_CODE.fd", "OVMF_VARS.fd"),
)

# The VMM is itself emulated. The self-tests of cryptography are two thirds of the instructions of a boot, and each character on the
# console is an exit or two.
ARM64 = Architecture(
    machine="aarch64",
    kernel="vmlinuz",
    serial="ttyAMA0",
    options="panic=-1 loglevel=4 cryptomgr.notests",
    reset="",
    cpu="host",
    firmware=("AAVMF_CODE.fd", "AAVMF_VARS.fd"),
    slowness=16,
)
