//! Tests interrupts that arrive as fast as possible, eventfds that no thread reads, and controllers that are dropped
//! while in use: nothing hangs, and nothing leaks.
#![cfg(target_arch = "x86_64")]

mod common;
mod interrupt_guest;

use interrupt_guest::*;
use kvm_bindings::*;
use slat_kvm::abi::*;
use slat_model::Rng;
use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use vmm_sys_util::eventfd::EventFd;

const LEVEL: u64 = 1 << 15;
const VECTOR: u8 = 0x61;

/// Lock for tests that count descriptors and threads of the process, so that no other test runs meanwhile.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> impl Drop {
    ALONE
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Waits until all vCPUs accept interrupts.
fn all_have_begun(machine: &RunningMachine, vcpus: u64) {
    machine.wait("all vCPUs begin", || {
        (0..vcpus).all(|vcpu| machine.rounds(vcpu) != 0)
    });
}

/// Checks that all vCPUs make progress.
fn all_get_on(machine: &RunningMachine, vcpus: u64) {
    let before: Vec<_> = (0..vcpus).map(|vcpu| machine.rounds(vcpu)).collect();
    machine.wait("all vCPUs get on", || {
        (0..vcpus).all(|vcpu| machine.rounds(vcpu) > before[vcpu as usize] + 3)
    });
}

fn gets_on(machine: &RunningMachine, vector: u8) {
    let before = machine.count(vector);
    machine.wait(&format!("vector {vector:#x} gets on"), || {
        machine.count(vector) > before + 3
    });
}

/// Calls `KVM_IOEVENTFD` for a byte at a port.
fn ioeventfd(machine: &RunningMachine, event: &EventFd, port: u16, flags: u32) {
    let mut asked = kvm_ioeventfd {
        addr: port.into(),
        len: 1,
        fd: event.as_raw_fd(),
        flags: flags | 1 << kvm_ioeventfd_flag_nr_pio,
        ..Default::default()
    };
    assert_eq!(call(&machine.vm, KVM_IOEVENTFD, &mut asked), Ok(0));
}

const DEASSIGN: u32 = 1 << kvm_ioeventfd_flag_nr_deassign;

/// Returns code that repeats `out 0x30, al`.
fn kicking() -> Vec<u8> {
    forever(&[0xe6, 0x30])
}

fn any_port(_: usize, _: &Vcpu, reason: u32) {
    assert_eq!(reason, KVM_EXIT_IO);
}

#[test]
fn an_eventfd_is_signalled_until_it_is_taken_away_and_not_after() {
    let _alone = alone();
    let machine = Machine::new(Chips::Pc, &[kicking(), kicking(), kicking()], &[]).start(any_port);
    let event = EventFd::new(libc::EFD_NONBLOCK).unwrap();
    for round in 0..300 {
        ioeventfd(&machine, &event, 0x30, 0);
        machine.wait("a kick", || event.read().is_ok());
        ioeventfd(&machine, &event, 0x30, DEASSIGN);
        let _ = event.read();
        if round % 10 == 0 {
            std::thread::sleep(Duration::from_millis(2));
        }
        let late = event.read().map_err(|error| error.kind());
        assert_eq!(late, Err(ErrorKind::WouldBlock), "round {round}");
    }
}

/// The counter of an eventfd is full, so a write to its descriptor would wait. Neither a vCPU nor an EOI waits for it.
#[test]
fn an_eventfd_that_nobody_reads_makes_nobody_wait() {
    let _alone = alone();
    let programs = [[open(), kicking()].concat(), halting()];
    let machine = Machine::new(Chips::Pc, &programs, &[]);
    let machine = machine.start(any_port);
    let full = EventFd::new(0).unwrap();
    full.write(u64::MAX - 1).unwrap();
    ioeventfd(&machine, &full, 0x30, 0);
    all_have_begun(&machine, 2);
    all_get_on(&machine, 1);
    machine.set_pins(&[(6, u64::from(VECTOR) | LEVEL | 1 << 56)]);
    machine.route(&[to_pin(6, 6)]);
    let event = EventFd::new(0).unwrap();
    machine.irqfd(&event, 6, KVM_IRQFD_FLAG_RESAMPLE, Some(&full));
    for number in 1..=100 {
        event.write(1).unwrap();
        machine.wait("a level", || machine.count(VECTOR) == number);
        // The handler counts before it writes EOI. A signal before that EOI would raise a line that is already high.
        machine.wait("the end of a level", || !machine.is_high(6));
    }
    // The irqfds' thread drains a full eventfd that is an irqfd, too.
    let at_once = full.try_clone().unwrap();
    machine.route(&[to_pin(6, 6), to_message(40, 1, 0x77)]);
    machine.irqfd(&at_once, 40, 0, None);
    gets_on(&machine, 0x77);
}

