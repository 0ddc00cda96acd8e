//! Decoding of hypercalls, and their results.
//!
//! A hypercall's input value names the call and its form. The parameters of a call are a sequence of 64-bit words in
//! guest memory. The parameters of a *fast* call are in two registers and in the halves of six XMM registers instead.
//! Both forms have the same layout. So the parameters are decoded through a closure, which returns the word at a given
//! index ([`Fast::word`] for registers).
//!
//! [`Request::decode`] determines the operation that the call requests. [`Flush::read`] and [`Ipi::read`] read the
//! parameters of calls that the host carries out; the VMM reads those of all other calls.

use crate::code;
use crate::cpuid::Privileges;
use crate::vp_set::{BANKS, VpSet};

/// The status of a hypercall.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
#[allow(missing_docs)]
pub enum Status {
    Success = 0,
    InvalidCode = 2,
    InvalidInput = 3,
    InvalidAlignment = 4,
    InvalidParameter = 5,
    AccessDenied = 6,
    OperationDenied = 8,
    InvalidPortId = 0x11,
}

impl Status {
    /// Returns the output value of a call that ends with this status, after `reps` repetitions.
    pub fn output(self, reps: u16) -> u64 {
        self as u64 | u64::from(reps) << 32
    }
}

/// The input value of a hypercall.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Input(pub u64);

/// Bits of the input value that have to be 0.
const RESERVED: u64 = 0x1f << 27 | 0xf << 44 | 0xf << 60;

impl Input {
    /// Returns the number of the call.
    pub fn code(self) -> u16 {
        self.0 as u16
    }

    /// Whether the parameters are in registers.
    pub fn is_fast(self) -> bool {
        self.0 >> 16 & 1 != 0
    }

    /// Returns the number of words of the variable-sized header.
    pub fn variable_header(self) -> usize {
        (self.0 >> 17 & 0x3ff) as usize
    }

    /// Returns the number of repetitions of the call. Each repetition takes the next element of a list.
    pub fn reps(self) -> u16 {
        (self.0 >> 32 & 0xfff) as u16
    }

    /// Returns the number of the first repetition.
    pub fn first_rep(self) -> u16 {
        (self.0 >> 48 & 0xfff) as u16
    }

    fn is_repeated(self) -> bool {
        self.reps() != 0 || self.first_rep() != 0
    }

    /// Whether the call may have parameters in XMM registers.
    fn uses_xmm(self) -> bool {
        use code::{FLUSH_LIST, FLUSH_LIST_EX, FLUSH_SPACE, FLUSH_SPACE_EX, SEND_IPI_EX};
        let calls = [
            FLUSH_SPACE,
            FLUSH_LIST,
            FLUSH_SPACE_EX,
            FLUSH_LIST_EX,
            SEND_IPI_EX,
        ];
        self.is_fast() && calls.contains(&self.code())
    }
}

/// The registers of a fast call.
#[derive(Clone, Copy, Debug)]
pub struct Fast {
    /// The two registers.
    pub registers: [u64; 2],
    /// The registers XMM0 to XMM5.
    pub xmm: [u128; 6],
}

impl Fast {
    /// Returns word `index` of the parameters, counted from 0. `None`: the registers have fewer words.
    pub fn word(&self, index: usize) -> Option<u64> {
        match index.checked_sub(self.registers.len()) {
            None => Some(self.registers[index]),
            Some(half) => {
                let register = self.xmm.get(half / 2)?;
                Some((register >> (64 * (half % 2))) as u64)
            }
        }
    }
}

/// The properties of the virtual processor that makes a hypercall, by which [`Request::decode`] decides whether the
/// call is allowed.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    /// The privileges in the caller's CPUID, if they are enforced.
    pub enforced: Option<Privileges>,
    /// Whether the caller's SynIC is active, so that the VMM handles messages and events.
    pub has_synic: bool,
    /// Whether the caller may use the synthetic debugger.
    pub has_debugger: bool,
    /// Whether the caller's debugger makes hypercalls.
    pub debugs_by_hypercalls: bool,
}

/// The operation that a hypercall requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// The caller waits for a lock that another virtual processor holds.
    SpinWait,
    /// Signal an event. If the host has no connection for the event, the VMM may carry out the call, as
    /// [`client_event`] decides.
    SignalEvent,
    /// Flush the translations of virtual processors. [`Flush::read`] reads which.
    Flush,
    /// Send an interrupt to virtual processors. [`Ipi::read`] reads the vector and the processors.
    SendIpi,
    /// Exit to the VMM, which carries out the call.
    Client,
}

