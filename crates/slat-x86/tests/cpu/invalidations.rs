//! Tests which instructions that invalidate translations are reported to the machine.

use crate::common::*;
use slat_x86::GuestFlush::{All, Page};
use slat_x86::state::control;
use slat_x86::*;

/// Calls `change` to change some registers, and runs `code` and a HLT. Returns the reports that the machine got.
fn told(code: &[u8], change: impl FnOnce(&mut State)) -> Vec<GuestFlush> {
    let mut guest = Guest::new(&[code, b"\xf4"].concat());
    change(&mut guest.cpu.state);
    guest.halt();
    guest.machine.flushes
}

fn with_pcids(state: &mut State) {
    state.cr4 |= control::CR4_PCIDE;
}

#[test]
fn mov_to_cr3_invalidates_all_unless_its_operand_says_no() {
    // mov cr3,rax
    let code = b"\x0f\x22\xd8";
    for cr3 in [0, 0x1000] {
        assert_eq!(told(code, |state| state.gpr[RAX] = cr3), [All]);
        let other_pcid = |state: &mut State| {
            with_pcids(state);
            state.gpr[RAX] = cr3 | 5;
        };
        assert_eq!(told(code, other_pcid), [All]);
        let keeps = |state: &mut State| {
            with_pcids(state);
            state.gpr[RAX] = cr3 | 5 | 1 << 63;
        };
        assert_eq!(told(code, keeps), []);
    }
    let reserved = |state: &mut State| state.gpr[RAX] = 1 << 63;
    assert_eq!(told(code, reserved), [], "#GP");
}

#[test]
fn a_cr3_that_keeps_translations_still_changes_the_cpus() {
    // mov rbx,[rsi]; mov cr3,rax; mov rcx,[rsi]
    let mut guest = Guest::new(b"\x48\x8b\x1e\x0f\x22\xd8\x48\x8b\x0e\xf4");
    guest.memory().write64(DATA, 1);
    guest.memory().write64(DATA + 0x1000, 2);
    let spaces = &mut guest.machine.spaces;
    spaces.insert((0x1005, DATA >> 12), (DATA >> 12) + 1);
    with_pcids(&mut guest.cpu.state);
    guest.cpu.state.gpr[RAX] = 0x1005 | 1 << 63;
    guest.cpu.state.gpr[RSI] = DATA;
    guest.halt();
    let gpr = guest.cpu.state.gpr;
    assert_eq!((gpr[RBX], gpr[RCX]), (1, 2));
    assert_eq!(guest.cpu.state.cr3, 0x1005);
    assert_eq!(guest.machine.flushes, []);
}

#[test]
fn changes_of_control_bits_invalidate_all() {
    // mov rax,cr4; xor rax,rbx; mov cr4,rax
    let cr4 = b"\x0f\x20\xe0\x48\x31\xd8\x0f\x22\xe0";
    for bit in [
        control::CR4_PGE,
        control::CR4_PSE,
        control::CR4_SMEP,
        control::CR4_PCIDE,
    ] {
        assert_eq!(told(cr4, |state| state.gpr[RBX] = bit), [All], "{bit:#x}");
        let clear = |state: &mut State| {
            state.cr4 |= bit;
            state.gpr[RBX] = bit;
        };
        assert_eq!(told(cr4, clear), [All], "{bit:#x}");
    }
    assert_eq!(told(cr4, |state| state.gpr[RBX] = 0), []);

    // mov rax,cr0; xor rax,rbx; mov cr0,rax
    let cr0 = b"\x0f\x20\xc0\x48\x31\xd8\x0f\x22\xc0";
    assert_eq!(told(cr0, |state| state.gpr[RBX] = control::CR0_WP), [All]);
    assert_eq!(told(cr0, |state| state.gpr[RBX] = 0), []);

    // rdmsr; xor eax,ebx; wrmsr
    let efer = b"\x0f\x32\x31\xd8\x0f\x30";
    for (change, expected) in [(control::EFER_NXE, &[All][..]), (0, &[])] {
        let flushes = told(efer, |state| {
            (state.gpr[RCX], state.gpr[RBX]) = (0xc000_0080, change);
        });
        assert_eq!(flushes, expected);
    }
}

