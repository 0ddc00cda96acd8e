//! The registers in GDB's numbering and formats: GDB's features `org.gnu.gdb.aarch64.core` and `.fpu`.

use crate::arch::aarch64::cpu::State;
use crate::gdb::{Register, block_bytes, fill_block};
use slat_a64::Pstate;

const CORE: &str = "org.gnu.gdb.aarch64.core";
const FPU: &str = "org.gnu.gdb.aarch64.fpu";

const SP: usize = 31;
const PC: usize = 32;
const CPSR: usize = 33;
const V: usize = 34;
const FPSR: usize = 66;
const FPCR: usize = 67;
/// The number of registers.
const COUNT: usize = 68;

/// All registers, in GDB's order. The position of a register is its number.
pub const REGISTERS: [Register; COUNT] = table();

/// The number of bytes of the values of all registers, one after another.
pub const BLOCK: usize = block_bytes(&REGISTERS);

const fn table() -> [Register; COUNT] {
    const X: [&str; 31] = [
        "x0", "x1", "x2", "x3", "x4", "x5", "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13",
        "x14", "x15", "x16", "x17", "x18", "x19", "x20", "x21", "x22", "x23", "x24", "x25", "x26",
        "x27", "x28", "x29", "x30",
    ];
    const VECTORS: [&str; 32] = [
        "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13",
        "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26",
        "v27", "v28", "v29", "v30", "v31",
    ];
    let mut table = [Register::new("", 8, "int64", CORE); COUNT];
    let mut at = 0;
    while at < COUNT {
        let (name, bytes, kind, feature) = match at {
            0..SP => (X[at], 8, "int64", CORE),
            SP => ("sp", 8, "data_ptr", CORE),
            PC => ("pc", 8, "code_ptr", CORE),
            CPSR => ("cpsr", 4, "int32", CORE),
            V..FPSR => (VECTORS[at - V], 16, "vec128", FPU),
            FPSR => ("fpsr", 4, "int", FPU),
            _ => ("fpcr", 4, "int", FPU),
        };
        table[at] = Register::new(name, bytes, kind, feature);
        at += 1;
    }
    table
}

/// Returns the value of a register.
fn value(state: &State, register: usize) -> u128 {
    match register {
        0..SP => state.x[register].into(),
        SP => state.sp.into(),
        PC => state.pc.into(),
        CPSR => (state.pstate().bits() | u64::from(state.nzcv())).into(),
        V..FPSR => state.v[register - V],
        FPSR => state.fpsr.into(),
        _ => state.fpcr.into(),
    }
}

/// Writes the values of all registers to `block`.
pub(crate) fn get(state: &State, block: &mut [u8; BLOCK]) {
    fill_block(&REGISTERS, |register| value(state, register), block);
}

/// Sets a register. Returns `false` for a value of another size, and for a PSTATE of a mode that does not exist.
pub(crate) fn set(state: &mut State, register: usize, value: &[u8]) -> bool {
    let Some(wide) = (REGISTERS.get(register)).and_then(|known| known.parse(value)) else {
        return false;
    };
    let value = wide as u64;
    match register {
        0..SP => state.x[register] = value,
        SP => state.sp = value,
        PC => state.pc = value,
        CPSR => {
            let Some(pstate) = Pstate::returned(value) else {
                return false;
            };
            state.set_pstate(pstate);
            state.set_nzcv(value as u32);
        }
        V..FPSR => state.v[register - V] = wide,
        FPSR => state.set_fpsr(value as u32),
        FPCR => state.set_fpcr(value as u32),
        _ => return false,
    }
    true
}
