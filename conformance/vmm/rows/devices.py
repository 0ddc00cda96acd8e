"""devices MACHINE FEATURE...: one guest with 2 CPUs uses the devices and services that the words name.

    disk      reads 64 MiB of a virtio disk, writes some; the host has the same bytes
    nvme      the same on an NVMe disk
    xhci      the same on a USB disk
    net       fetches a file from a server on this machine by virtio-net in user mode
    e1000     the same by Intel's network card
    memfd     guest memory is a shared memfd: the host finds there what the guest writes
    balloon   gives memory back and takes it again
    hotplug   gets a memory module while it runs, and uses it
    snapshot  is saved to a qcow2 disk, goes on, and is restored
    reboot    starts again

The devices that are not virtio need the generic kernel.
"""

import mmap
import os
import re
import subprocess
import time

from rows.console import Failure
from rows.content import MIB, DiskFile, Server, equal
from rows.qemu import BOOT, MEMORY, Qemu, linux


def _check_interrupts(guest, device, kind):
    """Checks that interrupts of this kind of a device came: "MSI", or "IO-APIC" for those by a pin."""
    for line in guest.console.run("cat /proc/interrupts").splitlines():
        fields = line.split()
        if any(field.startswith(device) for field in fields) and kind in line and any(map(int, fields[1 : 1 + guest.cpus])):
            return
    raise Failure(f"{device} did not interrupt by {kind}")


class Disk:
    """A virtio disk. Its interrupts are MSI-X by irqfd, its kicks go by ioeventfd."""

    def __init__(self, setting):
        self.disk = DiskFile(setting)
        drive = f"if=none,id=disk,format=raw,cache=writeback,file={self.disk.path}"
        self.options = ["-drive", drive, "-device", "virtio-blk-pci,drive=disk,serial=content,ioeventfd=on"]

    def check(self, guest):
        self.disk.check(guest.console.run, _disk(guest, "content"))
        _check_interrupts(guest, "virtio", "MSI")


class _OtherDisk:
    """A disk that is not virtio's, which is there under its name some time after the boot."""

    generic = True

    def __init__(self, setting):
        self.disk = DiskFile(setting, self.driver)
        drive = f"if=none,id={self.driver},format=raw,cache=writeback,file={self.disk.path}"
        self.options = ["-drive", drive] + self.devices

    def check(self, guest):
        guest.console.run(f"until [ -b {self.device} ]; do usleep 100000; done")
        self.disk.check(guest.console.run, self.device)
        _check_interrupts(guest, self.driver, "MSI")


class Nvme(_OtherDisk):
    """An NVMe disk."""

    driver, device = "nvme", "/dev/nvme0n1"
    devices = ["-device", "nvme,drive=nvme,serial=content"]


class Xhci(_OtherDisk):
    """A disk at a USB 3 controller."""

    driver, device = "xhci", "/dev/sda"
    devices = ["-device", "qemu-xhci", "-device", "usb-storage,drive=xhci"]


class Net:
    """virtio-net and QEMU's user-mode network, whose guest reaches this machine as 10.0.2.2."""

    card, interrupts = "virtio-net-pci", ("virtio", "MSI")

    def __init__(self, setting):
        self.server = Server(setting)
        self.options = ["-netdev", "user,id=net", "-device", f"{self.card},netdev=net,romfile="]

    def check(self, guest):
        self.server.check(guest.console.run, "10.0.2.15", "10.0.2.2")
        _check_interrupts(guest, *self.interrupts)


class E1000(Net):
    """Intel's network card, which interrupts by a pin."""

    generic = True
    card, interrupts = "e1000", ("eth0", "IO-APIC")


class Memfd:
    """Guest memory that other processes can map."""

    def __init__(self, setting):
        memory = f"memory-backend-memfd,id=memory,size={MEMORY}M,share=on"
        self.options = ["-object", memory, "-machine", "memory-backend=memory"]

    def check(self, guest):
        # The halves are only put together in the guest, so that the word is not there by having been typed.
        first, second = os.urandom(12).hex(), os.urandom(12).hex()
        guest.console.run(f"echo {first}-{second} | sed s/-/+/ >/tmp/word && sync")
        word = f"{first}+{second}".encode()
        directory = f"/proc/{guest.process.pid}/fd"
        for descriptor in os.listdir(directory):
            path = os.path.join(directory, descriptor)
            if "memfd:" not in os.readlink(path):
                continue
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size == MEMORY * MIB:
                    with mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as memory:
                        if memory.find(word) >= 0:
                            return
        raise Failure("what the guest wrote is not in its memory file")