/// The client closes its descriptor without removing the irqfd: the irqfd still works, and is dropped with its VM.
#[test]
fn a_closed_eventfd_and_a_closed_vm_leave_nothing_behind() {
    let _alone = alone();
    let round = || {
        let machine = Machine::new(Chips::Pc, &[halting(), busy()], &[]).start(no_exit);
        all_have_begun(&machine, 2);
        let routes: Vec<_> = (0..32).map(|gsi| to_message(gsi, gsi % 2, 0x61)).collect();
        machine.route(&routes);
        let mut events: Vec<_> = (0..32).map(|_| EventFd::new(0).unwrap()).collect();
        for (gsi, event) in events.iter().enumerate() {
            machine.irqfd(event, gsi as u32, 0, None);
            ioeventfd(&machine, event, gsi as u16, 0);
        }
        let kept = events[7].try_clone().unwrap();
        events.truncate(16);
        drop(events.remove(7));
        let before = machine.count(VECTOR);
        kept.write(1).unwrap();
        machine.wait("a signal of one that was closed", || {
            machine.count(VECTOR) > before
        });
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for event in &events {
                let stop = &stop;
                scope.spawn(move || {
                    while !stop.load(Ordering::SeqCst) {
                        event.write(1).unwrap();
                    }
                });
            }
            gets_on(&machine, VECTOR);
            // The VM is dropped while signals arrive.
            drop(machine);
            stop.store(true, Ordering::SeqCst);
        });
    };
    round();
    // The thread of the irqfds may keep the VM for a moment longer.
    let now = || (descriptors(), threads());
    std::thread::sleep(Duration::from_millis(100));
    let before = now();
    (0..10).for_each(|_| round());
    wait("descriptors and threads are given back", || now() <= before);
}

/// A device never lowers its line, and the guest ends the interrupt repeatedly. The vCPU of the handler and the other
/// vCPUs all make progress.
#[test]
fn a_line_that_stays_high_starves_nobody() {
    let _alone = alone();
    let machine = Machine::new(Chips::Pc, &[busy(), busy(), halting()], &[]).start(no_exit);
    all_have_begun(&machine, 3);
    machine.route(&[to_pin(6, 6)]);
    machine.set_pins(&[(6, u64::from(VECTOR) | LEVEL)]);
    assert_eq!(machine.line(6, true), 1);
    machine.wait("a storm", || machine.count(VECTOR) > 20_000);
    let before = [0, 1].map(|vcpu| machine.rounds(vcpu));
    machine.wait("the guest gets on", || {
        (0..2).all(|vcpu| machine.rounds(vcpu) > before[vcpu as usize] + 1000)
    });
    for _ in 0..100 {
        let before = machine.count(0x42);
        machine.message(2, 0x42);
        machine.wait("another vCPU's interrupt", || machine.count(0x42) > before);
    }
    machine.line(6, false);
    machine.settle();
    let count = machine.count(VECTOR);
    assert_eq!(machine.line(6, true), 1);
    machine.wait("again", || machine.count(VECTOR) > count);
}

/// Sixteen vCPUs send interrupts to all others, to themselves, or to some.
#[test]
fn sixteen_vcpus_send_to_each_other() {
    let _alone = alone();
    // The messages use: shorthands; a logical destination in x2APIC mode; a physical destination; lowest priority.
    let messages = [
        (0xc_4000 | 0x41, 0),
        (0x4_4000 | 0x42, 0),
        (0x8_4000 | 0x43, 0),
        (0x4800 | 0x44, 0xffff),
        (0x4000 | 0x45, 5),
        (0x4900 | 0x46, 0xf0),
        (0x4000 | 0x47, 0xff),
        (0x4000 | 0x48, u32::MAX),
    ];
    let programs: Vec<_> = (0..16)
        .map(|id| {
            let (low, high) = messages[id % messages.len()];
            sending(low, high)
        })
        .collect();
    let machine = Machine::new(Chips::Pc, &programs, &[]).start(no_exit);
    all_get_on(&machine, 16);
    for vector in [0x41, 0x42, 0x43, 0x44, 0x45, 0x46, 0x48] {
        gets_on(&machine, vector);
    }
    // In x2APIC mode, 255 is an ordinary id, which no vCPU has.
    assert_eq!(machine.count(0x47), 0);
}