#[test]
fn paging_that_is_turned_off_and_on_invalidates_all() {
    // mov eax,cr0; btc eax,31; mov cr0,eax; executed twice
    let flip = b"\x0f\x20\xc0\x0f\xba\xf8\x1f\x0f\x22\xc0";
    let flushes = told(&[&flip[..], flip].concat(), |state| {
        state.efer = 0;
        state.cs.rights = 0xc09b;
        state.cr4 &= !control::CR4_PAE;
    });
    assert_eq!(flushes, [All, All]);
}

#[test]
fn invlpg_invalidates_its_page() {
    // invlpg [rsi]
    let code = b"\x0f\x01\x3e";
    let at = |lin| move |state: &mut State| state.gpr[RSI] = lin;
    assert_eq!(told(code, at(DATA + 5)), [Page(DATA + 5)]);
    let top = 0xffff_8000_0000_0000;
    assert_eq!(told(code, at(top)), [Page(top)]);
    assert_eq!(told(code, at(1 << 50)), [], "not canonical: does nothing");
    // invlpg gs:[rsi]
    let flushes = told(b"\x65\x0f\x01\x3e", |state| {
        (state.gs.base, state.gpr[RSI]) = (0x10_0000, 0x234);
    });
    assert_eq!(flushes, [Page(0x10_0234)]);
    // In 32-bit code addresses wrap around.
    let flushes = told(b"\x65\x0f\x01\x3e", |state| {
        state.cs.rights = 0xc09b;
        (state.gs.base, state.gpr[RSI]) = (0xffff_f000, 0x2000);
    });
    assert_eq!(flushes, [Page(0x1000)]);
}

#[test]
fn invpcid_invalidates_a_page_of_the_current_pcid_or_all() {
    let (current, other) = (0x1000 | 5, 6);
    for (pcids, kind, pcid, expected) in [
        (false, 0, 0, Page(DATA)),
        (true, 0, current & 0xfff, Page(DATA)),
        (true, 0, other, All),
        (true, 1, current & 0xfff, All),
        (true, 1, other, All),
        (true, 2, 0, All),
        (true, 3, 0, All),
    ] {
        // invpcid rax,[rsi]
        let mut guest = Guest::new(b"\x66\x0f\x38\x82\x06\xf4");
        guest.memory().write64(DATA, pcid);
        guest.memory().write64(DATA + 8, DATA);
        let state = &mut guest.cpu.state;
        if pcids {
            with_pcids(state);
            state.cr3 = current;
        }
        (state.gpr[RAX], state.gpr[RSI]) = (kind, DATA);
        guest.halt();
        let name = format!("type {kind} of {pcid}");
        assert_eq!(guest.machine.flushes, [expected], "{name}");
    }
    // Without PCIDs, INVPCID of type 0 with another PCID than 0 raises #GP.
    let mut guest = Guest::new(b"\x66\x0f\x38\x82\x06\xf4");
    guest.memory().write64(DATA, 1);
    guest.cpu.state.gpr[RAX] = 0;
    guest.cpu.state.gpr[RSI] = DATA;
    guest.halt_in_handler(vector::GP);
    assert_eq!(guest.machine.flushes, []);
}

#[test]
fn other_instructions_and_the_client_invalidate_nothing() {
    // wrpkru; stac; clac; swapgs; mov dr7,rdx; int 0x80
    let code = b"\x0f\x01\xef\x0f\x01\xcb\x0f\x01\xca\x0f\x01\xf8\x0f\x23\xfa\xcd\x80\xf4";
    let mut guest = Guest::new(code);
    let state = &mut guest.cpu.state;
    state.cr4 |= control::CR4_PKE;
    state.gpr[RDX] = 0;
    guest.halt_in_handler(0x80);
    guest.cpu.state.cr3 = 0x1000;
    guest.cpu.state.cr4 |= control::CR4_PGE;
    guest.cpu.flush_tlb();
    guest.cpu.state.rip = CODE + 17;
    guest.halt();
    assert_eq!(guest.machine.flushes, []);
}

