//! Runs more VMs, one after another, than a TLB has VMIDs.

use alloc::format;

use slat::{Hva, Level, SlotFlags};

use super::Verdict;
use crate::bench::{Bench, page, pages, same, write_word};
use crate::{Machine, Op};

/// At the same address, each VM has another page than the VM before. So a CPU that uses a translation of an earlier VM
/// with the same number reads the wrong page.
pub(super) fn more_vms_than_vmids<M: Machine>(bench: &mut Bench<'_, M>) -> Verdict {
    const VMS: u32 = 300;
    /// A number that divides neither 127 nor 255, the numbers of VMs after which a VMID of 7 or 8 bits is used again.
    const PAGES: u32 = 7;
    for number in 0..PAGES {
        write_word(bench.page(number.into()), number);
    }
    for number in 0..VMS {
        let mut vm = bench.vm(Level::PAGE, &[("prefetch", "off")])?;
        let mut slot = bench.data_slot(page::<M>(), SlotFlags::default());
        slot.backing = Hva(bench.page((number % PAGES).into()).0);
        vm.set(&slot)?;
        let read = bench.run(&mut vm, pages::<M>(Op::Read, 0, 1))?;
        same("word read", read, number % PAGES)?;
        vm.end(&bench.host)?;
    }
    Ok(format!("{VMS} VMs"))
}
