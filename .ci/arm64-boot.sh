# shellcheck shell=bash disable=SC2154 # variables of arm64.sh
# A machine of QEMU's with two processors for 64-bit Arm, and Debian's kernel for it.
#
#   source .ci/arm64.sh; source .ci/arm64-boot.sh
#   machine_kernel DIR         fetches the kernel and busybox into DIR, once; false where no mirror of Debian is configured
#   machine_tree DIR           makes DIR/tree, the machine's first file system: busybox, and /init, to which the caller appends what to do
#   machine_libraries DIR      copies glibc there, for programs that are not static
#   machine_boot DIR SECONDS   boots DIR/tree, and copies the console to DIR/console; false if the machine does not end in time

command -v qemu-system-aarch64 >/dev/null || install qemu-system-arm
command -v cpio >/dev/null || install cpio
# shellcheck source=conformance/apt.sh
source conformance/apt.sh

machine_kernel() {
    [ ! -e "$1/vmlinuz" ] || return 0
    local kernel
    apt_init "$1"
    apt_architecture=arm64
    apt_suite "$1/suite" bookworm || return 1
    # The caller asks for the status, so an error does not end the script by itself.
    {
        apt_update && kernel=$(apt_newest '^linux-image-[0-9][0-9.-]*-cloud-arm64$') && [ -n "$kernel" ] &&
            apt_unpack "$kernel" "$1/kernel" && apt_unpack busybox-static "$1/busybox" &&
            cp "$1"/kernel/boot/vmlinuz-* "$1/vmlinuz"
    } || { echo "Debian's kernel for arm64 cannot be fetched" >&2; exit 1; }
}

machine_tree() {
    rm -rf "$1/tree"
    mkdir -p "$1/tree"/{bin,dev,proc,sys,tmp,root,lib,usr}
    ln -s ../bin "$1/tree/usr/bin"
    cp "$(find "$1/busybox" -path '*bin/busybox' -type f)" "$1/tree/bin/busybox"
    cat >"$1/tree/init" <<'INIT'
#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin HOME=/ RUST_BACKTRACE=1
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmp /tmp
# /dev/fd and its like, which programs expect.
ln -s /proc/self/fd /dev/fd
ifconfig lo 127.0.0.1
uname -a
INIT
    chmod +x "$1/tree/init"
}

machine_libraries() {
    local from=/usr/aarch64-linux-gnu/lib
    [ -z "$native" ] || from=/lib/aarch64-linux-gnu
    cp -L "$from"/{ld-linux-aarch64.so.1,libc.so.6,libm.so.6,libdl.so.2,libpthread.so.0,libgcc_s.so.1} "$1/tree/lib/"
}

machine_boot() {
    (cd "$1/tree" && find . | cpio --quiet -o -H newc >"$1/initrd") || return 1
    timeout --kill-after 5 "$2" qemu-system-aarch64 -M virt -cpu max,pauth-impdef=on -smp 2 -m 3072 \
        -accel tcg,thread=multi -nographic -nic none -no-reboot \
        -kernel "$1/vmlinuz" -initrd "$1/initrd" -append 'console=ttyAMA0 loglevel=4 panic=-1' </dev/null 2>&1 |
        tr -d '\r' | tee "$1/console"
}
