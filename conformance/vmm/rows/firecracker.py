"""firecracker CPUS [FEATURE...]: Firecracker boots Linux to a shell with all CPUs, and ends when the guest reboots.

    mmio       its devices are virtio-mmio, not PCI
    disk       reads 64 MiB of a virtio disk, writes some; the host has the same bytes
    net        fetches a file from a server on this machine
    snapshot   is saved, and goes on in a new process
    no-filter  without the VMM's own seccomp filters

A guest of Firecracker cannot power off: that it reboots ends the VMM, with status 0. FIRECRACKER_BIN names the program.
"""

import os

from rows.microvm import TAP, Devices, MicroVm, move
from rows.qemu import BOOT, MEMORY

# How the kernel has Firecracker end; arm64's way is PSCI alone.
RESET = "reboot=k"


def _start(setting, name, words):
    path = setting.path(f"{name}.socket")
    command = [os.environ["FIRECRACKER_BIN"], "--api-sock", path, "--id", name]
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
    devices.check(vmm)
    vmm.end("reboot -f")


def _restore(setting, vmm, words):
    """Saves the guest, ends its VMM, and returns another one with the guest."""
    state, memory = setting.path("state"), setting.path("memory")
    vmm.call("PATCH", "/vm", {"state": "Paused"})
    vmm.call("PUT", "/snapshot/create", {"snapshot_type": "Full", "snapshot_path": state, "mem_file_path": memory})
    vmm.process.kill()
    restored = _start(setting, "restored", words)
    backend = {"backend_path": memory, "backend_type": "File"}
    restored.call("PUT", "/snapshot/load", {"snapshot_path": state, "mem_backend": backend, "resume_vm": True})
    return restored
