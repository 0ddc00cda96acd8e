//! The synthetic interrupt controller (SynIC) of one virtual processor: sixteen sources (SINTs), each with a vector,
//! and the pages for messages and event flags.

use crate::message;
use crate::msr::*;
use crate::{Refused, Writer};

/// The number of synthetic interrupt sources.
pub const SINTS: usize = 16;
/// The value of SVERSION.
const VERSION: u64 = 1;
/// The enable bit of SCONTROL, SIMP and SIEFP.
const ENABLED: u64 = 1;
/// The bits of the page's address in SIMP and SIEFP.
const PAGE: u64 = !0xfff;
/// The field of SINTx (the register of an interrupt source) with the source's vector.
const VECTOR: u64 = 0xff;
const MASKED: u64 = 1 << 16;
const AUTO_EOI: u64 = 1 << 17;
/// The lowest vector that a source may have if it is not masked.
const FIRST_VECTOR: u64 = 16;

/// The work that a write of an MSR leaves to the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The caller need not do anything.
    None,
    /// The vectors of interrupt sources (SINTs) have changed.
    Vectors,
    /// This MSR has changed. The caller has to tell the VMM, which may emulate devices that send messages.
    Exit(u32),
    /// The guest has read messages. So messages of every source that wait for a free slot can be sent.
    EndOfMessage,
}

/// The registers of one SynIC.
#[derive(Clone, Debug)]
pub struct Synic {
    /// Whether the VMM has enabled the SynIC. Otherwise the guest has no SynIC.
    active: bool,
    clears_pages: bool,
    control: u64,
    version: u64,
    event_page: u64,
    message_page: u64,
    sints: [u64; SINTS],
}

impl Default for Synic {
    fn default() -> Self {
        Synic {
            active: false,
            clears_pages: true,
            control: 0,
            version: VERSION,
            event_page: 0,
            message_page: 0,
            sints: [MASKED; SINTS],
        }
    }
}

impl Synic {
    /// Enables the SynIC. If `clears_pages` is true, each page whose address the guest writes to SIMP or SIEFP is
    /// filled with zeros (`KVM_CAP_HYPERV_SYNIC`); otherwise pages keep their contents (`KVM_CAP_HYPERV_SYNIC2`).
    pub fn activate(&mut self, clears_pages: bool) {
        self.active = true;
        self.clears_pages = clears_pages;
        self.control = ENABLED;
    }

    /// Returns SCONTROL, SIEFP and SIMP, which an exit reports to the VMM.
    pub fn pages(&self) -> [u64; 3] {
        [self.control, self.event_page, self.message_page]
    }

    /// Reads a register.
    ///
    /// # Errors
    /// There is no such register, or the guest has no SynIC.
    pub fn read(&self, index: u32, by: Writer) -> Result<u64, Refused> {
        if !self.active && by == Writer::Guest {
            return Err(Refused);
        }
        Ok(match index {
            SCONTROL => self.control,
            SVERSION => self.version,
            SIEFP => self.event_page,
            SIMP => self.message_page,
            EOM => 0,
            SINT0..=SINT15 => self.sints[(index - SINT0) as usize],
            _ => return Err(Refused),
        })
    }

    /// Returns the address of the page that a write of `value` to the MSR `index` would name, if this page has to be
    /// filled with zeros before the write. If the page cannot be filled, the caller must refuse the write.
    pub fn page_to_clear(&self, index: u32, value: u64) -> Option<u64> {
        let names_page = matches!(index, SIEFP | SIMP) && value & ENABLED != 0;
        (self.active && self.clears_pages && names_page).then_some(value & PAGE)
    }

    /// Writes a register.
    ///
    /// # Errors
    /// The register does not exist, is read-only, or cannot hold the value. If the guest has no SynIC, only the host
    /// can write, and only zeros.
    pub fn write(&mut self, index: u32, value: u64, by: Writer) -> Result<Effect, Refused> {
        let by_guest = by == Writer::Guest;
        if !self.active && (by_guest || value != 0) {
            return Err(Refused);
        }
        let register = match index {
            SCONTROL => &mut self.control,
            SIEFP => &mut self.event_page,
            SIMP => &mut self.message_page,
            SVERSION if by_guest => return Err(Refused),
            SVERSION => {
                self.version = value;
                return Ok(Effect::None);
            }
            EOM if self.active => return Ok(Effect::EndOfMessage),
            EOM => return Ok(Effect::None),
            SINT0..=SINT15 => {
                if by_guest && value & VECTOR < FIRST_VECTOR && value & MASKED == 0 {
                    return Err(Refused);
                }
                self.sints[(index - SINT0) as usize] = value;
                return Ok(Effect::Vectors);
            }
            _ => return Err(Refused),
        };
        *register = value;
        Ok(match by {
            Writer::Guest => Effect::Exit(index),
            Writer::Host => Effect::None,
        })
    }

