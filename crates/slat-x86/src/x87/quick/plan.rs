//! What a quick handler has to know about its instruction, besides the operands. It is computed when the instruction is
//! decoded.

use crate::op::Op;
use crate::state::flags::{AF, ALWAYS, ARITHMETIC, OF, SF};
use crate::x87::{Image, NO_IP, NO_OPCODE, Run, Stub};
use core::sync::atomic::{AtomicU16, Ordering::Relaxed};

/// The condition codes, as bits of the upper byte of the status word.
const CONDITIONS: u8 = 0x47;

/// What a quick handler has to know about its instruction. It is packed into the upper bits of `op.imm`. The low 16
/// bits are the instruction's own stub.
#[derive(Clone, Copy)]
pub(super) struct Plan {
    /// The stub that the handler calls. It may be that of another form of the instruction, which leaves fewer values on
    /// the host's stack.
    pub(super) stub: Stub,
    /// Which pointers and flags the instruction writes, apart from its result: bits such as [`IP`].
    pub(super) touches: u8,
    /// Which condition codes the instruction writes.
    pub(super) conditions: u8,
    /// The number of the second operand, ST(`other`).
    pub(super) other: u8,
    /// The number of the register that gets the result, ST(`destination`).
    pub(super) destination: u8,
    /// The number of registers that the instruction pops at its end.
    pub(super) pops: u8,
}

/// The bits of [`Plan::touches`]. The first three mean FIP, FDP and FOP. The last one means OF, SF and AF, which
/// comparisons clear on some CPUs.
pub(super) const IP: u8 = 1 << 0;
pub(super) const DP: u8 = 1 << 1;
pub(super) const OPCODE: u8 = 1 << 2;
pub(super) const OTHER_FLAGS: u8 = 1 << 3;

impl Plan {
    pub(super) fn pack(self) -> u64 {
        u64::from(self.stub.0) << 16
            | u64::from(self.touches) << 32
            | u64::from(self.conditions) << 40
            | u64::from(self.other) << 48
            | u64::from(self.destination) << 51
            | u64::from(self.pops) << 54
    }

    #[inline(always)]
    pub(super) fn of(op: &Op) -> Plan {
        Plan {
            stub: Stub((op.imm >> 16) as u16),
            touches: (op.imm >> 32) as u8,
            conditions: (op.imm >> 40) as u8,
            other: (op.imm >> 48) as u8 & 7,
            destination: (op.imm >> 51) as u8 & 7,
            pops: (op.imm >> 54) as u8 & 3,
        }
    }
}

/// Returns the result of [`probe`] for an instruction, which is probed only once per process.
pub(super) fn touched(stub: Stub) -> (u8, u8) {
    static FOUND: [AtomicU16; Stub::COUNT] = [const { AtomicU16::new(0) }; Stub::COUNT];
    /// The bit of a result that says that the instruction was probed: bit 15, which is not a condition code.
    const ASKED: u8 = 0x80;
    let found = &FOUND[usize::from(stub.0)];
    // Two threads may probe the instruction at the same time, with the same result.
    let known = match found.load(Relaxed) {
        0 => {
            let (touches, conditions) = probe(stub);
            let answer = u16::from_le_bytes([touches, conditions | ASKED]);
            found.store(answer, Relaxed);
            answer
        }
        known => known,
    };
    let [touches, conditions] = known.to_le_bytes();
    (touches, conditions & CONDITIONS)
}

/// Executes an instruction in a usual state, to find out which pointers, flags and condition codes it writes on this
/// host. CPUs differ: newer CPUs write FOP and FDP only if an exception is not masked, and a CPU may or may not change
/// a flag that the manuals leave undefined.
fn probe(stub: Stub) -> (u8, u8) {
    const ONE: [u8; 10] = [0, 0, 0, 0, 0, 0, 0, 0x80, 0xff, 0x3f];
    let mut st = [0; 80];
    for register in st.chunks_exact_mut(10) {
        register.copy_from_slice(&ONE);
    }
    let run = |conditions: u8, tags: u32| {
        let image = Image {
            fcw: 0x37f,
            fsw: u32::from(conditions) << 8,
            tags,
            ip: NO_IP,
            cs_and_opcode: NO_OPCODE,
            dp: 0,
            ds: 0,
            st,
        };
        let mut run = Run {
            image,
            memory: [0; 112],
            flags: ARITHMETIC | ALWAYS,
        };
        run.call(stub);
        run
    };
    // An instruction that pushes needs an empty ST(7); another one may need a full ST(7). So try both.
    const STACK_FAULT: u32 = 1 << 6;
    let tags = match run(0, 0).image.fsw & STACK_FAULT {
        0 => 0,
        _ => 3 << 14,
    };
    let (run, other) = (run(0, tags), run(CONDITIONS, tags));
    let bit = |is_set, bit| if is_set { bit } else { 0 };
    let touches = bit(run.image.has_ip(), IP)
        | bit(run.image.has_dp(), DP)
        | bit(run.image.has_opcode(), OPCODE)
        | bit(run.flags & (OF | SF | AF) == 0, OTHER_FLAGS);
    let same = !(run.image.fsw ^ other.image.fsw) >> 8;
    (touches, same as u8 & CONDITIONS)
}
