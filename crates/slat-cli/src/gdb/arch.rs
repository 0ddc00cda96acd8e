//! The description of the registers for GDB.

use std::fmt::Write as _;
use std::num::NonZeroUsize;
use std::sync::OnceLock;

use gdbstub::arch;
use slat_kvm::debugger::{BLOCK, REGISTERS, Register};

/// An x86-64 processor, in any mode.
pub enum Amd64 {}

impl arch::Arch for Amd64 {
    type Usize = u64;
    type Registers = Registers;
    type BreakpointKind = usize;
    type RegId = Number;

    fn target_description_xml() -> Option<&'static str> {
        static TEXT: OnceLock<String> = OnceLock::new();
        Some(TEXT.get_or_init(description))
    }
}

/// Types that GDB's x86 features name but do not define.
const FLAGS: &str = r#"<flags id="i386_eflags" size="4">
<field name="CF" start="0" end="0"/><field name="" start="1" end="1"/><field name="PF" start="2" end="2"/>
<field name="AF" start="4" end="4"/><field name="ZF" start="6" end="6"/><field name="SF" start="7" end="7"/>
<field name="TF" start="8" end="8"/><field name="IF" start="9" end="9"/><field name="DF" start="10" end="10"/>
<field name="OF" start="11" end="11"/><field name="NT" start="14" end="14"/><field name="RF" start="16" end="16"/>
<field name="VM" start="17" end="17"/><field name="AC" start="18" end="18"/><field name="VIF" start="19" end="19"/>
<field name="VIP" start="20" end="20"/><field name="ID" start="21" end="21"/>
</flags>
"#;
const VECTOR: &str = r#"<vector id="v4f" type="ieee_single" count="4"/><vector id="v2d" type="ieee_double" count="2"/>
<vector id="v16i8" type="int8" count="16"/><vector id="v8i16" type="int16" count="8"/>
<vector id="v4i32" type="int32" count="4"/><vector id="v2i64" type="int64" count="2"/>
<union id="vec128">
<field name="v4_float" type="v4f"/><field name="v2_double" type="v2d"/><field name="v16_int8" type="v16i8"/>
<field name="v8_int16" type="v8i16"/><field name="v4_int32" type="v4i32"/><field name="v2_int64" type="v2i64"/>
<field name="uint128" type="uint128"/>
</union>
"#;

/// Describes the registers in GDB's language.
fn description() -> String {
    let mut text = "<?xml version=\"1.0\"?><!DOCTYPE target SYSTEM \"gdb-target.dtd\">\n\
        <target version=\"1.0\">\n<architecture>i386:x86-64</architecture>\n"
        .to_owned();
    let mut open = "";
    for Register {
        name,
        bytes,
        kind,
        feature,
    } in &REGISTERS
    {
        if *feature != open {
            let end = if open.is_empty() { "" } else { "</feature>\n" };
            let types = match *kind {
                // The first of the core registers, and of the vectors.
                "int64" if open.is_empty() => FLAGS,
                "vec128" => VECTOR,
                _ => "",
            };
            let _ = write!(text, "{end}<feature name=\"{feature}\">\n{types}");
            open = feature;
        }
        let bits = 8 * bytes;
        let _ = writeln!(
            text,
            "<reg name=\"{name}\" bitsize=\"{bits}\" type=\"{kind}\"/>"
        );
    }
    text + "</feature>\n</target>"
}

/// The number of a register.
#[derive(Debug)]
pub struct Number(pub usize);

impl arch::RegId for Number {
    fn from_raw_id(id: usize) -> Option<(Self, Option<NonZeroUsize>)> {
        let register = REGISTERS.get(id)?;
        Some((Number(id), NonZeroUsize::new(register.bytes)))
    }
}

/// The values of all registers.
#[derive(Clone, Debug, PartialEq)]
pub struct Registers(pub [u8; BLOCK]);

impl Default for Registers {
    fn default() -> Self {
        Registers([0; BLOCK])
    }
}

impl Registers {
    /// Returns the numbers and the values.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &[u8])> {
        let mut rest = &self.0[..];
        REGISTERS.iter().enumerate().map(move |(number, register)| {
            let (value, after) = rest.split_at(register.bytes);
            rest = after;
            (number, value)
        })
    }

    /// Returns the value of a register of at most 8 bytes, by its name.
    pub fn value(&self, name: &str) -> u64 {
        let at = REGISTERS.iter().position(|register| register.name == name);
        let (_, value) = (self.iter())
            .find(|(number, _)| Some(*number) == at)
            .expect("a register's name");
        value
            .iter()
            .rfold(0, |all, byte| all << 8 | u64::from(*byte))
    }
}

impl arch::Registers for Registers {
    type ProgramCounter = u64;

    fn pc(&self) -> u64 {
        self.value("rip")
    }

    fn gdb_serialize(&self, write_byte: impl FnMut(Option<u8>)) {
        self.0.iter().copied().map(Some).for_each(write_byte);
    }

    fn gdb_deserialize(&mut self, bytes: &[u8]) -> Result<(), ()> {
        self.0 = bytes.try_into().map_err(|_| ())?;
        Ok(())
    }
}
