//! Conversion between structs with the same fields.

/// Defines two functions that convert between two structs with these fields. `$rest` gives the values of any other
/// fields.
macro_rules! same_fields {
    ($one:ident, $other:ident, $to_other:ident, $to_one:ident { $($field:ident),* $(,)? } $(..$rest:expr)?) => {
        fn $to_other(one: &$one) -> $other {
            $other {
                $($field: one.$field,)*
                $(..$rest)?
            }
        }

        fn $to_one(other: &$other) -> $one {
            $one {
                $($field: other.$field,)*
                $(..$rest)?
            }
        }
    };
}
pub(crate) use same_fields;
