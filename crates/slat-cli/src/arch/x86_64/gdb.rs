//! The description of the registers for GDB.

/// GDB's name of the architecture.
pub const NAME: &str = "i386:x86-64";

/// The name of the instruction pointer.
pub const PC: &str = "rip";

/// The XML definitions of register types that GDB itself does not define.
pub const TYPES: &str = r#"<flags id="i386_eflags" size="4">
<field name="CF" start="0" end="0"/><field name="" start="1" end="1"/><field name="PF" start="2" end="2"/>
<field name="AF" start="4" end="4"/><field name="ZF" start="6" end="6"/><field name="SF" start="7" end="7"/>
<field name="TF" start="8" end="8"/><field name="IF" start="9" end="9"/><field name="DF" start="10" end="10"/>
<field name="OF" start="11" end="11"/><field name="NT" start="14" end="14"/><field name="RF" start="16" end="16"/>
<field name="VM" start="17" end="17"/><field name="AC" start="18" end="18"/><field name="VIF" start="19" end="19"/>
<field name="VIP" start="20" end="20"/><field name="ID" start="21" end="21"/>
</flags>
"#;

/// Returns the name of the processor mode of a vCPU.
fn mode(value: impl Fn(&str) -> u64) -> &'static str {
    let bit = |name, bit: u32| value(name) >> bit & 1 != 0;
    match (bit("cr0", 0), bit("efer", 10), bit("cr0", 31)) {
        (false, ..) => "real mode",
        (true, true, _) => "long mode",
        (true, false, true) => "protected mode with paging",
        (true, false, false) => "protected mode",
    }
}

/// Describes in words what a vCPU does. `value` returns a register's value, by the register's name.
pub fn describe(value: impl Fn(&str) -> u64) -> String {
    let long = value("efer") >> 10 & 1 != 0;
    let base = if long { 0 } else { value("cs_base") };
    let at = value("rip").wrapping_add(base);
    let mode = mode(value);
    format!("{mode}, at linear address {at:#x}")
}
