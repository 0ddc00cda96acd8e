//! The registers that GDB sees.

/// GDB's name of the architecture.
pub const NAME: &str = "i386:x86-64";

/// The name of the instruction pointer.
pub const PC: &str = "rip";

/// The definitions of types that GDB's x86 features name but do not define.
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

/// Returns the definitions of the types that a register feature uses but does not define. Returns an empty text
/// unless a register of type `kind` is the first one of its feature. `is_first`: the feature is the first one.
pub fn types(kind: &str, is_first: bool) -> &'static str {
    match kind {
        // `FLAGS` belongs to the core registers, whose first register is an `int64`; `VECTOR` belongs to the vectors.
        "int64" if is_first => FLAGS,
        "vec128" => VECTOR,
        _ => "",
    }
}

/// Returns the name of the mode in which a vCPU executes.
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
