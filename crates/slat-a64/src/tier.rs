//! The functions that a tier provides to the meaning of instructions.
//!
//! [`meaning`](crate::meaning) defines each instruction by calls of these functions alone. In the interpreter, a value
//! is a number, and a function computes at once. In a compiler, a value is a value of the compiler's intermediate code,
//! and a function emits code. A compiler does not know the guest's values, so the meaning of an instruction cannot
//! branch on them; it chooses between values with [`Tier::select`]. Only the instruction's operands, which the decoder
//! has fixed, decide which functions are called.

use crate::insn::{AtomicOp, Hint, Order, SystemName};
use crate::simd::Function;

/// The order and the rights of an access.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// The order of this access relative to others.
    pub order: Order,
    /// The kind of instruction that makes the access.
    pub kind: Kind,
    /// The logarithm of the size in bytes of an element, if the access consists of several elements. The access must
    /// then be aligned like one element. `None`: the access is one element.
    pub element: Option<u8>,
}

/// The kind of instruction that makes an access.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    #[allow(missing_docs)]
    #[default]
    Ordinary,
    /// LDTR and STTR, which access memory with the rights of EL0.
    Unprivileged,
    /// An instruction of LSE, which reads and writes memory.
    Atomic,
    /// DC ZVA. The value is the instruction's operand, which is the address that its faults report.
    ZeroBlock(u64),
}

/// Where execution continues after an instruction.
pub(crate) enum Next<T: Tier + ?Sized> {
    Following,
    Jump(u64),
    /// Jumps to the address if the condition is true. Otherwise execution continues after the instruction.
    JumpIf(T::Bool, u64),
    Indirect(T::Value),
    /// Execution continues after the instruction. The run ends, and its caller gets the hint.
    Hint(Hint),
    /// Execution continues after the instruction. The instruction has changed state on which decoding or translation
    /// depends.
    Synchronize,
}

/// An exception that an instruction itself raises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exception {
    /// The instruction is UNDEFINED.
    Undefined,
    /// SVC with its immediate.
    Svc(u16),
    /// HVC with its immediate.
    Hvc(u16),
    /// SMC with its immediate.
    Smc(u16),
    /// BRK with its immediate.
    Brk(u16),
    /// HLT with its immediate.
    Hlt(u16),
    /// The illegal execution state: PSTATE.IL is set.
    Illegal,
    /// CPACR_EL1 traps Advanced SIMD and floating point.
    VectorTrap,
    /// SCTLR_EL1 traps WFI or WFE.
    WaitTrap(Hint),
    /// SCTLR_EL1 traps an access to a system register, or a system instruction.
    SystemTrap {
        /// The name of the register or instruction.
        name: SystemName,
        /// The general register of the instruction.
        rt: u8,
        /// Whether the instruction writes the general register (MRS).
        reads: bool,
    },
    /// The stack pointer, used as the base of an access, is not a multiple of 16.
    StackAlignment,
    /// The address of an access is not a multiple of its size.
    Alignment {
        /// The misaligned address.
        address: u64,
        /// Whether the access is a write.
        is_write: bool,
    },
}

pub(crate) trait Tier {
    /// A value of 64 bits.
    type Value: Copy;
    type Bool: Copy;
    /// A vector of 128 bits.
    type Vector: Copy;
    /// Why an instruction ended early. Such an instruction has changed nothing.
    type Stop;

    /// Returns the address of the current instruction.
    fn pc(&self) -> u64;
    /// Returns one of the registers X0 to X30.
    fn x(&mut self, r: u8) -> Self::Value;
    fn set_x(&mut self, r: u8, value: Self::Value);
    fn sp(&mut self) -> Self::Value;
    fn set_sp(&mut self, value: Self::Value);
    fn v(&mut self, r: u8) -> Self::Vector;
    fn set_v(&mut self, r: u8, value: Self::Vector);
    /// Returns the flags N, Z, C, V.
    fn flags(&mut self) -> [Self::Bool; 4];
    fn set_flags(&mut self, nzcv: [Self::Bool; 4]);

