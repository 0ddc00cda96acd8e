//! Tests edges, levels, messages and irqfds: every injected interrupt is delivered or reported as coalesced, and the
//! last one is always delivered. If each interrupt is acknowledged before the next, each is delivered.
#![cfg(target_arch = "x86_64")]

mod common;
mod interrupt_guest;

use interrupt_guest::*;
use kvm_bindings::*;
use slat_kvm::abi::*;
use slat_kvm::ioctl::Object;
use slat_model::Rng;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use vmm_sys_util::eventfd::EventFd;

const LEVEL: u64 = 1 << 15;
const EDGE_VECTOR: u8 = 0x41;
const LEVEL_VECTOR: u8 = 0x52;
const MESSAGE_VECTOR: u8 = 0x63;
const IRQFD_VECTOR: u8 = 0x74;
const PIN_VECTOR: u8 = 0x85;
/// The GSI of the edge-triggered line. The next constants are the GSIs of the level-triggered line, the message, the
/// irqfd's message and the irqfd's pin.
const EDGE: u32 = 5;
const LEVEL_GSI: u32 = 6;
const MESSAGE: u32 = 30;
const IRQFD: u32 = 31;
const PIN: u32 = 7;

/// Returns a pin's redirection entry that sends `vector` to the APIC `apic`.
fn entry(vector: u8, apic: u64) -> u64 {
    u64::from(vector) | apic << 56
}

fn routes() -> Vec<kvm_irq_routing_entry> {
    vec![
        to_pin(EDGE, EDGE),
        to_pin(LEVEL_GSI, LEVEL_GSI),
        to_pin(PIN, PIN),
        to_message(MESSAGE, 2, MESSAGE_VECTOR.into()),
        to_message(IRQFD, 3, IRQFD_VECTOR.into()),
    ]
}

/// A device with a level-triggered line: the line is high while the device has requests that the guest has not served.
struct Device {
    vm: Object,
    /// The number of requests, and the number of requests that the guest has served.
    requests: Mutex<(u32, u32)>,
}

impl Device {
    fn set_line(&self, level: u32) -> i32 {
        let mut line = kvm_irq_level {
            level,
            ..Default::default()
        };
        line.__bindgen_anon_1.irq = LEVEL_GSI;
        assert_eq!(call(&self.vm, KVM_IRQ_LINE_STATUS, &mut line), Ok(0));
        // SAFETY: the call has written this part of the union.
        unsafe { line.__bindgen_anon_1.status }
    }

    /// Makes one more request. Returns the status of its line, and the number of the request.
    fn request(&self) -> (i32, u32) {
        let mut requests = self.requests.lock().unwrap();
        requests.0 += 1;
        (self.set_line(1), requests.0)
    }

    /// Marks all requests as served by the guest.
    fn serve(&self) {
        let mut requests = self.requests.lock().unwrap();
        requests.1 = requests.0;
        self.set_line(0);
    }

    fn served(&self) -> u32 {
        self.requests.lock().unwrap().1
    }
}

/// Starts four vCPUs, each of which has its own source of interrupts. Returns the machine, and the device of the level.
fn machine() -> (RunningMachine, Arc<Device>) {
    let machine = Machine::new(
        Chips::Pc,
        &[halting(), busy(), halting(), busy()],
        &[LEVEL_VECTOR],
    );
    route(&machine.vm, &routes());
    let device = Arc::new(Device {
        vm: machine.vm.clone(),
        requests: Mutex::default(),
    });
    let served = device.clone();
    let running = machine.start(move |_, vcpu, reason| {
        assert_eq!(reason, KVM_EXIT_IO);
        assert_eq!(vcpu.page.port(), (PORT, LEVEL_VECTOR));
        served.serve();
    });
    running.set_pins(&[
        (EDGE as usize, entry(EDGE_VECTOR, 0)),
        (LEVEL_GSI as usize, entry(LEVEL_VECTOR, 1) | LEVEL),
        (PIN as usize, entry(PIN_VECTOR, 2)),
    ]);
    running.wait("the vCPUs start", || {
        (0..4).all(|vcpu| running.rounds(vcpu) != 0)
    });
    (running, device)
}