/// The reason why a hypercall is not carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The call is not carried out. The guest gets this status.
    Status(Status),
    /// The caller gets #UD.
    Undefined,
}

impl Request {
    /// Determines the operation that a call requests.
    ///
    /// # Errors
    /// The caller may not make the call, the call does not exist, or its form is wrong.
    pub fn decode(input: Input, caller: &Caller) -> Result<Self, Refusal> {
        use code::*;
        let refuse = |status| Err(Refusal::Status(status));
        let enforced = caller.enforced.as_ref();
        if enforced.is_some_and(|privileges| !privileges.allows_call(input.code())) {
            return refuse(Status::AccessDenied);
        }
        if input.0 & RESERVED != 0 {
            return refuse(Status::InvalidInput);
        }
        if input.uses_xmm() && enforced.is_some_and(|privileges| !privileges.has_xmm_input()) {
            return Err(Refusal::Undefined);
        }
        let is_plain = !input.is_repeated() && input.variable_header() == 0;
        let (is_valid, request) = match input.code() {
            NOTIFY_LONG_SPIN_WAIT => (is_plain, Request::SpinWait),
            SIGNAL_EVENT => (is_plain, Request::SignalEvent),
            POST_MESSAGE => (is_plain && caller.has_synic, Request::Client),
            FLUSH_SPACE => (is_plain, Request::Flush),
            FLUSH_SPACE_EX => (!input.is_repeated(), Request::Flush),
            FLUSH_LIST | FLUSH_LIST_EX => {
                let has_header = input.code() == FLUSH_LIST && input.variable_header() != 0;
                let is_list = input.reps() != 0 && input.first_rep() == 0;
                (is_list && !has_header, Request::Flush)
            }
            SEND_IPI => (is_plain, Request::SendIpi),
            SEND_IPI_EX => (!input.is_repeated(), Request::SendIpi),
            POST_DEBUG_DATA | RETRIEVE_DEBUG_DATA if input.is_fast() => {
                return refuse(Status::InvalidParameter);
            }
            POST_DEBUG_DATA..=RESET_DEBUG_SESSION if !caller.has_debugger => {
                return refuse(Status::InvalidCode);
            }
            POST_DEBUG_DATA..=RESET_DEBUG_SESSION if !caller.debugs_by_hypercalls => {
                return refuse(Status::OperationDenied);
            }
            EXTENDED_FIRST..=EXTENDED_LAST if input.is_fast() => {
                return refuse(Status::InvalidParameter);
            }
            POST_DEBUG_DATA..=RESET_DEBUG_SESSION | EXTENDED_FIRST..=EXTENDED_LAST => {
                (true, Request::Client)
            }
            _ => return refuse(Status::InvalidCode),
        };
        match is_valid {
            true => Ok(request),
            false => refuse(Status::InvalidInput),
        }
    }
}

/// Decides whether the VMM may carry out a [`Request::SignalEvent`] for which the host has no connection. On success,
/// the VMM has to carry out the call.
///
/// # Errors
/// The VMM cannot carry out the call.
pub fn client_event(caller: &Caller) -> Result<(), Status> {
    match caller.has_synic {
        true => Ok(()),
        false => Err(Status::InvalidInput),
    }
}

/// Returns the connection (24 bits) that the parameter of the hypercall SIGNAL_EVENT names.
///
/// # Errors
/// `InvalidPortId`: the parameter selects a flag of the connection other than the first one, and no VMM has more flags.
/// `InvalidInput`: reserved bits are set.
pub fn connection(parameter: u64) -> Result<u32, Status> {
    const FLAG: u64 = 0xffff << 32;
    const CONNECTION: u64 = 0xff_ffff;
    match parameter {
        _ if parameter & FLAG != 0 => Err(Status::InvalidPortId),
        _ if parameter & !CONNECTION != 0 => Err(Status::InvalidInput),
        connection => Ok(connection as u32),
    }
}