class Balloon:
    """The balloon takes 192 MiB from the guest, and gives them back."""

    SMALL = MEMORY - 192

    def __init__(self, setting):
        self.options = ["-device", "virtio-balloon-pci"]

    def check(self, guest):
        run = guest.console.run
        before = _memory_free(guest)
        guest.qmp.call("balloon", value=self.SMALL * MIB)
        guest.qmp.poll("query-balloon", lambda result: result["actual"] == self.SMALL * MIB, 120)
        small = _memory_free(guest)
        if small > before - 150:
            raise Failure(f"the guest has {small} MiB free with the balloon, {before} MiB without")
        guest.qmp.call("balloon", value=MEMORY * MIB)
        guest.qmp.poll("query-balloon", lambda result: result["actual"] == MEMORY * MIB, 120)
        _use_memory(run, before * 3 // 4)


class Hotplug:
    """A memory module of 256 MiB, which Linux brings online."""

    SIZE = 256

    def __init__(self, setting):
        self.options = ["-m", f"{MEMORY},slots=2,maxmem=2G"]

    def check(self, guest):
        run = guest.console.run
        before = _memory_total(guest)
        guest.qmp.call("object-add", qom_type="memory-backend-ram", id="module", size=self.SIZE * MIB)
        guest.qmp.call("device_add", driver="pc-dimm", id="dimm", memdev="module")
        end = time.monotonic() + 60
        while _memory_total(guest) != before + self.SIZE:
            run("cd /sys/devices/system/memory; for m in memory*; do grep -q online $m/state || echo online >$m/state; done; true")
            if time.monotonic() > end:
                raise Failure(f"the guest has {_memory_total(guest)} MiB, not {before + self.SIZE}")
            time.sleep(0.2)
        _use_memory(run, _memory_free(guest) * 3 // 4)


class Snapshot:
    """The machine's state in a qcow2 disk."""

    def __init__(self, setting):
        self.file = setting.path("snapshots")
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", self.file, "64M"], check=True)
        block = f"driver=qcow2,node-name=snapshots,file.driver=file,file.filename={self.file}"
        self.options = ["-blockdev", block, "-device", "virtio-blk-pci,drive=snapshots,serial=snapshots"]

    def check(self, guest):
        run = guest.console.run
        disk = _disk(guest, "snapshots")
        run(f"word=old; echo old >/tmp/state; echo old | dd of={disk} conv=fsync")
        state = {"tag": "row", "vmstate": "snapshots", "devices": ["snapshots"]}
        guest.job("snapshot-save", **state)
        run(f"word=new; echo new >/tmp/state; echo new | dd of={disk} conv=fsync")
        equal("after the save", run(f"echo $word; cat /tmp/state; head -c 3 {disk}"), "new\nnew\nnew")
        # Restored while it runs: QEMU stops it for that, and must be told to go on.
        guest.qmp.call("stop")
        guest.job("snapshot-load", **state)
        guest.qmp.call("cont")
        equal("after the load", run(f"echo $word; cat /tmp/state; head -c 3 {disk}"), "old\nold\nold")
        guest.check_cpus()


class Reboot:
    """The guest starts again, in the same QEMU."""

    def __init__(self, setting):
        self.options = []

    def check(self, guest):
        first = guest.console.run("cat /proc/sys/kernel/random/boot_id")
        guest.qmp.call("set-action", reboot="reset")
        guest.console.write("reboot -f\n")
        if not guest.qmp.event("RESET", 60)["guest"]:
            raise Failure("the machine was reset, but not by the guest")
        guest.boot(BOOT)
        if guest.console.run("cat /proc/sys/kernel/random/boot_id") == first:
            raise Failure("the guest did not start again")


def _disk(guest, serial):
    return "/dev/" + guest.console.run(f"grep -l {serial} /sys/block/vd*/serial").split("/")[3]


def _memory(guest, line):
    text = guest.console.run("cat /proc/meminfo")
    return int(re.search(rf"{line}: *(\d+) kB", text)[1]) // 1024


def _memory_free(guest):
    return _memory(guest, "MemFree")


def _memory_total(guest):
    return _memory(guest, "MemTotal")


def _use_memory(run, mebibytes):
    """Has the guest write a pattern to as much memory and read it again."""
    run(f"pattern {mebibytes} 0", 240)


FEATURES = {
    "disk": Disk,
    "nvme": Nvme,
    "xhci": Xhci,
    "net": Net,
    "e1000": E1000,
    "memfd": Memfd,
    "balloon": Balloon,
    "hotplug": Hotplug,
    "snapshot": Snapshot,
    "reboot": Reboot,
}


def run(setting, machine, *words):
    features = [(word, FEATURES[word](setting)) for word in words]
    options = [option for _, feature in features for option in feature.options]
    generic = any(getattr(feature, "generic", False) for _, feature in features)
    payload = linux(setting, "generic/vmlinuz", "generic/initrd") if generic else None
    guest = Qemu(setting, machine, payload=payload, options=options)
    guest.boot()
    for word, feature in features:
        begin = time.monotonic()
        feature.check(guest)
        guest.console.check()
        print(f"note: {word}: {time.monotonic() - begin:.1f} s")
    guest.power_off()