/// The result of many interrupts from one source.
#[derive(Debug, Default, PartialEq, Eq)]
struct Storm {
    injected: u32,
    delivered: u32,
    coalesced: u32,
}

impl Storm {
    fn count(&mut self, status: i32) {
        self.injected += 1;
        match status {
            1 => self.delivered += 1,
            0 => self.coalesced += 1,
            other => panic!("status {other}"),
        }
    }
}

/// Injects `rounds` interrupts at random times. `inject` returns the status.
fn storm(
    machine: &RunningMachine,
    vector: u8,
    rounds: u32,
    seed: u64,
    inject: impl Fn() -> i32,
) -> Storm {
    let mut rng = Rng::new(seed);
    let mut storm = Storm::default();
    for number in 1..=rounds {
        machine.send(vector, number);
        storm.count(inject());
        pause(&mut rng);
    }
    machine.wait("the last of a storm is delivered", || {
        machine.seen(vector) == rounds
    });
    storm
}

fn pulse(machine: &RunningMachine, gsi: u32) -> i32 {
    let status = machine.line(gsi, true);
    machine.line(gsi, false);
    status
}

#[test]
fn what_is_not_reported_as_coalesced_is_delivered() {
    let (machine, _device) = machine();
    let rounds = 5000;
    let event = EventFd::new(0).unwrap();
    machine.irqfd(&event, IRQFD, 0, None);
    let [edge, message] = std::thread::scope(|scope| {
        let machine = &machine;
        let edge =
            scope.spawn(move || storm(machine, EDGE_VECTOR, rounds, 1, || pulse(machine, EDGE)));
        let message = scope.spawn(move || {
            storm(machine, MESSAGE_VECTOR, rounds, 2, || {
                machine.line(MESSAGE, true)
            })
        });
        let irqfd = scope.spawn(move || {
            storm(machine, IRQFD_VECTOR, rounds, 3, || {
                event.write(1).map_or(-1, |()| 1)
            })
        });
        irqfd.join().unwrap();
        [edge, message].map(|thread| thread.join().unwrap())
    });
    machine.settle();
    for (storm, vector) in [(edge, EDGE_VECTOR), (message, MESSAGE_VECTOR)] {
        assert_eq!(storm.injected, storm.delivered + storm.coalesced);
        assert_eq!(machine.count(vector), storm.delivered, "{storm:?}");
    }
    // An eventfd has a counter, so several signals may become one interrupt.
    let irqfds = machine.count(IRQFD_VECTOR);
    assert!((1..=rounds).contains(&irqfds), "{irqfds}");
}

#[test]
fn with_an_acknowledgement_between_them_each_is_delivered() {
    let (machine, device) = machine();
    let [message_event, pin_event] = [(); 2].map(|()| EventFd::new(0).unwrap());
    machine.irqfd(&message_event, IRQFD, 0, None);
    machine.irqfd(&pin_event, PIN, 0, None);
    let rounds = 1000;
    std::thread::scope(|scope| {
        let (machine, device) = (&machine, &device);
        let each = |vector: u8, inject: &dyn Fn()| {
            for number in 1..=rounds {
                inject();
                machine.wait("an interrupt is delivered", || {
                    machine.count(vector) >= number
                });
            }
        };
        scope.spawn(move || each(EDGE_VECTOR, &|| assert_eq!(pulse(machine, EDGE), 1)));
        scope.spawn(move || {
            for number in 1..=rounds {
                // The EOI of the previous interrupt may still be in progress. Then this request is ignored for now.
                assert!(matches!(device.request(), (-1 | 1, n) if n == number));
                machine.wait("a level is served", || device.served() == number);
            }
        });
        scope.spawn(move || {
            each(MESSAGE_VECTOR, &|| {
                assert_eq!(machine.message(2, MESSAGE_VECTOR), 1)
            })
        });
        scope.spawn(move || each(IRQFD_VECTOR, &|| message_event.write(1).unwrap()));
        scope.spawn(move || each(PIN_VECTOR, &|| pin_event.write(1).unwrap()));
    });
    machine.settle();
    for vector in [
        EDGE_VECTOR,
        LEVEL_VECTOR,
        MESSAGE_VECTOR,
        IRQFD_VECTOR,
        PIN_VECTOR,
    ] {
        assert_eq!(machine.count(vector), rounds, "vector {vector:#x}");
    }
}

