//! The values at the edges of a rule: the last values that a request accepts, and the first values that it refuses.

use super::api::{Controllers, Handle, Machine, Who};
use std::ops::Range;

/// The valid values of a field.
#[derive(Clone, Copy, Debug)]
pub enum Values {
    /// All values are valid.
    Any,
    /// Values without any bits other than these are valid.
    Bits(u64),
    /// Values up to this value are valid.
    UpTo(u64),
    /// Values from this value on are valid.
    From(u64),
    /// The values in the first list are valid. The values in the second list are invalid.
    Listed(&'static [u64], &'static [u64]),
}

impl Values {
    /// Returns the values at the edges, as far as a field of `bits` bits can hold them, and whether each value is
    /// valid.
    pub fn edges(self, bits: u32) -> Vec<(u64, bool)> {
        let most = u64::MAX >> (64 - bits);
        let mut edges = match self {
            Values::Any => [0, 1, most / 2, most / 2 + 1, most]
                .map(|value| (value, true))
                .to_vec(),
            Values::Bits(known) => {
                let single = (0..bits).map(|bit| 1 << bit);
                let all = single.chain([0, known & most, most]);
                all.map(|value| (value, value & !known == 0)).collect()
            }
            Values::UpTo(last) => [
                0,
                last.saturating_sub(1),
                last,
                last.saturating_add(1),
                most,
            ]
            .map(|value| (value, value <= last))
            .to_vec(),
            Values::From(first) => [0, first.saturating_sub(1), first, first + 1, most]
                .map(|value| (value, value >= first))
                .to_vec(),
            Values::Listed(valid, other) => {
                let valid = valid.iter().map(|value| (*value, true));
                valid
                    .chain(other.iter().map(|value| (*value, false)))
                    .collect()
            }
        };
        edges.retain(|(value, _)| *value <= most);
        edges
    }
}

/// The object of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On {
    /// The VM.
    Vm,
    /// The vCPU.
    Vcpu,
}

/// The argument of a request, before the rule's field is set in it.
#[derive(Clone, Copy, Debug)]
pub enum Argument {
    /// The argument of the ioctl is a number, which is the field itself.
    Number,
    /// The struct that another request reads. Here are the number of that request, and the struct's size in bytes.
    Read(u32, usize),
    /// A string of this number of zero bytes.
    Zeros(usize),
    /// A table with one entry, which sets this MSR. The field is the MSR's value.
    Msr(u32),
}

/// The values for which the host's kernel may return another result than slat, and why.
#[derive(Clone, Copy, Debug)]
pub enum Differs {
    /// The kernel may return other results for all values, for this reason.
    Always(&'static str),
    /// For addresses that exceed 48 bits, but not the width of linear addresses of the host's processor.
    LinearWidth,
}

impl Differs {
    /// Returns the reason why the host's kernel may return another result for `value`, if linear addresses of the
    /// host's processor have `bits` bits. `None`: the kernel must return the same result as slat.
    fn why(self, value: u64, bits: u32) -> Option<&'static str> {
        let fits = |bits: u32| (value << (64 - bits)) as i64 >> (64 - bits) == value as i64;
        match self {
            Differs::Always(why) => Some(why),
            Differs::LinearWidth => (fits(bits) && !fits(48)).then_some(
                "the processor has wider linear addresses, which Linux 6.13 and later takes whatever the guest has",
            ),
        }
    }
}

/// Returns the width in bits of the linear addresses of the host's processor.
fn linear_bits() -> u32 {
    const LA57: u32 = 1 << 16;
    match slat_kvm::cpuid::host_leaf(7, 0).ecx & LA57 {
        0 => 48,
        _ => 57,
    }
}

/// A result that differs from the expected one.
#[derive(Debug)]
pub struct Difference {
    /// A text with the request, the value, and both results.
    pub what: String,
    /// The reason why the host's kernel may return this result. `None`: there is no such reason, or slat has returned
    /// the result.
    pub why: Option<&'static str>,
}

/// One rule of a request that sets state: which values a field may have.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// The number of the request (`KVM_SET_…`).
    pub request: u32,
    /// The kind of object that serves the request.
    pub on: On,
    /// The rule for the field's values, in words for a message.
    pub words: &'static str,
    /// The interrupt controllers of the VM.
    pub controllers: Controllers,
    /// Whether the guest has CPUID leaves.
    pub cpuid: bool,
    /// The argument with which a test begins: [`with`](Self::with) changes some of its fields, and then the test sets
    /// the tested field.
    pub argument: Argument,
    /// Called with the bytes of the argument before the tested field is set. Sets those other fields on which the rule
    /// depends.
    pub with: fn(&mut [u8]),
    /// The offset and the number of bytes of the field.
    pub field: (usize, usize),
    /// The values that the field may have.
    pub values: Values,
    /// The errno that the request returns for invalid values.
    pub errno: i32,
    /// The values for which the host's kernel may return other results, and why.
    pub differs: Option<Differs>,
}