    fn number(&mut self, n: u64) -> Self::Value;
    fn truth(&mut self, is: bool) -> Self::Bool;
    fn add(&mut self, a: Self::Value, b: Self::Value) -> Self::Value;
    fn sub(&mut self, a: Self::Value, b: Self::Value) -> Self::Value;
    fn mul(&mut self, a: Self::Value, b: Self::Value) -> Self::Value;
    /// Returns the upper 64 bits of the 128-bit product.
    fn mul_high(&mut self, a: Self::Value, b: Self::Value, is_signed: bool) -> Self::Value;
    /// Divides, rounding towards zero. A division by 0 returns 0. A quotient that overflows wraps.
    fn div(&mut self, a: Self::Value, b: Self::Value, is_signed: bool) -> Self::Value;
    fn and(&mut self, a: Self::Value, b: Self::Value) -> Self::Value;
    fn or(&mut self, a: Self::Value, b: Self::Value) -> Self::Value;
    fn xor(&mut self, a: Self::Value, b: Self::Value) -> Self::Value;
    fn not(&mut self, a: Self::Value) -> Self::Value;
    /// Shifts to the left. The counts of all shift functions are below 64.
    fn shl(&mut self, a: Self::Value, count: Self::Value) -> Self::Value;
    fn shr(&mut self, a: Self::Value, count: Self::Value) -> Self::Value;
    fn sar(&mut self, a: Self::Value, count: Self::Value) -> Self::Value;
    fn ror(&mut self, a: Self::Value, count: Self::Value) -> Self::Value;
    fn zero_extend(&mut self, a: Self::Value, bits: u32) -> Self::Value;
    fn sign_extend(&mut self, a: Self::Value, bits: u32) -> Self::Value;
    fn leading_zeros(&mut self, a: Self::Value) -> Self::Value;
    fn reverse_bits(&mut self, a: Self::Value) -> Self::Value;
    fn swap_bytes(&mut self, a: Self::Value) -> Self::Value;
    /// Returns the CRC of the low `bits` bits of `value`, continued from `crc`.
    fn crc(
        &mut self,
        crc: Self::Value,
        value: Self::Value,
        bits: u32,
        castagnoli: bool,
    ) -> Self::Value;

    fn is_zero(&mut self, a: Self::Value) -> Self::Bool;
    /// Whether `a` is less than `b`, unsigned.
    fn is_less(&mut self, a: Self::Value, b: Self::Value) -> Self::Bool;
    fn bit(&mut self, a: Self::Value, n: u32) -> Self::Bool;
    fn both(&mut self, a: Self::Bool, b: Self::Bool) -> Self::Bool;
    fn either(&mut self, a: Self::Bool, b: Self::Bool) -> Self::Bool;
    fn differ(&mut self, a: Self::Bool, b: Self::Bool) -> Self::Bool;
    fn opposite(&mut self, a: Self::Bool) -> Self::Bool;
    /// Returns 1 if `a` is true, else 0.
    fn widened(&mut self, a: Self::Bool) -> Self::Value;
    fn select(&mut self, which: Self::Bool, a: Self::Value, b: Self::Value) -> Self::Value;
    fn select_bool(&mut self, which: Self::Bool, a: Self::Bool, b: Self::Bool) -> Self::Bool;

    /// Makes a vector from its low half and its high half.
    fn vector(&mut self, low: Self::Value, high: Self::Value) -> Self::Vector;
    fn low(&mut self, v: Self::Vector) -> Self::Value;
    fn high(&mut self, v: Self::Vector) -> Self::Value;

    /// Computes a vector operation, which may read FPCR and set bits of FPSR.
    fn compute(&mut self, function: Function, operands: [Self::Vector; 3]) -> Self::Vector;

    /// Computes a vector operation whose result is N, Z, C, V.
    fn compare(&mut self, function: Function, operands: [Self::Vector; 3]) -> [Self::Bool; 4] {
        let flags = self.compute(function, operands);
        self.flags_of(flags)
    }
    /// Returns N, Z, C, V from the low four bits of a vector.
    fn flags_of(&mut self, bits: Self::Vector) -> [Self::Bool; 4] {
        let bits = self.low(bits);
        [3, 2, 1, 0].map(|n| self.bit(bits, n))
    }

