"""cloud-hypervisor CPUS [FEATURE...]: cloud-hypervisor boots Linux to a shell with all CPUs, and powers off.

    disk       reads 64 MiB of a virtio disk, writes some; the host has the same bytes
    net        fetches a file from a server on this machine
    reboot     the guest starts again, in the same VMM
    snapshot   is saved, and goes on in a new process
    no-filter  without the VMM's own seccomp filters

CLOUD_HYPERVISOR_BIN names the program.
"""

import os

from rows.content import DiskFile, Server
from rows.microvm import GUEST_ADDRESS, HOST_ADDRESS, TAP, MicroVm, network
from rows.qemu import BOOT, MEMORY

COMMAND_LINE = "console=ttyS0 earlyprintk=ttyS0 panic=-1"


def _start(setting, name, words, options):
    path = setting.path(f"{name}.socket")
    command = [os.environ["CLOUD_HYPERVISOR_BIN"], "--api-socket", path, *options]
    if "no-filter" in words:
        command += ["--seccomp", "false"]
    return MicroVm(setting, name, command, path)


def run(setting, cpus, *words):
    cpus = int(cpus)
    if "net" in words:
        network()
    options = ["--kernel", setting.material("vmlinux"), "--initramfs", setting.material("initrd"), "--cmdline", COMMAND_LINE]
    options += ["--cpus", f"boot={cpus}", "--memory", f"size={MEMORY}M", "--serial", "tty", "--console", "off"]
    if "disk" in words:
        disk = DiskFile(setting)
        options += ["--disk", f"path={disk.path},image_type=raw"]
    if "net" in words:
        server = Server(HOST_ADDRESS)
        options += ["--net", f"tap={TAP}"]
    vmm = _start(setting, "cloud-hypervisor", words, options)
    vmm.console.ready(BOOT)
    vmm.check_cpus(cpus)
    if "reboot" in words:
        vmm.console.write("reboot -f\n")
        vmm.console.ready(BOOT)
        vmm.check_cpus(cpus)
    if "snapshot" in words:
        vmm = _move(setting, vmm, words)
        vmm.check_cpus(cpus)
    if "disk" in words:
        disk.check(vmm.console.run, "/dev/vda")
    if "net" in words:
        server.check(vmm.console.run, GUEST_ADDRESS, HOST_ADDRESS)
    vmm.end("poweroff -f")


def _move(setting, vmm, words):
    """Saves the guest, ends its VMM, and has another one go on with it."""
    vmm.console.run("word=saved; echo saved >/tmp/state")
    directory = setting.path("snapshot")
    os.mkdir(directory)
    vmm.call("PUT", "/api/v1/vm.pause")
    vmm.call("PUT", "/api/v1/vm.snapshot", {"destination_url": f"file://{directory}"})
    vmm.process.kill()
    restored = _start(setting, "restored", words, ["--restore", f"source_url=file://{directory}"])
    restored.wait_for_socket()
    restored.call("PUT", "/api/v1/vm.resume")
    restored.console.run('test "$word" = saved && grep -q saved /tmp/state')
    return restored
