//! A guest in 64-bit mode that does a little of everything: its vCPU needs as much stack and heap as any other vCPU.
#![allow(dead_code)]

use crate::common::{Memory, set_slot};
use kvm_bindings::*;
use slat_kvm::{Kvm, VcpuExit, VcpuFd, VmFd};

/// The number of bytes of guest memory, which begins at address 0. The guest's tables map the addresses from here on
/// to devices, up to a limit.
pub const MEMORY: u64 = 0x40_0000;
pub const CODE: u64 = 0x1000;
pub const IDT: u64 = 0x2000;
const GDT: u64 = 0x3000;
const TABLES: u64 = 0x4000;
pub const HANDLERS: u64 = 0x7000;
pub const DATA: u64 = 0x10_0000;
pub const STACK: u64 = 0x1f_0000;

/// The number of rounds of the guest. In the first rounds the code runs for the first time and is cached. In later
/// rounds it runs from the cache.
pub const ROUNDS: u64 = 4;
/// The number of exits of one round: IN and OUT, an MMIO read and write, INSB, OUTSB, and the writes of FXSAVE.
pub const EXITS: u64 = 2 + 2 + 1 + 1 + 52;

/// The code of one round, up to its jump back.
const ROUND: &[&[u8]] = &[
    // mov edx,0x10; in al,dx; out dx,al
    b"\xba\x10\0\0\0\xec\xee",
    // mov ebx,0x400000; mov eax,[rbx]; mov [rbx],eax
    b"\xbb\0\0\x40\0\x8b\x03\x89\x03",
    // ud2
    b"\x0f\x0b",
    // mov ecx,0x600000; mov rax,[rcx]: a page fault
    b"\xb9\0\0\x60\0\x48\x8b\x01",
    // int 0x30
    b"\xcd\x30",
    // mov edi,0x100000; mov ecx,600; rep insb
    b"\xbf\0\0\x10\0\xb9\x58\x02\0\0\xf3\x6c",
    // mov esi,0x100000; mov ecx,5; rep outsb
    b"\xbe\0\0\x10\0\xb9\x05\0\0\0\xf3\x6e",
    // mov esi,0x100000; mov edi,0x110000; mov ecx,0x3000; rep movsb
    b"\xbe\0\0\x10\0\xbf\0\0\x11\0\xb9\0\x30\0\0\xf3\xa4",
    // mov edi,0x120000; mov ecx,0x3000; rep stosb
    b"\xbf\0\0\x12\0\xb9\0\x30\0\0\xf3\xaa",
    // fninit; fldpi; fstp tbyte [rdi]
    b"\xdb\xe3\xd9\xeb\xdb\x3f",
    // mov ebx,0x130000; fxsave [rbx]; fxrstor [rbx]; movaps xmm0,[rbx]; mulps xmm0,xmm0
    b"\xbb\0\0\x13\0\x0f\xae\x03\x0f\xae\x0b\x0f\x28\x03\x0f\x59\xc0",
    // mov ebx,0x400000; fxsave [rbx]
    b"\xbb\0\0\x40\0\x0f\xae\x03",
    // xor eax,eax; cpuid; mov ecx,0x2ff; rdmsr; wrmsr; rdtsc
    b"\x31\xc0\x0f\xa2\xb9\xff\x02\0\0\x0f\x32\x0f\x30\x0f\x31",
    // mov byte [rip+1],0x42; mov al,0: overwrites itself
    b"\xc6\x05\x01\0\0\0\x42\xb0\0",
    // mov ebp,0x1ff000; enter 16,31; leave
    b"\xbd\0\xf0\x1f\0\xc8\x10\0\x1f\xc9",
    // mov edi,0x100000; lock xadd [rdi],rax; add [rdi+0xffd],rax across two pages
    b"\xbf\0\0\x10\0\xf0\x48\x0f\xc1\x07\x48\x01\x87\xfd\x0f\0\0",
    // mov esp,0x1f0000; dec r15
    b"\xbc\0\0\x1f\0\x49\xff\xcf",
];

/// A VM, and its memory, which contains the guest.
pub struct Machine {
    pub vm: VmFd,
    pub kvm: Kvm,
    pub memory: Memory,
}

impl Machine {
    pub fn new() -> Self {
        Machine::of(Kvm::new().unwrap())
    }