/// Reads a set of virtual processors: the format, the mask of valid banks, and the banks. The first word of the set has
/// the index `at`. `most` is one more than the largest VP index; banks beyond that index are not read. Returns the set,
/// and the index of the word after the set.
fn read_set<E: From<Status>>(
    input: Input,
    at: usize,
    most: u32,
    word: &mut impl FnMut(usize) -> Result<u64, E>,
) -> Result<(Option<VpSet>, usize), E> {
    const SPARSE: u64 = 0;
    let count = input.variable_header();
    let (format, valid) = (word(at)?, word(at + 1)?);
    let first = at + 2;
    if count != valid.count_ones() as usize {
        return Err(Status::InvalidInput.into());
    }
    let after = first + count;
    if format != SPARSE {
        return Ok((Some(VpSet::all()), after));
    }
    if count == 0 {
        return Ok((None, after));
    }
    if input.is_fast() {
        // If the parameters are in registers, the registers must have all banks, even banks that are ignored.
        word(after - 1)?;
    }
    let mut banks = [0; BANKS];
    let read = count.min(most.div_ceil(u64::BITS) as usize);
    for (index, bank) in banks[..read].iter_mut().enumerate() {
        *bank = word(first + index)?;
    }
    Ok((Some(VpSet { valid, banks }), after))
}

/// The virtual processors whose translations are to be flushed. All of their translations are flushed, even if the
/// guest names only some addresses or one address space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flush {
    /// The set of the virtual processors. `None`: the set is empty.
    pub targets: Option<VpSet>,
}

impl Flush {
    /// Reads the parameters of [`Request::Flush`]. `most` is one more than the largest VP index.
    ///
    /// # Errors
    /// `InvalidInput`: the set of virtual processors contradicts the input value of the hypercall. Errors of `word` are
    /// returned, too.
    pub fn read<E: From<Status>>(
        input: Input,
        most: u32,
        mut word: impl FnMut(usize) -> Result<u64, E>,
    ) -> Result<Self, E> {
        /// A list of more addresses is not read, because all translations are flushed anyway.
        const LONGEST_LIST: usize = 15;
        const ALL_PROCESSORS: u64 = 1;
        const FLAGS: usize = 1;
        const SET: usize = 2;
        let flags = word(FLAGS)?;
        let (targets, after) = match input.code() {
            code::FLUSH_SPACE | code::FLUSH_LIST => {
                let targets = match word(SET)? {
                    // Windows Server 2012 gives an empty mask when it means all processors.
                    0 => VpSet::all(),
                    _ if flags & ALL_PROCESSORS != 0 => VpSet::all(),
                    mask => VpSet::from_mask(mask),
                };
                (Some(targets), SET + 1)
            }
            _ => read_set(input, SET, most, &mut word)?,
        };
        let reps = usize::from(input.reps());
        let is_read = targets.is_some() && reps <= LONGEST_LIST;
        if is_read && input.is_fast() && reps != 0 {
            word(after + reps - 1)?;
        }
        for address in 0..if is_read { reps } else { 0 } {
            word(after + address)?;
        }
        Ok(Flush { targets })
    }
}

/// An interrupt that a virtual processor sends to virtual processors by a hypercall.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ipi {
    /// The interrupt's vector.
    pub vector: u8,
    /// The virtual processors that get the interrupt.
    pub targets: VpSet,
}

impl Ipi {
    /// Reads the parameters of [`Request::SendIpi`]. `most` is one more than the largest VP index. `None`: the
    /// interrupt goes to no virtual processor.
    ///
    /// # Errors
    /// `InvalidInput`: the set of virtual processors contradicts the input value of the hypercall, or no interrupt has
    /// the vector. Errors of `word` are returned, too.
    pub fn read<E: From<Status>>(
        input: Input,
        most: u32,
        mut word: impl FnMut(usize) -> Result<u64, E>,
    ) -> Result<Option<Self>, E> {
        const FIRST_VECTOR: u8 = 0x10;
        let first = word(0)?;
        let vector = first as u32;
        let targets = match input.code() {
            code::SEND_IPI if input.is_fast() && first >> 32 != 0 => {
                return Err(Status::InvalidInput.into());
            }
            code::SEND_IPI => Some(VpSet::from_mask(word(1)?)),
            _ => read_set(input, 1, most, &mut word)?.0,
        };
        let Some(targets) = targets else {
            return Ok(None);
        };
        match u8::try_from(vector) {
            Ok(vector @ FIRST_VECTOR..) => Ok(Some(Ipi { vector, targets })),
            _ => Err(Status::InvalidInput.into()),
        }
    }
}

#[cfg(test)]
mod tests;