/// A device makes many requests: the last one is served, and a line that stays high is one interrupt.
#[test]
fn a_level_is_delivered_until_it_is_low() {
    let (machine, device) = machine();
    let mut rng = Rng::new(4);
    let (mut delivered, rounds) = (0, 3000);
    for _ in 0..rounds {
        delivered += u32::from(device.request().0 == 1);
        pause(&mut rng);
    }
    machine.wait("the last request is served", || device.served() == rounds);
    machine.settle();
    let count = machine.count(LEVEL_VECTOR);
    // The number of interrupts is at least that of the interrupts delivered at once. Lines that were high at an EOI add
    // more.
    assert!(
        (delivered..=rounds).contains(&count),
        "{count}, {delivered}"
    );
    // Checks that the pin still works.
    assert_eq!(device.request().0, 1);
    machine.wait("one more", || device.served() > rounds);
    machine.settle();
    assert_eq!(machine.count(LEVEL_VECTOR), count + 1);
}

/// Two resampled irqfds share a line. At an EOI, a device that still has requests signals again.
#[test]
fn resampled_irqfds_that_share_a_line_are_all_served() {
    let machine = Machine::new(Chips::Pc, &[halting(), busy()], &[LEVEL_VECTOR]);
    route(&machine.vm, &routes());
    // The number of open requests of each device. One run of the handler serves one request.
    let wanted: Arc<[AtomicU32; 2]> = Arc::default();
    let served = wanted.clone();
    let machine = machine.start(move |_, _, reason| {
        assert_eq!(reason, KVM_EXIT_IO);
        let one = served.iter().find(|left| left.load(Ordering::SeqCst) != 0);
        if let Some(one) = one {
            one.fetch_sub(1, Ordering::SeqCst);
        }
    });
    machine.set_pins(&[(LEVEL_GSI as usize, entry(LEVEL_VECTOR, 0) | LEVEL)]);
    machine.wait("the vCPU starts", || machine.rounds(0) != 0);
    let devices: Vec<_> = (0..2)
        .map(|_| [EventFd::new(0).unwrap(), EventFd::new(0).unwrap()])
        .collect();
    for [event, ended] in &devices {
        machine.irqfd(event, LEVEL_GSI, KVM_IRQFD_FLAG_RESAMPLE, Some(ended));
    }
    let rounds = 2000;
    let left = Mutex::new(2);
    std::thread::scope(|scope| {
        for (device, [event, ended]) in devices.iter().enumerate() {
            let (wanted, left, machine) = (&wanted, &left, &machine);
            scope.spawn(move || {
                let mut rng = Rng::new(device as u64);
                for _ in 0..rounds {
                    wanted[device].fetch_add(1, Ordering::SeqCst);
                    event.write(1).unwrap();
                    pause(&mut rng);
                }
                // At the EOI, a device with open requests signals again.
                while wanted[device].load(Ordering::SeqCst) != 0 {
                    ended.read().unwrap();
                    if wanted[device].load(Ordering::SeqCst) != 0 {
                        event.write(1).unwrap();
                    }
                }
                *left.lock().unwrap() -= 1;
                // Waits until the other device has no open requests. The requests of this device may cause the EOI for
                // which the other device waits.
                while *left.lock().unwrap() != 0 {
                    event.write(1).unwrap();
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
                let _ = machine;
            });
        }
    });
    assert_eq!(
        wanted.each_ref().map(|left| left.load(Ordering::SeqCst)),
        [0, 0]
    );
    machine.settle();
    let count = machine.count(LEVEL_VECTOR);
    assert!(count >= 2 * rounds, "{count}");
}

/// Lines, messages and irqfds inject interrupts, while all routes are replaced repeatedly. No source gets stuck, and
/// the last interrupt of each is not lost.
#[test]
fn routes_change_while_interrupts_flow() {
    let (machine, device) = machine();
    let [message_event, pin_event] = [(); 2].map(|()| EventFd::new(0).unwrap());
    machine.irqfd(&message_event, IRQFD, 0, None);
    machine.irqfd(&pin_event, PIN, 0, None);
    let full = |others: u32| {
        let mut entries = routes();
        let taken: Vec<_> = entries.iter().map(|entry| entry.gsi).collect();
        let free = (0..4096).filter(|gsi| !taken.contains(gsi));
        entries.extend(free.map(|gsi| to_message(gsi, others, 0x30)));
        // The pin's GSI is routed to another pin now and then.
        if others == 1 {
            let at = entries.iter().position(|entry| entry.gsi == PIN).unwrap();
            entries[at] = to_pin(PIN, 9);
        }
        entries
    };
    let tables = [full(0), full(1)];
    assert_eq!(tables[1].len(), 4096);
    machine.set_pins(&[(9, entry(PIN_VECTOR, 2))]);
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let machine = &machine;
        let changer = scope.spawn(|| {
            let mut changes = 0;
            while !stop.load(Ordering::SeqCst) {
                machine.route(&tables[changes % 2]);
                changes += 1;
            }
            machine.route(&tables[0]);
            changes
        });
        let rounds = 3000;
        let sources = [
            scope.spawn(move || storm(machine, EDGE_VECTOR, rounds, 1, || pulse(machine, EDGE))),
            scope.spawn(move || {
                storm(machine, MESSAGE_VECTOR, rounds, 2, || {
                    machine.line(MESSAGE, true)
                })
            }),
            scope.spawn({
                let event = message_event.try_clone().unwrap();
                move || {
                    storm(machine, IRQFD_VECTOR, rounds, 3, || {
                        event.write(1).map_or(-1, |()| 1)
                    })
                }
            }),
            scope.spawn({
                let event = pin_event.try_clone().unwrap();
                move || {
                    storm(machine, PIN_VECTOR, rounds, 4, || {
                        event.write(1).map_or(-1, |()| 1)
                    })
                }
            }),
        ];
        let mut rng = Rng::new(5);
        for _ in 0..rounds {
            device.request();
            pause(&mut rng);
        }
        let storms = sources.map(|source| source.join().unwrap());
        machine.wait("the last request", || device.served() == rounds);
        stop.store(true, Ordering::SeqCst);
        assert!(changer.join().unwrap() > 1);
        machine.settle();
        for (storm, vector) in storms[..2].iter().zip([EDGE_VECTOR, MESSAGE_VECTOR]) {
            assert_eq!(machine.count(vector), storm.delivered, "{storm:?}");
        }
    });
    // Afterwards every source still works.
    for number in 1..=20 {
        for (vector, inject) in [
            (EDGE_VECTOR, &(|| _ = pulse(&machine, EDGE)) as &dyn Fn()),
            (LEVEL_VECTOR, &|| _ = device.request()),
            (MESSAGE_VECTOR, &|| _ = machine.line(MESSAGE, true)),
            (IRQFD_VECTOR, &|| message_event.write(1).unwrap()),
            (PIN_VECTOR, &|| pin_event.write(1).unwrap()),
        ] {
            let before = machine.count(vector);
            inject();
            machine.wait(&format!("{vector:#x} after the storm, {number}"), || {
                machine.count(vector) > before
            });
        }
    }
}