    /// Loads 1 << `size` bytes, at most 8, zero-extended.
    fn load(
        &mut self,
        address: Self::Value,
        size: u8,
        access: Access,
    ) -> Result<Self::Value, Self::Stop>;
    /// Stores the low 1 << `size` bytes, at most 8.
    fn store(
        &mut self,
        address: Self::Value,
        size: u8,
        value: Self::Value,
        access: Access,
    ) -> Result<(), Self::Stop>;
    fn load_vector(
        &mut self,
        address: Self::Value,
        access: Access,
    ) -> Result<Self::Vector, Self::Stop>;
    fn store_vector(
        &mut self,
        address: Self::Value,
        value: Self::Vector,
        access: Access,
    ) -> Result<(), Self::Stop>;
    /// Loads 1 << `size` bytes, at most 16. The other bytes of the vector are zeros.
    #[inline(always)]
    fn load_part(
        &mut self,
        address: Self::Value,
        size: u8,
        access: Access,
    ) -> Result<Self::Vector, Self::Stop> {
        if size == 4 {
            return self.load_vector(address, access);
        }
        let low = self.load(address, size, access)?;
        let zero = self.number(0);
        Ok(self.vector(low, zero))
    }
    /// Stores the low 1 << `size` bytes of a vector, at most 16.
    #[inline(always)]
    fn store_part(
        &mut self,
        address: Self::Value,
        size: u8,
        value: Self::Vector,
        access: Access,
    ) -> Result<(), Self::Stop> {
        if size == 4 {
            return self.store_vector(address, value, access);
        }
        let low = self.low(value);
        self.store(address, size, low, access)
    }
    /// Returns the address of the second value of a pair. `size` is the logarithm of one value's bytes.
    #[inline(always)]
    fn second_of_pair(&mut self, address: Self::Value, size: u8) -> Self::Value {
        let bytes = self.number(1 << size);
        self.add(address, bytes)
    }
    /// Checks that both stores of a pair will succeed.
    #[inline(always)]
    fn prepare_pair(
        &mut self,
        address: Self::Value,
        size: u8,
        access: Access,
    ) -> Result<(), Self::Stop> {
        let each = Access {
            element: Some(size),
            ..access
        };
        self.prepare_stores(address, 2 << size, each)
    }
    /// Loads two adjacent values of 1 << `size` bytes, one after the other, each as [`load`](Self::load) does.
    #[inline(always)]
    fn load_pair(
        &mut self,
        address: Self::Value,
        size: u8,
        access: Access,
    ) -> Result<[Self::Value; 2], Self::Stop> {
        let first = self.load(address, size, access)?;
        let address = self.second_of_pair(address, size);
        Ok([first, self.load(address, size, access)?])
    }
    /// Stores two adjacent values of 1 << `size` bytes, each as [`store`](Self::store) does. If either store would
    /// fail, stores nothing.
    #[inline(always)]
    fn store_pair(
        &mut self,
        address: Self::Value,
        size: u8,
        values: [Self::Value; 2],
        access: Access,
    ) -> Result<(), Self::Stop> {
        self.prepare_pair(address, size, access)?;
        self.store(address, size, values[0], access)?;
        let address = self.second_of_pair(address, size);
        self.store(address, size, values[1], access)
    }
    /// Loads two adjacent vectors of 1 << `size` bytes, one after the other, each as [`load_part`](Self::load_part)
    /// does.
    #[inline(always)]
    fn load_vector_pair(
        &mut self,
        address: Self::Value,
        size: u8,
        access: Access,
    ) -> Result<[Self::Vector; 2], Self::Stop> {
        let first = self.load_part(address, size, access)?;
        let address = self.second_of_pair(address, size);
        Ok([first, self.load_part(address, size, access)?])
    }
    /// Stores the low 1 << `size` bytes of each of two vectors at adjacent addresses, as
    /// [`store_part`](Self::store_part) does. If either store would fail, stores nothing.
    #[inline(always)]
    fn store_vector_pair(
        &mut self,
        address: Self::Value,
        size: u8,
        values: [Self::Vector; 2],
        access: Access,
    ) -> Result<(), Self::Stop> {
        self.prepare_pair(address, size, access)?;
        self.store_part(address, size, values[0], access)?;
        let address = self.second_of_pair(address, size);
        self.store_part(address, size, values[1], access)
    }
    /// Checks that stores to these bytes will succeed. Call before the first of several stores.
    fn prepare_stores(
        &mut self,
        address: Self::Value,
        bytes: u32,
        access: Access,
    ) -> Result<(), Self::Stop>;
    /// Stores zeros to the block of memory that contains an address (DC ZVA).
    fn zero_block(&mut self, address: Self::Value) -> Result<(), Self::Stop>;
    /// Ends the instruction if the stack pointer must be a multiple of 16, but is not.
    fn check_stack(&mut self) -> Result<(), Self::Stop>;
    /// Ends the instruction if the address is not a multiple of `bytes`.
    fn check_alignment(
        &mut self,
        address: Self::Value,
        bytes: u32,
        is_write: bool,
    ) -> Result<(), Self::Stop>;
    fn atomic(
        &mut self,
        op: AtomicOp,
        address: Self::Value,
        size: u8,
        operand: Self::Value,
        access: Access,
    ) -> Result<Self::Value, Self::Stop>;
    /// Compares 1 << `size` bytes, at most 16, with the first value, and stores the second value if they are equal.
    /// Returns the old bytes.
    fn compare_exchange(
        &mut self,
        address: Self::Value,
        size: u8,
        values: [Self::Vector; 2],
        access: Access,
    ) -> Result<Self::Vector, Self::Stop>;
    /// Records the address and the value of an exclusive load of 1 << `size` bytes.
    fn mark_exclusive(&mut self, address: Self::Value, size: u8, value: Self::Vector);
    /// Stores the value if the last exclusive load has read the same bytes, and these bytes still have the loaded
    /// value. In any case, drops the record of the exclusive load. Returns whether the bytes were stored.
    fn store_exclusive(
        &mut self,
        address: Self::Value,
        size: u8,
        value: Self::Vector,
        access: Access,
    ) -> Result<Self::Bool, Self::Stop>;
    fn clear_exclusive(&mut self);
    fn fence(&mut self);

