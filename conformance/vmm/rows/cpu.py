"""cpu MODEL [VENDOR]: a guest with one of QEMU's CPU models has what the model promises, and QEMU complains of nothing that it would not complain of
on a KVM host of that age. With the host's model, Linux finds that no vulnerability affects the CPU that
slat offers: amd, intel, or the one that the whole table has."""

import re
from pathlib import Path

from rows.console import Failure
from rows.qemu import Qemu

# For each model: how the CPU calls itself, and some of its features, which do not depend on the machine that runs the row.
MODELS = {
    "qemu64": ("QEMU Virtual CPU", "lm nx cx16 hypervisor"),
    "EPYC": ("AMD EPYC", "sse4_2 popcnt aes smep smap fsgsbase rdseed adx clflushopt sha_ni xsavec"),
    "Skylake-Server": ("Intel Xeon Processor", "sse4_2 popcnt aes smep smap fsgsbase rdseed adx pcid invpcid x2apic tsc_deadline_timer"),
    # Not rdseed: where the host is one of some AMD models, so is the guest, and Linux does not trust theirs.
    "host": ("", "sse4_2 popcnt aes smep smap fsgsbase adx pcid invpcid x2apic tsc_deadline_timer"),
    "max": ("", "sse4_2 popcnt aes smep smap fsgsbase adx pcid invpcid x2apic tsc_deadline_timer"),
}
# The vulnerabilities that Linux mitigates on every processor of AMD and Intel, because no bit says that one does not speculate.
OF_ALL = {"spectre_v1", "spectre_v2"}
# What QEMU may say, and why.
ALLOWED = [
    (r"'-mon' is deprecated", "the rows' own option, since QEMU 11"),
    (r"avx512\w+ \[bit|0DH:EAX \[bit [567]\]|0Dh,ecx=00h\]\.EAX\S* \[bit [567]\]", "AVX-512 and its state: many hosts have none, slat's CPU neither"),
    (r"\.(hle|rtm) \[bit", "TSX: switched off by the microcode of hosts that had it"),
    (r"requested feature: vPMU", "a performance monitor, which QEMU asks of Intel's processors: slat's CPU has none"),
    (r"\.(mmxext|fxsr-opt|cr8legacy|sse4a|misalignsse|osvw) \[bit", "AMD's own: a host of Intel says so, too"),
]
if " pku " not in Path("/proc/cpuinfo").read_text():
    ALLOWED.append((r"\.pku \[bit|0DH:EAX \[bit 9\]|0Dh,ecx=00h\]\.EAX\S* \[bit 9\]", "QEMU gives no keys to a guest that its host does not have"))


def check_vulnerabilities(guest):
    """Checks what Linux says of each vulnerability that it knows."""
    text = guest.console.run("cd /sys/devices/system/cpu/vulnerabilities && grep -H . *; cd /")
    found = dict(line.split(":", 1) for line in text.splitlines())
    affected = {name: state for name, state in found.items() if state != "Not affected" and name not in OF_ALL}
    if affected or "meltdown" not in found:
        raise Failure("\n".join(["vulnerabilities:", *(f"{name}: {state}" for name, state in (affected or found).items())]))


def run(setting, model, vendor=None):
    setting.cpu = vendor or setting.cpu
    name, features = MODELS[model]
    guest = Qemu(setting, "q35", cpu=None if model == "host" else model)
    guest.boot()
    if model == "host":
        check_vulnerabilities(guest)
    info = guest.console.run("cat /proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info)[1]
    flags = re.search(r"flags\s*: (.*)", info)[1].split()
    missing = set(features.split()) - set(flags)
    if name not in found or missing:
        raise Failure(f"the guest's CPU is {found!r} and has no {sorted(missing)}; it has: {' '.join(flags)}")
    guest.power_off()
    said = [line for line in guest.process.stderr().splitlines() if not any(re.search(text, line) for text, _ in ALLOWED)]
    if said:
        raise Failure("\n".join(["QEMU complains:", *said]))