/// An irqfd's signal raises a line for a moment. Afterwards the line is low, even if the GSI was routed elsewhere in
/// between.
#[test]
fn a_pulse_ends_where_it_began() {
    let (machine, _device) = machine();
    let tables = [[to_pin(PIN, PIN)], [to_pin(PIN, 9)]];
    machine.set_pins(&[(9, entry(PIN_VECTOR, 2))]);
    let event = EventFd::new(0).unwrap();
    machine.irqfd(&event, PIN, 0, None);
    let begin = std::time::Instant::now();
    let in_time = || begin.elapsed() < std::time::Duration::from_secs(2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while in_time() {
                tables.iter().for_each(|table| machine.route(table));
            }
        });
        while in_time() {
            event.write(1).unwrap();
        }
    });
    for table in &tables {
        machine.settle();
        machine.route(table);
        let before = machine.count(PIN_VECTOR);
        event.write(1).unwrap();
        machine.wait("an edge", || machine.count(PIN_VECTOR) > before);
    }
}

/// A signal before the removal of the irqfd is an interrupt. A later signal is not.
#[test]
fn an_irqfd_is_taken_away_between_two_signals() {
    let (machine, _device) = machine();
    let event = EventFd::new(libc::EFD_NONBLOCK).unwrap();
    for number in 1..=500 {
        machine.irqfd(&event, IRQFD, 0, None);
        event.write(1).unwrap();
        machine.irqfd(&event, IRQFD, KVM_IRQFD_FLAG_DEASSIGN, None);
        event.write(1).unwrap();
        machine.wait("the signal before", || {
            machine.count(IRQFD_VECTOR) >= number
        });
        assert_eq!(event.read().unwrap(), 1, "the one after is the client's");
        assert_eq!(machine.count(IRQFD_VECTOR), number);
    }
    machine.settle();
    assert_eq!(machine.count(IRQFD_VECTOR), 500);
}