/// The linear pages whose translations are tested: one with data, one with code. They were mapped to
/// [`OLD`], then to [`NEW`].
const PAGES: [u64; 2] = [DATA, DATA + 0x1000];
const OLD: [u64; 2] = [0x3_0000, 0x3_1000];
const NEW: [u64; 2] = [0x3_2000, 0x3_3000];
/// The descriptor of INVPCID.
const DESCRIPTOR: u64 = 0x3_4000;
/// The address of the instructions under test.
const TESTED: u64 = CODE + 0x1000;

/// A guest that has used two translations which its tables no longer have.
struct Stale(Guest);

/// Whether the guest still uses the old translations, of data and of code.
#[derive(Debug, PartialEq, Eq)]
struct Uses {
    data: bool,
    code: bool,
}

const KEPT: Uses = Uses {
    data: true,
    code: true,
};
const DROPPED: Uses = Uses {
    data: false,
    code: false,
};

impl Stale {
    fn new(change: impl FnOnce(&mut Guest)) -> Self {
        // mov rbx,[rsi]; call rdi; hlt
        let mut guest = Guest::new(b"\x48\x8b\x1e\xff\xd7\xf4");
        for (pages, n) in [(OLD, 1u8), (NEW, 2)] {
            guest.memory().write64(pages[0], n.into());
            // mov eax,n; ret
            guest.memory().write(pages[1], &[0xb8, n, 0, 0, 0, 0xc3]);
        }
        with_pcids(&mut guest.cpu.state);
        guest.cpu.state.cr4 |= control::CR4_PGE;
        guest.cpu.state.cr3 = 0x1005;
        change(&mut guest);
        let mut this = Self(guest);
        this.map(OLD);
        assert_eq!(this.uses(), KEPT);
        this.map(NEW);
        this
    }

    fn global() -> Self {
        Self::new(|guest| guest.machine.globals.extend(PAGES.map(|page| page >> 12)))
    }

    fn map(&mut self, to: [u64; 2]) {
        for (page, to) in PAGES.into_iter().zip(to) {
            self.0.machine.moved.insert(page >> 12, to >> 12);
        }
    }

    fn uses(&mut self) -> Uses {
        let state = &mut self.0.cpu.state;
        state.rip = CODE;
        (state.gpr[RSI], state.gpr[RDI]) = (PAGES[0], PAGES[1]);
        self.0.halt();
        let gpr = self.0.cpu.state.gpr;
        Uses {
            data: gpr[RBX] == 1,
            code: gpr[RAX] & 0xff == 1,
        }
    }

    /// Executes an instruction with these values of RAX and RSI.
    fn execute(mut self, code: &[u8], rax: u64, rsi: u64) -> Self {
        self.0.memory().write(TESTED, &[code, b"\xf4"].concat());
        let state = &mut self.0.cpu.state;
        state.rip = TESTED;
        (state.gpr[RAX], state.gpr[RSI]) = (rax, rsi);
        self.0.halt();
        self
    }

    /// Executes mov cr3,rax.
    fn load_cr3(self, cr3: u64) -> Self {
        self.execute(b"\x0f\x22\xd8", cr3, 0)
    }

    /// Executes mov cr4,rax.
    fn flip_cr4(self, bits: u64) -> Self {
        let cr4 = self.0.cpu.state.cr4 ^ bits;
        self.execute(b"\x0f\x22\xe0", cr4, 0)
    }

