//! The values at the edges of a rule: the last accepted values and the first refused ones.

use super::api::{Controllers, Handle, Machine, Who};
use std::ops::Range;

/// The valid values of a field.
#[derive(Clone, Copy, Debug)]
pub enum Values {
    /// All values are valid.
    Any,
    /// Values without bits other than these are valid.
    Bits(u64),
    /// Values up to this one are valid.
    UpTo(u64),
    /// Values from this one on are valid.
    From(u64),
    /// The first list gives valid values, the second one invalid values.
    Listed(&'static [u64], &'static [u64]),
}

impl Values {
    /// Returns the values at the edges that a field of `bits` bits can hold, and whether each is valid.
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

/// A request's argument before the rule's field is set.
#[derive(Clone, Copy, Debug)]
pub enum Argument {
    /// The field alone: a number.
    Number,
    /// The struct that another request reads: the request's number, and the size in bytes.
    Read(u32, usize),
    /// A number of zero bytes.
    Zeros(usize),
    /// The value of this MSR.
    Msr(u32),
}

/// The values for which the host's kernel may return another result than slat, with the reason.
#[derive(Clone, Copy, Debug)]
pub enum Differs {
    /// The kernel may return other results for all values, for this reason.
    Always(&'static str),
    /// Addresses that do not fit into 48 bits, but fit into the linear addresses of the host's processor.
    LinearWidth,
}

impl Differs {
    /// Returns the reason why the host's kernel may return another result for `value`, given that the host's processor
    /// has linear addresses of `bits` bits. `None`: it must return the same result.
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

/// Returns the number of bits of the linear addresses of the host's processor.
fn linear_bits() -> u32 {
    const LA57: u32 = 1 << 16;
    match slat_kvm::cpuid::host_leaf(7, 0).ecx & LA57 {
        0 => 48,
        _ => 57,
    }
}

/// A result that differs from the list.
#[derive(Debug)]
pub struct Difference {
    /// The request, the value and the results.
    pub what: String,
    /// The reason why the host's kernel may return this result. `None`: no list gives a reason, or the result is
    /// slat's.
    pub why: Option<&'static str>,
}

/// One rule of a SET request.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// The request's number (`KVM_SET_…`).
    pub request: u32,
    /// The request's object.
    pub on: On,
    /// The rule in words.
    pub words: &'static str,
    /// The controllers of the VM.
    pub controllers: Controllers,
    /// Whether the guest has CPUID leaves.
    pub cpuid: bool,
    /// The argument of the request, before [`with`](Self::with) and the value of the field are applied.
    pub argument: Argument,
    /// Sets the other fields that the rule depends on, in the bytes of the argument.
    pub with: fn(&mut [u8]),
    /// The field: offset and bytes.
    pub field: (usize, usize),
    /// The values that the field may have.
    pub values: Values,
    /// The errno that the request returns for other values.
    pub errno: i32,
    /// The values for which the host's kernel may return other results, with the reason.
    pub differs: Option<Differs>,
}

/// The size of a table with one MSR, and the offsets of the MSR's number and value.
const ONE_MSR: (usize, usize, usize) = (24, 8, 16);

impl Rule {
    /// Returns the bytes of the field.
    pub fn range(&self) -> Range<usize> {
        match self.argument {
            Argument::Msr(_) => ONE_MSR.2..ONE_MSR.2 + 8,
            _ => self.field.0..self.field.0 + self.field.1,
        }
    }

    /// Sets the field of an argument, and the other fields that must be set with it.
    pub fn set(&self, bytes: &mut [u8], value: u64) {
        (self.with)(bytes);
        let range = self.range();
        let len = range.len();
        bytes[range].copy_from_slice(&value.to_le_bytes()[..len]);
    }

    /// Returns the values at the rule's edges, and whether each is valid.
    pub fn edges(&self) -> Vec<(u64, bool)> {
        self.values.edges(self.range().len() as u32 * 8)
    }

    /// Tries all edges on one new machine. Returns each wrong result. Returns nothing if there is no /dev/kvm.
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
    /// The argument without the field.
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
            // If the object does not have this state, both requests are refused.
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

    /// Makes the rule's request with `value`, and returns the answer.
    ///
    /// # Errors
    /// The errno; `EINVAL` for an MSR that was not set.
    fn answer(&self, value: u64) -> Result<(), i32> {
        let request = self.rule.request;
        if let Argument::Number = self.rule.argument {
            return self.object().number(request, value).map(drop);
        }
        let mut bytes = self.base.clone();
        self.rule.set(&mut bytes, value);
        match self.object().bytes(request, &mut bytes) {
            // KVM returns the number of MSRs that were set.
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