/// Returns code that repeats `body`: mov bp, rounds; 1: body; dec bp; jnz 1b
fn times(rounds: u16, body: &[u8]) -> Vec<u8> {
    let mut code = vec![0xbd];
    code.extend(rounds.to_le_bytes());
    code.extend(body);
    code.extend([0x4d, 0x0f, 0x85]);
    let back = -(body.len() as i16 + 5);
    code.extend(back.to_le_bytes());
    code
}

/// A vCPU is reset and started repeatedly, while others send interrupts to it. At the end the vCPU runs, and accepts
/// interrupts.
#[test]
fn a_vcpu_is_reset_while_interrupts_come() {
    let _alone = alone();
    /// The page number at which the vCPU starts.
    const START: u32 = 0xd;
    let resets = [wrmsr(0x830, 0x4500, 1), wrmsr(0x830, 0x4600 | START, 1)].concat();
    let programs = [
        [open(), times(2000, &resets), forever(&[0xf3, 0x90])].concat(),
        halting(),
        sending(0x4000 | 0x41, 1),
        sending(0x4900 | 0x42, 2),
    ];
    let machine = Machine::new(Chips::Pc, &programs, &[]);
    // mov si, ROUNDS + 4; mov sp, ...; then the program of the other vCPUs
    let mut again = vec![0xbe, 0x04, 0x10, 0xbc, 0x00, 0x88];
    again.extend(halting());
    machine.memory.write(u64::from(START) << 12, &again);
    let machine = machine.start(no_exit);
    machine.wait("the resets end", || machine.rounds(0) != 0);
    gets_on(&machine, 0x41);
    gets_on(&machine, 0x42);
    all_get_on(&machine, 4);
}

/// A vCPU's APIC changes to each of its modes while other vCPUs send interrupts to it.
#[test]
fn an_apic_changes_its_mode_while_interrupts_come() {
    let _alone = alone();
    let base = 0xfee0_0000;
    // The vCPU accepts interrupts in x2APIC mode only, because the handlers end interrupts by an MSR.
    let modes = [
        vec![0xfa],
        wrmsr(0x1b, base, 0),
        wrmsr(0x1b, base | 0x800, 0),
        wrmsr(0x1b, base | 0xc00, 0),
        open(),
        vec![0x90],
    ];
    let programs = [
        halting(),
        [open(), times(3000, &modes.concat()), forever(&[0xf4])].concat(),
        sending(0x4000 | 0x41, 1),
        sending(0xc_4900 | 0x42, 0),
        sending(0x4800 | 0x43, 0xf),
    ];
    let machine = Machine::new(Chips::Pc, &programs, &[]).start(no_exit);
    machine.wait("the changes end", || machine.rounds(1) != 0);
    all_get_on(&machine, 5);
    for vector in [0x41, 0x42, 0x43] {
        gets_on(&machine, vector);
    }
}

/// A lowest-priority interrupt goes to one of the vCPUs that accept interrupts.
#[test]
fn the_lowest_priority_is_never_that_of_an_apic_that_is_off() {
    let _alone = alone();
    // The second and the fourth vCPU never enable their APICs.
    let off = forever(&[0xf3, 0x90]);
    let programs = [halting(), off.clone(), halting(), off];
    let machine = Machine::new(Chips::Pc, &programs, &[]).start(no_exit);
    all_have_begun(&machine, 4);
    // The messages have lowest priority and go to all, by a physical and by a logical destination.
    for (vector, address) in [
        (0x40, 0xff << 12),
        (0x80, 0xff << 12 | 4),
        (0xa0, 0xf << 12 | 4),
    ] {
        for vector in vector..vector + 8 {
            let mut message = kvm_msi {
                address_lo: 0xfee0_0000 | address,
                data: 0x100 | u32::from(vector),
                ..Default::default()
            };
            assert_eq!(
                call(&machine.vm, KVM_SIGNAL_MSI, &mut message),
                Ok(1),
                "{vector:#x}"
            );
            machine.wait("it comes", || machine.count(vector) == 1);
        }
    }
}

