//! Tests interrupts from devices: by lines, messages and eventfds. Also tests guest writes that signal eventfds.

use crate::common::{DEVICE, Guest, vm};
use kvm_bindings::*;
use slat_kvm::{IoEventAddress, NoDatamatch, VcpuExit, VmFd};
use std::sync::mpsc;
use std::time::Duration;
use vmm_sys_util::eventfd::EventFd;

/// The address of the handler of interrupts 0 to 15: the guest has not changed the vectors of its 8259s.
const HANDLER: u64 = 0x1100;
/// The port to which the handler writes, so that the test learns of the interrupt.
const HANDLED: u16 = 0x10;
/// sti; 1: hlt; jmp 1b
const WAIT: &[u8] = &[0xfb, 0xf4, 0xeb, 0xfd];

/// Creates a guest that waits for interrupts, with the interrupt controllers of a PC. Its handler ends them at the 8259
/// and writes to [`HANDLED`].
fn waiting() -> Guest {
    let guest = Guest::with(WAIT, |vm| vm.create_irq_chip().unwrap());
    for vector in 0..16 {
        guest
            .memory
            .write(vector * 4, &(HANDLER as u32).to_le_bytes());
    }
    // mov al, 0x20; out 0x20, al; out 0xa0, al; out HANDLED, al; iret
    let code = [
        0xb0,
        0x20,
        0xe6,
        0x20,
        0xe6,
        0xa0,
        0xe6,
        HANDLED as u8,
        0xcf,
    ];
    guest.memory.write(HANDLER, &code);
    guest
}

/// Runs `act` and the guest. Returns the number of handled interrupts, when there has been none for a while.
fn handled(guest: Guest, act: impl FnOnce(&VmFd, &mpsc::Receiver<()>) + Send + 'static) -> usize {
    let Guest {
        mut vcpu,
        vm,
        memory,
        kvm,
    } = guest;
    let (told, heard) = mpsc::channel();
    let (done, end) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            act(&vm, &heard);
            // Counts the interrupts for which `act` did not wait.
            let mut more = 0;
            while heard.recv_timeout(Duration::from_millis(300)).is_ok() {
                more += 1;
            }
            done.send(more).unwrap();
            // The last interrupt ends the guest's thread, whatever state the guest is in.
            vm.set_irq_line(15, false).unwrap();
            drop(heard);
            vm.set_irq_line(15, true).unwrap();
        });
        loop {
            match vcpu.run() {
                Ok(VcpuExit::IoOut(HANDLED, _)) => {
                    if told.send(()).is_err() {
                        break;
                    }
                }
                Err(error) if error.errno() == libc::EINTR => {}
                other => panic!("{other:?}"),
            }
        }
    });
    drop((memory, kvm));
    end.recv().unwrap()
}

const SOON: Duration = Duration::from_secs(20);

#[test]
fn an_edge_on_a_line_is_one_interrupt_and_a_level_comes_again() {
    let more = handled(waiting(), |vm, heard| {
        for _ in 0..100 {
            vm.set_irq_line(4, true).unwrap();
            heard.recv_timeout(SOON).unwrap();
            vm.set_irq_line(4, false).unwrap();
        }
    });
    assert_eq!(more, 0);
}

#[test]
fn every_signal_of_an_irqfd_is_an_interrupt_until_it_is_taken_away() {
    let more = handled(waiting(), |vm, heard| {
        let event = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        vm.register_irqfd(&event, 5).unwrap();
        let again = vm.register_irqfd(&event, 6).unwrap_err();
        assert_eq!(again.errno(), libc::EBUSY);
        for _ in 0..100 {
            event.write(1).unwrap();
            heard.recv_timeout(SOON).unwrap();
        }
        // The same eventfd with another line is another irqfd.
        vm.unregister_irqfd(&event, 6).unwrap();
        event.write(1).unwrap();
        heard.recv_timeout(SOON).unwrap();
        vm.unregister_irqfd(&event.try_clone().unwrap(), 5).unwrap();
        event.write(1).unwrap();
    });
    assert_eq!(more, 0);
}

