# shellcheck shell=bash disable=SC2154 # The variables are run's.
# Programs whose compilers, or whose libraries, take minutes to fetch: read by `run --full`.

command -v go >/dev/null || install golang-go
for cgo in 0 1; do
    (cd "$here/go" && CGO_ENABLED=$cgo GOFLAGS=-buildvcs=false go build -o "$scratch/go-cgo$cgo" .)
    try "slat run -- a Go program, CGO_ENABLED=$cgo" "$slat" run -- "$scratch/go-cgo$cgo"
done

# These are the crate's tests, linked statically for musl, and a program that uses rustix.
target=x86_64-unknown-linux-musl
rustup target add "$target" >/dev/null 2>&1 || true
cp -r "$here/rustix" "$scratch/rustix"
mv "$scratch/rustix/manifest.toml" "$scratch/rustix/Cargo.toml"
cargo build -q --manifest-path "$scratch/rustix/Cargo.toml" --target-dir "$scratch/rustix/target"
try 'slat run -- a Rust program on rustix' "$slat" run -- "$scratch/rustix/target/debug/mixed"
(cd "$crate" && cargo test -q --no-run --target "$target" --target-dir "$scratch/musl")
for test in "$scratch/musl/$target"/debug/deps/first_vm-*; do
    [[ "$test" == *.d ]] || try 'slat run -- a Rust program for musl' "$slat" run -- "$test"
done

command -v npm >/dev/null || install npm
npm install --silent --prefix "$scratch/node" koffi >/dev/null
chmod -R a+rX "$scratch/node"
cat >"$scratch/node/looked_up.js" <<'END'
const assert = require('assert'), fs = require('fs'), koffi = require('koffi');
const c = koffi.load('libc.so.6');
const open = c.func('int open(const char*, int, ...)'), ioctl = c.func('int ioctl(int, unsigned long, ...)');
for (const device of [open('/dev/kvm', 2), fs.openSync('/dev/kvm', 'r+')])
    assert(device >= 0 && ioctl(device, 0xae00, 'int', 0) == 12 && ioctl(device, 0xae01, 'int', 0) >= 0);
END
try 'slat run -- node looked_up.js' "$slat" run -- node "$scratch/node/looked_up.js"

# Java's interface to C functions has had several names. This name is Java 17's.
command -v java >/dev/null || install default-jdk-headless
if java --list-modules | grep -q '^jdk.incubator.foreign@'; then
    cat >"$scratch/LookedUp.java" <<'END'
import java.lang.invoke.MethodType;
import jdk.incubator.foreign.*;

public class LookedUp {
    public static void main(String[] arguments) throws Throwable {
        var linker = CLinker.getInstance();
        var c = CLinker.systemLookup();
        var open = linker.downcallHandle(c.lookup("open").get(), MethodType.methodType(int.class, MemoryAddress.class, int.class),
            FunctionDescriptor.of(CLinker.C_INT, CLinker.C_POINTER, CLinker.C_INT));
        var ioctl = linker.downcallHandle(c.lookup("ioctl").get(), MethodType.methodType(int.class, int.class, long.class, long.class),
            FunctionDescriptor.of(CLinker.C_INT, CLinker.C_INT, CLinker.C_LONG, CLinker.C_LONG));
        var path = CLinker.toCString("/dev/kvm", ResourceScope.globalScope()).address();
        int device = (int) open.invokeExact(path, 2);
        if (device < 0 || (int) ioctl.invokeExact(device, 0xae00L, 0L) != 12 || (int) ioctl.invokeExact(device, 0xae01L, 0L) < 0)
            throw new Exception("no KVM at " + device);
    }
}
END
    try 'slat run -- java LookedUp.java' "$slat" run -- java --add-modules jdk.incubator.foreign \
        --enable-native-access=ALL-UNNAMED "$scratch/LookedUp.java"
fi

# A VMM in Go, in the version of the module proxy.
GOBIN="$scratch" CGO_ENABLED=0 go install github.com/bobuhiro11/gokvm@latest
"$here/../vmm/materials" "$root/target/conformance/vmm"
cp "$root/target/conformance/vmm/"{vmlinuz,initrd} "$scratch"
cat >"$scratch/gokvm.sh" <<'END'
cd "$(dirname "$0")"
./slat run -- ./gokvm boot -k vmlinuz -i initrd -m 512M -c 1 \
    -p "console=ttyS0 earlyprintk=serial noapic noacpi notsc nowatchdog" >tmp/console 2>&1 < <(sleep 200) &
for _ in $(seq 200); do
    if grep -q "Run /init as init process" tmp/console; then kill $!; exit 0; fi
    sleep 1
done
kill $!
tail -n 20 tmp/console
exit 1
END
try 'slat run -- gokvm boot' bash "$scratch/gokvm.sh"
