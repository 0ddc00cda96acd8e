//! Runs one guest twice: once interpreted, and once compiled. Each KVM_RUN of the two must end for the same reason, and
//! with the same registers and memory.
//!
//! A guest may (rarely) read the time, and a KVM_RUN that lasts too long is kicked. Both change the results. So a
//! difference counts only if the interpreted guest and the compiled guest each repeat their own results when they run
//! again.

use super::code::End;
use super::layout::{HUGE, linear};
use super::tables::Mode;
use super::{After, COMPILES, Guest, Slot, answer, event, state};
use crate::watch::{Kick, Lane, Slice, Step};
use slat_kvm::VcpuFd;
use slat_kvm::{Jit, Tier};
use slat_model::Rng;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The time for which one KVM_RUN of an interpreted guest may last.
const INTERPRETED: Duration = Duration::from_millis(3);
/// The time for which one KVM_RUN of a compiled guest may last.
const COMPILED: Duration = Duration::from_secs(2);
/// The maximum number of exits. It is smaller than for other guests, because this module reads all registers at each
/// exit.
const EXITS: usize = 20;
/// The maximum number of iterations of the guest's code.
const TURNS: u64 = 12;
/// The maximum number of exits after which a guest cannot continue (a shutdown, for example). After such an exit, the
/// guest starts again, with the tables as it has changed them.
const BROKEN: usize = 3;
/// The number of times that the interpreted guest and the compiled guest each run again, to confirm a difference.
const AGAIN: usize = 3;

/// Counts of guests that ran both interpreted and compiled.
#[derive(Debug)]
pub struct Compared {
    /// The number of exits at which the registers were compared.
    pub exits: AtomicU64,
    /// The number of guests whose memory was compared at the end.
    pub guests: AtomicU64,
    /// The number of guests that did not repeat their own results when they ran again, because they read the time.
    pub unsteady: AtomicU64,
}

/// The counts of this process.
pub static COMPARED: Compared = Compared {
    exits: AtomicU64::new(0),
    guests: AtomicU64::new(0),
    unsteady: AtomicU64::new(0),
};

/// A record of a guest's run.
struct Account {
    /// The reason of each exit, and the registers at the exit.
    exits: Vec<String>,
    /// For each slot, its memory and the pages that its dirty log has reported. Empty if a kick has ended the guest.
    memory: Vec<(Vec<u8>, Vec<usize>)>,
}

/// Makes a guest from `rng`, and runs it both interpreted and compiled. Panics if the results differ.
pub fn compare(lane: &Lane, rng: &Rng, mode: Mode) {
    lane.enter();
    let tier = rng.clone().pick(&[Tier::Baseline, Tier::Full]);
    let mut interpreted = run(lane, rng, mode, Jit::Off, EXITS, INTERPRETED);
    let exits = interpreted.exits.len();
    if interpreted.memory.is_empty() {
        // A kick has ended the interpreted guest, so it is unknown which instructions it has executed since its last
        // exit. So the guest runs again, only up to that exit.
        interpreted = run(lane, rng, mode, Jit::Off, exits, COMPILED);
    }
    let at_once = Jit::AtOnce(tier);
    let compiled = run(lane, rng, mode, at_once, exits, COMPILED);
    if let Some(what) = difference(&interpreted, &compiled) {
        let mut again = (0..AGAIN).flat_map(|_| [(&interpreted, Jit::Off), (&compiled, at_once)]);
        let is_steady = again.all(|(before, jit)| {
            let now = run(lane, rng, mode, jit, exits, COMPILED);
            difference(before, &now).is_none()
        });
        assert!(
            !is_steady,
            "compiled code ({tier:?}) differs from the interpreter ({mode:?}): {what}"
        );
        COMPARED.unsteady.fetch_add(1, Ordering::Relaxed);
    } else {
        (COMPARED.exits).fetch_add(compiled.exits.len() as u64, Ordering::Relaxed);
        let whole = !compiled.memory.is_empty();
        (COMPARED.guests).fetch_add(whole.into(), Ordering::Relaxed);
    }
    lane.leave();
}