/// The signals of an eventfd go to one irqfd only.
#[test]
fn an_eventfd_is_an_irqfd_of_one_vm() {
    let [one, other] = [vm(), vm()];
    let event = EventFd::new(libc::EFD_NONBLOCK).unwrap();
    for vm in [&one, &other] {
        vm.create_irq_chip().unwrap();
    }
    one.register_irqfd(&event, 5).unwrap();
    let taken = other.register_irqfd(&event, 5).unwrap_err();
    assert_eq!(taken.errno(), libc::EBUSY);
    // The other VM has no such irqfd. Removing it is no error.
    other.unregister_irqfd(&event, 5).unwrap();
    one.unregister_irqfd(&event, 5).unwrap();
    other.register_irqfd(&event, 5).unwrap();
    drop(other);
    one.register_irqfd(&event, 5).unwrap();
}

#[test]
fn the_end_of_a_resampled_interrupt_is_signalled_and_lowers_the_line() {
    let more = handled(waiting(), |vm, heard| {
        // Makes line 11 level-triggered, by bit 3 of the second ELCR.
        let mut chip = kvm_irqchip {
            chip_id: KVM_IRQCHIP_PIC_SLAVE,
            ..Default::default()
        };
        vm.get_irqchip(&mut chip).unwrap();
        chip.chip.pic.elcr = 1 << 3;
        vm.set_irqchip(&chip).unwrap();
        let event = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        let ended = EventFd::new(0).unwrap();
        vm.register_irqfd_with_resample(&event, &ended, 11).unwrap();
        for _ in 0..100 {
            event.write(1).unwrap();
            heard.recv_timeout(SOON).unwrap();
            assert_eq!(ended.read().unwrap(), 1);
        }
        vm.unregister_irqfd(&event, 11).unwrap();
    });
    assert_eq!(more, 0);
}

#[test]
fn the_8254_ticks() {
    let guest = waiting();
    let flags = KVM_PIT_SPEAKER_DUMMY;
    let config = kvm_pit_config {
        flags,
        ..Default::default()
    };
    guest.vm.create_pit2(config).unwrap();
    assert_eq!(
        guest.vm.create_pit2(config).unwrap_err().errno(),
        libc::EEXIST
    );
    let mut state = guest.vm.get_pit2().unwrap();
    let channel = &mut state.channels[0];
    // The channel counts with 1 kHz in mode 2, and its count is written in two bytes.
    (channel.count, channel.mode, channel.rw_mode, channel.gate) = (1193, 2, 3, 1);
    guest.vm.set_pit2(&state).unwrap();
    handled(guest, |vm, heard| {
        for _ in 0..50 {
            heard.recv_timeout(SOON).unwrap();
        }
        let mut state = vm.get_pit2().unwrap();
        state.channels[0].mode = 0xff;
        vm.set_pit2(&state).unwrap();
    });
}

#[test]
fn a_write_that_matches_signals_the_eventfd_and_no_other_does() {
    // mov al, 7; out 0x30, al; mov al, 8; out 0x30, al; mov [DEVICE], al; mov [DEVICE], ax; hlt
    let code = [
        0xb0, 7, 0xe6, 0x30, 0xb0, 8, 0xe6, 0x30, 0xa2, 0, 0x80, 0xa3, 0, 0x80, 0xf4,
    ];
    let mut guest = Guest::new(&code);
    let [port, any_size, word] = [(); 3].map(|()| EventFd::new(libc::EFD_NONBLOCK).unwrap());
    let at_port = IoEventAddress::Pio(0x30);
    let at_device = IoEventAddress::Mmio(DEVICE);
    guest.vm.register_ioevent(&port, &at_port, 8u8).unwrap();
    guest
        .vm
        .register_ioevent(&any_size, &at_device, NoDatamatch)
        .unwrap();
    let errno = |result: Result<(), kvm_ioctls::Error>| result.map_err(|error| error.errno());
    let twice = guest.vm.register_ioevent(&word, &at_device, 3u16);
    assert_eq!(errno(twice), Err(libc::EEXIST));
    let other = guest.vm.unregister_ioevent(&word, &at_device, NoDatamatch);
    assert_eq!(errno(other), Err(libc::ENOENT));
    let VcpuExit::IoOut(0x30, data) = guest.vcpu.run().unwrap() else {
        panic!("the first write does not match");
    };
    assert_eq!(data, [7]);
    assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
    assert_eq!(port.read().unwrap(), 1);
    assert_eq!(any_size.read().unwrap(), 2);
    guest
        .vm
        .unregister_ioevent(&any_size, &at_device, NoDatamatch)
        .unwrap();
    crate::common::start_at_code(&guest.vcpu);
    assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::IoOut(..)));
    assert!(matches!(
        guest.vcpu.run().unwrap(),
        VcpuExit::MmioWrite(DEVICE, [8])
    ));
}
