//! Conversion of the CPU's registers to KVM's structs, and back.

use crate::arch::x86_64::cpuid::pkru_offset;
use crate::arch::x86_64::same_fields::same_fields;
use crate::errno::{Result, fail};
use kvm_bindings::*;
use slat_x86::state::{control, flags, xcr0};
use slat_x86::{Features, Segment, State, Table};

/// The bits of RFLAGS that a caller can set.
pub(crate) const FLAGS: u64 = 0x003f_7fd5;

/// Carries out `KVM_GET_REGS`.
pub fn get_regs(state: &State) -> kvm_regs {
    let [
        rax,
        rcx,
        rdx,
        rbx,
        rsp,
        rbp,
        rsi,
        rdi,
        r8,
        r9,
        r10,
        r11,
        r12,
        r13,
        r14,
        r15,
    ] = state.gpr;
    kvm_regs {
        rax,
        rbx,
        rcx,
        rdx,
        rsi,
        rdi,
        rsp,
        rbp,
        r8,
        r9,
        r10,
        r11,
        r12,
        r13,
        r14,
        r15,
        rip: state.rip,
        rflags: state.rflags,
    }
}

/// Carries out `KVM_SET_REGS`. Accepts all values, as KVM does, and drops a pending exception.
pub fn set_regs(state: &mut State, regs: &kvm_regs) {
    state.gpr = [
        regs.rax, regs.rcx, regs.rdx, regs.rbx, regs.rsp, regs.rbp, regs.rsi, regs.rdi, regs.r8,
        regs.r9, regs.r10, regs.r11, regs.r12, regs.r13, regs.r14, regs.r15,
    ];
    state.rip = regs.rip;
    state.rflags = regs.rflags & FLAGS | flags::ALWAYS;
    state.events.exception = None;
    state.events.debug = 0;
}

/// Whether PAE paging is in use. With PAE paging, the CPU holds the page-directory-pointer entries.
pub(crate) fn uses_pae_paging(state: &State) -> bool {
    is_pae_paging(state.cr0, state.cr4, state.efer)
}

fn is_pae_paging(cr0: u64, cr4: u64, efer: u64) -> bool {
    cr0 & control::CR0_PG != 0 && cr4 & control::CR4_PAE != 0 && efer & control::EFER_LMA == 0
}

fn segment(segment: &Segment) -> kvm_segment {
    let bit = |n: u32| (segment.rights >> n & 1) as u8;
    let unusable = u8::from(segment.rights & Segment::UNUSABLE != 0);
    kvm_segment {
        base: segment.base,
        limit: segment.limit,
        selector: segment.selector,
        type_: (segment.rights & 15) as u8,
        present: bit(7),
        dpl: (segment.rights >> 5 & 3) as u8,
        db: bit(14),
        s: bit(4),
        l: bit(13),
        g: bit(15),
        avl: bit(12),
        unusable,
        padding: 0,
    }
}

fn from_segment(segment: &kvm_segment) -> Segment {
    let bit = |value: u8, n: u32| u32::from(value & 1) << n;
    let mut rights = u32::from(segment.type_ & 15)
        | bit(segment.s, 4)
        | u32::from(segment.dpl & 3) << 5
        | bit(segment.present, 7)
        | bit(segment.avl, 12)
        | bit(segment.l, 13)
        | bit(segment.db, 14)
        | bit(segment.g, 15);
    // VMX has no segment that is neither present nor unusable. So a segment that is not present becomes unusable.
    if segment.unusable != 0 || segment.present == 0 {
        rights |= Segment::UNUSABLE;
    }
    Segment {
        selector: segment.selector,
        base: segment.base,
        limit: segment.limit,
        rights,
    }
}

fn table(table: &Table) -> kvm_dtable {
    kvm_dtable {
        base: table.base,
        limit: table.limit,
        padding: [0; 3],
    }
}

fn from_table(table: &kvm_dtable) -> Table {
    Table {
        base: table.base,
        limit: table.limit,
    }
}

/// Carries out `KVM_GET_SREGS`. `apic_base` is an argument because it is not part of `state`.
pub fn get_sregs(state: &State, apic_base: u64) -> kvm_sregs {
    let mut sregs = kvm_sregs {
        cs: segment(&state.cs),
        ds: segment(&state.ds),
        es: segment(&state.es),
        fs: segment(&state.fs),
        gs: segment(&state.gs),
        ss: segment(&state.ss),
        tr: segment(&state.tr),
        ldt: segment(&state.ldtr),
        gdt: table(&state.gdtr),
        idt: table(&state.idtr),
        cr0: state.cr0,
        cr2: state.cr2,
        cr3: state.cr3,
        cr4: state.cr4,
        cr8: state.cr8,
        efer: state.efer,
        apic_base,
        interrupt_bitmap: [0; 4],
    };
    if let Some(vector) = state.events.interrupt {
        sregs.interrupt_bitmap[usize::from(vector / 64)] |= 1 << (vector % 64);
    }
    sregs
}

