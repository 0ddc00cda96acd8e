//! The registers in GDB's numbering and formats: GDB's features `org.gnu.gdb.i386.core`, `.sse` and `.segments`, and a
//! feature with the system registers.

use crate::arch::x86_64::regs;
use crate::gdb::{Register, block_bytes, fill_block};
use slat_x86::State;
use slat_x86::state::flags;

const CORE: &str = "org.gnu.gdb.i386.core";
const SSE: &str = "org.gnu.gdb.i386.sse";
const SEGMENTS: &str = "org.gnu.gdb.i386.segments";
const SYSTEM: &str = "slat.system";

/// The number of registers.
const COUNT: usize = 67;

/// All registers, in GDB's order. A register's number is its position.
pub const REGISTERS: [Register; COUNT] = table();

/// The number of bytes of the values of all registers, one after another.
pub const BLOCK: usize = block_bytes(&REGISTERS);

/// The number of RIP.
const RIP: usize = 16;
const RFLAGS: usize = 17;
const SELECTORS: usize = 18;
const ST: usize = 24;
const X87: usize = 32;
const XMM: usize = 40;
const MXCSR: usize = 56;
const BASES: usize = 57;
const CONTROL: usize = 59;

const fn table() -> [Register; COUNT] {
    const GPRS: [&str; 16] = [
        "rax", "rbx", "rcx", "rdx", "rsi", "rdi", "rbp", "rsp", "r8", "r9", "r10", "r11", "r12",
        "r13", "r14", "r15",
    ];
    const SELECTOR_NAMES: [&str; 6] = ["cs", "ss", "ds", "es", "fs", "gs"];
    const ST_NAMES: [&str; 8] = ["st0", "st1", "st2", "st3", "st4", "st5", "st6", "st7"];
    const X87_NAMES: [&str; 8] = [
        "fctrl", "fstat", "ftag", "fiseg", "fioff", "foseg", "fooff", "fop",
    ];
    const XMM_NAMES: [&str; 16] = [
        "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",
        "xmm11", "xmm12", "xmm13", "xmm14", "xmm15",
    ];
    const CONTROL_NAMES: [&str; 8] = [
        "k_gs_base",
        "cr0",
        "cr2",
        "cr3",
        "cr4",
        "cr8",
        "efer",
        "cs_base",
    ];
    let mut table = [Register::new("", 8, "int64", CORE); COUNT];
    let mut at = 0;
    while at < COUNT {
        let (name, bytes, kind, feature) = match at {
            0..RIP => (GPRS[at], 8, "int64", CORE),
            RIP => ("rip", 8, "code_ptr", CORE),
            RFLAGS => ("eflags", 4, "i386_eflags", CORE),
            SELECTORS..ST => (SELECTOR_NAMES[at - SELECTORS], 4, "int32", CORE),
            ST..X87 => (ST_NAMES[at - ST], 10, "i387_ext", CORE),
            X87..XMM => (X87_NAMES[at - X87], 4, "int", CORE),
            XMM..MXCSR => (XMM_NAMES[at - XMM], 16, "vec128", SSE),
            MXCSR => ("mxcsr", 4, "int", SSE),
            BASES => ("fs_base", 8, "int64", SEGMENTS),
            58 => ("gs_base", 8, "int64", SEGMENTS),
            _ => (CONTROL_NAMES[at - CONTROL], 8, "int64", SYSTEM),
        };
        table[at] = Register::new(name, bytes, kind, feature);
        at += 1;
    }
    table
}

/// The CPU's indices of RAX to RSP, in GDB's order.
const GPR: [usize; 8] = [0, 3, 1, 2, 6, 7, 5, 4];

/// Returns the CPU's index of a general register.
fn gpr(register: usize) -> usize {
    GPR.get(register).copied().unwrap_or(register)
}

/// Returns the x87 tag word. GDB wants two bits for each register.
fn tag_word(state: &State) -> u32 {
    (0..8).fold(0, |word, register| match state.ftw >> register & 1 {
        0 => word | 3 << (2 * register),
        _ => word,
    })
}

