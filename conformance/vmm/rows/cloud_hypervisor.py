"""cloud-hypervisor CPUS [FEATURE...]: cloud-hypervisor boots Linux to a shell with all CPUs, and powers off.

    disk       reads 64 MiB of a virtio disk, writes some; the host has the same bytes
    net        fetches a file from a server on this machine
    reboot     the guest starts again, in the same VMM
    snapshot   is saved, and goes on in a new process
    lazy       is saved, and goes on in a new process, which reads each page of memory when it is first needed: as an ordinary user, to
               whom the kernel refuses userfaultfd
    no-filter  without the VMM's own seccomp filters

CLOUD_HYPERVISOR_BIN names the program.
"""

import os

from rows.microvm import TAP, Devices, MicroVm, move, without_userfaultfd
from rows.qemu import BOOT, MEMORY


def _start(setting, name, words, options, user=()):
    path = setting.path(f"{name}.socket")
    command = [*user, os.environ["CLOUD_HYPERVISOR_BIN"], "--api-socket", path, *options]
    if "no-filter" in words:
        command += ["--seccomp", "false"]
    return MicroVm(setting, name, command, path)


def run(setting, cpus, *words):
    cpus = int(cpus)
    devices = Devices(setting, words)
    architecture = setting.architecture
    options = ["--kernel", setting.material(architecture.kernel), "--initramfs", setting.material("initrd")]
    options += ["--cmdline", architecture.command_line()]
    options += ["--cpus", f"boot={cpus}", "--memory", f"size={MEMORY}M", "--serial", "tty", "--console", "off"]
    if devices.disk:
        options += ["--disk", f"path={devices.disk.path},image_type=raw"]
    if devices.has_network:
        options += ["--net", f"tap={TAP}"]
    vmm = _start(setting, "cloud-hypervisor", words, options)
    vmm.console.ready(BOOT)
    vmm.console.check_cpus(cpus)
    if "reboot" in words:
        vmm.console.write("reboot -f\n")
        vmm.console.ready(BOOT)
        vmm.console.check_cpus(cpus)
    if "snapshot" in words or "lazy" in words:
        vmm = move(vmm, lambda vmm: _restore(setting, vmm, words))
        vmm.console.check_cpus(cpus)
    devices.check(vmm)
    vmm.end("poweroff -f")


def _restore(setting, vmm, words):
    """Saves the guest, ends its VMM, and returns another one with the guest."""
    directory = setting.path("snapshot")
    os.mkdir(directory)
    vmm.call("PUT", "/api/v1/vm.pause")
    vmm.call("PUT", "/api/v1/vm.snapshot", {"destination_url": f"file://{directory}"})
    vmm.process.kill()
    source, user = f"source_url=file://{directory}", ()
    if "lazy" in words:
        source += ",memory_restore_mode=ondemand"
        user = without_userfaultfd(setting)
    restored = _start(setting, "restored", words, ["--restore", source], user)
    restored.wait_for_socket()
    restored.call("PUT", "/api/v1/vm.resume")
    return restored