/// Returns the CR4 bits of features that slat offers.
fn cr4_bits() -> u64 {
    let keys = match pkru_offset() {
        Some(_) => control::CR4_PKE,
        None => 0,
    };
    keys | 0x7ff
        | control::CR4_UMIP
        | control::CR4_FSGSBASE
        | control::CR4_PCIDE
        | control::CR4_OSXSAVE
        | control::CR4_SMEP
        | control::CR4_SMAP
}

/// Checks the special registers for a CPU with `features`, as KVM does before it sets them.
fn check_sregs(sregs: &kvm_sregs, features: &Features) -> Result<()> {
    let long = sregs.efer & control::EFER_LME != 0 && sregs.cr0 & control::CR0_PG != 0;
    if long {
        // 64-bit mode needs PAE, LMA, and a CR3 within the physical address width.
        if sregs.cr4 & control::CR4_PAE == 0
            || sregs.efer & control::EFER_LMA == 0
            || sregs.cr3 >> features.physical_bits() != 0
        {
            return fail(libc::EINVAL);
        }
    } else if sregs.efer & control::EFER_LMA != 0 || sregs.cs.l != 0 {
        return fail(libc::EINVAL);
    }
    if sregs.cr4 & !(cr4_bits() & features.cr4()) != 0 || sregs.efer & !features.efer() != 0 {
        return fail(libc::EINVAL);
    }
    if sregs.cr0 >> 32 != 0
        || sregs.cr0 & (control::CR0_PG | control::CR0_PE) == control::CR0_PG
        || sregs.cr0 & (control::CR0_NW | control::CR0_CD) == control::CR0_NW
    {
        return fail(libc::EINVAL);
    }
    Ok(())
}

/// Carries out `KVM_SET_SREGS`, except for `apic_base`, for a CPU with `features`. As in KVM, if `sregs` has no
/// interrupt, an interrupt that is being delivered stays.
///
/// # Errors
/// `EINVAL` for control registers that no CPU with these features can have.
pub fn set_sregs(state: &mut State, sregs: &kvm_sregs, features: &Features) -> Result<()> {
    check_sregs(sregs, features)?;
    state.cs = from_segment(&sregs.cs);
    state.ds = from_segment(&sregs.ds);
    state.es = from_segment(&sregs.es);
    state.fs = from_segment(&sregs.fs);
    state.gs = from_segment(&sregs.gs);
    state.ss = from_segment(&sregs.ss);
    state.tr = from_segment(&sregs.tr);
    state.ldtr = from_segment(&sregs.ldt);
    state.gdtr = from_table(&sregs.gdt);
    state.idtr = from_table(&sregs.idt);
    state.cr0 = sregs.cr0;
    state.cr2 = sregs.cr2;
    state.cr3 = sregs.cr3;
    state.cr4 = sregs.cr4;
    // As in KVM, a value above 15, which CR8 cannot have, has no effect.
    if sregs.cr8 <= 15 {
        state.cr8 = sregs.cr8;
    }
    state.efer = sregs.efer;
    let queued = sregs
        .interrupt_bitmap
        .iter()
        .enumerate()
        .find(|(_, word)| **word != 0);
    if let Some((index, word)) = queued {
        state.events.interrupt = Some((index as u32 * 64 + word.trailing_zeros()) as u8);
    }
    Ok(())
}

same_fields!(
    kvm_sregs,
    kvm_sregs2,
    to_sregs2,
    to_sregs {
        cs,
        ds,
        es,
        fs,
        gs,
        ss,
        tr,
        ldt,
        gdt,
        idt,
        cr0,
        cr2,
        cr3,
        cr4,
        cr8,
        efer,
        apic_base,
    }..Default::default()
);

/// Carries out `KVM_GET_SREGS2`: like [`get_sregs`], but with PDPTEs in place of the interrupt bitmap, if PAE paging is
/// in use.
pub fn get_sregs2(state: &State, apic_base: u64) -> kvm_sregs2 {
    let mut sregs = to_sregs2(&get_sregs(state, apic_base));
    if uses_pae_paging(state) {
        sregs.flags = KVM_SREGS2_FLAGS_PDPTRS_VALID.into();
        sregs.pdptrs = state.pdptes;
    }
    sregs
}

/// Splits `kvm_sregs2` into the arguments of [`set_sregs`] and the PDPTEs, if the struct has PDPTEs.
///
/// # Errors
/// `EINVAL` for unknown flags, and for PDPTEs without PAE paging.
pub fn from_sregs2(sregs: &kvm_sregs2) -> Result<(kvm_sregs, Option<[u64; 4]>)> {
    let valid = sregs.flags & u64::from(KVM_SREGS2_FLAGS_PDPTRS_VALID) != 0;
    let unknown = sregs.flags & !u64::from(KVM_SREGS2_FLAGS_PDPTRS_VALID) != 0;
    if unknown || valid && !is_pae_paging(sregs.cr0, sregs.cr4, sregs.efer) {
        return fail(libc::EINVAL);
    }
    Ok((to_sregs(sregs), valid.then_some(sregs.pdptrs)))
}