/// Returns the value of a register.
fn value(state: &State, register: usize) -> u128 {
    let number = |value: u64| u128::from(value);
    match register {
        0..RIP => number(state.gpr[gpr(register)]),
        RIP => number(state.rip),
        RFLAGS => number(state.rflags),
        SELECTORS..ST => {
            let all = [
                &state.cs, &state.ss, &state.ds, &state.es, &state.fs, &state.gs,
            ];
            u128::from(all[register - SELECTORS].selector)
        }
        ST..X87 => {
            let image = state.to_fxsave();
            let at = 32 + 16 * (register - ST);
            let mut bytes = [0; 16];
            bytes[..10].copy_from_slice(&image[at..at + 10]);
            u128::from_le_bytes(bytes)
        }
        X87..XMM => u128::from(
            [
                state.fcw.into(),
                state.fsw.into(),
                tag_word(state),
                (state.fip >> 32) as u32,
                state.fip as u32,
                (state.fdp >> 32) as u32,
                state.fdp as u32,
                state.fop.into(),
            ][register - X87],
        ),
        XMM..MXCSR => state.xmm[register - XMM],
        MXCSR => state.mxcsr.into(),
        _ => number(
            [
                state.fs.base,
                state.gs.base,
                state.kernel_gs_base,
                state.cr0,
                state.cr2,
                state.cr3,
                state.cr4,
                state.cr8,
                state.efer,
                state.cs.base,
            ][register - BASES],
        ),
    }
}

/// Writes the values of all registers.
pub(crate) fn get(state: &State, to: &mut [u8; BLOCK]) {
    fill_block(&REGISTERS, |register| value(state, register), to);
}

