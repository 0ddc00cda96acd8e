//! The programs that the guests execute: each kind of access that exits, alone and together with others.

use crate::long_mode::{CODE, DATA, HANDLERS, IDT, MEMORY, Machine, STACK};
use kvm_bindings::kvm_regs;
use slat_kvm::VcpuFd;

/// The address of the devices, both guest-physical and linear.
pub const DEVICE: u64 = MEMORY;
/// The number of the hypercall that the client carries out (`KVM_HC_MAP_GPA_RANGE`).
pub const MAP_GPA_RANGE: u64 = 12;

/// Code that starts with the registers that [`begin`] sets, and to which a HLT is appended.
#[derive(Clone, Copy)]
pub struct Program {
    pub name: &'static str,
    pub code: &'static [u8],
}

macro_rules! programs {
    ($($name:literal: $code:literal,)*) => {
        &[$(Program { name: $name, code: $code },)*]
    };
}

/// pushfq; or dword [rsp],0x100; popfq
pub const SET_TF: &[u8] = b"\x9c\x81\x0c\x24\x00\x01\x00\x00\x9d";

/// mov esp,STACK; pushfq; and dword [rsp],~0x100; popfq; hlt
pub const END: &[u8] = b"\xbc\x00\x00\x1f\x00\x9c\x81\x24\x24\xff\xfe\xff\xff\x9d\xf4";