/// A client that saves a machine finds in the APIC's registers all interrupts that were signalled before.
#[test]
fn what_was_signalled_is_in_the_state_that_is_saved() {
    let mut machine = Machine::new(Chips::Pc, &[halting()], &[]);
    route(&machine.vm, &routes()[..1]);
    let vcpu = machine.take(0);
    let vm = machine.vm.clone();
    let mut lapic = kvm_lapic_state::default();
    assert_eq!(call(&vcpu.object, KVM_GET_LAPIC, &mut lapic), Ok(0));
    // The guest has enabled the APIC by software.
    (lapic.regs[0xf0], lapic.regs[0xf1]) = (-1, 1);
    let event = EventFd::new(0).unwrap();
    let mut irqfd = kvm_irqfd {
        fd: std::os::fd::AsRawFd::as_raw_fd(&event) as u32,
        gsi: IRQFD,
        ..Default::default()
    };
    route(&vm, &[to_message(IRQFD, 0, IRQFD_VECTOR.into())]);
    assert_eq!(call(&vm, KVM_IRQFD, &mut irqfd), Ok(0));
    for _ in 0..500 {
        assert_eq!(call(&vcpu.object, KVM_SET_LAPIC, &mut lapic), Ok(0));
        event.write(1).unwrap();
        let mut saved = kvm_lapic_state::default();
        assert_eq!(call(&vcpu.object, KVM_GET_LAPIC, &mut saved), Ok(0));
        let at = 0x200 + 16 * usize::from(IRQFD_VECTOR / 32) + usize::from(IRQFD_VECTOR % 32 / 8);
        assert_eq!(saved.regs[at] as u8 >> (IRQFD_VECTOR % 8) & 1, 1);
    }
    drop(machine);
}
