"""unit-test PROGRAM CPUS stays|moves ARGUMENTS [QEMU'S OPTIONS...]: QEMU's virt machine runs a program of kvm-unit-tests for 64-bit Arm.

    PROGRAM      the file, of a build for QEMU
    moves        the guest moves to another QEMU where the program asks for it
    ARGUMENTS    the program's arguments, as one word

The program ends QEMU by a device, and so chooses its exit status. What the program has left out is printed.
"""

from rows.console import Failure, Skip
from rows.qemu import Qemu

PASSED, SKIPPED = 1, 77
# Seconds until the program asks to be moved, until it has been moved, and until it ends. The table has a shorter time for most.
ASKS, MOVES, ENDS = 300, 120, 3000
MEMORY = 128

# Kernels without these corrections hang in a test; slat has them.
ENVIRONMENT = "ERRATA_FORCE=y\n"


def _lines(qemus, mark):
    text = "\n".join(qemu.console.text.decode(errors="replace").replace("\r", "") for qemu in qemus)
    return [line for line in text.splitlines() if line.startswith(mark)]


def _move(setting, source, target):
    """Moves the guest from one QEMU to another, and tells the program that it has been moved."""
    path = setting.path("migration")
    target.qmp.call("migrate-incoming", uri=f"unix:{path}")
    source.qmp.call("migrate", uri=f"unix:{path}")

    def done(result):
        if result.get("status") in ("failed", "cancelled"):
            raise Failure(f"migration {result['status']}: {result.get('error-desc', '')}")
        return result.get("status") == "completed"

    source.qmp.poll("query-migrate", done, MOVES)
    source.qmp.call("quit")
    source.process.wait(MOVES)
    target.console.write("\n")


def run(setting, program, cpus, moves, arguments="", *options):
    with open(setting.path("environment"), "w") as environment:
        environment.write(ENVIRONMENT)
    payload = ["-kernel", program, "-append", arguments, "-initrd", setting.path("environment")]
    devices = ["-device", "virtio-serial-device", "-device", "virtconsole,chardev=end", "-chardev", "testdev,id=end"]
    devices += ["-device", "pci-testdev"]
    if "-m" not in options:
        devices += ["-m", str(MEMORY)]

    def qemu(name, *more):
        all_options = [*devices, *options, *more]
        return Qemu(setting, "virt,gic-version=host", cpus=int(cpus), payload=payload, options=all_options, name=name, cpu="host")

    qemus = [qemu("qemu")]
    if moves == "moves":
        qemus[0].console.expect(rb"Now migrate the VM|Skipped VM migration", ASKS)
        qemus.append(qemu("target", "-incoming", "defer"))
        _move(setting, *qemus)
    status = qemus[-1].process.wait(ENDS)
    failed, left_out = (_lines(qemus, mark) for mark in ("FAIL", "SKIP"))
    if status == SKIPPED:
        raise Skip("\n".join(left_out))
    if status != PASSED:
        raise Failure("\n".join([f"exit status {status}", *failed]))
    if not any(qemu.console.text for qemu in qemus):
        raise Failure("the program has printed nothing")
    for line in left_out:
        print(f"note: {line}")
