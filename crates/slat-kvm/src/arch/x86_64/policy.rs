//! The policies of x86's software CPU.

use crate::words::{JIT, Jit, Switch, policies, words};
use slat_x86::Tier;

words! { Jit, "on, off, at-once, at-once-baseline":
    "on" => Jit::On,
    "off" => Jit::Off,
    "at-once" => Jit::AtOnce(Tier::Full),
    "at-once-baseline" => Jit::AtOnce(Tier::Baseline),
}

/// The name of the policy of nested virtualization: whether guests are offered SVM. It corresponds to the parameter
/// `nested` of KVM's module.
pub const NESTED: &str = "nested";

/// The name of the policy of the files for perf, [`JitMap`].
pub const JIT_MAP: &str = "jit_map";

/// The files that the compiler writes for perf, so that perf names guest code.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum JitMap {
    /// Write no file for perf.
    #[default]
    Off,
    /// perf's map: the newest names, by address.
    On,
    /// perf's jitdump: names and code by address and time.
    Dump,
}

words! { JitMap, "on, off, dump":
    "on" => JitMap::On,
    "off" => JitMap::Off,
    "dump" => JitMap::Dump,
}

/// The name of the policy of the processor that guests are offered, [`Processor`].
pub const CPU: &str = "cpu";

/// The vendor whose processor `KVM_GET_SUPPORTED_CPUID` describes. Where KVM's modules for AMD's and Intel's processors
/// differ, slat behaves like the module of this vendor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Processor {
    /// The host's vendor, family, model and stepping. This value is the default, because clients such as QEMU's `-cpu
    /// host` execute CPUID themselves.
    #[default]
    Host,
    /// A fixed model of AMD, on every host.
    Amd,
    /// A fixed model of Intel, on every host.
    Intel,
}

words! { Processor, "host, amd, intel":
    "host" => Processor::Host,
    "amd" => Processor::Amd,
    "intel" => Processor::Intel,
}

policies! {
    /// The policy that chooses which guest code is compiled.
    JIT Jit(Jit) = Jit::On;
    /// Whether guests are offered SVM.
    NESTED Nested(Switch) = Switch(true);
    /// The file that the compiler writes for perf.
    JIT_MAP JitMap(JitMap) = JitMap::Off;
    /// The vendor of the processor that guests are offered.
    CPU Processor(Processor) = Processor::Host;
}

/// The values of the policies of the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuPolicies {
    /// Chooses which guest code is compiled.
    pub jit: Jit,
    /// Whether guests are offered SVM.
    pub nested: bool,
    /// The files that the compiler writes for perf.
    pub jit_map: JitMap,
    /// The vendor of the processor that guests are offered.
    pub processor: Processor,
}

impl Default for CpuPolicies {
    fn default() -> Self {
        CpuPolicies {
            jit: Jit::default(),
            nested: true,
            jit_map: JitMap::default(),
            processor: Processor::default(),
        }
    }
}

impl CpuPolicies {
    /// Replaces the value of one policy.
    pub(crate) fn set(&mut self, policy: CpuPolicy) {
        match policy {
            CpuPolicy::Jit(value) => self.jit = value,
            CpuPolicy::Nested(Switch(value)) => self.nested = value,
            CpuPolicy::JitMap(value) => self.jit_map = value,
            CpuPolicy::Processor(value) => self.processor = value,
        }
    }
}

/// Whether the policies allow VMs to shadow the nested tables of guests that are hypervisors.
pub(crate) fn nests(policies: &CpuPolicies) -> bool {
    policies.nested
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::TableFormat;
    use crate::policy::{Assignment, Policies};
    use slat::MmuKind;

    fn parse(set: &str) -> Result<CpuPolicies, String> {
        let variable = |name: &str| (name == "SLAT_SET").then(|| set.to_owned());
        Policies::parse(variable).map(|policies| policies.cpu)
    }

    #[test]
    fn settings_are_taken() {
        assert_eq!(parse("").unwrap(), CpuPolicies::default());
        for (value, jit) in [("off", Jit::Off), ("at-once", Jit::AtOnce(Tier::Full))] {
            assert_eq!(parse(&format!("jit={value}")).unwrap().jit, jit);
        }
        let policies = parse("nested=off,jit_map=dump,cpu=amd").unwrap();
        assert!(!policies.nested);
        assert_eq!(policies.jit_map, JitMap::Dump);
        assert_eq!(policies.processor, Processor::Amd);
    }

    #[test]
    fn what_does_not_work_is_refused_with_what_does() {
        for (set, expected) in [
            ("jit=hot", "on, off, at-once, at-once-baseline"),
            ("jit_map=maybe", "on, off, dump"),
            ("cpu=via", "host, amd, intel"),
        ] {
            assert!(parse(set).unwrap_err().contains(expected), "{set}");
        }
        let error = "jitmap=on".parse::<Assignment>().unwrap_err();
        assert!(error.contains("Did you mean jit_map?"), "{error}");
    }

    #[test]
    fn mmus_have_their_formats() {
        let parse = |format: &str| {
            let pairs = [("SLAT_MMU", "direct"), ("SLAT_FORMAT", format)];
            let find = |name: &str| pairs.iter().find(|(known, _)| *known == name);
            Policies::parse(|name| find(name).map(|(_, value)| (*value).to_owned()))
        };
        let direct = parse("npt").unwrap();
        let expected = (MmuKind::Direct, TableFormat::Npt);
        assert_eq!((direct.mmu, direct.format), expected);
        let error = parse("aarch64").unwrap_err();
        assert!(error.contains("ept, ept5, npt, npt5"), "{error}");
    }

    /// Each policy's default in the list equals its default in the struct.
    #[test]
    fn the_defaults_agree() {
        let mut policies = CpuPolicies::default();
        (CpuPolicy::DEFAULTS.iter()).for_each(|policy| policies.set(*policy));
        assert_eq!(policies, CpuPolicies::default());
    }
}
