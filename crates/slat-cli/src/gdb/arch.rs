//! The description of the registers for GDB.

use std::fmt::Write as _;
use std::num::NonZeroUsize;
use std::sync::OnceLock;

use gdbstub::arch;

use crate::arch::gdb as of_arch;
use slat_kvm::debugger::{BLOCK, REGISTERS, Register};

/// The type that represents a guest's processor, in any mode, for `gdbstub`.
pub enum Guest {}

impl arch::Arch for Guest {
    type Usize = u64;
    type Registers = Registers;
    type BreakpointKind = usize;
    type RegId = Number;

    fn target_description_xml() -> Option<&'static str> {
        static TEXT: OnceLock<String> = OnceLock::new();
        Some(TEXT.get_or_init(description))
    }
}

/// The XML definition of the type of vector registers. GDB itself does not define this type.
const VECTOR: &str = r#"<vector id="v4f" type="ieee_single" count="4"/><vector id="v2d" type="ieee_double" count="2"/>
<vector id="v16i8" type="int8" count="16"/><vector id="v8i16" type="int16" count="8"/>
<vector id="v4i32" type="int32" count="4"/><vector id="v2i64" type="int64" count="2"/>
<union id="vec128">
<field name="v4_float" type="v4f"/><field name="v2_double" type="v2d"/><field name="v16_int8" type="v16i8"/>
<field name="v8_int16" type="v8i16"/><field name="v4_int32" type="v4i32"/><field name="v2_int64" type="v2i64"/>
<field name="uint128" type="uint128"/>
</union>
"#;

/// Describes the registers in GDB's XML format.
fn description() -> String {
    let mut text = format!(
        "<?xml version=\"1.0\"?><!DOCTYPE target SYSTEM \"gdb-target.dtd\">\n\
         <target version=\"1.0\">\n<architecture>{}</architecture>\n",
        of_arch::NAME
    );
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
            // A feature's type definitions must come before its first register. The core registers are the first
            // feature.
            let types = match *kind {
                "vec128" => VECTOR,
                _ if open.is_empty() => of_arch::TYPES,
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
    let end = if open.is_empty() { "" } else { "</feature>\n" };
    text + end + "</target>"
}

/// The number by which GDB refers to a register.
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
    /// Returns each register's number and value.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &[u8])> {
        let mut rest = &self.0[..];
        REGISTERS.iter().enumerate().map(move |(number, register)| {
            let (value, after) = rest.split_at(register.bytes);
            rest = after;
            (number, value)
        })
    }

    /// Returns a register's value, by its name. The register has at most 8 bytes.
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
        self.value(of_arch::PC)
    }

    fn gdb_serialize(&self, write_byte: impl FnMut(Option<u8>)) {
        self.0.iter().copied().map(Some).for_each(write_byte);
    }

    fn gdb_deserialize(&mut self, bytes: &[u8]) -> Result<(), ()> {
        self.0 = bytes.try_into().map_err(|_| ())?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The register types that GDB itself defines ("Predefined Target Types" in its manual) and that are used here.
    const PREDEFINED: [&str; 9] = [
        "int8", "int16", "int", "int32", "int64", "uint128", "code_ptr", "data_ptr", "i387_ext",
    ];

    #[test]
    fn the_description_defines_the_type_of_each_register_before_its_use() {
        let text = description();
        for Register { name, kind, .. } in &REGISTERS {
            let register = text.find(&format!("<reg name=\"{name}\"")).expect(name);
            let is_defined = text[..register].contains(&format!("id=\"{kind}\""));
            assert!(
                is_defined || PREDEFINED.contains(kind),
                "{name} has the type {kind}"
            );
        }
    }
}