/// Sets a register. Returns `false` for a value of the wrong size, and for a register that cannot be set without
/// further checks: selectors, system registers, and the x87's registers except ST0 to ST7.
pub(crate) fn set(state: &mut State, register: usize, value: &[u8]) -> bool {
    let Some(wide) = (REGISTERS.get(register)).and_then(|known| known.parse(value)) else {
        return false;
    };
    let value = wide as u64;
    match register {
        0..RIP => state.gpr[gpr(register)] = value,
        RIP => state.rip = value,
        RFLAGS => state.rflags = value & regs::FLAGS | flags::ALWAYS,
        ST..X87 => {
            let mut image = state.to_fxsave();
            let at = 32 + 16 * (register - ST);
            image[at..at + 10].copy_from_slice(&wide.to_le_bytes()[..10]);
            state.set_fxsave(&image);
        }
        XMM..MXCSR => state.xmm[register - XMM] = wide,
        MXCSR => {
            let mut image = state.to_fxsave();
            image[24..28].copy_from_slice(&wide.to_le_bytes()[..4]);
            state.set_fxsave(&image);
        }
        BASES => state.fs.base = value,
        58 => state.gs.base = value,
        _ => return false,
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use slat_x86::state::{MXCSR_MASK, MXCSR_MM};

    /// Returns the offset of a register's value in the block.
    fn offset(register: usize) -> usize {
        block_bytes(&REGISTERS[..register])
    }

    #[test]
    fn what_is_set_is_read() {
        let mut state = State::reset();
        let mut before = [0; BLOCK];
        get(&state, &mut before);
        for (register, Register { name, bytes, .. }) in REGISTERS.iter().enumerate() {
            let value: Vec<u8> = (1..=*bytes as u8).collect();
            if !set(&mut state, register, &value) {
                continue;
            }
            let mut block = [0; BLOCK];
            get(&state, &mut block);
            let at = offset(register)..offset(register) + bytes;
            match *name {
                "eflags" => assert_eq!(state.rflags, 0x0403_0201 & regs::FLAGS | flags::ALWAYS),
                "mxcsr" => assert_eq!(state.mxcsr, 0x0403_0201 & (MXCSR_MASK | MXCSR_MM)),
                _ => assert_eq!(block[at], value, "{name}"),
            }
        }
        assert_eq!(state.gpr[3], 0x0807_0605_0403_0201, "rbx");
        assert!(!set(&mut state, COUNT - 1, &[0; 8]), "cs_base");
        assert!(!set(&mut state, RIP, &[0; 4]) && !set(&mut state, COUNT, &[]));
    }

    /// This test also reads the registers that cannot be set.
    #[test]
    fn each_name_has_its_own_value() {
        let mut state = State::reset();
        let bases = [&mut state.fs, &mut state.gs, &mut state.cs].map(|segment| &mut segment.base);
        for (number, base) in bases.into_iter().enumerate() {
            *base = 0x50 + number as u64;
        }
        let segments = [
            &mut state.cs,
            &mut state.ss,
            &mut state.ds,
            &mut state.es,
            &mut state.fs,
            &mut state.gs,
        ];
        for (number, segment) in segments.into_iter().enumerate() {
            segment.selector = 0x60 + number as u16;
        }
        state.gpr = std::array::from_fn(|number| 0x100 + number as u64);
        (state.rip, state.rflags) = (0x200, 0x246);
        (state.cr0, state.cr2, state.cr3) = (0x300, 0x302, 0x303);
        (state.cr4, state.cr8, state.efer) = (0x304, 0x308, 0x309);
        (state.kernel_gs_base, state.mxcsr) = (0x400, 0x1f81);
        (state.fcw, state.fsw, state.fop) = (0x37f, 0x4500, 0x123);
        (state.fip, state.fdp) = (0x11_2222_3333, 0x44_5555_6666);
        // `ftw` has one bit for each register, which is set if the register is in use. GDB's tag word has two bits for
        // each register, which are set if the register is empty.
        state.ftw = 0b1010_0101;
        let mut block = [0; BLOCK];
        get(&state, &mut block);
        let value = |name: &str| {
            let number = REGISTERS.iter().position(|it| it.name == name).unwrap();
            let mut bytes = [0; 8];
            let len = REGISTERS[number].bytes;
            bytes[..len].copy_from_slice(&block[offset(number)..][..len]);
            u64::from_le_bytes(bytes)
        };
        // The registers in the CPU's order.
        let gprs = [
            "rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi", "r8", "r9", "r10", "r11",
            "r12", "r13", "r14", "r15",
        ];
        let gprs = (0x100..).zip(gprs).map(|(value, name)| (name, value));
        let selectors = (0x60..).zip(["cs", "ss", "ds", "es", "fs", "gs"]);
        let others = [
            ("rip", 0x200),
            ("eflags", 0x246),
            ("fctrl", 0x37f),
            ("fstat", 0x4500),
            ("ftag", 0x33cc),
            ("fiseg", 0x11),
            ("fioff", 0x2222_3333),
            ("foseg", 0x44),
            ("fooff", 0x5555_6666),
            ("fop", 0x123),
            ("mxcsr", 0x1f81),
            ("fs_base", 0x50),
            ("gs_base", 0x51),
            ("cs_base", 0x52),
            ("k_gs_base", 0x400),
            ("cr0", 0x300),
            ("cr2", 0x302),
            ("cr3", 0x303),
            ("cr4", 0x304),
            ("cr8", 0x308),
            ("efer", 0x309),
        ];
        let selectors = selectors.map(|(value, name)| (name, value));
        for (name, expected) in gprs.chain(selectors).chain(others) {
            assert_eq!(value(name), expected, "{name}");
        }
    }

    #[test]
    fn the_numbers_are_those_of_gdb() {
        let number = |name| REGISTERS.iter().position(|it| it.name == name).unwrap();
        let known = [
            ("rip", 16),
            ("eflags", 17),
            ("st0", 24),
            ("fop", 39),
            ("mxcsr", 56),
        ];
        for (name, expected) in known {
            assert_eq!(number(name), expected, "{name}");
        }
    }
}
