//! Messages in the page of a SynIC, which has a slot of 256 bytes for each source.
//!
//! A slot is free while its type is 0. A sender that finds the slot occupied sets a flag in the slot. When the guest
//! has freed the slot, the guest tells the SynIC that the next message can be sent.

/// The size in bytes of a message slot in the SynIC's page.
pub const SLOT_BYTES: u64 = 256;
/// The offset of the byte with the flags in a message slot.
pub const FLAGS: u64 = 5;
/// A flag of a message: another message waits until this message slot is free.
pub const PENDING: u8 = 1;
/// The size in bytes of a timer's message, with its header.
pub const TIMER_BYTES: usize = HEADER + PAYLOAD;

/// The type of a timer's message (`HvMessageTimerExpired`).
const TIMER_EXPIRED: u32 = 0x8000_0010;
const HEADER: usize = 16;
const PAYLOAD: usize = 24;

/// Whether the slot whose first eight bytes are `word` holds a message.
pub fn is_taken(word: u64) -> bool {
    word as u32 != 0
}

/// Returns the message of the timer with this index. The timer expired at `expiration`, and the message is sent at
/// `delivery`, both by the reference clock.
pub fn timer(index: u32, expiration: u64, delivery: u64) -> [u8; TIMER_BYTES] {
    let mut message = [0; TIMER_BYTES];
    message[0..4].copy_from_slice(&TIMER_EXPIRED.to_le_bytes());
    message[4] = PAYLOAD as u8;
    message[16..20].copy_from_slice(&index.to_le_bytes());
    message[24..32].copy_from_slice(&expiration.to_le_bytes());
    message[32..40].copy_from_slice(&delivery.to_le_bytes());
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timers_message_takes_a_slot() {
        let message = timer(3, 0x11, 0x22);
        let word = |at: usize| u64::from_le_bytes(message[at..at + 8].try_into().unwrap());
        assert_eq!(word(0), 24 << 32 | 0x8000_0010);
        assert!(is_taken(word(0)) && !is_taken(1 << 32));
        assert_eq!([word(8), word(16), word(24), word(32)], [0, 3, 0x11, 0x22]);
    }
}