/// Returns the first difference, if there is one. If the compiled guest was kicked, it may have fewer exits.
fn difference(interpreted: &Account, compiled: &Account) -> Option<String> {
    let both = interpreted.exits.iter().zip(&compiled.exits);
    for (index, (interpreted, compiled)) in both.enumerate() {
        if interpreted != compiled {
            return Some(format!(
                "exit {index}\ninterpreted: {interpreted}\ncompiled:    {compiled}"
            ));
        }
    }
    let both = interpreted.memory.iter().zip(&compiled.memory);
    for (slot, ((first, logged), (second, logged_too))) in both.enumerate() {
        if let Some(at) = (0..first.len()).find(|at| first[*at] != second[*at]) {
            let bytes = at & !7..(at & !7) + 8;
            return Some(format!(
                "slot {slot} at {at:#x}\ninterpreted: {:x?}\ncompiled:    {:x?}",
                &first[bytes.clone()],
                &second[bytes]
            ));
        }
        if logged != logged_too {
            return Some(format!(
                "log of slot {slot}\ninterpreted: {logged:?}\ncompiled:    {logged_too:?}"
            ));
        }
    }
    None
}

/// Runs the guest for at most `exits` exits. If a KVM_RUN lasts longer than `length`, the guest is ended, and that
/// KVM_RUN is not in the account.
fn run(lane: &Lane, rng: &Rng, mode: Mode, jit: Jit, exits: usize, length: Duration) -> Account {
    let mut guest = Guest::new(&mut rng.clone(), mode, jit, End::Counts);
    let mut account = Account {
        exits: Vec::new(),
        memory: Vec::new(),
    };
    let (vcpu, conduct) = &mut guest.vcpus[0];
    let rng = &mut conduct.rng;
    set_turns(rng, vcpu);
    let mut is_whole = true;
    let mut broken = 0;
    while account.exits.len() < exits {
        let page = std::ptr::from_mut(vcpu.get_kvm_run()) as usize;
        let slice = Slice {
            page,
            length,
            kick: Kick::ExitAndSignal,
            extra: COMPILES,
        };
        let step = Step {
            what: "KVM_RUN",
            detail: [(jit != Jit::Off).into(), account.exits.len() as u64],
        };
        let (after, said) = lane.run(step, slice, || {
            let exit = vcpu.run();
            let said = format!("{exit:x?}");
            (answer(rng, exit, false), said)
        });
        if matches!(after, After::Kicked) {
            is_whole = false;
            break;
        }
        let now = registers(vcpu) + &sums(&guest.slots);
        // If a HLT repeats the previous state, the guest waits for an interrupt that never arrives, so it is ended.
        let ends =
            (account.exits.last()).is_some_and(|last| said == "Ok(Hlt)" && last.ends_with(&now));
        account.exits.push(said + &now);
        if ends {
            break;
        }
        if matches!(after, After::Broken) {
            broken += 1;
            if broken == BROKEN {
                break;
            }
            state::set(rng, mode, 0, vcpu, false);
            set_turns(rng, vcpu);
        }
        if rng.one_in(8) {
            event(rng, vcpu);
        }
    }
    guest.check();
    if is_whole {
        let memory = guest.slots.iter().map(|slot| {
            let logged = slot.dirty.iter().copied().collect();
            (slot.now(), logged)
        });
        account.memory = memory.collect();
    }
    account
}

/// Returns a text with a checksum of each slot's memory.
fn sums(slots: &[Slot]) -> String {
    let small = slots.iter().filter(|slot| slot.place.slot != HUGE.slot);
    let sums = small.map(|slot| {
        let words = slot.now();
        let sum = words.chunks_exact(8).fold(0, |sum: u64, word| {
            let word = u64::from_le_bytes(word.try_into().expect("8 bytes"));
            (sum.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95)
        });
        format!(" {sum:x}")
    });
    format!("\nmemory:{}", sums.collect::<String>())
}

/// Sets the number of iterations of the code, and the registers that [`state::set`] does not set.
fn set_turns(rng: &mut Rng, vcpu: &VcpuFd) {
    let mut registers = vcpu.get_regs().expect("registers can be read");
    registers.r15 = 1 + rng.below(TURNS);
    (registers.r10, registers.r11, registers.r13, registers.r14) =
        (linear(rng), rng.below(64), rng.word(), linear(rng));
    vcpu.set_regs(&registers).expect("registers can be set");
}

/// Returns the values of all registers as text.
fn registers(vcpu: &VcpuFd) -> String {
    let mut text = String::new();
    let general = vcpu.get_regs().expect("registers can be read");
    let special = vcpu.get_sregs().expect("registers can be read");
    let events = vcpu.get_vcpu_events().expect("events can be read");
    let debug = vcpu.get_debug_regs().expect("registers can be read");
    let _ = write!(
        text,
        "\n{general:x?}\n{special:x?}\n{events:x?}\n{debug:x?}\n"
    );
    // The text has only the words that are not 0, with their indices.
    let vectors = vcpu.get_xsave().expect("registers can be read").region;
    for (index, word) in vectors.iter().enumerate().filter(|(_, word)| **word != 0) {
        let _ = write!(text, " {index}:{word:x}");
    }
    text
}
