# shellcheck shell=bash
# Packages that are only read, below $work, and the initrds that are made of them. Source apt.sh before.
#
#   work=DIR; source unpack.sh
#   once DIRECTORY COMMAND...             runs a command that fills $work/DIRECTORY, unless it has
#   unpack PACKAGE DIRECTORY
#   newest_kernel DIRECTORY REGEX...      the newest kernel whose name matches the first expression that finds one
#   make_initrd FILE KERNEL BUSYBOX COMPILER MODULE...

guests=$(dirname "${BASH_SOURCE[0]}")

# Runs a command that fills a directory below $work, once.
once() { # directory, command
    local directory="$work/$1"
    shift
    if [ ! -e "$directory/.complete" ]; then
        rm -rf "$directory"
        "$@"
        touch "$directory/.complete"
    fi
}

unpack() { once "$2" apt_unpack "$1" "$work/$2"; } # package, directory

# Unpacks the newest kernel whose name matches, with the modules that Ubuntu has in a package of their own.
newest_kernel() { # directory, regular expressions in the order in which they are tried
    local pattern kernel=''
    for pattern in "${@:2}"; do
        [ -n "$kernel" ] || kernel=$(apt_newest "$pattern")
    done
    [ -n "$kernel" ] || die "apt offers no kernel like ${*:2}"
    apt_unpack "$kernel" "$work/$1"
    case $kernel in *-generic) apt_unpack "${kernel/image/modules}" "$work/$1" ;; esac
    echo "${kernel#linux-image-}" >"$work/$1/name"
}

# Adds a module to an initrd's tree, after the modules on which it depends. init loads the modules in this order. If
# the kernel has the module built in, there is no file to add.
add_module() { # tree, directory of the kernel, name
    local file name=${3//_/-} number depends dependency
    file=$(find "$2" -name "${name//-/[-_]}.ko*" | head -n1)
    [ -n "$file" ] || return 0
    ! compgen -G "$1/modules/[0-9][0-9][0-9]-$name.ko" >/dev/null || return 0
    case $file in
    *.xz) xz -dc "$file" ;;
    *.zst) zstd -qdc "$file" ;;
    *.gz) gzip -dc "$file" ;;
    *) cat "$file" ;;
    esac >"$1/$name.ko"
    depends=$(grep -ao 'depends=[[:alnum:],_-]*' "$1/$name.ko" | head -n1 || true)
    depends=${depends#depends=}
    for dependency in ${depends//,/ }; do add_module "$1" "$2" "$dependency"; done
    number=$(find "$1/modules" -type f | wc -l)
    mv "$1/$name.ko" "$1/modules/$((number + 100))-$name.ko"
}

# Makes an initrd, unless it is newer than all of its sources.
make_initrd() { # file, directory of the kernel, directory of busybox, compiler and options (none: no programs but busybox), modules
    local file="$work/$1" kernel="$work/$2" busybox="$work/$3" compiler tree module program
    read -ra compiler <<<"$4"
    if [ -e "$file" ] && [ -z "$(find "$guests/guest" "$guests/unpack.sh" "$kernel/.complete" -type f -newer "$file" | head -n1)" ]; then return; fi
    tree="$file.tree"
    rm -rf "$tree" && mkdir -p "$tree"/{bin,dev,proc,sys,tmp,modules}
    install "$(find "$busybox" -path '*bin/busybox' -type f | head -n1)" "$tree/bin/busybox"
    install "$guests/guest/init" "$tree/init"
    if [ ${#compiler[@]} -gt 0 ]; then
        # Some programs are for one architecture.
        for program in "$guests"/guest/*.c "$guests/guest/$("${compiler[0]}" -dumpmachine | cut -d- -f1)"/*.c; do
            [ -e "$program" ] || continue
            "${compiler[@]}" -Wall -Wextra -Werror -static -o "$tree/bin/$(basename "$program" .c)" "$program"
        done
    fi
    for module in "${@:5}"; do add_module "$tree" "$kernel" "$module"; done
    (cd "$tree" && find . | cpio --quiet -o -H newc >"$file.new")
    mv "$file.new" "$file"
    rm -rf "$tree"
}