    /// Makes a VM of `kvm`.
    pub fn of(kvm: Kvm) -> Self {
        let vm = kvm.create_vm().unwrap();
        let memory = Memory::new(MEMORY as usize);
        set_slot(&vm, &memory, 0, MEMORY);
        let mut code: Vec<u8> = ROUND.concat();
        // jnz to the beginning; hlt
        code.extend([0x0f, 0x85]);
        let back = -(code.len() as i32 + 4);
        code.extend(back.to_le_bytes());
        code.push(0xf4);
        memory.write(CODE, &code);
        let put = |at: u64, word: u64| memory.write(at, &word.to_le_bytes());
        put(GDT + 8, 0x00af_9b00_0000_ffff);
        put(GDT + 16, 0x00cf_9300_0000_ffff);
        // The tables map pages of 2 MiB: first memory, then devices. Later entries are not present.
        put(TABLES, (TABLES + 0x1000) | 3);
        put(TABLES + 0x1000, (TABLES + 0x2000) | 3);
        for page in 0..3 {
            put(TABLES + 0x2000 + 8 * page, page << 21 | 0x83);
        }
        // The three handlers: add qword [rsp],2; iretq - add rsp,8; add qword [rsp],3; iretq - iretq
        let handlers: [(u64, &[u8]); 3] = [
            (6, b"\x48\x83\x04\x24\x02\x48\xcf"),
            (14, b"\x48\x83\xc4\x08\x48\x83\x04\x24\x03\x48\xcf"),
            (0x30, b"\x48\xcf"),
        ];
        for (vector, handler) in handlers {
            let at = HANDLERS + 16 * vector;
            memory.write(at, handler);
            put(IDT + 16 * vector, at | 8 << 16 | 0x8e << 40);
        }
        Machine { vm, kvm, memory }
    }

    /// Sets the registers of `vcpu` to begin with the first round.
    pub fn start(&self, vcpu: &VcpuFd) {
        let cpuid = self.kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES);
        vcpu.set_cpuid2(&cpuid.unwrap()).unwrap();
        let mut sregs = vcpu.get_sregs().unwrap();
        let code = kvm_segment {
            limit: u32::MAX,
            selector: 8,
            type_: 11,
            present: 1,
            s: 1,
            l: 1,
            g: 1,
            ..Default::default()
        };
        let data = kvm_segment {
            selector: 16,
            type_: 3,
            l: 0,
            db: 1,
            ..code
        };
        sregs.cs = code;
        for segment in [
            &mut sregs.ds,
            &mut sregs.es,
            &mut sregs.ss,
            &mut sregs.fs,
            &mut sregs.gs,
        ] {
            *segment = data;
        }
        (sregs.gdt.base, sregs.gdt.limit) = (GDT, 0x17);
        (sregs.idt.base, sregs.idt.limit) = (IDT, 0xfff);
        (sregs.cr0, sregs.cr3, sregs.cr4, sregs.efer) = (0x8005_0033, TABLES, 0x620, 0xd00);
        vcpu.set_sregs(&sregs).unwrap();
        vcpu.set_regs(&kvm_regs {
            rip: CODE,
            rflags: 2,
            rsp: STACK,
            r15: ROUNDS,
            ..Default::default()
        })
        .unwrap();
    }

    /// Checks that the guest has executed all its rounds.
    pub fn check_end(&self, vcpu: &VcpuFd) {
        let regs = vcpu.get_regs().unwrap();
        assert_eq!((regs.r15, regs.rsp), (0, STACK));
        // XADD has exchanged 0x42 and the first byte from the port.
        let exchanged = (regs.rax as u8, self.byte(DATA));
        assert_eq!(exchanged, (input(0), input(0) + 0x42));
        for at in [0u64, 0x200, 599] {
            assert_eq!(self.byte(DATA + 0x1_0000 + at), input(at), "copied");
        }
    }

    fn byte(&self, at: u64) -> u8 {
        assert!(at < MEMORY);
        // SAFETY: the address is within the mapping, and the guest does not run.
        unsafe { self.memory.start.add(at as usize).read_volatile() }
    }
}

/// Returns byte number `at` of a string input from the port.
fn input(at: u64) -> u8 {
    (at * 7 + 3) as u8
}

/// Handles an exit. Returns `false` when the guest has ended.
pub fn answer(exit: VcpuExit<'_>) -> bool {
    match exit {
        VcpuExit::IoIn(_, data) => {
            for (at, byte) in data.iter_mut().enumerate() {
                *byte = input(at as u64);
            }
        }
        VcpuExit::MmioRead(_, data) => data.fill(9),
        VcpuExit::IoOut(..) | VcpuExit::MmioWrite(..) => {}
        VcpuExit::Hlt => return false,
        other => panic!("{other:?}"),
    }
    true
}