    /// Executes invlpg [rsi] for both pages.
    fn invlpg(self, pages: [u64; 2]) -> Self {
        let code = b"\x0f\x01\x3e";
        self.execute(code, 0, pages[0]).execute(code, 0, pages[1])
    }

    /// Executes invpcid rax,[rsi] for both pages.
    fn invpcid(mut self, kind: u64, pcid: u64) -> Self {
        for page in PAGES {
            self.0.memory().write64(DESCRIPTOR, pcid);
            self.0.memory().write64(DESCRIPTOR + 8, page);
            self = self.execute(b"\x66\x0f\x38\x82\x06", kind, DESCRIPTOR);
        }
        self
    }
}

/// Bit 63 of the operand of MOV to CR3: the instruction keeps the translations.
const NOFLUSH: u64 = 1 << 63;

#[test]
fn nothing_is_dropped_without_need() {
    assert_eq!(Stale::new(|_| {}).uses(), KEPT);
    // INVLPG of another page than these two.
    assert_eq!(Stale::new(|_| {}).invlpg([DATA + 0x2000; 2]).uses(), KEPT);
    // mov cr0,rax, which changes only TS.
    let stale = Stale::new(|_| {});
    let cr0 = stale.0.cpu.state.cr0 ^ control::CR0_TS;
    assert_eq!(stale.execute(b"\x0f\x22\xc0", cr0, 0).uses(), KEPT);
}

#[test]
fn mov_to_cr3_drops_its_pcid_but_keeps_global_pages() {
    let no_pcids = |guest: &mut Guest| {
        guest.cpu.state.cr4 &= !control::CR4_PCIDE;
        guest.cpu.state.cr3 = 0x1000;
    };
    for cr3 in [0x1000, 0x2000] {
        assert_eq!(Stale::new(no_pcids).load_cr3(cr3).uses(), DROPPED);
    }
    let global = |guest: &mut Guest| {
        no_pcids(guest);
        guest.machine.globals.extend(PAGES.map(|page| page >> 12));
    };
    assert_eq!(Stale::new(global).load_cr3(0x2000).uses(), KEPT);
    let not_enabled = |guest: &mut Guest| {
        global(guest);
        guest.cpu.state.cr4 &= !control::CR4_PGE;
    };
    assert_eq!(Stale::new(not_enabled).load_cr3(0x2000).uses(), DROPPED);

    assert_eq!(Stale::new(|_| {}).load_cr3(0x1005).uses(), DROPPED);
    assert_eq!(Stale::new(|_| {}).load_cr3(0x1005 | NOFLUSH).uses(), KEPT);
    assert_eq!(Stale::global().load_cr3(0x1005).uses(), KEPT);
    assert_eq!(Stale::global().load_cr3(0x2006).uses(), KEPT);
}

#[test]
fn a_switch_of_pcids_drops_the_new_ones_translations_only() {
    for noflush in [0, NOFLUSH] {
        // Translations of another PCID are not used.
        let mut stale = Stale::new(|_| {}).load_cr3(0x1006 | noflush);
        assert_eq!(stale.uses(), DROPPED);
        // The first PCID's translations are used again after the return, unless the return drops them.
        assert_eq!(stale.load_cr3(0x1005 | NOFLUSH).uses(), KEPT);
    }
    let stale = Stale::new(|_| {}).load_cr3(0x1006);
    assert_eq!(stale.load_cr3(0x1005).uses(), DROPPED);
}

#[test]
fn changes_of_control_bits_drop_global_pages() {
    for bit in [control::CR4_PGE, control::CR4_SMEP, control::CR4_PCIDE] {
        let base = |guest: &mut Guest| {
            guest.machine.globals.extend(PAGES.map(|page| page >> 12));
            guest.cpu.state.cr3 = 0x1000;
        };
        let mut stale = Stale::new(base).flip_cr4(bit);
        assert_eq!(stale.uses(), DROPPED, "{bit:#x}");
    }
}