pub const PROGRAMS: &[Program] = programs! {
    "mov eax,[rbx]": b"\x8b\x03",
    "mov rax,[rbx+8]": b"\x48\x8b\x43\x08",
    "movzx eax,byte [rbx]": b"\x0f\xb6\x03",
    "mov [rbx],rax": b"\x48\x89\x03",
    "mov [rbx+0xffc],rax": b"\x48\x89\x83\xfc\x0f\0\0",
    "mov rax,[rbx+0xffc]": b"\x48\x8b\x83\xfc\x0f\0\0",
    "mov rax,[rbx-4]": b"\x48\x8b\x43\xfc",
    "mov [rbx-4],rax": b"\x48\x89\x43\xfc",
    "movsb from the device": b"\x48\x89\xde\xa4",
    "movsq to the device": b"\x48\x89\xdf\x48\xa5",
    "movsd in the device": b"\x48\x89\xde\x48\x8d\x7b\x40\xa5",
    "rep movsd from the device": b"\x48\x89\xde\xf3\xa5",
    "rep movsd to the device": b"\x48\x89\xdf\xf3\xa5",
    "rep movsb in the device": b"\x48\x89\xde\x48\x8d\x7b\x40\xf3\xa4",
    "rep movsb into the device from memory": b"\x48\x8d\x7b\xfe\xb9\x05\0\0\0\xf3\xa4",
    "rep stosd": b"\x48\x89\xdf\xf3\xab",
    "std; rep stosw": b"\x48\x89\xdf\xfd\x66\xf3\xab\xfc",
    "lodsd": b"\x48\x89\xde\xad",
    "rep lodsb": b"\x48\x89\xde\xf3\xac",
    "repne scasb": b"\x48\x89\xdf\xf2\xae",
    "repe cmpsb": b"\x48\x89\xde\x48\x8d\x7b\x40\xf3\xa6",
    "push [rbx]": b"\xff\x33",
    "pop [rbx]": b"\x8f\x03",
    "a stack in the device": b"\x48\x89\xec\x50\x59\x9c\x9d\x54\x58",
    "call and ret on it": b"\x48\x89\xec\xe8\x01\0\0\0\x90\x58\x6a\x05\x5a\xe8\0\0\0\0\x48\x83\x04\x24\x06\xc3\x90\x90",
    "int and iretq on it": b"\x48\x89\xec\xcd\x30\x90",
    "enter and leave on it": b"\x48\x89\xec\xc8\x10\0\x02\xc9",
    "add [rbx],ecx": b"\x01\x0b",
    "add ecx,[rbx]": b"\x03\x0b",
    "adc [rbx+0xffe],ecx": b"\x11\x8b\xfe\x0f\0\0",
    "lock inc [rbx]": b"\xf0\xff\x03",
    "xchg [rbx],eax": b"\x87\x03",
    "lock cmpxchg [rbx],ecx": b"\xf0\x0f\xb1\x0b",
    "cmpxchg8b [rbx]": b"\x0f\xc7\x0b",
    "xadd [rbx],ecx": b"\x0f\xc1\x0b",
    "bts [rbx],ecx": b"\x0f\xab\x0b",
    "not [rbx]; neg [rbx]": b"\xf7\x13\xf7\x1b",
    "rol [rbx],cl": b"\xd3\x03",
    "shld [rbx],eax,3": b"\x0f\xa4\x03\x03",
    "mul [rbx]": b"\xf7\x23",
    "div [rbx]": b"\x31\xd2\xf7\x33",
    "imul ecx,[rbx],3": b"\x6b\x0b\x03",
    "cmovz ecx,[rbx]": b"\x0f\x44\x0b",
    "setz [rbx]": b"\x0f\x94\x03",
    "cmp eax,[rbx]; jnz": b"\x3b\x03\x75\x01\x90\x90",
    "test [rbx],eax; jz": b"\x85\x03\x74\x01\x90\x90",
    "cmp byte [rbx],7; jb": b"\x80\x3b\x07\x72\x01\x90\x90",
    "mov ds,[rbx]": b"\x8e\x1b",
    "sgdt [rbx]": b"\x0f\x01\x03",
    "movups xmm0,[rbx]": b"\x0f\x10\x03",
    "movups [rbx+1],xmm0": b"\x0f\x11\x43\x01",
    "movdqu xmm1,[rbx-8]": b"\xf3\x0f\x6f\x4b\xf8",
    "movdqu [rbx-8],xmm1": b"\xf3\x0f\x7f\x4b\xf8",
    "paddd xmm0,[rbx]": b"\x66\x0f\xfe\x03",
    "cvtsi2sd xmm1,[rbx]": b"\xf2\x0f\x2a\x0b",
    "fld1; fst qword [rbx]; fistp [rbx]": b"\xd9\xe8\xdd\x13\xdb\x1b",
    "fstp tbyte [rbx]": b"\xd9\xe8\xdb\x3b",
    "fnstcw [rbx]": b"\xd9\x3b",
    "fxsave and fxrstor": b"\x0f\xae\x45\x00\x0f\xae\x4d\x00",
    "in al,dx": b"\xec",
    "in eax,0x21": b"\xe5\x21",
    "out dx,ax": b"\x66\xef",
    "insb": b"\x6c",
    "rep insw": b"\xf3\x66\x6d",
    "std; rep insd": b"\xfd\xf3\x6d\xfc",
    "rep insb across pages": b"\xbf\xfe\xff\x10\x00\xb9\x05\0\0\0\xf3\x6c",
    "insd to the device": b"\x48\x89\xdf\x6d",
    "rep insb into the device": b"\x48\x89\xdf\xf3\x6c",
    "outsd": b"\x6f",
    "rep outsw": b"\xf3\x66\x6f",
    "rep outsb of the device": b"\x48\x89\xde\xf3\x6e",
    "a hypercall": b"\xb8\x0c\0\0\0\x53\xbb\0\x10\0\0\xb9\x01\0\0\0\x31\xd2\x0f\x01\xc1\x5b",
    "rdmsr": b"\xb9\0\0\x34\x12\x0f\x32",
    "wrmsr": b"\xb9\0\0\x34\x12\x0f\x30",
    "rdmsr that faults": b"\xb9\x01\0\x34\x12\x0f\x32",
    "wrmsr that faults": b"\xb9\x01\0\x34\x12\x0f\x30",
    "mov ss and an access in its shadow": b"\x8c\xd0\x8e\xd0\x8b\x03",
    "sti and an access in its shadow": b"\xfb\xec\xfa",
    "jmp [rbp]": b"\x48\x8d\x05\x07\0\0\0\x48\x89\x45\0\xff\x65\0\x90",
    "jmp far [rbp]": b"\x8d\x05\x0c\0\0\0\x89\x45\0\x66\xc7\x45\x04\x08\0\xff\x6d\0\x90",
    "sgdt and lgdt": b"\x0f\x01\x45\0\x0f\x01\x55\0",
    "sidt and lidt": b"\x0f\x01\x4d\0\x0f\x01\x5d\0",
    "stmxcsr and ldmxcsr": b"\x0f\xae\x5d\0\x0f\xae\x55\0",
    "smsw and lmsw": b"\x0f\x01\x65\0\x0f\x01\x75\0",
    "mov ss,[rbp] and an access in its shadow": b"\x66\xc7\x45\0\x10\0\x8e\x55\0\x8b\x03",
    "lar eax,[rbp]; verr [rbp]": b"\x66\xc7\x45\0\x10\0\x0f\x02\x45\0\x0f\x00\x65\0",
    "movbe eax,[rbx]; movbe [rbx],eax": b"\x0f\x38\xf0\x03\x0f\x38\xf1\x03",
    "crc32 eax,[rbx]": b"\xf2\x0f\x38\xf1\x03",
    "popcnt eax,[rbx]": b"\xf3\x0f\xb8\x03",
    "xlatb": b"\xd7",
    "movnti [rbx],eax": b"\x0f\xc3\x03",
    "maskmovdqu": b"\x48\x89\xdf\x66\x0f\x76\xc9\x66\x0f\xf7\xc1",
    "cmpxchg8b [rbx+0xffc]": b"\x0f\xc7\x8b\xfc\x0f\0\0",
    "lock cmpxchg [rbx-2],ecx": b"\xf0\x0f\xb1\x4b\xfe",
    "xchg [rbx-4],rax": b"\x48\x87\x43\xfc",
    "rep movsq from before the device": b"\x48\x8d\x73\xfd\xf3\x48\xa5",
    "rep movsq to before the device": b"\x48\x8d\x7b\xfd\xf3\x48\xa5",
    "repe cmpsq across both": b"\x48\x8d\x73\xfd\x48\x8d\x7b\x45\xf3\x48\xa7",
    "insd across both": b"\x48\x8d\x7b\xfe\x6d",
    "outsd across both": b"\x48\x8d\x73\xfe\x6f",
    "pcmpistri xmm0,[rbx],8": b"\x66\x0f\x3a\x63\x03\x08",
    "vmovups ymm0,[rbx]": b"\xc5\xfc\x10\x03",
    "vmovups [rbx+1],ymm0": b"\xc5\xfc\x10\x06\xc5\xfc\x11\x43\x01",
    "vmovups ymm0,[rbx-12]": b"\xc5\xfc\x10\x43\xf4",
    "vmovups [rbx-12],ymm0": b"\xc5\xfc\x10\x06\xc5\xfc\x11\x43\xf4",
    "vbroadcastss ymm0,[rbx]": b"\xc4\xe2\x7d\x18\x03",
    "vmaskmovps": b"\xc5\xed\x76\xd2\xc4\xe2\x6d\x2c\x03\xc4\xe2\x6d\x2e\x43\x20",
    "vpgatherdd at one address": b"\xc5\xed\x76\xd2\xc4\xe2\x6d\x90\x04\x8b",
    "vpgatherdd at many": b"\xc4\xe2\x7d\x31\x0e\xc5\xed\x76\xd2\xc4\xe2\x6d\x90\x04\x8b",
    "vpgatherdd of both": b"\xc4\xe2\x7d\x21\x0e\xc5\xed\x76\xd2\xc4\xe2\x6d\x90\x44\x8b\xfe",
};