/// With the shortest periods of its timers, the guest still makes progress.
#[test]
fn the_fastest_timers_starve_nobody() {
    let _alone = alone();
    let timer = |lvt| [open(), wrmsr(0x83e, 0xb, 0), wrmsr(0x832, lvt, 0)].concat();
    let programs = [
        // A periodic timer with a period of one tick.
        [timer(0x2_0041), wrmsr(0x838, 1, 0), forever(&[0xf3, 0x90])].concat(),
        // A one-shot timer that is set repeatedly.
        [timer(0x42), forever(&wrmsr(0x838, 1, 0))].concat(),
        // A TSC deadline in the past.
        [timer(0x4_0043), forever(&wrmsr(0x6e0, 1, 0))].concat(),
        // A periodic timer that is stopped and started repeatedly.
        [
            timer(0x2_0044),
            forever(&[wrmsr(0x838, 0, 0), wrmsr(0x838, 3, 0), vec![0xf4]].concat()),
        ]
        .concat(),
        // The timer of the 8254, in mode 2 with count 1.
        [
            open(),
            vec![
                0xb0, 0x34, 0xe6, 0x43, 0xb0, 1, 0xe6, 0x40, 0xb0, 0, 0xe6, 0x40,
            ],
            forever(&[0xf4]),
        ]
        .concat(),
    ];
    let machine = Machine::new(Chips::Pc, &programs, &[]);
    assert_eq!(
        call(&machine.vm, KVM_CREATE_PIT2, &mut kvm_pit_config::default()),
        Ok(0)
    );
    set_pins(&machine.vm, &[(2, 0x45 | 4 << 56)]);
    route(&machine.vm, &[to_pin(0, 2)]);
    let machine = machine.start(no_exit);
    for vector in 0x41..=0x45 {
        gets_on(&machine, vector);
    }
    all_get_on(&machine, 5);
    assert_eq!(machine.message(0, VECTOR), 1);
    machine.wait("a message between ticks", || machine.count(VECTOR) == 1);
}

/// A client emulates the 8259. Each interrupt that it injects while the interrupt window is open is delivered once.
#[test]
fn a_client_gives_interrupts_through_windows() {
    let _alone = alone();
    let lint0 = wrmsr(0x835, 0x700, 0);
    for (chips, program) in [
        // sti; 1: nop; jmp 1b
        (Chips::None, vec![0xfb, 0x90, 0xeb, 0xfd]),
        (
            Chips::None,
            [vec![0xfb], forever(&[0xfa, 0x90, 0xfb, 0x90])].concat(),
        ),
        // LINT0 accepts interrupts of the client's 8259.
        (
            Chips::Split,
            [open(), lint0.clone(), forever(&[0x90])].concat(),
        ),
        (
            Chips::Split,
            [open(), lint0.clone(), forever(&[0xf4])].concat(),
        ),
    ] {
        let mut machine = Machine::new(chips, &[program], &[VECTOR]);
        let vcpu = machine.take(0);
        let mut handled = 0;
        for _ in 0..500 {
            vcpu.page.request_window(true);
            loop {
                match vcpu.run() {
                    Ok(KVM_EXIT_IRQ_WINDOW_OPEN) => break,
                    Ok(KVM_EXIT_IO) => handled += 1,
                    other => panic!("{other:?}"),
                }
            }
            assert!(vcpu.page.ready());
            vcpu.page.request_window(false);
            let mut interrupt = kvm_interrupt { irq: VECTOR.into() };
            assert_eq!(call(&vcpu.object, KVM_INTERRUPT, &mut interrupt), Ok(0));
            assert_eq!(vcpu.run(), Ok(KVM_EXIT_IO), "{chips:?}");
            assert_eq!(vcpu.page.port(), (PORT, VECTOR));
            handled += 1;
        }
        assert_eq!(handled, 500, "{chips:?}");
    }
}