#[test]
fn invlpg_drops_the_page_even_if_global() {
    assert_eq!(Stale::new(|_| {}).invlpg(PAGES).uses(), DROPPED);
    assert_eq!(Stale::global().invlpg(PAGES).uses(), DROPPED);
    let stale = Stale::global().load_cr3(0x1006).invlpg(PAGES);
    assert_eq!(stale.load_cr3(0x1005 | NOFLUSH).uses(), DROPPED);
    // INVLPG does not drop the translation of another PCID.
    let stale = Stale::new(|_| {}).load_cr3(0x1006).invlpg(PAGES);
    assert_eq!(stale.load_cr3(0x1005 | NOFLUSH).uses(), KEPT);
}

#[test]
fn invlpg_drops_all_of_a_large_page() {
    for (bits, other, uses) in [
        (21, 0x1f_f000, DROPPED),
        (21, 0x20_0000, KEPT),
        (22, 0x20_0000, DROPPED),
        (22, 0x40_0000, KEPT),
        (30, 0x3fff_f000, DROPPED),
        (30, 0x4000_0000, KEPT),
    ] {
        let mut stale = Stale::new(|guest| guest.machine.page_bits = bits);
        stale.0.machine.page_bits = 12;
        assert_eq!(stale.invlpg([other; 2]).uses(), uses, "{bits} {other:#x}");
    }
}

#[test]
fn invpcid_drops_what_its_type_says() {
    for (kind, pcid, global, uses) in [
        (0, 5, false, DROPPED),
        (0, 5, true, KEPT),
        (0, 6, false, KEPT),
        (1, 5, false, DROPPED),
        (1, 5, true, KEPT),
        (1, 6, false, KEPT),
        (2, 0, false, DROPPED),
        (2, 0, true, DROPPED),
        (3, 0, false, DROPPED),
        (3, 0, true, KEPT),
    ] {
        let name = format!("type {kind} of {pcid}, global: {global}");
        let stale = || match global {
            true => Stale::global(),
            false => Stale::new(|_| {}),
        };
        // INVPCID of type 0 may drop a global translation, too, as a processor may drop more than it must.
        let may_go = kind == 0 && global;
        let used = stale().invpcid(kind, pcid).uses();
        assert!(
            used == uses || may_go && used == DROPPED,
            "{name}: {used:?}"
        );
        // INVPCID while another address space is current.
        let used = stale().load_cr3(0x1007).invpcid(kind, pcid);
        let used = used.load_cr3(0x1005 | NOFLUSH).uses();
        assert!(
            used == uses || may_go && used == DROPPED,
            "{name}: {used:?}"
        );
    }
}

#[test]
fn a_flush_of_the_host_drops_everything() {
    for mut stale in [Stale::new(|_| {}), Stale::global()] {
        stale.0.cpu.flush_tlb();
        assert_eq!(stale.uses(), DROPPED);
    }
    let mut stale = Stale::new(|_| {}).load_cr3(0x1006);
    stale.0.cpu.flush_tlb();
    assert_eq!(stale.load_cr3(0x1005 | NOFLUSH).uses(), DROPPED);
}

#[test]
fn a_page_fault_drops_the_page() {
    let mut stale = Stale::new(|_| {});
    stale.0.machine.read_only(PAGES[0]);
    stale.0.machine.read_only(PAGES[1]);
    stale.0.cpu.state.cr0 |= control::CR0_WP;
    // The pages are read-only from now on.
    stale = stale.invlpg(PAGES);
    stale.map(OLD);
    assert_eq!(stale.uses(), KEPT);
    stale.map(NEW);
    for page in PAGES {
        // mov [rsi],rax
        let state = &mut stale.0.cpu.state;
        let code = b"\x48\x89\x06\xf4";
        (state.rip, state.gpr[RSI], state.gpr[RSP]) = (TESTED, page, STACK);
        stale.0.memory().write(TESTED, code);
        stale.0.halt_in_handler(vector::PF);
    }
    assert_eq!(stale.uses(), DROPPED);
}
