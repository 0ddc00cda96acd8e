"""firecracker CPUS [FEATURE...]: Firecracker boots Linux to a shell with all CPUs, and ends when the guest reboots.

    mmio       its devices are virtio-mmio, not PCI
    disk       reads 64 MiB of a virtio disk, writes some; the host has the same bytes
    net        fetches a file from a server on this machine
    snapshot   is saved, and goes on in a new process
    lazy       is saved, and goes on in a new process, which gets each page of memory when it is first needed (pagefaults.c): as an
               ordinary user, to whom the kernel refuses userfaultfd
    no-filter  without the VMM's own seccomp filters

A guest of Firecracker cannot power off: that it reboots ends the VMM, with status 0. FIRECRACKER_BIN names the program.
"""

import os
import re
import subprocess

from rows.console import Failure
from rows.microvm import TAP, Devices, MicroVm, move, without_userfaultfd
from rows.process import Process
from rows.qemu import BOOT, MEMORY

# How the kernel has Firecracker end; arm64's way is PSCI alone.
RESET = "reboot=k"


def _start(setting, name, words, user=()):
    path = setting.path(f"{name}.socket")
    command = [*user, os.environ["FIRECRACKER_BIN"], "--api-sock", path, "--id", name]
    if "mmio" not in words:
        command.append("--enable-pci")
    if "no-filter" in words:
        command.append("--no-seccomp")
    vmm = MicroVm(setting, name, command, path)
    vmm.wait_for_socket()
    return vmm


def run(setting, cpus, *words):
    cpus = int(cpus)
    devices = Devices(setting, words)
    vmm = _start(setting, "firecracker", words)
    boot = {
        "kernel_image_path": setting.material(setting.architecture.kernel),
        "initrd_path": setting.material("initrd"),
        "boot_args": f"{setting.architecture.command_line('ttyS0')} {RESET}",
    }
    vmm.call("PUT", "/boot-source", boot)
    vmm.call("PUT", "/machine-config", {"vcpu_count": cpus, "mem_size_mib": MEMORY})
    if devices.disk:
        drive = {"drive_id": "disk", "path_on_host": devices.disk.path, "is_root_device": False, "is_read_only": False}
        vmm.call("PUT", "/drives/disk", drive)
    if devices.has_network:
        vmm.call("PUT", "/network-interfaces/net", {"iface_id": "net", "host_dev_name": TAP})
    vmm.call("PUT", "/actions", {"action_type": "InstanceStart"})
    vmm.console.ready(BOOT)
    vmm.console.check_cpus(cpus)
    if "snapshot" in words:
        vmm = move(vmm, lambda vmm: _restore(setting, vmm, words))
        vmm.console.check_cpus(cpus)
    if "lazy" in words:
        handlers = []
        vmm = move(vmm, lambda vmm: _restore_lazily(setting, vmm, words, handlers))
        vmm.console.check_cpus(cpus)
    devices.check(vmm)
    vmm.end("reboot -f")
    if "lazy" in words:
        _check_pages(setting, handlers[0])


def _save(setting, vmm):
    """Saves the guest, and ends its VMM. Returns the paths of its state and of its memory."""
    state, memory = setting.path("state"), setting.path("memory")
    vmm.call("PATCH", "/vm", {"state": "Paused"})
    vmm.call("PUT", "/snapshot/create", {"snapshot_type": "Full", "snapshot_path": state, "mem_file_path": memory})
    vmm.process.kill()
    return state, memory


def _load(vmm, state, backend):
    """Has a new VMM go on with the guest."""
    vmm.call("PUT", "/snapshot/load", {"snapshot_path": state, "mem_backend": backend, "resume_vm": True})
    return vmm


def _restore(setting, vmm, words):
    """Saves the guest, ends its VMM, and returns another one with the guest."""
    state, memory = _save(setting, vmm)
    restored = _start(setting, "restored", words)
    return _load(restored, state, {"backend_path": memory, "backend_type": "File"})


def _restore_lazily(setting, vmm, words, handlers):
    """Like `_restore`, but the memory comes from a handler in another process, which is added to `handlers`."""
    state, memory = _save(setting, vmm)
    user = without_userfaultfd(setting)
    program, path = setting.path("pagefaults"), setting.path("pagefaults.socket")
    source = os.path.join(os.path.dirname(__file__), "pagefaults.c")
    subprocess.run(["cc", "-O2", "-o", program, source], check=True)
    with open(setting.path("pages"), "wb") as pages:
        handlers.append(Process(setting, "pagefaults", [*user, program, path, memory], stdout=pages))
    restored = _start(setting, "restored", words, user)
    handler = {"backend_path": path, "backend_type": "Uffd"}
    return _load(restored, state, handler)


def _check_pages(setting, handler):
    """Checks that the handler has provided some pages of the guest, and not all."""
    if handler.wait(60) != 0:
        raise Failure("pagefaults has failed")
    with open(setting.path("pages"), encoding="ascii") as pages:
        found = re.fullmatch(r"(\d+) of (\d+) pages\n", pages.read())
    if not found or not 0 < int(found[1]) < int(found[2]):
        raise Failure(f"pagefaults: {found and found[0]}")
    print(found[0], end="")