/// A client that emulates the I/O APIC gets an exit for the EOI of each level-triggered interrupt, also if two end at
/// the same time.
#[test]
fn the_client_hears_of_each_end_of_a_level() {
    let _alone = alone();
    let machine = Machine::new(Chips::Split, &[halting()], &[]);
    // sti; 1: cmp word [0x1100], 0; je 1b; dec word [0x1100]: the other interrupt arrives during this loop. Then both
    // end: wrmsr; wrmsr.
    let nests = vec![
        0xfb, 0x83, 0x3e, 0x00, 0x11, 0x00, 0x74, 0xf9, 0xff, 0x0e, 0x00, 0x11,
    ];
    machine.set_handler(0x42, &[nests, end(), vec![0x0f, 0x30]].concat());
    // inc word [0x1100]
    machine.set_handler(0x52, &[0xff, 0x06, 0x00, 0x11]);
    let asserted = 0x8000 | 0x4000;
    route(
        &machine.vm,
        &[
            to_message(4, 0, asserted | 0x42),
            to_message(5, 0, asserted | 0x52),
            to_message(6, 0, asserted | u32::from(VECTOR)),
            // The EOIs of these two interrupts cause no exit: the first has a GSI above the pins of the I/O APIC, and
            // the second is edge-triggered.
            to_message(24, 0, asserted | 0x71),
            to_message(7, 0, 0x72),
        ],
    );
    let ended: Arc<[AtomicU32; 256]> = Arc::new(std::array::from_fn(|_| AtomicU32::new(0)));
    let heard = ended.clone();
    let machine = machine.start(move |_, vcpu, reason| {
        assert_eq!(reason, KVM_EXIT_IOAPIC_EOI);
        heard[usize::from(vcpu.page.ended())].fetch_add(1, Ordering::SeqCst);
    });
    all_have_begun(&machine, 1);
    let count = |vector: usize| ended[vector].load(Ordering::SeqCst);
    for number in 1..=300 {
        machine.line(6, true);
        machine.line(24, true);
        machine.line(7, true);
        machine.wait("the end of a level", || {
            count(VECTOR.into()) == number
                && [0x71, 0x72]
                    .iter()
                    .all(|&vector| machine.count(vector) == number)
        });
    }
    for _ in 0..300 {
        let before = [count(0x42), count(0x52)];
        let outer = machine.count(0x42);
        machine.line(4, true);
        machine.wait("the outer one", || machine.count(0x42) > outer);
        machine.line(5, true);
        machine.wait("both ends", || {
            [count(0x42), count(0x52)] == before.map(|before| before + 1)
        });
    }
    assert_eq!([0x71, 0x72].map(count), [0, 0]);
}

/// If an interrupt of the 8259 is pending, a vCPU gets it as soon as it unmasks LINT0 or disables its APIC. No other
/// event is needed.
#[test]
fn an_interrupt_that_waits_is_seen_when_its_way_opens() {
    let _alone = alone();
    let spin = vec![0xeb, 0xfe];
    let closed = [wrmsr(0x835, 0x1_0000, 0), open()].concat();
    for opens in [wrmsr(0x835, 0x700, 0), wrmsr(0x1b, 0xfee0_0100, 0)] {
        // In between, the vCPU runs for a while, so that slat finds that the vCPU cannot take the interrupt.
        let program = [closed.clone(), times(20_000, &[0x90]), opens, spin.clone()].concat();
        let machine = Machine::new(Chips::Pc, &[program], &[]);
        machine.set_handler(0x24, &[0xf4]);
        let mut entry = to_pin(4, 4);
        entry.u.irqchip.irqchip = KVM_IRQCHIP_PIC_MASTER;
        route(&machine.vm, &[entry]);
        let mut chip = kvm_irqchip::default();
        assert_eq!(call(&machine.vm, KVM_GET_IRQCHIP, &mut chip), Ok(0));
        (chip.chip.pic.irq_base, chip.chip.pic.imr) = (0x20, 0);
        assert_eq!(call(&machine.vm, KVM_SET_IRQCHIP, &mut chip), Ok(0));
        let mut line = kvm_irq_level {
            level: 1,
            ..Default::default()
        };
        line.__bindgen_anon_1.irq = 4;
        assert_eq!(call(&machine.vm, KVM_IRQ_LINE, &mut line), Ok(0));
        let machine = machine.start(no_exit);
        machine.wait("the 8259's interrupt", || machine.count(0x24) == 1);
    }
}

/// In a forked child, the copies of irqfds do nothing. The irqfds of the parent still work.
#[test]
fn a_client_with_irqfds_forks() {
    let _alone = alone();
    let machine = Machine::new(Chips::Pc, &[halting()], &[]).start(no_exit);
    machine.route(&[to_message(3, 0, VECTOR.into())]);
    let event = EventFd::new(0).unwrap();
    machine.irqfd(&event, 3, 0, None);
    all_have_begun(&machine, 1);
    let mut rng = Rng::new(1);
    let mut number = 0;
    for _ in 0..20 {
        // SAFETY: the child makes one call, which takes no lock that another thread may have held, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let mut irqfd = kvm_irqfd {
                fd: event.as_raw_fd() as u32,
                gsi: 3,
                flags: KVM_IRQFD_FLAG_DEASSIGN,
                ..Default::default()
            };
            let refused = call(&machine.vm, KVM_IRQFD, &mut irqfd) == Err(libc::EIO);
            // SAFETY: the call ends the child at once, without running its destructors.
            unsafe { libc::_exit(i32::from(!refused)) };
        }
        for _ in 0..20 {
            number += 1;
            event.write(1).unwrap();
            machine.wait("a signal", || machine.count(VECTOR) == number);
            pause(&mut rng);
        }
        let mut status = -1;
        // SAFETY: `child` is a child of this process, and `status` is a local variable.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
    }
}
