//! Tests host memory that the client unmaps without an invalidation, with every kind of access. `KVM_RUN` returns
//! `EFAULT`, as in KVM, and does not retry for ever.
#![cfg(target_arch = "x86_64")]

mod common;

use common::*;
use slat_kvm::VcpuExit;
use std::time::Duration;

/// Returns the code of `out PORT, al`.
const fn out(port: u8) -> [u8; 2] {
    [0xe6, port]
}

/// The first bytes of the page at [`DATA`]: a far pointer into the page, and code that returns.
const PAGE: [u8; 8] = [0xc3, 0xc3, 0x00, 0x00, 0xc3, 0xc3, 0xc3, 0xc3];

/// The byte before the page: the first byte of an instruction that continues in the page.
const LAST: [u8; 1] = [0xb0];

/// The accesses, each with its code in real mode. SI, DI and SP point into the page, and BX points to the byte before
/// the page.
const ACCESSES: &[(&str, &[u8])] = &[
    ("a load", &[0xa0, 0x00, 0x30]),
    ("a store", &[0xa2, 0x00, 0x30]),
    ("a load across", &[0x8b, 0x07]),
    ("a store across", &[0x89, 0x07]),
    ("a locked addition", &[0xf0, 0xfe, 0x04]),
    ("a locked addition across", &[0xf0, 0xff, 0x07]),
    ("xchg", &[0x86, 0x04]),
    ("xchg across", &[0x87, 0x07]),
    ("cmpxchg8b", &[0x0f, 0xc7, 0x0c]),
    ("cmpxchg8b across", &[0x0f, 0xc7, 0x0f]),
    ("bts", &[0x0f, 0xba, 0x2c, 0x01]),
    ("push", &[0x50, 0x83, 0xc4, 0x02]),
    ("pop", &[0x58, 0x83, 0xec, 0x02]),
    ("pusha", &[0x60, 0x83, 0xc4, 0x10]),
    (
        "popa",
        &[0x57, 0x56, 0x55, 0x54, 0x53, 0x52, 0x51, 0x50, 0x61, 0x90],
    ),
    ("pushf", &[0x9c, 0x83, 0xc4, 0x02]),
    ("a near call", &[0xe8, 0x00, 0x00, 0x83, 0xc4, 0x02]),
    ("les", &[0xc4, 0x04]),
    ("lgdt", &[0x0f, 0x01, 0x14]),
    ("sgdt", &[0x0f, 0x01, 0x04]),
    ("sidt across", &[0x0f, 0x01, 0x0f]),
    ("lodsb", &[0xac, 0x4e]),
    ("stosb", &[0xaa, 0x4f]),
    ("scasb", &[0xae, 0x4f]),
    ("cmpsb", &[0xa6, 0x4e, 0x4f]),
    (
        "rep movsb from it",
        &[
            0xb9, 0x40, 0x00, 0x56, 0x57, 0xbf, 0x00, 0x28, 0xf3, 0xa4, 0x5f, 0x5e,
        ],
    ),
    (
        "rep movsb to it",
        &[
            0xb9, 0x40, 0x00, 0x56, 0x57, 0xbe, 0x00, 0x28, 0xf3, 0xa4, 0x5f, 0x5e,
        ],
    ),
    ("rep stosw", &[0xb9, 0x40, 0x00, 0x57, 0xf3, 0xab, 0x5f]),
    ("fild", &[0xdf, 0x04]),
    ("fild across", &[0xdf, 0x07]),
    ("fstcw", &[0xd9, 0x3c]),
    ("fldenv", &[0xd9, 0x24]),
    ("fstenv across", &[0xd9, 0x37]),
    ("fsave", &[0xdd, 0x34]),
    ("fxsave", &[0x0f, 0xae, 0x04]),
    ("setz", &[0x0f, 0x94, 0x04]),
    ("xlat", &[0x53, 0xbb, 0x00, 0x30, 0x31, 0xc0, 0xd7, 0x5b]),
    (
        "code",
        &[
            0x56, 0x89, 0xe5, 0xbc, 0x00, 0x24, 0xff, 0xd6, 0x89, 0xec, 0x5e,
        ],
    ),
    (
        "code across",
        &[0x89, 0xe5, 0xbc, 0x00, 0x24, 0xff, 0xd3, 0x89, 0xec],
    ),
];

/// Runs until an exit. Ends the run of a guest that does not exit within twenty seconds.
fn run(vcpu: &mut slat_kvm::VcpuFd) -> Result<String, i32> {
    let flag = &raw mut vcpu.get_kvm_run().immediate_exit as usize;
    let (ended, wait) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            if wait.recv_timeout(Duration::from_secs(20)).is_err() {
                // SAFETY: the address is in the vCPU's `kvm_run`, and the vCPU outlives the scope.
                unsafe { (flag as *mut u8).write_volatile(1) };
            }
        });
        let result = vcpu.run().map(|exit| match exit {
            VcpuExit::IoOut(port, _) => format!("port {port:#x}"),
            other => format!("{other:?}"),
        });
        let _ = ended.send(());
        result.map_err(|error| error.errno())
    })
}

#[test]
fn memory_that_is_gone_ends_the_run_whatever_the_access() {
    let mut wrong = Vec::new();
    for (name, access) in ACCESSES {
        // fninit; mov si, 0x3000; mov di, si; mov bx, 0x2fff; mov sp, 0x3040
        let setup = [
            0xdb, 0xe3, 0xbe, 0x00, 0x30, 0x89, 0xf7, 0xbb, 0xff, 0x2f, 0xbc, 0x40, 0x30,
        ];
        // The access is made several times before the memory is unmapped, because code is cached from its second run
        // on.
        let code = [&setup[..], access, access, access, &out(1), access, &out(2)].concat();
        let pages: &[u64] = if name.ends_with("across") {
            &[DATA, DATA - 0x1000]
        } else {
            &[DATA]
        };
        for page in pages {
            let Guest {
                mut vcpu,
                vm: _vm,
                memory,
                ..
            } = Guest::new(&code);
            memory.write(DATA - 1, &LAST);
            memory.write(DATA, &PAGE);
            assert_eq!(run(&mut vcpu), Ok("port 0x1".into()), "{name}, before");
            memory.take_away(*page);
            let after = run(&mut vcpu);
            if after != Err(libc::EFAULT) {
                wrong.push(format!("{name}, without {page:#x}: {after:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