    /// Ends the instruction with an exception.
    fn raise(&mut self, exception: Exception) -> Self::Stop;
    /// Ends the instruction, if Advanced SIMD and floating point are trapped.
    fn check_vectors(&mut self) -> Result<(), Self::Stop>;
    /// Ends the instruction, if the hint is trapped.
    fn check_hint(&mut self, hint: Hint) -> Result<(), Self::Stop>;
    /// Ends the instruction if DC ZVA is trapped. `rt` is its general register.
    fn check_zero_block(&mut self, name: SystemName, rt: u8) -> Result<(), Self::Stop>;
    /// Reads a system register. `rt` is the general register that gets the value, for the syndrome of a trap.
    fn read_system(&mut self, name: SystemName, rt: u8) -> Result<Self::Value, Self::Stop>;
    fn write_system(
        &mut self,
        name: SystemName,
        rt: u8,
        value: Self::Value,
    ) -> Result<(), Self::Stop>;
    fn set_pstate(&mut self, op1: u8, op2: u8, value: u8) -> Result<(), Self::Stop>;
    /// Executes SYS or SYSL with general register `rt`, and returns SYSL's result.
    fn system_instruction(
        &mut self,
        name: SystemName,
        rt: u8,
        reads: bool,
        value: Self::Value,
    ) -> Result<Self::Value, Self::Stop>;
    /// Returns from an exception. Returns the address where execution continues.
    fn exception_return(&mut self) -> Result<Self::Value, Self::Stop>;
}