/// mov eax,7; xor edx,edx; xsave [rbp]; xrstor [rbp]
pub const XSAVE: &[u8] = b"\xb8\x07\0\0\0\x31\xd2\x0f\xae\x65\0\x0f\xae\x6d\0";

/// The address at which the handlers count exceptions. Each vector has 4 bytes.
pub const COUNTS: u64 = DATA + 0x700;

/// Writes the handlers of exceptions, and data. Each handler counts. The handler of #DB returns, and the others end
/// the program.
pub fn prepare(machine: &Machine) {
    for vector in (0..20).filter(|vector| *vector != 2) {
        let count = COUNTS + 4 * vector;
        let mut handler = vec![0xff, 0x04, 0x25];
        handler.extend((count as u32).to_le_bytes());
        match vector {
            1 => handler.extend([0x48, 0xcf]),
            _ => handler.push(0xf4),
        }
        let at = HANDLERS + 16 * vector;
        machine.memory.write(at, &handler);
        let gate = at | 8 << 16 | 0x8e << 40;
        machine.memory.write(IDT + 16 * vector, &gate.to_le_bytes());
    }
    let data: Vec<u8> = (0..0x200u32).map(|at| (at * 29 + 5) as u8).collect();
    machine.memory.write(DATA, &data);
}

/// Enables AVX instructions for the guest, if the processor has them.
pub fn enable_avx(vcpu: &VcpuFd) {
    const OSXSAVE: u64 = 1 << 18;
    const X87_SSE_AVX: u64 = 7;
    let mut sregs = vcpu.get_sregs().unwrap();
    sregs.cr4 |= OSXSAVE;
    vcpu.set_sregs(&sregs).unwrap();
    let mut xcrs = vcpu.get_xcrs().unwrap();
    (xcrs.nr_xcrs, xcrs.xcrs[0].value) = (1, X87_SSE_AVX);
    vcpu.set_xcrs(&xcrs).unwrap();
}

/// The registers with which programs begin, in the order of their numbers.
const REGISTERS: [u64; 8] = [
    0x1234_5678,
    3,
    0x20,
    DEVICE,
    STACK,
    DEVICE + 0xa000,
    DATA,
    DATA + 0x800,
];

/// Sets the registers with which programs begin.
pub fn begin(regs: &mut kvm_regs) {
    let [rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi] = REGISTERS;
    *regs = kvm_regs {
        rax,
        rcx,
        rdx,
        rbx,
        rsp,
        rbp,
        rsi,
        rdi,
        rip: CODE,
        rflags: 2,
        ..Default::default()
    };
}

/// Returns a random program: a sequence of several programs, each of which begins with new values in the registers.
pub fn random(seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut below = |n: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 20) % n
    };
    let mut code = Vec::new();
    if below(3) == 0 {
        code.extend(SET_TF);
    }
    for _ in 0..8 {
        for (number, value) in REGISTERS.into_iter().enumerate() {
            let near = below(0x40);
            let value = match number {
                0 => below(1 << 32),
                1 => below(6),
                3 => {
                    *[DEVICE, DEVICE + 0xff0, DATA + 0x300]
                        .get(below(4) as usize)
                        .unwrap_or(&value)
                        + near
                }
                6 | 7 => {
                    *[value, DEVICE, DEVICE + 0x8000]
                        .get(below(4) as usize)
                        .unwrap_or(&value)
                        + near
                }
                _ => value,
            };
            code.push(0xb8 + number as u8);
            code.extend((value as u32).to_le_bytes());
        }
        let chosen = below(PROGRAMS.len() as u64) as usize;
        code.extend(PROGRAMS[chosen].code);
    }
    code.extend(END);
    code
}
