"""exits MACHINE migrate|snapshot TIMES: a guest that accesses devices all the time (guest/exits) is stopped, saved and restored.

    migrate   to a file, and by another QEMU
    snapshot  to its qcow2 disks; the guest goes on for a while, and is set back

A vCPU is often stopped at an exit. KVM_RUN with immediate_exit then has to finish the instruction before QEMU saves registers
and memory. The guest checks each datum. The row fails when a datum is wrong, and says how many were, of which device.
"""

import collections
import random
import re
import struct
import subprocess
import time

from rows.console import Failure
from rows.qemu import BOOT, Qemu

# The guest's disks, and their size in words of 4 bytes.
DEVICES = ("pio", "ahci", "virtio")
WORDS = 128 * 128
# Seconds until the guest, whose rounds take milliseconds, or QEMU must have gone on.
LIMIT = 60
# The longest time that the guest runs until it is stopped, in seconds.
PAUSE = 0.05
# Wrong data that a failure shows.
SHOWN = 20


def _disks(setting):
    """Makes the guest's disks: a word that depends on its place, everywhere."""
    raw = setting.path("raw")
    with open(raw, "wb") as file:
        file.write(struct.pack(f"<{WORDS}I", *(index * 0x9E3779B1 & 0xFFFFFFFF for index in range(WORDS))))
    for device in DEVICES:
        subprocess.run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", raw, setting.path(device)], check=True)


def _guest(setting, machine, name, *options):
    payload = ["-kernel", setting.material("exits/exits"), "-m", "16", "-serial", "null"]
    for device in DEVICES:
        payload += ["-blockdev", f"driver=qcow2,node-name={device},file.driver=file,file.filename={setting.path(device)}"]
    payload += ["-device", "isa-ide,id=pio,iobase=0x1e8,iobase2=0x3ee,irq=11", "-device", "ide-hd,bus=pio.0,drive=pio"]
    payload += ["-device", "ahci,id=ahci,addr=5", "-device", "ide-hd,bus=ahci.0,drive=ahci"]
    payload += ["-device", "virtio-blk-pci,addr=6,drive=virtio,queue-size=8,ioeventfd=off", "-device", "e1000,addr=7,romfile="]
    return Qemu(setting, machine, cpus=1, name=name, payload=payload, options=options)


def _rounds(guest, seconds=LIMIT):
    """Waits for two rounds, of which the second began after the guest was restored."""
    for _ in range(2):
        guest.console.expect(rb"round 0x[0-9a-f]+\n", seconds)


def _migrate(setting, machine, source, number):
    """Moves the guest to another QEMU by way of a file, and returns the other QEMU."""
    path = setting.path("state")
    target = _guest(setting, machine, f"target {number}", "-incoming", "defer")
    source.qmp.call("migrate", uri=f"exec:cat >{path}")
    source.qmp.poll("query-migrate", lambda result: result["status"] == "completed", LIMIT, 0.01)
    source.qmp.call("quit")
    if source.process.wait(LIMIT) != 0:
        raise Failure(f"{source.name} does not end well")
    target.qmp.call("migrate-incoming", uri=f"exec:cat {path}")
    return target


def _snapshot(guest):
    """Saves the guest's state, has it go on for a while, and sets it back."""
    state = {"tag": "row", "devices": DEVICES}
    guest.job("snapshot-save", vmstate=DEVICES[0], **state)
    time.sleep(random.uniform(0, PAUSE))
    guest.qmp.call("stop")
    guest.job("snapshot-load", vmstate=DEVICES[0], **state)
    guest.job("snapshot-delete", **state)
    # Skips the rounds that were printed before.
    guest.console.expect(rb"(?s).*", LIMIT)
    guest.qmp.call("cont")


def run(setting, machine, mode, times):
    _disks(setting)
    guest = _guest(setting, machine, "source")
    _rounds(guest, BOOT)
    for number in range(int(times)):
        time.sleep(random.uniform(0, PAUSE))
        if mode == "migrate":
            guest = _migrate(setting, machine, guest, number)
        else:
            _snapshot(guest)
        _rounds(guest)
    guest.qmp.call("quit")
    if guest.process.wait(LIMIT) != 0:
        raise Failure(f"{guest.name} does not end well")
    wrong = [line.decode() for console in setting.consoles for line in re.findall(rb"wrong .*", console.text)]
    if wrong:
        devices = collections.Counter(line.split(":")[0] for line in wrong)
        raise Failure(f"{len(wrong)} wrong data: {dict(devices)}\n" + "\n".join(wrong[:SHOWN]))
