#!/usr/bin/env python3
"""Takes the kernel's ELF file out of a bzImage: extract-vmlinux.py VMLINUZ VMLINUX."""

import gzip
import lzma
import struct
import subprocess
import sys


def payload(image):
    """Returns the compressed kernel: Linux's Documentation/arch/x86/boot.rst, payload_offset and payload_length."""
    if image[0x202:0x206] != b"HdrS" or struct.unpack_from("<H", image, 0x206)[0] < 0x208:
        raise SystemExit("not a bzImage of boot protocol 2.08 or later")
    setup_sectors = image[0x1F1] or 4
    offset, length = struct.unpack_from("<II", image, 0x248)
    start = (setup_sectors + 1) * 512 + offset
    return image[start : start + length]


def decompress(data):
    """Decompresses the payload. All formats but gzip are followed by four bytes, the size of what is in it."""
    if data.startswith(b"\x1f\x8b"):
        return gzip.decompress(data)
    if data.startswith(b"\xfd7zXZ\0"):
        return lzma.decompress(data[:-4])
    tools = {b"\x28\xb5\x2f\xfd": "zstd", b"\x02\x21\x4c\x18": "lz4"}
    tool = tools.get(data[:4])
    if tool is None:
        raise SystemExit(f"compressed in a way this does not know: {data[:6].hex()}")
    return subprocess.run([tool, "-qdc"], input=data[:-4], stdout=subprocess.PIPE, check=True).stdout


def main():
    source, target = sys.argv[1:]
    with open(source, "rb") as file:
        kernel = decompress(payload(file.read()))
    if not kernel.startswith(b"\x7fELF"):
        raise SystemExit("the payload is not an ELF file")
    with open(target, "wb") as file:
        file.write(kernel)


main()