/// The size of an MSR table with one entry, the offset of the MSR's number, and the offset of its value.
const ONE_MSR: (usize, usize, usize) = (24, 8, 16);

impl Rule {
    /// Returns the range of the field's bytes.
    pub fn range(&self) -> Range<usize> {
        match self.argument {
            Argument::Msr(_) => ONE_MSR.2..ONE_MSR.2 + 8,
            _ => self.field.0..self.field.0 + self.field.1,
        }
    }

    /// Sets the field in the bytes of an argument, and also the other fields that must be set with it.
    pub fn set(&self, bytes: &mut [u8], value: u64) {
        (self.with)(bytes);
        let range = self.range();
        let len = range.len();
        bytes[range].copy_from_slice(&value.to_le_bytes()[..len]);
    }

    /// Returns the values at the edges of the rule, and whether each value is valid.
    pub fn edges(&self) -> Vec<(u64, bool)> {
        self.values.edges(self.range().len() as u32 * 8)
    }

    /// Tries all values at the rule's edges on one new machine. Returns each wrong result. If there is no /dev/kvm,
    /// returns nothing.
    pub fn check(&self, who: Who) -> Vec<Difference> {
        let Some(trial) = Trial::new(self, who) else {
            return Vec::new();
        };
        let mut wrong = Vec::new();
        for (value, valid) in self.edges() {
            let answer = trial.answer(value);
            let expected = if valid { Ok(()) } else { Err(self.errno) };
            if answer != expected {
                let request = slat_kvm::abi::name(self.request).unwrap_or("?");
                let words = self.words;
                wrong.push(Difference {
                    what: format!("{request}, {words}: {value:#x} is {answer:?}, not {expected:?}"),
                    why: (self.differs.filter(|_| who == Who::Kernel))
                        .and_then(|differs| differs.why(value, linear_bits())),
                });
            }
        }
        wrong
    }
}

/// A machine on which a rule is tried.
struct Trial<'a> {
    rule: &'a Rule,
    machine: Machine,
    /// The argument before the field is set.
    base: Vec<u8>,
}

impl<'a> Trial<'a> {
    /// Makes the machine. `None`: there is no /dev/kvm.
    fn new(rule: &'a Rule, who: Who) -> Option<Self> {
        let machine = Machine::new(who, rule.controllers)?;
        if rule.cpuid {
            machine.set_cpuid();
        }
        let mut trial = Trial {
            rule,
            machine,
            base: Vec::new(),
        };
        trial.base = match rule.argument {
            Argument::Number => Vec::new(),
            Argument::Zeros(len) => vec![0; len],
            // If the object does not have this state, the request to read the state and the request to set it are both
            // refused.
            Argument::Read(request, len) => {
                (trial.object().read(request, len)).unwrap_or_else(|_| vec![0; len])
            }
            Argument::Msr(index) => {
                let (len, number, _) = ONE_MSR;
                let mut bytes = vec![0; len];
                bytes[0] = 1;
                bytes[number..number + 4].copy_from_slice(&index.to_le_bytes());
                bytes
            }
        };
        Some(trial)
    }

    fn object(&self) -> &Handle {
        match self.rule.on {
            On::Vm => &self.machine.vm,
            On::Vcpu => &self.machine.vcpu,
        }
    }

    /// Makes the rule's request with `value` in the field. Returns its result.
    ///
    /// # Errors
    /// The errno. `EINVAL` if the request has not set the MSR.
    fn answer(&self, value: u64) -> Result<(), i32> {
        let request = self.rule.request;
        if let Argument::Number = self.rule.argument {
            return self.object().number(request, value).map(drop);
        }
        let mut bytes = self.base.clone();
        self.rule.set(&mut bytes, value);
        match self.object().bytes(request, &mut bytes) {
            // KVM returns the number of MSRs that it has set.
            Ok(0) if matches!(self.rule.argument, Argument::Msr(_)) => Err(libc::EINVAL),
            Ok(_) => Ok(()),
            Err(errno) => Err(errno),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Differs, Values};

    #[test]
    fn wider_addresses_are_excused_where_the_processor_has_them() {
        for (value, bits, excused) in [
            (1 << 47, 57, true),
            (1 << 47, 48, false),
            (1 << 56, 57, false),
            (1 << 63, 57, false),
        ] {
            let why = Differs::LinearWidth.why(value, bits);
            assert_eq!(why.is_some(), excused, "{value:#x}, {bits} bits");
        }
    }

    #[test]
    fn edges_are_on_both_sides() {
        assert_eq!(
            Values::UpTo(3).edges(8),
            [(0, true), (2, true), (3, true), (4, false), (255, false)]
        );
        let bits = Values::Bits(0b101).edges(8);
        assert!(bits.contains(&(1, true)) && bits.contains(&(2, false)));
        assert!(bits.contains(&(5, true)) && bits.contains(&(255, false)));
    }
}