/// `KVM_SREGS2_FLAGS_PDPTRS_VALID`.
const KVM_SREGS2_FLAGS_PDPTRS_VALID: u32 = 1;

/// Carries out `KVM_GET_DEBUGREGS`.
pub fn get_debugregs(state: &State) -> kvm_debugregs {
    kvm_debugregs {
        db: state.dr,
        dr6: state.dr6,
        dr7: state.dr7,
        ..Default::default()
    }
}

/// Carries out `KVM_SET_DEBUGREGS`.
///
/// # Errors
/// `EINVAL` for flags and for reserved bits.
pub fn set_debugregs(state: &mut State, regs: &kvm_debugregs) -> Result<()> {
    if regs.flags != 0 || regs.dr6 >> 32 != 0 || regs.dr7 >> 32 != 0 {
        return fail(libc::EINVAL);
    }
    state.dr = regs.db;
    state.dr6 = regs.dr6;
    state.dr7 = regs.dr7;
    Ok(())
}

/// Carries out `KVM_GET_XCRS`.
pub fn get_xcrs(state: &State) -> kvm_xcrs {
    let mut xcrs = kvm_xcrs {
        nr_xcrs: 1,
        ..Default::default()
    };
    xcrs.xcrs[0].value = state.xcr0;
    xcrs
}

/// Carries out `KVM_SET_XCRS`: sets XCR0 to the first value that `xcrs` has for it. The CPU has no other extended
/// control register.
///
/// # Errors
/// `EINVAL` for too many registers, flags, and states that the guest's CPUID does not have.
pub fn set_xcrs(state: &mut State, xcrs: &kvm_xcrs, features: &Features) -> Result<()> {
    if xcrs.nr_xcrs as usize > xcrs.xcrs.len() || xcrs.flags != 0 {
        return fail(libc::EINVAL);
    }
    let given = &xcrs.xcrs[..xcrs.nr_xcrs as usize];
    if let Some(xcr) = given.iter().find(|xcr| xcr.xcr == 0) {
        if !xcr0::is_valid(xcr.value, features.xcr0()) {
            return fail(libc::EINVAL);
        }
        state.xcr0 = xcr.value;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_come_back_as_they_were_set() {
        let mut state = State::reset();
        let regs = kvm_regs {
            rax: 1,
            rbx: 2,
            rcx: 3,
            rdx: 4,
            rsi: 5,
            rdi: 6,
            rsp: 7,
            rbp: 8,
            r15: 9,
            rip: 10,
            rflags: 0x202,
            ..Default::default()
        };
        set_regs(&mut state, &regs);
        assert_eq!(get_regs(&state), regs);
    }

    /// KVM_GET_SREGS returns CR0.ET as the client has set it, although a processor always has this bit set.
    #[test]
    fn cr0_comes_back_without_et_as_it_was_set() {
        let mut state = State::reset();
        let mut sregs = get_sregs(&state, 0);
        sregs.cr0 = control::CR0_PE;
        set_sregs(&mut state, &sregs, &Features::all()).unwrap();
        assert_eq!(get_sregs(&state, 0).cr0, control::CR0_PE);
    }

    #[test]
    fn segments_come_back_as_they_were_set() {
        let mut state = State::reset();
        let mut sregs = get_sregs(&state, 0);
        sregs.cs = kvm_segment {
            selector: 8,
            limit: u32::MAX,
            type_: 11,
            present: 1,
            s: 1,
            l: 1,
            g: 1,
            ..Default::default()
        };
        sregs.ldt = kvm_segment {
            unusable: 1,
            ..Default::default()
        };
        sregs.efer = 0x500;
        sregs.cr4 = 0x20;
        sregs.cr0 = 0x8000_0011;
        sregs.interrupt_bitmap[1] = 4;
        set_sregs(&mut state, &sregs, &Features::all()).unwrap();
        assert_eq!(state.events.interrupt, Some(66));
        assert_eq!(get_sregs(&state, 0), sregs);
    }

    #[test]
    fn impossible_control_registers_are_refused() {
        let mut state = State::reset();
        let mut sregs = get_sregs(&state, 0);
        let mut errno = |sregs: &kvm_sregs, features: &Features| {
            let result = set_sregs(&mut state, sregs, features);
            result.map_err(|error| error.errno())
        };
        sregs.cr0 = 0x8000_0000;
        assert_eq!(errno(&sregs, &Features::all()), Err(libc::EINVAL));
        sregs.cr0 = 0x8000_0001;
        sregs.efer = 0x500;
        let without_pae = errno(&sregs, &Features::all());
        assert_eq!(without_pae, Err(libc::EINVAL));
        sregs.cr4 = 0x20;
        assert_eq!(errno(&sregs, &Features::all()), Ok(()));
        let without_cpuid = errno(&sregs, &Features::from_cpuid(|_, _| [0; 4]));
        assert_eq!(without_cpuid, Err(libc::EINVAL));
    }
}