    /// Returns the vector of an interrupt source (SINT). `None`: the source is masked, or does not exist.
    pub fn vector(&self, sint: u32) -> Option<u8> {
        let sint = self.sints.get(sint as usize)?;
        (sint & MASKED == 0).then_some((sint & VECTOR) as u8)
    }

    /// Returns the interrupt sources (SINTs) with this vector, one bit for each source.
    pub fn sources_of(&self, vector: u8) -> u16 {
        let sources = (0..SINTS as u32).filter(|sint| self.vector(*sint) == Some(vector));
        sources.fold(0, |set, sint| set | 1 << sint)
    }

    /// Whether an interrupt with this vector ends when it is delivered (auto-EOI), because the guest has set auto-EOI
    /// for a source with this vector.
    pub fn ends_itself(&self, vector: u8) -> bool {
        (0..SINTS as u32).any(|sint| {
            self.vector(sint) == Some(vector) && self.sints[sint as usize] & AUTO_EOI != 0
        })
    }

    /// Returns the guest-physical address of a source's slot for messages. `None`: the guest has no page for messages.
    pub fn message_slot(&self, sint: u32) -> Option<u64> {
        let enabled = self.message_page & ENABLED != 0;
        enabled.then_some((self.message_page & PAGE) + message::SLOT_BYTES * u64::from(sint))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn active() -> Synic {
        let mut synic = Synic::default();
        synic.activate(true);
        synic
    }

    #[test]
    fn a_guest_without_synic_has_no_registers() {
        let mut synic = Synic::default();
        assert_eq!(synic.read(SVERSION, Writer::Guest), Err(Refused));
        assert_eq!(synic.read(SVERSION, Writer::Host), Ok(1));
        assert_eq!(synic.write(SCONTROL, 0, Writer::Guest), Err(Refused));
        assert_eq!(synic.write(SCONTROL, 1, Writer::Host), Err(Refused));
        assert_eq!(synic.write(SCONTROL, 0, Writer::Host), Ok(Effect::None));
        assert_eq!(synic.page_to_clear(SIMP, 0x1001), None);
    }

    #[test]
    fn a_source_has_its_vector_unless_it_is_masked() {
        let mut synic = active();
        assert_eq!(synic.vector(2), None, "after reset");
        assert_eq!(
            synic.write(SINT0 + 2, 0x41, Writer::Guest),
            Ok(Effect::Vectors)
        );
        synic
            .write(SINT0 + 9, 0x41 | AUTO_EOI, Writer::Guest)
            .unwrap();
        assert_eq!(synic.vector(2), Some(0x41));
        assert_eq!(synic.sources_of(0x41), 1 << 2 | 1 << 9);
        assert!(synic.ends_itself(0x41) && !synic.ends_itself(0x42));
        synic
            .write(SINT0 + 9, 0x41 | AUTO_EOI | MASKED, Writer::Guest)
            .unwrap();
        assert_eq!(synic.sources_of(0x41), 1 << 2);
        assert!(!synic.ends_itself(0x41));
        assert_eq!(synic.vector(16), None, "there is no such source");
    }

    #[test]
    fn low_vectors_are_for_masked_sources_and_the_host() {
        let mut synic = active();
        assert_eq!(synic.write(SINT0, 15, Writer::Guest), Err(Refused));
        assert!(synic.write(SINT0, 15 | MASKED, Writer::Guest).is_ok());
        assert!(synic.write(SINT0, 0, Writer::Host).is_ok());
    }

    #[test]
    fn the_client_sees_the_pages_that_the_guest_names() {
        let mut synic = active();
        assert_eq!(synic.page_to_clear(SIMP, 0x5001), Some(0x5000));
        assert_eq!(synic.page_to_clear(SIMP, 0x5000), None);
        assert_eq!(synic.page_to_clear(SCONTROL, 0x5001), None);
        assert_eq!(
            synic.write(SIMP, 0x5001, Writer::Guest),
            Ok(Effect::Exit(SIMP))
        );
        assert_eq!(synic.write(SIEFP, 0x6001, Writer::Host), Ok(Effect::None));
        assert_eq!(synic.pages(), [1, 0x6001, 0x5001]);
        assert_eq!(synic.message_slot(3), Some(0x5300));
        synic.activate(false);
        assert_eq!(synic.page_to_clear(SIMP, 0x5001), None);
        synic.write(SIMP, 0x5000, Writer::Guest).unwrap();
        assert_eq!(synic.message_slot(3), None);
    }

    #[test]
    fn the_version_is_the_hosts() {
        let mut synic = active();
        assert_eq!(synic.write(SVERSION, 2, Writer::Guest), Err(Refused));
        synic.write(SVERSION, 2, Writer::Host).unwrap();
        assert_eq!(synic.read(SVERSION, Writer::Guest), Ok(2));
        assert_eq!(synic.write(EOM, 0, Writer::Guest), Ok(Effect::EndOfMessage));
        assert_eq!(synic.write(EOM + 1, 0, Writer::Guest), Err(Refused));
    }
}
