use super::*;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use slat::{Config, Ept, Gpa, Region, SlotFlags, Stop, Vm};

/// Anonymous memory of this test.
struct Memory(usize, usize);

impl Memory {
    fn new(bytes: usize, prot: ProtFlags) -> Self {
        // SAFETY: the call makes a new anonymous mapping at an address of the kernel's choice.
        let at = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, prot, MapFlags::PRIVATE) }
            .unwrap();
        Memory(at as usize, bytes)
    }

    fn hva(&self) -> Hva {
        Hva(self.0 as u64)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: `new` has made this mapping, and only this test uses it.
        unsafe { munmap(self.0 as *mut _, self.1) }.unwrap();
        mappings::changed(self.0..self.0 + self.1);
    }
}

fn vm_with(memory: &Memory, flags: SlotFlags) -> Arc<Vm<HostPlatform, Ept>> {
    let vm = Vm::new(HostPlatform::new().unwrap(), Config::default()).unwrap();
    let region = Region::new(0, Gpa(0x10_0000), memory.1 as u64, memory.hva()).with_flags(flags);
    vm.set_memory_region(0, &region).unwrap();
    vm
}

const RW: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

#[test]
fn a_fault_leads_to_the_memory_behind_the_slot() {
    let memory = Memory::new(1 << 16, RW);
    let vm = vm_with(&memory, SlotFlags::default());
    let mut vcpu = vm.create_vcpu().unwrap();
    vcpu.enter_unguarded(0);
    let page = vcpu.translate(Gpa(0x10_3008), Access::Write).unwrap();
    assert_eq!(page.host.0, memory.0 as u64 + 0x3000);
    assert!(page.write && page.execute);
    vcpu.leave();
    vm.audit().unwrap();
}

#[test]
fn a_mapping_that_is_gone_is_a_bad_address() {
    let memory = Memory::new(1 << 16, RW);
    let vm = vm_with(&memory, SlotFlags::default());
    let mut vcpu = vm.create_vcpu().unwrap();
    vcpu.enter_unguarded(0);
    vcpu.translate(Gpa(0x10_0000), Access::Read).unwrap();
    vcpu.leave();
    {
        let _invalidation = vm.invalidate(memory.hva()..Hva(memory.hva().0 + 0x1_0000));
        drop(memory);
    }
    vcpu.enter_unguarded(0);
    let stop = vcpu.translate(Gpa(0x10_0000), Access::Read).unwrap_err();
    assert!(matches!(
        stop,
        Stop::BadAddress {
            error: ResolveError::BadAddress,
            ..
        }
    ));
    vcpu.leave();
}

#[test]
fn a_read_only_mapping_refuses_writes_and_is_mapped_read_only() {
    let memory = Memory::new(1 << 16, ProtFlags::READ);
    let vm = vm_with(&memory, SlotFlags::default());
    let mut vcpu = vm.create_vcpu().unwrap();
    vcpu.enter_unguarded(0);
    assert!(!vcpu.translate(Gpa(0x10_0000), Access::Read).unwrap().write);
    assert!(vcpu.translate(Gpa(0x10_0000), Access::Write).is_err());
    vcpu.leave();
    vm.audit().unwrap();
}

#[test]
fn contiguous_memory_is_mapped_huge_where_slot_and_alignment_allow() {
    let memory = Memory::new(8 << 20, RW);
    let vm = Vm::<_, Ept>::new(HostPlatform::new().unwrap(), Config::default()).unwrap();
    vm.platform().set_contiguous(true);
    let skew = memory.hva().0 % (2 << 20);
    let region = Region::new(3, Gpa((1 << 30) + skew), 8 << 20, memory.hva());
    vm.set_memory_region(0, &region).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    vcpu.enter_unguarded(0);
    let inside = Gpa((1 << 30) + (4 << 20));
    assert_eq!(
        vcpu.translate(inside, Access::Read).unwrap().level,
        Level::MEGA
    );
    vcpu.leave();
    assert_eq!(vm.stats().pages_2m, 1);
    vm.audit().unwrap();
}
